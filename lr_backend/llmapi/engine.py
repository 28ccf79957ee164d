"""The LLM API as an engine: requests in from any thread, each answered exactly once.

An event loop on a thread of its own drives every request as a stream of upstream's, cuts it where the contract ends it, and
aborts what the engine would still write. One object of upstream's, one loop: ``generate_async`` ties a request's queue to the
loop that it is called in.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.engine.stopping import cut_at_end
from lr_backend.engine.upstream_errors import is_broken, kind_of
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, LookaheadError, Overloaded
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.health import Health
from lr_backend.llmapi.outputs import log_probs_of, passes_of, perf_of
from lr_backend.llmapi.sampling import check_request, num_log_probs, sampling_arguments
from lr_backend.llmapi.speculation import draft_counts
from lr_backend.llmapi.stats import LlmApiStats

OnDone = Callable[[EngineResponse | LookaheadError], None]
_REJECTED = ("ValueError", "TypeError")
"""Names of what upstream raises over one request. A ``RequestError`` it also raises over each request of a failed iteration."""
CANCELLATION_GRACE_S = 1.0
"""A cancelled request is waited for so long; then it is answered with what is there."""
CLOSE_TIMEOUT_S = 30.0
LOOK_S = 1.0
"""How often the LLM's health is looked at."""

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """One request in flight; touched by the loop's thread alone, but for ``cancelled``."""

    request: EngineRequest
    on_done: OnDone
    max_new_tokens: int
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    first_token_ns: int = 0
    last_token_ns: int = 0
    tokens: list[int] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tail(self) -> list[int]:
        """The last tokens of prompt and output, in which a stop word may have begun."""
        missing = self.request.stop_words.longest - len(self.tokens)
        return [*self.request.input_ids[-missing:], *self.tokens] if missing > 0 else self.tokens


class LlmApiEngine:
    """Serves one model. All public methods may be called from any thread."""

    def __init__(self, config: LlmApiConfig, llm: Any, make_sampling_params: Callable[..., Any]) -> None:
        """Takes ``llm`` (upstream's ``LLM``) over: :meth:`close` shuts it down."""
        self.config = config
        self._llm, self._health = llm, Health(llm)
        self._make_sampling_params = make_sampling_params
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._by_id: dict[str, _Run] = {}
        self._runs: set[_Run] = set()
        """Those in flight: nobody has answered them."""
        self._why_closed = ""
        self._stats = LlmApiStats()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-api", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, on_done: OnDone) -> None:
        """Start a request; ``on_done`` gets its response or error, exactly once, from a thread of the engine's.

        A request with ``stop`` cancels the one of the same id and is answered at once, whether there was one or not.

        Raises:
            EngineRejected: the request breaks a rule, or its id is in flight.
            Overloaded: the queue is full.
            EngineUnavailable: the engine is closed, or has died.
        """
        if request.stop:
            self.cancel(request.request_id)
            on_done(EngineResponse(request, ()))
            return
        run = _Run(request, on_done, check_request(request, self.config))
        with self._lock:
            self._admit(run)
            # Inside the lock: a close that begins now finds the task.
            asyncio.run_coroutine_threadsafe(self._serve(run), self._loop)

    def cancel(self, request_id: str) -> None:
        """End a request in flight: it is answered with what it has. Unknown ids are no error."""
        with self._lock:
            run = self._by_id.get(request_id)
            if run is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(run.cancelled.set)

    def stats(self) -> LlmApiStats:
        with self._lock:
            num_running = min(len(self._runs), self.config.max_batch_size)
            return replace(self._stats, num_running=num_running, num_waiting=len(self._runs) - num_running)

    def wait(self) -> None:
        """Until the engine is closed, or its LLM has died: then what was in flight has failed, and what comes is refused."""
        while not self._why_closed:
            if why := self._health.why_dead():
                self._die(f"the engine died: {why}")
            else:
                time.sleep(LOOK_S)

    def close(self) -> None:
        """Fail what is in flight, shut the LLM down, and wait for the threads. May be called again; a dead one is let be."""
        with self._lock:
            if self._why_closed:
                return
            self._why_closed = "the engine is closed"
        ended: Future[None] = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        try:
            ended.result(CLOSE_TIMEOUT_S)
        finally:
            self._llm.shutdown()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _admit(self, run: _Run) -> None:
        limit = self.config.max_batch_size + self.config.max_queue_size
        if self._why_closed:
            raise EngineUnavailable(self._why_closed)
        if len(self._runs) >= limit:
            raise Overloaded(f"{limit} requests are in flight; try again later")
        name = run.request.request_id
        if name in self._by_id:
            raise EngineRejected(f"request id {name!r} is in flight")
        if name:
            self._by_id[name] = run
        self._runs.add(run)

    def _die(self, why: str) -> None:
        """On this thread, as the loop's may be blocked in a call of the dead LLM."""
        with self._lock:
            if self._why_closed:
                return
            self._why_closed, runs = why, tuple(self._runs)
        _logger.error("llm api: %s", why)
        for run in runs:
            self._answer(run, EngineUnavailable(why))

    async def _serve(self, run: _Run) -> None:
        result: EngineResponse | LookaheadError
        try:
            result = await self._generate(run)
        except asyncio.CancelledError:
            result = EngineUnavailable(self._why_closed)
        except LookaheadError as error:
            result = error
        except Exception as error:
            result = self._blame(error)
        self._answer(run, result)

    def _answer(self, run: _Run, result: EngineResponse | LookaheadError) -> None:
        with self._lock:
            if run not in self._runs:
                return
            self._runs.remove(run)
            if self._by_id.get(run.request.request_id) is run:
                del self._by_id[run.request.request_id]
            self._count(run, result)
        run.on_done(result)

    def _count(self, run: _Run, result: EngineResponse | LookaheadError) -> None:
        stats = self._stats
        if not isinstance(result, EngineResponse):
            self._stats = replace(stats, num_failed=stats.num_failed + 1)
            return
        self._stats = replace(
            stats,
            num_requests=stats.num_requests + 1,
            num_tokens_decoded=stats.num_tokens_decoded + len(run.tokens),
            num_draft_tokens=stats.num_draft_tokens + result.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens + result.num_accepted_tokens,
            num_cancelled=stats.num_cancelled + run.cancelled.is_set(),
        )

    async def _generate(self, run: _Run) -> EngineResponse:
        arguments = sampling_arguments(run.request, self.config, run.max_new_tokens)
        parameters = self._make_sampling_params(**arguments)
        output = self._llm.generate_async(list(run.request.input_ids), sampling_params=parameters, streaming=True)
        following = asyncio.ensure_future(self._follow(run, output))
        cancelled = asyncio.ensure_future(run.cancelled.wait())
        try:
            await asyncio.wait({following, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                _abort(output)
                await asyncio.wait({following}, timeout=CANCELLATION_GRACE_S)
            if following.done():
                following.result()
        finally:
            for task in (following, cancelled):
                task.cancel()
            if not output.finished:
                _abort(output)
        return self._response(run, output)

    async def _follow(self, run: _Run, output: Any) -> None:
        """Take tokens as they come, until the contract or the engine ends the run."""
        num_seen = 0
        async for _ in output:
            written = output.outputs[0].token_ids
            fresh, num_seen = written[num_seen:], len(written)
            if not fresh:
                continue
            run.last_token_ns = time.monotonic_ns()
            run.first_token_ns = run.first_token_ns or run.last_token_ns
            emitted, ended = cut_at_end(run.request, len(run.tokens), run.tail, fresh, run.max_new_tokens)
            run.tokens.extend(emitted)
            if ended:
                self._count_dropped(len(fresh) - len(emitted))
                return

    def _count_dropped(self, count: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, num_tokens_dropped=self._stats.num_tokens_dropped + count)

    def _response(self, run: _Run, output: Any) -> EngineResponse:
        request, completion = run.request, output.outputs[0]
        scored = num_log_probs(request, self.config) > 0
        log_probs = log_probs_of(completion, run.tokens) if scored else ()
        if scored and run.cancelled.is_set():
            # Upstream leaves out the last ones of what it cancelled.
            del run.tokens[len(log_probs) :]
        elif len(log_probs) < len(run.tokens):
            log_probs = ()  # of a token that it drew upstream may say none, as where several share the last place of top_k
        perf = perf_of(completion)
        reported = perf.num_draft_tokens if perf else 0
        num_drafts, num_accepted = draft_counts(self.config, len(run.tokens), passes_of(output), reported)
        return EngineResponse(
            request,
            tuple(run.tokens),
            log_probs,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=num_accepted,
            num_reused_tokens=perf.num_reused_blocks * self.config.tokens_per_block if perf else None,
            num_allocated_blocks=perf.num_allocated_blocks if perf else 0,
            tokens_per_block=self.config.tokens_per_block,
            arrival_ns=run.arrival_ns,
            first_scheduled_ns=run.arrival_ns + perf.queue_ns if perf else 0,
            first_token_ns=run.first_token_ns,
            last_token_ns=run.last_token_ns,
        )

    def _blame(self, error: Exception) -> LookaheadError:
        """Whose fault an error of upstream's is: the request's, or an engine's that will serve no other either."""
        _logger.warning("llm api: %s: %s", type(error).__name__, error)
        text = f"{type(error).__name__}: {error}"
        if type(error).__name__ in _REJECTED:
            return EngineRejected(text)
        kind = EngineUnavailable if is_broken(text) else kind_of(text) or EngineError
        return kind(text)

    async def _end_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _abort(output: Any) -> None:
    """Ask upstream to stop; where even that fails the engine is gone, and what it wrote so far stands."""
    try:
        output.abort()
    except Exception as error:
        _logger.warning("llm api: abort: %s: %s", type(error).__name__, error)
