"""The examples of docs/plug-ins.md as a package."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = "my_package"
DOCS = Path(__file__).parents[2] / "docs" / "plug-ins.md"


def write_package(folder: Path) -> Path:
    """``my_package`` under ``folder``: each Python example that begins with its file's name."""
    package = folder / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    examples = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert {name for name, _ in examples} == {"verify.py", "propose.py", "segment.py"}
    for name, code in examples:
        assert len([line for line in code.splitlines() if line.strip()]) <= 20, f"{name}: no short example any more"
        (package / name).write_text(code, encoding="utf-8")
    return package
