"""The pages: links lead somewhere, lines are short, and examples ask the one question that the demo answers right."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lr_backend.errors import (
    Cancelled,
    EngineRejected,
    InvalidRequest,
    LookaheadError,
    NotFinite,
    Overloaded,
    PromptTooLong,
    TargetUnavailable,
)
from lr_backend.frontend.errors import CODES
from lr_backend.frontend.settings import Settings
from lr_backend.serve.warmup import QUESTION
from lr_backend.triton.request_metrics import ENDS, end_of
from lr_backend.verify import Reason
from tests.support.fake_lookahead import FakeServer, Reply
from tools.docs_site import pages

PROJECT = Path(__file__).parents[2]
PAGES = [path for path in PROJECT.glob("**/*.md") if not {".venv", "out", ".venv-profiles"} & set(path.parts)]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
WORD_PROBLEM = re.compile(r"[^\"'\n`>]*How many \w+ does \w+ have[^\"\n`?]*\?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAX_COLUMNS, MAX_README_LINES = 120, 90


def prose(page: Path) -> Iterator[str]:
    """Its lines outside of code blocks."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and (not line.startswith("    ") or line.lstrip().startswith("- ")):
            yield line


def anchors(page: Path) -> set[str]:
    """The names by which a link reaches its headings, as GitHub makes them."""
    headings = (line.lstrip("#").strip() for line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_every_link_and_image_is_there(page: Path) -> None:
    for link in (link for line in prose(page) for link in LINK.findall(line)):
        name, _, anchor = link.partition("#")
        if name.startswith(("http://", "https://")):
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(PROJECT), link
        assert not anchor or anchor in anchors(target), link


@EVERY_PAGE
def test_lines_are_short(page: Path) -> None:
    """Outside of tables and code."""
    assert not [line for line in prose(page) if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|")]


def test_the_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@EVERY_PAGE
def test_a_printed_question_is_the_one_that_is_answered_right(page: Path) -> None:
    if page.parts[-2:] == ("demo", "README.md"):
        return  # it shows what the models have learned
    found = [one.strip() for one in WORD_PROBLEM.findall(page.read_text(encoding="utf-8"))]
    assert set(found) <= {QUESTION}


def test_the_pages_print_it() -> None:
    printed = {str(path.relative_to(PROJECT)) for path in PAGES if QUESTION in path.read_text(encoding="utf-8")}
    assert {"README.md", "client/README.md"} <= printed


def test_the_lines_for_tritonclient_read_a_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(from queue .*?)^```", API.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    script = [Reply(text="one, "), Reply(text="two"), Reply(text="", finish="stop", usage={"completion_tokens": 2})]
    with FakeServer({QUESTION: script}) as server:
        exec(compile(code.replace("localhost:8001", server.url), "api.md", "exec"), {})
    assert capsys.readouterr().out == 'one, two{"completion_tokens": 2}\n'


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_site_has_the_pages_that_are_there(tmp_path: Path) -> None:
    """In a clone, after one was deleted; and where there is no clone, as in an unpacked archive."""
    clone, unpacked = tmp_path / "clone", tmp_path / "unpacked"
    for folder in (clone, unpacked):
        for name in ("README.md", "docs/api.md", "out/pages/README.md", ".venv/README.md"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    (clone / "gone.md").touch()
    for words in (["init", "--quiet"], ["add", "README.md", "docs", "gone.md"]):
        subprocess.run(["git", "-C", str(clone), *words], check=True)
    (clone / "gone.md").unlink()
    for folder in (clone, unpacked):
        assert sorted(page.relative_to(folder).as_posix() for page in pages(folder)) == ["README.md", "docs/api.md"]


# Tables that stand beside code ------------------------------------------------------------------------------------------

API, OPERATIONS = PROJECT / "docs" / "api.md", PROJECT / "docs" / "operations.md"
CODE = re.compile(r"`(\w+)`")


def table(page: Path, *first_row: str) -> list[list[str]]:
    """The cells of the one table whose first row begins with these."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.read_text(encoding="utf-8").splitlines()]
    (start,) = (number for number, row in enumerate(rows) if row[: len(first_row)] == list(first_row))
    end = next((number for number in range(start, len(rows)) if len(rows[number]) < 2), len(rows))
    return rows[start + 2 : end]


def test_the_reasons_of_a_step_are_those_of_the_page() -> None:
    assert {name for row in table(API, "`reason`") for name in CODE.findall(row[0])} == set(Reason)


def test_the_codes_of_the_front_end_are_those_of_the_page() -> None:
    found = {code: re.findall(r"\d{3}", row[0]) for row in table(API, "status", "codes") for code in CODE.findall(row[1])}
    assert set(found) == set(CODES) - {"client_gone"}, "nobody is there to read that one"
    assert not {code: said for code, said in found.items() if str(CODES[code][0]) not in said}


def test_the_codes_of_the_step_loop_are_those_of_the_page() -> None:
    kinds = (InvalidRequest, PromptTooLong, EngineRejected, Overloaded, TargetUnavailable, NotFinite, Cancelled, LookaheadError)
    rows = table(API, "code", "Triton code")
    assert [(CODE.findall(row[0])[0], row[1]) for row in rows] == [(kind.code, kind.status) for kind in kinds]
    by_errors = {end_of(kind.__new__(kind)) for kind in kinds}
    assert by_errors == set(ENDS) - {"stop", "length", "deadline"}, "every other end is an error of the table"


def test_the_settings_of_the_front_end_are_those_of_the_page() -> None:
    """All that no option says, with their defaults."""
    shown = {"`false`": False, "`true`": True, "1 MiB": 1 << 20, "none": None, "the deployment's": None}
    found = {CODE.findall(row[0])[0]: shown[row[1]] if row[1] in shown else float(row[1]) for row in table(API, "setting")}
    by_option = {"host", "port", "keys_file"}
    assert found == {name: field.default for name, field in Settings.model_fields.items() if name not in by_option}


def events() -> Iterator[str]:
    """What the code writes to the structured log."""
    writes = re.compile(r"(log|structlog\.get_logger\(\))\.(debug|info|warning|error|exception|critical)\(")
    for path in (PROJECT / "lr_backend").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and writes.match(ast.unparse(call)):
                assert isinstance(call.args[0], ast.Constant)
                yield call.args[0].value


def test_the_events_of_the_log_are_those_of_the_page() -> None:
    assert {name for row in table(OPERATIONS, "event", "of") for name in CODE.findall(row[0])} == set(events())
