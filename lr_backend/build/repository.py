"""The build: check the checkpoints of a spec, render its model repository, say in a manifest what it came from."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lr_backend
from lr_backend.build.checkpoints import CheckpointInfo, check_checkpoint, check_same_vocabulary, naming, require_positions
from lr_backend.build.digests import digests, installed_versions, sha256_text
from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.render import (
    MANIFEST,
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
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment, EmulatedDeployment, GpuDeployment
from lr_backend.emulated.vocabulary import VOCABULARY
from lr_backend.engine import Role

_PACKAGES = ("torch", "transformers", "numpy", "nvidia-pytriton")


def build_repository(
    spec: DeploymentSpec,
    output: Path | None = None,
    *,
    role: Role | None = None,
    dry_run: bool = False,
    only_if_stale: bool = False,
    command: str = "",
) -> BuildReport:
    """Check a spec's checkpoints and render its repository. Engines that must be compiled first are expected to be there:
    :func:`~lr_backend.build.gpu_build.build_gpu_deployment` makes them.

    Args:
        output: where to; by default the spec's ``built_dir``.
        role: build this engine alone and keep the other models of an earlier build.
        dry_run: check and render, write nothing.
        only_if_stale: leave a repository that is already what this build would write; where that is stale and cannot be
            written, render into a temporary folder.
        command: goes into the manifest.

    Raises:
        ConfigError: the spec and a checkpoint do not fit, or ``output`` cannot be written.
        CheckpointError: a checkpoint is incomplete, corrupt or unsupported.
    """
    if isinstance(spec, GpuDeployment):
        return build_gpu_deployment(
            spec, output, role=role, dry_run=dry_run, compile_engines=False, only_if_stale=only_if_stale, command=command
        )
    output = (output or spec.built_dir).absolute()
    require_replaceable(output)
    roles = spec.models_here if role is None else (role,)
    infos: dict[Role, CheckpointInfo] = {}
    if isinstance(spec, EmulatedDeployment):
        checked, vocab_size = tuple(_emulated_line(spec, each) for each in roles), len(VOCABULARY)
    else:
        assert isinstance(spec, EmbeddedDeployment), spec.runtime
        asked_about = Role if role is None and spec.runs_loop else roles  # the loop wants the tokenizers of all
        infos = {each: _check_role(spec, each, weights_needed=each in spec.roles_here) for each in asked_about}
        if Role.TARGET in infos and Role.DRAFT in infos:
            check_same_vocabulary(infos[Role.TARGET], infos[Role.DRAFT])
        checked = tuple(f"{each}: {info.in_words}" for each, info in infos.items())
        vocab_size = next(iter(infos.values())).vocab_size
    files: dict[str, str] = {}
    for each in roles:
        files |= engine_files(spec, each, spec.checkpoint_dir(each))
    if role is None and spec.runs_loop:
        files |= lookahead_files(spec, vocab_size)
        checked += check_own_parts(spec)
    if dry_run:
        return BuildReport(spec, output, checked, tuple(files), written=False)
    earlier = read_manifest(output)
    manifest = _manifest(spec, infos, files, earlier, command)
    fresh = earlier.get("fingerprint") == manifest["fingerprint"] and intact(output, files)
    if not (only_if_stale and fresh):
        keep = output if role is not None and (output / MANIFEST).is_file() else None
        output = place_to_write(output) if only_if_stale else output
        write_repository(output, files, manifest, keep)
        return BuildReport(spec, output, checked, tuple(files), written=True)
    return BuildReport(spec, output, checked, tuple(files), written=False)


def _check_role(spec: EmbeddedDeployment, role: Role, *, weights_needed: bool) -> CheckpointInfo:
    engine = spec.engine(role)
    with naming(role):
        info = check_checkpoint(spec.checkpoint_dir(role), weights_needed=weights_needed and not engine.random_weights)
    require_positions(role, engine.max_seq_len, info.stretched_positions)
    return info


def _emulated_line(spec: EmulatedDeployment, role: Role) -> str:
    engine = spec.engine(role)
    return f"{role}: {spec.engine_pace(role).label}, emulated, {engine.max_tokens_in_paged_kv_cache} tokens of KV"


def _manifest(
    spec: DeploymentSpec,
    infos: Mapping[Role, CheckpointInfo],
    files: Mapping[str, str],
    earlier: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    known = earlier.get("checkpoints")
    checkpoints = dict(known) if isinstance(known, dict) and len(infos) < len(Role) else {}
    for role, info in infos.items():
        previous = known.get(role.value) if isinstance(known, dict) else None
        checkpoints[role.value] = {"directory": str(info.directory), "files": digests(info.files, previous)}
    hashes = {role: [entry["sha256"] for entry in value["files"].values()] for role, value in checkpoints.items()}
    material = json.dumps([dict(files), hashes, lr_backend.__version__], sort_keys=True)
    return {
        "spec": spec.name,
        "spec_sha256": sha256_text(spec.path.read_text(encoding="utf-8")),
        "runtime": spec.runtime,
        "versions": {"lr_backend": lr_backend.__version__, "python": platform.python_version(), **installed_versions(_PACKAGES)},
        "checkpoints": checkpoints,
        "fingerprint": sha256_text(material),
        "command": command,
    }
