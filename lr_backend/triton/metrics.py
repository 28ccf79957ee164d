"""Counters, gauges and histograms of a Triton model, brought up to date on a thread of their own.

A metric call crosses processes, and nobody who works may wait for one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

log = structlog.get_logger()

REFRESH_S = 0.5
IDLE_S = 15.0
"""So often while nothing happens: processor time is taken all the same, and shown late it would be a jump."""

LOOP = "loop"
"""Label of what the step loop tells: which of its processes this is, from 0. So no two of them write one series."""
Key = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and labels."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """What a histogram says of itself, and the upper bounds of its buckets; the last one, infinity, is not among them."""

    text: str
    bounds: tuple[float, ...]


class MetricSheet:
    """Sends what changed soon after something did: at most every ``REFRESH_S``, and every ``IDLE_S`` while nothing happens.

    Args:
        family: ``pb_utils.MetricFamily``.
        counters, gauges: help texts by name.
        values: every metric as it stands; called on the sheet's own thread, never twice at a time. A metric exists from its first
            value on.
        labels: that all of them carry.
        histograms: by name.
        measured: what histograms have to take in since the last time; called as ``values`` is.
    """

    def __init__(
        self,
        family: Any,
        counters: Mapping[str, str],
        gauges: Mapping[str, str],
        values: Callable[[], Iterable[tuple[Key, float]]],
        labels: Mapping[str, str] | None = None,
        *,
        histograms: Mapping[str, Histogram] | None = None,
        measured: Callable[[], Iterable[tuple[Key, float]]] = tuple,
    ) -> None:
        self._histograms, self._measured = dict(histograms or {}), measured
        self._families = {name: family(name=name, description=text, kind=family.COUNTER) for name, text in counters.items()}
        self._families |= {name: family(name=name, description=text, kind=family.GAUGE) for name, text in gauges.items()}
        self._families |= {
            name: family(name=name, description=one.text, kind=family.HISTOGRAM) for name, one in self._histograms.items()
        }
        self._counters, self._values, self._labels = frozenset(counters), values, dict(labels or {})
        self._metrics: dict[Key, Any] = {}
        self._shown: dict[Key, float] = {}
        self._sending = threading.Lock()
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Something happened; any thread."""
        self._changed.set()

    def refresh(self) -> None:
        """Send what changed since the last time."""
        with self._sending:
            for key, value in self._values():
                self._show(key, value)
            for key, value in self._measured():
                if key not in self._metrics:
                    bounds = list(self._histograms[key[0]].bounds)
                    self._metrics[key] = self._families[key[0]].Metric(labels=self._labelled(key), buckets=bounds)
                self._metrics[key].observe(value)

    def close(self) -> None:
        """Send what is left, and have Triton forget these metrics.

        Triton's objects tell it when they go. Whatever lives until the process ends does so after the connection is gone, which
        is a segmentation fault.
        """
        self._stopped.set()
        self._changed.set()
        self._thread.join()
        with self._sending:
            self._metrics.clear()
            self._families.clear()

    def _show(self, key: Key, value: float) -> None:
        name, _ = key
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=self._labelled(key))
            # A gauge may still show what a process said that died; of a counter only what is new is sent.
            self._shown[key] = 0.0 if name in self._counters else math.nan
        before = self._shown[key]
        # Triton refuses a counter that falls.
        if value == before or (name in self._counters and value < before):
            return
        if name in self._counters:
            self._metrics[key].increment(value - before)
        else:
            self._metrics[key].set(value)
        self._shown[key] = value

    def _labelled(self, key: Key) -> dict[str, str]:
        return {**self._labels, **dict(key[1])}

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._changed.wait(IDLE_S)
            self._changed.clear()
            is_last = self._stopped.wait(REFRESH_S)
            try:
                self.refresh()
            except Exception:  # of Triton's, as when its shared memory is full: counts and gauges are sent the next time
                log.exception("metrics_not_sent")
