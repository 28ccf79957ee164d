"""Every long check and every published table in its short form, one after another: ``make check-all``.

The tests do not run these, and what nobody runs stops working. A check that fails stops no other. The page gets one dated line
for each check, which replaces the line of its last run. Output goes to a file a check, so that what failed can be read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from bench.kit.output import PAGES, console_of_any_width
from bench.tables import TABLES

TIMEOUT_S = 900.0
PYTHON = (sys.executable, "-m")
CHECKS_PAGE = PAGES / "checks.md"
HEADER = """# Checks

    make check-all    # every long check, and every table in its short form

A line a check, of its last run. Short forms show that a table can be made; their figures say nothing else.

| date | check | result | seconds | figure |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A command, and the figure that its output must hold.

    Attributes:
        figure: keys in the last line of JSON, with dots between; None: the last line of the output.
        kept: a folder in which the command goes on where an earlier one was stopped. It is removed first: a check asks anew.
    """

    name: str
    command: tuple[str, ...]
    figure: str | None = None
    kept: Path | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """What came of a check."""

    date: str
    name: str
    result: str
    seconds: float
    figure: str

    @classmethod
    def parse(cls, text: str) -> Line | None:
        """A line of the page; None: it is none."""
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if len(cells) != 5 or not cells[0][:1].isdigit():
            return None
        return cls(cells[0], cells[1], cells[2], float(cells[3]), cells[4])

    def __str__(self) -> str:
        return f"| {self.date} | {self.name} | {self.result} | {self.seconds:.0f} | {self.figure} |"


def short_tables(folder: Path) -> list[Check]:
    """Every registered table that this machine can make in its short form, with its figures in ``folder``."""
    folders = {"load": "--folder", "evaluation": "--out", "quality": "--out", "trial": "--out"}
    checks = []
    for table in TABLES:
        if table.needs_card and not shutil.which("nvidia-smi"):
            continue
        kept = folder / "kept" / table.name if table.name in folders else None
        options = (*table.short, *((folders[table.name], str(kept)) if kept else ()))
        command = (*PYTHON, "bench", table.name, *options, "--output", str(folder / f"{table.name}.json"))
        checks.append(Check(table.name, command, table.figure, kept))
    return checks


def long_checks(folder: Path) -> list[Check]:
    """What is no table: contract, models, demo, package; the dashboard and the images where that can be."""
    demo = ("demo.run", "--problems", "1", "--paced-problems", "1", "--output", str(folder / "demo.json"))
    models = ("demo.check", "--problems", "20", "--pairs", "100", "--acceptance", "5")
    checks = [
        Check("contract", (*PYTHON, "pytest", "-q", "-p", "no:randomly", "tests/contract")),
        Check("check-models", (*PYTHON, *models), "judge agrees with checker.share"),
        Check("demo", (*PYTHON, *demo), "speedup_at_production_pace.lr_sd"),
        Check("docs", (*PYTHON, "tools.docs_site")),
        Check("package-check", (*PYTHON, "tests.long.package_check")),
    ]
    if shutil.which("prometheus"):
        picture = str(folder / "dashboard.png")
        checks.append(Check("dashboard", (*PYTHON, "tools.dashboard", "--seconds", "30", "--output", picture)))
    if os.geteuid() == 0:
        checks.append(Check("image-check", (*PYTHON, "tests.image.check", "--install")))
    return checks


def run(check: Check, folder: Path, timeout_s: float = TIMEOUT_S) -> Line:
    """Run one check; whatever it starts ends with it."""
    folder.mkdir(parents=True, exist_ok=True)
    if check.kept is not None:
        shutil.rmtree(check.kept, ignore_errors=True)
    log, started = folder / f"{check.name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(check.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    lines = [text.strip() for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
    figure = figure_of(check, lines)
    if status is None:
        result, figure = "failed", f"not done after {timeout_s:.0f} s"
    elif status:
        result, figure = "failed", f"exit status {status}"
    else:
        result, figure = ("ok", figure) if figure is not None else ("failed", "its figure is missing")
    today = datetime.now(UTC).date().isoformat()
    return Line(today, check.name, result, time.monotonic() - started, figure)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a check and of its children, which share its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def figure_of(check: Check, lines: Sequence[str]) -> str | None:
    """The figure in a check's output; None: it is not there."""
    if check.figure is None:
        return lines[-1].strip("=| ").replace("|", "/")[:60] if lines else None
    for text in reversed(lines):
        try:
            found: Any = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            break
    else:
        return None
    try:
        for key in check.figure.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return f"{check.figure.replace('.', ' ')} {found}"


def _stop(number: int, frame: object) -> NoReturn:
    """Leave at a signal as at an exception, so that the check in progress ends too."""
    raise SystemExit(128 + number)


def write_line(page: Path, line: Line) -> None:
    """Put a line into the page, in place of the last one of its name."""
    kept = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    lines = [one for one in map(Line.parse, kept) if one is not None]
    names = [one.name for one in lines]
    if line.name in names:
        lines[names.index(line.name)] = line
    else:
        lines.append(line)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(HEADER + "".join(f"{one}\n" for one in lines), encoding="utf-8")


def run_all(checks: Sequence[Check], folder: Path, page: Path, console: Console, timeout_s: float = TIMEOUT_S) -> list[Line]:
    """Run every check, whatever becomes of the others, and write each line when it is known."""
    found = []
    for check in checks:
        console.print(f"[dim]{check.name}: {' '.join(check.command)}[/]", highlight=False, soft_wrap=True)
        line = run(check, folder, timeout_s)
        write_line(page, line)
        colour = "green" if line.result == "ok" else "bold red"
        console.print(f"[{colour}]{line.result}[/] {line.name}, {line.seconds:.0f} s: {line.figure}", highlight=False)
        found.append(line)
    return found


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only this check; repeat it for more.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the output of each check goes.")] = Path("out/checks"),
    page: Annotated[Path, typer.Option(help="The page with the dated lines.")] = CHECKS_PAGE,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that a check may take.")] = TIMEOUT_S,
) -> None:
    """Run every check; exit status 1 if any failed."""
    checks = [*long_checks(folder), *short_tables(folder)]
    if unknown := set(only or ()) - {check.name for check in checks}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(check.name for check in checks)}")
    console = console_of_any_width()
    signal.signal(signal.SIGTERM, _stop)
    found = run_all([one for one in checks if not only or one.name in only], folder, page, console, timeout_s)
    failed = [line.name for line in found if line.result != "ok"]
    seconds = sum(line.seconds for line in found)
    console.print(f"{len(found)} checks in {seconds:.0f} s, {len(failed)} failed: {', '.join(failed) or 'none'}")
    console.print(f"lines: {page}; output: {folder}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)
