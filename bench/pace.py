"""Every mode at production pace, and how near the planner comes to it.

Problems are answered by the demo's models behind a real Triton whose engines keep the pace of ``qwen3-32b-apart`` on some system
(:mod:`bench.kit.pace`): as compiled engines are, then with a target that drafts by itself, as the LLM API's does, and with
engines that draw with noise of the request, as the embedded ones do. Each answer leaves its trace.

From a row's own traces comes a workload, and the real loop runs over it on a virtual clock: with the costs of the kernel tables,
and with costs that were fitted to the traces as if no table were known. Both predict the milliseconds of a token, the paced
server has measured them, and the table says how far they are apart. Triton's own hops are real, so the tables are asked twice:
with the constant that the planner has for a hop, and with the hops of this machine. The last column has the speedup by the
tables where every constant that they lack is at the worse and at the better end of its range.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.kit.measure import LEARNS_FROM, Sample
from bench.kit.output import PAGES, console_of_any_width, keep_json, print_line
from bench.kit.pace import AHEAD, BASELINE, ROWS, SYSTEM, MeasuredHops, Paced, Row, compare, hops, learn, note_pace, stage
from bench.kit.rows import PROBLEM_SEED
from bench.kit.serving import TEMPERATURE, demo_spec, together
from demo.problems import Problem, problems
from lr_backend.errors import TraceError
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.overheads import Bound
from lr_backend.plan import simulation
from lr_backend.plan.fit_times import TimedTraces
from lr_backend.plan.simulation import Policy, Scenario, simulate
from lr_backend.request import Mode, ProposerName

SD_ROWS: Mapping[str, Row] = {
    "sd, 4 draft tokens": {**ROWS["sd"], "num_draft_tokens": 4},
    "sd, ngram": {"mode": "sd", "proposer": "ngram", "num_draft_tokens": 8},
}
"""Other sources of draft tokens than the default row's."""
BY_ITSELF: Mapping[str, Any] = {"proposer": "engine"}
INSIDE: Mapping[str, Row] = {
    BASELINE: ROWS[BASELINE],
    "sd": {"mode": "sd", **BY_ITSELF, "num_draft_tokens": 8},
    "sd, 4 draft tokens": {"mode": "sd", **BY_ITSELF, "num_draft_tokens": 4},
    "lr": ROWS["lr"],
    "lr_sd": {"mode": "lr_sd", **AHEAD, **BY_ITSELF, "num_draft_tokens": 8},
}
EMBEDDED: Mapping[str, Row] = {
    BASELINE: ROWS[BASELINE],
    "sd": ROWS["sd"],
    "lossless": {"mode": "lossless", **AHEAD, "num_draft_tokens": 0},
    "lossless_sd": {"mode": "lossless", **AHEAD, "num_draft_tokens": 8},
}
"""Engines that draw with noise of the request, as only the embedded ones do: all rows write the same text."""
KINDS: Mapping[str, tuple[str, Mapping[str, Row], Mapping[str, Any]]] = {
    "external": ("compiled engines", {**ROWS, **SD_ROWS}, {}),
    "inside": ("a target that drafts by itself", INSIDE, {"drafts_itself": True}),
    "embedded": ("embedded engines", EMBEDDED, {"shares_noise": True}),
}
"""Name, title, rows, and how engines differ from compiled ones."""
NUM_STEPS, NUM_STEPS_AT_A_BOUND = 200, 60
"""Steps of all texts that a prediction is made of: acceptance is chance. The ends of the constants' ranges need fewer, since they
are only compared with their middle, over the same texts."""
FIRST = 20
"""So many of the answers by which a server learns are told by themselves."""
LIMITS = {Mode.AR: 0.05, Mode.LR: 0.05, Mode.SD: 0.08, Mode.LR_SD: 0.08, Mode.AUTO: 0.08, Mode.LOSSLESS: 0.08}
"""How far a prediction may be off."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One row: milliseconds a token, measured and predicted.

    Attributes:
        planned: by the kernel tables and the constants that they lack; None: scripted texts repeat nothing, so that nothing can
            be said of a proposer that looks for repetitions.
        here: the same with hops as long as they were on this machine.
        fitted: by times that were fitted to traces; None: nothing can be fitted to these.
        low, high: speedup by the tables where all constants are at the worse end of their range, and at the better.
    """

    row: str
    measured: float
    planned: float | None
    here: float | None
    fitted: float | None
    limit: float
    low: float | None
    high: float | None

    @property
    def off(self) -> list[float]:
        return [found / self.measured - 1.0 for found in (self.planned, self.here, self.fitted) if found is not None]

    @property
    def within(self) -> bool:
        return all(abs(off) <= self.limit for off in self.off)


def agreements(found: Paced) -> list[Agreement]:
    """What is measured of every row, beside what is predicted."""
    return [_agreement(found, row) for row in found.rows]


def _agreement(found: Paced, row: str) -> Agreement:
    policy = found.policy(row)
    measured, limit = 1e3 / found.rows[row].tokens_per_s, LIMITS[policy.mode]
    if policy.fields.get("proposer") == ProposerName.NGRAM and policy.mode.speculates_tokens:
        return Agreement(row, measured, None, None, None, limit, None, None)
    try:
        scenario = found.scenario(row, found.machine())
    except TraceError:  # no drafted step was put to a verifier
        return Agreement(row, measured, None, None, None, limit, None, None)
    predicted, alone = (ms_a_token(scenario, one) for one in (policy, Policy(Mode.AR)))
    middle, low, high = (_gain(scenario, policy, found.machine(bound)) for bound in (Bound.VALUE, Bound.HIGH, Bound.LOW))
    return Agreement(
        row=row,
        measured=measured,
        planned=predicted,
        here=ms_a_token(replace(scenario, machine=with_hops(found.machine(), hops(found))), policy),
        fitted=by_fitted_times(found, row),
        limit=limit,
        low=alone / predicted * low / middle,
        high=alone / predicted * high / middle,
    )


def by_fitted_times(found: Paced, row: str) -> float | None:
    """Milliseconds a token with times fitted to the traces of this row and of its likes; None: there are too few calls.

    A target that drafts by itself is taken as it writes, with its drafting in the time of a token.
    """
    policy = found.policy(row)
    likes: tuple[str, ...] = ("lr", BASELINE)
    if policy.fields.get("proposer") == ProposerName.ENGINE and policy.mode.speculates_tokens:
        policy = replace(policy, mode=Mode.LR if policy.mode.speculates_steps else Mode.AR, fields={})
        likes = ()
    traces = [trace for name in dict.fromkeys((row, *likes)) for trace in found.traces.get(name, ())]
    try:
        machine = TimedTraces.of(traces).times.machine()
    except TraceError:
        return None
    return ms_a_token(found.scenario(row, machine), policy) / found.spec.slow_motion


def ms_a_token(scenario: Scenario, policy: Policy, num_steps: int = NUM_STEPS) -> float:
    """Of answers of so many steps together, on the virtual clock. What chooses learns from each for the next."""
    num_texts = -(-num_steps // scenario.workload.num_steps)
    if policy.mode.chooses:
        return simulation.ms_a_token(simulate(scenario, policy, num_sets=LEARNS_FROM + num_texts).usages[LEARNS_FROM:])
    return simulation.ms_a_token(usage for seed in range(num_texts) for usage in simulate(scenario, policy, seed).usages)


def _gain(scenario: Scenario, policy: Policy, machine: Machine) -> float:
    scenario = replace(scenario, machine=machine)
    alone, ours = (ms_a_token(scenario, one, NUM_STEPS_AT_A_BOUND) for one in (Policy(Mode.AR), policy))
    return alone / ours


def with_hops(machine: Machine, measured: Iterable[MeasuredHops]) -> Machine:
    """The machine with calls that are on their way for as long as they were here."""
    return machine.with_longer_hops({one.role: (one.mean_ms - one.constant_ms) / 2e3 for one in measured})


# What is shown ---------------------------------------------------------------------------------------------------------


def show(console: Console, title: str, found: Paced, lines: Sequence[Agreement]) -> None:
    table = Table(title=title)
    rates, times = ("right", "step acc.", "token acc.", "speedup (95 %)"), ("planned", "hops as here", "fitted")
    for name in ("row", *rates, "ms a token", *times, "constants"):
        table.add_column(name, justify="left" if name == "row" else "right")
    for line in lines:
        row = found.rows[line.row]
        table.add_row(
            line.row,
            f"{row.correct}/{row.total}",
            *("-" if rate is None else f"{rate:.2f}" for rate in (row.step_acceptance_rate, row.token_acceptance_rate)),
            f"{row.speedup:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
            f"{line.measured:.2f}",
            _beside(line.planned, line),
            _beside(line.here, line),
            _beside(line.fitted, line),
            "-" if line.low is None else f"{line.low:.2f} to {line.high:.2f}",
        )
    console.print(table)
    note_pace(console, found)


def _beside(predicted: float | None, line: Agreement) -> str:
    if predicted is None:
        return "-"
    off = predicted / line.measured - 1.0
    colour = "green" if abs(off) <= line.limit else "red"
    return f"{predicted:.2f} [{colour}]({off:+.0%})[/]"


def document(found: Paced, lines: Sequence[Agreement], row: str) -> dict[str, Any]:
    return {
        **found.as_dict(row),
        "agreement": [{**asdict(line), "off": line.off, "within": line.within} for line in lines],
    }


def summary(found: Mapping[str, Paced]) -> dict[str, Any]:
    """The last line: a mode's figure is its default row's, of ``sd`` its best."""

    def best(kind: str) -> float:
        return max(row.speedup for name, row in found[kind].rows.items() if name.split(",")[0] == "sd")

    def gain(kind: str, row: str) -> float:
        return found[kind].rows[row].speedup

    external = found["external"]
    late = together([one.lateness for one in found.values()])
    told: dict[str, Any] = {
        "profile": external.system,
        "label": external.spec.pace_label,
        "late_share": late.share,
        "void": late.void,
        "runtime": "compiled",
        **{name: best("external") if name == "sd" else gain("external", name) for name in ROWS},
        "realised_share": external.realised_share("auto"),
        "right": {name: external.rows[name].correct / external.rows[name].total for name in ROWS},
    }
    if "inside" in found:
        told["inside"] = {"sd": best("inside"), "lr_sd": gain("inside", "lr_sd")}
    if "embedded" in found:
        told["embedded"] = {name: gain("embedded", name) for name in ("lossless", "lossless_sd", "sd")}
    rounded: dict[str, Any] = json.loads(json.dumps(told), parse_float=lambda text: round(float(text), 4))
    return rounded


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=2)] = 16,
    system: Annotated[str, typer.Option(help="Whose pace.")] = SYSTEM,
    paced_as: Annotated[str | None, typer.Option(help="The deployment that is stood for, instead of the demo's own.")] = None,
    slow_motion: Annotated[float | None, typer.Option(min=1.0, max=100.0, help="By default what this machine needs.")] = None,
    compiled_only: Annotated[bool, typer.Option("--compiled-only", help="Leave out the other kinds of engines.")] = False,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "pace.json",
) -> None:
    """Print a table for each kind of token speculation, and last one line of JSON."""
    console = console_of_any_width()
    asked = list(islice(problems(PROBLEM_SEED, "test"), 2 + num_problems + LEARNS_FROM))
    measured: dict[str, Paced] = {}
    for name, (kind, rows, options) in list(KINDS.items())[: 1 if compiled_only else None]:
        found, learned = _measure(console, rows, asked, system, like=paced_as, slow_motion=slow_motion, **options)
        slow_motion = found.spec.slow_motion
        lines = agreements(found)
        show(console, f"{kind}: {num_problems} problems, temperature {TEMPERATURE:g}, one at a time", found, lines)
        told = document(found, lines, "auto" if "auto" in rows else "sd")
        if learned:
            told["auto_first_ms_a_token"] = first_ms = _ms_a_token(learned[:FIRST])
            console.print(f"[dim]auto, its first {FIRST} answers of {LEARNS_FROM}: {first_ms:.2f} ms a token[/]")
        keep_json(output, name, told)
        measured[name] = found
    console.print(f"written to {output}")
    print_line(console, summary(measured))


def _measure(
    console: Console, rows: Mapping[str, Row], asked: Sequence[Problem], system: str, **options: Any
) -> tuple[Paced, list[Sample]]:
    """Also the answers by which the server has learned."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-pace-")))
        with console.status("starting Triton"):
            on = stack.enter_context(stage(demo_spec(), system, asked[:2], folder, console, rows=rows, **options))
        learned = learn(on, asked[-LEARNS_FROM:], console) if "auto" in rows else []
        return compare(on, asked[2:-LEARNS_FROM], console, rows), learned


def _ms_a_token(samples: Sequence[Sample]) -> float:
    return 1e3 * sum(one.latency_s for one in samples) / sum(one.usage.completion_tokens for one in samples)
