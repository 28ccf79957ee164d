"""What a build did, as a value that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from lr_backend.build.admission import Admission
from lr_backend.build.base import DeploymentSpec
from lr_backend.build.memory import EngineMemory, GpuMemory, gib
from lr_backend.build.trtllm_commands import Step
from lr_backend.engine import Role


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did.

    Attributes:
        checked: what passed, one line each.
        files: paths within ``output``; none were written in a dry run or where the repository was already up to date.
        written: whether ``output`` was replaced.
        steps: the commands that make the engines; empty for engines that are not compiled.
        memory: what each GPU must hold; empty where there is none.
        admission: what one iteration of each compiled engine admits.
        origins: where each model's sizes were learned.
        notes: what else follows from the spec's sizes.
        warnings: what will work, and not as it should.
        waiting: what could not be checked or filled in yet, and for what it waits.
    """

    spec: DeploymentSpec
    output: Path
    checked: tuple[str, ...]
    files: tuple[str, ...]
    written: bool
    steps: tuple[Step, ...] = ()
    memory: tuple[GpuMemory, ...] = ()
    admission: tuple[Admission, ...] = ()
    origins: Mapping[Role, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def memory_table(gpus: tuple[GpuMemory, ...]) -> Table:
    """One row an engine and GPU, and one with the sum of each GPU."""
    columns = ("", "weights", "KV", "KV tokens", "speculation", "draft logits", "logits", "workspace", "total")
    table = Table(title="memory of each GPU", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for gpu in gpus:
        for engine in gpu.engines:
            table.add_row(f"GPU {gpu.gpu} {engine.role}", *_cells(engine))
        named = (("Triton", gpu.server), ("CUDA MPS", gpu.mps), ("reserve", gpu.reserve))
        others = [f"{name} {gib(size)}" if size else "" for name, size in named]
        table.add_row(f"GPU {gpu.gpu} sum", *("",) * 4, *others, f"{gib(gpu.total)} of {gib(gpu.capacity)}")
        table.add_section()
    return table


def admission_table(found: tuple[Admission, ...]) -> Table:
    """One row an engine and prefix; in the last column, requests whose branches all join at once."""
    branches = max((one.branches for one in found), default=0)
    columns = ("", "a call's tokens", "blocks", "by tokens", "by KV blocks", "by sequences", "admitted", "binds")
    table = Table(title="calls that one iteration admits, by the prefix behind which they go on", title_justify="left")
    for name in (*columns, f"requests of {branches} branches"):
        table.add_column(name, justify="left" if name in ("", "binds") else "right", no_wrap=True)
    for index, one in enumerate(found):
        if index and one.role is not found[index - 1].role:
            table.add_section()
        limits = (one.tokens, one.blocks, one.by_tokens, one.by_blocks, one.by_sequences, one.calls)
        style = None if one.requests >= 1 else "yellow"
        requests = f"{one.requests:.1f}"
        table.add_row(f"{one.role} {one.prefix:,}", *(f"{limit:,}" for limit in limits), one.binds, requests, style=style)
    return table


def _cells(engine: EngineMemory) -> tuple[str, ...]:
    sizes = (engine.speculation, engine.draft_logits, engine.logits, engine.workspace, engine.total)
    return gib(engine.weights), gib(engine.kv_cache), f"{engine.kv_tokens}", *map(gib, sizes)
