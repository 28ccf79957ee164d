"""What an engine was built with, and whether the machine at hand may serve it.

A compiled engine runs with the TensorRT-LLM and TensorRT that built it, on the GPU architecture that it was built on, and with
nothing else; the error of the backend would say so late and in other words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lr_backend.errors import ConfigError
from lr_backend.nvidia import VISIBLE, Gpu, installed, probe_gpus, visible_gpus


@dataclass(frozen=True, slots=True)
class Platform:
    """What engines are tied to. A version is None where the package is not installed."""

    tensorrt_llm: str | None
    tensorrt: str | None
    gpus: tuple[Gpu, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Platform:
        return cls(value["tensorrt_llm"], value["tensorrt"], tuple(Gpu(**gpu) for gpu in value["gpus"]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def probe_platform() -> Platform:
    """This machine, with the GPUs that a process sees, numbered as it sees them. Without a driver there are none."""
    seen = visible_gpus(probe_gpus(), os.environ.get(VISIBLE))
    gpus = tuple(replace(gpu, index=number) for number, gpu in enumerate(seen))
    return Platform(installed("tensorrt-llm"), installed("tensorrt"), gpus)


def mismatches(manifest: Mapping[str, Any], running: Platform, gpu_device_ids: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Why the engines of a repository's manifest cannot be served here, one sentence each; empty where they can.

    Args:
        manifest: ``manifest.json`` of a repository of compiled engines.
        gpu_device_ids: where each role is to run; of a role that is not named, where it was built.
    """
    engines = manifest.get("engines")
    if manifest.get("dry_run"):
        return ("the repository comes from a dry run: its engines were not built",)
    if not isinstance(engines, Mapping):
        return ("the manifest names no engines",)
    found: list[str] = []
    for role, entry in engines.items():
        try:
            built, ids, directory = Platform.from_json(entry["built_with"]), entry["gpu_device_ids"], Path(entry["engine_dir"])
            products = [str(name) for name in entry["files"]]
        except (KeyError, TypeError, ValueError) as error:
            found.append(f"{role}: the manifest's entry is damaged: {error!r}")
            continue
        here = gpu_device_ids.get(role, ids)
        found += [f"{role}: {reason}" for reason in _differences(built, running, ids, here)]
        missing = [name for name in products if not (directory / name).is_file()]
        if missing:
            found.append(f"{role}: {directory} lacks {', '.join(missing)}")
    return tuple(found)


def require_servable(manifest: Mapping[str, Any], running: Platform, gpu_device_ids: Mapping[str, Sequence[int]]) -> None:
    """Refuse engines that this machine cannot run. ``gpu_device_ids`` as in :func:`mismatches`.

    Raises:
        ConfigError: with every reason.
    """
    if reasons := mismatches(manifest, running, gpu_device_ids):
        raise ConfigError(
            f"the engines cannot be served here: {'; '.join(reasons)}. Build them on this machine (lookahead build)"
        )


def read_engine_manifest(path: Path) -> dict[str, Any]:
    """One role's own manifest.

    Raises:
        ConfigError: there is none, so the engine was not built, or it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no engine at {path.parent}: build it first (lookahead build)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _differences(built: Platform, running: Platform, built_ids: Sequence[int], ids: Sequence[int]) -> list[str]:
    found = []
    for name in ("tensorrt_llm", "tensorrt"):
        then, now = getattr(built, name), getattr(running, name)
        if then != now:
            found.append(f"built with {name} {then or 'unknown'}, here is {now or 'none'}")
    here = {gpu.index: gpu for gpu in running.gpus}
    then = {gpu.compute_capability for gpu in built.gpus if gpu.index in built_ids}
    for number in ids:
        gpu = here.get(number)
        if gpu is None:
            found.append(f"GPU {number} is not here")
        elif then != {gpu.compute_capability}:
            known = " and ".join(sorted(then)) or "unknown"
            found.append(f"built for compute capability {known}, GPU {number} ({gpu.name}) has {gpu.compute_capability}")
    return found
