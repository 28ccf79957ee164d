"""Calls that a busy target takes with it keep their places, and a server with too few places left ends."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from lr_client import Client, ClientError, Options, TargetUnavailable

from lr_backend.build.emulated_spec import EmulatedDeployment, emulated
from lr_backend.build.repository import build_repository
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.workload import Workload
from lr_backend.serve.keeper import StubKeeper, stubs_of
from lr_backend.serve.server import ServerOptions, TritonServer
from tests.support.observed import reached_within, samples

pytestmark = pytest.mark.integration

WAIT_S = 60.0
wait = partial(reached_within, WAIT_S)
LONG = Workload(0.7, prompt_tokens=40, step_tokens=10, num_steps=200)
SLOW_MOTION = 20.0
"""An answer takes minutes, so that all calls are in flight when the target dies."""
NUM_THREADS = 32
NUM_ASKED = 12
"""Twice that is more than half of the threads, once is not."""


@pytest.fixture
def spec(tmp_path: Path) -> EmulatedDeployment:
    path = tmp_path / "long.toml"
    path.write_text(LONG.as_toml("long answers"))
    made = emulated("qwen3-32b-apart", "h200_sxm", str(path))
    server = made.server.model_copy(update={"thread_pool_size": NUM_THREADS})
    return made.model_copy(update={"slow_motion": SLOW_MOTION, "server": server})


def test_calls_that_died_with_a_target_are_counted_until_the_server_ends(spec: EmulatedDeployment, tmp_path: Path) -> None:
    repository = build_repository(spec, tmp_path / "repository").output
    said: list[str] = []
    options = ServerOptions(exit_timeout_s=2, closes_engines=True, thread_pool_size=NUM_THREADS)
    with TritonServer(repository, options) as server:
        server.wait_ready(WAIT_S)
        keeper = StubKeeper(server, said.append)
        keeper.start()
        try:
            assert set(ends_of_a_kill(server)) == {TargetUnavailable}
            wait(lambda: said.count("target is back") == 1)
            assert server.seats.most_lost == NUM_ASKED
            wait(lambda: answers(server))  # the step loop hears a little later that the target is back
            assert not keeper.lost.is_set()

            assert set(ends_of_a_kill(server)) == {TargetUnavailable}
            assert keeper.lost.wait(WAIT_S)
            assert keeper.why.startswith(f"{2 * NUM_ASKED} calls were lost")
        finally:
            keeper.stop()


def ends_of_a_kill(server: TritonServer) -> list[type[ClientError]]:
    """How requests end whose target is killed."""

    def ask(number: int) -> type[ClientError]:
        with Client(server.grpc_url, timeout_s=WAIT_S) as client, pytest.raises(ClientError) as caught:
            client.ask(question(number), Options(mode="ar", stream=False))
        return caught.type

    (target,) = stubs_of(server.pid)["target"]
    with ThreadPoolExecutor(NUM_ASKED) as pool:
        asked = [pool.submit(ask, number) for number in range(NUM_ASKED)]
        wait(lambda: running(server) == NUM_ASKED)
        os.kill(target, signal.SIGKILL)
        return [one.result() for one in asked]


def running(server: TritonServer) -> int:
    """Calls that the target has in its batch."""
    found = samples(f"http://{server.metrics_url}/metrics", "lr_engine_running")
    return sum(int(sample.value) for sample in found if sample.labels["role"] == "target")


def answers(server: TritonServer) -> bool:
    with Client(server.grpc_url, timeout_s=WAIT_S) as client:
        try:
            client.ask(question(0), Options(mode="ar", max_tokens=1, stream=False))
        except TargetUnavailable:
            return False
    return True


def question(number: int) -> str:
    return Texts(LONG, 0).question(number)
