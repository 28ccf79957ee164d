"""The health probe against a small HTTP server, in this process and as a health check runs it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from lr_backend.cli.app import app
from lr_backend.serve import health
from lr_backend.serve.health import why_not_ready


class _Triton(HTTPServer):
    status = 200
    paths: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Triton

    def do_GET(self) -> None:
        self.server.paths += (self.path,)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def triton() -> Iterator[_Triton]:
    with _Triton(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_ready(triton: _Triton) -> None:
    assert why_not_ready(triton.url) is None
    assert triton.paths == ("/v2/health/ready",)


def test_not_ready(triton: _Triton) -> None:
    triton.status = 400  # what Triton answers while a model is not ready
    assert why_not_ready(triton.url) == f"{triton.url} is not ready: HTTP 400"


def test_nobody_there(triton: _Triton) -> None:
    url = triton.url
    triton.server_close()
    assert "does not answer" in (why_not_ready(url) or "")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "https://localhost:8000", "http://", "http://host:port", "http://host:99999"]
)
def test_an_address_that_is_none(url: str) -> None:
    assert why_not_ready(url) is not None


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1)])
def test_as_a_health_check_runs_it(triton: _Triton, status: int, code: int) -> None:
    triton.status = status
    done = subprocess.run([sys.executable, "-I", "-S", health.__file__, triton.url], capture_output=True, text=True, check=False)
    assert done.returncode == code and bool(done.stdout) == bool(code) and not done.stderr


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1)])
def test_the_health_command(triton: _Triton, status: int, code: int) -> None:
    triton.status = status
    assert CliRunner().invoke(app, ["health", "--url", triton.url]).exit_code == code
