"""The registry, its command, and the runner of all checks on scripted commands."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import bench.__main__ as command
from bench import check_all
from bench.check_all import Check, Line, figure_of, run_all, short_tables, write_line
from bench.kit.output import PAGES, keep_json
from bench.tables import TABLES
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def script(name: str, code: str, figure: str | None = None) -> Check:
    return Check(name, (sys.executable, "-c", code), figure)


def has_ended(pid: int) -> bool:
    """A killed process is gone, or is left to whoever reaps orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_every_table_has_a_name_of_its_own_and_a_page_that_names_its_command() -> None:
    assert len({table.name for table in TABLES}) == len(TABLES)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = {line.split("python -m bench ")[1].split()[0] for line in makefile.splitlines() if "python -m bench " in line}
    for table in TABLES:
        page = (DOCS / table.page).read_text(encoding="utf-8")
        names = {table.name, table.name.replace("_", "-")}
        told = any(f"python -m bench {name}" in page or f"make bench-{name}" in page for name in names)
        assert told or f"make {table.name}" in page or names & made, table.name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_s_figures_are_published_and_go_beside_its_page_unless_told_otherwise(table) -> None:  # type: ignore[no-untyped-def]
    parameters = signature(import_module(table.module).main).parameters
    published = PAGES / table.json if table.json is not None else None
    assert parameters["output"].default == (published or Path("out") / f"{table.name}.json")
    assert published is None or published.exists()


def test_the_command_lists_all_tables_and_hands_on_options() -> None:
    listed = CliRunner().invoke(command.app, [])
    assert listed.exit_code == 0
    assert all(table.name in listed.output for table in TABLES)
    options = CliRunner().invoke(command.app, ["paper", "--help"])
    assert options.exit_code == 0 and "--texts" in options.output


def test_the_command_refuses_what_it_does_not_know() -> None:
    told = subprocess.run([sys.executable, "-m", "bench", "nothing"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert told.returncode == 2
    assert told.stderr.startswith("error: no table 'nothing'; there are pace, card, maps,")
    told = subprocess.run(
        [sys.executable, "-m", "bench", "paper", "--cell", "none"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert told.returncode == 2 and told.stderr.startswith("error: --cell none")


def test_a_failure_is_one_line() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "bench", "pace-peers", "--workload", "none"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert told.returncode == 1
    assert len(told.stderr.strip().splitlines()) == 1 and "no workload named 'none'" in told.stderr


def test_a_check_that_fails_stops_no_other(tmp_path: Path) -> None:
    checks = [
        script("good", """print('words'); print('{"a": {"b": [1, 2.5]}}'); print('the end')""", "a.b.1"),
        script("broken", "print('words'); raise SystemExit(3)"),
        script("silent", """print('{"a": 1}')""", "b"),
        script("slow", "import time; print('begun', flush=True); time.sleep(60)"),
        script("last", "print('4 passed in 1s')"),
    ]
    page = tmp_path / "docs" / "checks.md"

    found = run_all(checks, tmp_path / "out", page, Console(), timeout_s=10.0)

    assert [(line.name, line.result, line.figure) for line in found] == [
        ("good", "ok", "a b 1 2.5"),
        ("broken", "failed", "exit status 3"),
        ("silent", "failed", "its figure is missing"),
        ("slow", "failed", "not done after 10 s"),
        ("last", "ok", "4 passed in 1s"),
    ]
    assert (tmp_path / "out" / "broken.log").read_text() == "words\n"
    written = [line for line in map(Line.parse, page.read_text().splitlines()) if line is not None]
    assert [(line.date, line.name, line.result) for line in written] == [(one.date, one.name, one.result) for one in found]


def test_what_a_check_has_started_ends_with_it(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    line = check_all.run(script("parent", parent), tmp_path, timeout_s=20.0)
    assert line.result == "ok"
    until(lambda: has_ended(int(line.figure)))


def test_the_check_in_progress_ends_with_the_runner(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    # Whoever reads the number may end the runner, which may be about to learn of its child.
    code = f"import os, time; time.sleep(0.3); open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    runner = f"""
from pathlib import Path
from bench import check_all
check_all.long_checks = lambda folder: [check_all.Check("long", ({sys.executable!r}, "-c", {code!r}))]
check_all.short_tables = lambda folder: []
check_all.main(None, Path({str(tmp_path)!r}), Path({str(tmp_path / "page.md")!r}), 60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", runner], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until(lambda: noted.exists() and bool(noted.read_text()))
        process.terminate()
        assert process.wait(10.0) == 143
        until(lambda: has_ended(int(noted.read_text())))
    finally:
        process.kill()


def test_the_exit_status_says_whether_any_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"good": script("good", "print(1)"), "bad": script("bad", "raise SystemExit(1)")}
    monkeypatch.setattr(check_all, "short_tables", lambda folder: list(checks.values()))
    monkeypatch.setattr(check_all, "long_checks", lambda folder: [])
    monkeypatch.setattr(check_all.signal, "signal", lambda *handler: None)  # it would stay this process's
    where = ["--page", str(tmp_path / "checks.md"), "--folder", str(tmp_path / "out")]

    statuses = {name: CliRunner().invoke(command.app, ["check-all", *where, "--only", name]).exit_code for name in checks}

    assert statuses == {"good": 0, "bad": 1}
    assert CliRunner().invoke(command.app, ["check-all", *where]).exit_code == 1
    assert CliRunner().invoke(command.app, ["check-all", *where, "--only", "none"]).exit_code == 2


def test_a_page_keeps_the_last_line_of_each_check(tmp_path: Path) -> None:
    page = tmp_path / "checks.md"
    lines = [Line("2026-01-02", "a", "ok", 3.0, "x 1"), Line("2026-01-02", "b", "failed", 4.0, "exit status 1")]
    for line in (*lines, Line("2026-02-03", "a", "failed", 5.0, "exit status 2")):
        write_line(page, line)
    assert page.read_text() == check_all.HEADER + (
        "| 2026-02-03 | a | failed | 5 | exit status 2 |\n| 2026-01-02 | b | failed | 4 | exit status 1 |\n"
    )


def test_the_short_forms_leave_the_published_figures_alone(tmp_path: Path) -> None:
    checks = short_tables(tmp_path)
    assert [check.name for check in checks] == [table.name for table in TABLES if not table.needs_card]
    for check in checks:
        assert check.command[check.command.index("--output") + 1] == str(tmp_path / f"{check.name}.json")


def test_a_check_asks_anew_whatever_an_earlier_one_has_kept(tmp_path: Path) -> None:
    checks = {check.name: check for check in short_tables(tmp_path)}
    for name, option in (("load", "--folder"), ("evaluation", "--out"), ("quality", "--out"), ("trial", "--out")):
        command = checks[name].command
        assert checks[name].kept == Path(command[command.index(option) + 1])
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "answers.jsonl").write_text("{}\n")
    check = replace(script("kept", f"import os; print(os.path.exists({str(kept)!r}))"), kept=kept)
    assert check_all.run(check, tmp_path).figure == "False"


def test_a_figure_is_read_from_the_last_line_of_json() -> None:
    lines = [json.dumps({"a": 1}), json.dumps({"a": {"b c": None}}), "[1]", "12"]
    assert figure_of(Check("", (), "a.b c"), lines) == "a b c None"
    assert figure_of(Check("", (), "a.1"), lines) is None
    assert figure_of(Check("", (), "a"), ["nothing"]) is None
    assert figure_of(Check("", ()), []) is None


def test_figures_of_other_runs_stay(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "engine.json"
    for name, value in (("one", 1), ("two", 2), ("one", 3)):
        keep_json(path, name, {"x": value})
    assert json.loads(path.read_text()) == {"one": {"x": 3}, "two": {"x": 2}}
