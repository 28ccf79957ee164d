"""Traces of scripted requests, healthy and not."""

from __future__ import annotations

from hypothesis import strategies as st

from lr_backend.engine import EngineCall
from lr_backend.loop.tracing import build_trace
from lr_backend.request import Mode
from lr_backend.testing import Script, run_virtual
from lr_backend.trace.schema import Trace
from tests.support.world import BREAK, CLOSE, END, FIRST_LETTER, LETTERS, PROMPT, THINK, World, chance, imitator, storyteller

NUM_STEPS = 24

salts = st.integers(0, 10_000)
shapes = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(list(Mode)),
        "max_depth": st.integers(0, 5),
        "width": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 0.7]),
        "num_draft_tokens": st.sampled_from([0, 4, 12]),
        "proposer": st.sampled_from(["ngram", "draft_model", "engine"]),
        "max_tokens": st.sampled_from([1, 30, 200]),
        "thinking_token_budget": st.sampled_from([None, None, 1, 15]),
        "deterministic": st.booleans(),
        "stream": st.booleans(),
        "deadline_s": st.sampled_from([0.0, 0.0, 8.0]),
    }
)


def any_world(salt: int, order: int) -> World:
    """A scripted world in which anything may happen; ``order`` permutes the completions."""
    target = storyteller(salt, tool_rate=0.2, sampled=True)
    draft = imitator(target, salt + 1, 0.9, sampled=True)

    def like(first: str, second: str) -> bool:
        return chance("like", salt, first, second) < 0.5

    return World.of(target, draft, like, coupled_noise=True).shuffled(order)


def traced(world: World, question: str = "?", **fields: object) -> Trace:
    """The trace of one request on the virtual clock."""
    outcome = run_virtual(world.answer(**{"text_input": question, "trace": True, **fields}))
    return build_trace(outcome, "request")


def numbered(*, extra: bool) -> Script:
    """Writes NUM_STEPS steps of two letters, its number; with ``extra`` another letter, so that the tokens differ."""

    def next_token(context: tuple[int, ...], seed: int) -> int:
        written = context[len(PROMPT) :]
        if not written:
            return THINK
        if CLOSE in written:
            return END
        number = written.count(BREAK)
        if number == NUM_STEPS:
            return CLOSE
        step = [FIRST_LETTER + number // 10, FIRST_LETTER + number % 10, *([FIRST_LETTER] if extra else []), BREAK]
        start = len(written) - written[::-1].index(BREAK) if BREAK in written else 1
        return step[len(written) - start]

    return next_token


def number_of(text: str) -> int:
    """Which step of :func:`numbered` a text is."""
    letters = [LETTERS.index(letter) for letter in text if letter in LETTERS]
    return 10 * letters[0] + letters[1]


def numbered_world(*accepted: int, same_words: bool = False, **config: object) -> World:
    """A target and a draft that write numbered steps; the judge accepts those listed. Steps cost 1 s, drafts 0.1 s."""
    writers = numbered(extra=False), numbered(extra=not same_words)
    world = World.of(*writers, lambda first, second: number_of(second) in accepted, **config)
    world.target.delay, world.draft.delay, world.judge.delay = taking(1.0), taking(0.1), taking(0.05)
    return world


def taking(seconds: float):  # type: ignore[no-untyped-def]
    """A delay that every call takes."""

    def delay(call: EngineCall, num_tokens: int) -> float:
        return seconds

    return delay
