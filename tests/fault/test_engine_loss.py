"""An engine process is killed under a running server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice

import psutil
import pytest
from lr_client import Client, Options

from bench.kit.serving import demo_spec, serving
from demo.problems import problems
from lr_backend.build.base import Layout
from lr_backend.serve.server import TritonServer

pytestmark = pytest.mark.integration
QUESTION = next(islice(problems(98, "test"), 1)).question
GREEDY = {"temperature": 0.0, "verifier": "exact", "max_tokens": 200, "stream": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serving(demo_spec(Layout.PROCESS_A_ROLE), tmp_path_factory.mktemp("served") / "repository") as running:
        yield running


def stub_of(server: TritonServer, model: str) -> int:
    """The process that serves one model."""
    assert server.pid is not None
    (stub,) = [
        child.pid
        for child in psutil.Process(server.pid).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and any(f"{model}_0_0" in part for part in child.cmdline())
    ]
    return stub


def test_a_killed_draft_leaves_the_targets_answer(server: TritonServer) -> None:
    """Calls to a dead stub hang for seconds: first every draft is late, then the draft is known to be down.

    The judge is left alive: with two of its stubs dead this Triton (24.10) may itself crash in its Python backend.
    """
    with Client(server.grpc_url, timeout_s=60) as client:
        alone = client.ask(QUESTION, Options(mode="ar", **GREEDY)).text
        os.kill(stub_of(server, "draft"), signal.SIGKILL)

        results = [client.ask(QUESTION, Options(mode="lr", **GREEDY)) for _ in range(8)]

        assert {result.text for result in results} == {alone}
        assert any(result.usage.degraded == ("draft",) for result in results)
        assert server.running
