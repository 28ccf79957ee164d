"""An answer as it is written: server-sent events, for as long as somebody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from lr_client import ClientError, Event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lr_backend.frontend.answering import Answers, unless_gone
from lr_backend.frontend.answers import Choice, Document, Head, counted, counts_document, to_json
from lr_backend.frontend.asked import Asked
from lr_backend.frontend.call import Call
from lr_backend.frontend.errors import ApiError, ClientGone, internal

DONE = b"data: [DONE]\n\n"
_BREAKS = {char.encode(): json.dumps(char).strip('"').encode() for char in "\x85\u2028\u2029"}
"""Characters that many clients take for the end of a line and that JSON leaves as they are, with their escapes."""
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would wait for more
}


class EventStream(Response):
    """Says 200 at once: the first event is there. An error after it is an event too, and the last one.

    Args:
        first: what :meth:`~lr_backend.frontend.answering.Answers.next` has brought.
        held: what the request holds, given back at the end.
        limit_s: for all of it; a client that does not read is let go then.
    """

    def __init__(
        self,
        call: Call,
        asked: Asked,
        head: Head,
        choices: Sequence[Choice],
        answers: Answers,
        *,
        first: tuple[int, Event] | None,
        held: AsyncExitStack,
        limit_s: float,
    ) -> None:
        super().__init__(headers=_HEADERS | call.headers)
        del self.headers["content-length"]
        self._call, self._asked, self._answers = call, asked, answers
        self._choices, self._first = choices, first
        self._document = head.document(chunk=True) | ({"usage": None} if asked.include_usage else {})
        self._held, self._limit_s = held, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            try:
                async with asyncio.timeout(self._limit_s):
                    await unless_gone(receive, self._send(send))
            except ClientGone:
                self._call.log(499, code="client_gone", streamed=True)
            except TimeoutError:  # not the answer's, which says so: nobody reads. The connection breaks off.
                self._call.log(499, code="client_gone", streamed=True)
            except asyncio.CancelledError:  # the server ends, and waits no longer
                self._call.log(200, code="unavailable", streamed=True)
                raise

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            counts = counts_document(self._asked, self._choices)
            last = self._event({"choices": [], **counts}) if self._asked.include_usage else b""
            self._call.log(200, streamed=True, **counted(counts))
            last += DONE
        except ClientError as error:
            last = self._failed(self._call.told_as(error, self._asked.param_of))
        except Exception as error:
            self._call.crashed(error)
            last = self._failed(internal())
        # Who reads the end may ask again at once, and finds the place free.
        await self._held.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        """The events of the stream but for its last ones; those that come of one event of the server's together."""
        if self._asked.chat:
            yield b"".join(self._event({"choices": [choice.opening()]}) for choice in self._choices)
        heard = self._first
        while heard is not None:
            number, event = heard
            yield b"".join(self._event({"choices": [choice]}) for choice in self._choices[number].chunks(event))
            heard = await self._answers.next()

    def _event(self, said: Document) -> bytes:
        data = to_json(self._document | said)
        for char, escaped in _BREAKS.items():
            data = data.replace(char, escaped)
        return b"data: " + data + b"\n\n"

    def _failed(self, error: ApiError) -> bytes:
        self._call.log(200, streamed=True, code=error.code)
        return b"event: error\ndata: " + error.body(self._call.request_id) + b"\n\n"
