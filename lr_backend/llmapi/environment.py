"""Environment of the process that holds one LLM API engine. To be set before ``tensorrt_llm`` is imported.

CUDA opens its devices at the import of torch and hands them down to spawned ranks, so which GPUs an engine has is decided by
``CUDA_VISIBLE_DEVICES`` before that. And a server under ``mpirun`` leaves its own MPI job in the environment: an engine that
starts ranks of its own would take them for part of it. (Both from upstream's ``triton_backend/all_models/llmapi``.)
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from lr_backend.errors import ConfigError

_JOB_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_orte_", "OMPI_FIRST_RANKS", "OMPI_APP_CTX_", "ORTE_", "PMI_")
_SERVER_PREFIX = "TRTLLM_ORCHESTRATOR"
"""How the server's compiled engines are started; nothing to an engine of the LLM API."""
_PMIX_SETTINGS = "PMIX_MCA_"


def belongs_to_job(name: str) -> bool:
    """Whether a variable says which MPI job a process is part of; ``OMPI_MCA_*`` and ``PMIX_MCA_*`` settings do not."""
    return name.startswith(_JOB_PREFIXES) or (name.startswith("PMIX_") and not name.startswith(_PMIX_SETTINGS))


def visible_devices(gpu_device_ids: Sequence[int], already: str | None) -> str:
    """``CUDA_VISIBLE_DEVICES`` for some of the devices that are visible ``already`` (None: all are).

    Raises:
        ConfigError: there are fewer.
    """
    if already is None:
        return ",".join(str(each) for each in gpu_device_ids)
    known = [part.strip() for part in already.split(",") if part.strip()]
    if max(gpu_device_ids, default=-1) >= len(known):
        raise ConfigError(f"gpu_device_ids={list(gpu_device_ids)}: CUDA_VISIBLE_DEVICES={already!r} shows {len(known)} GPUs")
    return ",".join(known[each] for each in gpu_device_ids)


def engine_environment(environment: Mapping[str, str], gpu_device_ids: Sequence[int]) -> dict[str, str]:
    """A copy of ``environment`` for an engine on these GPUs."""
    dropped = {name for name in environment if belongs_to_job(name) or name.startswith(_SERVER_PREFIX)}
    kept = {name: value for name, value in environment.items() if name not in dropped}
    if gpu_device_ids:
        devices = visible_devices(gpu_device_ids, environment.get("CUDA_VISIBLE_DEVICES"))
        kept |= {"CUDA_VISIBLE_DEVICES": devices, "TRTLLM_VISIBLE_DEVICES": devices}
    return kept


def apply(environment: MutableMapping[str, str], wanted: Mapping[str, str]) -> None:
    """Make ``environment`` (``os.environ``) equal to ``wanted``."""
    for name in [name for name in environment if name not in wanted]:
        del environment[name]
    environment.update(wanted)
