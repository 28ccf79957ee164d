"""The folder of a server: held while one runs, cleared away by the next one where nobody holds it."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

import pytest

from lr_backend.serve.guard import SHM_DIR
from lr_backend.serve.work_dir import WorkDir, remove_leftovers, shared_memory_prefix


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def number() -> str:
    return uuid.uuid4().hex[:12]


def test_what_a_killed_server_left_is_cleared_away(number: str) -> None:
    work_dir = WorkDir.make(number)
    (work_dir.path / "notice.lessons").write_bytes(b"lessons")
    region = SHM_DIR / f"{shared_memory_prefix(number)}region"
    region.touch()
    assert remove_leftovers() == [] and region.exists(), "it is held"

    os.close(work_dir.lock)  # as where its processes are killed

    assert remove_leftovers() == [work_dir.path.name]
    assert not work_dir.path.exists() and not region.exists()


def test_whoever_inherits_the_folder_holds_it(number: str) -> None:
    work_dir = WorkDir.make(number)
    guards = os.dup(work_dir.lock)
    os.close(work_dir.lock)
    assert remove_leftovers() == []
    os.close(guards)
    assert remove_leftovers() == [work_dir.path.name]


def test_what_is_not_a_servers_folder_stays(folder: Path, number: str) -> None:
    other, elsewhere = folder / "lookahead-triton-notes", folder / "elsewhere"
    for path in (other, elsewhere):
        path.mkdir()
    link = folder / f"lookahead-triton-{number}"
    link.symlink_to(elsewhere)
    assert remove_leftovers() == []
    assert other.is_dir() and link.is_symlink() and elsewhere.is_dir()


def test_a_folder_is_removed_with_what_is_in_it(number: str) -> None:
    work_dir = WorkDir.make(number)
    (work_dir.path / "server.log").touch()
    work_dir.remove()
    assert not work_dir.path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(work_dir.lock)
