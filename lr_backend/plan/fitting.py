"""A scenario from recorded traces: what the planner needs to know, as one deployment's own requests have shown it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lr_backend.emulated.workload import Workload
from lr_backend.errors import TraceError
from lr_backend.hardware.machine import LinearTimes
from lr_backend.plan.fit_texts import acceptance, by_verifier, fit_workload
from lr_backend.plan.fit_times import TimedTraces
from lr_backend.plan.simulation import Scenario
from lr_backend.trace.schema import Trace


@dataclass(frozen=True)
class Fitted:
    """What traces tell: how texts behave, and in seconds how long everything takes.

    Attributes:
        rough: the traces hold few calls.
        pace: of all of the traces, as :class:`~lr_backend.trace.schema.Trace` has it.
    """

    workload: Workload
    times: LinearTimes
    rough: bool = False
    pace: str = ""

    @property
    def scenario(self) -> Scenario:
        return Scenario(self.workload, self.times.machine())


def fit(traces: Sequence[Trace], num_cores: float | None = None) -> Fitted:
    """What the traces were recorded in; all count alike, whatever their verifier.

    Args:
        traces: of one deployment, one request at a time. Those without lookahead tell the target's time alone.
        num_cores: as in :class:`LinearTimes`; traces cannot tell it from slower models, so it is taken as given.

    Raises:
        TraceError: no trace with lookahead, too few calls to fit, no drafted step that was compared, or traces of unlike pace.
    """
    pace = _common_pace(traces)
    workload, timed = fit_workload(traces), TimedTraces.of(traces, num_cores)
    return Fitted(workload, timed.times, timed.rough, pace)


def fit_by_verifier(traces: Sequence[Trace], num_cores: float | None = None) -> dict[str, Fitted]:
    """:func:`fit` for each verifier of the traces, with acceptance and verdicts from its own traces alone.

    Raises:
        TraceError: as :func:`fit`.
    """
    pace = _common_pace(traces)
    workload, timed = fit_workload(traces), TimedTraces.of(traces, num_cores)
    return {
        name: Fitted(
            replace(workload, **acceptance(group)), replace(timed.times, verdict_s=timed.verdict_s(group)), timed.rough, pace
        )
        for name, group in by_verifier(traces).items()
    }


def _common_pace(traces: Sequence[Trace]) -> str:
    """Times of one machine do not fit another.

    Raises:
        TraceError: the traces are of more than one pace.
    """
    paces = {trace.pace or "this machine's own": trace.pace for trace in traces}
    if len(paces) > 1:
        raise TraceError(f"no times fit traces of unlike pace: {' / '.join(sorted(paces))}")
    return "".join(paces.values())
