"""Finding tritonserver, the folder of links it gets, and its environment."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from lr_backend.errors import ConfigError
from lr_backend.serve.backend_dir import PACKAGE, TritonInstall, find_tritonserver, prepare_backend_dir, server_environment

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(0o755)
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that looks like the wheel, in place of any installed one; and no tritonserver on PATH."""
    package = tmp_path / "pytriton"
    tree = package / "tritonserver"
    executable(tree / "bin" / "tritonserver")
    executable(tree / "python_backend_stubs" / PYTHON / "triton_python_backend_stub")
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        executable(tree / "backends" / "python" / name)
    spec = importlib.machinery.ModuleSpec("pytriton", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return tree


def test_an_explicit_path_comes_first(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = executable(tmp_path / "bin" / "tritonserver")
    monkeypatch.setenv("PATH", str(on_path.parent))
    explicit = executable(tmp_path / "mine" / "tritonserver")
    assert find_tritonserver(explicit) == TritonInstall(explicit)


def test_then_path_then_the_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_tritonserver() == TritonInstall(wheel / "bin" / "tritonserver", wheel / "python_backend_stubs")
    on_path = executable(tmp_path / "bin" / "tritonserver")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_tritonserver() == TritonInstall(on_path)


def test_the_wheel_is_recognised_by_its_explicit_path(wheel: Path) -> None:
    assert find_tritonserver(wheel / "bin" / "tritonserver").stubs == wheel / "python_backend_stubs"


def test_none_at_all_says_what_to_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'cpu' extra"):
        find_tritonserver()


def test_the_backend_folder_is_links_only(wheel: Path, tmp_path: Path) -> None:
    before = sorted(wheel.rglob("*"))
    backends = prepare_backend_dir(find_tritonserver(), tmp_path / "work")
    assert backends == tmp_path / "work" / "backends"
    links = {path.name: path.resolve() for path in (backends / "python").iterdir()}
    assert all((backends / "python" / name).is_symlink() for name in links)
    assert links["triton_python_backend_stub"] == wheel / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    assert links["lr_backend"] == PACKAGE
    assert sorted(wheel.rglob("*")) == before, "site-packages stays as it was"


def test_a_python_without_a_stub_is_named(wheel: Path, tmp_path: Path) -> None:
    (wheel / "python_backend_stubs" / PYTHON).rename(wheel / "python_backend_stubs" / "3.8")
    with pytest.raises(ConfigError, match=rf"no stub for Python {PYTHON}; it has 3\.8"):
        prepare_backend_dir(find_tritonserver(), tmp_path / "work")


def test_a_complete_server_keeps_its_own_backends(tmp_path: Path) -> None:
    assert prepare_backend_dir(TritonInstall(tmp_path / "tritonserver"), tmp_path) is None


def test_the_environment_leads_to_this_python() -> None:
    base = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda", "PYTHONHOME": "/elsewhere", "OMP_NUM_THREADS": "3", "HOME": "/h"}
    environment = server_environment(base, {"EXTRA": "1"})
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep) == ["/cuda", sysconfig.get_config_var("LIBDIR")]
    assert "PYTHONHOME" not in environment
    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert (environment["HOME"], environment["EXTRA"]) == ("/h", "1")
