"""A real gRPC server that speaks Triton's protocol and answers by script: a list of acts a question."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

WAIT_S = 20.0
LOOK_S = 0.01
"""Bound of every wait in these tests; reached only by a bug."""


@dataclass(frozen=True)
class Reply:
    """One response; None leaves an output out.

    ``num_reasoning_chars``: None: up to the first ``</think>`` of the whole answer; all of it where it begins
    with ``<think>`` and has none.
    """

    text: str | None = None
    num_reasoning_chars: int | None = None
    step: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    finish: str | None = None
    usage: Mapping[str, Any] | None = None
    trace: str | None = None

    def outputs(self) -> dict[str, str | int]:
        step = None if self.step is None else json.dumps(self.step)
        usage = None if self.usage is None else json.dumps(self.usage)
        given = {"text_output": self.text, "step": step, "finish_reason": self.finish, "usage": usage}
        given |= {"trace": self.trace, "num_reasoning_chars": self.num_reasoning_chars}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Fail:
    """An error message inside the stream, which stays open: what Triton does."""

    message: str


@dataclass(frozen=True)
class Abort:
    """End the call with a gRPC status."""

    status: grpc.StatusCode
    details: str


@dataclass
class Gate:
    """Wait until the test opens it, or the call ends."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


Act = Reply | Fail | Abort | Gate
FINISH = Reply(finish="stop", usage={"completion_tokens": 3, "latency_s": 1.5})


@dataclass
class Seen:
    """One request as the server saw it."""

    inputs: dict[str, Any]
    metadata: dict[str, str]
    request_id: str
    model: str
    ended: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False

    def was_cancelled(self) -> bool:
        """Waits for the end of the call, then says whether the client cancelled it."""
        assert self.ended.wait(WAIT_S), "the call never ended"
        return self.cancelled


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers a question (its text, or the last message) by the script of that name.

    ``port``: 0 is a free one. ``credentials``: for TLS.
    """

    def __init__(
        self,
        scripts: Mapping[str, Sequence[Act]],
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.scripts = dict(scripts)
        self.requests: list[Seen] = []
        self.ready = True
        self.models = {"lookahead"}
        self.refusal: Abort | None = None
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = (
            self._server.add_insecure_port(f"localhost:{port}")
            if credentials is None
            else self._server.add_secure_port(f"localhost:{port}", credentials)
        )
        self.url = f"localhost:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.die()

    def die(self) -> None:
        """Stop at once: every open call is aborted."""
        assert self._server.stop(grace=None).wait(WAIT_S)

    def die_seen_by(self, channel: grpc.Channel) -> None:
        """Die, and return once this client's connection has ended: a call that meets the end may hang."""
        ended = threading.Event()

        def heard(state: grpc.ChannelConnectivity) -> None:
            if state is not grpc.ChannelConnectivity.READY:
                ended.set()

        channel.subscribe(heard)
        self.die()
        assert ended.wait(WAIT_S), "the connection never ended"
        channel.unsubscribe(heard)

    def request(self, index: int = 0) -> Seen:
        """The index-th request; waits for it to arrive."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.requests) > index, WAIT_S), "no such request"
        return self.requests[index]

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request: Any, context: Any) -> Any:
        if self.refusal is not None:
            context.abort(self.refusal.status, self.refusal.details)
        return service_pb2.ModelReadyResponse(ready=request.name in self.models)

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        message = next(request_iterator)
        metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        seen = Seen(decode_inputs(message), metadata, message.id, message.model_name)
        finished = threading.Event()

        def ended() -> None:
            seen.cancelled = not finished.is_set()
            seen.ended.set()

        if not context.add_callback(ended):  # it was cancelled before this thread came to it
            ended()
        with self._arrived:
            self.requests.append(seen)
            self._arrived.notify_all()
        yield from self._play(self._script(seen), context, seen)
        # The client closes its sending side, or an open stream would never end.
        assert next(request_iterator, None) is None
        finished.set()

    def _script(self, seen: Seen) -> Sequence[Act]:
        if "messages" in seen.inputs:
            return self.scripts[json.loads(seen.inputs["messages"][0])[-1]["content"]]
        return self.scripts[seen.inputs["text_input"][0]]

    def _play(self, script: Sequence[Act], context: Any, seen: Seen) -> Iterator[Any]:
        for act in with_reasoning(script):
            match act:
                case Reply():
                    yield stream_response(act.outputs())
                case Fail(message):
                    yield service_pb2.ModelStreamInferResponse(error_message=message)
                case Abort(status, details):
                    context.abort(status, details)
                case Gate():
                    act.reached.set()
                    until_s = time.monotonic() + WAIT_S
                    # The end of this call opens the gate for no other one that waits there.
                    while not (act.opened.wait(LOOK_S) or seen.ended.is_set()):
                        assert time.monotonic() < until_s, "nobody opened the gate"


def with_reasoning(script: Sequence[Act]) -> Iterator[Act]:
    """The script, whose replies say how much of their text is reasoning."""
    whole = "".join(act.text or "" for act in script if isinstance(act, Reply))
    _, closing, rest = whole.partition("</think>")
    left = len(whole) - len(rest) if closing or whole.startswith("<think>") else 0
    for act in script:
        if isinstance(act, Reply) and act.text is not None and act.num_reasoning_chars is None:
            num = min(left, len(act.text))
            left, act = left - num, replace(act, num_reasoning_chars=num)
        yield act


def stream_response(outputs: Mapping[str, str | int]) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    for name, value in outputs.items():
        if isinstance(value, str):
            text = value.encode()
            datatype, raw = "BYTES", struct.pack("<I", len(text)) + text
        else:
            datatype, raw = "INT32", struct.pack("<i", value)
        response.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.infer_response.raw_output_contents.append(raw)
    return response


_FORMATS = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


def decode_inputs(request: Any) -> dict[str, list[Any]]:
    """What Triton would hand to the model; written apart from the client's own code."""
    decoded: dict[str, list[Any]] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values: list[Any] = []
            while raw:
                (length,) = struct.unpack_from("<I", raw)
                values.append(raw[4 : 4 + length].decode())
                raw = raw[4 + length :]
        else:
            code = _FORMATS[tensor.datatype]
            values = list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))
        assert list(tensor.shape) == [len(values)]
        decoded[tensor.name] = values
    return decoded
