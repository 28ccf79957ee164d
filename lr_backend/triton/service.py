"""The ``lookahead`` model without Triton: admission, prompt, loop, responses, and exactly one end for every request.

A transport (:mod:`~lr_backend.triton.bls_model`, or a test) hands in the arrays that a client sent and a :class:`Replies` to
answer through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy.typing as npt
import structlog

from lr_backend.audit.auditor import make_auditor
from lr_backend.audit.desk import AuditDesk
from lr_backend.clock import running_clock
from lr_backend.config import LoopConfig
from lr_backend.contract import IntArray, TensorMap
from lr_backend.errors import ENDS, Cancelled, InvalidRequest, LookaheadError, Overloaded, contained
from lr_backend.loop.answer import Committed, Outcome, StepMark
from lr_backend.loop.assemble import Engines, Models, Server, assemble
from lr_backend.loop.ledger import CallSpan, Ledger
from lr_backend.loop.loop import LookaheadLoop
from lr_backend.loop.tracing import build_trace
from lr_backend.notice import Seat, Seats
from lr_backend.policy.others import Others
from lr_backend.policy.policy import Learned
from lr_backend.request import LookaheadRequest, Usage
from lr_backend.telemetry import Telemetry, carried
from lr_backend.triton.prompts import Prompts, max_text_bytes
from lr_backend.triton.request_metrics import RequestMetrics, end_of
from lr_backend.triton.request_spans import RequestSpan
from lr_backend.triton.speculation_metrics import DraftCounts
from lr_backend.triton.tensors import committed_tensors, final_tensors, request_fields
from lr_backend.verify import VerifierParts

CANCEL_POLL_S = 0.1
"""Triton tells of a client that went away only when asked (``is_cancelled``)."""
KEEP_UP_S = 1.0
"""What others learn is listened to so often at least, which is long before it is overwritten."""

QUICK_CALLS = 500
"""Engine calls of an answer whose trace is made at once, which takes some 4 ms. A longer one is made beside the event loop."""

log = structlog.get_logger()


class Replies(Protocol):
    """The way back to one client."""

    def send(self, tensors: Mapping[str, npt.NDArray[Any]], *, final: bool) -> None: ...

    def fail(self, error: LookaheadError) -> None:
        """Send an error and close."""

    def is_cancelled(self) -> bool: ...


class Seated:
    """Replies to a request that is counted until its last word: whoever has heard that may ask again at once."""

    def __init__(self, replies: Replies, seat: Seat) -> None:
        self._replies, self._seat = replies, seat
        self._left = False

    def leave(self) -> None:
        """Count the request no more; any number of times."""
        if not self._left:
            self._left = True
            self._seat.leave()

    def send(self, tensors: Mapping[str, npt.NDArray[Any]], *, final: bool) -> None:
        if final:
            self.leave()
        self._replies.send(tensors, final=final)

    def fail(self, error: LookaheadError) -> None:
        self.leave()
        self._replies.fail(error)

    def is_cancelled(self) -> bool:
        return self._replies.is_cancelled()


class Watcher(Protocol):
    """Learns what becomes of one request, as it happens; must not block."""

    def read(self, request: LookaheadRequest) -> None: ...

    def began(self, ledger: Ledger) -> None: ...

    def step(self, mark: StepMark) -> None: ...

    def call(self, span: CallSpan) -> None: ...

    def degraded(self, seconds: Mapping[str, float]) -> None: ...

    def answered(self, usage: Usage) -> None: ...

    def end(self, end: str) -> None: ...


class LookaheadService:
    """Serves requests; one instance for all of them.

    Attributes:
        audits: outlive the requests whose steps they judge; :meth:`close` ends them.
        drafts: draft tokens of all answers; ``on_drafts`` is called when an answer has added to them.
        metrics: requests, steps and calls.
        telemetry: makes spans of them; None: there are none.
        seat: requests in flight, here and in the server's other processes; and whether the server is to end: new requests are
            then refused, those in flight finish.

    Args:
        others: the server's other processes, which learn the same; None: there are none.
    """

    def __init__(
        self,
        config: LoopConfig,
        models: Models,
        engines: Engines,
        drafts: DraftCounts | None = None,
        metrics: RequestMetrics | None = None,
        telemetry: Telemetry | None = None,
        seat: Seat | None = None,
        others: Others | None = None,
    ) -> None:
        self._config = config
        self._others = others
        self._models = models
        self._engines = engines
        self._server: Server | None = None
        self._prompts = Prompts(models.tokenizer, config)
        self._threads = ThreadPoolExecutor(1, "traces")
        parts = VerifierParts(engines.target, engines.judge, models.tokenizer, models.judge_prompt, models.judge_tokenizer)
        self.audits = AuditDesk(lambda: make_auditor(config, parts, models.checker), config.audit)
        self.drafts = drafts if drafts is not None else DraftCounts()
        self.on_drafts: Callable[[], None] = lambda: None
        self.metrics = metrics if metrics is not None else RequestMetrics(config.limits.max_in_flight_requests)
        self.telemetry = telemetry
        self.seat = seat if seat is not None else Seats.alone().seat(0)

    async def serve(
        self, request_id: str, arrays: TensorMap, replies: Replies, parameters: Mapping[str, object] | None = None
    ) -> None:
        """Answer one request. Never raises, except for cancellation of the server's own making; always ends the request.

        Args:
            parameters: of Triton's request: fields, and among them the caller's context, for spans.
        """
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._serve(request_id, arrays, replies, parameters or {})

    async def _serve(self, request_id: str, arrays: TensorMap, replies: Replies, parameters: Mapping[str, object]) -> None:
        self.seat.enter()
        replies = Seated(replies, self.seat)
        watchers: list[Watcher] = []
        end = "internal"
        try:
            watchers.append(self.metrics.begin(running_clock()))
            if self.telemetry is not None:
                watchers.append(RequestSpan(self.telemetry, carried(parameters), request_id))
            if self.seat.ending:
                raise Overloaded("the server is about to end; ask another, or this one again once it is back")
            if self.seat.num_in_all > (most := self._config.limits.max_in_flight_requests):
                raise Overloaded(f"{most} requests are in flight; try again later")
            fields = request_fields(arrays, max_text_bytes(self._config.limits), parameters)
            request = LookaheadRequest.parse(fields, self._config.defaults)
            for each in watchers:
                each.read(request)
            prompt_ids = await self._prompts.ids(request)
            end = await self._answer(request, prompt_ids, request_id, replies, watchers)
        except LookaheadError as error:
            end = end_of(error)
            log.info("request_failed", request_id=request_id, **_told(error))
            replies.fail(error)
        except asyncio.CancelledError:
            end = "cancelled"
            replies.fail(Cancelled("the server is shutting down"))
            raise
        except KeyboardInterrupt:
            raise
        except BaseException:  # a bug must not leave the client waiting, nor tell it our insides
            log.exception("request_crashed", request_id=request_id)
            replies.fail(LookaheadError("internal error; see the server's log"))
        finally:
            replies.leave()
            for each in watchers:
                each.end(end)

    async def keep_up(self, look_s: float = KEEP_UP_S) -> None:
        """Take in what the other processes learn while this one has no requests, for as long as the event loop runs."""
        while True:
            await asyncio.sleep(look_s)
            if self._server is not None:
                self._server.learned.catch_up()

    def close(self) -> None:
        """End what no request waits for."""
        self.audits.cancel()
        self._prompts.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(
        self, request: LookaheadRequest, prompt_ids: IntArray, request_id: str, replies: Replies, watchers: Sequence[Watcher]
    ) -> str:
        """The end of the request."""
        parts: list[Committed] = []

        def emit(committed: Committed) -> None:
            if committed.step is not None:
                for each in watchers:
                    each.step(committed.step)
            if request.stream:
                if committed.text or committed.record is not None:
                    replies.send(committed_tensors(committed), final=False)
            else:
                parts.append(committed)

        # Made by the first request: what is learned is timed by the clock of the event loop.
        if self._server is None:
            learned = Learned(running_clock(), self._others)
            self._server = Server(self._engines, self._models, self._config, learned, self.audits)
        loop = assemble(request, prompt_ids, request_id, self._server, emit)
        ledger = loop.ledger
        for each in watchers:
            each.began(ledger)

        def called(span: CallSpan) -> None:
            for each in watchers:
                each.call(span)

        ledger.on_call = called
        try:
            outcome = await self._unless_cancelled(loop, replies)
        finally:
            for each in watchers:
                each.degraded({part: ledger.now_s() - since_s for part, since_s in ledger.degraded.items()})
        usage, finish_reason = outcome.usage, outcome.finish_reason
        self._count_drafts(outcome)
        for each in watchers:
            each.answered(usage)
        replies.send(await self._last_tensors(request_id, outcome, parts), final=True)
        log.info(
            "request_finished",
            request_id=request_id,
            mode=usage.mode.value,
            finish_reason=finish_reason.value,
            completion_tokens=usage.completion_tokens,
            latency_s=round(usage.latency_s, 4),
            step_acceptance_rate=usage.step_acceptance_rate,
            degraded=usage.degraded,
        )
        return finish_reason

    async def _last_tensors(self, request_id: str, outcome: Outcome, parts: Sequence[Committed]) -> TensorMap:
        """The last response, with the whole text of an answer that was not streamed."""
        text, num_reasoning_chars = "", 0
        for part in parts:
            if part.num_reasoning_chars:  # blank lines may stand before the reasoning
                num_reasoning_chars = len(text) + part.num_reasoning_chars
            text += part.text

        def made() -> TensorMap:
            trace = build_trace(outcome, request_id, self._config.pace) if outcome.request.trace else None
            return final_tensors(text, num_reasoning_chars, outcome.finish_reason, outcome.usage, trace)

        if not outcome.request.trace or len(outcome.ledger.spans) <= QUICK_CALLS:
            return made()
        return await asyncio.get_running_loop().run_in_executor(self._threads, made)

    async def _unless_cancelled(self, loop: LookaheadLoop, replies: Replies) -> Outcome:
        """Run the loop to its end, or stop it soon after the client has gone."""
        running = asyncio.create_task(_run(loop))
        try:
            while True:
                done, _ = await asyncio.wait({running}, timeout=CANCEL_POLL_S)
                if done:
                    return running.result()
                if replies.is_cancelled():
                    raise Cancelled("the client cancelled the request")
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})

    def _count_drafts(self, outcome: Outcome) -> None:
        for num_proposed, num_accepted in outcome.ledger.verifications:
            self.drafts.verified(num_proposed, num_accepted)
        if num_passes := outcome.ledger.num_engine_passes:
            self.drafts.drafted_by_engine(num_passes, outcome.ledger.num_proposed, outcome.ledger.num_accepted)
        if outcome.ledger.verifications or num_passes:
            self.on_drafts()


async def _run(loop: LookaheadLoop) -> Outcome:
    try:
        return await loop.run()
    except (Exception, *ENDS):
        raise
    except BaseException as error:
        raise contained(error) from error


def _told(error: LookaheadError) -> dict[str, str]:
    """What the log says of a failure: of a field that breaks a rule neither its value nor what a template says of it, which may
    be words of a prompt."""
    if isinstance(error, InvalidRequest):
        return {"code": error.code, "field": error.field.partition(".")[0], "rule": error.rule.partition(": ")[0]}
    return {"code": error.code, "error": error.message}
