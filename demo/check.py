"""Measure the demo models: ``python -m demo.check [--problems 500] [--pairs 2000]``. Prints a table and one JSON line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from demo.judge_pairs import pairs
from demo.problems import DELIMITER, Problem, Split, check_answer, problems, same_meaning
from demo.shares import Share
from demo.tokenizer import CONTEXT, END_THINK, TURN_END, chat, load_tokenizer
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.engine import GREEDY, Sampling
from lr_backend.engine.inprocess import run_all
from lr_backend.engine.request import EngineRequest, StopWords
from lr_backend.verify.judge_prompt import JudgePrompt, parse_verdict

CHECKPOINTS = Path(__file__).parent / "checkpoints"
CHAIN_TOKENS = 600
STEP_TOKENS = 100
TEMPERATURE = 0.6
BATCH = 32
MAX_QUEUE = 4096
DRAFT_SEED = 1 << 32
"""Far from the seeds of the target's samples: the two never share noise."""


@dataclass(frozen=True)
class Model:
    """A checkpoint on the embedded engine, and its tokenizer."""

    engine: EmbeddedEngine
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, directory: Path, threads: int, weight_dtype: str = "same") -> Model:
        """The checkpoint in ``directory``, computing in fp32; the rest as in :class:`EngineConfig`."""
        config = EngineConfig(
            directory,
            num_threads=threads,
            max_batch_size=BATCH,
            max_tokens_in_paged_kv_cache=BATCH * CONTEXT // 2,
            max_queue_size=MAX_QUEUE,
            max_seq_len=CONTEXT,
            weight_dtype=weight_dtype,
        )
        return cls(EmbeddedEngine(config), load_tokenizer(directory))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))


def end_tokens(model: Model, at_steps: bool) -> frozenset[int]:
    """The tokens that end a turn and, with ``at_steps``, those that end a step."""
    marks = (TURN_END, DELIMITER, END_THINK) if at_steps else (TURN_END,)
    texts = enumerate(map(model.decode, ([token] for token in range(len(model.tokenizer)))))
    return frozenset(token for token, text in texts if any(mark in text for mark in marks))


def generate_all(
    model: Model, prompts: Sequence[Sequence[int]], *, at_steps: bool, max_new_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Continue each prompt up to and including its first end token; greedy at temperature 0. Answers in the order given."""
    sampling = Sampling(temperature, top_k=20, top_p=0.95) if temperature else GREEDY
    stops = StopWords.of((token,) for token in end_tokens(model, at_steps))
    requests = [
        EngineRequest("", tuple(prompt), max_new_tokens, sampling, seed=seed + index, stop_words=stops)
        for index, prompt in enumerate(prompts)
    ]
    answers: list[list[int]] = []
    for start in range(0, len(requests), MAX_QUEUE):
        answers += [list(answer.token_ids) for answer in run_all(model.engine, requests[start : start + MAX_QUEUE])]
    return answers


def solve(model: Model, tasks: Sequence[Problem], temperature: float) -> list[list[int]]:
    """The token ids of the assistant turn for each problem."""
    prompts = [model.encode(chat(task.question)) for task in tasks]
    return generate_all(model, prompts, at_steps=False, max_new_tokens=CHAIN_TOKENS, temperature=temperature)


def right_answers(model: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]]) -> Share:
    """How many problems are answered right."""
    texts = [model.decode(chain) for chain in chains]
    return Share(sum(check_answer(task, text) for task, text in zip(tasks, texts, strict=True)), len(tasks))


def judge_all(judge: Model, steps: Sequence[tuple[str, str]]) -> list[bool | None]:
    """The judge's verdict on each (target step, drafted step)."""
    prompt = JudgePrompt.from_tokenizer(judge.tokenizer)
    prompts = [prompt.ids(first, second) for first, second in steps]
    made = generate_all(judge, prompts, at_steps=False, max_new_tokens=1, temperature=0.0)
    return [parse_verdict(judge.decode(ids)) for ids in made]


@dataclass(frozen=True)
class JudgeFigures:
    """Agreement of judge and checker."""

    agree: Share
    aligned_accepted: Share
    changed_accepted: Share


def judge_figures(judge: Model, count: int, seed: int) -> JudgeFigures:
    """The judge on ``count`` unseen pairs: half in other words, half with one field changed."""
    tested = list(islice(pairs(seed, "test", stray_rate=0.0), count))
    verdicts = [v is True for v in judge_all(judge, [(pair.first, pair.second) for pair in tested])]
    aligned = [v for pair, v in zip(tested, verdicts, strict=True) if pair.aligned]
    changed = [v for pair, v in zip(tested, verdicts, strict=True) if not pair.aligned]
    return JudgeFigures(
        Share(sum(aligned) + len(changed) - sum(changed), count),
        Share(sum(aligned), len(aligned)),
        Share(sum(changed), len(changed)),
    )


def step_prefixes(
    model: Model, prompt: Sequence[int], chain: Sequence[int], ends: frozenset[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """(prefix, the target's step after it) for each reasoning step of a chain; ``ends`` marks what ends a step."""
    opening = len(model.encode("<think>\n"))
    start = opening
    for i, token in enumerate(chain):
        if i >= opening and token in ends:
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


@dataclass(frozen=True)
class ComparedStep:
    """The target's step and the draft's after the same prefix; the texts without the end of the reasoning."""

    problem: int
    prefix: list[int]
    target_ids: list[int]
    drafted_ids: list[int]
    target_text: str
    drafted_text: str
    same_end: bool
    identical: bool

    @property
    def same(self) -> bool:
        """The checker's verdict."""
        return self.same_end and same_meaning(self.target_text, self.drafted_text)


def compared_steps(target: Model, draft: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]]) -> list[ComparedStep]:
    """Sample the draft's step at every step prefix of the target's chains."""
    ends = end_tokens(target, at_steps=True)
    cases = [
        (number, *case)
        for number, (task, chain) in enumerate(zip(tasks, chains, strict=True))
        for case in step_prefixes(target, target.encode(chat(task.question)), chain, ends)
    ]
    drafted = generate_all(
        draft,
        [prefix for _, prefix, _ in cases],
        at_steps=True,
        max_new_tokens=STEP_TOKENS,
        temperature=TEMPERATURE,
        seed=DRAFT_SEED,
    )
    steps = []
    for (number, prefix, step), ids in zip(cases, drafted, strict=True):
        first, second = target.decode(step), draft.decode(ids)
        ends_alike = _ends_thinking(first) == _ends_thinking(second)
        steps.append(ComparedStep(number, prefix, step, ids, _bare(first), _bare(second), ends_alike, first == second))
    return steps


def acceptance_figures(
    target: Model, draft: Model, judge: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]]
) -> AcceptanceFigures:
    """Sample the draft's step at every step prefix of the target's chains, and compare."""
    steps = compared_steps(target, draft, tasks, chains)
    verdicts = judge_all(judge, [(step.target_text, step.drafted_text) for step in steps])
    judged = [step.identical or (step.same_end and v is True) for step, v in zip(steps, verdicts, strict=True)]
    return AcceptanceFigures(
        Share.of((step.problem, j) for step, j in zip(steps, judged, strict=True)),
        Share.of((step.problem, step.same) for step in steps),
        Share.of((step.problem, step.identical) for step in steps),
        Share.of((step.problem, not step.same) for step, j in zip(steps, judged, strict=True) if j),
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
    seed: Annotated[int, typer.Option()] = 1,
    threads: Annotated[int, typer.Option(help="torch threads")] = os.cpu_count() or 1,
    checkpoints: Annotated[Path, typer.Option()] = CHECKPOINTS,
    weight_dtype: Annotated[str, typer.Option(help="same, float16, bfloat16, int8 or auto: how weights are held")] = "same",
) -> None:
    """Measure target, draft and judge on problems that were never trained on."""
    started = time.monotonic()
    split: Split = "validation" if validation else "test"
    tasks = list(islice(problems(seed, split), problem_count))
    rows: list[tuple[str, Share, str]] = []
    there = [role for role in ("target", "draft", "judge") if _there(checkpoints, role)]
    models = {role: Model.load(checkpoints / role, threads, weight_dtype) for role in there}
    chains: list[list[int]] = []
    for role, wanted in (("target", "at least 92 %"), ("draft", "30 to 70 %")):
        if model := models.get(role):
            rows.append((f"{role} right, greedy", right_answers(model, tasks, solve(model, tasks, 0.0)), wanted))
            sampled = solve(model, tasks, TEMPERATURE)
            rows.append((f"{role} right, T {TEMPERATURE}", right_answers(model, tasks, sampled), ""))
            chains = sampled if role == "target" else chains
    if judge := models.get("judge"):
        figures = judge_figures(judge, pair_count, seed)
        rows.append(("judge agrees with checker", figures.agree, "at least 98 %"))
        rows.append(("judge accepts other words", figures.aligned_accepted, ""))
        rows.append(("judge accepts a changed field", figures.changed_accepted, ""))
    if len(models) == 3:
        n = acceptance_count
        met = acceptance_figures(models["target"], models["draft"], models["judge"], tasks[:n], chains[:n])
        rows.append((f"steps accepted by judge, T {TEMPERATURE}", met.judge, "40 to 70 %"))
        rows.append((f"steps accepted by checker, T {TEMPERATURE}", met.checker, ""))
        rows.append((f"steps with identical text, T {TEMPERATURE}", met.identical, "rarer"))
        rows.append(("accepted by judge, not by checker", met.wrongly_accepted, ""))
    for model in models.values():
        model.engine.close()
    report(Console(width=110), rows, time.monotonic() - started)


def _there(checkpoints: Path, role: str) -> bool:
    return (checkpoints / role / "model.safetensors").exists()


if __name__ == "__main__":
    typer.run(main)
