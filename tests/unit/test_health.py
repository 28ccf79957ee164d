"""The health probe against a small HTTP server, in this process and as a health check runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lr_backend.cli.app import app
from lr_backend.serve import health
from lr_backend.serve.health import why_not_ready


class _Triton(HTTPServer):
    status = 200
    waits_for = ""
    paths: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Triton

    def do_GET(self) -> None:
        self.server.paths += (self.path,)
        self.send_response(self.server.status)
        if self.server.waits_for:
            self.send_header(health.WAITS_FOR, self.server.waits_for)
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
    "url",
    [
        "",
        "localhost:8000",
        "https://localhost:8000",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://a b:9000/ready",
        "http://a..b:9000/ready",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    assert why_not_ready(url) is not None


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1)])
def test_as_a_health_check_runs_it(triton: _Triton, status: int, code: int) -> None:
    triton.status = status
    done = subprocess.run([sys.executable, "-I", "-S", health.__file__, triton.url], capture_output=True, text=True, check=False)
    assert done.returncode == code and bool(done.stdout) == bool(code) and not done.stderr


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """What was sent to whom; nothing is."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(health, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def checks(triton: _Triton, *statuses: int) -> None:
    for status in statuses:
        triton.status = status
        assert health.main(["--end-after", "3", triton.url]) == (status != 200)


def test_a_server_that_waits_for_another_one_is_left_alone(triton: _Triton, ended: list[tuple[int, int]]) -> None:
    """A new start of it would bring nobody back."""
    checks(triton, 200)
    triton.waits_for = "target"
    checks(triton, *[503] * 9)
    assert not ended and "it waits for the target" in (why_not_ready(triton.url) or "")
    triton.waits_for = ""
    checks(triton, 503, 503, 503)
    assert ended == [(1, signal.SIGTERM)]


def test_a_server_that_was_ready_and_stays_unready_is_asked_to_end_and_then_again(
    triton: _Triton, ended: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    checks(triton, 200, 400, 400)
    assert not ended
    checks(triton, 400)
    assert ended == [(1, signal.SIGTERM)]
    assert "process 1 is asked to end after 3 failures" in capsys.readouterr().out
    checks(triton, 400, 400, 400)
    assert ended == [(1, signal.SIGTERM)] * 2


def test_one_that_loads_and_one_that_comes_back_are_left_alone(triton: _Triton, ended: list[tuple[int, int]]) -> None:
    checks(triton, 400, 400, 400, 400, 200, 400, 400, 200, 400, 400)
    assert not ended


def test_without_the_option_nothing_is_ended_and_nothing_kept(triton: _Triton, ended: list[tuple[int, int]]) -> None:
    triton.status = 400
    assert [health.main([triton.url]) for _ in range(5)] == [1] * 5
    assert not ended and not health.MEMORY.exists()


@given(before=st.lists(st.booleans(), max_size=8), since=st.integers(0, 5), loading=st.integers(0, 5))
def test_failures_count_from_the_last_time_that_this_process_was_ready(
    tmp_path_factory: pytest.TempPathFactory, before: list[bool], since: int, loading: int
) -> None:
    memory = tmp_path_factory.mktemp("health") / "memory"
    for ready in [*before, True]:
        health.num_failures(ready, "1", memory)
    found = [health.num_failures(False, "1", memory) for _ in range(since)]
    assert found == list(range(1, since + 1))
    assert [health.num_failures(False, "2", memory) for _ in range(loading)] == [0] * loading, "what an earlier start left"


@pytest.mark.parametrize("left", ["", "1", "1 ", "1 many", "\xff"])
def test_what_is_no_count_counts_nothing(tmp_path: Path, left: str) -> None:
    memory = tmp_path / "memory"
    memory.write_text(left, encoding="utf-8")
    assert health.num_failures(False, "1", memory) == 0
    assert health.num_failures(True, "1", memory) == 0
    assert health.num_failures(False, "1", memory) == 1


def test_a_ready_server_is_so_where_nothing_can_be_written(tmp_path: Path) -> None:
    assert health.num_failures(True, "1", tmp_path / "no folder" / "memory") == 0


def test_process_1_is_known_by_when_it_began() -> None:
    assert int(health._process_1()) >= 0


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1)])
def test_the_health_command(triton: _Triton, status: int, code: int) -> None:
    triton.status = status
    assert CliRunner().invoke(app, ["health", "--url", triton.url]).exit_code == code
