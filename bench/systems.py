"""What the server makes of a given acceptance, at real sizes.

Target, draft and judge have random weights of real shapes, which cost what trained ones cost. Steps are as long as their cap:
the tokens that could end one are never drawn. The verifier (:class:`bench.plug_ins.verifiers.Chance`) waits for the judge's word,
disregards it, and accepts a drafted step with a given probability. So everything is real but the texts and the verdicts:
engines, batches, the loop, Triton.

Speedups are ratios of seconds a token over ``ar`` as one uninterrupted request, paired by question; all settings take turns on
every question. Beside each stand the paper's ceiling (S1 or S2, where parallel steps and verdicts are free) for the acceptance
that was seen and the measured c, and what the real loop gains on a virtual clock over engines as fast as these were measured to
be (:mod:`bench.kit.hardware`), where hand-overs, prompts and verdicts are free. What is missing to the second is the server's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from lr_client import Client, Options
from rich.console import Console
from rich.table import Table

from bench.kit.hardware import Hardware, device_line, hardware_ceiling, measure_hardware
from bench.kit.intervals import paired_speedup
from bench.kit.measure import num_decided
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.random_models import SHAPES, STEP_TOKENS, TIMEOUT_S, chance_of, random_deployment
from bench.kit.serving import serving
from bench.kit.turns import in_turns
from demo.problems import problems
from lr_backend.engine import Role
from lr_backend.policy.formulas import ceiling
from lr_backend.request import LookaheadRequest, Mode

SIZES: Mapping[str, tuple[str, str, str]] = {
    "cpu": ("100m", "10m", "10m"),
    "cuda": ("qwen3-32b", "qwen3-1.7b", "qwen2.5-7b"),
}
"""Target, draft and judge by device, unless said otherwise."""
NO_JUDGE = "none"
ALPHAS = (0.4, 0.6, 0.8)
DEPTHS = (2, 4, 8)
QUESTION_SEED = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """One column: the probability of acceptance and the depth; None for ``ar``."""

    alpha: float | None
    max_depth: int = 0

    def options(self, num_tokens: int, seed: int) -> Options:
        common: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0.6, "top_k": 20, "stream": False, "seed": seed}
        if self.alpha is None:
            return Options(mode="ar", **common)
        lookahead: dict[str, Any] = {"max_depth": self.max_depth, "verifier": chance_of(self.alpha)}
        return Options(mode="lr", **lookahead, **common)


@dataclass(frozen=True, slots=True)
class Figure:
    """What one setting has brought.

    Attributes:
        speedup: over ``ar``, with its 95 % interval from ``low`` to ``high``.
        measured_alpha: accepted / (accepted + rejected + late) at the root.
        step_tokens: mean length of a step.
        ceiling: S1 or S2 for the measured acceptance and c.
        hardware_ceiling: the loop's speedup on this hardware if nothing else cost anything.
    """

    alpha: float
    max_depth: int
    speedup: float
    low: float
    high: float
    measured_alpha: float
    step_tokens: float
    ceiling: float
    hardware_ceiling: float

    @property
    def realised_share(self) -> float:
        return self.speedup / self.ceiling

    @property
    def realised_hardware_share(self) -> float:
        return self.speedup / self.hardware_ceiling

    def as_dict(self) -> dict[str, float]:
        shares = {"realised_share": self.realised_share, "realised_hardware_share": self.realised_hardware_share}
        return {name: round(value, 4) for name, value in (asdict(self) | shares).items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one setting, over the questions in their order: seconds a token, and the steps counted together."""

    seconds_a_token: tuple[float, ...]
    num_accepted: int
    num_decided: int
    step_tokens: float

    @property
    def alpha(self) -> float:
        return self.num_accepted / max(1, self.num_decided)


def settings(alphas: Sequence[float], depths: Sequence[int]) -> list[Setting]:
    return [Setting(None), *(Setting(alpha, depth) for alpha, depth in product(alphas, depths))]


def figures(measured: Mapping[Setting, Measured], hardware: Hardware) -> list[Figure]:
    """One a setting beside ``ar``."""
    (baseline,) = (one.seconds_a_token for setting, one in measured.items() if setting.alpha is None)
    found = []
    for setting, one in measured.items():
        if setting.alpha is not None:
            seen = min(one.alpha, 0.999)
            most = ceiling(seen, min(1.0, hardware.cost_ratio), setting.max_depth)
            request = LookaheadRequest(text_input="-", mode=Mode.LR, max_depth=setting.max_depth)
            possible = hardware_ceiling(hardware, request, seen, round(one.step_tokens))
            speed = paired_speedup(baseline, one.seconds_a_token)
            found.append(Figure(setting.alpha, setting.max_depth, *speed, one.alpha, one.step_tokens, most, possible))
    return found


# The run -----------------------------------------------------------------------------------------------------------


def measure(
    client: Client, chosen: Sequence[Setting], questions: Sequence[str], num_tokens: int, console: Console
) -> dict[Setting, Measured]:
    """Every setting on every question, in turns; the first question warms up."""
    seconds: dict[Setting, dict[int, float]] = {setting: {} for setting in chosen}
    counts = {setting: [0, 0, 0, 0] for setting in chosen}
    for place, setting in enumerate(chosen):
        client.ask(questions[0], setting.options(num_tokens, seed=place), timeout_s=TIMEOUT_S)
    for index, question, place in in_turns(range(len(chosen)), questions[1:], "settings in turn", console):
        setting = chosen[place]
        options = setting.options(num_tokens, seed=1000 * (index + 1) + place)
        started = time.perf_counter()
        usage = client.ask(question, options, timeout_s=TIMEOUT_S).usage
        seconds[setting][index] = (time.perf_counter() - started) / usage.completion_tokens
        new = (usage.num_steps_accepted, num_decided(usage), usage.num_steps, usage.completion_tokens)
        counts[setting] = [before + more for before, more in zip(counts[setting], new, strict=True)]
    return {
        setting: Measured(tuple(each for _, each in sorted(seconds[setting].items())), accepted, decided, tokens / max(1, steps))
        for setting, (accepted, decided, steps, tokens) in counts.items()
    }


def show(console: Console, found: Sequence[Figure], title: str, caption: str) -> None:
    headings = ("scripted", "depth", "seen", "speedup over ar (95 %)", "S1/S2", "realised", "hardware ceiling", "realised")
    table = Table(title=title, caption=caption)
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            f"{one.alpha:.2f}",
            f"{one.max_depth}",
            f"{one.measured_alpha:.2f}",
            f"{one.speedup:.2f} ({one.low:.2f} to {one.high:.2f})",
            f"{one.ceiling:.2f}",
            f"{one.realised_share:.0%}",
            f"{one.hardware_ceiling:.2f}",
            f"{one.realised_hardware_share:.0%}",
        )
    console.print(table)


# Each option is one axis of what is measured.
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    target: Annotated[str | None, typer.Option(help=f"Shape: {', '.join(SHAPES)}; by default 100m, on cuda qwen3-32b.")] = None,
    draft: Annotated[str | None, typer.Option(help="Shape; by default 10m, on cuda qwen3-1.7b.")] = None,
    judge: Annotated[str | None, typer.Option(help="Shape; by default 10m, on cuda qwen2.5-7b. none: verdicts are free.")] = None,
    alphas: Annotated[list[float] | None, typer.Option("--alpha", min=0.0, max=1.0, help="Acceptance; repeat it.")] = None,
    depths: Annotated[list[int] | None, typer.Option("--depth", min=1, max=8, help="max_depth; repeat it.")] = None,
    num_questions: Annotated[int, typer.Option("--questions", min=2, help="Beside one that warms up.")] = 4,
    num_steps: Annotated[int, typer.Option("--steps", min=2, help=f"Of an answer, each of {STEP_TOKENS} tokens.")] = 12,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "systems.json",
) -> None:
    """Random models of real shapes, scripted acceptance: realised speedup against the paper's formulas."""
    sizes = sizes_of(device, (target, draft, judge))
    judged = sizes[2] != NO_JUDGE
    console = console_of_any_width()
    shapes = {role: name for role, name in zip(Role, sizes, strict=True) if name != NO_JUDGE}
    asked = list(islice(problems(QUESTION_SEED, "test"), num_questions + 1))
    chosen = settings(alphas or ALPHAS, depths or DEPTHS)
    with tempfile.TemporaryDirectory(prefix="lookahead-systems-") as name:
        folder = Path(name)
        spec = random_deployment(folder, shapes, device=device, alphas=alphas or ALPHAS)
        with serving(spec, folder / "repository") as server, Client(server.grpc_url) as client:
            hardware = measure_hardware(server, spec, asked[0])
            measured = measure(client, chosen, [one.question for one in asked], num_steps * STEP_TOKENS, console)
    where = device_line(spec.target.num_threads, device)
    found = figures(measured, hardware)
    alone_ms = 1e3 * float(np.mean(measured[chosen[0]].seconds_a_token))
    verdicts = f"{sizes[2]} judge" if judged else "free verdicts"
    title = f"{sizes[0]} target at {alone_ms:.1f} ms a token, {sizes[1]} draft, {verdicts}, c {hardware.cost_ratio:.2f}, lr"
    show(console, found, title, where)
    result = {
        "target": sizes[0],
        "draft": sizes[1],
        "judge": sizes[2],
        "ms_a_token": round(alone_ms, 3),
        "c": round(hardware.cost_ratio, 4),
        "step_tokens": STEP_TOKENS,
        "num_questions": num_questions,
        "num_steps": num_steps,
        "hardware": hardware.as_dict(),
        "rows": [one.as_dict() for one in found],
        "device": where,
    }
    write_json(output, result)
    console.print(f"written to {output}", highlight=False)
    print_line(console, result)


def sizes_of(device: str, given: Sequence[str | None]) -> list[str]:
    """Names of the shapes of target, draft and judge.

    Raises:
        BadParameter: there is no such device or shape.
    """
    if device not in SIZES:
        raise typer.BadParameter("cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device; there is none here", param_hint="--device")
    sizes = [one or usual for one, usual in zip(given, SIZES[device], strict=True)]
    for role, name in zip(Role, sizes, strict=True):
        if name not in SHAPES and (role, name) != (Role.JUDGE, NO_JUDGE):
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}", param_hint=f"--{role.value}")
    return sizes
