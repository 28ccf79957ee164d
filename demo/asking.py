"""The demo's models behind a Triton of their own, and problems asked of them one after another, in turns."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tritonclient.grpc as grpcclient
from lr_client import Client, Options, Result
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tritonclient.utils import np_to_triton_dtype

from demo.measure import Sample, T, rotated
from demo.problems import Problem, check_answer
from demo.tokenizer import chat, load_tokenizer
from lr_backend.build.base import Layout
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment
from lr_backend.contract import IntArray
from lr_backend.engine import EngineCall, Role
from lr_backend.serve.server import ServerOptions, TritonServer

Asked = TypeVar("Asked")

MAX_TOKENS = 640
REQUEST_TIMEOUT_S = 120.0
PIPED_WIDTH = 140


def console_of_any_width() -> Console:
    """A log is not 80 columns wide."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def demo_spec(layout: Layout | None = None) -> EmbeddedDeployment:
    """The deployment of the demo models; ``layout`` instead of its own."""
    spec = DeploymentSpec.load("demo")
    assert isinstance(spec, EmbeddedDeployment)
    return spec if layout is None else spec.model_copy(update={"server": spec.server.model_copy(update={"layout": layout})})


@contextmanager
def serving(spec: DeploymentSpec, repository: Path, *, only: tuple[str, ...] = ()) -> Iterator[TritonServer]:
    """A server over a freshly rendered repository; ``only`` keeps just these models."""
    build_repository(spec, repository)
    for model in repository.iterdir():
        if only and model.is_dir() and model.name not in only:
            shutil.rmtree(model)
    options = ServerOptions(thread_pool_size=spec.server.thread_pool_size, exit_timeout_s=5)
    with TritonServer(repository, options) as server:
        server.wait_ready(spec.server.load_timeout_s)
        yield server


def ask(
    client: Client,
    problem: Problem,
    fields: Mapping[str, Any],
    temperature: float,
    index: int,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> tuple[Sample, Result]:
    """One answer to a request of these fields, timed by the client from submit to final response; ``index`` is its seed."""
    options = Options(**{"stream": False, "max_tokens": MAX_TOKENS, "temperature": temperature, "seed": index, **fields})
    started = time.perf_counter()
    result = client.ask(problem.question, options, timeout_s=timeout_s)
    latency_s = time.perf_counter() - started
    return Sample(result.usage.mode, index, check_answer(problem, result.text), latency_s, result.usage), result


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


def cost_ratio(server: TritonServer, spec: EmbeddedDeployment, problem: Problem) -> float:
    """c: a drafted step's time over a target step's of as many tokens, each model alone."""
    tokenizer = load_tokenizer(spec.checkpoint_dir(Role.TARGET))
    prompt = np.asarray(tokenizer.encode(chat(problem.question), add_special_tokens=False), dtype=np.int32)
    draft_s, target_s = (seconds_a_token(server.grpc_url, role.value, prompt) for role in (Role.DRAFT, Role.TARGET))
    return draft_s / target_s


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
