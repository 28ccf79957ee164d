"""The timeline of a trace as one HTML page: no script, nothing loaded from elsewhere, every text escaped.

:func:`lay_out` places everything (pure numbers); ``timeline.html.jinja`` draws what is placed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined

from lr_backend.engine import Role
from lr_backend.trace.analysis import Analysis
from lr_backend.trace.intervals import rows
from lr_backend.trace.schema import Call, CallOutcome, Trace

MIN_WIDTH_PX, MAX_WIDTH_PX = 1160.0, 24_000.0
TYPICAL_BAR_PX = 22.0
"""Width of the median call, if the page may grow as wide; it scrolls."""
ROW_PX, BAR_PX, GAP_PX, AXIS_PX = 20.0, 16.0, 18.0, 26.0
LABEL_FROM_PX = 15.0
"""A narrower bar carries no number."""
TICK_PX = 90.0
TRACKS = (Role.DRAFT, Role.TARGET, Role.JUDGE)

OUTCOMES = {
    CallOutcome.COMMITTED: "committed: the target's own, in the answer",
    CallOutcome.ACCEPTED: "accepted: drafted, in the answer (a verdict: yes)",
    CallOutcome.VERIFIED: "verified: the target's, an accepted draft stands for it",
    CallOutcome.REJECTED: "rejected (a verdict: no)",
    CallOutcome.WASTED: "wasted: completed, and not used",
    CallOutcome.CANCELLED: "cancelled",
    CallOutcome.FAILED: "failed",
}
ORIGINS = {"draft": "accepted", "correction": "rejected", "target": "committed"}
"""Colour of a committed step by its origin: a correction stands where a draft was rejected."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle; ``style`` is a CSS class."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Track:
    """A strip of rows with its name at the left."""

    name: str
    note: str
    y: float
    height: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the time axis."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything placed, in pixels."""

    width: float
    height: float
    tracks: tuple[Track, ...]
    ticks: tuple[Tick, ...]
    commits: tuple[float, ...]


def lay_out(trace: Trace, analysis: Analysis) -> Timeline:
    """Place every step, critical stretch and call of a trace."""
    durations = [call.duration_ms for call in trace.calls if call.duration_ms > 0]
    span_ms = max([trace.latency_ms, *(call.end_ms for call in trace.calls)]) or 1.0
    wanted = TYPICAL_BAR_PX / median(durations) * span_ms if durations else 0.0
    scale = min(max(wanted, MIN_WIDTH_PX), MAX_WIDTH_PX) / span_ms
    tracks: list[Track] = []
    y = AXIS_PX + GAP_PX / 2
    for track in (_steps(trace, scale), _critical(trace, analysis, scale), *(_calls(trace, role, scale) for role in TRACKS)):
        tracks.append(_moved(track, y))
        y += track.height + GAP_PX
    commits = tuple(scale * 1e3 * record.committed_s for record in trace.steps)
    return Timeline(scale * span_ms, y, tuple(tracks), tuple(_ticks(span_ms, scale)), commits)


def page(trace: Trace, analysis: Analysis) -> str:
    """The whole page."""
    environment = Environment(loader=PackageLoader("lr_backend.trace", "."), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"ms": milliseconds, "percent": percent, "trimmed": trimmed}
    template = environment.get_template("timeline.html.jinja")
    found = analysis.breakdown
    roles = [(role, found.roles[role], _tokens(trace, role)) for role in TRACKS]
    return template.render(
        trace=trace,
        usage=trace.usage,
        question=question(trace),
        analysis=analysis,
        found=found,
        roles=roles,
        timeline=lay_out(trace, analysis),
        outcomes=[(outcome.value, text) for outcome, text in OUTCOMES.items()],
        origins=ORIGINS,
    )


def question(trace: Trace) -> str:
    """The last turn that was asked."""
    request = trace.request
    return request.text_input or (request.messages[-1].content if request.messages else "")


def milliseconds(value: float) -> str:
    """A duration for people: three digits or so, with its unit."""
    if value >= 1e4:
        return f"{value / 1e3:.1f} s"
    if value >= 1e3:
        return f"{value / 1e3:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def trimmed(text: str) -> str:
    """Without blank lines before it and blanks after it. The first line keeps its indentation."""
    return re.sub(r"^\s*\n", "", text).rstrip()


def percent(value: float | None) -> str:
    """A share for people; a dash where nothing was counted."""
    return "–" if value is None else f"{value:.0%}"


# Tracks, each placed from y = 0 -------------------------------------------------------------------------------------


def _steps(trace: Trace, scale: float) -> Track:
    bars = []
    start_ms = 0.0
    for record in trace.steps:
        end_ms = 1e3 * record.committed_s
        title = (
            f"step {record.index}: {record.origin.value}, reason {record.reason}, {record.num_tokens} tokens\n"
            f"committed at {milliseconds(end_ms)}, {milliseconds(end_ms - start_ms)} after the one before\n\n"
            f"{trimmed(record.text)}"
        )
        bars.append(_bar(start_ms, end_ms, scale, ORIGINS[record.origin.value], title, label=str(record.index)))
        start_ms = end_ms
    return Track("answer", "as committed", 0.0, BAR_PX, tuple(bars))


def _critical(trace: Trace, analysis: Analysis, scale: float) -> Track:
    bars = []
    for stretch in analysis.critical:
        role = "waiting" if stretch.call is None else trace.calls[stretch.call].role.value
        title = f"step {stretch.step} waited for: {'nothing that runs' if role == 'waiting' else f'the {role}'}"
        title += f", {milliseconds(stretch.duration_ms)}"
        bars.append(_bar(stretch.start_ms, stretch.end_ms, scale, f"on-{role}", title))
    return Track("waited for", "critical path", 0.0, BAR_PX, tuple(bars))


def _calls(trace: Trace, role: Role, scale: float) -> Track:
    calls = [call for call in trace.calls if call.role is role]
    places = rows([call.interval for call in calls], [call.step for call in calls])
    bars = [
        _bar(call.start_ms, call.end_ms, scale, call.outcome.value, _title(call), label=str(call.step), y=ROW_PX * row)
        for call, row in zip(calls, places, strict=True)
    ]
    num_rows = 1 + max(places, default=0)
    note = f"{len(calls)} call{'s' if len(calls) != 1 else ''}"
    return Track(role.value, note, 0.0, ROW_PX * num_rows - (ROW_PX - BAR_PX), tuple(bars))


def _bar(start_ms: float, end_ms: float, scale: float, style: str, title: str, *, label: str = "", y: float = 0.0) -> Bar:
    # A hairline stays between neighbours, and the shortest call stays visible.
    width = max(1.5, scale * (end_ms - start_ms) - 0.8)
    return Bar(scale * start_ms, y, width, BAR_PX, style, title, label if width >= LABEL_FROM_PX else "")


def _moved(track: Track, y: float) -> Track:
    bars = tuple(Bar(bar.x, bar.y + y, bar.width, bar.height, bar.style, bar.title, bar.label) for bar in track.bars)
    return Track(track.name, track.note, y, track.height, bars)


def _title(call: Call) -> str:
    reused = "" if call.num_reused_tokens is None else f" ({call.num_reused_tokens} reused)"
    lines = [
        f"{call.role.value}: {call.purpose.value.replace('_', ' ')} {call.step}, {call.outcome.value}",
        f"{milliseconds(call.start_ms)} to {milliseconds(call.end_ms)}, {milliseconds(call.duration_ms)} long",
        f"depth {call.depth}" + (f", candidate {call.sibling}" if call.sibling else ""),
        f"{call.num_prompt_tokens} tokens in{reused}, {call.num_tokens} out, {call.num_committed_tokens} of them in the answer",
    ]
    if call.num_draft_tokens:
        lines.append(f"draft tokens: {call.num_accepted_tokens} of {call.num_draft_tokens} accepted")
    if call.engine_ms:
        lines.append(f"{milliseconds(call.engine_ms)} in the engine, {milliseconds(call.way_ms)} on the way")
    if call.queue_ms:
        lines.append(f"{milliseconds(call.queue_ms)} in the engine's queue")
    return "\n".join(lines)


def _ticks(span_ms: float, scale: float) -> Iterator[Tick]:
    step_ms = _round_up(TICK_PX / scale)
    for number in range(int(span_ms / step_ms) + 1):
        time_ms = number * step_ms
        yield Tick(scale * time_ms, f"{time_ms / 1e3:g} s" if step_ms >= 100 else f"{time_ms:g} ms")


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(digit for digit in (1, 2, 5, 10) if digit * power >= value * (1 - 1e-9))


def _tokens(trace: Trace, role: Role) -> tuple[int, int]:
    """Tokens that a role wrote, and how many of them are not in the answer."""
    own: Sequence[Call] = [call for call in trace.calls if call.role is role]
    return sum(call.num_tokens for call in own), sum(call.num_wasted_tokens for call in own)
