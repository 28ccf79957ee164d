"""What Open MPI reads in the environment of a process that starts others.

Seen with Open MPI 4.1.4 (Debian's) and 5.0.11: processes that MPI_Comm_spawn starts are bound to one core each, whatever
``--bind-to none`` says of their parent. It does not matter whether ``mpirun`` started that one or nobody did. And no more are
started than there are physical cores, less the one of their parent: a quota of processor time hides no core from Open MPI.
"""

from __future__ import annotations

from collections.abc import Mapping

UNBOUND: Mapping[str, str] = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_rmaps_base_inherit": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Spawned processes may use all cores that their parent may use, and may be more than there are cores.

Under ``mpirun`` the second unbinds them; else the first two are needed. Open MPI 5 reads none of these: there
:data:`UNBOUND_BY_MPIRUN` does it under ``mpirun``, and without ``mpirun`` nobody is bound or counted.
"""
_INHERIT = "PRTE_MCA_rmaps_default_inherit"
UNBOUND_BY_MPIRUN: Mapping[str, str] = {_INHERIT: "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
"""For a process under ``mpirun`` alone: without one, nothing can be spawned with the first."""

_BY_SSH = {
    # (Open MPI 4, Open MPI 5)
    "agent": ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"),
    # The leader reaches every node itself: no node needs to reach another.
    "no tree": ("OMPI_MCA_plm_rsh_no_tree_spawn", "PRTE_MCA_plm_ssh_no_tree_spawn"),
    # A name without its domain is nobody's name where a domain is a group's.
    "whole names": ("OMPI_MCA_orte_keep_fqdn_hostnames", "PRTE_MCA_prte_keep_fqdn_hostnames"),
    # A session lasts as long as what it started, so that the end of one is the end of the other.
    "attached": ("OMPI_MCA_orte_leave_session_attached", "PRTE_MCA_prte_leave_session_attached"),
}

_JOB_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_orte_", "OMPI_FIRST_RANKS", "OMPI_APP_CTX_", "ORTE_", "PMI_")
_SCHEDULER_PREFIX = "SLURM_"
"""Open MPI takes a process among them for a part of the scheduler's job, and then starts nothing."""
_PMIX, _PMIX_SETTINGS = "PMIX_", "PMIX_MCA_"


def by_ssh(agent: str) -> dict[str, str]:
    """How ``mpirun`` starts what it needs on other machines. ``agent``: the ssh command, up to the host."""
    values = {name: agent if name == "agent" else "1" for name in _BY_SSH}
    return {variable: values[name] for name, variables in _BY_SSH.items() for variable in variables}


def belongs_to_job(name: str) -> bool:
    """Whether a variable says which MPI or SLURM job a process is part of; settings (``OMPI_MCA_*``, ``PMIX_MCA_*``) do not."""
    pmix = name.startswith(_PMIX) and not name.startswith(_PMIX_SETTINGS)
    return pmix or name.startswith((*_JOB_PREFIXES, _SCHEDULER_PREFIX))


def spawning_alone(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a process that starts others, and is under no ``mpirun``. What an operator has set stands."""
    kept = without_job(environment)
    kept.pop(_INHERIT, None)
    return {**UNBOUND, **kept}


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a process belongs to no job, and may begin one of its own."""
    return {name: value for name, value in environment.items() if not belongs_to_job(name)}
