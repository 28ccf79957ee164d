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
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(<?([^)#\s>]+)")


def pages() -> list[Path]:
    """Those that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=PROJECT, capture_output=True, text=True, check=True)
    return [PROJECT / name for name in listed.stdout.split("\0") if name]


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
