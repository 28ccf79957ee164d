"""CUDA MPS, which lets the processes of several engines compute on one card at the same time: whether it runs here.

The server starts none. The daemon belongs to a machine or a container, serves one user at a time and outlives a server; whoever
starts it by the way changes what all other processes on the card do.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES_VARIABLE, PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
_ASK, _LIMIT_S = "get_server_list\n", 10.0


class Mps(StrEnum):
    """What was found."""

    RUNNING = "running"
    STOPPED = "not running"
    ABSENT = "not found"


def probe_mps(environment: Mapping[str, str]) -> Mps:
    """Ask the daemon; where its program is not there, whether somebody else's has left its pipe in the folder that is shared."""
    program = shutil.which(CONTROL, path=environment.get("PATH"))
    if program is None:
        shared = Path(environment.get(PIPES_VARIABLE) or PIPES) / "control"
        return Mps.RUNNING if shared.exists() else Mps.ABSENT
    try:
        asked = subprocess.run(
            [program], input=_ASK, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Mps.STOPPED
    return Mps.RUNNING if asked.returncode == 0 else Mps.STOPPED
