"""The demo's models behind a Triton of their own, and one problem asked of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lr_client import Client, Options, Result

from bench.kit.measure import Sample
from demo.problems import Problem, check_answer
from lr_backend.build.base import Layout
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment
from lr_backend.emulated.workload import Workload
from lr_backend.hardware.lateness import Lateness
from lr_backend.serve.server import ServerError, ServerOptions, TritonServer
from lr_backend.triton.metrics import REFRESH_S

MAX_TOKENS = 640
TEMPERATURE = 0.6
START_S = 180.0
REQUEST_TIMEOUT_S = 120.0
ALONE = ("target", "lookahead")
"""The models of a server that answers ``ar`` and nothing else."""


def demo_spec(layout: Layout | None = None) -> EmbeddedDeployment:
    """The deployment of the demo models; ``layout`` instead of its own."""
    spec = DeploymentSpec.load("demo")
    assert isinstance(spec, EmbeddedDeployment)
    return spec if layout is None else with_layout(spec, layout)


def with_layout(spec: EmbeddedDeployment, layout: Layout) -> EmbeddedDeployment:
    """The deployment in another layout of its processes."""
    return spec.model_copy(update={"server": spec.server.model_copy(update={"layout": layout})})


def other_thread_counts(spec: EmbeddedDeployment) -> list[int]:
    """Thread counts of the target that ``ar`` may be faster at than at the spec's own."""
    return sorted({1, os.cpu_count() or 1} - {spec.target.num_threads})


def with_threads(spec: EmbeddedDeployment, num_threads: int) -> EmbeddedDeployment:
    """The deployment with another thread count of the target."""
    return spec.model_copy(update={"target": spec.target.model_copy(update={"num_threads": num_threads})})


def with_verifiers(spec: EmbeddedDeployment, verifiers: Mapping[str, Mapping[str, Any]]) -> EmbeddedDeployment:
    """The deployment with verifiers of its own: sections of a spec, by name."""
    return spec.model_copy(update={"lookahead": {**spec.lookahead, "verifiers": dict(verifiers)}})


def thread_setting(num_threads: int | None) -> str:
    """The name of ``ar`` at a thread count."""
    return f"ar at {num_threads} thread{'' if num_threads == 1 else 's'}"


@contextmanager
def serving(spec: DeploymentSpec, repository: Path, *, only: tuple[str, ...] = ()) -> Iterator[TritonServer]:
    """A server over a freshly rendered repository; ``only`` keeps just these models."""
    build_repository(spec, repository)
    for model in repository.iterdir():
        if only and model.is_dir() and model.name not in only:
            shutil.rmtree(model)
    options = ServerOptions(thread_pool_size=spec.server.threads_a_loop, exit_timeout_s=5)
    with TritonServer(repository, options) as server:
        server.wait_ready(spec.server.load_timeout_s)
        yield server


@contextmanager
def engines_alone(spec: EmbeddedDeployment, repository: Path) -> Iterator[TritonServer]:
    """Target and draft of a deployment, to be asked by themselves, which engines that the loop runs in its process cannot be."""
    with serving(with_layout(spec, Layout.PROCESS_A_ROLE), repository, only=("target", "draft")) as server:
        yield server


MAX_TRIES = 3
"""Of asking a server how late it was: one slow answer on a busy machine is no reason to lose a run."""


def lateness_of(server: TritonServer) -> Lateness:
    """Of all paced engines of a server until now. Raises ServerError: it does not answer."""
    time.sleep(2 * REFRESH_S)  # what it says may be that old
    return sum(server.lateness().values(), Lateness())


class LatenessSince:
    """How late a server's paced engines were since it was last asked; where it does not say, nothing is known, which is void."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._before: Lateness | None = lateness_of(server)

    def __call__(self) -> Lateness:
        before, self._before = self._before, self._until_now()
        return self._before - before if before is not None and self._before is not None else Lateness()

    def _until_now(self) -> Lateness | None:
        for _ in range(MAX_TRIES):
            with suppress(ServerError):
                return lateness_of(self._server)
        return None


def together(found: Sequence[Lateness]) -> Lateness:
    """Of some turns or rows. Where one of them says nothing, nothing is known of them all, which is void."""
    return sum(found, Lateness()) if all(one.paced_s > 0.0 for one in found) else Lateness()


def late_by_row(found: Mapping[str, Lateness]) -> str:
    """A note below a table: how late the engines were in each row's turns."""
    shares = {name: f"{one.share:.1%}" if one.paced_s > 0.0 else "not known" for name, one in found.items()}
    told = (f"{name} {shares[name]}{' (void)' if one.void else ''}" for name, one in found.items())
    return f"how late the engines were in each row (above 1 % is void): {', '.join(told)}"


def short_texts(workload: str, num_steps: int, folder: Path) -> str:
    """The file, made in ``folder``, of a workload (by name or file) whose answers have so many steps.

    Raises:
        ConfigError: there is no such workload.
    """
    file = folder / "short.toml"
    file.write_text(replace(Workload.load(workload), num_steps=num_steps).as_toml(), encoding="utf-8")
    return str(file)


def said_when_served(printed: Path, has_ended: Callable[[], bool] = lambda: False) -> str:
    """All that ``lookahead serve`` has printed once it can be asked.

    Raises:
        RuntimeError: it ended before, or took too long.
    """
    deadline = time.monotonic() + START_S
    while "ask it something" not in (said := printed.read_text(encoding="utf-8") if printed.exists() else ""):
        if has_ended() or time.monotonic() > deadline:
            raise RuntimeError(f"not served: {said[-2000:]}")
        time.sleep(0.2)
    return said


@dataclass(frozen=True)
class CommandServed:
    """Where ``lookahead serve`` says that it listens: base URLs without a path."""

    openai_url: str
    http_url: str


@contextmanager
def command_serving(words: Sequence[str], folder: Path) -> Iterator[CommandServed]:
    """A deployment served as people serve it, by the command ``lookahead serve`` with these words, on free ports.

    Raises:
        RuntimeError: it ended before it served, or took too long.
    """
    ports = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    command = [str(Path(sys.executable).with_name("lookahead")), "serve", *words, "--repository", str(folder / "repository")]
    printed = folder / "serve.out"
    with printed.open("wb") as output:
        process = subprocess.Popen([*command, *ports], stdout=output, stderr=subprocess.STDOUT)
    try:
        said = said_when_served(printed, lambda: process.poll() is not None)
        found = dict(re.findall(r"(OpenAI API|HTTP) +(http://[^/\s]+)", said))
        yield CommandServed(found["OpenAI API"], found["HTTP"])
    finally:
        process.terminate()
        process.wait(START_S)


def ask(
    client: Client,
    problem: Problem,
    fields: Mapping[str, Any],
    index: int,
    *,
    seed: int | None = None,
    name: str | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> tuple[Sample, Result]:
    """One answer to a request of these fields, timed by the client from submit to final response.

    Args:
        index: the problem's number.
        seed: by default that number.
        name: of the sample; by default the mode that the server answered in.
    """
    usual = {"stream": False, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE, "seed": index if seed is None else seed}
    options = Options(**{**usual, **fields})
    started = time.perf_counter()
    result = client.ask(problem.question, options, timeout_s=timeout_s)
    latency_s = time.perf_counter() - started
    correct = check_answer(problem, result.text)
    return Sample(name or result.usage.mode, index, correct, latency_s, result.usage), result
