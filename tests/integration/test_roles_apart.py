"""Target, draft and judge behind Tritons of their own: the same answers as one box, also while servers come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from lr_client import Client, Options, TargetUnavailable
from tritonclient.utils import InferenceServerException

from bench.kit.serving import with_layout
from lr_backend.build.base import Layout
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.engine import EngineCall, Role
from lr_backend.engine.address import ENGINE_HEADER, ENGINE_KEY_VARIABLE, GRPC_PREFIX
from lr_backend.serve.remotes import missing_roles, why_refused
from lr_backend.serve.restrictions import tls_arguments
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.serve.warmup import WarmupError, warm_engines
from lr_backend.triton.metrics import REFRESH_S
from lr_backend.triton.remote_engine import RemoteEngine, grpc_inputs
from tests.support.observed import settled
from tests.support.tiny_models import make_tiny_models, write_spec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KEY = "a-key-for-the-engines-0123456789"
READY_S = 120.0
QUESTIONS = [f"What follows from {number}?" for number in range(6)]
MODES = ("ar", "sd", "lr", "lr_sd")
ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"


@dataclass
class Parts:
    """Servers of one deployment, apart."""

    root: Path
    together: Path
    certificate: Path
    opened: ExitStack

    def serve(self, spec: DeploymentSpec, name: str, **options: object) -> TritonServer:
        repository = build_repository(spec, self.root / name).output
        return self.opened.enter_context(TritonServer(repository, ServerOptions(exit_timeout_s=2, **options)))  # type: ignore[arg-type]

    def role(self, role: Role, name: str, **options: object) -> TritonServer:
        named = write_apart(self.together, self.root / "engines" / "named.toml", dict.fromkeys(Role, '"grpc://localhost:9"'))
        return self.serve(DeploymentSpec.load(named).only([role]), name, engine_key=KEY, **options)

    def loop(self, name: str, targets: list[TritonServer], draft: TritonServer, judge: TritonServer) -> TritonServer:
        urls = {
            Role.TARGET: str([f"grpc://{each.grpc_url}" for each in targets]),
            Role.DRAFT: f'"grpcs://localhost:{draft.ports.grpc}"',
            Role.JUDGE: f'"grpc://{judge.grpc_url}"',
        }
        known = write_apart(self.together, self.root / "engines" / f"{name}.toml", urls)
        return self.serve(DeploymentSpec.load(known), name, environment={ENGINE_KEY_VARIABLE: KEY, ROOTS: str(self.certificate)})


@dataclass
class Fleet:
    """One box with everything; and the same deployment apart: two targets, a draft by TLS, a judge, and the step loop."""

    parts: Parts
    box: TritonServer
    targets: list[TritonServer]
    draft: TritonServer
    judge: TritonServer
    loop: TritonServer


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("apart")
    together = write_spec(root / "engines" / "tiny.toml", make_tiny_models(root / "checkpoints"))
    certificate, private = make_certificate(root)
    with ExitStack() as opened:
        parts = Parts(root, together, certificate, opened)
        targets = [parts.role(Role.TARGET, f"target{number}") for number in range(2)]
        draft = parts.role(Role.DRAFT, "draft", arguments=tls_arguments(certificate, private))
        judge = parts.role(Role.JUDGE, "judge")
        box = parts.serve(with_layout(DeploymentSpec.load(together), Layout.ONE_PROCESS), "box")
        for each in (*targets, draft, judge, box):
            each.wait_ready(READY_S)
        loop = parts.loop("loop", targets, draft, judge)
        loop.wait_ready(READY_S)
        yield Fleet(parts, box, targets, draft, judge, loop)
        for each in (loop, box, *targets, draft, judge):  # all at once: each waits for its connections to end
            each.terminate()


def write_apart(together: Path, path: Path, urls: dict[Role, str]) -> Path:
    text = together.read_text(encoding="utf-8")
    for role, url in urls.items():
        text = text.replace(f"[{role}]\n", f"[{role}]\nurl = {url}\n")
    path.write_text(text, encoding="utf-8")
    return path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """One that names this machine, and is its own authority."""
    certificate, private = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(private), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, private


def answers(server: TritonServer, mode: str) -> list[tuple[str, int]]:
    """Texts, and how many steps of the draft they hold."""
    options = Options(mode=mode, deterministic=True, seed=7, temperature=0.8, max_tokens=48, stream=False)
    with Client(server.grpc_url, timeout_s=READY_S) as client:
        found = [client.ask(question, options) for question in QUESTIONS]
    assert not any(one.usage.degraded for one in found)
    return [(one.text, one.usage.num_draft_calls) for one in found]


@pytest.mark.parametrize("mode", MODES)
def test_the_answers_are_those_of_one_box(fleet: Fleet, mode: str) -> None:
    found = answers(fleet.loop, mode)
    assert [text for text, _ in found] == [text for text, _ in answers(fleet.box, mode)]
    assert any(text for text, _ in found)
    assert any(num_calls for _, num_calls in found) is (mode != "ar")


def test_engines_answer_the_loop_and_nobody_else(fleet: Fleet) -> None:
    call = EngineCall("x", np.arange(1, 9, dtype=np.int32), 2)
    with grpcclient.InferenceServerClient(fleet.targets[0].grpc_url) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.infer("target", grpc_inputs(call.tensors()))
        assert client.is_model_ready("target"), "whoever asks may know whether it is ready"
    with pytest.raises(WarmupError):
        warm_engines(fleet.judge.http_url, [Role.JUDGE])
    warm_engines(fleet.judge.http_url, [Role.JUDGE], key=KEY)


def test_the_doctor_knows_a_key_that_opens_from_one_that_does_not(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.serve.remotes.ANSWER_S", READY_S)
    url = f"grpc://{fleet.judge.grpc_url}"
    assert why_refused(url, Role.JUDGE, KEY) == ""
    for key, told in (("", "without a key"), ("another-key-0123456789", "with this key")):
        assert why_refused(url, Role.JUDGE, key).startswith(f"ready, and answers nobody {told}: ")


def test_a_cancelled_call_ends_at_the_engine_that_is_elsewhere(fleet: Fleet) -> None:
    call = EngineCall("to-be-cancelled", np.arange(1, 9, dtype=np.int32), 2000)

    async def cancel_one(engine: RemoteEngine) -> None:
        running = asyncio.create_task(engine.generate(call))
        await asyncio.sleep(0.005)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    async def until_cancelled() -> None:
        engine = RemoteEngine(f"grpc://{fleet.judge.grpc_url}", "judge", key=KEY)
        before, until = settled(num_cancelled), time.monotonic() + READY_S
        while num_cancelled() == before:  # where the machine is busy, a call may be cancelled before it is sent
            assert time.monotonic() < until
            await cancel_one(engine)
            await asyncio.sleep(REFRESH_S)
        await engine.close()

    def num_cancelled() -> float:
        return fleet.judge.counter("lr_engine_cancelled_total")["judge"]

    asyncio.run(until_cancelled())


def test_a_call_ends_with_its_client(fleet: Fleet) -> None:
    """A step loop that dies, or loses its network, cancels nothing."""

    def num_cancelled() -> float:
        return fleet.judge.counter("lr_engine_cancelled_total")["judge"]

    before, until = settled(num_cancelled), time.monotonic() + READY_S
    tensors = grpc_inputs(EngineCall("", np.arange(1, 9, dtype=np.int32), 2000).tensors())
    headers = {f"{GRPC_PREFIX}{ENGINE_HEADER}": KEY}
    with grpcclient.InferenceServerClient(fleet.judge.grpc_url) as client:
        while num_cancelled() == before and time.monotonic() < until:
            calls = [client.async_infer("judge", tensors, lambda result, error: None, headers=headers) for _ in range(48)]
            time.sleep(0.02)  # by then they run, where the machine is not too busy
            for call in calls:
                call.cancel()
            while fleet.judge.counter("lr_engine_running")["judge"] or fleet.judge.counter("lr_engine_waiting")["judge"]:
                time.sleep(REFRESH_S)  # so that what one round leaves is not in the way of the next
            time.sleep(REFRESH_S)
    assert num_cancelled() > before
    warm_engines(fleet.judge.http_url, [Role.JUDGE], key=KEY)


def test_a_target_that_is_killed_loses_nothing_and_with_the_last_one_the_failure_names_its_address(fleet: Fleet) -> None:
    parts = fleet.parts
    targets = [parts.role(Role.TARGET, f"mortal{number}") for number in range(2)]
    for each in targets:
        each.wait_ready(READY_S)
    loop = parts.loop("bereft", targets, fleet.draft, fleet.judge)
    loop.wait_ready(READY_S)
    options = Options(mode="lr", deterministic=True, seed=3, temperature=0.8, max_tokens=96, stream=False)
    with Client(loop.grpc_url, timeout_s=READY_S) as client, ThreadPoolExecutor(8) as threads:
        expected = [client.ask(question, options).text for question in QUESTIONS]
        asked = [threads.submit(client.ask, question, options) for question in QUESTIONS * 4]
        asked[0].result()
        kill(targets[0])
        assert [one.result().text for one in asked] == expected * 4

        reborn = parts.role(Role.TARGET, "reborn", grpc_port=targets[0].ports.grpc)
        reborn.wait_ready(READY_S)
        deadline, new = time.monotonic() + READY_S, count()
        while reborn.counter("lr_engine_iterations_total").get("target", 0.0) == 0.0:
            assert time.monotonic() < deadline
            assert client.ask(QUESTIONS[0], options).text == expected[0]
            # What was asked before goes where its prefix is, so never to the one that came back.
            client.ask(f"{next(new)}: what else follows?", options)
        kill(targets[1])
        assert [client.ask(question, options).text for question in QUESTIONS] == expected, "by the one that came back alone"

        kill(reborn)
        urls = [f"grpc://{each.grpc_url}" for each in targets]
        assert set(missing_roles({Role.TARGET: urls})) == {Role.TARGET}
        with pytest.raises(TargetUnavailable, match="|".join(f"target at {each.grpc_url}" for each in targets)):
            client.ask(QUESTIONS[0], options)


def kill(server: TritonServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(READY_S) is not None


def test_the_engines_key_is_in_no_log_and_on_no_page(fleet: Fleet) -> None:
    warm_engines(fleet.judge.http_url, [Role.JUDGE], key=KEY)
    servers = (*fleet.targets, fleet.judge, fleet.loop)
    pages = [urllib.request.urlopen(f"http://{each.metrics_url}/metrics", timeout=READY_S).read().decode() for each in servers]
    logs = [each.log_text() for each in (*servers, fleet.draft)]
    assert all(pages) and all(logs)
    assert not any(KEY in text for text in (*pages, *logs))
