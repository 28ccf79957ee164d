"""Measure the demo models: ``python -m demo.check [--problems 500] [--pairs 2000]``. Prints a table and one JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.utils.logging import disable_progress_bar

from demo.judge_pairs import pairs
from demo.problems import DELIMITER, Problem, Split, check_answer, problems, same_meaning
from demo.tokenizer import END_THINK, TURN_END, chat, load_tokenizer
from lr_backend.verify.judge_prompt import JudgePrompt, parse_verdict

CHECKPOINTS = Path(__file__).parent / "checkpoints"
CHAIN_TOKENS = 600
STEP_TOKENS = 100
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Model:
    """A checkpoint and its tokenizer."""

    network: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, directory: Path) -> Model:
        """The checkpoint in ``directory``, computing in fp32."""
        network = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return cls(network.eval(), load_tokenizer(directory))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))


@dataclass(frozen=True)
class Share:
    """``hits`` out of ``total``."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / max(1, self.total)

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Wilson's 95 % confidence interval."""
        n = max(1, self.total)
        centre = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        reach = z * sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return centre - reach, centre + reach


class _StopAt(StoppingCriteria):  # type: ignore[misc]
    """Ends a row once its last token is marked in ``ends``, (vocabulary,) of bool."""

    def __init__(self, ends: Tensor) -> None:
        self.ends = ends

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return self.ends[input_ids[:, -1]]


def end_tokens(model: Model, at_steps: bool) -> Tensor:
    """(vocabulary,) of bool: the tokens that end a turn and, with ``at_steps``, those that end a step."""
    marks = (TURN_END, DELIMITER, END_THINK) if at_steps else (TURN_END,)
    texts = (model.decode([token]) for token in range(len(model.tokenizer)))
    ends = torch.zeros(model.network.config.vocab_size, dtype=torch.bool)
    ends[: len(model.tokenizer)] = torch.tensor([any(mark in text for mark in marks) for text in texts])
    return ends


def generate_batch(
    model: Model, prompts: Sequence[Sequence[int]], ends: Tensor, max_new_tokens: int, temperature: float
) -> list[list[int]]:
    """Continue each prompt up to and including its first token marked in ``ends``; greedy at temperature 0."""
    pad = model.tokenizer.pad_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling = {"temperature": temperature, "top_p": 0.95, "top_k": 20} if temperature else {}
    plain = {} if temperature else {"temperature": None, "top_p": None, "top_k": None}
    output = model.network.generate(
        ids,
        attention_mask=seen,
        do_sample=bool(temperature),
        max_new_tokens=max_new_tokens,
        stopping_criteria=StoppingCriteriaList([_StopAt(ends)]),
        **sampling,
        **plain,
    )
    return [_cut(row, ends) for row in output[:, width:].tolist()]


def _cut(ids: list[int], ends: Tensor) -> list[int]:
    """``ids`` up to and including the first end token."""
    at = next((i for i, token in enumerate(ids) if ends[token]), len(ids) - 1)
    return ids[: at + 1]


def generate_all(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    at_steps: bool,
    max_new_tokens: int,
    temperature: float,
    batch: int,
) -> list[list[int]]:
    """``generate_batch`` over any number of prompts, similar lengths together, answers in the order given."""
    ends = end_tokens(model, at_steps)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        made = generate_batch(model, [prompts[i] for i in chosen], ends, max_new_tokens, temperature)
        for i, ids in zip(chosen, made, strict=True):
            answers[i] = ids
    return answers


def solve(model: Model, tasks: Sequence[Problem], temperature: float, batch: int) -> list[list[int]]:
    """The token ids of the assistant turn for each problem."""
    prompts = [model.encode(chat(task.question)) for task in tasks]
    return generate_all(model, prompts, at_steps=False, max_new_tokens=CHAIN_TOKENS, temperature=temperature, batch=batch)


def right_answers(model: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]]) -> Share:
    """How many problems are answered right."""
    texts = [model.decode(chain) for chain in chains]
    return Share(sum(check_answer(task, text) for task, text in zip(tasks, texts, strict=True)), len(tasks))


def judge_all(judge: Model, steps: Sequence[tuple[str, str]], batch: int) -> list[bool | None]:
    """The judge's verdict on each (target step, drafted step)."""
    prompt = JudgePrompt.from_tokenizer(judge.tokenizer)
    prompts = [prompt.ids(first, second) for first, second in steps]
    made = generate_all(judge, prompts, at_steps=False, max_new_tokens=1, temperature=0.0, batch=batch)
    return [parse_verdict(judge.decode(ids)) for ids in made]


@dataclass(frozen=True)
class JudgeFigures:
    """Agreement of judge and checker."""

    agree: Share
    aligned_accepted: Share
    changed_accepted: Share


def judge_figures(judge: Model, count: int, batch: int, seed: int) -> JudgeFigures:
    """The judge on ``count`` unseen pairs: half in other words, half with one field changed."""
    tested = list(islice(pairs(seed, "test", stray_rate=0.0), count))
    verdicts = [v is True for v in judge_all(judge, [(pair.first, pair.second) for pair in tested], batch)]
    aligned = [v for pair, v in zip(tested, verdicts, strict=True) if pair.aligned]
    changed = [v for pair, v in zip(tested, verdicts, strict=True) if not pair.aligned]
    return JudgeFigures(
        Share(sum(aligned) + len(changed) - sum(changed), count),
        Share(sum(aligned), len(aligned)),
        Share(sum(changed), len(changed)),
    )


def step_prefixes(
    model: Model, prompt: Sequence[int], chain: Sequence[int], ends: Tensor
) -> Iterator[tuple[list[int], list[int]]]:
    """(prefix, the target's step after it) for each reasoning step of a chain; ``ends`` marks what ends a step."""
    opening = len(model.encode("<think>\n"))
    start = opening
    for i, token in enumerate(chain):
        if i >= opening and ends[token]:
            yield [*prompt, *chain[:start]], list(chain[start : i + 1])
            start = i + 1
            if END_THINK in model.decode([token]):
                return


@dataclass(frozen=True)
class AcceptanceFigures:
    """What becomes of the draft's steps beside the target's at the same prefix. ``wrongly_accepted`` is the share of the
    judge's acceptances that the checker would not have given."""

    judge: Share
    checker: Share
    identical: Share
    wrongly_accepted: Share


def _ends_thinking(text: str) -> bool:
    return END_THINK in text


def _bare(text: str) -> str:
    return text.replace(END_THINK, "").strip()


def acceptance_figures(
    target: Model, draft: Model, judge: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]], batch: int
) -> AcceptanceFigures:
    """Sample the draft's step at every step prefix of the target's chains, and compare."""
    ends = end_tokens(target, at_steps=True)
    cases = [
        case
        for task, chain in zip(tasks, chains, strict=True)
        for case in step_prefixes(target, target.encode(chat(task.question)), chain, ends)
    ]
    drafted = generate_all(
        draft,
        [prefix for prefix, _ in cases],
        at_steps=True,
        max_new_tokens=STEP_TOKENS,
        temperature=TEMPERATURE,
        batch=batch,
    )
    texts = [(target.decode(step), draft.decode(ids)) for (_, step), ids in zip(cases, drafted, strict=True)]
    bare = [(_bare(first), _bare(second)) for first, second in texts]
    same_end = [_ends_thinking(first) == _ends_thinking(second) for first, second in texts]
    identical = [first == second for first, second in texts]
    checker = [end and same_meaning(*pair) for end, pair in zip(same_end, bare, strict=True)]
    verdicts = judge_all(judge, bare, batch)
    judged = [i or (e and v is True) for i, e, v in zip(identical, same_end, verdicts, strict=True)]
    wrong = [j and not c for j, c in zip(judged, checker, strict=True)]
    n = len(cases)
    return AcceptanceFigures(
        Share(sum(judged), n),
        Share(sum(checker), n),
        Share(sum(identical), n),
        Share(sum(wrong), sum(judged)),
    )


def report(console: Console, rows: Sequence[tuple[str, Share, str]], seconds: float) -> None:
    """Print the figures as a table and as one JSON line."""
    table = Table("figure", "measured", "95 % interval", "of", "wanted", title=f"demo models, {seconds:.0f} s")
    for name, share, wanted in rows:
        low, high = share.interval()
        table.add_row(name, f"{share.value:.1%}", f"{low:.1%} to {high:.1%}", str(share.total), wanted)
    console.print(table)
    line = {name: {**asdict(share), "share": round(share.value, 4)} for name, share, _ in rows}
    console.print(json.dumps(line), soft_wrap=True, highlight=False)


def main(
    problem_count: Annotated[int, typer.Option("--problems", help="Unseen problems to solve.")] = 500,
    pair_count: Annotated[int, typer.Option("--pairs", help="Unseen pairs to judge.")] = 2000,
    acceptance_count: Annotated[int, typer.Option("--acceptance", help="Problems whose steps are drafted.")] = 100,
    validation: Annotated[bool, typer.Option(help="Use the validation split, as during development.")] = False,
    batch: Annotated[int, typer.Option()] = 50,
    seed: Annotated[int, typer.Option()] = 1,
    threads: Annotated[int | None, typer.Option()] = None,
    checkpoints: Annotated[Path, typer.Option()] = CHECKPOINTS,
) -> None:
    """Measure target, draft and judge on problems that were never trained on."""
    if threads:
        torch.set_num_threads(threads)
    disable_progress_bar()
    torch.manual_seed(seed)
    started = time.monotonic()
    split: Split = "validation" if validation else "test"
    tasks = list(islice(problems(seed, split), problem_count))
    rows: list[tuple[str, Share, str]] = []
    models = {role: Model.load(checkpoints / role) for role in ("target", "draft", "judge") if _there(checkpoints, role)}
    chains: list[list[int]] = []
    for role, wanted in (("target", "at least 92 %"), ("draft", "30 to 70 %")):
        if model := models.get(role):
            rows.append((f"{role} right, greedy", right_answers(model, tasks, solve(model, tasks, 0.0, batch)), wanted))
            sampled = solve(model, tasks, TEMPERATURE, batch)
            rows.append((f"{role} right, T {TEMPERATURE}", right_answers(model, tasks, sampled), ""))
            chains = sampled if role == "target" else chains
    if judge := models.get("judge"):
        figures = judge_figures(judge, pair_count, batch, seed)
        rows.append(("judge agrees with checker", figures.agree, "at least 98 %"))
        rows.append(("judge accepts other words", figures.aligned_accepted, ""))
        rows.append(("judge accepts a changed field", figures.changed_accepted, ""))
    if len(models) == 3:
        n = acceptance_count
        met = acceptance_figures(models["target"], models["draft"], models["judge"], tasks[:n], chains[:n], batch)
        rows.append((f"steps accepted by judge, T {TEMPERATURE}", met.judge, "40 to 70 %"))
        rows.append((f"steps accepted by checker, T {TEMPERATURE}", met.checker, ""))
        rows.append((f"steps with identical text, T {TEMPERATURE}", met.identical, "rarer"))
        rows.append(("accepted by judge, not by checker", met.wrongly_accepted, ""))
    report(Console(width=110), rows, time.monotonic() - started)


def _there(checkpoints: Path, role: str) -> bool:
    return (checkpoints / role / "model.safetensors").exists()


if __name__ == "__main__":
    typer.run(main)
