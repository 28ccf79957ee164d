"""The embedded engine: one thread that runs iterations, each for all sequences in flight.

An iteration is: schedule -> run -> choose tokens -> advance. Requests join and leave between iterations.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from lr_backend.embedded.advance import advance, stamp
from lr_backend.embedded.backends import open_runner
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.inbox import Inbox
from lr_backend.embedded.kv_cache import KvCache
from lr_backend.embedded.limits import plan_run
from lr_backend.embedded.outputs import choose_tokens
from lr_backend.embedded.prefill_thread import PrefillThread, give_way
from lr_backend.embedded.runner import Output
from lr_backend.embedded.scheduler import Chunk, Scheduler
from lr_backend.embedded.sequence import NewTokens, OnDone, OnTokens, Sequence
from lr_backend.embedded.stats import Counters, EngineStats
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, EngineUnavailable, LookaheadError, NotFinite

IDLE_CHECK_S = 1.0
"""After this long without work the engine checks its KV block accounting, once."""

_logger = logging.getLogger(__name__)


class EmbeddedEngine:
    """Serves one model. All public methods may be called from any thread."""

    def __init__(self, config: EngineConfig, *, max_passes: int | None = None, niceness: int = 0) -> None:
        """Load the checkpoint and start the engine's thread.

        Args:
            max_passes: decode passes after which tokens are told to whoever asked for them (:meth:`submit`); None: at the end.
                Then the engine drafts from the second pass on, as TensorRT-LLM's, whose times the passes take, does.
            niceness: of the threads that compute, on top of the process's.

        Raises:
            CheckpointError: the checkpoint cannot be served.
            ConfigError: a setting cannot be kept: no kernel for the weights, too little memory for the KV cache.
        """
        self.config, self._runner = open_runner(config)
        self._max_passes, self._niceness = max_passes, niceness
        self._counters = Counters()
        self._waiting: deque[Sequence] = deque()
        self._scheduler = self._new_scheduler()
        self._inbox = Inbox(self._waiting, config.max_queue_size, self._runner.interrupt)
        overlaps = self._runner.is_concurrent and config.overlap_prefill
        self._prefill = PrefillThread(self._runner.run, self._inbox.notify, niceness) if overlaps else None
        self._cancelled_in_prefill: list[Sequence] = []
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
        if request.draft_logits is not None:  # checked, and of no further use: a row is as long as the vocabulary
            request = replace(request, draft_logits=None)
        sequence = Sequence(
            order=0,
            request=request,
            on_done=on_done,
            on_tokens=on_tokens,
            drafts=plan.drafts,
            max_new_tokens=plan.max_new_tokens,
            tokens_per_block=self.config.tokens_per_block,
            drafts_behind_prompt=self._max_passes is None,
        )
        self._inbox.submit(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request in flight: it is answered with what it has. Unknown ids are no error."""
        self._inbox.cancel(request_id)

    def stats(self) -> EngineStats:
        """Counters and gauges now; cheap, and consistent up to one iteration."""
        return self._scheduler.stats(self._counters, len(self._inbox))

    def close(self) -> None:
        """Fail what is in flight with :class:`EngineUnavailable` and wait until the engine's thread has ended."""
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self) -> None:
        """Until the engine's thread has ended, and has answered all that was in flight."""
        self._thread.join()

    def _run(self) -> None:
        """The engine's thread. However it ends, nobody is left waiting."""
        failure = EngineUnavailable("the engine was closed")
        try:
            if self.config.num_threads is not None:
                # OpenMP keeps this number by thread, so it is set on the one that computes.
                torch.set_num_threads(self.config.num_threads)
            give_way(self._niceness)
            with torch.inference_mode():
                while self._take_work():
                    if not self._scheduler.idle:
                        self._iterate()
        except Exception as error:
            _logger.exception("the engine's thread died")
            failure = EngineUnavailable(f"the engine died: {error}")
        finally:
            if self._prefill:
                self._prefill.close()
            self._inbox.close(failure.message)
            self._inbox.take()  # who has just come waits now, and is failed with the others
            self._fail_all(failure)

    def _take_work(self) -> bool:
        """Wait until there is something to do, and take what other threads handed over; False once closing."""
        if self._scheduler.idle and not self._inbox.wait(timeout_s=IDLE_CHECK_S):
            self._check_when_idle()
            self._inbox.wait()
        work = self._inbox.take()
        if self._prefill and self._prefill.done:
            self._take_prefilled(self._prefill)
        for sequence in work.cancelled:
            if self._prefill and sequence in self._prefill.sequences:
                self._cancelled_in_prefill.append(sequence)
            else:
                self._cancel_now(sequence)
        return not work.closing

    def _cancel_now(self, sequence: Sequence) -> None:
        if sequence in self._scheduler.running or sequence in self._scheduler.waiting:
            self._counters.num_cancelled += 1
            self._finish(sequence)

    def _iterate(self) -> None:
        started = time.perf_counter()
        chunks: list[Chunk] = []
        try:
            chunks = self._scheduler.schedule(self._prefill.sequences if self._prefill else ())
            now = time.monotonic_ns()
            if self._prefill:
                prompts, others = self._prefill.divide(chunks)
                if prompts:
                    stamp(prompts, now)
                    self._prefill.start(prompts)
                chunks = others
            if chunks:
                stamp(chunks, now)
                self._compute(chunks)
        except Exception as error:
            _logger.exception("iteration failed")
            self._recover(chunks, error)
        finally:
            self._counters.busy_s += time.perf_counter() - started
        if not chunks and (prefill := self._prefill) and prefill.sequences:
            # All that runs is on the second thread.
            self._inbox.wait(lambda: prefill.done)

    def _compute(self, chunks: list[Chunk]) -> None:
        """One iteration, or several in one call where all only decode and nobody waits for what one of them computes."""
        # Sequences whose engine drafts report their tokens pass by pass.
        drafting = self._max_passes and any(chunk.sequence.request.num_draft_tokens for chunk in chunks)
        joins = self._scheduler.waiting and any(chunk.count > 1 for chunk in chunks)  # once this prompt is computed
        ahead = self._runner.run_ahead(chunks, 1 if drafting or joins else self._max_passes)
        if ahead is None:
            self._counters.num_iterations += 1
            self._complete(chunks, lambda: self._runner.run(chunks))
            return
        gained, num_passes = ahead
        self._counters.num_iterations += num_passes
        self._counters.num_batch_rows += (num_passes - 1) * len(gained)
        self._advance(chunks, gained)

    def _take_prefilled(self, prefill: PrefillThread) -> None:
        """Take in what the second thread computed, and end what was cancelled meanwhile."""
        chunks, result = prefill.take()
        try:
            self._complete(chunks, result)
        except Exception as error:
            _logger.exception("a prefill beside iterations failed")
            self._recover(chunks, error)
        for sequence in self._cancelled_in_prefill:
            self._cancel_now(sequence)
        self._cancelled_in_prefill.clear()

    def _complete(self, chunks: list[Chunk], run: Callable[[], tuple[Tensor, list[Output]]]) -> None:
        """From logits to answers."""
        self._advance(chunks, choose_tokens(*run()))

    def _advance(self, chunks: list[Chunk], gained: list[NewTokens]) -> None:
        """Take in what was computed, give out the new tokens, finish the sequences that ended, fail those without numbers."""
        broken = [new.sequence for new in gained if not new.token_ids]
        if broken:
            self._fail(broken, NotFinite(), whole=True)
            gained = [new for new in gained if new.token_ids]
            chunks = [chunk for chunk in chunks if chunk.sequence not in broken]
        for new in gained:
            if new.sequence.on_tokens is not None:
                new.sequence.on_tokens(new)
        for sequence in advance(self._scheduler, self._counters, chunks, gained, time.monotonic_ns()):
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        try:
            self._scheduler.remove(sequence)
        finally:  # it is in no list any more in which somebody would find it
            self._counters.num_requests += 1
            self._answer(sequence, sequence.response())

    def _answer(self, sequence: Sequence, result: EngineResponse | LookaheadError) -> None:
        """Free the id, then tell the caller; a caller's failure is not the engine's."""
        self._inbox.free_id(sequence)
        try:
            sequence.on_done(result)
        except Exception:
            _logger.exception("on_done of request %r failed", sequence.request.request_id)

    def _recover(self, chunks: list[Chunk], error: Exception) -> None:
        """Fail the sequences of an iteration, and trust nothing that it touched.

        Without chunks it was the scheduler that failed: then all sequences fail and the cache starts empty.
        """
        failure = error if isinstance(error, LookaheadError) else EngineError(f"the iteration failed: {error}")
        failed = [chunk.sequence for chunk in chunks if chunk.sequence in self._scheduler.running]
        if not chunks:
            if self._prefill and self._prefill.sequences:
                self._prefill.take()
            self._fail_all(failure)
            self._reset_cache()
            return
        self._fail(failed, failure)

    def _fail(self, sequences: Iterable[Sequence], failure: LookaheadError, *, whole: bool = False) -> None:
        """Fail some that run. ``whole``: what earlier iterations computed of them is not trusted either."""
        for sequence in sequences:
            try:
                self._runner.clear(self._scheduler.remove_failed(sequence, whole=whole))
            finally:
                self._counters.num_failed += 1
                self._answer(sequence, failure)

    def _fail_all(self, failure: LookaheadError) -> None:
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            try:
                self._scheduler.remove_failed(sequence)
            except Exception:  # the others are to be answered too
                _logger.exception("the blocks of request %r cannot be freed", sequence.request.request_id)
            self._counters.num_failed += 1
            self._answer(sequence, failure)

    def _check_when_idle(self) -> None:
        try:
            self._check_accounting()
        except AssertionError:
            _logger.exception("the KV block accounting does not add up; the cache starts empty")
            self._counters.num_integrity_failures += 1
            self._reset_cache()

    def _check_accounting(self) -> None:
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
        scheduler = Scheduler(cache, max_batch_size=config.max_batch_size, max_num_tokens=config.max_num_tokens)
        scheduler.waiting = self._waiting  # the inbox puts requests there
        return scheduler

    def _reset_cache(self) -> None:
        """Start with an empty cache; no sequence is running."""
        before, self._scheduler = self._scheduler, self._new_scheduler()
        self._scheduler.num_preemptions = before.num_preemptions
        self._scheduler.num_reused_tokens = before.num_reused_tokens
        self._runner.reset()
