"""How tritonserver is started for a deployment's engines: with or without MPI, with which environment and options. Pure.

Compiled engines talk MPI, and one server may hold them in two ways:

- **leader**: ``mpirun`` starts one tritonserver a rank; rank 0 serves, the others load only the engine and wait inside it. Every
  rank belongs to the same engine, so this is for *one* compiled engine, of whatever TP size. No extra hop; upstream recommends
  it there (NVIDIA/TensorRT-LLM issue 1608).
- **orchestrator**: one tritonserver, in which each engine's leader and ranks are processes of their own, started by
  MPI_Comm_spawn (``trtllmExecutorWorker``). The way upstream documents for *several* engines, TP or not; one node only. A
  deployment of target, draft and judge is this. Spawned ranks share GPUs with a server that must not touch them first: hence no
  pinned pool, no peer access, no CUDA pools in it (``triton_backend/scripts/launch_triton_server.py --multi-model``).

Upstream's script leaves pools and peer access as they are in leader mode. There they are off too: every rank's server would
have a pool on every card, which no plan counts.

``mpirun -n 1`` stands before the server in both, as in upstream's script. MPI could start as a singleton, but then each spawn
starts a daemon of its own, and upstream tests the other way. Its default would bind a job of one or two processes, all threads,
to one core each (``mpirun(1)``), with the step loop on the same one: ``--bind-to none``. Ranks that are spawned do not inherit
that, and are told by variables of their own (:mod:`lr_backend.mpi`).

Upstream knows a second way for several engines: ``--disable-spawn-processes`` starts all ranks at once, a tritonserver each, and
``participant_ids`` says whose they are. It is what *several* engines over several machines need, and the draft logits that one
engine hands another (``speculative_decoding_fast_logits``). Ours do neither: a role over machines has a server of its own, in
leader mode (:meth:`LaunchPlan.across`). Upstream's guide for target and draft (NVIDIA/TensorRT-LLM pull request 3797) has
``--multi-model`` with spawned ranks for every TP above 1, equal or not.

Engines of the LLM API start their own ranks from their own process and need neither mode, and no ``mpirun``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from lr_backend.build.placement import Placement
from lr_backend.mpi import UNBOUND, UNBOUND_BY_MPIRUN, without_job
from lr_backend.serve.nodes import Nodes

COMPILED, LLM_API = "tensorrtllm", "llmapi"
MPIRUN = ("mpirun", "--allow-run-as-root", "--bind-to", "none")
"""Up to its first ``-n``."""
ONE_RANK = ("-n", "1")
COMPILED_ENVIRONMENT = {"TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE": "0B"}
"""Upstream's backend has every rank keep two buffers of 512 MB on its card, to exchange keys and values with other servers, which
no engine here does (cacheTransBuffer.cpp; the unit must be said)."""
ORCHESTRATOR_ENVIRONMENT = {
    "TRTLLM_ORCHESTRATOR": "1",
    "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1",
    **COMPILED_ENVIRONMENT,
    **UNBOUND,
    **UNBOUND_BY_MPIRUN,
}


class LaunchMode(StrEnum):
    """Who starts the ranks of compiled engines."""

    PLAIN = "plain"
    """There are none."""
    LEADER = "leader"
    ORCHESTRATOR = "orchestrator"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What the command line of a server is made of, beside the launcher's own options.

    Attributes:
        environment: set for the server.
        arguments: further ones for each rank's tritonserver.
        launcher: stands before the server's command; empty: it is run directly.
        num_ranks: tritonservers under ``launcher``.
        worker_models: what ranks other than 0 load.
        num_nodes: machines that the ranks are on, as many on each.
    """

    mode: LaunchMode = LaunchMode.PLAIN
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    num_ranks: int = 1
    worker_models: tuple[str, ...] = ()
    num_nodes: int = 1

    def across(self, nodes: Nodes) -> Self:
        """The same, with its ranks on these machines: the first ones on the first."""
        launcher = (*self.launcher, "--default-hostfile", str(nodes.hostfile))
        return replace(self, launcher=launcher, environment={**self.environment, **nodes.environment})

    def over(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` for the server, which under a launcher belongs to no job of SLURM or MPI but the launcher's own.

        How ranks are bound is the operator's affair where the environment says it.
        """
        kept = without_job(environment) if self.launcher else environment
        said = {name: kept[name] for name in (*UNBOUND, *UNBOUND_BY_MPIRUN) if name in kept}
        return {**kept, **self.environment, **said}


PLAIN = LaunchPlan()


def launch_plan(placements: Sequence[Placement], *, num_gpus: int | None = None) -> LaunchPlan:
    """The plan for a deployment's engines.

    Args:
        placements: one for each role; a role on the embedded engine counts as none.
        num_gpus: GPUs that the server sees; None: as many as the placements name.
    """
    compiled = [each for each in placements if each.runtime == COMPILED]
    on_gpus = [each for each in placements if each.runtime in (COMPILED, LLM_API)]
    # Off by default since 26.04; said anyway, since the default has changed once. 24.10, which the embedded engine runs on,
    # has no such option.
    arguments: tuple[str, ...] = ("--allow-client-shm=false",) if on_gpus else ()
    if not compiled:
        return LaunchPlan(arguments=arguments)
    named = 1 + max((device for each in on_gpus for device in each.gpu_device_ids), default=-1)
    pools = tuple(f"--cuda-memory-pool-byte-size={device}:0" for device in range(num_gpus or named))
    arguments += ("--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools)
    if len(compiled) == 1:
        (only,) = compiled
        workers = (only.role.value,) if only.tp_size > 1 else ()
        return LaunchPlan(LaunchMode.LEADER, COMPILED_ENVIRONMENT, arguments, MPIRUN, only.tp_size, workers, only.num_nodes)
    # Each engine spawns its workers as it is loaded, by a collective call over this one process: MPI allows one at a time.
    arguments += ("--model-load-thread-count=1",)
    return LaunchPlan(LaunchMode.ORCHESTRATOR, ORCHESTRATOR_ENVIRONMENT, arguments, MPIRUN)
