"""Where one engine runs: what a launcher needs to know of a deployment, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from lr_backend.engine import Role


@dataclass(frozen=True, slots=True)
class Placement:
    """One role's engine on its GPUs.

    Attributes:
        runtime: ``tensorrtllm``, a compiled engine behind Triton's C++ backend; or ``llmapi``, a Python model over the LLM API.
        tp_size: GPUs over which each weight is split, hence MPI ranks of a compiled engine.
        gpu_device_ids: as the driver counts them; one for each rank on a machine.
        num_nodes: machines, each with as many of the ranks.
    """

    role: Role
    runtime: str
    tp_size: int
    gpu_device_ids: tuple[int, ...]
    num_nodes: int = 1
