"""Imports point one way (docs/architecture.md), read from the source with ``ast``."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES = {
    "clock",
    "errors",
    "contract",
    "engine",
    "steps",
    "request",
    "fields",
    "config",
    "parameters",
    "notice",
    "telemetry",
    "logs",
    "plugins",
    "resources",
    "free_memory",
    "hardware",
    "mpi",
    "nvidia",
}
"""What every room may know."""

ALLOWED: dict[str, set[str]] = {
    "clock": set(),
    "errors": set(),
    "contract": {"errors"},
    "engine": {"contract", "errors"},
    "steps": {"contract", "errors"},
    "request": {"engine", "errors"},
    "fields": {"contract", "request"},
    "notice": set(),
    "telemetry": set(),
    "logs": set(),
    "resources": set(),
    "free_memory": set(),
    "mpi": set(),
    "nvidia": {"errors"},
    "plugins": {"errors", "resources"},
    "config": {"engine", "errors", "plugins", "request", "steps"},
    "hardware": {"engine", "errors"},
    "parameters": {"errors", "hardware"},
    "verify": {"clock", "engine", "errors", "steps", "contract", "request", "config"},
    "propose": {"contract", "engine", "errors", "request"},
    "trace": {"engine", "errors", "request", "verify"},
    "policy": {"clock", "request"},
    "audit": {"verify", *LEAVES},
    "loop": {"verify", "propose", "policy", "audit", "trace", *LEAVES},
    "embedded": LEAVES,
    "emulated": {"embedded", "propose", "verify", *LEAVES},
    "llmapi": LEAVES,
    "build": {"emulated", *LEAVES},
    "triton": {"loop", "policy", "audit", "verify", "trace", "embedded", "emulated", "llmapi", *LEAVES},
    "serve": {"build", "embedded", *LEAVES},
    "frontend": {"serve", *LEAVES},
    "testing": {"clock", "contract", "engine", "errors"},
    "plan": {"loop", "policy", "verify", "trace", "emulated", "build", *LEAVES},
    "cli": {"build", "plan", "emulated", "trace", "serve", "frontend", *LEAVES},
}


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "lr_backend").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", list(python_files("lr_backend")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    others = {name.split(".")[1] for name in imported(path) if name.startswith("lr_backend.")} - {part}

    assert others <= ALLOWED[part], f"{path.relative_to(ROOT)} may not import {sorted(others - ALLOWED[part])}"


def test_the_allowed_imports_have_no_circle() -> None:
    remaining = dict(ALLOWED)
    while remaining:
        free = [part for part, needs in remaining.items() if not needs & set(remaining)]
        assert free, f"a circle among {sorted(remaining)}"
        for part in free:
            del remaining[part]


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[set[str]]]:
    """The names in each cell of one of the page's tables."""
    lines = PAGE.partition(f"\n{heading}\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert lines, f"no table {heading}"
    return [[set(re.findall(r"`(\w+)", cell)) for cell in line.split("|")[1:3]] for line in lines]


def test_the_page_says_what_every_room_and_module_knows() -> None:
    said = [name for what in ("room", "module") for names, _ in table(f"| {what} | what it knows |") for name in names]

    assert sorted(said) == sorted({part_of(path) for path in python_files("lr_backend")} - {"__init__"})


def test_the_page_says_who_may_import_whom() -> None:
    said = {room: may for rooms, may in table("| room | may import |") for room in rooms}

    assert said == {room: may - LEAVES for room, may in ALLOWED.items() if room not in LEAVES}


def test_torch_lives_in_the_embedded_engine_and_where_tokens_are_drawn() -> None:
    users = {path for path in python_files("lr_backend") if any(n.split(".")[0] == "torch" for n in imported(path))}

    assert {part_of(path) for path in users} <= {"embedded", "engine"}
    assert {path.name for path in users if part_of(path) == "engine"} == {"noise.py", "drawing.py"}


def test_tritons_backend_module_is_imported_at_the_rim_alone() -> None:
    users = {path.name for path in python_files("lr_backend") if "triton_python_backend_utils" in imported(path)}

    assert users == {"bls_model.py", "engine_model.py", "llmapi_model.py"}


def test_tensorrt_llm_is_imported_by_name_at_one_place_and_only_when_it_is_needed() -> None:
    assert not any(n.split(".")[0] == "tensorrt_llm" for path in python_files("lr_backend") for n in imported(path))
    users = {path.name for path in python_files("lr_backend") if '"tensorrt_llm.llmapi"' in path.read_text(encoding="utf-8")}
    assert users == {"upstream.py"}


WITHOUT_TORCH = {
    "an LLM API engine": "import lr_backend.llmapi.engine",
    "an emulated engine": """
import tempfile
from pathlib import Path
from tests.support.fake_pb_utils import stub_module

sys.modules["triton_python_backend_utils"] = stub_module()
import lr_backend.triton.engine_model
from lr_backend.build.emulated_spec import emulated
from lr_backend.embedded.config import EngineConfig
from lr_backend.emulated.open import open_engine
from lr_backend.engine import Role

with tempfile.TemporaryDirectory() as folder:
    parameters = emulated("qwen3-32b-apart", "h200_sxm").engine_parameters(Role.TARGET, Path(folder))
open_engine(EngineConfig.from_parameters(parameters)).close()
""",
    "the step loop": """
import lr_backend.triton.service
from lr_backend.build.spec import DeploymentSpec
from lr_backend.triton.models import load_models

load_models(DeploymentSpec.load("demo").loop_config())
""",
}


@pytest.mark.parametrize("code", WITHOUT_TORCH.values(), ids=WITHOUT_TORCH)
def test_torch_is_loaded_by_no_process_that_needs_none(code: str) -> None:
    """The LLM API's engine draws with torch where upstream calls it, which has loaded torch itself."""
    told = f"import sys\n{code}\nprint('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert loaded.splitlines()[-1] == "False"


ROOMS = ("lr_backend/loop", "lr_backend/propose", "lr_backend/policy")


def test_the_loop_knows_no_framework() -> None:
    roots = {name.split(".")[0] for path in python_files(*ROOMS) for name in imported(path)}

    assert not roots & {"torch", "transformers", "tritonclient", "triton_python_backend_utils", "structlog"}


def test_no_function_is_long_or_takes_much_without_a_reason() -> None:
    """At most 60 lines and 8 parameters. A command takes a parameter an option; other reasons stand above the ``def``."""
    found = []
    for path in python_files("lr_backend", "bench", "demo", "client/src", "tools"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
                continue
            given = [one for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.arg != "self"]
            is_command = len(given) > 1 and all("Annotated" in ast.unparse(one.annotation or ast.Constant(0)) for one in given)
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            has_reason = text.splitlines()[first - 2].strip().startswith("# Long:")
            if (node.end_lineno - node.lineno >= 60 or len(given) > 8) and not (is_command or has_reason):
                found.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not found


def test_the_tree_is_pure() -> None:
    roots = {
        name.split(".")[0]
        for path in python_files("lr_backend/loop")
        if path.stem in {"tree", "seeds"}
        for name in imported(path)
    }

    assert not roots & {"asyncio", "time", "random", "threading"}


def test_a_policy_has_no_clock_but_the_one_that_it_is_given() -> None:
    roots = {name.split(".")[0] for path in python_files("lr_backend/policy") for name in imported(path)}

    assert not roots & {"asyncio", "time", "random", "threading"}
    code = "\n".join(path.read_text(encoding="utf-8") for path in python_files("lr_backend/policy"))
    assert "running_clock" not in code


EVALUATION = {"matplotlib", "scipy", "math_verify", "pebble"}


def test_the_server_does_without_the_libraries_of_the_evaluation() -> None:
    """What ``bench`` needs is imported there alone, and ``bench`` by name, when its commands are called."""
    roots = {name.split(".")[0] for path in python_files("lr_backend", "client/src") for name in imported(path)}
    assert not roots & {"bench", *EVALUATION}

    code = "import sys, lr_backend.cli.app; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not set(ast.literal_eval(loaded)) & {"bench", *EVALUATION}


def test_what_is_worked_out_of_records_asks_nobody() -> None:
    """Statistics, rules, tables and plots have no clock, network or process of their own."""
    pure = {"statistics", "scoring", "summary", "tables", "plots", "turns"}
    roots = {name.split(".")[0] for path in python_files("bench/evaluation") if path.stem in pure for name in imported(path)}

    assert not roots & {"asyncio", "grpc", "subprocess", "multiprocessing", "socket", "threading", "time", "pebble"}


def test_the_sandboxed_child_knows_nothing_of_the_project() -> None:
    assert {name.split(".")[0] for name in imported(ROOT / "bench/evaluation/sandbox_child.py")} <= set(sys.stdlib_module_names)


def test_the_client_stands_alone() -> None:
    roots = {name.split(".")[0] for path in python_files("client/src") for name in imported(path)}

    assert not roots & {"lr_backend", "demo", "torch", "transformers"}
