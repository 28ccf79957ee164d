"""Engines at a pace without a wall clock: scripted time, and texts that are there when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from lr_backend.emulated.engine import Clock, PacedEngine
from lr_backend.emulated.feed import Feed, Pass, TextSource
from lr_backend.engine import GREEDY, Sampling
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, LookaheadError
from lr_backend.hardware.pace import EnginePace
from lr_backend.hardware.profile import ProfileKey
from tests.support.embedded_engines import engine_config, request

TARGET = EnginePace(ProfileKey("h200_sxm", "Qwen3-32B", 2, "bfloat16"))
VOCAB_SIZE = 1000
TICK_S = 1e-6


class ScriptedTime:
    """Time that passes when somebody waits for it, and a little whenever somebody looks."""

    def __init__(self) -> None:
        self._now = 0.0
        self._script: list[tuple[float, Callable[[], None]]] = []
        self._is_written = False

    def begin(self) -> None:
        """The script is whole. Before that nothing of it happens: its end may belong in the middle of what its beginning does."""
        self._is_written = True

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Have something happen on the way, at its time."""
        self._script.append((when, happen))
        self._script.sort(key=lambda one: one[0])

    def now(self) -> float:
        self._now += TICK_S
        return self._now

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Runs the next piece of the script if its time comes before the end of the wait."""
        end = None if seconds is None else self._now + seconds
        if self._is_written and self._script and (end is None or self._script[0][0] <= end):
            when, happen = self._script.pop(0)
            self._now = max(self._now, when)
            happen()
        elif end is None:
            changed.wait(0.01)  # nothing to come until the test does something
        else:
            self._now = end

    def stall(self, seconds: float) -> None:
        """Nobody gets to run for so long."""
        self._now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.wait)


class ScriptedFeed(Feed):
    """Whoever waits for it lets scripted time pass."""

    def __init__(self, time: ScriptedTime) -> None:
        super().__init__()
        self._time = time

    def wait(self, timeout_s: float) -> bool:
        self._time.wait(self._changed, timeout_s)
        return self.ready


class Texts:
    """A source whose texts count up from 1; ``hold`` keeps them back until ``release``."""

    def __init__(self, time: ScriptedTime) -> None:
        self._time = time
        self.held: list[tuple[Feed, list[Pass]]] = []
        self.hold = False
        self.cancelled: list[str] = []
        self.is_closed = False

    def begin(self, request: EngineRequest) -> Feed:
        feed = ScriptedFeed(self._time)
        num_tokens = len(request.draft_ids) + 1 if request.draft_ids else request.max_new_tokens
        passes = [Pass((index + 1,)) for index in range(num_tokens)]
        if request.draft_ids:
            passes = [Pass((*request.draft_ids, 7))]
        self.held.append((feed, passes))
        if not self.hold:
            self.release()
        return feed

    def release(self) -> None:
        for feed, passes in self.held:
            feed.add(passes)
            feed.end(EngineError("its text has ended"))
        self.held.clear()

    def fail(self, error: LookaheadError) -> None:
        for feed, _ in self.held:
            feed.end(error)
        self.held.clear()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        self.is_closed = True


def close(engine: PacedEngine) -> None:
    """Its threads end, and its blocks add up."""
    engine.close()
    engine._timeline.check_integrity()


@dataclass
class Answer:
    """When a call was answered, and how."""

    at_s: float
    result: EngineResponse | LookaheadError

    @property
    def token_ids(self) -> tuple[int, ...]:
        assert isinstance(self.result, EngineResponse), self.result
        return self.result.token_ids


@dataclass
class Bench:
    """One engine, its time and its texts, or another source of them; calls by their names."""

    pace: EnginePace = TARGET
    limits: dict[str, Any] = field(default_factory=dict)
    source: TextSource | None = None
    time: ScriptedTime = field(default_factory=ScriptedTime)
    answers: dict[str, Answer] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(500))

    def __post_init__(self) -> None:
        sizes = {"max_batch_size": 8, "max_num_tokens": 4096, "max_seq_len": 1024, "max_tokens_in_paged_kv_cache": 4096}
        config = engine_config(Path(), tokens_per_block=32, **{**sizes, **self.limits})
        self.texts = Texts(self.time)
        self.changed = threading.Condition()
        self.engine = PacedEngine(config, self.pace, self.source or self.texts, VOCAB_SIZE, self.time.clock)

    def ask(self, name: str, num_prompt: int = 20, num_new: int = 4, *, drafts: int = 0, sampled: bool = False) -> None:
        sampling = Sampling(temperature=1.0) if sampled else GREEDY
        draft_ids = tuple(range(1, drafts + 1))
        self.engine.submit(
            request((next(self.numbers),) * num_prompt, num_new, request_id=name, draft_ids=draft_ids, sampling=sampling),
            lambda result: self._answered(name, result),
        )

    def _answered(self, name: str, result: EngineResponse | LookaheadError) -> None:
        with self.changed:
            self.answers[name] = Answer(self.time.now(), result)
            self.changed.notify_all()

    def answer(self, name: str) -> Answer:
        self.time.begin()
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.answers, 30.0), f"no answer to {name}"
            return self.answers[name]
