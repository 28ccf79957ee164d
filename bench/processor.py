"""``python -m bench.processor``: the processor time that each process of the server takes for the demo's answers, mode by mode.

A mode that is slower although it needs fewer passes of the target shows here whether it waits or works.
"""

from __future__ import annotations

import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import psutil
import typer
from lr_client import Client
from rich.console import Console
from rich.table import Table

from bench.engine import device_line
from demo.asking import ask, demo_spec, serving
from demo.problems import problems
from lr_backend.build.base import Layout
from lr_backend.embedded.config import EngineConfig
from lr_backend.engine import Role

MODES = ("ar", "lr", "lr_sd")
SERVER = "tritonserver"


def seconds_by_model(root: psutil.Process, models: tuple[str, ...]) -> dict[str, float]:
    """Processor seconds so far of the model's processes below ``root``, and of the server itself."""
    found = dict.fromkeys((*models, SERVER), 0.0)
    for process in root.children(recursive=True):
        words = process.cmdline()
        name = next((model for model in models if any(f"/{model}/1/" in word for word in words)), SERVER)
        times = process.cpu_times()
        found[name] += times.user + times.system
    return found


def main(
    num_problems: Annotated[int, typer.Option("--problems", help="problems a mode")] = 12,
    temperature: Annotated[float, typer.Option(help="of target and draft")] = 0.6,
) -> None:
    """Print a table of seconds and one JSON line."""
    console, spec = Console(width=120), demo_spec(Layout.PROCESS_A_ROLE)
    models = ("lookahead", *(role.value for role in Role))
    questions = list(islice(problems(2025, "test"), num_problems + 1))
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, serving(spec, Path(folder)) as server, Client(server.grpc_url) as client:
        for mode in MODES:
            ask(client, questions[0], {"mode": mode}, temperature, 0)
            before, started = seconds_by_model(psutil.Process(), models), time.perf_counter()
            num_tokens = sum(
                ask(client, problem, {"mode": mode}, temperature, index)[0].usage.completion_tokens
                for index, problem in enumerate(questions[1:])
            )
            wall_s = time.perf_counter() - started
            after = seconds_by_model(psutil.Process(), models)
            rows[mode] = {"tokens_per_s": num_tokens / wall_s, "wall": wall_s} | {n: after[n] - before[n] for n in before}
    where = device_line(EngineConfig(spec.checkpoint_dir(Role.TARGET), num_threads=1))
    table = Table("mode", *next(iter(rows.values())), title=f"{num_problems} problems, processor seconds by model\n{where}")
    for mode, row in rows.items():
        table.add_row(mode, *(f"{value:.2f}" if name != "tokens_per_s" else f"{value:.0f}" for name, value in row.items()))
    console.print(table)
    rounded = {mode: {name: round(value, 3) for name, value in row.items()} for mode, row in rows.items()}
    console.print(json.dumps({"problems": num_problems, "seconds": rounded, "device": where}), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
