"""CUDA MPS, which lets the processes of several engines compute on one card at the same time: whether it runs here.

The daemon belongs to a machine or a container, serves one user at a time and outlives a server; whoever starts it by the way
changes what all other processes on the card do. So the server starts one only where it is told to, as in a container of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from lr_backend.nvidia import VISIBLE

CONTROL = "nvidia-cuda-mps-control"
PIPES_VARIABLE, PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_ASK, _QUIT, _LIMIT_S = "get_server_list\n", "quit\n", 10.0


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
    return Mps.RUNNING if _run([program], _ASK, environment) else Mps.STOPPED


def start(environment: Mapping[str, str]) -> Mps:
    """Start the daemon, for processes with this environment; what is there then.

    It is to see all cards. One that is shown some numbers them anew, and what its clients are shown would name others. A part of
    a card (MIG) is named by the daemon's environment alone.
    """
    program = shutil.which(CONTROL, path=environment.get("PATH"))
    if program is None:
        return Mps.ABSENT
    for name in (PIPES_VARIABLE, LOG_VARIABLE):
        if environment.get(name):
            Path(environment[name]).mkdir(parents=True, exist_ok=True)
    named = {name: value for name, value in environment.items() if name != VISIBLE or value.startswith("MIG-")}
    _run([program, "-d"], "", named)
    return probe_mps(environment)


def stop(environment: Mapping[str, str]) -> None:
    """End a daemon that was started here."""
    program = shutil.which(CONTROL, path=environment.get("PATH"))
    if program is not None:
        _run([program], _QUIT, environment)


def _run(command: list[str], text: str, environment: Mapping[str, str]) -> bool:
    """Whether it ended well. No pipe for its output: a daemon would keep that open."""
    try:
        asked = subprocess.run(
            command,
            input=text.encode(),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
