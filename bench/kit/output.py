"""Where figures go: a console of any width, and JSON beside the page that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

PAGES = Path(__file__).parents[2] / "docs" / "benchmarks"
"""The pages, and the JSON of their tables."""
PIPED_WIDTH = 140


def console_of_any_width() -> Console:
    """A log is not 80 columns wide."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def write_json(path: Path, document: object) -> None:
    """Write a table's figures; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def keep_json(path: Path, run: str, line: Mapping[str, Any]) -> None:
    """Write the figures of one run into a document that keeps the last figures of every other run."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**kept, run: line})


def print_line(console: Console, line: Mapping[str, Any]) -> None:
    """Print one line of JSON, for programs."""
    console.print(json.dumps(line), soft_wrap=True, highlight=False, markup=False)
