"""What the server's own code may never do, read off its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "lr_backend").rglob("*.py"), *(ROOT / "client" / "src").rglob("*.py"), ROOT / "build_engines.py"])
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
"""Modules that run what they read."""
CALLS = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "eval", "exec", "os.system", "os.popen", "yaml.load"}
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
"""They go back when the clock is set. Only a date that is told may come from them."""
TELLS_A_DATE = {"lr_backend/frontend/app.py"}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(source: str, where: str) -> Iterator[str]:
    """What a source does that none may."""
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"{where}: imports {module}" for module in modules if module.partition(".")[0] in UNPICKLING)
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        if name in CALLS or (name in WALL_CLOCK and where not in TELLS_A_DATE):
            yield f"{where}: calls {name}"
        for said in node.keywords:
            true = not (isinstance(said.value, ast.Constant) and said.value.value is False)
            if said.arg in ("trust_remote_code", "allow_pickle", "shell") and true:
                yield f"{where}: says {said.arg}"


def test_nothing_is_unpickled_and_no_code_comes_with_a_model() -> None:
    assert len(SOURCES) > 100
    found = [fault for path in SOURCES for fault in faults(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "AutoTokenizer.from_pretrained('x', trust_remote_code=True)",
        "np.load('x', allow_pickle=flag)",
        "subprocess.run('x', shell=True)",
        "import time\ntime.time()",
    ],
)
def test_what_is_forbidden_is_found(source: str) -> None:
    assert list(faults(source, "x.py"))
