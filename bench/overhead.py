"""What the loop and Triton add to the engines' own time.

At ``max_depth`` 1 the target's steps and the judge's verdicts alternate and everything else runs beside them, so that wall time
is target plus judge plus overhead: orchestration, tensors through shared memory, Triton's queues. The target is a random model
of about 100 M parameters, whose decode step takes some milliseconds. It never agrees with the draft, so every step is the loop's
longest way: drafted, written, judged, rejected, begun again. The demo models show the same in milliseconds a call.

And what the front end adds: the same streamed answers from the OpenAI API and from Triton's own HTTP port, in turn.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client, Options, Usage
from rich.console import Console
from rich.table import Table

from bench.kit.hardware import device_line
from bench.kit.intervals import Cluster, Estimate, ratio_of_sums
from bench.kit.output import PAGES, console_of_any_width, keep_json, print_line
from bench.kit.random_models import STEP_TOKENS, TIMEOUT_S, random_deployment
from bench.kit.serving import MAX_TOKENS, command_serving, demo_spec, serving
from demo.problems import problems
from lr_backend.build.base import Layout
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.engine import Role
from lr_backend.serve.server import TritonServer
from lr_backend.triton.metrics import REFRESH_S

NUM_LARGE = 3
"""Questions to the large target."""
TARGETS = ("100 M random", "demo")
GENERATE = "/v2/models/lookahead/generate"


@dataclass(frozen=True)
class Overhead:
    """Of some requests one after another; seconds are summed over them."""

    wall_s: float
    target_s: float
    judge_s: float
    num_tokens: int
    num_steps: int
    num_calls: int

    @property
    def share(self) -> float:
        """Part of the wall time in which neither target nor judge computes."""
        return self.seconds / self.wall_s

    @property
    def seconds(self) -> float:
        return max(0.0, self.wall_s - self.target_s - self.judge_s)

    @property
    def ms_a_call(self) -> float:
        """Overhead by calls that somebody waits for: the draft's run beside the target's."""
        return self.seconds / self.num_calls * 1e3


def busy_seconds(server: TritonServer) -> dict[str, float]:
    """Seconds that each engine has spent in iterations."""
    time.sleep(2 * REFRESH_S)
    return server.counter("lr_engine_busy_seconds_total")


def measure(spec: EmbeddedDeployment, questions: Sequence[str], max_tokens: int) -> Overhead:
    """Ask one question after another in ``lr_sd`` at ``max_depth`` 1; the first one warms up and is not counted."""
    options = Options(mode="lr_sd", max_depth=1, max_tokens=max_tokens, temperature=0.6, top_k=20, stream=False)
    usages: list[Usage] = []
    with tempfile.TemporaryDirectory() as folder, serving(spec, Path(folder)) as server, Client(server.grpc_url) as client:
        client.ask(questions[0], options, timeout_s=TIMEOUT_S)
        before, wall_s = busy_seconds(server), 0.0
        for question in questions[1:]:
            started = time.perf_counter()
            usages.append(client.ask(question, options, timeout_s=TIMEOUT_S).usage)
            wall_s += time.perf_counter() - started
        after = busy_seconds(server)
    return Overhead(
        wall_s,
        after["target"] - before.get("target", 0.0),
        after["judge"] - before.get("judge", 0.0),
        num_tokens=sum(usage.completion_tokens for usage in usages),
        num_steps=sum(usage.num_steps for usage in usages),
        num_calls=sum(usage.num_target_calls + usage.num_judge_calls for usage in usages),
    )


def measure_both(num_problems: int) -> dict[str, Overhead]:
    """With the random large target, and with the demo's own."""
    spec = demo_spec(Layout.PROCESS_A_ROLE)
    questions = [problem.question for problem in islice(problems(5, "test"), num_problems + 1)]
    with tempfile.TemporaryDirectory() as folder:
        large = random_deployment(Path(folder), {Role.TARGET: "100m"})
        found = measure(large, questions[: NUM_LARGE + 1], max_tokens=8 * STEP_TOKENS)
    return dict(zip(TARGETS, (found, measure(spec, questions, max_tokens=400)), strict=True))


def streamed_s(url: str, path: str, document: dict[str, Any]) -> float:
    """Seconds from a request to the end of its stream; the client reads bytes and nothing else."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_S)
    with closing(connection):
        started = time.perf_counter()
        connection.request("POST", path, json.dumps(document), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - started
    if answer.status != 200 or b"error" in body:
        raise RuntimeError(f"{url}{path}: {body[:500]!r}")
    return seconds


def measure_front_end(num_problems: int) -> Estimate:
    """What the OpenAI API adds to a token over Triton's ``generate_stream``, in milliseconds."""
    lookahead = {"mode": "ar", "deterministic": True}
    added: list[Cluster] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        command_serving(("--spec", "demo"), Path(folder)) as served,
        closing(HTTPConnection(served.http_url.removeprefix("http://"), timeout=TIMEOUT_S)) as asked,
    ):
        for number, problem in enumerate(islice(problems(5, "test"), num_problems + 1)):
            chat = {"messages": [{"role": "user", "content": problem.question}], "temperature": 0.0, "max_tokens": MAX_TOKENS}
            triton = {"text_input": problem.question, "temperature": 0.0, "max_tokens": MAX_TOKENS, **lookahead}
            asked.request("POST", GENERATE, json.dumps({**triton, "stream": False}))
            num_tokens = json.loads(json.loads(asked.getresponse().read())["usage"])["completion_tokens"]
            openai = {"model": "demo", "stream": True, "lookahead": lookahead, **chat}
            ours = streamed_s(served.openai_url, "/v1/chat/completions", openai)
            theirs = streamed_s(served.http_url, f"{GENERATE}_stream", triton)
            if number:  # the first warms up
                added.append(Cluster((ours - theirs) * 1e3, num_tokens))
    return ratio_of_sums(added)


def show(console: Console, figures: dict[str, Overhead]) -> None:
    table = Table(
        "target",
        "ms a token",
        "target computes",
        "judge computes",
        "overhead",
        "calls a step",
        "ms a call",
        title="lr_sd, max_depth 1",
    )
    for name, one in figures.items():
        table.add_row(
            name,
            f"{one.wall_s / one.num_tokens * 1e3:.1f}",
            f"{one.target_s / one.wall_s:.1%}",
            f"{one.judge_s / one.wall_s:.1%}",
            f"{one.share:.1%}",
            f"{one.num_calls / one.num_steps:.1f}",
            f"{one.ms_a_call:.2f}",
        )
    console.print(table)


def summary(figures: dict[str, Overhead]) -> dict[str, float]:
    """The JSON line."""
    large, demo = (figures[name] for name in TARGETS)
    return {
        "overhead_share": round(large.share, 4),
        "demo_overhead_share": round(demo.share, 4),
        "demo_calls_a_step": round(demo.num_calls / demo.num_steps, 2),
        "demo_overhead_ms_a_call": round(demo.ms_a_call, 2),
    }


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="Questions for the demo models.")] = 12,
    output: Annotated[Path, typer.Option(help="Where the figures go; those of other runs stay.")] = PAGES / "engine.json",
) -> None:
    """Print a table and one JSON line."""
    console = console_of_any_width()
    figures = measure_both(num_problems)
    show(console, figures)
    front_end = measure_front_end(num_problems)
    line = {**summary(figures), "front_end_ms_a_token": asdict(front_end), "device": device_line(demo_spec().target.num_threads)}
    keep_json(output, "python -m bench overhead", line)
    print_line(console, line)
