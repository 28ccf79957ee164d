"""The docs site (``make docs``): gather every page of the project and the files that pages link to, and let mkdocs build them.

    python -m tools.docs_site

Pages and files lie in ``out/pages`` as they do in the project, so links between them are the same in both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
MADE = {"out", "checkpoints", "built"}
"""Folders whose contents are made or downloaded."""
LINK = re.compile(r"\]\(<?([^)#\s>]+)")


def pages(project: Path = PROJECT) -> list[Path]:
    """Those that git knows and that are there. Where this is no clone: all but hidden and made ones."""
    command = ["git", "-C", str(project), "ls-files", "-z", "*.md"]
    try:
        names = subprocess.run(command, capture_output=True, text=True).stdout.split("\0")
    except FileNotFoundError:  # no git
        names = []
    found = [project / name for name in names if name]
    return [page for page in found if page.is_file()] if found else list(_walk(project))


def _walk(project: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(project):
        below[:] = [name for name in below if name not in MADE and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if name.endswith(".md"))


def linked(page: Path) -> list[Path]:
    """Files of the project that a page links to, the page's own kind left out; of a folder none."""
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    found = [(page.parent / target).resolve() for target in targets if ":" not in target]
    return [path for path in found if path.is_file() and path.suffix != ".md" and path.is_relative_to(PROJECT)]


def gather(folder: Path) -> int:
    """Copy them; returns how many there are."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {path for page in pages() for path in (page, *linked(page))}
    for path in files:
        copied = folder / path.relative_to(PROJECT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
    return len(files)


def build() -> None:
    """A broken link, or an anchor that is not there, fails it.

    Raises:
        CalledProcessError: mkdocs found something; it has said what.
    """
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=PROJECT, env=environment, check=True)


if __name__ == "__main__":
    count = gather(PROJECT / "out" / "pages")
    build()
    sys.stdout.write(f"out/site, of {count} files\n")
