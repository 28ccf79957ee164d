"""What looking ahead costs where it does not pay: every mode beside ``ar`` with more and more requests in flight.

    python -m bench.crowds

``auto`` falls back to draft tokens, or to the target alone, where looking ahead brings nothing; the other modes do not. Sets of
problems are answered by so many clients at a time, each set by every row, and two rows never answer one set one after the other:
the second would find its text in the KV cache.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from lr_client import Client
from rich.console import Console
from rich.table import Table

from bench.ablation import PROBLEM_SEED, Row, ask
from demo.asking import console_of_any_width, demo_spec, in_turns, serving
from demo.measure import paired_speedup
from demo.problems import Problem, problems

ROWS = (
    Row("ar", {"mode": "ar"}),
    Row("sd", {"mode": "sd"}),
    Row("lr", {"mode": "lr"}),
    Row("lr_sd", {"mode": "lr_sd"}),
    Row("auto", {"mode": "auto"}),
)
"""The baseline first."""
CONCURRENCY = (1, 2, 4, 8, 16)
LEAST_PROBLEMS = 8
ROUNDS_A_SET = 3


@dataclass(frozen=True, slots=True)
class Taken:
    """One set answered by one row: wall seconds from the first request to the last answer."""

    row: str
    number: int
    seconds: float
    num_tokens: int


def set_size(concurrency: int) -> int:
    """Problems of a set: each client answers a few."""
    return max(LEAST_PROBLEMS, ROUNDS_A_SET * concurrency)


def answer_all(
    clients: Sequence[Client], row: Row, questions: Sequence[Problem], seed: int, temperature: float
) -> tuple[float, int]:
    """(wall seconds, tokens): one problem a client at a time."""

    def work(place: int) -> int:
        mine = range(place, len(questions), len(clients))
        return sum(ask(clients[place], row, questions[at], seed + at, temperature)[0].usage.completion_tokens for at in mine)

    started = perf_counter()
    with ThreadPoolExecutor(len(clients)) as pool:
        num_tokens = sum(pool.map(work, range(len(clients))))
    return perf_counter() - started, num_tokens


def lines_of(concurrency: int, taken: Sequence[Taken]) -> list[dict[str, object]]:
    """A line for each row: tokens a second, and its speed over the first row's on the same sets."""
    by_row: dict[str, list[Taken]] = {}
    for one in sorted(taken, key=lambda one: one.number):
        by_row.setdefault(one.row, []).append(one)
    base = [one.seconds for one in by_row[ROWS[0].name]]
    lines: list[dict[str, object]] = []
    for row in ROWS:
        found = by_row[row.name]
        speedup, low, high = paired_speedup(base, [one.seconds for one in found])
        lines.append(
            {
                "concurrency": concurrency,
                "name": row.name,
                "tokens_per_s": round(sum(one.num_tokens for one in found) / sum(one.seconds for one in found), 1),
                "speedup": round(speedup, 4),
                "speedup_low": round(low, 4),
                "speedup_high": round(high, 4),
            }
        )
    return lines


def show(console: Console, lines: Sequence[Mapping[str, object]], title: str) -> None:
    table = Table("in flight", "row", "tokens/s", "speed over ar (95 %)", title=title)
    for one in lines:
        gain = f"{one['speedup']:.2f} ({one['speedup_low']:.2f} to {one['speedup_high']:.2f})"
        table.add_row(f"{one['concurrency']}", f"{one['name']}", f"{one['tokens_per_s']:.0f}", gain)
    console.print(table)


def main(
    concurrency: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Requests in flight; repeat it.")] = None,
    num_sets: Annotated[int, typer.Option("--sets", min=2, help="Sets of problems for each.")] = 10,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    output: Annotated[Path, typer.Option(help="Where the lines go.")] = Path("out/crowds.json"),
) -> None:
    """Print a table, and one JSON line a row."""
    console = console_of_any_width()
    widths = concurrency or list(CONCURRENCY)
    source = iter(problems(PROBLEM_SEED, "test"))
    lines: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-crowds-")))
        server = stack.enter_context(serving(demo_spec(), folder))
        clients = [stack.enter_context(Client(server.grpc_url)) for _ in range(max(widths))]
        for width in widths:
            *sets, warm_up = (list(islice(source, set_size(width))) for _ in range(num_sets + 1))
            for row in ROWS:  # what has never run at this load is not measured, and what it learns holds for all turns
                answer_all(clients[:width], row, warm_up, 0, temperature)
            taken = []
            for number, questions, row in in_turns(ROWS, sets, f"{width} in flight", console):
                seconds, num_tokens = answer_all(clients[:width], row, questions, number, temperature)
                taken.append(Taken(row.name, number, seconds, num_tokens))
            lines += lines_of(width, taken)
    show(console, lines, f"{num_sets} sets for each number of requests in flight, temperature {temperature:g}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for line in lines:
        console.print(json.dumps(line), soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
