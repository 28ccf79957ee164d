"""NVIDIA's side of this machine: its GPUs, and the TensorRT-LLM that this project is made for.

The GPUs are asked of ``nvidia-smi`` rather than of a binding: the container toolkit mounts it wherever it mounts the driver,
upstream's own launcher counts GPUs with it, and it needs no context on a GPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

TENSORRT_LLM = "1.2.1"
"""The pinned release: the last one with compiled engines and ``draft_tokens_external``."""
TRITON_RELEASE = "26.07"
"""The image that brings it."""
IMAGE = f"nvcr.io/nvidia/tritonserver:{TRITON_RELEASE}-trtllm-python-py3"

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


def installed(package: str, of: Callable[[str], str] = version) -> str | None:
    """The version of a Python package; None where it is not installed."""
    try:
        return of(package)
    except PackageNotFoundError:
        return None
