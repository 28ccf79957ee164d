"""How target, draft and judge share the cores: ``python -m bench.layout``.

One process a role at several thread counts, through Triton; and all three engines in one process with the loop, where they
share an interpreter but hand nothing over. All answer the same questions in ``lr_sd``, in turns.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from lr_client import Client, Options
from rich.console import Console
from rich.table import Table

from bench.timing import Spread
from demo.measure import paired_speedup, rotated
from demo.problems import problems
from demo.run import demo_spec, serving
from demo.tokenizer import chat
from lr_backend.build.spec import TorchDeployment
from lr_backend.engine import Role
from lr_backend.loop.loop import Engines, LookaheadLoop
from lr_backend.request import LookaheadRequest
from lr_backend.torch_engine.config import EngineConfig
from lr_backend.torch_engine.engine import TorchEngine
from lr_backend.torch_engine.inprocess import InProcessEngine
from lr_backend.triton.models import load_models

MAX_TOKENS = 640
TEMPERATURE = 0.6
TIMEOUT_S = 120.0
MODE = "lr_sd"

Answer = Callable[[str, int], int]
"""(question, seed) -> tokens written."""


@contextmanager
def one_process_a_role(spec: TorchDeployment, num_threads: Mapping[Role, int]) -> Iterator[Answer]:
    """A server whose engines have these thread counts."""
    engines = {role.value: spec.engine(role).model_copy(update={"num_threads": count}) for role, count in num_threads.items()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        server = opened.enter_context(serving(spec.model_copy(update=engines), Path(folder)))
        client = opened.enter_context(Client(server.grpc_url))

        def answer(question: str, seed: int) -> int:
            options = Options(mode=MODE, stream=False, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed)
            return client.ask(question, options, timeout_s=TIMEOUT_S).usage.completion_tokens

        yield answer


@contextmanager
def one_process(spec: TorchDeployment) -> Iterator[Answer]:
    """The loop and all three engines in this process."""
    config = spec.loop_config()
    models = load_models(config)

    def engine(role: Role) -> InProcessEngine:
        parameters = spec.engine(role).parameters(spec.checkpoint_dir(role))
        return InProcessEngine(TorchEngine(EngineConfig.from_parameters(parameters)))

    async def run(question: str, seed: int) -> int:
        fields = {"text_input": question, "mode": MODE, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE, "top_p": 0.95}
        request = LookaheadRequest.parse({**fields, "top_k": 20, "seed": seed, "stream": False, "max_depth": depth})
        ids = np.asarray(models.tokenizer.encode(chat(question), add_special_tokens=False), dtype=np.int32)
        loop = LookaheadLoop(request, ids, f"{time.monotonic_ns()}", engines, models, config, lambda committed: None)
        return (await loop.run()).usage.completion_tokens

    depth = int(spec.lookahead["defaults"]["max_depth"])
    engines = Engines(*(engine(role) for role in (Role.TARGET, Role.DRAFT, Role.JUDGE)))
    try:
        yield lambda question, seed: asyncio.run(run(question, seed))
    finally:
        for one in (engines.target, engines.draft, engines.judge):
            asyncio.run(one.close())


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


def layouts() -> dict[str, dict[Role, int]]:
    """Thread counts by role, with a name for each choice."""
    chosen = [(1, 1, 1), (2, 1, 1), (2, 2, 2)]
    roles = (Role.TARGET, Role.DRAFT, Role.JUDGE)
    return {f"a process a role, threads {'/'.join(map(str, counts))}": dict(zip(roles, counts, strict=True)) for counts in chosen}


def main(num_problems: Annotated[int, typer.Option("--problems")] = 12) -> None:
    """Print a table and one JSON line; ratios are to the first layout."""
    spec = demo_spec()
    with ExitStack() as opened:
        answers = {name: opened.enter_context(one_process_a_role(spec, counts)) for name, counts in layouts().items()}
        answers["one process, threads 1"] = opened.enter_context(one_process(spec))
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
