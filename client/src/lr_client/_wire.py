"""The only module that touches Triton's generated messages and gRPC's untyped objects.

tritonclient's own ``InferenceServerClient`` holds one stream at a time and hands results to a callback on a
thread of its own. The stub underneath, published as ``service_pb2_grpc``, makes any number of calls on one
connection, from any thread, each with its own deadline and ``cancel()``. So each request here is one call:
its message is sent, the sending side closed, and the server ends the call after its last response.
"""

from __future__ import annotations

import re
import struct
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from lr_client.errors import Cancelled, ClientError, InvalidRequest, ServerError
from lr_client.protocol import OUTPUTS, Decoder, Tensor, error_from_status, error_from_text, shown
from lr_client.types import Event

MAX_TIMEOUT_S = 86400.0
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's own limit is two minutes, during which every request would fail though the server is back.
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Else a new client fails with older ones of the process that still wait before they connect again.
    ("grpc.use_local_subchannel_pool", 1),
    # A whole answer sends no byte for minutes: a connection that is dead by then shows by a ping alone.
    # Triton closes on clients that ping more often than every 5 minutes, or while nothing is asked.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)
# The server keeps no more of an id.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,80}")


class Call(Protocol):
    """What gRPC's sync and asyncio calls have in common here."""

    def cancel(self) -> object:
        """Tell the server to stop. Harmless after the end."""


def stub(channel: Any) -> Any:
    """Triton's methods on a channel, sync or asyncio."""
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def checked_url(url: str) -> str:
    """The gRPC address.

    Raises:
        InvalidRequest: it is no text, or has a scheme, which gRPC would take for the name of a resolver.
    """
    if not isinstance(url, str) or "://" in url or not url:
        rule = "give the gRPC address as host:port, such as localhost:8001"
        raise InvalidRequest(f"url={url!r}: {rule}", field="url")
    return url


def checked_timeout(timeout_s: object) -> float:
    """Seconds that one request may take.

    Raises:
        InvalidRequest: not a number above 0 and up to a day.
    """
    # The bounds are false for NaN too.
    if not (isinstance(timeout_s, int | float | np.integer | np.floating) and 0 < timeout_s <= MAX_TIMEOUT_S):
        rule = f"seconds above 0 and up to {MAX_TIMEOUT_S:g}"
        raise InvalidRequest(f"timeout_s={shown(timeout_s)}: {rule}", field="timeout_s")
    return float(timeout_s)


def checked_id(request_id: str | None) -> str:
    """The id of a request; a new one where None is given.

    Raises:
        InvalidRequest: it is not 1 to 80 visible ASCII characters.
    """
    if request_id is None:
        return uuid.uuid4().hex
    if not (isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id)):
        rule = "1 to 80 visible ASCII characters"
        raise InvalidRequest(f"request_id={shown(request_id)}: {rule}", field="request_id")
    return request_id


def channel_options(url: str, server_name: str | None) -> tuple[tuple[str, int | str], ...]:
    """Options of a connection to ``host:port``.

    Args:
        server_name: that the certificate names, if it is not the host asked.
    """
    host = url.rsplit(":", 1)[0].strip("[]")
    # A proxy that is there for the web knows no way back to this machine.
    near = (("grpc.enable_http_proxy", 0),) if host in ("localhost", "::1") or host.startswith("127.") else ()
    named = () if server_name is None else (("grpc.ssl_target_name_override", server_name),)
    return (*CHANNEL_OPTIONS, *near, *named)


def infer_request(model: str, request_id: str, tensors: tuple[Tensor, ...]) -> Any:
    """The ``ModelInferRequest`` of one question."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.values.shape)
        strings = tensor.datatype == "BYTES"
        raw = serialize_byte_tensor(tensor.values).item() if strings else tensor.values.tobytes()
        request.raw_input_contents.append(raw)
    return request


def server_ready_request() -> Any:
    """Asks whether the server and every model of it are ready."""
    return service_pb2.ServerReadyRequest()


def model_ready_request(model: str) -> Any:
    """Asks whether one model is ready."""
    return service_pb2.ModelReadyRequest(name=model)


def outputs_of(response: Any) -> dict[str, bytes | int]:
    """The outputs present in one ``ModelStreamInferResponse``: text as bytes, and numbers.

    Raises:
        ClientError: the response is an error, or unreadable.
    """
    if response.error_message:
        raise error_from_text(response.error_message)
    result = InferResult(response.infer_response)
    try:
        arrays = [(name, result.as_numpy(name)) for name in OUTPUTS]
        return {name: _plain(array.flat[0]) for name, array in arrays if array is not None and array.size}
    except (ValueError, TypeError, struct.error) as error:
        raise ServerError("unreadable response from the server") from error


def _plain(value: Any) -> bytes | int:
    return value if isinstance(value, bytes) else int(value)


class Exchange:
    """The state of one request that both transports share; does no input or output but ``call.cancel()``.

    Attributes:
        request_id: sent with the request; the server's log and traces carry it, with a suffix.
        over: nothing more will come.
    """

    def __init__(self, call: Call, *, request_id: str, url: str, timeout_s: float) -> None:
        self.request_id = request_id
        self.over = False
        self.cancelled = False
        self._call = call
        self._url = url
        self._timeout_s = timeout_s
        self._decoder = Decoder()
        self._events: deque[Event] = deque()

    def cancel(self) -> None:
        """Tell the server to stop; the iteration then raises ``Cancelled``. No effect after the end."""
        if not (self.over or self._decoder.finished):  # the answer may be complete before the call ends
            self.cancelled = True
            self._call.cancel()

    def next_event(self) -> Event | None:
        """An event that is here already, or None: receive more, unless it is over.

        Raises:
            Cancelled: ``cancel`` was called.
        """
        if self.cancelled and not self.over:
            raise self.failed("CANCELLED", "")
        return self._events.popleft() if self._events else None

    def received(self, response: Any) -> None:
        """Take one response.

        Raises:
            ClientError: it is an error; the call is cancelled, since Triton leaves it open.
        """
        try:
            self._events.extend(self._decoder.feed(outputs_of(response)))
        except ClientError:
            self.over = True
            self._call.cancel()
            if self.cancelled:
                raise Cancelled("the request was cancelled") from None
            raise

    def ended(self) -> None:
        """The server closed the call with status OK.

        Raises:
            ServerError: before the end of the answer.
        """
        self.over = True
        self._decoder.end()

    def broken(self, status: str, details: str) -> None:
        """The call ended with another status.

        Raises:
            ClientError: unless the answer was complete by then.
        """
        self.over = True
        if not self._decoder.finished:
            raise self.failed(status, details)

    def failed(self, status: str, details: str) -> ClientError:
        """The typed error of a status; the exchange is over, and what it still held is dropped."""
        self.over = True
        self._events.clear()
        return error_from_status(
            status, details, url=self._url, timeout_s=self._timeout_s, cancelled=self.cancelled
        )


class _Stream(Protocol):
    def cancel(self) -> None: ...


class OpenStreams:
    """The streams that closing a client must cancel. Holds none of them alive. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False

    def check_open(self) -> None:
        """Refuse to work for a closed client.

        Raises:
            ClientError: the client is closed.
        """
        if self._closed:
            raise ClientError("the client is closed", advice="make a new one")

    def add(self, stream: _Stream) -> None:
        """Remember a stream; one that lost the race against ``close`` is cancelled at once."""
        with self._lock:
            self._streams.add(stream)
            closed = self._closed
        if closed:
            stream.cancel()

    def close(self) -> None:
        """Cancel every open stream and refuse new ones."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()


Metadata = Mapping[str, str]
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[0-9a-z_.-]+"), re.compile(r"[\x20-\x7e]*")


def metadata_pairs(metadata: Metadata | None) -> tuple[tuple[str, str], ...]:
    """Headers as gRPC wants them: names in lower case.

    Raises:
        InvalidRequest: one that cannot be sent, by its name: a value may be a secret.
    """
    if not isinstance(metadata, Mapping | None):
        raise InvalidRequest("metadata: give a mapping of names to values", field="metadata")
    pairs = []
    for name, value in (metadata or {}).items():
        texts = isinstance(name, str) and isinstance(value, str)
        if not (texts and _HEADER_NAME.fullmatch(name.lower()) and _HEADER_VALUE.fullmatch(value)):
            rule = "letters, digits and . _ - in the name, and printable ASCII in the value"
            raise InvalidRequest(f"metadata: header {name!r}: {rule}", field="metadata")
        pairs.append((name.lower(), value))
    return tuple(pairs)
