"""Building a repository: what is written, when, and what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lr_backend.build import render
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.cli.app import app
from lr_backend.config import LoopConfig
from lr_backend.engine import Role
from lr_backend.errors import CheckpointError, ConfigError
from tests.support.tiny_models import make_checkpoint, make_tiny_models, write_spec


@pytest.fixture
def spec(tmp_path: Path) -> DeploymentSpec:
    return DeploymentSpec.load(write_spec(tmp_path / "engines" / "tiny.toml", make_tiny_models(tmp_path / "ck")))


def audited(spec: DeploymentSpec, checker: str) -> DeploymentSpec:
    """The same deployment with a checker."""
    section = f'[lookahead.audit]\nauditor = "checker"\nchecker = "{checker}"\n[server]'
    spec.path.write_text(spec.path.read_text().replace("[server]", section))
    return DeploymentSpec.load(spec.path)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_four_models_and_a_manifest_are_written(spec: DeploymentSpec) -> None:
    report = build_repository(spec, command="as typed")
    assert report.written
    assert report.output == spec.root / "engines" / "built" / "tiny"
    assert {path.name for path in report.output.iterdir()} == {"target", "draft", "judge", "lookahead", "manifest.json"}
    assert [path.name for path in report.output.parent.iterdir()] == ["tiny"], "nothing else is left beside it"
    manifest = json.loads((report.output / "manifest.json").read_text())
    assert (manifest["spec"], manifest["command"]) == ("tiny", "as typed")
    assert len(manifest["checkpoints"]["target"]["files"]["model.safetensors"]["sha256"]) == 64
    config = LoopConfig.load(report.output / "lookahead" / "1" / "lookahead.json")
    assert (config.vocab_size, config.limits.max_tokens) == (261, 256)


def test_a_dry_run_checks_and_writes_nothing(spec: DeploymentSpec) -> None:
    report = build_repository(spec, dry_run=True)
    assert len(report.checked) == 3
    assert not report.output.parent.exists()


@pytest.mark.parametrize(
    ("checker", "said"),
    [
        ("no_such_module:same", "cannot be imported: ModuleNotFoundError"),
        ("demo.problems:no_such_function", "cannot be imported: AttributeError"),
        ("demo.problems:DELIMITER", "is not a function"),
    ],
)
def test_a_checker_that_the_server_could_not_find_is_refused_by_name(spec: DeploymentSpec, checker: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"lookahead.audit.checker.*'{checker}' {said}"):
        build_repository(audited(spec, checker))
    assert not spec.built_dir.exists()


def test_the_demos_checker_is_found(spec: DeploymentSpec) -> None:
    report = build_repository(audited(spec, "demo.problems:same_meaning"))

    assert report.checked[-1] == "auditor: demo.problems:same_meaning"
    config = LoopConfig.load(report.output / "lookahead" / "1" / "lookahead.json")
    checker = config.audit.load_checker(config.root)
    assert checker is not None
    assert checker("Tom has 12 apples.", "Tom has 12 apples.") is True
    assert checker("Tom has 12 apples.", "Tom has 13 apples.") is False


def test_only_what_is_stale_is_written_again(spec: DeploymentSpec) -> None:
    assert build_repository(spec, only_if_stale=True).written
    assert not build_repository(spec, only_if_stale=True).written
    make_checkpoint(spec.root / "ck" / "draft", seed=7)
    assert build_repository(spec, only_if_stale=True).written
    (spec.built_dir / "draft" / "config.pbtxt").write_text("")
    assert build_repository(spec, only_if_stale=True).written


def test_a_server_that_may_only_read_renders_elsewhere(
    spec: DeploymentSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder of specs in an image is not the server's."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    report = build_repository(spec, only_if_stale=True)

    assert report.written and report.output.is_relative_to(tmp_path) and not spec.built_dir.exists()
    assert (report.output / "target" / "config.pbtxt").is_file()


def test_one_role_is_built_alone(spec: DeploymentSpec) -> None:
    build_repository(spec)
    before = tree(spec.built_dir)
    shutil.rmtree(spec.root / "ck" / "target")
    spec.path.write_text(spec.path.read_text().replace("max_queue_size = 64", "max_queue_size = 65"))
    report = build_repository(DeploymentSpec.load(spec.path), role=Role.JUDGE)
    after = tree(spec.built_dir)
    assert report.files == ("judge/1/model.py", "judge/config.pbtxt")
    assert {name for name in before if before[name] != after[name]} == {"judge/config.pbtxt", "manifest.json"}
    assert set(json.loads(after["manifest.json"])["checkpoints"]) == {"target", "draft", "judge"}


def test_a_failed_build_leaves_the_earlier_one(spec: DeploymentSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    build_repository(spec)
    before = tree(spec.built_dir)
    (spec.root / "ck" / "judge" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"judge: .*config\.json is missing"):
        build_repository(spec)
    make_checkpoint(spec.root / "ck" / "judge", seed=9)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(ConfigError, match="No space left"):
        build_repository(spec)
    monkeypatch.undo()
    assert tree(spec.built_dir) == before
    assert [path.name for path in spec.built_dir.parent.iterdir()] == ["tiny"]


def test_a_folder_of_somebody_else_is_never_replaced(spec: DeploymentSpec, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not a repository that this command wrote"):
        build_repository(spec, home)
    assert (home / "letter.txt").read_text() == "dear"


def test_a_sequence_beyond_the_checkpoint_is_refused(spec: DeploymentSpec) -> None:
    path = spec.root / "ck" / "draft" / "config.json"
    path.write_text(path.read_text().replace('"max_position_embeddings": 2048', '"max_position_embeddings": 1024'))
    with pytest.raises(ConfigError, match=r"draft\.max_seq_len=2048 is beyond the checkpoint's 1024 positions"):
        build_repository(spec)
    stretched = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stretched))
    assert build_repository(spec).written, "the embedded engine computes it"


@pytest.mark.parametrize("text", ["{{ unknown }}", "${left_over}", "{{ role", "{{ ''.__class__.__mro__ }}"])
def test_a_bad_template_is_refused(spec: DeploymentSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(render.TEMPLATES, templates)
    (templates / "embedded" / "config.pbtxt").write_text(text)
    monkeypatch.setattr(render, "TEMPLATES", templates)
    with pytest.raises(ConfigError, match=r"template config\.pbtxt"):
        build_repository(spec)


def test_the_command_says_what_it_did_and_fails_in_one_line(spec: DeploymentSpec) -> None:
    runner = CliRunner()
    dry = runner.invoke(app, ["build", "--spec", str(spec.path), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "would write lookahead/1/lookahead.json" in dry.output
    done = runner.invoke(app, ["build", "--spec", str(spec.path), "--role", "draft"])
    assert done.exit_code == 0, done.output
    assert "wrote draft/config.pbtxt" in done.output
    (spec.root / "ck" / "target" / "tokenizer.json").unlink()
    failed = runner.invoke(app, ["build", "--spec", str(spec.path)])
    assert failed.exit_code == 1
    assert failed.output.count("\n") == 1
    assert "target:" in failed.output
    assert "tokenizer.json is missing" in failed.output


def test_a_server_of_several_roles_is_built_where_serve_looks_for_it(spec: DeploymentSpec) -> None:
    text = spec.path.read_text()
    for role in ("draft", "judge"):
        text = text.replace(f"[{role}]\n", f'[{role}]\nurl = "grpc://there:8001"\n')
    spec.path.write_text(text)
    served = DeploymentSpec.load(spec.path).only([Role.JUDGE, Role.DRAFT]).built_dir
    both = CliRunner().invoke(app, ["build", "--spec", str(spec.path), "--role", "draft", "--role", "judge"])
    assert both.exit_code == 0, both.output
    assert sorted(path.name for path in served.iterdir()) == ["draft", "judge", "manifest.json"]
    mixed = CliRunner().invoke(app, ["build", "--spec", str(spec.path), "--role", "draft", "--role", "target"])
    assert mixed.exit_code == 1 and "target has no url in the spec" in mixed.output
