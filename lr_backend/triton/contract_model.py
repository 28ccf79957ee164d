"""What every engine behind the ``tensorrt_llm`` contract does as a Triton Python model: take requests, answer each once.

``execute`` only hands requests over; the engine's thread answers each later through its response sender. So requests of one model
instance are batched in flight although the model is not decoupled. Triton's module comes in as ``pb``, imported at the rim.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hmac import compare_digest
from typing import Any, Protocol

import structlog

from lr_backend.engine.address import LOOP_KEY_VARIABLE, LOOP_PARAMETER
from lr_backend.engine.inprocess import Submits
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineRejected, LookaheadError
from lr_backend.notice import NOTICE_VARIABLE
from lr_backend.triton.client_watch import ClientWatch, WatchedClient

LOOP_KEY = os.environ.get(LOOP_KEY_VARIABLE) or None
REQUIRED_OUTPUTS = ("output_ids", "sequence_length")
log = structlog.get_logger()


class Metrics(Protocol):
    def touch(self) -> None: ...

    def close(self) -> None: ...


class Engine(Submits, Protocol):
    def wait(self) -> None:
        """Until it is closed or has died, and has answered all that was in flight."""
        ...


class ContractModel:
    """Triton's entry points but ``initialize``, which sets ``pb``, ``_engine``, ``_metrics`` and ``_exclude_input``."""

    pb: Any
    _engine: Engine
    _metrics: Metrics
    _exclude_input: bool
    _fails_as_internal = False
    """Whatever is wrong is INTERNAL, as upstream's backend has it."""
    _watch: ClientWatch | None = None
    """Of clients that go away; None: what they have asked for is computed all the same."""
    _is_ending = False

    def execute(self, requests: Sequence[Any]) -> None:
        """Queue requests; returns at once."""
        for request in requests:
            self._enqueue(request)
        self._metrics.touch()

    def finalize(self) -> None:
        """Fail what is in flight, and wait for the threads."""
        self._is_ending = True
        if self._watch is not None:
            self._watch.close()
        self._engine.close()
        self._metrics.close()

    def _watch_engine(self) -> None:
        """From now on this process ends with its engine, where that matters."""
        threading.Thread(target=self._end_with_engine, name="end of the engine", daemon=True).start()

    def _end_with_engine(self) -> None:
        """Triton keeps a model ready whose engine has died, and it would refuse all calls.

        Where the launcher sees a process end, it is started anew; elsewhere calls to it would hang.
        """
        self._engine.wait()
        if not self._is_ending and NOTICE_VARIABLE in os.environ:
            os._exit(1)

    def _enqueue(self, request: Any) -> None:
        sender = request.get_response_sender()
        wanted = frozenset(request.requested_output_names())
        client: WatchedClient | None = None

        def on_done(result: EngineResponse | LookaheadError) -> None:
            if self._watch is not None and client is not None:
                self._watch.leave(client)
            try:
                sender.send(self._response(result, wanted), flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:  # the sender takes one response, and is closed: nobody can tell the caller any more
                log.exception("request_unanswered", request_id=request.request_id())
            self._metrics.touch()

        try:
            _check_caller(request)
            parsed = self._parse(request)
            if not parsed.stop:
                _check_wanted(wanted)
            if self._watch is not None and not parsed.stop:
                if not parsed.request_id:
                    parsed = replace(parsed, request_id=uuid.uuid4().hex)
                client = self._watch.enter(parsed.request_id, sender)
            self._engine.submit(parsed, on_done)
        except LookaheadError as error:
            on_done(error)
        except Exception as error:
            on_done(LookaheadError(f"{type(error).__name__}: {error}"))

    def _response(self, result: EngineResponse | LookaheadError, wanted: frozenset[str]) -> Any:
        if isinstance(result, LookaheadError):
            codes = self.pb.TritonError
            status = LookaheadError.status if self._fails_as_internal else result.status
            return self.pb.InferenceResponse(error=codes(result.public(), getattr(codes, status)))
        tensors = [self.pb.Tensor(name, array) for name, array in result.tensors().items() if not wanted or name in wanted]
        return self.pb.InferenceResponse(output_tensors=tensors)

    def _parse(self, request: Any) -> EngineRequest:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        return EngineRequest.from_tensors(request.request_id(), tensors, exclude_input=self._exclude_input)


def model_parameters(args: Mapping[str, str]) -> dict[str, str]:
    """The ``parameters`` of a model's ``config.pbtxt``, from what Triton gives its ``initialize``."""
    return {key: value["string_value"] for key, value in json.loads(args["model_config"]).get("parameters", {}).items()}


def _check_caller(request: Any) -> None:
    """Raises: EngineRejected: these engines answer their step loop alone, and somebody else asks."""
    if LOOP_KEY is None:
        return
    said = json.loads(request.parameters() or "{}").get(LOOP_PARAMETER)
    if not isinstance(said, str) or not compare_digest(said.encode(), LOOP_KEY.encode()):
        raise EngineRejected("this engine answers the step loop of its server alone; ask the model lookahead")


def _check_wanted(wanted: frozenset[str]) -> None:
    """Upstream refuses a list of outputs without these two."""
    missing = [name for name in REQUIRED_OUTPUTS if wanted and name not in wanted]
    if missing:
        raise EngineRejected(f"{missing[0]}: must be among the requested outputs")
