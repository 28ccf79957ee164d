"""Environment of the process that holds one LLM API engine. To be set before ``tensorrt_llm`` is imported.

CUDA opens its devices at the import of torch and hands them down to spawned ranks, so which GPUs an engine has is decided by
``CUDA_VISIBLE_DEVICES`` before that. And a server under ``mpirun`` leaves its own MPI job in the environment: an engine that
starts ranks of its own would take them for part of it. (Both from upstream's ``triton_backend/all_models/llmapi``.)

Packages of this runtime's own stand first on the path. ``sys.path`` is for this process alone: Triton's stubs read no PYTHONPATH,
and upstream hands ``sys.path`` to its workers to be put *behind* their own. ``PYTHONPATH`` is for the workers: the process begins
an MPI job of its own, so they inherit its environment (seen with Open MPI 4.1.4 and mpi4py's pool). A ``.pth`` file or a
``sitecustomize`` would do for both, and change the packages of every other model of the server as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from pathlib import Path

from lr_backend.mpi import spawning_alone
from lr_backend.nvidia import VISIBLE, visible_devices

PACKAGES = Path(__file__).resolve().parents[2] / "lib-llmapi"
"""What TensorRT-LLM needs in another version than its image has it (``deploy/requirements-llmapi.txt``); in our image alone."""

_SERVER_PREFIX = "TRTLLM_ORCHESTRATOR"
"""How the server's compiled engines are started; nothing to an engine of the LLM API."""


def engine_environment(
    environment: Mapping[str, str], gpu_device_ids: Sequence[int], packages: Path | None = None
) -> dict[str, str]:
    """A copy of ``environment`` for an engine on these GPUs. ``packages``: a folder that stands first on its workers' path."""
    kept = {name: value for name, value in spawning_alone(environment).items() if not name.startswith(_SERVER_PREFIX)}
    if packages is not None:
        kept["PYTHONPATH"] = os.pathsep.join(part for part in (str(packages), environment.get("PYTHONPATH", "")) if part)
    if gpu_device_ids:
        devices = visible_devices(gpu_device_ids, environment.get(VISIBLE))
        kept |= {VISIBLE: devices, "TRTLLM_VISIBLE_DEVICES": devices}
    return kept


def own_packages(folder: Path = PACKAGES) -> Path | None:
    """The folder of this runtime's own packages, where there is one."""
    return folder if folder.is_dir() else None


def apply(
    environment: MutableMapping[str, str], wanted: Mapping[str, str], path: MutableSequence[str], packages: Path | None = None
) -> None:
    """Make ``environment`` (``os.environ``) equal to ``wanted``, and put ``packages`` first on ``path`` (``sys.path``)."""
    for name in [name for name in environment if name not in wanted]:
        del environment[name]
    environment.update(wanted)
    if packages is not None:
        path.insert(0, str(packages))
