"""``python -m bench.scripted``: the step loop at sizes that have no trained models here, acceptance being scripted.

Target and draft have random weights, which cost what trained ones cost; steps are as long as their cap, and the ``random``
verifier accepts a drafted step with a given probability, at no cost. So everything is real but the texts and the verdicts: the
engines, their batches, the loop, Triton. Speedups are ratios of seconds a token, over ``ar`` as one uninterrupted request;
all settings take turns on every question.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from lr_client import Client, Options
from rich.console import Console
from rich.table import Table

from bench.engine import device_line
from bench.overhead import LARGE, STEP_TOKENS, TIMEOUT_S, random_models
from demo.measure import paired_speedup, rotated
from demo.problems import problems
from demo.run import cost_ratio, demo_spec, serving
from lr_backend.engine import Role
from lr_backend.loop.depth import ceiling
from lr_backend.torch_engine.config import EngineConfig

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "35m": {"hidden_size": 512, "num_layers": 9, "num_heads": 8, "num_kv_heads": 8, "intermediate_size": 1536},
    "100m": LARGE,
    "300m": {"hidden_size": 1280, "num_layers": 14, "num_heads": 20, "num_kv_heads": 20, "intermediate_size": 3840},
}
"""Qwen3 shapes by their number of parameters, with the demo's vocabulary."""
DRAFT: Mapping[str, Any] = {"hidden_size": 256, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 768}
ALPHAS = (0.4, 0.6, 0.8)
QUESTION_SEED = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """One column: the probability of acceptance, None for ``ar``."""

    alpha: float | None
    max_depth: int

    def options(self, num_tokens: int, seed: int) -> Options:
        common: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0.6, "stream": False, "seed": seed}
        if self.alpha is None:
            return Options(mode="ar", **common)
        lookahead: dict[str, Any] = {"max_depth": self.max_depth, "verifier": "random", "verifier_threshold": self.alpha}
        return Options(mode="lr", min_chance=0.0, **lookahead, **common)


@dataclass(frozen=True, slots=True)
class Figure:
    """What one setting has brought: speedup over ``ar`` with its 95 % interval, and the paper's ceiling for its acceptance."""

    alpha: float
    speedup: float
    low: float
    high: float
    measured_alpha: float
    ceiling: float


def settings(alphas: Sequence[float], max_depth: int) -> list[Setting]:
    return [Setting(None, max_depth), *(Setting(alpha, max_depth) for alpha in alphas)]


def figures(seconds: Mapping[Setting, Sequence[float]], acceptance: Mapping[Setting, float], c: float) -> list[Figure]:
    """Of seconds a token by setting, in the order of the questions."""
    (baseline,) = (times for setting, times in seconds.items() if setting.alpha is None)
    found = []
    for setting, times in seconds.items():
        if setting.alpha is not None:
            measured = acceptance[setting]
            most = ceiling(min(measured, 0.999), min(1.0, c), setting.max_depth)
            found.append(Figure(setting.alpha, *paired_speedup(baseline, times), measured, most))
    return found


def measure(
    client: Client, chosen: Sequence[Setting], questions: Sequence[str], num_tokens: int
) -> tuple[dict[Setting, list[float]], dict[Setting, float]]:
    """(seconds a token, share of the compared steps that were accepted) by setting; the first question warms up."""
    seconds: dict[Setting, list[float]] = {setting: [] for setting in chosen}
    accepted, compared = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
    for index, question in enumerate(questions):
        for place, setting in enumerate(rotated(chosen, index)):
            options = setting.options(num_tokens, seed=1000 * index + place)
            started = time.perf_counter()
            usage = client.ask(question, options, timeout_s=TIMEOUT_S).usage
            if index:
                seconds[setting].append((time.perf_counter() - started) / usage.completion_tokens)
                accepted[setting] += usage.num_steps_accepted
                compared[setting] += usage.num_steps_accepted + sum(usage.num_steps_rejected.values())
    rates = {setting: accepted[setting] / max(1, compared[setting]) for setting in chosen}
    return seconds, rates


def main(
    target: Annotated[str, typer.Option(help=f"target's size: {', '.join(TARGETS)}")] = "100m",
    max_depth: Annotated[int, typer.Option(min=1)] = 4,
    num_questions: Annotated[int, typer.Option("--questions", min=2, help="beside one that warms up")] = 4,
    num_steps: Annotated[int, typer.Option("--steps", min=2, help="of an answer")] = 12,
    alphas: Annotated[list[float] | None, typer.Option("--alpha", help="probabilities of acceptance")] = None,
) -> None:
    """Print a table and one JSON line."""
    if target not in TARGETS:
        raise typer.BadParameter(f"one of {', '.join(TARGETS)}", param_hint="--target")
    asked = list(islice(problems(QUESTION_SEED, "test"), num_questions + 1))
    chosen = settings(alphas or ALPHAS, max_depth)
    with tempfile.TemporaryDirectory(prefix="lookahead-scripted-") as folder:
        spec = random_models(demo_spec(), Path(folder), {Role.TARGET: TARGETS[target], Role.DRAFT: DRAFT})
        with serving(spec, Path(folder) / "repository") as server, Client(server.grpc_url) as client:
            c = cost_ratio(server, spec, asked[0])
            seconds, rates = measure(client, chosen, [one.question for one in asked], num_steps * STEP_TOKENS)
        where = device_line(EngineConfig(spec.checkpoint_dir(Role.TARGET), num_threads=spec.target.num_threads))
    found = figures(seconds, rates, c)
    alone_ms = 1e3 * float(np.mean(seconds[chosen[0]]))
    title = f"{target} target at {alone_ms:.1f} ms a token, c {c:.2f}, lr at depth {max_depth}"
    table = Table("acceptance scripted", "seen", "speedup over ar (95 %)", "ceiling", "realised", title=title, caption=where)
    for one in found:
        speed = f"{one.speedup:.2f} ({one.low:.2f} to {one.high:.2f})"
        table.add_row(
            f"{one.alpha:.2f}", f"{one.measured_alpha:.2f}", speed, f"{one.ceiling:.2f}", f"{one.speedup / one.ceiling:.0%}"
        )
    console = Console(width=110)
    console.print(table)
    rows = [
        {
            "alpha": one.alpha,
            "measured_alpha": round(one.measured_alpha, 3),
            "speedup": round(one.speedup, 3),
            "speedup_low": round(one.low, 3),
            "speedup_high": round(one.high, 3),
            "ceiling": round(one.ceiling, 3),
        }
        for one in found
    ]
    result = {"target": target, "ms_a_token": round(alone_ms, 2), "c": round(c, 3), "max_depth": max_depth, "rows": rows}
    console.print(json.dumps(result | {"device": where}), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
