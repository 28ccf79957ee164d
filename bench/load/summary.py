"""What a load test says, as a table, a document and one line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.export import Limits, PointFigures, crossover
from bench.load.sweep import BASELINE, SERIES, Point, Series

Found = Mapping[Point, PointFigures]

HEADINGS = (
    "series",
    "load",
    "answers/s",
    "tokens/s",
    "E2E s p50/p90",
    "first step s p50/p90",
    "gap ms p50/p90/p99",
    "goodput/s",
    "good",
    "late",
)


def at_loads(found: Found, *, closed: bool) -> dict[Series, list[Point]]:
    """The measured points of each series by rising load: by concurrency (``closed``) or by arrival rate."""
    lines: dict[Series, list[Point]] = {}
    for series in SERIES:
        points = [point for point in found if point.series == series and (point.concurrency is not None) == closed]
        if points:
            lines[series] = sorted(points, key=lambda point: point.load)
    return lines


def speedups(found: Found) -> list[tuple[Series, list[float], list[float]]]:
    """(mode, concurrency, seconds a token of ``ar`` over the mode's) of every mode that is compared by latency.

    Void points are left out.
    """
    lines = at_loads(found, closed=True)
    base = {point.load: found[point].token_s for point in lines.get(BASELINE, ()) if not found[point].void}
    result: list[tuple[Series, list[float], list[float]]] = []
    for series, points in lines.items():
        if series == BASELINE or not series.whole:
            continue
        pairs = [(point.load, base.get(point.load), found[point].token_s) for point in points if not found[point].void]
        kept = [(load, ours / theirs) for load, ours, theirs in pairs if ours and theirs]
        result.append((series, [load for load, _ in kept], [ratio for _, ratio in kept]))
    return result


def rows(found: Found) -> list[tuple[str, ...]]:
    """One row a point, one text for each of :data:`HEADINGS`."""
    result: list[tuple[str, ...]] = []
    for closed in (True, False):
        for series, points in at_loads(found, closed=closed).items():
            for point in points:
                one = found[point]
                load = f"{point.concurrency} in flight" if closed else f"{point.load:g}/s ({one.arrivals_per_s or 0:.2g} came)"
                result.append(
                    (
                        series.name,
                        load,
                        f"{one.requests_per_s:.2f}",
                        f"{one.tokens_per_s:.0f}",
                        _shown((one.latency_s.p50, one.latency_s.p90), 1.0, 2),
                        _shown((one.first_step_s.p50, one.first_step_s.p90), 1.0, 2) if series.stream else "",
                        _shown((one.gap_s.p50, one.gap_s.p90, one.gap_s.p99), 1e3, 0) if series.stream else "",
                        f"{one.goodput_rps:.2f}",
                        f"{one.good_share:.0%}",
                        "" if one.late_share is None else f"{one.late_share:.1%}{' (void)' * one.void}",
                    )
                )
    return result


def markdown(found: Found) -> str:
    """The table as Markdown."""
    table: list[Sequence[str]] = [HEADINGS, ("---",) * len(HEADINGS), *rows(found)]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def document(found: Found, settings: Mapping[str, Any], limits: Limits, failed: Mapping[Point, str]) -> dict[str, Any]:
    """Everything, for ``load.json``."""
    points = [
        {
            "series": point.series.name,
            "mode": point.series.mode,
            "stream": point.series.stream,
            "concurrency": point.concurrency,
            "rate": point.rate,
            **_rounded(one.as_dict()),
        }
        for point, one in found.items()
    ]
    return {
        "settings": dict(settings),
        "limits": {"first_step_s": limits.first_step_s, "latency_s": limits.latency_s},
        "points": points,
        "failed": {point.name: reason for point, reason in failed.items()},
        "speedups": {
            series.name: {f"{load:g}": round(ratio, 3) for load, ratio in zip(loads, ratios, strict=True)}
            for series, loads, ratios in speedups(found)
        },
        "crossover": {
            series.name: _round(crossover(loads, ratios)) for series, loads, ratios in speedups(found) if len(loads) > 1
        },
    }


def line(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The closing JSON line of a :func:`document`."""
    best = {name: max((ratio for ratio in ratios.values()), default=None) for name, ratios in whole["speedups"].items()}
    return {
        "num_points": len(whole["points"]),
        "num_failed": len(whole["failed"]),
        "speedups": whole["speedups"],
        "best_speedup": best,
        "crossover_concurrency": whole["crossover"],
        "most_tokens_per_s": {
            name: max(point["tokens_per_s"] for point in whole["points"] if point["series"] == name)
            for name in dict.fromkeys(point["series"] for point in whole["points"])
        },
        "limits": whole["limits"],
        "device": whole["settings"].get("device"),
    }


def _shown(quantiles: Sequence[float | None], factor: float, digits: int) -> str:
    return " / ".join("-" if value is None else f"{factor * value:.{digits}f}" for value in quantiles)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, Mapping) else round(value, 4) if isinstance(value, float) else value
        for name, value in values.items()
    }
