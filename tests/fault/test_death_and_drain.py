"""Processes are killed, and the server is told to end, while clients ask: every request ends, and what can be mended is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from lr_client import Client, ClientError, Options, Overloaded, ServerUnreachable, TargetUnavailable
from tritonclient.utils import InferenceServerException

from lr_backend.build.base import Layout
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.engine import EngineCall, Role, cancel_tensors
from lr_backend.engine.address import LOOP_PARAMETER
from lr_backend.notice import Lessons
from lr_backend.serve import keeper as room
from lr_backend.serve.keeper import StubKeeper, stubs_of
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.serve.warmup import warm_engines, warm_loop
from lr_backend.triton.remote_engine import grpc_inputs
from tests.support.deployed import said_when_ready
from tests.support.observed import reached_within, samples
from tests.support.tiny_models import make_tiny_models, write_spec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

READY_S = 120.0
NUM_CLIENTS = 8
NEEDED = ("lookahead", "target")
"""What the front end wants to be ready."""
bounded = partial(reached_within, READY_S)
OPTIONS = Options(mode="lr", max_tokens=64, stream=False, seed=1)


@dataclass
class Crowd:
    """Clients that ask one question after another until told to stop."""

    grpc_url: str
    pause_s: float = 0.0
    """Of each client between two questions."""
    answered: list[tuple[str, ...]] = field(default_factory=list)
    """What each answer had to do without."""
    failed: list[ClientError] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Every client has been answered or refused when this ends: none hangs."""
        threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(READY_S)
            assert not any(thread.is_alive() for thread in threads)

    def _ask(self) -> None:
        with Client(self.grpc_url, timeout_s=READY_S) as client:
            while not self._stop.is_set():
                try:
                    self.answered.append(client.ask("What follows?", OPTIONS).usage.degraded)
                except ClientError as error:
                    self.failed.append(error)
                    self._stop.wait(0.02)
                self._stop.wait(self.pause_s)

    def wait_for_answers(self, num: int, *, whole: bool = False) -> None:
        """So many more; ``whole``: by all three models."""
        first = len(self.answered)
        bounded(lambda: sum(not whole or not degraded for degraded in self.answered[first:]) >= num)


def answers_by_loop(server: TritonServer) -> list[int]:
    """How many answers each process of the step loop has given, by its counters."""
    found = Counter[str]()
    for sample in samples(f"http://{server.metrics_url}/metrics", "lr_requests_total"):
        if sample.labels["end"] in ("stop", "length"):
            found[sample.labels["loop"]] += int(sample.value)
    return list(found.values())


SEVERAL = "several_loops"
KINDS = {**{layout.value: {"layout": f'"{layout}"'} for layout in Layout}, SEVERAL: {"num_loops": 2}}
"""Settings of the server by the name of its spec, besides those of all."""
FOR_ALL = {"exit_timeout_s": 60}
"""A busy machine takes its time."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mortal")
    checkpoints = make_tiny_models(root / "checkpoints")
    return {
        kind: write_spec(root / "engines" / f"{kind}.toml", checkpoints, name=kind.replace("_", "-"), **FOR_ALL, **server)  # type: ignore[arg-type]
        for kind, server in KINDS.items()
    }


@dataclass
class Kept:
    server: TritonServer
    keeper: StubKeeper
    said: list[str]

    def kill(self, model: str) -> None:
        os.kill(stubs_of(self.server.pid)[model][0], signal.SIGKILL)


@pytest.fixture
def kept(specs: dict[str, Path], tmp_path: Path) -> Iterator[Kept]:
    with keeping(specs, tmp_path) as one:
        yield one


@contextmanager
def keeping(specs: dict[str, Path], folder: Path) -> Iterator[Kept]:
    """With two processes of the step loop: what holds for them holds for one."""
    repository = build_repository(DeploymentSpec.load(specs[SEVERAL]), folder / "repository").output
    said: list[str] = []
    with TritonServer(repository, ServerOptions(exit_timeout_s=2, closes_engines=True)) as server:
        server.wait_ready(READY_S)
        keeper = StubKeeper(server, said.append)
        keeper.start()
        try:
            yield Kept(server, keeper, said)
        finally:
            keeper.stop()


class TookTritonAlong(Exception):
    """A process died while it held a lock of Triton's; docs/reliability.md says how often."""


NUM_SERVERS = 3


def test_dead_models_are_started_anew_and_every_request_ends(specs: dict[str, Path], tmp_path: Path) -> None:
    for number in range(NUM_SERVERS):
        with keeping(specs, tmp_path / f"{number}") as kept, suppress(TookTritonAlong):
            kill_each_and_see_it_back(kept)
            return
    pytest.fail(f"tritonserver died along with a model, {NUM_SERVERS} times")


def kill_each_and_see_it_back(kept: Kept) -> None:
    # Who pauses leaves the models' processes idle at times, and with them the locks.
    crowd, ready = Crowd(kept.server.grpc_url, pause_s=0.05), list[bool]()
    with crowd.asking(), Client(kept.server.grpc_url) as prober:

        def is_back(model: str) -> bool:
            ready.append(prober.is_ready(models=NEEDED, timeout_s=READY_S))
            if kept.keeper.lost.is_set():
                bounded(lambda: not kept.server.running or "lock_exception" in kept.server.log_text())
                assert "lock_exception" in kept.server.log_text(), kept.keeper.why
                raise TookTritonAlong
            return f"{model} is back" in kept.said

        crowd.wait_for_answers(NUM_CLIENTS, whole=True)
        for model in ("draft", "judge"):
            kept.kill(model)
            bounded(partial(is_back, model))
            crowd.wait_for_answers(2 * NUM_CLIENTS, whole=True)
        assert not crowd.failed, "the target answers alone while draft or judge are away"
        assert all(ready), "and so the server is ready"
        kept.kill("target")
        bounded(partial(is_back, "target"))
        assert not all(ready)
        crowd.wait_for_answers(2 * NUM_CLIENTS, whole=True)
    assert crowd.failed
    assert {type(error) for error in crowd.failed} == {TargetUnavailable}
    assert not kept.keeper.lost.is_set()
    bounded(lambda: sum(answers_by_loop(kept.server)) == len(crowd.answered))
    shares = answers_by_loop(kept.server)
    assert sum(shares) == len(crowd.answered) and min(shares) > 0.2 * sum(shares)
    # What each process has measured stands where all of them take it in.
    kinds = Counter(kind for kind, *_ in Lessons.beside(kept.server.notice_file).heard())
    assert kinds["drafted"] and kinds["step"] >= len(crowd.answered)
    assert not kinds["decided"], "these models never begin to reason, and so only equal tokens would do"


def test_without_its_keeper_a_dead_target_does_not_come_back(kept: Kept) -> None:
    """The other tests see the keeper's work and not Triton's. Triton has several times as long as the keeper takes."""
    with Client(kept.server.grpc_url, timeout_s=READY_S) as client:
        began_s = time.monotonic()
        kept.kill("target")
        bounded(lambda: "target is back" in kept.said)
        taken_s = time.monotonic() - began_s
        assert client.ask("What follows?", OPTIONS).text
        kept.keeper.stop()
        kept.kill("target")
        time.sleep(3.0 * taken_s)
        assert "target" not in stubs_of(kept.server.pid)
        with pytest.raises(TargetUnavailable):
            client.ask("What follows?", OPTIONS)


def test_a_dead_step_loop_is_lost_and_whoever_asks_is_told(kept: Kept) -> None:
    crowd = Crowd(kept.server.grpc_url)
    with crowd.asking():
        crowd.wait_for_answers(NUM_CLIENTS)
        kept.kill("lookahead")
        assert kept.keeper.lost.wait(READY_S)
        assert kept.keeper.why == "a process of the step loop died"
        kept.server.stop(0.0)
    assert crowd.failed


def test_a_target_that_hangs_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives, as one does whose cards have lost each other."""
    monkeypatch.setattr(room, "HANG_S", 1.0)
    path = write_spec(tmp_path / "engines" / "tiny.toml", make_tiny_models(tmp_path / "checkpoints"))
    path.write_text(f"{path.read_text()}\n[lookahead.timeouts]\ntarget_s = 15.0\n")
    with keeping({SEVERAL: path}, tmp_path) as kept, Client(kept.server.grpc_url, timeout_s=READY_S) as client:
        assert not client.ask("What follows?", OPTIONS).usage.degraded
        os.kill(stubs_of(kept.server.pid)["target"][0], signal.SIGSTOP)
        # Triton may also fail the calls of a process that stands still. Then it takes several to tell.
        deadline = time.monotonic() + READY_S
        while not kept.keeper.lost.wait(1.0) and time.monotonic() < deadline:
            with pytest.raises(TargetUnavailable):
                client.ask("What follows?", OPTIONS)
        assert "the target hangs" in kept.keeper.why
        assert not kept.keeper.can_drain
        kept.server.stop(0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_to_end_answers_what_it_has_and_refuses_what_comes(
    specs: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--spec", str(specs[kind])]
    for option in ("--http-port", "--grpc-port", "--metrics-port", "--openai-port"):
        command += [option, "0"]
    output = tmp_path / "output"
    around = {**os.environ, "COLUMNS": "200"}
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=around) as serving:
        try:
            found = re.search(r"gRPC +(\S+)", said_when_ready(serving, output))
            assert found is not None, output.read_text()
            processes = psutil.Process(serving.pid).children(recursive=True)
            crowd = Crowd(found[1])
            with crowd.asking():
                crowd.wait_for_answers(NUM_CLIENTS)
                serving.send_signal(signal.SIGTERM)
                assert serving.wait(READY_S) == 0
        finally:
            serving.kill()
    assert "curl -s http://127.0.0.1:" in output.read_text()
    assert "stopping: requests in flight may finish" in output.read_text().partition("Ctrl-C stops")[2]
    num_models = {Layout.ONE_PROCESS: 1, Layout.PROCESS_A_ROLE: 4, SEVERAL: 5}[kind]
    assert len(processes) >= 2 + num_models
    assert not psutil.wait_procs(processes, timeout=READY_S)[1]
    kinds = {type(error) for error in crowd.failed}
    assert Overloaded in kinds, "new requests are refused while those in flight finish"
    # Between the last answer and the end, Triton refuses by itself.
    lost = [
        error
        for error in crowd.failed
        if not isinstance(error, Overloaded | ServerUnreachable) and "unknown model" not in str(error)
    ]
    assert not lost


ALONE = '[target]\nurl = "grpc://127.0.0.1:1"\npace = "h200_sxm"\n'


@dataclass
class Alone:
    """A server of a single role, and a client of it."""

    serving: subprocess.Popen[bytes]
    printed: Path
    metrics_url: str
    client: grpcclient.InferenceServerClient
    answers: Queue[Any] = field(default_factory=Queue)

    def begin(self, call: EngineCall) -> None:
        """It runs when this ends, and takes seconds: its iterations are as long as those of a large model."""
        tensors = grpc_inputs(call.tensors())
        self.client.async_infer("target", tensors, lambda result, error: self.answers.put((result, error)))
        bounded(lambda: any(sample.value for sample in samples(self.metrics_url, "lr_engine_running")))
        assert self.answers.empty(), "the call is over before anything happens"

    def answer(self) -> int:
        """Its number of tokens."""
        result, error = self.answers.get(timeout=READY_S)
        assert error is None
        num_tokens: int = result.as_numpy("sequence_length").item()
        return num_tokens


@pytest.fixture
def alone(specs: dict[str, Path], tmp_path: Path) -> Iterator[Alone]:
    spec, printed = tmp_path / "alone.toml", tmp_path / "output"
    text = specs[Layout.PROCESS_A_ROLE].read_text(encoding="utf-8")
    text = text.replace("[target]\n", ALONE)
    spec.write_text(text, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--spec", str(spec), "--role", "target"]
    command += [word for port in ("http", "grpc", "metrics") for word in (f"--{port}-port", "0")]
    with printed.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as serving:
        try:
            said = said_when_ready(serving, printed, "Ctrl-C stops")
            listens, metrics = (re.findall(rf"{name} +(\S+)", said)[0] for name in ("gRPC", "metrics"))
            with grpcclient.InferenceServerClient(listens) as client:
                yield Alone(serving, printed, metrics, client)
        finally:
            serving.kill()


LONG = EngineCall("long", np.arange(1, 9, dtype=np.int32), 800)


def assert_a_call_finishes_before_the_end(alone: Alone) -> None:
    alone.begin(LONG)
    alone.serving.send_signal(signal.SIGTERM)
    assert alone.answer() == LONG.max_new_tokens
    assert alone.serving.wait(READY_S) == 0


def test_a_server_of_one_role_lets_calls_finish_before_it_ends(alone: Alone) -> None:
    assert_a_call_finishes_before_the_end(alone)


def test_a_server_of_one_role_ends_with_its_engine(alone: Alone) -> None:
    """Triton would never answer the call, and its step loop is elsewhere: a connection that breaks tells it."""
    alone.begin(replace(LONG, max_new_tokens=1900))
    (stub,) = stubs_of(alone.serving.pid)["target"]
    os.kill(stub, signal.SIGKILL)
    _, error = alone.answers.get(timeout=READY_S)
    assert error is not None
    assert alone.serving.wait(READY_S) == 1
    assert "the process of target died: the server ends, to be started anew" in alone.printed.read_text(encoding="utf-8")


def test_engines_answer_their_own_step_loop_alone(specs: dict[str, Path], tmp_path: Path) -> None:
    repository = build_repository(DeploymentSpec.load(specs[Layout.PROCESS_A_ROLE]), tmp_path / "repository").output
    asked = grpc_inputs(EngineCall("x", np.arange(1, 9, dtype=np.int32), 2).tensors())
    stopped = grpc_inputs(cancel_tensors())
    with TritonServer(repository, ServerOptions(exit_timeout_s=2, closes_engines=True)) as server:
        server.wait_ready(READY_S)
        warm_engines(server.http_url, loop_key=server.loop_key)
        assert warm_loop(server.http_url).usage["num_draft_calls"] > 0
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            for role in Role:
                for tensors in (asked, stopped):
                    for said in (None, {LOOP_PARAMETER: "a guess"}, {LOOP_PARAMETER: 7}):
                        with pytest.raises(InferenceServerException, match="answers the step loop of its server alone"):
                            client.infer(role.value, tensors, parameters=said)
