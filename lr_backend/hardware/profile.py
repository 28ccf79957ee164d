"""A hardware profile: what NVIDIA's kernel tables say of one model on one system.

``make profiles`` writes them (``tools/hardware_profiles.py``), this module reads them. A profile holds three tables in
milliseconds (everything but attention, by tokens; attention of prompts; attention of decodes) and where each comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Self

from lr_backend.errors import ConfigError
from lr_backend.hardware.tables import Grid, Line

PROFILES = Path(__file__).with_name("profiles")
_NAME = re.compile(r"(?P<system>[^.]+)\.(?P<model>.+)\.tp(?P<tp_size>\d+)\.(?P<dtype>[^.]+)\.json")
SCHEMA, VERSION = "lookahead-hardware-profile", 1


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Which profile.

    Attributes:
        system: the tables' name of a machine: ``h200_sxm`` and so on.
        model: name on the Hugging Face hub, without its owner.
        tp_size: cards over which each weight is split.
        dtype: of the weights: ``bfloat16`` or ``fp8``.
    """

    system: str
    model: str
    tp_size: int
    dtype: str

    @property
    def file_name(self) -> str:
        return f"{self.system}.{self.model}.tp{self.tp_size}.{self.dtype}.json"

    @classmethod
    def of(cls, system: str, hub: str, tp_size: int, dtype: str) -> Self:
        """The key of a model by its full name on the hub."""
        return cls(system, hub.rpartition("/")[2], tp_size, dtype)

    def __str__(self) -> str:
        return f"{self.model} at TP {self.tp_size} in {self.dtype} on {self.system}"


@dataclass(frozen=True)
class Profile:
    """One model on one system. All tables are in milliseconds.

    Attributes:
        kv_dtype: what keys and values are held in: ``bfloat16`` or ``fp8``.
        num_layers, vocab_size: of the model; the latter is the width of its logits.
        dense_ms: everything but attention, by tokens of the iteration.
        context_attention_ms: attention of new prompt tokens (first axis) behind computed ones (second axis), one request.
        decode_attention_ms: attention of one new token in each of some sequences (first axis), by the tokens that each holds.
        source: package, release and licence of the tables, and the share of time by kind of source.
        checks: whole iterations as the package itself adds them up.
    """

    key: ProfileKey
    kv_dtype: str
    num_layers: int
    vocab_size: int
    dense_ms: Line
    context_attention_ms: Grid
    decode_attention_ms: Grid
    source: Mapping[str, Any]
    checks: tuple[Mapping[str, float], ...]

    @cached_property
    def context_launch_ms(self) -> float:
        """Attention of prompts however little there is to attend: the launches of its kernels, a layer after another."""
        return self.context_attention_ms.least

    @property
    def measured_share(self) -> float:
        """Of the time of everything but attention, what was timed on the card."""
        return float(self.source["share_of_time_by_source"]["dense"].get("silicon", 0.0))

    @property
    def label(self) -> str:
        """What must stand beside every figure that this profile is part of."""
        return label_of([self])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one document.

        Raises:
            ConfigError: it cannot be read, is of another version, or holds no profile.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"hardware profile {path.name} cannot be read: {error}") from error
        kind = document.get("schema") if isinstance(document, dict) else None
        if kind != SCHEMA:
            raise ConfigError(f"{path.name} is no hardware profile: schema is {kind!r}, not {SCHEMA!r}")
        if document.get("version") != VERSION:
            versions = f"is of version {document.get('version')}, and version {VERSION} is read"
            raise ConfigError(f"hardware profile {path.name} {versions}: make profiles")
        try:
            return cls._from(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"hardware profile {path.name} is damaged: {error!r}") from error

    @classmethod
    def _from(cls, document: Mapping[str, Any]) -> Self:
        dtype = str(document["dtype"])
        dense, context, decode = (document[name] for name in ("dense", "context_attention", "decode_attention"))
        profile = cls(
            key=ProfileKey.of(str(document["system"]), str(document["model"]), int(document["tp_size"]), dtype),
            kv_dtype=str(document["kv_cache_dtype"]),
            num_layers=int(document["num_layers"]),
            vocab_size=int(document["vocab_size"]),
            dense_ms=Line(_numbers(dense["tokens"]), _numbers(dense["ms"])),
            context_attention_ms=_grid(context["new_tokens"], context["prefix_tokens"], context["ms"]),
            decode_attention_ms=_grid(decode["sequences"], decode["kv_tokens"], decode["ms"]),
            source=document["source"],
            checks=tuple(document["checks"]),
        )
        assert profile.label  # it says where it comes from
        return profile


def label_of(profiles: Sequence[Profile]) -> str:
    """What must stand beside every figure that these profiles are part of."""
    source = profiles[0].source
    how = "measured, partly interpolated"
    if min(one.measured_share for one in profiles) < 0.5:
        how = "mostly modelled, partly measured"
    systems = " and ".join(dict.fromkeys(one.key.system for one in profiles))
    return (
        f"iteration times from NVIDIA's kernel tables ({how}), {source['package']} {source['package_version']}, "
        f"{source['database']}; not a run on {systems}"
    )


def _grid(xs: list[float], ys: list[float], rows: list[list[float]]) -> Grid:
    return Grid(_numbers(xs), _numbers(ys), tuple(map(_numbers, rows)))


def _numbers(values: list[float]) -> tuple[float, ...]:
    """Raises: ValueError: one is none."""
    if not all(isinstance(value, int | float) and isfinite(value) for value in values):
        raise ValueError(f"not all of these are numbers: {values}")
    return tuple(values)


def available(folder: Path = PROFILES) -> Iterator[ProfileKey]:
    """Every profile that is there, by its file's name."""
    for path in sorted(folder.glob("*.json")):
        if (match := _NAME.fullmatch(path.name)) is not None:
            yield ProfileKey(match["system"], match["model"], int(match["tp_size"]), match["dtype"])


def find(key: ProfileKey, folder: Path = PROFILES) -> Profile:
    """The profile of a key.

    Raises:
        ConfigError: the system is not known, it has no profile of this model, or that one cannot be read.
    """
    known = list(available(folder))
    systems = sorted({one.system for one in known})
    if key.system not in systems:
        raise ConfigError(f"there is no hardware profile of the system {key.system!r}; known: {', '.join(systems) or 'none'}")
    if key not in known:
        others = ", ".join(f"{one.model} TP {one.tp_size} {one.dtype}" for one in known if one.system == key.system)
        raise ConfigError(f"there is no hardware profile of {key}; of that system: {others}")
    return Profile.load(folder / key.file_name)
