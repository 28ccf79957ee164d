"""Builds a deployment on GPUs: check what can be checked, plan the commands, run them, render the repository, write manifests.

With ``dry_run`` nothing is run, and neither checkpoints nor a GPU are needed: what is not there is said in the report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

import lr_backend
from lr_backend.build.admission import Admission, admissions, require_admission, shortfalls
from lr_backend.build.calibration import hash_texts, require_texts, without_texts
from lr_backend.build.checkpoints import (
    CheckpointInfo,
    check_checkpoint,
    check_same_vocabulary,
    has_weights,
    naming,
    require_positions,
)
from lr_backend.build.digests import digests, installed_versions, num_bytes_to_read, sha256_text
from lr_backend.build.engine_check import check_engine
from lr_backend.build.gpu_spec import FP8_CAPABILITY, GpuDeployment, TrtllmEngineSpec
from lr_backend.build.manifest import Platform, probe_platform, read_engine_manifest, require_servable
from lr_backend.build.memory import (
    GIB,
    GpuMemory,
    estimate,
    gib,
    kv_bytes_per_token,
    padded_vocab,
    require_fit,
    require_tensors,
    verification_bytes,
)
from lr_backend.build.render import (
    can_write,
    check_own_parts,
    engine_files,
    intact,
    lookahead_files,
    place_to_write,
    read_manifest,
    require_replaceable,
    write_repository,
)
from lr_backend.build.report import BuildReport
from lr_backend.build.runner import run_steps
from lr_backend.build.shapes import Source, find_sources
from lr_backend.build.trtllm_commands import NGC_TOOLS, EngineDirs, Step, Toolchain, engine_steps
from lr_backend.contract import LOGITS_DTYPE
from lr_backend.engine import Role
from lr_backend.errors import CheckpointError, ConfigError
from lr_backend.nvidia import TENSORRT_LLM

SAID_BYTES = 1_000_000_000
"""More than this takes seconds to read, so it is said."""
_PLACES = ("--model_dir", "--checkpoint_dir", "--output_dir", "--input_timing_cache", "--output_timing_cache")
_PACKAGES = ("transformers", "numpy", "tensorrt-llm", "tensorrt")


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """All that a build will do, decided before anything is touched.

    Attributes:
        roles: those to build.
        sources: of all roles, because they share GPUs; of its own ones where the server runs no step loop.
        infos: of the checkpoints that are there whole.
        calibration: folders of texts, of the roles that are quantised.
        steps: of the roles that are compiled.
        files: of the repository, path to text.
        waiting: what could not be checked, and why.
        own_parts: what was checked of the deployment's own code.
    """

    spec: GpuDeployment
    output: Path
    roles: tuple[Role, ...]
    sources: Mapping[Role, Source]
    infos: Mapping[Role, CheckpointInfo]
    calibration: Mapping[Role, Path]
    memory: tuple[GpuMemory, ...]
    admission: tuple[Admission, ...]
    steps: Mapping[Role, tuple[Step, ...]]
    files: Mapping[str, str]
    waiting: tuple[str, ...]
    own_parts: tuple[str, ...]

    def dirs(self, role: Role) -> EngineDirs:
        return EngineDirs.of(self.output, role)

    def report(self, written: bool) -> BuildReport:
        return BuildReport(
            spec=self.spec,
            output=self.output,
            checked=(
                *(f"{role}: {info.in_words}" for role, info in self.infos.items()),
                *(f"{role}: calibration texts in {folder}" for role, folder in self.calibration.items() if folder.is_dir()),
                *self.own_parts,
            ),
            files=tuple(self.files),
            written=written,
            steps=tuple(step for steps in self.steps.values() for step in steps),
            memory=self.memory,
            admission=self.admission,
            origins={role: source.origin for role, source in self.sources.items()},
            notes=_notes(self.spec, self.sources, self.memory),
            warnings=shortfalls(self.spec, self.admission),
            waiting=self.waiting,
        )


# Long: what a build may be told, each by itself; `lookahead build` has an option for most.
def build_gpu_deployment(
    spec: GpuDeployment,
    output: Path | None = None,
    *,
    role: Role | None = None,
    dry_run: bool = False,
    resume: bool = False,
    compile_engines: bool = True,
    only_if_stale: bool = False,
    command: str = "",
    console: Console | None = None,
    announce: Callable[[BuildReport], None] = lambda planned: None,
    tools: Toolchain = NGC_TOOLS,
    platform: Callable[[], Platform] = probe_platform,
) -> BuildReport:
    """Build a deployment's engines and its repository.

    Args:
        output: the repository; engines lie beside it. By default the spec's ``built_dir``.
        role: build this engine alone and keep the other models of an earlier build.
        dry_run: plan only. The repository is rendered if ``output`` is given, and marked as one without engines.
        resume: leave out steps that were done already with the same command and inputs.
        compile_engines: False is for a server: render over engines that are there, and refuse those that are missing, were built
            from another spec, or by versions or on GPUs that are not this machine's.
        only_if_stale: leave a repository that is already what this build would write.
        announce: is told the plan before anything is run: compiling takes hours.

    Raises:
        ConfigError: the spec does not fit its GPUs, its checkpoints or this machine; or ``output`` cannot be written.
        CheckpointError: a checkpoint is missing, incomplete, corrupt or unsupported.
        BuildError: a command failed.
    """
    rendered = output is not None or not dry_run
    if dry_run and output is not None and read_manifest(output.absolute()).get("dry_run") is False:
        raise ConfigError(f"{output} holds a repository with engines; a dry run renders into another --output")
    plan = plan_gpu_build(spec, (output or spec.built_dir).absolute(), role, tools, need_checkpoints=not dry_run)
    announce(plan.report(written=False))
    if not dry_run:
        if compile_engines:
            _compile(plan, resume, console or Console(stderr=True), platform)
        else:
            for each in plan.steps:
                _require_current(plan, each, console or Console(stderr=True))
    manifest = _manifest(plan, command, dry_run)
    if not (dry_run or compile_engines):
        require_servable(manifest, platform(), {role.value: spec.engine(role).gpu_device_ids for role in plan.steps})
    if (
        only_if_stale
        and read_manifest(plan.output).get("fingerprint") == manifest["fingerprint"]
        and intact(plan.output, plan.files)
    ):
        return plan.report(written=False)
    if rendered:
        keep = plan.output if role is not None and plan.output.is_dir() and any(plan.output.iterdir()) else None
        if not (dry_run or compile_engines):
            # A server may only read where its engines are, and its settings have changed since they were built.
            plan = _written_elsewhere(plan)
        write_repository(plan.output, plan.files, manifest, keep)
    return plan.report(written=rendered)


def plan_gpu_build(
    spec: GpuDeployment, output: Path, role: Role | None, tools: Toolchain, *, need_checkpoints: bool = True
) -> GpuPlan:
    """Check everything that can be checked without running anything. Reads files, writes none."""
    require_replaceable(output)
    roles = spec.roles_here if role is None else (role,)
    sources = find_sources(spec)
    for each, source in sources.items():
        require_positions(each, spec.engine(each).max_seq_len, source.shape.max_positions)
    _require_shapes(spec, sources)
    memory = estimate(spec, sources)
    require_fit(spec, memory)
    require_tensors(spec, sources)
    admission = admissions(spec, memory)
    require_admission(spec, admission)
    infos: dict[Role, CheckpointInfo] = {}
    waiting: list[str] = []
    for each in Role if role is None and spec.runs_loop else roles:  # the loop wants the tokenizers of all
        directory = spec.checkpoint_dir(each)
        # Of those elsewhere no weights are wanted.
        whole = sources[each].exact or (each not in roles and (directory / "tokenizer.json").is_file())
        if need_checkpoints or (directory.is_dir() and whole):
            with naming(each):
                infos[each] = check_checkpoint(directory, weights_needed=each in roles, fp8=spec.engine(each).loads_fp8)
        else:
            waiting.append(f"{each}: files and hashes, for the checkpoint at {directory}")
    if Role.TARGET in infos and Role.DRAFT in infos:
        check_same_vocabulary(infos[Role.TARGET], infos[Role.DRAFT])
    elif role is None and spec.runs_loop:
        waiting.append("that target and draft share a vocabulary, for both tokenizers")
    if Role.TARGET in roles:
        waiting += _drafter_waits(spec, infos.get(Role.TARGET), need_checkpoints)
    calibration: dict[Role, Path] = {}
    steps: dict[Role, tuple[Step, ...]] = {}
    files: dict[str, str] = {}
    own_parts: tuple[str, ...] = ()
    for each in roles:
        engine, dirs = spec.engine(each), EngineDirs.of(output, each)
        model_dir = spec.checkpoint_dir(each)
        if isinstance(engine, TrtllmEngineSpec):
            if engine.quantization != "none" and engine.calib_dataset is not None:
                calibration[each] = spec.locate(engine.calib_dataset)
                engine = engine.model_copy(update={"calib_dataset": calibration[each]})
            steps[each] = engine_steps(each, engine, model_dir, sources[each].shape.architecture, dirs, tools)
            model_dir = dirs.engine
        files |= engine_files(spec, each, model_dir)
    if role is None and spec.runs_loop:
        own_parts = check_own_parts(spec)
        # One-hot rows are copied into the engine's own buffers, which have the padded width.
        files |= lookahead_files(spec, padded_vocab(sources[Role.TARGET].shape.vocab_size, spec.target.tp_size))
        if Role.TARGET not in infos:
            waiting.append(
                "lookahead/1/lookahead.json: names a tokenizer that is not there; its stop lists are made at start from it"
            )
    for folder in dict.fromkeys(calibration.values()):
        if folder.is_dir():
            require_texts(folder)
        else:
            waiting.append(f"{' and '.join(one for one in calibration if calibration[one] == folder)}: {without_texts(folder)}")
    return GpuPlan(spec, output, roles, sources, infos, calibration, memory, admission, steps, files, tuple(waiting), own_parts)


def _require_shapes(spec: GpuDeployment, sources: Mapping[Role, Source]) -> None:
    """Each rank gets as many heads as the others, and as much of each feed-forward layer. FP8 weights want cards for them."""
    for role, source in sources.items():
        holds_fp8 = any(one is not None and one.weights.fp8 for one in (source, source.drafter))
        if holds_fp8 and spec.engine(role).loads_fp8 and float(spec.hardware.compute_capability) < FP8_CAPABILITY:
            wanted = f"compute capability {FP8_CAPABILITY}, not {spec.hardware.compute_capability}"
            raise ConfigError(f"{role}: the checkpoint's weights are FP8, which needs {wanted}")
        shape, tp = source.shape, spec.engine(role).tp_size
        kv_fits = shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0
        if shape.num_heads % tp or shape.intermediate_size % tp or not kv_fits:
            heads = f"{shape.num_heads} heads, {shape.num_kv_heads} of keys and values"
            raise ConfigError(f"{role}.tp_size={tp}: {heads} and layers of {shape.intermediate_size} cannot be split so")


def _drafter_waits(spec: GpuDeployment, target: CheckpointInfo | None, need_checkpoints: bool) -> list[str]:
    """Check the checkpoint of its own that the target's engine drafts with, if any; or say that it is waited for.

    Raises:
        CheckpointError: it is needed and not there, or of no use to this target.
    """
    folder, ours = spec.speculative_dir, spec.speculation
    if folder is None or ours is None or (ours.checkpoint is None and Role.DRAFT in spec.roles_here):
        return []  # none, or the draft's own, which is checked as that
    there = (folder / "config.json").is_file() and has_weights(folder)
    if not (there or need_checkpoints):
        return [f"target.speculative: the {ours.kind} checkpoint at {folder}"]
    if not there:
        raise CheckpointError(f"target.speculative: {folder} does not hold config.json and weights of {ours.kind}")
    if ours.kind == "draft_target":
        info = check_checkpoint(folder, fp8=True)
        if target is not None:
            check_same_vocabulary(target, info)
    return []


def _notes(spec: GpuDeployment, sources: Mapping[Role, Source], memory: tuple[GpuMemory, ...]) -> tuple[str, ...]:
    return (*_spans(spec), *_drafts(spec, sources, memory))


def _spans(spec: GpuDeployment) -> Iterator[str]:
    for role in spec.roles_here:
        engine = spec.engine(role)
        if engine.num_nodes > 1:
            cards = len(engine.gpu_device_ids)
            yield f"{role} is over {engine.num_nodes} machines of {cards} cards: {engine.tp_size} ranks; the sums are of each"


def _drafts(spec: GpuDeployment, sources: Mapping[Role, Source], memory: tuple[GpuMemory, ...]) -> tuple[str, ...]:
    if Role.TARGET not in sources:
        return ()
    if spec.speculation is not None and Role.TARGET in spec.roles_here:
        return (_drafts_itself(spec, sources[Role.TARGET], memory),)
    size = verification_bytes(spec.target, sources[Role.TARGET])
    if not size or spec.loop_config().draft_logits != "one_hot":
        return ()
    drafts, vocab = spec.target.num_drafts, padded_vocab(sources[Role.TARGET].shape.vocab_size, spec.target.tp_size)
    values = f"{drafts} x {vocab:,} values in {LOGITS_DTYPE}"
    return (f"a sampled verification of {drafts} draft tokens brings {size / GIB * 1024:.1f} MiB of logits along: {values}",)


def _drafts_itself(spec: GpuDeployment, target: Source, memory: tuple[GpuMemory, ...]) -> str:
    """What the target's engine drafts with by itself, and what of the sums is that."""
    drafter = target.drafter
    if drafter is None:
        return "the target's engine drafts from n-grams of the request's own text: no model, and nothing of a GPU's memory"
    weights = next(engine.speculation for gpu in memory for engine in gpu.engines if engine.role is Role.TARGET)
    a_token = kv_bytes_per_token(spec.target, drafter)
    return (
        f"the target's engine drafts by itself ({drafter.origin}): {gib(weights)} of weights on each of its cards, and"
        f" {a_token / 1024:.0f} KiB of KV a token, are in its sums"
    )


def _compile(plan: GpuPlan, resume: bool, console: Console, platform: Callable[[], Platform]) -> None:
    here = platform()
    if not plan.steps:
        if here.gpus:  # a repository that compiles nothing may be rendered where no card is
            _require_cards(plan.spec, here)
        return
    for role, folder in plan.calibration.items():
        if not folder.is_dir():
            raise ConfigError(f"{role}: {without_texts(folder)}")
    _require_versions(here)
    _require_cards(plan.spec, here)
    for role, steps in plan.steps.items():
        dirs, engine = plan.dirs(role), plan.spec.engine(role)
        assert isinstance(engine, TrtllmEngineSpec)
        _require_writable(dirs.root)  # before gigabytes are read
        inputs = _hash_inputs(plan.infos[role], dirs)
        ingredients = _ingredients(inputs, here, engine.gpu_device_ids) | hash_texts(plan.calibration.get(role))
        dirs.manifest.unlink(missing_ok=True)
        records = run_steps(steps, dirs, ingredients, console, resume=resume)
        check_engine(role, engine, dirs.engine)
        manifest = {
            "engine_dir": str(dirs.engine),
            "files": list(steps[-1].products),
            "gpu_device_ids": list(engine.gpu_device_ids),
            "built_with": here.as_json(),
            "checkpoint": {"directory": str(plan.infos[role].directory), "hub": engine.hub, "files": inputs},
            "steps": [
                {"name": record.name, "argv": list(step.command.argv), "command": record.command, "duration_s": record.duration_s}
                for step, record in zip(steps, records, strict=True)
            ],
        }
        _write_json(dirs.manifest, manifest)


def _ingredients(inputs: Mapping[str, Mapping[str, Any]], here: Platform, gpu_device_ids: tuple[int, ...]) -> dict[str, str]:
    """What an engine is made of besides its commands: files by hash, versions, and the architecture of its GPUs."""
    capabilities = sorted({gpu.compute_capability for gpu in here.gpus if gpu.index in gpu_device_ids})
    tools = {"tensorrt_llm": f"{here.tensorrt_llm}", "tensorrt": f"{here.tensorrt}", "compute capability": " ".join(capabilities)}
    return {**{name: entry["sha256"] for name, entry in inputs.items()}, **tools}


def _written_elsewhere(plan: GpuPlan) -> GpuPlan:
    """The plan, with a place that can be written.

    Raises:
        ConfigError: the ranks on other machines would not find it there.
    """
    spread = [role.value for role in plan.steps if plan.spec.engine(role).num_nodes > 1]
    if spread and not can_write(plan.output):
        raise ConfigError(
            f"{', '.join(spread)}: the settings are not those of {plan.output}, which cannot be written here and is read by "
            f"every machine of the role; where it can be written, run `lookahead build --spec {plan.spec.name} --role "
            f"{spread[0]}` (it compiles only what has changed)"
        )
    return replace(plan, output=place_to_write(plan.output))


def _require_writable(folder: Path) -> None:
    """Raises: ConfigError: it is another user's, for instance."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written by user {os.getuid()}")


def _require_versions(here: Platform) -> None:
    """Refuse before an hour of compiling what could not be served after it."""
    if here.tensorrt_llm is None:
        raise ConfigError(
            f"TensorRT-LLM {TENSORRT_LLM} is not installed here; build inside its NGC image, or plan with --dry-run"
        )
    if here.tensorrt_llm != TENSORRT_LLM:
        raise ConfigError(f"TensorRT-LLM {here.tensorrt_llm} is installed here, the pinned version is {TENSORRT_LLM}")


def _require_cards(spec: GpuDeployment, here: Platform) -> None:
    """Refuse cards that the spec is not for: too few, of another architecture, or too small."""
    wanted, used = spec.hardware.compute_capability, {device for one in spec.placements for device in one.gpu_device_ids}
    num_gpus = 1 + max(used, default=-1)  # a part of a spec, built for its own machine, wants its own cards alone
    others = [gpu for gpu in here.gpus if gpu.index in used and gpu.compute_capability != wanted]
    small = [gpu for gpu in here.gpus if gpu.index in used and gpu.memory_mib < spec.hardware.least_memory_mib]
    if len(here.gpus) < num_gpus:
        raise ConfigError(f"{spec.name} wants {num_gpus} GPUs, here are {len(here.gpus)}")
    if others:
        first = others[0]
        raise ConfigError(
            f"{spec.name} is for compute capability {wanted}; GPU {first.index} ({first.name}) has {first.compute_capability}"
        )
    if small:
        first, wanted = small[0], f"{spec.hardware.gpu_memory_gib:g} GiB"
        raise ConfigError(
            f"{spec.name} is for cards of {wanted}; GPU {first.index} ({first.name}) has {first.memory_mib / 1024:.1f} GiB"
        )


def _hash_inputs(info: CheckpointInfo, dirs: EngineDirs) -> dict[str, dict[str, Any]]:
    """Hashes of a checkpoint's files, kept beside the engine so that gigabytes are read once."""
    found = digests(info.files, {"files": _known_inputs(dirs)})
    _write_json(_inputs_file(dirs), found)
    return found


def _inputs_file(dirs: EngineDirs) -> Path:
    return dirs.root / "inputs.json"


def _known_inputs(dirs: EngineDirs) -> dict[str, Any]:
    try:
        known = json.loads(_inputs_file(dirs).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _require_current(plan: GpuPlan, role: Role, console: Console) -> None:
    """Refuse an engine that is not there, or that was compiled by other commands or from other files than there are now."""
    dirs = plan.dirs(role)
    manifest = read_engine_manifest(dirs.manifest)
    built = [_flags_of(step.get("argv", ())) for step in manifest.get("steps", ())]
    if built != [_flags_of(step.command.argv) for step in plan.steps[role]]:
        raise ConfigError(f"{role}: {plan.spec.path.name} has changed since its engine was built; run lookahead build again")
    then = manifest.get("checkpoint", {}).get("files", {})
    folder = plan.infos[role].directory
    weights = {path.name for path in plan.infos[role].files if path.suffix == ".safetensors"}
    if elsewhere := weights.symmetric_difference(name for name in then if name.endswith(".safetensors")):
        raise ConfigError(f"{role}: {min(elsewhere)}: {folder} is not what its engine was built from; run lookahead build again")
    # A tokenizer or a chat template may change; an engine holds none.
    compiled = [
        path
        for path in plan.infos[role].files
        if path.name in then and (path.suffix == ".safetensors" or path.name == "config.json")
    ]
    known = {**then, **_known_inputs(dirs)}
    if (num_bytes := num_bytes_to_read(compiled, {"files": known})) > SAID_BYTES:
        told = f"{role}: reading {num_bytes / 1e9:.0f} GB of weights, to see that its engine was built from them"
        console.print(told, highlight=False, soft_wrap=True)
    now = digests(compiled, {"files": known})
    if known != {**known, **now}:
        with suppress(ConfigError):  # a server may only read there
            _write_json(_inputs_file(dirs), {**known, **now})
    if others := [name for name in now if now[name]["sha256"] != then[name].get("sha256")]:
        raise ConfigError(f"{role}: {others[0]} in {folder} is not what its engine was built from; run lookahead build again")


def _flags_of(argv: Any) -> list[tuple[str, str]]:
    """The arguments without what changes no engine, and without the places of program, checkpoint and engine, which may have
    moved: what lies there is compared by itself. Of calibration texts the name of their folder has to do."""
    first = next((at for at, part in enumerate(argv) if str(part).startswith("--")), len(argv))
    flags = [str(part) for part in argv[first:]]
    named = zip_longest(flags[::2], flags[1::2], fillvalue="")
    return [(name, _unplaced(name, value)) for name, value in named if name != "--workers"]


def _unplaced(name: str, value: str) -> str:
    return "" if name in _PLACES else Path(value).name if name == "--calib_dataset" else value


def _manifest(plan: GpuPlan, command: str, dry_run: bool) -> dict[str, Any]:
    compiled = [role for role in plan.spec.roles_here if isinstance(plan.spec.engine(role), TrtllmEngineSpec)]
    paths = {role: plan.dirs(role).manifest for role in compiled}
    engines = {} if dry_run else {role.value: read_engine_manifest(path) for role, path in paths.items() if path.is_file()}
    for name, entry in engines.items():
        entry["engine_dir"] = str(plan.dirs(Role(name)).engine)  # where it lies by now
    material = json.dumps([dict(plan.files), engines, lr_backend.__version__], sort_keys=True)
    return {
        "spec": plan.spec.name,
        "spec_sha256": sha256_text(plan.spec.path.read_text(encoding="utf-8")),
        "runtime": plan.spec.runtime,
        "dry_run": dry_run,
        "versions": {"lr_backend": lr_backend.__version__, **installed_versions(_PACKAGES)},
        "engines": engines,
        "commands": {role.value: [step.command.shell() for step in steps] for role, steps in plan.steps.items()},
        "memory_bytes": {f"gpu{gpu.gpu}": gpu.total for gpu in plan.memory},
        "sources": {role.value: source.origin for role, source in plan.sources.items()},
        "fingerprint": sha256_text(material),
        "command": command,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Raises: ConfigError: it cannot be written."""
    staging = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        staging.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
