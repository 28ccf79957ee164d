"""The ``lookahead`` model as Triton's Python backend loads it: decoupled, one coroutine a request, BLS to the engines."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import structlog
import triton_python_backend_utils as pb

from lr_backend.audit.desk import AuditCounts
from lr_backend.config import CANCEL_RESERVE, LoopConfig
from lr_backend.contract import TensorMap
from lr_backend.engine import Engine, Role
from lr_backend.engine.address import LOOP_KEY_VARIABLE, LOOP_PARAMETER
from lr_backend.errors import EngineError, InvalidRequest, LookaheadError
from lr_backend.fields import LOOKAHEAD_INPUTS
from lr_backend.logs import configure
from lr_backend.loop.assemble import Engines
from lr_backend.notice import NOTICE_VARIABLE, Lessons, OtherLoops, Seat, Seats
from lr_backend.telemetry import open_telemetry
from lr_backend.triton.audit_metrics import audit_metrics
from lr_backend.triton.loop_lag import watch_lag
from lr_backend.triton.models import load_models
from lr_backend.triton.notices import heed
from lr_backend.triton.request_metrics import RequestMetrics, end_of, request_metrics
from lr_backend.triton.service import LookaheadService
from lr_backend.triton.speculation_metrics import DraftCounts, speculation_metrics
from lr_backend.triton.threads import end_lightly, share_interpreter, use_uvloop
from lr_backend.triton.triton_engine import (
    DRAFTS_SHARE,
    JUDGES_SHARE,
    CallGate,
    TritonEngine,
    engine_error,
    unavailable,
)

if TYPE_CHECKING:
    from lr_backend.triton.own_engines import OwnEngines


PARAMETERS = {LOOP_PARAMETER: key} if (key := os.environ.get(LOOP_KEY_VARIABLE)) else None
"""Of every call: the engines of this server answer nobody else."""


MAX_ID_CHARS = 80
"""Of an id that a client gives; the rest is cut. The front end's are shorter."""


class TritonReplies:
    """One client behind Triton's response sender. The final flag is sent once, here and nowhere else.

    Triton closes a sender as soon as it is given the final flag, even if it then finds no room for the response. So an answer
    goes first and the flag follows by itself: an answer that cannot be sent leaves room for an error.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._closed = False

    def send(self, tensors: Mapping[str, npt.NDArray[Any]], *, final: bool) -> None:
        if self._closed:
            return
        self._sender.send(pb.InferenceResponse([pb.Tensor(name, array) for name, array in tensors.items()]))
        if final:
            self._closed = True
            self._sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, error: LookaheadError) -> None:
        if self._closed:
            return
        self._closed = True
        code = getattr(pb.TritonError, error.status)
        response = pb.InferenceResponse(error=pb.TritonError(error.public(), code))
        try:
            self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:  # it is closed: nobody can tell the client any more
            structlog.get_logger().exception("request_unanswered")

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


async def infer(
    gate: CallGate, model_name: str, request_id: str, inputs: TensorMap, wanted: tuple[str, ...]
) -> dict[str, npt.NDArray[Any]]:
    """One BLS call. Raises :class:`EngineError` by what Triton or the engine answered."""
    request = pb.InferenceRequest(
        model_name=model_name,
        request_id=request_id,
        inputs=[pb.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=list(wanted),
        parameters=PARAMETERS,
    )
    try:
        response = await gate.answer(request.async_exec())
    except pb.TritonModelException as error:
        raise unavailable(model_name, error) from error
    if response.has_error():
        raise _engine_error(model_name, response.error())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _engine_error(model_name: str, error: Any) -> EngineError:
    refused = error.code() in (pb.TritonError.INVALID_ARG, pb.TritonError.UNSUPPORTED)
    return engine_error(model_name, error.message(), refused=refused)


def which_loop(args: Mapping[str, str]) -> tuple[int, int]:
    """Which of how many processes of the step loop this is: Triton starts one for each instance of the model."""
    (group,) = json.loads(args["model_config"])["instance_group"]
    count = int(group["count"])
    return (int(args["model_instance_name"].rpartition("_")[2]) if count > 1 else 0), count


def seat_of(notices: Path | None, loop: int, num_loops: int) -> Seat:
    """Where this process says how much it is answering.

    Raises:
        TritonModelException: there are several processes, and nobody has given them a place to meet.
    """
    if notices is None and num_loops > 1:
        raise pb.TritonModelException("several processes of the step loop need `lookahead serve`, which counts for all of them")
    seats = Seats.beside(notices) if notices is not None else Seats.alone()
    return seats.seat(loop)


def _asked(request: Any) -> tuple[str, TensorMap, Mapping[str, object]]:
    """Id, tensors and parameters of a request.

    Raises:
        InvalidRequest: a text in it is not UTF-8; Triton's HTTP port lets that pass.
    """
    arrays = {}
    try:
        for spec in LOOKAHEAD_INPUTS:
            tensor = pb.get_input_tensor_by_name(request, spec.name)
            if tensor is not None:
                arrays[spec.name] = tensor.as_numpy()
        given, parameters = request.request_id(), json.loads(request.parameters() or "{}")
    except ValueError as error:
        raise InvalidRequest("parameters", "", "UTF-8 in every text and name") from error
    # In-flight ids must be unique for cancels to hit their call, and clients may send the same one twice.
    return f"{given[:MAX_ID_CHARS] or 'r'}-{uuid.uuid4().hex[:12]}", arrays, parameters


class TritonPythonModel:
    """Triton's entry points; the work is :class:`LookaheadService`'s."""

    def initialize(self, args: dict[str, str]) -> None:
        share_interpreter()
        end_lightly()
        use_uvloop()
        loop, self._num_loops = which_loop(args)
        configure(knows_texts=True, loop=loop)
        directory = Path(args["model_repository"]) / args["model_version"]
        self._config = LoopConfig.load(directory / "lookahead.json")
        self._notices = Path(path) if (path := os.environ.get(NOTICE_VARIABLE)) else None
        self._seat = seat_of(self._notices, loop, self._num_loops)
        self._max_calls = max(1, self._config.limits.max_in_flight_calls // self._num_loops)
        self._models = load_models(self._config)
        self._executor = ThreadPoolExecutor(self._max_calls + CANCEL_RESERVE, "bls")
        self._service: LookaheadService | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._called: dict[Role, TritonEngine] = {}
        self._own = self._open_own()
        self._telemetry = open_telemetry("lookahead-loop", os.environ)
        self._drafts = DraftCounts()
        self._audits = audit_metrics(pb.MetricFamily, self._audit_counts, loop)
        self._requests = RequestMetrics(self._config.limits.max_in_flight_requests / self._num_loops)
        self._requests_sheet = request_metrics(pb.MetricFamily, self._requests, loop)
        self._requests.on_change = self._requests_sheet.touch
        self._speculation = speculation_metrics(pb.MetricFamily, args["model_name"], self._drafts, loop)

    def _audit_counts(self) -> Mapping[str, AuditCounts]:
        return self._service.audits.counts if self._service is not None else {}

    def _open_own(self) -> OwnEngines | None:
        """The engines that this process runs itself, where it is to."""
        if not self._config.engines:
            return None
        from lr_backend.triton.own_engines import OwnEngines  # torch, which a server of compiled engines has not

        try:
            return OwnEngines(self._config.engines, pb.MetricFamily, self._seat)
        except LookaheadError as error:
            raise pb.TritonModelException(error.public()) from error

    def _start(self) -> LookaheadService:
        """Made by the first request: the gate belongs to the event loop, which runs only from then on."""
        self._loop = asyncio.get_running_loop()
        structlog.get_logger().info("event_loop_runs", implementation=type(self._loop).__module__)
        self._loop.set_default_executor(self._executor)
        engines = self._own.engines if self._own is not None else self._by_calls()
        counts = self._drafts, self._requests, self._telemetry
        others = None
        if self._notices is not None and self._num_loops > 1:
            others = OtherLoops(self._seat, Lessons.beside(self._notices))
        service = LookaheadService(self._config, self._models, engines, *counts, self._seat, others)
        service.audits.on_change = self._audits.touch
        service.on_drafts = self._speculation.touch
        self._watching = self._loop.create_task(watch_lag(self._requests.lagged, lambda: service.seat.num_in_flight > 0))
        if self._notices is not None:
            mortal = {role.value: engine for role, engine in self._called.items()}
            self._heeding = self._loop.create_task(heed(self._notices, mortal, self._seat))
            self._keeping_up = self._loop.create_task(service.keep_up())
        return service

    def _by_calls(self) -> Engines:
        """The server's own models of these names by BLS, those that live elsewhere by gRPC."""
        gate = CallGate(self._max_calls, self._seat.lose)
        gates = {Role.TARGET: gate, Role.DRAFT: gate.part(DRAFTS_SHARE), Role.JUDGE: gate.part(JUDGES_SHARE)}
        tokens_per_block = self._config.tokens_per_block
        engines: dict[Role, Engine] = {}
        for role in Role:
            if urls := self._config.remotes.get(role):
                from lr_backend.triton.remote_engine import remote_engine  # gRPC, which other servers have no use for

                engines[role] = remote_engine(urls, role.value, gates[role], tokens_per_block, os.environ)
            else:
                self._called[role] = TritonEngine(
                    role.value,
                    partial(infer, gates[role]),
                    gates[role],
                    tokens_per_block=tokens_per_block,
                    watch=self._seat if role is Role.TARGET else None,
                )
                engines[role] = self._called[role]
        return Engines(engines[Role.TARGET], engines[Role.DRAFT], engines[Role.JUDGE])

    async def execute(self, requests: list[Any]) -> None:
        await asyncio.gather(*(self._serve(request) for request in requests))

    async def _serve(self, request: Any) -> None:
        """Triton waits for an answer to a request for ever, whatever becomes of this coroutine: so there is always one."""
        replies = TritonReplies(request.get_response_sender())
        try:
            if self._service is None:
                self._service = self._start()
            request_id, arrays, parameters = _asked(request)
        except InvalidRequest as error:
            structlog.get_logger().info("request_failed", code=error.code, field=error.field, rule=error.rule)
            self._refuse(replies, error)
        except BaseException:
            structlog.get_logger().exception("request_unread")
            self._refuse(replies, LookaheadError("internal error; see the server's log"))
        else:
            await self._service.serve(request_id, arrays, replies, parameters)

    def _refuse(self, replies: TritonReplies, error: LookaheadError) -> None:
        """A request that no service has taken."""
        self._requests.begin(time.monotonic).end(end_of(error))
        replies.fail(error)

    def finalize(self) -> None:
        if self._service is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self._service.close)
        self._audits.close()
        self._speculation.close()
        self._requests_sheet.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._own is not None:
            self._own.close()
        if self._telemetry is not None:
            self._telemetry.close()
