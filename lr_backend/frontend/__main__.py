"""The process: told what to do by a line of JSON on its standard input, and ended by the end of that.

``lookahead serve`` starts it (:mod:`lr_backend.frontend.process`). It says ``ready`` on its standard output once it listens.
The input stays open for as long as its starter lives: when that dies, however it dies, answers in flight may finish, and then
this process ends.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import threading
from contextlib import AsyncExitStack, suppress

import grpc
import uvicorn
import uvloop
from lr_client import AsyncClient

from lr_backend.engine.address import Address
from lr_backend.errors import LookaheadError
from lr_backend.frontend.app import Frontend
from lr_backend.frontend.limits import Keys
from lr_backend.frontend.process import READY
from lr_backend.frontend.settings import Launch
from lr_backend.frontend.tls import certified_name
from lr_backend.frontend.wire import config_of
from lr_backend.logs import configure
from lr_backend.telemetry import open_telemetry

STDIN, STDOUT = 0, 1
SEND_S = 2.0
"""For the last spans to be sent. A collector that is away must not hold up the end, which has its time."""


class _Server(uvicorn.Server):
    """Says when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            os.write(STDOUT, READY)


def _client(launch: Launch) -> AsyncClient:
    """Over TLS where Triton has a certificate; that is then trusted as it is, whatever name it has."""
    timeout_s = launch.deployed.request_s
    if launch.certificate is None:
        return AsyncClient(launch.grpc_url, timeout_s=timeout_s)
    name = certified_name(launch.grpc_url, launch.certificate)
    credentials = grpc.ssl_channel_credentials(launch.certificate.read_bytes())
    return AsyncClient(launch.grpc_url, timeout_s=timeout_s, credentials=credentials, server_name=name)


def _target_at(url: str) -> AsyncClient:
    """The target's server elsewhere: it is only asked whether it is ready."""
    address = Address.parse(url)
    return AsyncClient(address.host_and_port, credentials=grpc.ssl_channel_credentials() if address.secure else None)


async def serve(launch: Launch) -> None:
    """Answer until asked to end, or until nobody holds the other end of the input."""
    keys, telemetry = Keys.read(launch.settings.keys_file), open_telemetry("lookahead-frontend", os.environ)
    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(_client(launch))
        targets = [await opened.enter_async_context(_target_at(url)) for url in launch.deployed.targets]
        about = launch.metrics_url, telemetry, targets, launch.notice_file
        frontend = Frontend(launch.settings, launch.deployed, client, keys, *about)
        server = _Server(config_of(frontend.app(), launch.settings))

        async def drain() -> None:
            # It listens to the end: whoever asks for a probe or an answer is told, and none is cut off.
            with suppress(TimeoutError):
                async with asyncio.timeout(launch.drain_s):
                    await frontend.drained()
            server.should_exit = True

        draining: list[asyncio.Task[None]] = []

        def ended() -> None:
            if not os.read(STDIN, 4096):
                asyncio.get_running_loop().remove_reader(STDIN)
                draining.append(asyncio.create_task(drain()))

        asyncio.get_running_loop().add_reader(STDIN, ended)
        try:
            await server.serve([socket.socket(fileno=launch.socket_fd)])
        finally:
            if telemetry is not None:
                closing = threading.Thread(target=telemetry.close, daemon=True)
                closing.start()
                await asyncio.to_thread(closing.join, SEND_S)


def _allow_connections() -> None:
    """As many as the system lets a process have. With the usual 1,024, clients that only connect could shut out all others."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    configure(knows_texts=True)
    _allow_connections()
    if not (told := sys.stdin.buffer.readline()):  # it is to end before it was to begin
        return 0
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(Launch.model_validate_json(told)))
    except LookaheadError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
