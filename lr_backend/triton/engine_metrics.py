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
    "late_s": "Seconds that the iterations of a paced engine, and its answers, came later than that",
    "num_iterations": "Iterations: rounds in which the engine computed for all sequences in flight",
    "num_batch_rows": "Sequences of all iterations together; over iterations: the mean batch",
    "num_tokens_prefilled": "Prompt and draft tokens computed",
    "num_tokens_decoded": "Tokens given out",
    "num_tokens_reused": "Prompt tokens taken from the KV cache",
    "num_tokens_dropped": "Tokens that came behind a stop that only the stream showed",
    "num_draft_tokens": "Draft tokens verified",
    "num_accepted_tokens": "Draft tokens accepted",
    "num_requests": "Calls that ended without an error; those that were cancelled on their way are among them",
    "num_preemptions": "Sequences put back because the KV cache was full; they are computed again",
    "num_cancelled": "Calls that were asked to stop before their end",
    "num_failed": "Calls that ended with an error",
    "num_integrity_failures": "Times that the books of the KV cache did not add up; it then starts empty",
    "num_waiting": "Calls that wait for a place in the batch",
    "num_running": "Sequences in the batch",
    "num_blocks_used": "Blocks of the KV cache that sequences in flight hold",
    "num_blocks_cached": "Blocks kept for prefixes that may come again; freed when room is needed",
    "num_blocks_free": "Blocks of the KV cache that hold nothing",
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
        return {metric_name(name, gauges): HELP[name] for name in names}

    sheet = MetricSheet(family, texts(counters), texts(gauges), values, {"role": role})
    sheet.refresh()
    return sheet
