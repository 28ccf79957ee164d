"""The asyncio client: :mod:`lr_client.client` with ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from lr_client import _wire
from lr_client.client import DEFAULT_TIMEOUT_S, DEFAULT_URL, READY_TIMEOUT_S
from lr_client.errors import ClientError
from lr_client.fields import Options
from lr_client.protocol import Collector, encode, read_at_once
from lr_client.types import Event, Question, Result


class AsyncStream(AsyncIterator[Event]):
    """The events of one answer, as they come. One task iterates; any task of the loop may ``cancel``.

    Leaving the ``async with`` block, dropping the stream, or cancelling the task that iterates cancels what
    has not ended. Iterating raises a :class:`~lr_client.errors.ClientError` where the answer fails, once.
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
        with contextlib.suppress(RuntimeError):  # its event loop may be closed already
            self._exchange.cancel()

    async def __anext__(self) -> Event:
        while (event := self._exchange.next_event()) is None:
            if self._exchange.over:
                raise StopAsyncIteration
            await self._receive()
        return event

    async def _receive(self) -> None:
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            # gRPC raises this also where cancel() was called on the call, and no one cancelled this task.
            if self._exchange.cancelled and not _task_is_cancelled():
                raise self._exchange.failed("CANCELLED", "") from None
            self.cancel()
            raise
        except grpc.RpcError as error:
            self._exchange.broken(error.code().name, error.details() or "")
            return
        if response is grpc.aio.EOF:
            self._exchange.ended()
        else:
            self._exchange.received(response)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """Asks a lookahead server, over one gRPC connection that any number of tasks of one event loop may share.

    Takes the arguments of :class:`lr_client.Client`. The first request connects, in the loop that runs then.
    Once that loop is closed, the next request connects anew.
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
        self._credentials = credentials
        self._server_name = server_name
        self._metadata = _wire.metadata_pairs(metadata)
        self._streams = _wire.OpenStreams()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._stub: Any = None

    async def ask(
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
        async with self.stream(
            question, read_at_once(options), timeout_s=timeout_s, request_id=request_id, metadata=metadata
        ) as events:
            async for event in events:
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
    ) -> AsyncStream:
        """The answer as it is committed; the request is sent once the event loop gets its turn.

        Raises:
            InvalidRequest: a value cannot be sent. What the server refuses is raised by the iteration.
        """
        limit_s = self.timeout_s if timeout_s is None else _wire.checked_timeout(timeout_s)
        request_id = _wire.checked_id(request_id)
        headers = (*self._metadata, *_wire.metadata_pairs(metadata))
        request = _wire.infer_request(self.model, request_id, encode(question, options))
        call = self._connected().ModelStreamInfer((request,), timeout=limit_s, metadata=headers)
        exchange = _wire.Exchange(call, request_id=request_id, url=self.url, timeout_s=limit_s)
        stream = AsyncStream(call, exchange)
        self._streams.add(stream)
        return stream

    async def is_ready(
        self, *, timeout_s: float = READY_TIMEOUT_S, models: Sequence[str] | None = None
    ) -> bool:
        """Whether server and model can take requests; False too where nothing answers in ``timeout_s``.

        Args:
            models: whether these can, whatever has become of the others; None: the server with all of them.
        """
        until_s = time.monotonic() + _wire.checked_timeout(timeout_s)
        stub = self._connected()
        try:
            if models is None:
                server = await stub.ServerReady(
                    _wire.server_ready_request(), timeout=timeout_s, metadata=self._metadata
                )
                if not server.ready:
                    return False
            for name in (self.model,) if models is None else models:
                left_s = max(until_s - time.monotonic(), 0.0)
                model = await stub.ModelReady(
                    _wire.model_ready_request(name), timeout=left_s, metadata=self._metadata
                )
                if not model.ready:
                    return False
        except grpc.RpcError:
            return False
        except grpc.aio.UsageError:  # what gRPC says of a channel that another task has just closed
            self._streams.check_open()
            raise
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            return False  # gRPC cancels what is open when another task closes the client
        return True

    def _connected(self) -> Any:
        # grpc.aio binds a channel to the loop that runs when it is made.
        self._streams.check_open()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ClientError(
                "no event loop runs here", advice="ask from a coroutine, or use Client"
            ) from None
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise ClientError(
                    "the client is in use in another event loop", advice="make one for each loop"
                )
            options = _wire.channel_options(self.url, self._server_name)
            self._channel = (
                grpc.aio.insecure_channel(self.url, options)
                if self._credentials is None
                else grpc.aio.secure_channel(self.url, self._credentials, options)
            )
            self._stub = _wire.stub(self._channel)
            self._loop = loop
        return self._stub

    async def close(self) -> None:
        """Cancel open requests and close the connection. May be called again.

        Raises:
            ClientError: the client is in use in another event loop.
        """
        loop = self._loop
        if loop is not None and loop is not asyncio.get_running_loop():
            if not loop.is_closed():
                raise ClientError("the client is in use in another event loop", advice="close it there")
            self._channel = self._stub = None  # what is left of its connection ends with it
        self._streams.close()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
