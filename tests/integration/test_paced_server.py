"""A real tritonserver whose engines keep the pace of H200s: no answer comes sooner than it would there, and it says so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from lr_client import Client, Options

from bench.kit.serving import demo_spec, serving
from demo.problems import Problem, problems
from lr_backend.build.paced import paced
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.engine import Role
from lr_backend.hardware.cost import Iteration
from lr_backend.serve.server import TritonServer
from lr_backend.trace.schema import CallOutcome, Trace
from tests.support.observed import settled

pytestmark = pytest.mark.integration

SYSTEM = "h200_sxm"
WAIT_S = 120.0


@pytest.fixture(scope="module")
def spec() -> EmbeddedDeployment:
    return paced(demo_spec(), SYSTEM)


@pytest.fixture(scope="module")
def server(spec: EmbeddedDeployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serving(spec, tmp_path_factory.mktemp("paced")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url) as connected:
        yield connected


@pytest.fixture(scope="module")
def question() -> Problem:
    return next(islice(problems(5, "test"), 1))


@pytest.mark.parametrize("mode", ["ar", "sd", "lr", "lr_sd"])
def test_no_call_is_faster_than_the_hardware_and_the_trace_says_whose_it_is(
    spec: EmbeddedDeployment, client: Client, question: Problem, mode: str
) -> None:
    result = client.ask(question.question, Options(mode=mode, trace=True, stream=False, max_tokens=80, seed=3), timeout_s=WAIT_S)
    assert result.trace is not None
    trace = Trace.from_json(result.trace)

    assert trace.pace == spec.pace_label
    assert "not a run on h200_sxm" in trace.pace
    for call in trace.calls:
        if call.outcome in (CallOutcome.CANCELLED, CallOutcome.FAILED):
            continue
        pace = spec.engine_pace(call.role)
        assert pace is not None
        passes = call.num_tokens - call.num_accepted_tokens if call.role is Role.TARGET else call.num_tokens
        least_s = passes * pace.costs().seconds(Iteration((), 1, 1))
        assert 1e-3 * call.engine_ms >= least_s
        assert call.duration_ms > call.engine_ms


def test_every_engine_says_how_late_it_was(server: TritonServer, client: Client, question: Problem) -> None:
    client.ask(question.question, Options(mode="lr", stream=False, max_tokens=80, seed=4, deterministic=True), timeout_s=WAIT_S)
    lateness = settled(server.lateness)
    assert set(lateness) == {role.value for role in Role}
    assert all(one.paced_s > 0.0 for one in lateness.values())
    busy = server.counter("lr_engine_busy_seconds_total")
    for role, one in lateness.items():
        # Answers may be late too; no iteration is busy with that.
        assert 0.99 * one.paced_s <= busy[role] <= 1.01 * (one.paced_s + one.late_s)
