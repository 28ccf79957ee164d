"""``lookahead trace``: where the time of one request went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lr_backend.cli.errors import fail, write
from lr_backend.errors import LookaheadError
from lr_backend.trace.analysis import analyse
from lr_backend.trace.chrome import chrome_json
from lr_backend.trace.html import page
from lr_backend.trace.report import report
from lr_backend.trace.schema import Trace


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, as `lookahead-client ask --trace-file` saves it.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the timeline into this file; any browser opens it.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Chrome's trace-event format; Perfetto opens it.")
    ] = None,
) -> None:
    """Say where the time of one request went, and what went wrong, if anything did."""
    try:
        loaded = Trace.load(file)
    except LookaheadError as error:
        fail(error)
    analysis = analyse(loaded)
    console = Console()
    console.print(report(loaded, analysis))
    for path, text in ((html, page(loaded, analysis) if html else ""), (chrome, chrome_json(loaded) if chrome else "")):
        if path is not None:
            write(path, text)
            console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
