"""The front end in a thread of the test's own process, before the client's fake server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from lr_client import AsyncClient

from lr_backend.frontend.app import Frontend
from lr_backend.frontend.limits import Keys
from lr_backend.frontend.settings import Deployed, Settings
from lr_backend.frontend.wire import config_of
from lr_backend.telemetry import Telemetry

WAIT_S = 20.0
"""Bound of every wait; reached only by a bug."""
DEPLOYED = Deployed(
    name="demo",
    max_tokens=100,
    default_tokens=100,
    default_temperature=0.0,
    max_depth=4,
    max_width=2,
    max_draft_len=8,
    max_in_flight=6,
    request_s=60.0,
    think_open="<think>",
    think_close="</think>",
)
JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Answered:
    """One whole HTTP answer. ``headers`` by lower case."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["error"]
        return found

    @property
    def events(self) -> list[tuple[str, str]]:
        """(kind, data) of a stream; the kind is empty where none is said."""
        found = []
        for block in self.raw.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines())
            if lines:
                found.append((lines.get("event", ""), lines["data"]))
        return found

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for kind, data in self.events if not kind and data != "[DONE]"]


@dataclass(frozen=True)
class Served:
    """A front end that answers. ``frontend`` lives on another thread: look, and touch nothing."""

    port: int
    frontend: Frontend

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON) -> Answered:
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Answered(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, document: object, headers: Mapping[str, str] = JSON) -> Answered:
        return self.ask("POST", path, json.dumps(document).encode(), {**JSON, **headers})

    def chat(self, question: str, headers: Mapping[str, str] = JSON, **fields: object) -> Answered:
        return self.post(CHAT, {"model": "demo", "messages": [{"role": "user", "content": question}], **fields}, headers)

    def raw_connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)


@contextmanager
def frontend(
    grpc_url: str,
    settings: Settings | None = None,
    deployed: Deployed = DEPLOYED,
    keys: Sequence[str] = (),
    metrics_url: str | None = None,
    telemetry: Telemetry | None = None,
    targets: Sequence[str] = (),
    notice_file: Path | None = None,
) -> Iterator[Served]:
    """Serve until the block is left. ``targets``: gRPC addresses of a target that lives elsewhere."""
    ready, found = threading.Event(), list[Served]()
    listening = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []

    async def run() -> None:
        async with AsyncExitStack() as opened:
            client, *others = [await opened.enter_async_context(AsyncClient(url)) for url in (grpc_url, *targets)]
            said = settings or Settings()
            made = Frontend(said, deployed, client, Keys(keys), metrics_url, telemetry, others, notice_file)
            servers.append(uvicorn.Server(config_of(made.app(), said)))
            found.append(Served(listening.getsockname()[1], made))
            ready.set()
            await servers[0].serve([listening])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield found[0]
    finally:
        servers[0].should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()
