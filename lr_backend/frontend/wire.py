"""How connections are kept: what uvicorn is told, and a bound on what it would wait for without end."""

from __future__ import annotations

import asyncio
import socket

import h11
from fastapi import FastAPI
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from lr_backend.frontend.settings import Settings

UNREAD_S = 120.0
"""After which a connection ends whose other side lives and reads nothing; else it would stay until that side dies."""
KEEP_IDLE_S, KEEP_EVERY_S = 60, 15
"""A silent connection is asked after so long, and then so often, whether its other side lives; it ends after :data:`UNREAD_S`."""

KEEP_ALIVE_S = 620
"""For a connection without a request: longer than gateways keep one (Google's: 600 s), so that it is they who close it."""
MAX_AHEAD_BYTES = 64 << 10
"""Sent behind a request that is being answered; with more the connection ends."""
CLOSING_S = 2
"""For the last bytes of answers to reach their clients."""


def config_of(app: FastAPI, settings: Settings) -> Config:
    """For uvicorn, which is told to end once the answers in flight have."""
    return Config(
        app,
        http=_protocol(settings.max_head_s),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )


def _protocol(max_head_s: float) -> type[H11Protocol]:
    class Bounded(H11Protocol):
        """Ends a connection whose next request has not said its line and its headers in time; one that says nothing too."""

        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            _notice_its_death(transport.get_extra_info("socket"))
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:  # sent without waiting for the answer: the next request has begun
                self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _look(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
                if not self.cycle.more_body:
                    self._read_on()
            elif self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                self._rest()
            else:
                self._wait_for_head()

        def _rest(self) -> None:
            """The end of a body has come behind the answer, which did not wait for it, and nothing of a next request."""
            self._stop_waiting()
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

        def _read_on(self) -> None:
            """Behind a whole request too: who does not read never learns that the client has gone."""
            if len(self.conn.trailing_data[0]) <= MAX_AHEAD_BYTES:
                self.flow.resume_reading()
            else:
                self.transport.close()

        def _wait_for_head(self) -> None:
            """From its first byte on: more of them move nothing."""
            if self._waiting is None:
                self._waiting = self.loop.call_later(max_head_s, self.timeout_keep_alive_handler)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return Bounded


def _notice_its_death(connection: socket.socket) -> None:
    """Of the other side, which may be unable to say so."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * UNREAD_S))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_EVERY_S)
