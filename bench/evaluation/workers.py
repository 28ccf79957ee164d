"""math-verify in processes of its own, each of which is ended when an answer takes too long.

Its own timeouts are alarms, which work in a main thread only and stop no product of large numbers inside C. Here they are off,
and the process is killed.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as NotInTime
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from bench.evaluation.scoring import Outcome, Score, final_box, final_part

Job = TypeVar("Job")
Scorer = Callable[[str, str], Score]
"""(right answer, text of the answer) -> score; a function of a module, so that another process can find it."""

DEFAULT_TIMEOUT_S = 10.0
START_METHOD = "spawn"
"""A fork would copy the threads' locks of a gRPC client."""


def math_score(answer: str, text: str) -> Score:
    """By math-verify; reads what is boxed, else what follows the reasoning."""
    from math_verify import parse, verify

    gold = parse(answer if "\\boxed" in answer or "$" in answer else f"${answer}$", parsing_timeout=None)
    if not gold:
        return Score(Outcome.UNSCORED, note=f"math-verify cannot read the right answer {answer!r}")
    content = final_box(text)
    found = parse(f"\\boxed{{{content}}}" if content is not None else final_part(text), parsing_timeout=None)
    if not found:
        return Score(Outcome.NO_ANSWER)
    right = verify(gold, found, timeout_seconds=None)
    return Score(Outcome.RIGHT if right else Outcome.WRONG, content if content is not None else str(found[-1]))


def prepare() -> None:
    """Load math-verify before the clock of the first answer starts; it says once that its timeouts are off."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    math_score("1", "\\boxed{1}")


def score_all(
    jobs: Iterable[tuple[Job, str, str]],
    *,
    num_workers: int = 2,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    scorer: Scorer = math_score,
    prepared: Callable[[], None] = prepare,
) -> Iterator[tuple[Job, Score]]:
    """The score of every (job, right answer, text), in the order given.

    A scorer that has not ended after ``timeout_s`` is killed, and one that dies or raises harms nothing else: the answer is
    unscored, and the note says why.
    """
    context = multiprocessing.get_context(START_METHOD)
    with ProcessPool(max_workers=num_workers, context=context, initializer=prepared) as pool:
        waiting = [(job, pool.schedule(scorer, args=(answer, text), timeout=timeout_s)) for job, answer, text in jobs]
        for job, future in waiting:
            try:
                yield job, future.result()
            except NotInTime:
                yield job, Score(Outcome.UNSCORED, note=f"the scorer had not ended after {timeout_s:g} s and was killed")
            except ProcessExpired as error:
                yield job, Score(Outcome.UNSCORED, note=f"the scorer's process died with status {error.exitcode}")
            except Exception as error:  # whatever math-verify or sympy raise
                yield job, Score(Outcome.UNSCORED, note=f"the scorer failed: {type(error).__name__}: {error}"[:300])
