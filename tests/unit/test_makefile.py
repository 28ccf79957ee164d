"""The Makefile's recipes, with stand-ins for Python and for what an environment holds."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAY = 'echo "$(basename "$0") $*" >> log\n'
PYTHON = f'#!/bin/sh\n{SAY}case "$1" in -c) echo {{0}} ;; esac\n'

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


@dataclass(frozen=True)
class Checkout:
    """A folder with the Makefile and the files that its targets look at."""

    folder: Path

    def script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def environment(self, version: str) -> None:
        """What ``python -m venv`` makes, as far as the recipes go."""
        self.script(".venv/bin/python", PYTHON.format(version))
        self.script(".venv/bin/pip", f"#!/bin/sh\n{SAY}")
        self.script(".venv/bin/lookahead", f"#!/bin/sh\n{SAY}")

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(["make", *words], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def is_done(self) -> bool:
        return (self.folder / ".venv" / ".installed").exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "setup.py", "client/pyproject.toml", "constraints.txt", "lr_backend/serve/arguments.c"):
        made.script(name, "")
    made.script("python", PYTHON.format("3.12"))
    return made


@pytest.mark.parametrize("version", ["3.10", "3.13", ""])
def test_a_python_of_another_version_is_refused_before_anything_is_made(checkout: Checkout, version: str) -> None:
    checkout.script("python", PYTHON.format(version))
    told = checkout.make("venv", "PYTHON=./python")
    assert told.returncode != 0
    assert f"./python is Python {version or '(none)'}; 3.11 or 3.12 is needed" in told.stderr
    assert "venv" not in checkout.log


@pytest.mark.parametrize(("there", "options"), [("3.12", ""), ("3.13", "--clear ")])
def test_an_environment_of_another_version_is_made_anew(checkout: Checkout, there: str, options: str) -> None:
    checkout.environment(there)
    assert checkout.make("venv", "PYTHON=./python").returncode == 0
    assert f"python -m venv {options}.venv\n" in checkout.log
    assert checkout.is_done


def test_an_environment_without_the_decoder_is_not_done(checkout: Checkout) -> None:
    checkout.environment("3.12")
    checkout.script(".venv/bin/lookahead", "#!/bin/sh\necho 'install gcc' >&2\nexit 1\n")
    told = checkout.make("venv", "PYTHON=./python")
    assert told.returncode != 0
    assert "install gcc" in told.stderr
    assert not checkout.is_done
    checkout.environment("3.12")
    assert checkout.make("venv", "PYTHON=./python").returncode == 0
    assert checkout.log.count("pip install") == 2  # which builds it, now that it can


def test_clean_removes_what_was_compiled(checkout: Checkout) -> None:
    built = ("lr_backend/embedded/native/_decoder.cpython-311-x86_64-linux-gnu.so", "lr_backend/serve/_arguments.abi3.so")
    for name in built:
        checkout.script(name, "")
    assert checkout.make("clean").returncode == 0
    assert not [name for name in built if (checkout.folder / name).exists()]


def test_from_torchs_index_comes_torch_alone(checkout: Checkout) -> None:
    checkout.environment("3.12")
    assert checkout.make("venv", "PYTHON=./python", "TORCH_INDEX=https://index.example/cpu").returncode == 0
    of_torch, of_the_rest = (line for line in checkout.log.splitlines() if line.startswith("pip install"))
    assert of_torch.endswith("--no-deps --index-url https://index.example/cpu torch")
    assert "index" not in of_the_rest


def test_an_audit_offline_goes_on_to_say_that_it_is_skipped(checkout: Checkout) -> None:
    checkout.environment("3.12")
    assert checkout.make("venv", "PYTHON=./python").returncode == 0
    checkout.script(".venv/bin/pip", "#!/bin/sh\nexit 1\n")
    assert checkout.make("audit").returncode == 0
    assert checkout.log.endswith("python -m tools.supply_chain audit\n")
