"""Renders a model repository from the templates in ``model_repository/``; the whole folder appears at once or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec
from lr_backend.contract import ENGINE_OUTPUTS, tensor_list_pbtxt
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.fields import LOOKAHEAD_INPUTS, LOOKAHEAD_OUTPUTS

TEMPLATES = PACKAGE_ROOT / "model_repository"
LOOKAHEAD_MODEL = "lookahead"
MANIFEST = "manifest.json"
_PLACEHOLDER = re.compile(r"\$\{|\{\{|\}\}|\{%|%\}")


def engine_files(spec: DeploymentSpec, role: Role, model_dir: Path) -> dict[str, str]:
    """Files of one engine's model folder: path within the repository to text. ``model_dir`` holds what the engine loads."""
    engine = spec.engine(role)
    values = {
        "role": role.value,
        "spec_name": spec.name,
        "model_dir": model_dir,
        "max_batch_size": engine.triton_max_batch_size,
        "max_queue_size": engine.max_queue_size,
        "inputs": tensor_list_pbtxt("input", engine.inputs),
        "outputs": tensor_list_pbtxt("output", ENGINE_OUTPUTS),
        "parameters": spec.engine_parameters(role, model_dir),
    }
    return _render_folder(TEMPLATES / spec.template(role), role.value, values)


def lookahead_files(spec: DeploymentSpec, vocab_size: int) -> dict[str, str]:
    """Files of the ``lookahead`` model's folder, its settings among them. ``vocab_size``: width of the target's logits."""
    values = {
        "spec_name": spec.name,
        "num_loops": spec.server.num_loops,
        "inputs": tensor_list_pbtxt("input", LOOKAHEAD_INPUTS),
        "outputs": tensor_list_pbtxt("output", LOOKAHEAD_OUTPUTS),
    }
    files = _render_folder(TEMPLATES / LOOKAHEAD_MODEL, LOOKAHEAD_MODEL, values)
    config = spec.loop_config(vocab_size)
    # A marker that the spec names must be one of the target's tokens. A default need not, so it is left out here.
    unnamed = {"think_open", "think_close"} - config.model_fields_set
    return {**files, f"{LOOKAHEAD_MODEL}/1/lookahead.json": config.model_dump_json(indent=2, exclude=unnamed) + "\n"}


def check_own_parts(spec: DeploymentSpec) -> tuple[str, ...]:
    """Make the plug-ins and import the auditor's checker, as the server will; a line for the build's report.

    Raises:
        ConfigError: one cannot be made: a server would not start.
    """
    config = spec.loop_config()
    audit = config.audit
    try:
        audit.load_checker(config.root)
        config.make_parts()
    except ConfigError as error:
        raise ConfigError(f"lookahead.{error.message}") from error
    return (f"auditor: {audit.checker}",) if audit.checker is not None else ()


def write_repository(output: Path, files: Mapping[str, str], manifest: Mapping[str, Any], keep: Path | None = None) -> None:
    """Put a repository at ``output``, replacing one that this project wrote earlier.

    The files are written beside it and moved there, so that a reader sees the old folder or the new one, and a failure
    leaves the old one as it was. ``keep`` is an earlier repository whose other models stay.

    Raises:
        ConfigError: ``output`` is something else, or cannot be written.
    """
    require_replaceable(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    try:
        fresh = staging / "new"
        shutil.copytree(keep, fresh) if keep else fresh.mkdir()
        for name, text in {**files, MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n"}.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if output.exists():
            output.rename(staging / "old")
        fresh.rename(output)
    except OSError as error:
        if (staging / "old").exists() and not output.exists():
            (staging / "old").rename(output)
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def can_write(output: Path) -> bool:
    """Whether a repository can be put there. Where it is a server's, images and volumes of engines may be read only."""
    there = next(each for each in (output.parent, *output.parent.parents) if each.exists())
    return os.access(there, os.W_OK)


def place_to_write(output: Path) -> Path:
    """``output``, or where that cannot be written a temporary folder."""
    return output if can_write(output) else Path(tempfile.mkdtemp(prefix="lookahead-repository-")) / output.name


def read_manifest(output: Path) -> dict[str, Any]:
    """The manifest of an earlier build; empty where there is none or it is damaged."""
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def intact(output: Path, files: Mapping[str, str]) -> bool:
    """Whether a repository holds these files as they are."""
    return all((output / name).is_file() and (output / name).read_text(encoding="utf-8") == text for name, text in files.items())


def require_replaceable(output: Path) -> None:
    """Raises: ConfigError: ``output`` holds something that is not a repository of ours."""
    if not output.exists() or (output / MANIFEST).is_file():
        return
    if not output.is_dir() or any(output.iterdir()):
        raise ConfigError(f"{output} exists and is not a repository that this command wrote; give another --output")


def _render_folder(folder: Path, model: str, values: Mapping[str, Any]) -> dict[str, str]:
    if not folder.is_dir():
        raise ConfigError(f"the templates are missing: no folder {folder}")
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["quoted"] = lambda text: json.dumps(str(text), ensure_ascii=False)
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        name = f"{model}/{path.relative_to(folder).as_posix()}"
        try:
            files[name] = environment.from_string(path.read_text(encoding="utf-8")).render(**values)
        except TemplateError as error:
            raise ConfigError(f"template {path.name}: {error}") from error
        if _PLACEHOLDER.search(files[name]):
            raise ConfigError(f"template {path.name}: a placeholder is left after rendering")
    return files
