"""What the loop and Triton add to the engines' own time: ``python -m bench.overhead``.

At ``max_depth`` 1 the target's steps and the judge's verdicts alternate and everything else runs beside them, so that wall time
is target plus judge plus overhead: orchestration, tensors through shared memory, Triton's queues. The target is a random model
of about 100 M parameters, whose decode step takes 10 ms or more; it never agrees with the draft, so every step is the
loop's longest way: drafted, written, judged, rejected, begun again. The demo models show the same in milliseconds a call.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client, Options, Usage
from rich.console import Console
from rich.table import Table

from demo.asking import demo_spec, serving
from demo.problems import problems
from lr_backend.build.base import Layout
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.embedded.random_checkpoint import write_random_checkpoint
from lr_backend.engine import Role
from lr_backend.serve.server import TritonServer
from lr_backend.triton.refresher import REFRESH_S

STEP_TOKENS = 24
TIMEOUT_S = 300.0
KV_TOKENS = 4096
LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "num_kv_heads": 12,
    "intermediate_size": 2304,
}


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


def random_models(spec: EmbeddedDeployment, folder: Path, shapes: Mapping[Role, Mapping[str, Any]]) -> EmbeddedDeployment:
    """``spec`` with random models of these shapes in place of its own; the prompt opens the reasoning and steps are cut."""
    changed = {}
    for role, shape in shapes.items():
        source, checkpoint = spec.checkpoint_dir(role), folder / role.value
        vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
        write_random_checkpoint(checkpoint, vocab_size=vocab_size, **{"head_dim": 64, **shape})
        for path in source.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                shutil.copy(path, checkpoint)
        template = checkpoint / "chat_template.jinja"
        template.write_text(template.read_text().rstrip("\n") + "<think>\n")
        update = {"checkpoint": checkpoint, "max_tokens_in_paged_kv_cache": KV_TOKENS}
        changed[role.value] = getattr(spec, role.value).model_copy(update=update)
    lookahead = spec.lookahead | {"limits": spec.lookahead["limits"] | {"max_step_tokens": STEP_TOKENS}}
    return spec.model_copy(update=changed | {"lookahead": lookahead})


def busy_seconds(server: TritonServer) -> dict[str, float]:
    """Seconds that each engine has spent in iterations."""
    time.sleep(2 * REFRESH_S)
    return server.counter("lr_engine_busy_seconds_total")


def measure(spec: EmbeddedDeployment, questions: Sequence[str], max_tokens: int) -> Overhead:
    """Ask one question after another in ``lr_sd`` at ``max_depth`` 1; the first one warms up and is not counted."""
    options = Options(mode="lr_sd", max_depth=1, max_tokens=max_tokens, temperature=0.6, stream=False)
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
        return {
            "100 M random": measure(
                random_models(spec, Path(folder), {Role.TARGET: LARGE}), questions[:4], max_tokens=8 * STEP_TOKENS
            ),
            "demo": measure(spec, questions, max_tokens=400),
        }


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
    """What the benchmark's JSON line says of it."""
    large, demo = figures["100 M random"], figures["demo"]
    return {
        "overhead_share": round(large.share, 4),
        "demo_overhead_share": round(demo.share, 4),
        "demo_calls_a_step": round(demo.num_calls / demo.num_steps, 2),
        "demo_overhead_ms_a_call": round(demo.ms_a_call, 2),
    }


def main(num_problems: Annotated[int, typer.Option("--problems", help="questions for the demo models")] = 12) -> None:
    """Print a table and one JSON line."""
    figures = measure_both(num_problems)
    console = Console(width=110)
    show(console, figures)
    console.print(json.dumps(summary(figures)), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
