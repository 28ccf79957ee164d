"""NVIDIA's side of this machine: its GPUs, and the TensorRT-LLM that this project is made for.

The GPUs are asked of ``nvidia-smi`` rather than of a binding: the container toolkit mounts it wherever it mounts the driver,
upstream's own launcher counts GPUs with it, and it needs no context on a GPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lr_backend.errors import ConfigError

TENSORRT_LLM = "1.2.1"
"""The pinned release: the last one with compiled engines and ``draft_tokens_external``."""
TRITON_RELEASE = "26.07"
"""The image that brings it."""
IMAGE = f"nvcr.io/nvidia/tritonserver:{TRITON_RELEASE}-trtllm-python-py3"

VISIBLE = "CUDA_VISIBLE_DEVICES"

_QUERY = ("nvidia-smi", "--query-gpu=index,name,compute_cap,memory.total", "--format=csv,noheader,nounits")
_PROBE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as the driver sees it; memory in MiB."""

    index: int
    name: str
    compute_capability: str
    memory_mib: int


def probe_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none without a driver."""
    try:
        result = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(result.stdout) if result.returncode == 0 else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines of ``nvidia-smi --query-gpu=index,name,compute_cap,memory.total --format=csv,noheader,nounits``."""
    rows = ([field.strip() for field in line.split(",")] for line in text.splitlines())
    return tuple(
        Gpu(int(row[0]), row[1], row[2], int(row[3])) for row in rows if len(row) == 4 and row[0].isdigit() and row[3].isdigit()
    )


def visible_gpus(gpus: tuple[Gpu, ...], shown: str | None) -> tuple[Gpu, ...]:
    """Those that a process sees, in its order. ``shown``: its ``CUDA_VISIBLE_DEVICES``; None: it sees all.

    Names other than numbers (UUIDs) are taken in the driver's order.
    """
    if shown is None:
        return gpus
    names = [part.strip() for part in shown.split(",") if part.strip()]
    if not all(name.isdigit() for name in names):
        return gpus[: len(names)]
    by_index = {gpu.index: gpu for gpu in gpus}
    return tuple(by_index[int(name)] for name in names if int(name) in by_index)


def visible_devices(gpu_device_ids: Sequence[int], shown: str | None) -> str:
    """``CUDA_VISIBLE_DEVICES`` for some of the devices that are visible already.

    Raises:
        ConfigError: there are fewer.
    """
    if shown is None:
        return ",".join(str(each) for each in gpu_device_ids)
    known = [part.strip() for part in shown.split(",") if part.strip()]
    if max(gpu_device_ids, default=-1) >= len(known):
        raise ConfigError(f"gpu_device_ids={list(gpu_device_ids)}: CUDA_VISIBLE_DEVICES={shown!r} shows {len(known)} GPUs")
    return ",".join(known[each] for each in gpu_device_ids)


def installed(package: str) -> str | None:
    """The version of a Python package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
