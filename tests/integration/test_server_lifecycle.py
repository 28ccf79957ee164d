"""A real tritonserver with tiny models: it answers, drains, and leaves nothing behind, however it ends."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from lr_backend.build.emulated_spec import emulated
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.serve import server as launcher
from lr_backend.serve.restrictions import HEADER
from lr_backend.serve.server import ServerError, ServerOptions, TritonServer
from lr_backend.serve.warmup import post_json, warm_engines, warm_loop
from tests.support.observed import reached_within, settled
from tests.support.tiny_models import make_tiny_models, write_spec

pytestmark = pytest.mark.integration

READY_S = 120.0
BOUND_S = 60.0
bounded = partial(reached_within, BOUND_S)
STUBS = 4
EMULATED = ("qwen3-32b-apart", "b200_sxm")
"""A deployment, and the system at whose pace it answers."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DeploymentSpec:
    root = tmp_path_factory.mktemp("lifecycle")
    path = write_spec(root / "engines" / "tiny.toml", make_tiny_models(root / "checkpoints"))
    loaded = DeploymentSpec.load(path)
    build_repository(loaded)
    return loaded


@pytest.fixture
def server(spec: DeploymentSpec) -> Iterator[TritonServer]:
    with TritonServer(spec.built_dir, ServerOptions(exit_timeout_s=20)) as running:
        running.wait_ready(READY_S)
        yield running


@pytest.fixture
def emulated_server(tmp_path: Path) -> Iterator[TritonServer]:
    """As many processes, ready sooner: none of them loads torch. A shell would misread the repository's path."""
    report = build_repository(emulated(*EMULATED), tmp_path / "it's a $(new) repository")
    with TritonServer(report.output, ServerOptions(exit_timeout_s=20)) as running:
        running.wait_ready(READY_S)
        yield running


def family(server: TritonServer) -> list[psutil.Process]:
    assert server.pid is not None
    process = psutil.Process(server.pid)
    return [process, *process.children(recursive=True)]


def assert_nothing_left(processes: list[psutil.Process], shm_prefix: str) -> None:
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert shm_prefix
    assert not [name for name in os.listdir("/dev/shm") if shm_prefix in name]


def test_four_models_answer_and_sigterm_drains(server: TritonServer) -> None:
    processes, prefix = family(server), server.shm_prefix
    assert sum("triton_python_backend_stub" in process.exe() for process in processes) == STUBS
    assert [name for name in os.listdir("/dev/shm") if prefix in name], "its shared memory has the prefix that is removed"
    warm_engines(server.http_url, timeout_s=BOUND_S)
    answer = warm_loop(server.http_url, timeout_s=BOUND_S)
    assert answer.text
    assert answer.usage["num_target_calls"] > 0
    assert answer.usage["num_draft_calls"] > 0

    # A question in flight when SIGTERM comes is still answered in full.
    body = {"text_input": "Count.", "mode": "ar", "max_tokens": 200, "temperature": 1.0, "stream": False}
    answers: list[dict[str, object]] = []
    asking = threading.Thread(target=lambda: answers.append(post_json(server.http_url, "lookahead", "generate", body, BOUND_S)))
    before = settled(lambda: requests_seen(server))  # calls that the last answer no longer wants end behind it
    asking.start()
    bounded(lambda: requests_seen(server) > before)
    assert server.stop() == 0
    asking.join(BOUND_S)
    assert answers
    assert answers[0]["finish_reason"] in ("stop", "length")
    assert_nothing_left(processes, prefix)


def requests_seen(server: TritonServer) -> int:
    """Calls that the target has been handed: a question in flight makes them."""
    statistics = json.loads(server._get("/v2/models/target/stats") or b"{}")
    return int(statistics["model_stats"][0]["inference_stats"]["queue"]["count"])


def test_a_killed_server_leaves_nothing(emulated_server: TritonServer) -> None:
    processes, prefix = family(emulated_server), emulated_server.shm_prefix
    assert len(processes) >= 1 + STUBS
    processes[0].kill()
    assert emulated_server.wait(BOUND_S) == 128 + signal.SIGKILL
    assert_nothing_left(processes, prefix)
    assert emulated_server.stop() == 128 + signal.SIGKILL


def test_a_model_that_cannot_load_says_why(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "engines" / "broken.toml", make_tiny_models(tmp_path / "checkpoints"), name="broken")
    report = build_repository(DeploymentSpec.load(path))
    for other in ("target", "draft"):  # whether they load is nothing to it
        shutil.rmtree(report.output / other)
    (tmp_path / "checkpoints" / "judge" / "model.safetensors").write_bytes(b"\x00" * 64)
    with TritonServer(report.output, ServerOptions(exit_timeout_s=2)) as server:
        with pytest.raises(ServerError, match=r"judge: .*LR_CHECKPOINT"):
            server.wait_ready(READY_S)
        prefix = server.shm_prefix
    assert_nothing_left([], prefix)


@pytest.mark.parametrize("kind", ["http", "grpc", "metrics"])
def test_a_port_lost_to_another_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    real = launcher.free_ports
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        clash = iter([dataclasses.replace(real(ServerOptions()), **{kind: taken})])
        monkeypatch.setattr(launcher, "free_ports", lambda options: next(clash, None) or real(options))
        with TritonServer(tmp_path, ServerOptions(exit_timeout_s=2)) as server:
            server.wait_ready(READY_S)
            assert getattr(server.ports, kind) != taken


def test_keys_open_what_is_closed_and_are_in_no_process_list(tmp_path: Path) -> None:
    keys = {"admin_key": "administrator-secret", "engine_key": "engine-secret-engine"}
    with TritonServer(tmp_path, ServerOptions(exit_timeout_s=2, **keys)) as server:
        server.wait_ready(READY_S)
        answers = [repository_index(server, key) for key in ("", "wrong", keys["admin_key"])]
        processes = [*family(server), psutil.Process(os.getpid())]
        assert server._guard is not None
        processes.append(psutil.Process(server._guard.pid))
        lines = ["\0".join(process.cmdline()) for process in processes]
        environment = Path(f"/proc/{server.pid}/environ").read_bytes()
        log = server.log_text()
    assert answers == [403, 403, 200]
    assert sum("tritonserver" in line for line in lines) >= 2
    for key in keys.values():
        assert not [line for line in lines if key in line]
        assert key.encode() not in environment
        assert key not in log


def repository_index(server: TritonServer, key: str) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=BOUND_S)
    try:
        connection.request("POST", "/v2/repository/index", "{}", {HEADER: key, "Connection": "close"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_serve_command_answers_and_ends_cleanly(tmp_path: Path) -> None:
    """By Ctrl-C. That SIGTERM ends it as cleanly, also while it is asked, is seen in tests/fault/test_death_and_drain.py."""
    name, system = EMULATED
    command = [sys.executable, "-c", "from lr_backend.cli.app import app; app()", "serve", "--spec", name, "--pace", system]
    command += ["--repository", str(tmp_path / "repository")]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--openai-port=0", f"--log-file={tmp_path / 'server.log'}"]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as serving:
        assert serving.stdout is not None
        watchdog = threading.Timer(READY_S, serving.kill)
        watchdog.start()
        seen = []
        for line in serving.stdout:
            seen.append(line)
            if "Ctrl-C stops" in line:
                break
        processes = psutil.Process(serving.pid).children(recursive=True)
        serving.send_signal(signal.SIGINT)
        rest = serving.stdout.read()
        status = serving.wait(BOUND_S)
        watchdog.cancel()
    text = "".join(seen) + rest
    assert status == 0, text
    assert "curl -s http://127.0.0.1:" in text
    assert "stopping: requests in flight may finish" in rest
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert len(processes) >= 2 + STUBS
    assert not alive
