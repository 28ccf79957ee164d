"""``lookahead init``: a checked spec for checkpoints of one's own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lr_backend.build.admission import admissions, branches_that_join, require_admission
from lr_backend.build.gpu_spec import GpuRuntime
from lr_backend.build.memory import estimate, require_fit, require_tensors
from lr_backend.build.new_spec import (
    Cards,
    Host,
    Models,
    Naming,
    embedded_spec,
    gpu_spec,
    iteration_choices,
    read_models,
    ways_to_place,
)
from lr_backend.build.pace import CARD_CAPABILITY, CARD_MEMORY_GIB
from lr_backend.build.placements import with_budgets
from lr_backend.build.repository import build_repository
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.cli.errors import fail, refuse
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.free_memory import free_bytes
from lr_backend.nvidia import VISIBLE, probe_gpus, visible_gpus
from lr_backend.serve.startup_check import shared_cards, why_no_decoder

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Runtime(StrEnum):
    """What computes the three models."""

    EMBEDDED = "embedded"
    TENSORRTLLM = "tensorrtllm"
    LLMAPI = "llmapi"


def init(
    target: Annotated[Path, typer.Option(metavar="FOLDER", help="Checkpoint of the model that answers.")],
    draft: Annotated[Path, typer.Option(metavar="FOLDER", help="Checkpoint of a small model of the same family.")],
    judge: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Checkpoint that judges steps, of any family; by default the target's own."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the deployment; by default the target's folder.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; by default engines/<name>.toml.")
    ] = None,
    runtime: Annotated[Runtime, typer.Option(help="What computes: embedded needs no GPU.")] = Runtime.EMBEDDED,
    gpus: Annotated[int | None, typer.Option(help="Cards to use; by default all that are here.", min=1, max=16)] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="SYSTEM", help="Their kind, where they are not here: h100_sxm, h200_sxm, b200_sxm, l40s."),
    ] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.", min=64)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a checked deployment spec for three checkpoints, with limits that fit this machine, and say what to run next."""
    if runtime is Runtime.EMBEDDED and (gpus is not None or system is not None):
        refuse("--gpus and --system go with --runtime tensorrtllm or llmapi")
    name = _slug(target.resolve().name) if name is None else name
    if not _NAME.fullmatch(name):
        refuse(f"--name {name}: lower-case letters, digits, dots, dashes and underscores, at most 64 of them")
    path = (output or Path("engines") / f"{name}.toml").absolute()
    if path.suffix != ".toml":
        refuse(f"--output {path}: a spec's file ends in .toml")
    if path.exists() and not force:
        refuse(f"{path} is there already: give another --name or --output, or --force to replace it")
    console = Console()
    try:
        models = read_models(target, draft, judge or target, fp8=runtime is Runtime.LLMAPI)
        naming = Naming(name, path.parent.parent if path.parent.name == "engines" else path.parent)
        if runtime is Runtime.EMBEDDED:
            text = embedded_spec(models, naming, _host(), max_seq_len)
            checked = _write(path, text)
        else:
            checked = _write_gpu(path, models, naming, _cards(gpus, system), runtime, max_seq_len)
    except LookaheadError as error:
        fail(error)
    for line in checked:
        console.print(f"[green]checked[/] {line}", highlight=False, soft_wrap=True)
    if judge is None:
        console.print("[yellow]judge[/] the target's own checkpoint: a smaller instruct model judges faster", highlight=False)
    console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
    spec = DeploymentSpec.load(path)
    if isinstance(spec, GpuDeployment):
        _say_idle(console, spec)
    _say_next(console, spec, runtime)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:64] or "own"


def _host() -> Host:
    return Host(free_bytes(), len(os.sched_getaffinity(0)), not why_no_decoder())


def _cards(gpus: int | None, system: str | None) -> Cards:
    """The cards here, or those of ``system``. Raises: ConfigError: neither is known, or there are fewer."""
    if system is not None:
        if system not in CARD_MEMORY_GIB:
            raise ConfigError(f"--system {system!r}: not one of {', '.join(CARD_MEMORY_GIB)}")
        return Cards(system, gpus or 1, CARD_MEMORY_GIB[system], CARD_CAPABILITY[system])
    here = visible_gpus(probe_gpus(), os.environ.get(VISIBLE))
    if not here:
        raise ConfigError("there is no GPU here: say what the engines will run on, e.g. --system h100_sxm --gpus 4")
    if gpus is not None and gpus > len(here):
        raise ConfigError(f"--gpus {gpus}: there are {len(here)} here; for another machine give its --system")
    least = min(here, key=lambda gpu: gpu.memory_mib)
    # What CUDA reports is some 1 % less than what the driver does.
    return Cards(least.name, gpus or len(here), round(least.memory_mib / 1024 * 0.99, 1), least.compute_capability)


def _write_gpu(
    path: Path, models: Models, naming: Naming, cards: Cards, runtime: Runtime, max_seq_len: int | None
) -> tuple[str, ...]:
    """Lay the models over the cards in the first way that fits. Raises: ConfigError: none does; with the first way's sum."""
    first: ConfigError | None = None
    kind: GpuRuntime = "tensorrtllm" if runtime is Runtime.TENSORRTLLM else "llmapi"
    choices = iteration_choices(models, kind, max_seq_len)
    for placed in ways_to_place(models[Role.TARGET], cards.num_gpus, kind):
        text_of = partial(gpu_spec, models, naming, cards, kind, placed, max_seq_len=max_seq_len)
        try:
            return _write(path, _best_text(path, text_of, choices))
        except ConfigError as error:
            first = first or error
    assert first is not None
    raise ConfigError(f"{first.message}. Give more --gpus, a smaller --max-seq-len, or smaller checkpoints") from first


def _best_text(path: Path, text_of: Callable[..., str], choices: tuple[int, ...]) -> str:
    """The text with the smallest token budget by which most branches of a request join at once, and the KV budgets beside it.

    Raises:
        ConfigError: none of the choices fits the cards; with the smallest one's sum.
    """
    best, most = "", -1
    smallest: ConfigError | None = None
    for tokens in choices:
        try:
            with _draft(path, text_of(iteration_tokens=tokens)) as draft:
                planned = with_budgets(GpuDeployment.load(draft))
                sources = find_sources(planned)
            memory = estimate(planned, sources)
            require_fit(planned, memory)
            require_tensors(planned, sources)
            found = admissions(planned, memory)
            require_admission(planned, found)
        except ConfigError as error:
            if best:
                break  # a larger budget leaves less to the KV caches
            smallest = smallest or error  # too small for all rows, perhaps
            continue
        joined = branches_that_join(found)
        if joined > most:
            budgets = {role: planned.engine(role).max_tokens_in_paged_kv_cache or 0 for role in Role}
            best, most = text_of(iteration_tokens=tokens, kv_tokens=budgets), joined
    if not best and smallest is not None:
        raise smallest
    return best


def _write(path: Path, text: str) -> tuple[str, ...]:
    """Check a spec as a build would, then put it in its place; what was checked.

    Raises:
        ConfigError: it cannot be served, or not be written. ``path`` is as it was.
    """
    with _draft(path, text) as draft:
        try:
            report = build_repository(DeploymentSpec.load(draft), dry_run=True)
        except ConfigError as error:
            raise ConfigError(error.message.replace(draft.name, path.name)) from error
        draft.replace(path)
    return report.checked


@contextmanager
def _draft(path: Path, text: str) -> Iterator[Path]:
    """The text as a file beside ``path``, where its relative paths hold; gone in the end, unless it was moved."""
    draft = path.with_name(f".{path.stem}-{os.getpid()}.toml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _say_idle(console: Console, spec: GpuDeployment) -> None:
    used = {number for each in spec.placements for number in each.gpu_device_ids}
    idle = [str(number) for number in range(spec.hardware.num_gpus) if number not in used]
    if idle:
        how = f"`init --gpus {len(idle)}` with another --name, served with CUDA_VISIBLE_DEVICES={','.join(idle)}"
        line = f"[yellow]idle[/] of {spec.hardware.num_gpus} cards, {', '.join(idle)}: a second server can have them ({how})"
        console.print(line, highlight=False, soft_wrap=True)


def _say_next(console: Console, spec: DeploymentSpec, runtime: Runtime) -> None:
    path = spec.path.relative_to(Path.cwd()) if spec.path.is_relative_to(Path.cwd()) else spec.path
    with_mps = " --start-mps" if isinstance(spec, GpuDeployment) and shared_cards(spec.placements) else ""
    commands = [f"lookahead doctor --spec {path}", f"lookahead serve --spec {path}{with_mps}"]
    if runtime is Runtime.TENSORRTLLM:
        commands[1:1] = [f"lookahead build --spec {path} --dry-run", f"lookahead build --spec {path}"]
    console.print("next:", highlight=False)
    for command in commands:
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
