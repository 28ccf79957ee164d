"""Engine counters as Triton metrics; no iteration waits for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from lr_backend.embedded.stats import EngineStats
from lr_backend.triton.metrics import Key, MetricSheet

GAUGES = ("num_waiting", "num_running", "num_blocks_used", "num_blocks_cached", "num_blocks_free")
HELP = {
    "busy_s": "Seconds spent in iterations",
    "paced_s": "Seconds that the iterations of a paced engine were to take",
    "late_s": "Seconds that they took beyond",
    "num_batch_rows": "Sequences of all iterations together",
    "num_tokens_prefilled": "Prompt and draft tokens computed",
    "num_tokens_reused": "Prompt tokens taken from the KV cache",
    "num_draft_tokens": "Draft tokens verified",
    "num_accepted_tokens": "Draft tokens accepted",
}


def counters_of(stats: type[Any], gauges: Sequence[str]) -> tuple[str, ...]:
    """Fields of a class of statistics that only grow."""
    return tuple(field.name for field in fields(stats) if field.name not in gauges)


COUNTERS = counters_of(EngineStats, GAUGES)


def metric_name(name: str, gauges: Sequence[str] = GAUGES) -> str:
    """``num_draft_tokens`` -> ``lr_engine_draft_tokens_total`` (counters) or ``lr_engine_waiting`` (gauges)."""
    stem = f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name.removeprefix("num_")
    return f"lr_engine_{stem}" if name in gauges else f"lr_engine_{stem}_total"


def engine_metrics(
    family: Any, role: str, stats: Callable[[], Any], counters: Sequence[str] = COUNTERS, gauges: Sequence[str] = GAUGES
) -> MetricSheet:
    """``lr_engine_*`` of what ``stats`` gives, which has a field for each of the names; ``role`` becomes the label."""

    def values() -> Iterator[tuple[Key, float]]:
        now = stats()
        for name in (*counters, *gauges):
            yield (metric_name(name, gauges), ()), float(getattr(now, name))

    def texts(names: Sequence[str]) -> dict[str, str]:
        said = {name: HELP.get(name, name.removeprefix("num_").replace("_", " ").capitalize()) for name in names}
        return {metric_name(name, gauges): text for name, text in said.items()}

    sheet = MetricSheet(family, texts(counters), texts(gauges), values, {"role": role})
    sheet.refresh()
    return sheet
