"""When a server of single roles is over, by scripted counts and a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from lr_backend.engine import Role
from lr_backend.serve.ending import COUNTS_AGE_S, STILL_S, Idleness
from lr_backend.serve.server import ServerError


@dataclass
class Metrics:
    """What a server's metrics say now; ``running`` None: they do not answer."""

    running: Mapping[str, float] | None = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> str:
        if self.running is None:
            raise ServerError("no answer")
        lines = [f'lr_engine_running{{role="{role}"}} {value}' for role, value in self.running.items()]
        lines += [f'lr_engine_waiting{{role="{role}"}} {value}' for role, value in self.waiting.items()]
        for model, value in self.compiled.items():
            for kind, number in (("iteration_counter", value), ("timestamp", 1700074049)):
                lines.append(f'nv_trt_llm_general_metrics{{general_type="{kind}",model="{model}",version="1"}} {number}')
        return "\n".join(("# TYPE nv_trt_llm_general_metrics gauge", *lines, ""))


IDLE = Metrics({"draft": 0.0}, {"draft": 0.0})


def test_an_engine_of_ours_is_idle_once_its_counts_are_new() -> None:
    idle = Idleness([Role.DRAFT], 0.0)
    assert not idle.lasts(IDLE, COUNTS_AGE_S), "they may be of before the signal"
    assert idle.lasts(IDLE, COUNTS_AGE_S + 0.1)


@pytest.mark.parametrize(
    "metrics",
    [
        Metrics({"draft": 1.0}, {"draft": 0.0}),
        Metrics({"draft": 0.0}, {"draft": 2.0}),
        Metrics({"draft": 0.0}),
        Metrics(),
        Metrics(None),
    ],
)
def test_what_is_in_flight_or_not_known_is_waited_for(metrics: Metrics) -> None:
    idle = Idleness([Role.DRAFT], 0.0)
    assert not any(idle.lasts(metrics, float(now_s)) for now_s in range(100))
    assert not idle.lasts(IDLE, 99.0 + COUNTS_AGE_S)
    assert idle.lasts(IDLE, 99.1 + COUNTS_AGE_S)


def test_an_engine_that_triton_has_unloaded_is_idle() -> None:
    """Its counts go with it, and its last call may end just before."""
    idle = Idleness([Role.DRAFT], 0.0)
    assert not idle.lasts(Metrics({"draft": 1.0}, {"draft": 0.0}), 5.0)
    assert not idle.lasts(Metrics(), 5.0 + COUNTS_AGE_S)
    assert idle.lasts(Metrics(), 5.1 + COUNTS_AGE_S)


def test_what_a_dead_engine_had_counts_for_nothing() -> None:
    idle = Idleness([], 0.0)
    assert idle.lasts(Metrics({"draft": 3.0}, {"draft": 0.0}), COUNTS_AGE_S + 0.1)


def test_a_compiled_engine_is_idle_once_it_has_made_no_iteration_for_long() -> None:
    idle = Idleness([Role.TARGET], 0.0)
    for second in range(40):
        assert not idle.lasts(Metrics(compiled={"target": 7.0 * second}), float(second))
    last = Metrics(compiled={"target": 7.0 * 39})
    assert not idle.lasts(last, 39.0 + STILL_S)
    assert idle.lasts(last, 39.1 + STILL_S)


def test_a_server_of_both_kinds_waits_for_both() -> None:
    idle = Idleness([Role.TARGET, Role.JUDGE], 0.0)
    assert not any(idle.lasts(Metrics(compiled={"target": 5.0}), float(now_s)) for now_s in range(100)), "and the judge?"
    busy = Metrics({"judge": 1.0}, {"judge": 0.0}, {"target": 5.0})
    assert not any(idle.lasts(busy, float(now_s)) for now_s in range(100, 200))
    both = Metrics({"judge": 0.0}, {"judge": 0.0}, {"target": 5.0})
    assert not idle.lasts(both, 199.0 + STILL_S)
    assert idle.lasts(both, 199.1 + STILL_S)
