"""The build: check the checkpoints of a spec, render its model repository, say in a manifest what it came from."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lr_backend
from lr_backend.build.checkpoints import CheckpointInfo, check_checkpoint, check_same_vocabulary
from lr_backend.build.render import MANIFEST, engine_files, lookahead_files, require_replaceable, write_repository
from lr_backend.build.spec import DeploymentSpec, TorchDeployment
from lr_backend.engine import Role
from lr_backend.errors import CheckpointError, ConfigError

ALL_ROLES = (Role.TARGET, Role.DRAFT, Role.JUDGE)
_PACKAGES = ("torch", "transformers", "numpy", "nvidia-pytriton")


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did.

    Attributes:
        checked: what passed, one line each.
        files: paths within ``output``; none were written in a dry run or where the repository was already up to date.
        written: whether ``output`` was replaced.
    """

    spec: DeploymentSpec
    output: Path
    checked: tuple[str, ...]
    files: tuple[str, ...]
    written: bool


def build_repository(
    spec: DeploymentSpec,
    output: Path | None = None,
    *,
    role: Role | None = None,
    dry_run: bool = False,
    only_if_stale: bool = False,
    command: str = "",
) -> BuildReport:
    """Check a spec's checkpoints and render its repository.

    Args:
        output: where to; by default the spec's ``built_dir``.
        role: build this engine alone and keep the other models of an earlier build.
        dry_run: check and render, write nothing.
        only_if_stale: leave a repository that is already what this build would write.
        command: goes into the manifest.

    Raises:
        ConfigError: the spec and a checkpoint do not fit, or ``output`` cannot be written.
        CheckpointError: a checkpoint is incomplete, corrupt or unsupported.
    """
    if not isinstance(spec, TorchDeployment):
        raise ConfigError(f"runtime {spec.runtime!r} is not built yet in this version; use 'torch'")
    output = (output or spec.built_dir).absolute()
    require_replaceable(output)
    roles = ALL_ROLES if role is None else (role,)
    infos = {each: _check_role(spec, each) for each in roles}
    if Role.TARGET in infos and Role.DRAFT in infos:
        check_same_vocabulary(infos[Role.TARGET], infos[Role.DRAFT])
    files: dict[str, str] = {}
    for each in roles:
        files |= engine_files(spec, each)
    if role is None:
        files |= lookahead_files(spec, infos[Role.TARGET])
    checked = tuple(_line(each, info) for each, info in infos.items())
    if role is None:
        checked += _check_auditor(spec)
    if dry_run:
        return BuildReport(spec, output, checked, tuple(files), written=False)
    earlier = read_manifest(output)
    manifest = _manifest(spec, infos, files, earlier, command)
    fresh = earlier.get("fingerprint") == manifest["fingerprint"] and _intact(output, files)
    if not (only_if_stale and fresh):
        keep = output if role is not None and (output / MANIFEST).is_file() else None
        write_repository(output, files, manifest, keep)
        return BuildReport(spec, output, checked, tuple(files), written=True)
    return BuildReport(spec, output, checked, tuple(files), written=False)


def read_manifest(output: Path) -> dict[str, Any]:
    """The manifest of an earlier build; empty where there is none or it is damaged."""
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _check_role(spec: TorchDeployment, role: Role) -> CheckpointInfo:
    try:
        info = check_checkpoint(spec.checkpoint_dir(role), weights_needed=not spec.engine(role).random_weights)
    except CheckpointError as error:
        raise CheckpointError(f"{role}: {error.message}") from error
    wanted = spec.engine(role).max_seq_len
    if wanted > info.max_positions:
        raise ConfigError(f"{role}.max_seq_len={wanted} is beyond the checkpoint's {info.max_positions} positions")
    return info


def _check_auditor(spec: TorchDeployment) -> tuple[str, ...]:
    """Import the auditor's checker, as the server will: a server that cannot find it does not start."""
    audit = spec.loop_config().audit
    try:
        audit.load_checker()
    except ConfigError as error:
        raise ConfigError(f"lookahead.{error.message}") from error
    return (f"auditor: {audit.checker}",) if audit.checker is not None else ()


def _line(role: Role, info: CheckpointInfo) -> str:
    millions = info.num_parameters / 1e6
    return (
        f"{role}: {info.architecture}, {millions:.2f} M parameters, vocabulary {info.vocab_size}, {info.max_positions} positions"
    )


def _manifest(
    spec: TorchDeployment,
    infos: Mapping[Role, CheckpointInfo],
    files: Mapping[str, str],
    earlier: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    known = earlier.get("checkpoints")
    checkpoints = dict(known) if isinstance(known, dict) and len(infos) < len(ALL_ROLES) else {}
    for role, info in infos.items():
        previous = known.get(role.value) if isinstance(known, dict) else None
        checkpoints[role.value] = {"directory": str(info.directory), "files": _digests(info.files, previous)}
    hashes = {role: [entry["sha256"] for entry in value["files"].values()] for role, value in checkpoints.items()}
    material = json.dumps([dict(files), hashes, lr_backend.__version__], sort_keys=True)
    return {
        "spec": spec.name,
        "spec_sha256": _sha256_text(spec.path.read_text(encoding="utf-8")),
        "runtime": spec.runtime,
        "versions": {"lr_backend": lr_backend.__version__, "python": platform.python_version(), **_versions(_PACKAGES)},
        "checkpoints": checkpoints,
        "fingerprint": _sha256_text(material),
        "command": command,
    }


def _digests(paths: Iterable[Path], previous: Any) -> dict[str, dict[str, Any]]:
    """Size, time and hash by file name; a file whose size and time did not change is not read again."""
    earlier = previous.get("files", {}) if isinstance(previous, dict) else {}
    digests = {}
    for path in paths:
        status = path.stat()
        seen: dict[str, Any] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        before = earlier.get(path.name, {})
        same = all(before.get(key) == value for key, value in seen.items()) and "sha256" in before
        digests[path.name] = seen | {"sha256": before["sha256"] if same else _sha256_file(path)}
    return digests


def _intact(output: Path, files: Mapping[str, str]) -> bool:
    return all(_text_or_none(output / name) == text for name, text in files.items())


def _text_or_none(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions(packages: Iterable[str], of: Callable[[str], str] = version) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = of(package)
        except PackageNotFoundError:
            continue
    return found
