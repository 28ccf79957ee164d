"""Texts and times together, changed field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lr_backend.emulated.workload import Workload
from lr_backend.hardware.machine import LinearTimes
from lr_backend.plan.fitting import Fitted

OF_TEXTS = {field.name for field in fields(Workload)}


def changed(fitted: Fitted, **change: Any) -> Fitted:
    """With other texts or other times, by the names of their fields."""
    texts = {name: value for name, value in change.items() if name in OF_TEXTS}
    times = {name: value for name, value in change.items() if name not in OF_TEXTS}
    return Fitted(replace(fitted.workload, **texts), replace(fitted.times, **times))


def fitted(**known: Any) -> Fitted:
    """With what is given, and the rest as it is assumed."""
    return changed(Fitted(Workload(1.0), LinearTimes()), **known)
