"""Engine counters as Triton metrics; no iteration waits for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from lr_backend.embedded.stats import EngineStats
from lr_backend.triton.refresher import Refresher

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


class EngineMetrics(Refresher):
    """Keeps ``lr_engine_*`` up to date."""

    def __init__(
        self,
        family: Any,
        role: str,
        stats: Callable[[], Any],
        counters: Sequence[str] = COUNTERS,
        gauges: Sequence[str] = GAUGES,
    ) -> None:
        """``family`` is ``pb_utils.MetricFamily``; ``role`` becomes the label; ``stats`` has a field for each of the names."""
        self._stats, self._counters, self._gauges = stats, counters, gauges
        self._shown: dict[str, float] = dict.fromkeys(counters, 0.0)
        self._families = {
            name: family(
                name=metric_name(name, gauges),
                description=HELP.get(name, name.removeprefix("num_").replace("_", " ").capitalize()),
                kind=family.GAUGE if name in gauges else family.COUNTER,
            )
            for name in (*counters, *gauges)
        }
        self._metrics = {name: one.Metric(labels={"role": role}) for name, one in self._families.items()}
        super().__init__("engine-metrics", self._send_changes)

    def _send_changes(self) -> None:
        stats = self._stats()
        for name in self._counters:
            value = float(getattr(stats, name))
            if value > self._shown[name]:
                self._metrics[name].increment(value - self._shown[name])
                self._shown[name] = value
        for name in self._gauges:
            value = float(getattr(stats, name))
            if self._shown.get(name) != value:
                self._metrics[name].set(value)
                self._shown[name] = value
