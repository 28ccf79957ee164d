"""``python -m bench`` lists the published tables, and ``python -m bench TABLE`` makes one."""

from __future__ import annotations

from importlib import import_module
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table as View

from bench.kit.output import console_of_any_width
from bench.tables import TABLES
from lr_backend.cli.errors import fail, refuse
from lr_backend.errors import LookaheadError

CHECK_ALL = "check-all"


def show(console: Console) -> None:
    """All tables, with what each measures and feeds."""
    view = View("table", "what it measures", "minutes", "page", "figures", title="python -m bench TABLE [options]")
    for table in TABLES:
        figures = f"docs/benchmarks/{table.json}" if table.json else f"out/{table.name}.json"
        view.add_row(table.name, table.measures, f"{table.minutes}", f"docs/{table.page}", figures)
    console.print(view)
    console.print("--help after a table's name says its options.", highlight=False)
    console.print(f"python -m bench {CHECK_ALL}: every long check, and every table in its short form.", highlight=False)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def main(context: typer.Context) -> None:
    """List the tables, or run the one that is named; its options are read there."""
    name, *options = context.args or ["--help"]
    if name in ("--help", "-h"):
        show(console_of_any_width())
        return
    try:
        if name == CHECK_ALL:
            run("bench.check_all", name, options)
        table = next((table for table in TABLES if table.name == name.replace("-", "_")), None)
        if table is None:
            refuse(f"no table {name!r}; there are {', '.join(table.name for table in TABLES)}, and {CHECK_ALL}")
        run(table.module, table.name, options)
    except LookaheadError as error:
        fail(error)


def run(module: str, name: str, options: list[str]) -> NoReturn:
    """Run the ``main`` of a module as a command of its own."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(import_module(module).main)
    single(options, prog_name=f"python -m bench {name}")
    raise SystemExit(0)  # a command in standalone mode has ended by now


if __name__ == "__main__":
    app(prog_name="python -m bench")
