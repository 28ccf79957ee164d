"""TLS before the door, by ``deploy/nginx.conf``: answers, streams, keys and clients that leave pass through it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, DefaultHttpxClient, OpenAI

from tests.support.fake_lookahead import FakeServer, Reply
from tests.support.fake_lookahead import Gate as Pause
from tests.support.frontend import CHAT, WAIT_S, frontend

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
KEY = "a-key-of-16-chars"
NAME = "lookahead.example"
pytestmark = pytest.mark.skipif(not (NGINX and shutil.which("openssl")), reason="needs nginx and openssl (Debian's packages)")

FINISH = Reply(finish="stop", usage={"completion_tokens": 1})


@dataclass(frozen=True)
class Gateway:
    port: int
    certificate: Path

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))

    def client(self, key: str = KEY) -> OpenAI:
        """OpenAI's own, which finds the name at this machine."""
        http = DefaultHttpxClient(verify=self.context, timeout=WAIT_S, trust_env=False)
        return OpenAI(base_url=f"https://localhost:{self.port}/v1", api_key=key, max_retries=0, http_client=http)

    def connect(self) -> HTTPSConnection:
        return HTTPSConnection("localhost", self.port, context=self.context, timeout=WAIT_S)


def configured(folder: Path, door: int, port: int) -> Path:
    """The file as it is, with this machine's ports and paths, inside what Debian's nginx.conf says around it."""
    text = CONFIG.read_text(encoding="utf-8")
    for said, here in {
        "127.0.0.1:9000": f"127.0.0.1:{door}",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/nginx/tls/lookahead": str(folder / "tls"),
    }.items():
        assert said in text
        text = text.replace(said, here)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    around = f"pid {folder}/pid;\nerror_log {folder}/errors;\ndaemon off;\nworker_processes 1;\nevents {{}}\n"
    if os.getuid() == 0:
        around += "user root root;\n"  # else the worker is nobody, who may not enter the test's folder
    path = folder / "nginx.conf"
    path.write_text(f"{around}http {{\naccess_log off;\n{temporary}{text}\n}}\n", encoding="utf-8")
    return path


@pytest.fixture
def pause() -> Pause:
    return Pause()


@pytest.fixture
def server(pause: Pause) -> Iterator[Any]:
    scripts = {"q": [Reply(text="yes"), FINISH], "held": [Reply(text="first"), pause, Reply(text=" last"), FINISH]}
    with FakeServer(scripts) as running:
        yield running


@pytest.fixture
def gateway(server: Any, tmp_path: Path) -> Iterator[Gateway]:
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},DNS:localhost"]
    made = ["-keyout", str(tmp_path / "tls.key"), "-out", str(tmp_path / "tls.crt")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *made]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with frontend(server.url, keys=[KEY]) as door, socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        path = configured(tmp_path, door.port, port)
        assert NGINX is not None
        # nginx takes over the socket that $NGINX names, as in its own upgrades: nobody else can have the port meanwhile.
        running = subprocess.Popen(
            [NGINX, "-e", str(tmp_path / "errors"), "-p", str(tmp_path), "-c", str(path)],
            env={**os.environ, "NGINX": f"{listening.fileno()};"},
            pass_fds=[listening.fileno()],
        )
        try:
            yield Gateway(port, tmp_path / "tls.crt")  # it listens already: who connects before nginx runs waits
        finally:
            running.terminate()
            running.wait(WAIT_S)


def test_openais_client_is_answered_by_tls(gateway: Gateway) -> None:
    with gateway.client() as client, gateway.client("wrong-key-of-16-chars") as stranger:
        answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "q"}])
        assert answer.choices[0].message.content == "yes"
        assert [model.id for model in client.models.list()] == ["demo"]
        with pytest.raises(AuthenticationError):
            stranger.models.list()


def test_a_step_comes_through_before_the_next_is_written(gateway: Gateway, pause: Pause) -> None:
    with gateway.client() as client:
        stream = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "held"}], stream=True)
        pieces = (piece.choices[0].delta.content or "" for piece in stream if piece.choices)
        assert next(piece for piece in pieces if piece) == "first"
        pause.opened.set()
        assert "".join(pieces) == " last"


def test_a_client_that_leaves_is_seen_behind_it(gateway: Gateway, server: Any) -> None:
    connection = gateway.connect()
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "held"}], "stream": True})
    connection.request("POST", CHAT, body, {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"})
    seen = server.request(0)
    connection.getresponse().readline()
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    assert seen.was_cancelled()


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/metrics", 404), ("GET", "/v2/health/ready", 404), ("POST", CHAT, 401)]
)
def test_what_is_not_for_everybody_is_not_passed_on(gateway: Gateway, method: str, path: str, status: int) -> None:
    connection = gateway.connect()
    connection.request(method, path, "{}" if method == "POST" else None, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == status


def test_a_body_that_the_door_would_refuse_is_refused_before_it(gateway: Gateway, server: Any) -> None:
    connection = gateway.connect()
    connection.request("POST", CHAT, b" " * ((1 << 20) + 1), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 413
    connection.close()
    assert not server.requests


def test_nothing_is_said_without_tls_and_to_who_does_not_trust_it(gateway: Gateway) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        HTTPSConnection("localhost", gateway.port, timeout=WAIT_S).request("GET", "/ready")
    with socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as plain:
        plain.sendall(b"GET /ready HTTP/1.1\r\nHost: h\r\n\r\n")
        assert b" 400 " in plain.recv(1 << 12).splitlines()[0]
