"""``make demo``: one problem streamed live, then the same problems in each of the four modes, through a real Triton.

The baseline of every speedup is ``ar`` with ``stream=false``: one uninterrupted engine request, nothing else running, at the
thread setting that is best for it. So a second server runs the target alone at each other thread setting; ``ar`` is asked of
both, and the faster one is the baseline. Modes take turns, so that a noisy machine is noisy to all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import tritonclient.grpc as grpcclient
import typer
from lr_client import Client, FinishEvent, Options, Result
from lr_client.render import ConsoleRenderer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tritonclient.utils import np_to_triton_dtype

from demo.measure import ModeReport, Sample, T, report, rotated
from demo.problems import Problem, check_answer, problems
from demo.tokenizer import chat, load_tokenizer
from lr_backend.build.base import Layout
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, TorchDeployment
from lr_backend.contract import IntArray
from lr_backend.engine import EngineCall, Role
from lr_backend.loop.depth import ceiling
from lr_backend.request import LookaheadRequest
from lr_backend.triton.server import ServerOptions, TritonServer

Asked = TypeVar("Asked")

MODES = ("ar", "sd", "lr", "lr_sd")
PROBLEM_SEED = 2025
MAX_TOKENS = 640
REQUEST_TIMEOUT_S = 120.0
WARM_UP_PROBLEMS = 2
PIPED_WIDTH = 120


def console_of_any_width() -> Console:
    """A log is not 80 columns wide."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def demo_spec(layout: Layout | None = None) -> TorchDeployment:
    """The deployment of the demo models; ``layout`` instead of its own."""
    spec = DeploymentSpec.load("demo")
    assert isinstance(spec, TorchDeployment)
    return spec if layout is None else spec.model_copy(update={"server": spec.server.model_copy(update={"layout": layout})})


@contextmanager
def serving(spec: TorchDeployment, repository: Path, *, only: tuple[str, ...] = ()) -> Iterator[TritonServer]:
    """A server over a freshly rendered repository; ``only`` keeps just these models."""
    build_repository(spec, repository)
    for model in repository.iterdir():
        if only and model.is_dir() and model.name not in only:
            shutil.rmtree(model)
    options = ServerOptions(thread_pool_size=spec.server.thread_pool_size, exit_timeout_s=5)
    with TritonServer(repository, options) as server:
        server.wait_ready(spec.server.load_timeout_s)
        yield server


def ask(client: Client, problem: Problem, mode: str, temperature: float, index: int) -> tuple[Sample, Result]:
    """One answer, timed by the client from submit to final response."""
    options = Options(mode=mode, stream=False, max_tokens=MAX_TOKENS, temperature=temperature, seed=index)
    started = time.perf_counter()
    result = client.ask(problem.question, options, timeout_s=REQUEST_TIMEOUT_S)
    latency_s = time.perf_counter() - started
    return Sample(mode, index, check_answer(problem, result.text), latency_s, result.usage), result


def seconds_a_token(url: str, model: str, prompt: IntArray, num_tokens: int = 96, rounds: int = 3) -> float:
    """What one engine takes for a token when nothing else runs: the best of a few greedy calls through Triton."""
    call = EngineCall(request_id="", input_ids=prompt, max_new_tokens=num_tokens)
    inputs = []
    for name, array in call.tensors().items():
        tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    times_s = []
    with grpcclient.InferenceServerClient(url) as client:
        for _ in range(rounds):
            started = time.perf_counter()
            client.infer(model, inputs)
            times_s.append((time.perf_counter() - started) / num_tokens)
    return min(times_s)


def cost_ratio(server: TritonServer, spec: TorchDeployment, problem: Problem) -> float:
    """c: a drafted step's time over a target step's of as many tokens, each model alone."""
    tokenizer = load_tokenizer(spec.checkpoint_dir(Role.TARGET))
    prompt = np.asarray(tokenizer.encode(chat(problem.question), add_special_tokens=False), dtype=np.int32)
    draft_s, target_s = (seconds_a_token(server.grpc_url, role.value, prompt) for role in (Role.DRAFT, Role.TARGET))
    return draft_s / target_s


def ceilings(rows: Mapping[str, ModeReport], c: float, max_depth: int) -> dict[str, float]:
    """What step speculation could gain at most, were parallel steps and verdicts free; ``lr_sd`` multiplies with ``sd``."""
    found = {}
    for mode, factor in (("lr", 1.0), ("lr_sd", max(1.0, rows["sd"].speedup))):
        alpha = rows[mode].step_acceptance_rate
        if alpha is not None and alpha < 1.0 and 0.0 < c <= 1.0:
            found[mode] = factor * ceiling(alpha, c, max_depth)
    return found


def show_one(client: Client, problem: Problem, temperature: float, console: Console) -> None:
    """Stream one answer step by step, coloured by origin."""
    console.rule("[bold]one question, live")
    console.print(f"[bold]{problem.question}[/]\n", highlight=False)
    renderer = ConsoleRenderer(console, legend=True)
    options = Options(mode="lr_sd", max_tokens=MAX_TOKENS, temperature=temperature, seed=1, trace=True)
    try:
        with client.stream(problem.question, options, timeout_s=REQUEST_TIMEOUT_S) as stream:
            for event in stream:
                renderer.show(event)
                if isinstance(event, FinishEvent):
                    break
    finally:
        renderer.close()
    console.print(f"[dim]right answer: {problem.answer}[/]\n")


def compare(
    clients: Mapping[str, Client], baselines: Mapping[str, Client], questions: list[Problem], temperature: float, console: Console
) -> list[Sample]:
    """Every mode on every problem, in turns whose order rotates."""
    turns = [*((mode, client, mode) for mode, client in clients.items()), *((name, c, "ar") for name, c in baselines.items())]
    samples = []
    for index, problem, (name, client, mode) in in_turns(turns, questions, "four modes in turn", console):
        sample, _ = ask(client, problem, mode, temperature, index)
        samples.append(Sample(name, index, sample.correct, sample.latency_s, sample.usage))
    return samples


def in_turns(turns: Sequence[T], questions: Sequence[Asked], title: str, console: Console) -> Iterator[tuple[int, Asked, T]]:
    """Every turn of every problem (or set of problems), with its number, behind a progress bar.

    Turns that follow one another ask different problems, as far apart as there are: else all but the first would find the
    question, and what an answer begins with, in the KV cache, which spares whoever computes most prompts the most.
    """
    apart = max(1, len(questions) // len(turns))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=len(questions) * len(turns))
        for number in range(len(questions)):
            for place in rotated(range(len(turns)), number):
                index = (number + apart * place) % len(questions)
                yield index, questions[index], turns[place]
                progress.advance(task)


def best_baseline(samples: list[Sample]) -> tuple[list[Sample], str]:
    """Keep of all ``ar`` settings the fastest, as ``ar``; also its name."""
    totals: dict[str, float] = {}
    for sample in samples:
        if sample.mode.startswith("ar"):
            totals[sample.mode] = totals.get(sample.mode, 0.0) + sample.latency_s
    best = min(totals, key=lambda name: totals[name])
    kept = [s for s in samples if s.mode == best or not s.mode.startswith("ar")]
    return [Sample("ar", s.problem, s.correct, s.latency_s, s.usage) if s.mode == best else s for s in kept], best


def table(rows: Mapping[str, ModeReport], title: str) -> Table:
    """The comparison as people read it."""
    view = Table(title=title)
    for name in (
        "mode",
        "right",
        "tokens/s",
        "seconds",
        "speedup (95 %)",
        "step acc.",
        "accepted length",
        "token acc.",
        "passes/token",
    ):
        view.add_column(name, justify="left" if name == "mode" else "right")
    for mode in MODES:
        row = rows[mode]
        view.add_row(
            mode,
            f"{row.correct}/{row.total}",
            f"{row.tokens_per_s:.0f}",
            f"{row.latency_s:.2f}",
            f"{row.speedup:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
            _number(row.step_acceptance_rate),
            _number(row.mean_accepted_length),
            _number(row.token_acceptance_rate),
            _number(row.passes_per_token),
        )
    return view


def _setting(threads: int) -> str:
    return f"ar at {threads} thread{'s' if threads > 1 else ''}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1)] = 20,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/demo.json"),
    layout: Annotated[Layout | None, typer.Option(help="Of processes, instead of the deployment's.")] = None,
) -> None:
    """Serve the demo models and compare the four modes."""
    console = console_of_any_width()
    spec = demo_spec(layout)
    questions = list(islice(problems(PROBLEM_SEED, "test"), num_problems + 1))
    other_threads = {1, os.cpu_count() or 1} - {spec.target.num_threads}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-demo-")))
        with console.status("starting Triton with lookahead, target, draft and judge"):
            server = stack.enter_context(serving(spec, folder / "all"))
            client = stack.enter_context(Client(server.grpc_url))
            baselines = {}
            for threads in sorted(other_threads):
                target = spec.target.model_copy(update={"num_threads": threads})
                alone = spec.model_copy(update={"target": target})
                other = stack.enter_context(serving(alone, folder / f"ar-{threads}", only=("target", "lookahead")))
                baselines[_setting(threads)] = stack.enter_context(Client(other.grpc_url))
            for index in range(WARM_UP_PROBLEMS):
                for mode in MODES:
                    ask(client, questions[0], mode, temperature, index)
                for other_client in baselines.values():
                    ask(other_client, questions[0], "ar", temperature, index)
        console.print(f"Triton {server.grpc_url} (gRPC), {server.http_url} (HTTP): lookahead, target, draft, judge\n")
        show_one(client, questions[0], temperature, console)
        c = cost_ratio(server, spec, questions[0])
        samples = compare(dict.fromkeys(MODES, client), baselines, questions[1:], temperature, console)
    samples, baseline = best_baseline(samples)
    rows = report(samples, "ar")
    console.print(table(rows, f"{num_problems} problems at temperature {temperature:g}, one at a time"))
    setting = baseline if baseline != "ar" else _setting(spec.target.num_threads)
    console.print(f"[dim]speedup: seconds of {setting} (its best setting here), one uninterrupted request, over the mode's[/]")
    most = ceilings(rows, c, LookaheadRequest.parse({**spec.loop_config().defaults, "text_input": "any"}).max_depth)
    told = ", ".join(f"{mode} {gain:.2f}" for mode, gain in most.items())
    console.print(
        f"[dim]ceiling if parallel steps and verdicts were free (a drafted step costs {c:.2f} of a target step): {told}[/]"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "temperature": temperature,
        "baseline": setting,
        "cost_ratio": c,
        "ceilings": most,
        "modes": {mode: rows[mode].as_dict() for mode in MODES},
    }
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {output}")


if __name__ == "__main__":
    typer.run(main)
