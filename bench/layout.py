"""How target, draft and judge share the cores: ``python -m bench.layout``.

A process a role, or one for all three and the loop, at several thread counts, through Triton. All answer the same questions
in ``lr_sd``, in turns.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from lr_client import Client, Options
from rich.console import Console
from rich.table import Table

from bench.timing import Spread
from demo.asking import demo_spec, serving
from demo.measure import paired_speedup, rotated
from demo.problems import problems
from lr_backend.build.base import Layout
from lr_backend.engine import Role

MAX_TOKENS = 640
TEMPERATURE = 0.6
TIMEOUT_S = 120.0
MODE = "lr_sd"

Answer = Callable[[str, int], int]
"""(question, seed) -> tokens written."""


@contextmanager
def served(layout: Layout, num_threads: Mapping[Role, int]) -> Iterator[Answer]:
    """A server whose engines are laid out like this and have these thread counts."""
    spec = demo_spec(layout)
    engines = {role.value: spec.engine(role).model_copy(update={"num_threads": count}) for role, count in num_threads.items()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        server = opened.enter_context(serving(spec.model_copy(update=engines), Path(folder)))
        client = opened.enter_context(Client(server.grpc_url))

        def answer(question: str, seed: int) -> int:
            options = Options(mode=MODE, stream=False, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed)
            return client.ask(question, options, timeout_s=TIMEOUT_S).usage.completion_tokens

        yield answer


def measure(answers: Mapping[str, Answer], num_problems: int) -> dict[str, list[float]]:
    """Milliseconds a token by layout and problem; the layouts take turns, one problem before is not kept."""
    names = list(answers)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number, problem in enumerate(islice(problems(31, "test"), num_problems + 1)):
        for name in rotated(names, number):
            started = time.perf_counter()
            num_tokens = answers[name](problem.question, number)
            figures[name].append((time.perf_counter() - started) / num_tokens * 1e3)
    return {name: values[1:] for name, values in figures.items()}


def layouts() -> dict[str, tuple[Layout, dict[Role, int]]]:
    """Layouts and thread counts by role, with a name for each choice."""
    roles = (Role.TARGET, Role.DRAFT, Role.JUDGE)
    several, one = (Layout.PROCESS_A_ROLE, "a process a role"), (Layout.ONE_PROCESS, "one process")
    chosen = [(several, (1, 1, 1)), (several, (2, 1, 1)), (several, (2, 2, 2)), (one, (1, 1, 1)), (one, (2, 1, 1))]
    return {
        f"{name}, threads {'/'.join(map(str, counts))}": (layout, dict(zip(roles, counts, strict=True)))
        for (layout, name), counts in chosen
    }


def main(num_problems: Annotated[int, typer.Option("--problems")] = 12) -> None:
    """Print a table and one JSON line; ratios are to the first layout."""
    with ExitStack() as opened:
        answers = {name: opened.enter_context(served(*chosen)) for name, chosen in layouts().items()}
        figures = measure(answers, num_problems)
    console, base = Console(width=110), next(iter(figures.values()))
    table = Table("layout", "ms a token: median (lowest to highest)", "speed over the first (95 %)", title=f"{MODE}, demo models")
    speeds = {name: paired_speedup(base, values) for name, values in figures.items()}
    for name, values in figures.items():
        middle, low, high = speeds[name]
        table.add_row(name, Spread.of(values).text(1), f"{middle:.2f} ({low:.2f} to {high:.2f})")
    console.print(table)
    line = {name: [round(value, 3) for value in speed] for name, speed in speeds.items()}
    console.print(json.dumps({"speed": line, "torch": torch.__version__}), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
