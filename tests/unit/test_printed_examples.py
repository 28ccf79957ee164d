"""Examples that are printed ask the one question that the demo answers right (held by the integration tests)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lr_backend.serve.warmup import QUESTION

PROJECT = Path(__file__).parents[2]
PAGES = [path for path in PROJECT.glob("**/*.md") if not {".venv", "out", ".venv-profiles"} & set(path.parts)]
WORD_PROBLEM = re.compile(r"[^\"'\n`>]*How many \w+ does \w+ have[^\"\n`?]*\?")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_a_printed_question_is_the_one_that_is_answered_right(page: Path) -> None:
    if page.parts[-2:] == ("demo", "README.md"):
        return  # it shows what the models have learned
    found = [one.strip() for one in WORD_PROBLEM.findall(page.read_text(encoding="utf-8"))]
    assert set(found) <= {QUESTION}


def test_the_pages_print_it() -> None:
    printed = {str(path.relative_to(PROJECT)) for path in PAGES if QUESTION in path.read_text(encoding="utf-8")}
    assert {"README.md", "client/README.md"} <= printed
