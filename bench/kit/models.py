"""The demo's models in process: what they answer, and the steps of target and draft after the same prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from demo.problems import DELIMITER, Problem, same_meaning
from demo.tokenizer import CONTEXT, END_THINK, TURN_END, chat, load_tokenizer
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.engine import GREEDY, Sampling
from lr_backend.engine.inprocess import run_all
from lr_backend.engine.request import EngineRequest, StopWords
from lr_backend.engine.settings import WeightDtype

CHECKPOINTS = Path(__file__).parents[2] / "demo" / "checkpoints"
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
    def load(cls, directory: Path, threads: int, weight_dtype: WeightDtype = "same") -> Model:
        """The checkpoint in ``directory``, computing in fp32; the rest as in :class:`EngineConfig`."""
        config = EngineConfig(
            checkpoint_dir=directory,
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


def sampling_at(temperature: float) -> Sampling:
    """As the demo's requests are sampled; greedy at temperature 0."""
    return Sampling(temperature, top_k=20, top_p=0.95) if temperature else GREEDY


def generate_all(
    model: Model, prompts: Sequence[Sequence[int]], *, at_steps: bool, max_new_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Continue each prompt up to and including its first end token; greedy at temperature 0. Answers in the order given."""
    sampling = sampling_at(temperature)
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
