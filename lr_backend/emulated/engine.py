"""An engine that answers when the hardware that it stands for would: a timeline driven by the clock on the wall.

An iteration starts when the one before is due to end, or when work comes to an idle engine, and is due when its time is over.
Where the text is not computed by then, or the thread is held up for long, it ends later, and so do all that follow: no time is
made up for. That is counted as late, and so is the time by which an answer is given later than it was due. Calls and cancels
take a hop to the engine, answers one back.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count
from math import inf

from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.limits import plan_run, refuse_as_upstream
from lr_backend.embedded.sequence import OnDone, Sequence
from lr_backend.embedded.stats import EngineStats
from lr_backend.emulated.feed import Feed, TextSource
from lr_backend.emulated.timeline import Sizes, Timeline
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.engine.upstream_errors import queue_full
from lr_backend.errors import EngineRejected, EngineUnavailable, LookaheadError, Overloaded
from lr_backend.hardware.lateness import Lateness
from lr_backend.hardware.pace import EnginePace, Runtime
from lr_backend.hardware.sharing import IDLE

SPIN_S = 100e-6
"""Before an event the clock is watched for so long: a wait ends some 60 us late."""
LOOK_S = 500e-6
"""How often an engine looks at what the others on its cards do."""
MAX_JITTER_S = 1e-3
"""A thread that wakes up so much later does what there is to do within the next iteration, which starts when it was to."""
WARNING_S = 10.0
"""Paced seconds after which the late share is looked at."""
FEED_WAIT_S = 0.05
"""How long a text is waited for before the thread looks whether it is to end."""
ROUNDING_S = 1e-9
_PR_SET_TIMERSLACK = 29

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds now, and a wait for a condition that ends after so many of them."""

    now: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait


class PacedEngine:
    """One engine at some pace. All public methods may be called from any thread."""

    def __init__(
        self, config: EngineConfig, pace: EnginePace, source: TextSource, vocab_size: int, clock: Clock | None = None
    ) -> None:
        """Takes the source over, and starts the thread.

        Args:
            config: limits of requests and sizes of iterations.

        Raises:
            ConfigError: there is no such profile, or engines that share cards have no file to meet on.
        """
        self.config = config
        self._source, self._vocab_size = source, vocab_size
        self._clock = clock or Clock()
        self._drafts_itself = pace.runtime is Runtime.LLMAPI and pace.draft is not None
        overheads, self._fails_as_internal = pace.overheads(), pace.rules.fails_as_internal
        self._label, self._slow_motion = pace.label, pace.slow_motion
        self._hop_s = pace.slow_motion * overheads.hop_ms / 1e3
        self._draft_s = pace.slow_motion * overheads.draft_logits_ms(1) / 1e3 if pace.one_hot else 0.0
        self._timeline = Timeline(Sizes.of(config), pace.costs(), pace.rules, one_hot=pace.one_hot)
        self._board = pace.open_board()
        self._lateness = self._lateness_seen = Lateness()
        self._busy_s = 0.0
        """Of iterations alone: answers are no work, and many may be late at a time."""
        self._changed = threading.Condition()
        # Guarded by the condition's lock: what happens when, and the ids that may not be used again.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._in_flight: set[Sequence] = set()
        self._by_id: dict[str, Sequence] = {}
        self._arrivals: dict[Sequence, float] = {}
        self._closing = False
        self._cancelled_on_the_way: set[Sequence] = set()
        self._cancelled: list[Sequence] = []
        self._happening_s = 0.0  # when what happens just now was to
        self._news_s = inf  # when the first of those was to come or go that the iterations do not know of
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, on_done: OnDone) -> None:
        """Send a request; ``on_done`` gets its response or error, exactly once, from the engine's thread.

        A request with ``stop`` cancels the one of the same id and is answered whether there was one or not.

        Raises:
            EngineRejected: the request breaks a rule, or its id is in flight.
            Overloaded: the queue is full.
            UpstreamFailure: one of these in upstream's words, where its rules are kept.
            EngineUnavailable: the engine is closed.
        """
        if request.stop:
            self.cancel(request.request_id)
            on_done(EngineResponse(request, ()))
            return
        number = next(self._numbers)
        if request.draft_ids and self._drafts_itself:
            raise EngineRejected("draft_input_ids: the LLM API takes none, it drafts by itself")
        if self._fails_as_internal:
            refuse_as_upstream(request, number, self.config)
        plan = plan_run(request, self.config, self._vocab_size)
        sequence = Sequence(
            order=number,
            request=request,
            on_done=on_done,
            drafts=plan.drafts,
            max_new_tokens=plan.max_new_tokens,
            tokens_per_block=self.config.tokens_per_block,
        )
        with self._changed:
            self._admit(sequence)
        try:
            feed = self._source.begin(request)
        except BaseException:
            with self._changed:
                was_answered = sequence not in self._in_flight  # by an engine that ended meanwhile
                self._forget(sequence)
            if was_answered:
                return
            raise
        num_drafts = 0 if request.sampling.greedy else len(sequence.drafts)
        with self._changed:
            due_s = self._arrivals[sequence] = self._clock.now() + self._hop_s + num_drafts * self._draft_s
            self._push(due_s, partial(self._arrive, sequence, feed))
            if sequence in self._cancelled_on_the_way:
                self._push(due_s, partial(self._is_cancelled, sequence))

    def cancel(self, request_id: str) -> None:
        """End a request in flight: it is answered with what it has. Unknown ids are no error."""
        with self._changed:
            sequence = self._by_id.get(request_id)
            if sequence is None:
                return
            if (arrival_s := self._arrivals.get(sequence)) is None:  # whoever submits it is not done
                self._cancelled_on_the_way.add(sequence)
                return
            due_s = max(self._clock.now() + self._hop_s, arrival_s)  # a cancel does not overtake what it cancels
            self._push(due_s, partial(self._is_cancelled, sequence))

    def stats(self) -> EngineStats:
        """Counters and gauges now; consistent up to one iteration."""
        lateness = self._lateness
        return replace(self._timeline.stats(), busy_s=self._busy_s, paced_s=lateness.paced_s, late_s=lateness.late_s)

    def close(self) -> None:
        """Fail what is in flight with :class:`EngineUnavailable`, and wait until the threads have ended."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._source.close()

    def wait(self) -> None:
        """Until the engine's thread has ended, and has answered all that was in flight."""
        self._thread.join()

    # On the way there and back ------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        """Raises: Overloaded, EngineRejected, EngineUnavailable: it may not come in."""
        request = sequence.request
        if self._closing:
            raise EngineUnavailable("the engine is closed")
        if request.request_id in self._by_id:
            raise EngineRejected(f"request id {request.request_id!r} is in flight already")
        if len(self._in_flight) >= self.config.max_queue_size + self.config.max_batch_size:
            if self._fails_as_internal:
                raise queue_full(sequence.order, self.config.max_queue_size)
            raise Overloaded(f"the engine's queue is full: {len(self._in_flight)} requests are in flight")
        self._in_flight.add(sequence)
        if request.request_id:
            self._by_id[request.request_id] = sequence

    def _forget(self, sequence: Sequence) -> None:
        self._in_flight.discard(sequence)
        self._cancelled_on_the_way.discard(sequence)
        self._arrivals.pop(sequence, None)
        if self._by_id.get(sequence.request.request_id) is sequence:
            del self._by_id[sequence.request.request_id]

    def _push(self, due: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (due, next(self._numbers), happen))
        self._changed.notify()

    def _arrive(self, sequence: Sequence, feed: Feed) -> None:
        sequence.arrival_ns = _ns(self._happening_s)
        self._timeline.admit(sequence, feed)
        self._news_s = min(self._news_s, self._happening_s)

    def _is_cancelled(self, sequence: Sequence) -> None:
        self._cancelled.append(sequence)
        self._news_s = min(self._news_s, self._happening_s)

    def _send_answer(self, left_s: float, sequence: Sequence, failure: LookaheadError | None = None) -> None:
        with self._changed:
            self._push(left_s + self._hop_s, partial(self._give, sequence, failure))

    def _give(self, sequence: Sequence, failure: LookaheadError | None) -> None:
        self._count(0.0, self._clock.now() - self._happening_s)
        self._answer(sequence, failure)

    def _answer(self, sequence: Sequence, failure: LookaheadError | None) -> None:
        """Free the id, then tell the caller; a caller's failure is not the engine's."""
        with self._changed:
            self._forget(sequence)
        try:
            sequence.on_done(failure or sequence.response())
        except Exception:
            _logger.exception("on_done of request %r failed", sequence.request.request_id)

    # The thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """However it ends, nobody is left waiting."""
        sharpen_waits()
        failure = EngineUnavailable("the engine was closed")
        try:
            self._live()
        except Exception as error:
            _logger.exception("the engine's thread died")
            failure = EngineUnavailable(f"the engine died: {error}")
        finally:
            with self._changed:
                self._closing = True
                left = list(self._in_flight)
            for sequence in left:
                self._answer(sequence, failure)
            if self._board:
                self._board.close()

    def _live(self) -> None:
        ended_s: float | None = None
        while not self._closing:
            if ended_s is not None:
                self._let_happen(ended_s)
            started_s = self._news_s if ended_s is None else ended_s
            self._cancel_now(started_s)
            self._news_s = inf
            if self._timeline.idle:
                ended_s = None
                self._wait_until(inf)
                continue
            self._timeline.begin(_ns(started_s))  # when the hardware would; this thread may have woken up later
            num_alike = self._timeline.num_alike if self._board is None else 1
            if num_alike > 1:
                num_alike, due_s, computed = *self._alike(started_s, num_alike), True
            else:
                due_s, computed = self._last(started_s)
            now_s = self._clock.now()
            held_up = not computed or now_s - due_s > MAX_JITTER_S
            ended_s = now_s if held_up else due_s
            self._busy_s += ended_s - started_s
            self._count(due_s - started_s, ended_s - due_s)
            for one in () if self._closing else self._timeline.end(_ns(ended_s), num_alike):
                if one.cancelled:
                    self._source.cancel(one.sequence.request.request_id)
                self._send_answer(ended_s, one.sequence, one.failure)

    def _alike(self, started_s: float, num_alike: int) -> tuple[int, float]:
        """Let iterations pass, up to the one in which somebody comes or goes; returns how many, and when the last was due."""
        seconds = (self._slow_motion * one for one in self._timeline.seconds_each(num_alike))
        ends = list(accumulate(seconds, initial=started_s))[1:]
        self._wait_until(ends[-1], for_news=True)
        passed = min(bisect_left(ends, self._news_s), num_alike - 1)
        self._wait_until(ends[passed])
        return passed + 1, ends[passed]

    def _last(self, started_s: float) -> tuple[float, bool]:
        """Let an iteration take its time: it gets on the slower the more others use its cards.

        Returns when it was due, and whether all texts were computed by then.
        """
        due_s, done_s, computed = started_s, 0.0, True
        while not self._closing:
            left_s = self._slow_motion * self._timeline.seconds - done_s
            if left_s > ROUNDING_S:
                if self._board:
                    self._board.write(self._timeline.demand)
                slowdown = self._board.slowdown() if self._board else 1.0
                span_s = min(left_s * slowdown, LOOK_S if self._board else inf)
                due_s, done_s = due_s + span_s, done_s + span_s / slowdown
                self._wait_until(due_s)
            elif waiting := [feed for feed in self._timeline.awaited if not feed.ready]:
                computed = False
                if self._board:
                    self._board.write(IDLE)  # the hardware would be done
                waiting[0].wait(FEED_WAIT_S)
            else:
                break
        if self._board:
            self._board.write(IDLE)
        return due_s, computed

    def _wait_until(self, due_s: float, *, for_news: bool = False) -> None:
        """Wait, and let happen meanwhile what does; without an end, or ``for_news``, until somebody comes or goes."""
        while True:
            with self._changed:
                if self._closing:
                    return
                next_s = min(due_s, self._events[0][0] if self._events else inf)
                left_s = next_s - self._clock.now()
                if left_s > SPIN_S:
                    self._clock.wait(self._changed, None if left_s == inf else left_s - SPIN_S)
                    continue
            while self._clock.now() < next_s:
                pass
            self._let_happen(next_s)
            if due_s == inf or next_s >= due_s or (for_news and self._news_s < inf):
                return

    def _let_happen(self, by_s: float) -> None:
        """All that was due by then, and nothing that came later: an iteration takes nobody who came after it started."""
        while True:
            with self._changed:
                if not self._events or self._events[0][0] > by_s:
                    return
                self._happening_s, _, happen = heapq.heappop(self._events)
            happen()

    def _cancel_now(self, now_s: float) -> None:
        """Between two iterations."""
        for sequence in self._cancelled:
            if self._timeline.cancel(sequence):
                self._source.cancel(sequence.request.request_id)
                self._send_answer(now_s, sequence)
        self._cancelled.clear()

    def _count(self, paced_s: float, late_s: float) -> None:
        self._lateness += Lateness(paced_s, max(0.0, late_s))
        new = self._lateness - self._lateness_seen
        if new.paced_s < WARNING_S:
            return
        self._lateness_seen = self._lateness
        if new.void:
            _logger.warning("%s (%s)", new, self._label)


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)


def sharpen_waits() -> None:
    """Have this thread's waits end when they are due, and not some 50 us later, where the system allows it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
