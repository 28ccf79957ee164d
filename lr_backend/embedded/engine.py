"""The embedded engine: one thread that runs iterations, each for all sequences in flight.

An iteration is: schedule -> run -> choose tokens -> advance. Requests join and leave between iterations.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lr_backend.embedded.advance import advance, stamp
from lr_backend.embedded.backends import open_runner
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.kv_cache import KvCache
from lr_backend.embedded.limits import plan_run
from lr_backend.embedded.outputs import choose_tokens
from lr_backend.embedded.prefill_thread import SideLane
from lr_backend.embedded.reference.decode_graphs import GraphSettings
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.runner import Output
from lr_backend.embedded.scheduler import Chunk, Scheduler
from lr_backend.embedded.sequence import NewTokens, OnDone, OnTokens, Sequence
from lr_backend.embedded.stats import Counters, EngineStats
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, LookaheadError, Overloaded

IDLE_CHECK_S = 1.0
"""After this long without work the engine checks its KV books, once."""

_logger = logging.getLogger(__name__)


class EmbeddedEngine:
    """Serves one model. All public methods may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel | None = None,
        graphs: GraphSettings | None = None,
        *,
        max_passes: int | None = None,
        niceness: int = 0,
    ) -> None:
        """Load the checkpoint (unless a model is given) and start the engine's thread.

        Args:
            graphs: how decode iterations are recorded; None: as CUDA graphs where ``config`` has them.
            max_passes: decode passes after which tokens are told to whoever asked for them (:meth:`submit`); None: at the end.
            niceness: of the thread that computes, beside that of the process.

        Raises:
            CheckpointError: the checkpoint cannot be served.
            ConfigError: a setting cannot be kept: no kernel for the weights, too little memory for the KV cache.
        """
        self.config, self._runner = open_runner(config, model, graphs)
        self._lane = SideLane(self._runner.run, self._notify) if self._runner.is_concurrent and config.overlap_prefill else None
        self._max_passes, self._niceness = max_passes, niceness
        self._cancelled_aside: list[Sequence] = []
        self._scheduler = self._new_scheduler()
        self._counters = Counters()
        self._wake = threading.Condition()
        # Guarded by the condition's lock: what other threads hand over, and the ids they may not use again.
        self._inbox: deque[Sequence] = deque()
        self._cancels: deque[Sequence] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._num_submitted = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> ModelSpec:
        """What the checkpoint says of the model."""
        return self._runner.spec

    def submit(self, request: EngineRequest, on_done: OnDone, on_tokens: OnTokens | None = None) -> None:
        """Queue a request; ``on_done`` gets its response or error, exactly once, from the engine's thread.

        ``on_tokens`` gets its tokens as they come, before ``on_done``, and all of a pass even where the run ends within it.

        A request with ``stop`` cancels the one of the same id and is answered at once, whether there was one or not.

        Raises:
            EngineRejected: the request breaks a rule, or its id is in flight.
            Overloaded: the queue is full.
            EngineUnavailable: the engine is closed.
        """
        if request.stop:
            self.cancel(request.request_id)
            on_done(EngineResponse(request, ()))
            return
        plan = plan_run(request, self.config, self.spec.vocab_size)
        sequence = Sequence(
            order=0,
            request=request,
            on_done=on_done,
            on_tokens=on_tokens,
            drafts=plan.drafts,
            goes_on=plan.goes_on,
            max_new_tokens=plan.max_new_tokens,
            tokens_per_block=self.config.tokens_per_block,
        )
        with self._wake:
            self._check_admission(request)
            sequence.order = self._num_submitted
            self._num_submitted += 1
            self._inbox.append(sequence)
            if request.request_id:
                self._by_id[request.request_id] = sequence
            self._awaken()

    def cancel(self, request_id: str) -> None:
        """End a request in flight: it is answered with what it has. Unknown ids are no error."""
        with self._wake:
            sequence = self._by_id.get(request_id)
            if sequence is not None:
                self._cancels.append(sequence)
                self._awaken()

    def stats(self) -> EngineStats:
        """Counters and gauges now; cheap, and consistent up to one iteration."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        return EngineStats(
            **asdict(self._counters),
            num_tokens_reused=scheduler.num_reused_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_waiting=len(self._inbox) + len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_blocks_used=cache.num_held,
            num_blocks_cached=cache.num_cached,
            num_blocks_free=cache.num_free,
        )

    def check_integrity(self) -> None:
        """Check the KV books between two iterations.

        Raises:
            AssertionError: naming what does not add up.
        """
        self._on_engine_thread(self._check_books).result()

    def close(self) -> None:
        """Fail what is in flight with :class:`EngineUnavailable` and wait until the engine's thread has ended."""
        with self._wake:
            self._closing = True
            self._awaken()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_admission(self, request: EngineRequest) -> None:
        if self._closing:
            raise EngineUnavailable("the engine is closed")
        if request.request_id in self._by_id:
            raise EngineRejected(f"request id {request.request_id!r} is in flight already")
        num_waiting = len(self._inbox) + len(self._scheduler.waiting)
        if num_waiting >= self.config.max_queue_size:
            raise Overloaded(f"the engine's queue is full: {num_waiting} requests wait")

    def _run(self) -> None:
        """The engine's thread. However it ends, nobody is left waiting."""
        failure = EngineUnavailable("the engine was closed")
        try:
            if self.config.num_threads is not None:
                # OpenMP keeps this number by thread, so it is set on the one that computes.
                torch.set_num_threads(self.config.num_threads)
            if self._niceness:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + self._niceness)
            with torch.inference_mode():
                while self._take_work():
                    if not self._scheduler.idle:
                        self._iterate()
        except Exception as error:
            _logger.exception("the engine's thread died")
            failure = EngineUnavailable(f"the engine died: {error}")
        finally:
            if self._lane:
                self._lane.close()
            with self._wake:
                self._closing = True
                errands = list(self._errands)
            self._fail_all(failure)
            for errand in errands:
                errand()

    def _take_work(self) -> bool:
        """Wait until there is something to do, and take what other threads handed over; False once closing."""
        with self._wake:
            unchecked = True
            while self._scheduler.idle and not (self._inbox or self._cancels or self._errands or self._closing):
                if not self._wake.wait(IDLE_CHECK_S if unchecked else None):
                    self._check_when_idle()
                    unchecked = False
            arrived, cancelled, errands = list(self._inbox), list(self._cancels), list(self._errands)
            self._inbox.clear()
            self._cancels.clear()
            self._errands.clear()
            closing = self._closing
            self._runner.interrupt(False)
            self._scheduler.waiting.extend(arrived)
        for errand in errands:
            errand()
        if self._lane and self._lane.done:
            self._take_from(self._lane)
        for sequence in cancelled:
            if self._lane and sequence in self._lane.sequences:
                self._cancelled_aside.append(sequence)
            else:
                self._cancel_now(sequence)
        return not closing

    def _cancel_now(self, sequence: Sequence) -> None:
        if sequence in self._scheduler.running or sequence in self._scheduler.waiting:
            self._counters.num_cancelled += 1
            self._finish(sequence)

    def _iterate(self) -> None:
        started = time.perf_counter()
        chunks: list[Chunk] = []
        try:
            chunks = self._scheduler.schedule(self._lane.sequences if self._lane else ())
            now = time.monotonic_ns()
            if self._lane:
                aside, chunks = self._lane.divide(chunks)
                if aside:
                    stamp(aside, now)
                    self._lane.start(aside)
            if chunks:
                stamp(chunks, now)
                self._compute(chunks)
        except Exception as error:
            _logger.exception("iteration failed")
            self._recover(chunks, error)
        finally:
            self._counters.busy_s += time.perf_counter() - started
        if not chunks and self._lane and self._lane.sequences:
            self._wait_for_lane(self._lane)

    def _compute(self, chunks: list[Chunk]) -> None:
        """One iteration, or several at once where all only decode and nobody waits."""
        # What drafts is told pass by pass.
        drafting = self._max_passes and any(chunk.sequence.request.num_draft_tokens for chunk in chunks)
        ahead = self._runner.run_ahead(chunks, 1 if drafting else self._max_passes)
        if ahead is None:
            self._counters.num_iterations += 1
            self._complete(chunks, lambda: self._runner.run(chunks))
            return
        gained, num_passes = ahead
        self._counters.num_iterations += num_passes
        self._counters.num_batch_rows += (num_passes - 1) * len(gained)
        self._advance(chunks, gained)

    def _wait_for_lane(self, lane: SideLane) -> None:
        """All that runs is in the lane: wait for it, or for other work."""
        with self._wake:
            self._wake.wait_for(lambda: lane.done or self._inbox or self._cancels or self._errands or self._closing)

    def _take_from(self, lane: SideLane) -> None:
        """Book what the lane computed, and end what was cancelled meanwhile."""
        chunks, result = lane.take()
        try:
            self._complete(chunks, result)
        except Exception as error:
            _logger.exception("an iteration beside failed")
            self._recover(chunks, error)
        for sequence in self._cancelled_aside:
            self._cancel_now(sequence)
        self._cancelled_aside.clear()

    def _complete(self, chunks: list[Chunk], run: Callable[[], tuple[Tensor, list[Output]]]) -> None:
        """From logits to answers."""
        logits, outputs = run()
        if logits.numel() and not math.isfinite(logits.sum().item()):
            raise EngineError("the model computed logits that are not finite")
        self._advance(chunks, choose_tokens(logits, outputs))

    def _advance(self, chunks: list[Chunk], gained: list[NewTokens]) -> None:
        """Book what was computed, give out the new tokens, finish the sequences that ended."""
        for new in gained:
            if new.sequence.on_tokens is not None:
                new.sequence.on_tokens(new)
        for sequence in advance(self._scheduler, self._counters, chunks, gained, time.monotonic_ns()):
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._counters.num_requests += 1
        self._answer(sequence, sequence.response())

    def _awaken(self) -> None:
        """Let the engine's thread see what is new; the condition's lock is held."""
        self._runner.interrupt(True)
        self._wake.notify()

    def _notify(self) -> None:
        with self._wake:
            self._awaken()

    def _answer(self, sequence: Sequence, result: EngineResponse | LookaheadError) -> None:
        """Free the id, then tell the caller; a caller's failure is not the engine's."""
        with self._wake:
            if self._by_id.get(sequence.request.request_id) is sequence:
                del self._by_id[sequence.request.request_id]
        try:
            sequence.on_done(result)
        except Exception:
            _logger.exception("on_done of request %r failed", sequence.request.request_id)

    def _recover(self, chunks: list[Chunk], error: Exception) -> None:
        """Fail the sequences of an iteration, and trust nothing that it touched.

        Without chunks it was the scheduler that failed: then all sequences fail and the books start afresh.
        """
        failure = error if isinstance(error, LookaheadError) else EngineError(f"the iteration failed: {error}")
        failed = [chunk.sequence for chunk in chunks if chunk.sequence in self._scheduler.running]
        if not chunks:
            if self._lane and self._lane.sequences:
                self._lane.take()
            self._fail_all(failure)
            self._reset_books()
            return
        self._runner.clear([block for sequence in failed for block in self._scheduler.remove_failed(sequence)])
        for sequence in failed:
            self._counters.num_failed += 1
            self._answer(sequence, failure)

    def _fail_all(self, failure: LookaheadError) -> None:
        with self._wake:
            waiting = [*self._scheduler.waiting, *self._inbox]
            self._inbox.clear()
        for sequence in [*self._scheduler.running, *waiting]:
            self._scheduler.remove_failed(sequence)
            self._counters.num_failed += 1
            self._answer(sequence, failure)

    def _check_when_idle(self) -> None:
        try:
            self._check_books()
        except AssertionError:
            _logger.exception("the KV books do not add up; the cache starts afresh")
            self._counters.num_integrity_failures += 1
            self._reset_books()

    def _check_books(self) -> None:
        self._scheduler.cache.check_integrity(one.table for one in self._scheduler.running)
        waiting = [one.table.blocks for one in self._scheduler.waiting]
        assert not any(waiting), ("a waiting sequence holds blocks", waiting)

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        cache = KvCache(
            config.num_blocks,
            config.tokens_per_block,
            reuse=config.enable_kv_cache_reuse,
            copy_prefix=self._runner.copy_prefix,
            allocated=self._runner.allocated,
        )
        return Scheduler(cache, max_batch_size=config.max_batch_size, max_num_tokens=config.max_num_tokens)

    def _reset_books(self) -> None:
        """Start with an empty cache; no sequence is running."""
        before, self._scheduler = self._scheduler, self._new_scheduler()
        self._scheduler.num_preemptions = before.num_preemptions
        self._scheduler.num_reused_tokens = before.num_reused_tokens
        self._runner.reset()

    def _on_engine_thread(self, errand: Callable[[], Any]) -> Future[Any]:
        """Have something done between two iterations."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(errand())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if self._closing:
                raise EngineUnavailable("the engine is closed")
            self._errands.append(run)
            self._awaken()
        return future
