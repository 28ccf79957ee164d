"""Answers at the pace of H200s on a machine without one: five rows, their traces, and what the planner makes of them.

Triton, the step loop, the scheduler and the models' texts are real; how long an iteration lasts is what NVIDIA's kernel tables
say of the deployment ``qwen3-32b-apart`` on that system. A machine that falls behind shows it all in slow motion, and all times
are divided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from lr_client import Client
from rich.console import Console

from bench.kit.measure import LEARNS_FROM, ModeReport, Sample, report
from bench.kit.serving import LatenessSince, ask, late_by_row, lateness_of, serving, together
from bench.kit.turns import in_turns
from demo.problems import Problem
from lr_backend.build.paced import paced
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.engine import Role
from lr_backend.hardware.lateness import MAX_LATE_SHARE, Lateness
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.overheads import Bound
from lr_backend.plan.fit_texts import by_verifier, fit_workload
from lr_backend.plan.losses import engines_alone
from lr_backend.plan.simulation import Policy, Scenario, ms_a_token, simulate
from lr_backend.plan.table import LEAST_STEPS, plan_row
from lr_backend.request import LookaheadRequest, Mode
from lr_backend.serve.server import TritonServer
from lr_backend.trace.schema import Call, Trace

SYSTEM = "h200_sxm"
BASELINE = "ar"
DRAFT_TOKENS: Mapping[str, Any] = {"num_draft_tokens": 8}
AHEAD: Mapping[str, Any] = {"max_depth": 8}
Row = Mapping[str, Any]
"""Fields of a request, beside the deployment's defaults."""
ROWS: Mapping[str, Row] = {
    BASELINE: {"mode": "ar"},
    "sd": {"mode": "sd", **DRAFT_TOKENS},
    "lr": {"mode": "lr", **AHEAD},
    "lr_sd": {"mode": "lr_sd", **AHEAD, **DRAFT_TOKENS},
    "auto": {},
}
"""``auto`` chooses nothing."""
SLOW_MOTIONS = (1.0, 2.0, 3.0)
PROBE = {"max_tokens": 120}
PROBE_LATE_SHARE = 0.6 * MAX_LATE_SHARE
"""A probe is short: what it comes to leaves room for what it has not seen."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Stage:
    """A server at some pace, and who asks it."""

    spec: EmbeddedDeployment
    server: TritonServer
    client: Client

    def ask(self, problem: Problem, row: str, fields: Row, index: int) -> tuple[Sample, Trace | None]:
        """One answer with its trace; its seconds are those of the hardware that is stood for."""
        sample, result = ask(self.client, problem, {**fields, "trace": True}, index, name=row, timeout_s=TIMEOUT_S)
        trace = Trace.from_json(result.trace) if result.trace else None
        return replace(sample, latency_s=sample.latency_s / self.spec.slow_motion), trace

    def lateness(self) -> Lateness:
        """Of all engines until now."""
        return lateness_of(self.server)


@dataclass(frozen=True)
class Paced:
    """What rows took at some pace.

    Attributes:
        asked: fields of each row's requests.
        traces: of each row, those of its answers.
        lateness: of all rows together; ``late_rows``: of each row's own turns.
    """

    spec: EmbeddedDeployment
    asked: Mapping[str, Row]
    samples: Sequence[Sample]
    traces: Mapping[str, Sequence[Trace]]
    lateness: Lateness
    late_rows: Mapping[str, Lateness] = field(default_factory=dict)

    @property
    def system(self) -> str:
        """Whose pace it was."""
        return self.spec.target.pace or ""

    @cached_property
    def rows(self) -> dict[str, ModeReport]:
        return report(self.samples, BASELINE)

    def machine(self, bound: Bound = Bound.VALUE) -> Machine:
        """The machine that its engines stood for, all constants at one end of their ranges."""
        paces = {role: pace for role in Role if (pace := self.spec.engine_pace(role)) is not None}
        sizes = {role: self.spec.engine(role) for role in Role}
        return Machine.paced({role: replace(pace, bound=bound) for role, pace in paces.items()}, sizes)

    def scenario(self, row: str, machine: Machine) -> Scenario:
        """Texts like those of a row's own answers; where these have no drafted steps, like those of the other rows too."""
        own = self.traces[row]
        if not by_verifier(own):
            others = [trace for name, traces in self.traces.items() if name != row for trace in traces]
            ahead = [trace for trace in others if trace.request.mode.speculates_steps]
            own = [*own, *([trace for trace in ahead if trace.request.mode is Mode.LR] or ahead)]
        return Scenario(fit_workload(own), machine)

    def policy(self, row: str) -> Policy:
        fields = {**self.spec.loop_config().defaults, **self.asked[row]}
        request = LookaheadRequest.parse({**fields, "text_input": "any"})
        of_tokens = {"proposer": request.proposer, "num_draft_tokens": request.num_draft_tokens}
        return Policy(request.mode, request.max_depth, fields=of_tokens)

    def gain(self, row: str, machine: Machine) -> float:
        """Speedup of a row by the real loop on a virtual clock; of a mode that chooses, once a server has learned."""
        scenario, policy = self.scenario(row, machine), self.policy(row)
        if not policy.mode.chooses:
            return plan_row(scenario, policy).speedup
        num_measured = -(-LEAST_STEPS // scenario.workload.num_steps)
        alone = simulate(scenario, Policy(Mode.AR), first=LEARNS_FROM, num_sets=num_measured).usages
        ours = simulate(scenario, policy, num_sets=LEARNS_FROM + num_measured).usages[LEARNS_FROM:]
        return ms_a_token(alone) / ms_a_token(ours)

    def realised_share(self, row: str) -> float:
        """Its speedup over what the real loop gains on a virtual clock where nothing costs time but the engines."""
        return self.rows[row].speedup / self.gain(row, engines_alone(self.machine()))

    def as_dict(self, row: str = "auto") -> dict[str, Any]:
        """The document's ``pace``; ``row`` is the one whose realised share is told."""
        target = self.spec.engine_pace(Role.TARGET)
        assert target is not None
        return {
            "profile": target.label,
            "label": self.spec.pace_label,
            "slow_motion": self.spec.slow_motion,
            "late_share": self.lateness.share,
            "void": self.lateness.void,
            "realised_share": self.realised_share(row),
            "hops": [asdict(one) for one in hops(self)],
            "modes": {name: {**found.as_dict(), **self._late(name)} for name, found in self.rows.items()},
        }

    def _late(self, row: str) -> dict[str, Any]:
        late = self.late_rows.get(row, Lateness())
        return {"late_share": late.share, "void": late.void}


@dataclass(frozen=True, slots=True)
class MeasuredHops:
    """Milliseconds that calls of one role are on their way, there and back.

    Attributes:
        constant_ms: what the planner takes them for.
    """

    role: Role
    num_calls: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    constant_ms: float

    def __str__(self) -> str:
        found = f"{self.p50_ms:.2f} ms (p99 {self.p99_ms:.2f}) of {self.num_calls}"
        return f"{self.role} calls on their way: {found}; planned with {self.constant_ms:.2f} ms"


def hops(found: Paced) -> list[MeasuredHops]:
    """Of each role; calls that carry logits of draft tokens are left out."""
    machine = found.machine()
    result = []
    for role in Role:
        constant = machine.places[role].hops
        on_the_way = [call.way_ms / found.spec.slow_motion for call in _plain_calls(found, role)]
        if on_the_way:
            p50, p99 = np.percentile(on_the_way, (50, 99))
            constant_ms = 1e3 * (constant.there_s + constant.back_s)
            result.append(MeasuredHops(role, len(on_the_way), fmean(on_the_way), float(p50), float(p99), constant_ms))
    return result


def note_pace(console: Console, found: Paced) -> None:
    """What must stand below a table of these figures: whose pace it was, how late the engines were, and how long calls took."""
    console.print(f"[yellow]{found.spec.pace_label}[/]", highlight=False, soft_wrap=True)
    console.print(f"[{'bold red' if found.lateness.void else 'dim'}]{found.lateness}[/]", highlight=False, soft_wrap=True)
    console.print(f"[dim]{late_by_row(found.late_rows)}[/]", highlight=False, soft_wrap=True)
    for one in hops(found):
        console.print(f"[dim]{one}[/]", highlight=False)


def _plain_calls(found: Paced, role: Role) -> Iterable[Call]:
    traces = (trace for of_row in found.traces.values() for trace in of_row)
    calls = (call for trace in traces for call in trace.calls if call.role is role and call.completed)
    return (call for call in calls if call.engine_ms and not call.num_draft_tokens)


@contextmanager
def stage(
    spec: EmbeddedDeployment,
    system: str,
    probes: Sequence[Problem],
    folder: Path,
    console: Console,
    rows: Mapping[str, Row] = ROWS,
    **options: Any,
) -> Iterator[Stage]:
    """A server at the pace of a system, as much in slow motion as this machine needs.

    Args:
        probes: problems whose beginnings are asked first, to see whether it falls behind.
        options: of :func:`lr_backend.build.paced.paced`; one ``slow_motion`` and no other is tried, if it is given.
    """
    given = options.pop("slow_motion", None)
    tried = SLOW_MOTIONS if given is None else (given,)
    for slow_motion in tried:
        deployment = paced(spec, system, slow_motion=slow_motion, **options)
        with serving(deployment, folder / f"{slow_motion:g}") as server, Client(server.grpc_url) as client:
            found = Stage(deployment, server, client)
            before = Lateness()
            for index, problem in enumerate(probes):
                before = found.lateness()  # of the last problem alone: the first ones warm up
                for row, fields in rows.items():
                    found.ask(problem, row, {**fields, **PROBE}, index)
            lateness = found.lateness() - before
            if slow_motion == tried[-1] or lateness.share <= PROBE_LATE_SHARE:
                yield found
                return
            console.print(f"[dim]{lateness.share:.1%} late on this machine: slower motion[/]")


def learn(on: Stage, questions: Sequence[Problem], console: Console) -> list[Sample]:
    """Let the server find out what pays on these, as a request that chooses nothing asks them; its answers."""
    turns = in_turns(("auto",), questions, "auto learns what pays", console)
    return [on.ask(problem, "learns", {}, index)[0] for index, problem, _ in turns]


def compare(on: Stage, questions: Sequence[Problem], console: Console, rows: Mapping[str, Row] = ROWS) -> Paced:
    """Every row on every problem, in turns whose order rotates. Behind each turn stands the second that its lateness takes."""
    samples: list[Sample] = []
    traces: dict[str, list[Trace]] = {row: [] for row in rows}
    turns: dict[str, list[Lateness]] = {row: [] for row in rows}
    late_since = LatenessSince(on.server)
    for index, problem, row in in_turns(tuple(rows), questions, "at production pace", console):
        sample, trace = on.ask(problem, row, rows[row], index)
        turns[row].append(late_since())
        samples.append(sample)
        if trace is not None:
            traces[row].append(trace)
    late_rows = {row: together(of_row) for row, of_row in turns.items()}
    return Paced(on.spec, rows, samples, traces, together(list(late_rows.values())), late_rows)
