"""Engine counters as Triton metrics, on a thread of their own: a metric call crosses processes; no iteration waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from lr_backend.torch_engine.stats import EngineStats

REFRESH_S = 0.5

GAUGES = ("num_waiting", "num_running", "num_blocks_used", "num_blocks_cached", "num_blocks_free")
COUNTERS = tuple(field.name for field in fields(EngineStats) if field.name not in GAUGES)
HELP = {
    "busy_s": "Seconds spent in iterations",
    "num_batch_rows": "Sequences of all iterations together",
    "num_tokens_prefilled": "Prompt and draft tokens computed",
    "num_tokens_reused": "Prompt tokens taken from the KV cache",
    "num_draft_tokens": "Draft tokens verified",
    "num_accepted_tokens": "Draft tokens accepted",
}


def metric_name(name: str) -> str:
    """``num_draft_tokens`` -> ``lr_engine_draft_tokens_total`` (counters) or ``lr_engine_waiting`` (gauges)."""
    stem = "busy_seconds" if name == "busy_s" else name.removeprefix("num_")
    return f"lr_engine_{stem}" if name in GAUGES else f"lr_engine_{stem}_total"


class EngineMetrics:
    """Keeps ``lr_engine_*`` up to date: at most every ``REFRESH_S``, and not at all while nothing happens."""

    def __init__(self, family: Any, role: str, stats: Callable[[], EngineStats]) -> None:
        """``family`` is ``pb_utils.MetricFamily``; ``role`` becomes the label."""
        self._stats = stats
        self._refreshing = threading.Lock()
        self._shown: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._families = {
            name: family(
                name=metric_name(name),
                description=HELP.get(name, name.removeprefix("num_").replace("_", " ").capitalize()),
                kind=family.GAUGE if name in GAUGES else family.COUNTER,
            )
            for name in COUNTERS + GAUGES
        }
        self._metrics = {name: one.Metric(labels={"role": role}) for name, one in self._families.items()}
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-metrics", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Something happened; any thread."""
        self._changed.set()

    def close(self) -> None:
        self._stopped.set()
        self._changed.set()
        self._thread.join()

    def refresh(self) -> None:
        """Send what changed since the last time."""
        with self._refreshing:
            self._send_changes(self._stats())

    def _send_changes(self, stats: EngineStats) -> None:
        for name in COUNTERS:
            value = float(getattr(stats, name))
            if value > self._shown[name]:
                self._metrics[name].increment(value - self._shown[name])
                self._shown[name] = value
        for name in GAUGES:
            value = float(getattr(stats, name))
            if self._shown.get(name) != value:
                self._metrics[name].set(value)
                self._shown[name] = value

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait()
            self._changed.clear()
            self._stopped.wait(REFRESH_S)
            self.refresh()
