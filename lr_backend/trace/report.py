"""A trace for the terminal: the latency breakdown, how well the roles overlapped, and what is wrong, if anything."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lr_backend.trace.analysis import Analysis, Breakdown
from lr_backend.trace.html import TRACKS, milliseconds, percent
from lr_backend.trace.schema import Trace

HEALTHY = "no failure signature"


def report(trace: Trace, analysis: Analysis) -> RenderableType:
    """Everything that the terminal shows of one trace."""
    found = analysis.breakdown
    return Group(
        Text(_headline(trace), style="bold"),
        *([Text(trace.pace, style="yellow")] if trace.pace else []),
        _table(found),
        Text(
            f"target: {percent(found.batched_share)} of its time batched, {percent(found.overlap_share)} overlapped with drafting"
        ),
        *_findings(analysis),
    )


def _headline(trace: Trace) -> str:
    usage = trace.usage
    accepted = f"{usage.num_steps_accepted} from the draft, acceptance {percent(usage.step_acceptance_rate)}"
    parts = [
        f"{usage.mode.value}: {usage.completion_tokens} tokens in {milliseconds(trace.latency_ms)}",
        f"{usage.num_steps} steps ({accepted})",
        f"{usage.num_wasted_tokens} wasted tokens",
        f"finish: {trace.finish_reason.value}",
    ]
    return " · ".join([*parts, *([f"without {', '.join(usage.degraded)}"] if usage.degraded else [])])


def _table(found: Breakdown) -> Table:
    table = Table("role", *(f"{name}" for name in ("calls", "critical path", "share", "overlapped", "wasted", "busy")))
    for column in table.columns[1:]:
        column.justify = "right"
    whole = found.latency_ms or 1.0
    for role in TRACKS:
        time = found.roles[role]
        beside = (milliseconds(value) for value in (time.overlapped_ms, time.wasted_ms, time.busy_ms))
        table.add_row(role.value, str(time.num_calls), milliseconds(time.critical_ms), percent(time.critical_ms / whole), *beside)
    table.add_row("waiting", "", milliseconds(found.waiting_ms), percent(found.waiting_ms / whole), "", "", "")
    table.add_section()
    table.add_row("latency", "", milliseconds(found.latency_ms), "", "", "", "")
    return table


def _findings(analysis: Analysis) -> Iterator[RenderableType]:
    if not analysis.findings:
        yield Text(HEALTHY, style="green")
    for finding in analysis.findings:
        yield Text(f"failure signature: {finding.name}", style="bold yellow")
        for clause in finding.evidence:
            yield Text(f"  - {clause}")
        yield Text(f"  try: {finding.advice}")
