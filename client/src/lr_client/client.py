"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from lr_client import _wire
from lr_client.fields import Options
from lr_client.protocol import Collector, encode, read_at_once
from lr_client.types import Event, Question, Result

DEFAULT_URL = "localhost:8001"
DEFAULT_TIMEOUT_S = 910.0
"""Longer than the servers' own limit of 900 s on GPUs, so that theirs ends an answer and its text is kept."""
READY_TIMEOUT_S = 5.0


class Stream(Iterator[Event]):
    """The events of one answer, as they come. One thread iterates; any thread may ``cancel``.

    Leaving the ``with`` block, or dropping the stream, cancels what has not ended. Iterating raises a
    :class:`~lr_client.errors.ClientError` where the answer fails, once; after that the stream is over.
    """

    def __init__(self, call: Any, exchange: _wire.Exchange) -> None:
        self._call = call
        self._exchange = exchange

    @property
    def request_id(self) -> str:
        """The id that was sent; the server's log and trace have it with a suffix, ``-`` and 12 characters."""
        return self._exchange.request_id

    def cancel(self) -> None:
        """Tell the server to stop; the iteration raises ``Cancelled``. No effect after the end."""
        self._exchange.cancel()

    def __next__(self) -> Event:
        while (event := self._exchange.next_event()) is None:
            if self._exchange.over:
                raise StopIteration
            self._receive()
        return event

    def _receive(self) -> None:
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            self._exchange.broken(error.code().name, error.details() or "")
            return
        if response is None:
            self._exchange.ended()
        else:
            self._exchange.received(response)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client:
    """Asks a lookahead server, over one gRPC connection that any number of threads may share.

    Args:
        url: gRPC address of Triton, ``host:port``.
        model: name of the lookahead model there.
        timeout_s: seconds that a request may take from start to end, where the call gives none.
        credentials: for TLS, such as ``grpc.ssl_channel_credentials()``; None is plain text.
        metadata: headers of every request, such as a token for a gateway.
        server_name: that the server's certificate names, where it is not the host in ``url``.

    Raises:
        InvalidRequest: ``url`` or ``timeout_s`` cannot be used. Connecting happens with the first request.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = "lookahead",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: _wire.Metadata | None = None,
        server_name: str | None = None,
    ) -> None:
        self.url = _wire.checked_url(url)
        self.model = model
        self.timeout_s = _wire.checked_timeout(timeout_s)
        self._metadata = _wire.metadata_pairs(metadata)
        self._streams = _wire.OpenStreams()
        options = _wire.channel_options(url, server_name)
        self._channel = (
            grpc.insecure_channel(url, options)
            if credentials is None
            else grpc.secure_channel(url, credentials, options)
        )
        self._stub = _wire.stub(self._channel)

    def ask(
        self,
        question: Question,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        metadata: _wire.Metadata | None = None,
    ) -> Result:
        """The whole answer to a question, or to the last turn of a list of messages.

        Unless ``options`` say otherwise, the server sends it in one piece, which is faster than a stream.

        Args:
            timeout_s: seconds until the request is given up and cancelled; None is the client's own.
            request_id: what the server's log calls the request, with a suffix there; at most 80 characters.
                None makes one.
            metadata: headers of this request beside the client's own, such as ``traceparent``.

        Raises:
            ClientError: see :mod:`lr_client.errors`.
        """
        collector = Collector()
        with self.stream(
            question, read_at_once(options), timeout_s=timeout_s, request_id=request_id, metadata=metadata
        ) as events:
            for event in events:
                collector.add(event)
        return collector.result()

    def stream(
        self,
        question: Question,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        metadata: _wire.Metadata | None = None,
    ) -> Stream:
        """The answer as it is committed; the request is sent at once.

        Raises:
            InvalidRequest: a value cannot be sent. What the server refuses is raised by the iteration.
        """
        self._streams.check_open()
        limit_s = self.timeout_s if timeout_s is None else _wire.checked_timeout(timeout_s)
        request_id = _wire.checked_id(request_id)
        headers = (*self._metadata, *_wire.metadata_pairs(metadata))
        request = _wire.infer_request(self.model, request_id, encode(question, options))
        try:
            call = self._stub.ModelStreamInfer(iter((request,)), timeout=limit_s, metadata=headers)
        except ValueError:  # what gRPC says of a channel that another thread has just closed
            self._streams.check_open()
            raise
        exchange = _wire.Exchange(call, request_id=request_id, url=self.url, timeout_s=limit_s)
        stream = Stream(call, exchange)
        self._streams.add(stream)
        return stream

    def is_ready(self, *, timeout_s: float = READY_TIMEOUT_S, models: Sequence[str] | None = None) -> bool:
        """Whether server and model can take requests; False too where nothing answers in ``timeout_s``.

        Args:
            models: whether these can, whatever has become of the others; None: the server with all of them.
        """
        try:
            return self._says_ready(timeout_s, models)
        except grpc.RpcError:
            return False

    def _says_ready(self, timeout_s: float, models: Sequence[str] | None) -> bool:
        """As :meth:`is_ready`, as the server itself says.

        Raises:
            grpc.RpcError: it says nothing of the kind.
        """
        self._streams.check_open()
        until_s = time.monotonic() + _wire.checked_timeout(timeout_s)
        try:
            if models is None:
                server = self._stub.ServerReady(
                    _wire.server_ready_request(), timeout=timeout_s, metadata=self._metadata
                )
                if not server.ready:
                    return False
            for name in (self.model,) if models is None else models:
                left_s = max(until_s - time.monotonic(), 0.0)
                model = self._stub.ModelReady(
                    _wire.model_ready_request(name), timeout=left_s, metadata=self._metadata
                )
                if not model.ready:
                    return False
        except ValueError:  # as in stream()
            self._streams.check_open()
            raise
        return True

    def close(self) -> None:
        """Cancel open requests and close the connection. May be called again."""
        self._streams.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
