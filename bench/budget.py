"""How a parallelism budget is best split between steps and tokens: the paper's prediction beside what is measured.

    python -m bench.budget

For every budget M three ways to spend it run on the demo models through a real Triton: all on tokens (``sd``), all on steps
(``lr``), and the best of those between by the formulas (:mod:`lr_backend.plan.budget`), with rates measured here. Draft tokens
are the draft model's, so that the formula's acceptance and cost are a model's and not a text's. All answer the same problems as
``ar``, in turns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client
from rich.console import Console
from rich.table import Table

from bench.ablation import AS_IT_IS, PROBLEM_SEED, Row, ask, compare
from bench.hardware import measure_hardware
from demo.asking import console_of_any_width, demo_spec, serving
from demo.measure import ModeReport, Sample, report
from demo.problems import problems
from lr_backend.config import Limits
from lr_backend.plan.budget import Rates, acceptance_from_length, token_speedup
from lr_backend.policy.formulas import ceiling

BASELINE = Row("ar", {"mode": "ar"})
PROBE_DRAFTS = 4
"""Draft tokens of the row that shows their acceptance."""
PROBES = (
    Row("probe lr", {"mode": "lr"}),
    Row("probe sd", {"mode": "sd", "proposer": "engine", "num_draft_tokens": PROBE_DRAFTS}),
)


@dataclass(frozen=True)
class Way:
    """One way to spend a budget: steps in flight and positions verified in each."""

    num_steps: int
    num_positions: int

    @property
    def row(self) -> Row:
        tokens: dict[str, Any] = {"proposer": "engine", "num_draft_tokens": self.num_positions - 1}
        steps: dict[str, Any] = {"max_depth": self.num_steps}
        name = f"{self.num_steps} x {self.num_positions}"
        if self.num_steps == 1:
            return Row(name, {"mode": "sd", **tokens})
        return Row(name, {"mode": "lr", **steps} if self.num_positions == 1 else {"mode": "lr_sd", **steps, **tokens})

    def predicted(self, rates: Rates) -> float:
        by_steps = ceiling(rates.step_acceptance, rates.step_cost, self.num_steps)
        return by_steps * token_speedup(rates.token_acceptance, rates.token_cost, self.num_positions)


def ways(budget: int, rates: Rates, limits: Limits) -> tuple[Way, ...]:
    """All on tokens, the best in between by the formulas, and all on steps; none twice, and each within the server's limits."""
    most_steps, most_positions = min(budget, limits.max_depth), min(budget, limits.max_draft_len + 1)
    between = [Way(k1, k2) for k1 in range(2, most_steps + 1) for k2 in range(2, min(budget // k1, most_positions) + 1)]
    best = max(between, key=lambda way: way.predicted(rates), default=Way(most_steps, 1))
    return tuple(dict.fromkeys((Way(1, most_positions), best, Way(most_steps, 1))))


def rates_of(found: Mapping[str, ModeReport], samples: Sequence[Sample], cost_ratio: float) -> Rates:
    """What the probes show. The cost of a drafted token is that of a drafted step: both are the draft model's time a token."""
    lr, sd = (probe.name for probe in PROBES)
    usages = [sample.usage for sample in samples if sample.mode == sd]
    num_verifications = sum(usage.num_draft_tokens for usage in usages) / PROBE_DRAFTS
    mean = sum(usage.num_accepted_tokens for usage in usages) / num_verifications if num_verifications else 0.0
    c = min(1.0, cost_ratio)
    return Rates(found[lr].step_acceptance_rate or 0.0, c, min(0.99, acceptance_from_length(mean, PROBE_DRAFTS)), c)


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="Answered by every row.")] = 20,
    budgets: Annotated[list[int] | None, typer.Option("--budget", min=2, help="M; by default 4, 8, 16 and 32.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/budget.json"),
) -> None:
    """Print a table, and one JSON line a row."""
    console = console_of_any_width()
    spec = demo_spec()
    questions = list(islice(problems(PROBLEM_SEED, "test"), num_problems + 1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-budget-")))
        server = stack.enter_context(serving(spec, folder))
        client = stack.enter_context(Client(server.grpc_url))

        def measured(rows: Sequence[Row]) -> tuple[list[Sample], dict[str, ModeReport]]:
            for row in rows:  # a row that is refused fails here
                ask(client, row, questions[0], 0, temperature)
            samples = compare({AS_IT_IS: client}, rows, questions[1:], temperature, console)
            return samples, report(samples, BASELINE.name)

        cost_ratio = measure_hardware(server, spec, questions[0]).cost_ratio
        samples, found = measured((BASELINE, *PROBES))
        rates = rates_of(found, samples, cost_ratio)
        planned = {budget: ways(budget, rates, spec.loop_config().limits) for budget in budgets or (4, 8, 16, 32)}
        rows = {way.row.name: way.row for group in planned.values() for way in group}
        _, found = measured((BASELINE, *rows.values()))
    lines = [line(budget, way, way.predicted(rates), found[way.row.name]) for budget, group in planned.items() for way in group]
    title = (
        f"{num_problems} problems at temperature {temperature:g}; alpha of steps {rates.step_acceptance:.2f}, "
        f"of tokens {rates.token_acceptance:.2f}; c {rates.step_cost:.2f}"
    )
    show(console, title, lines)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"rates": asdict(rates), "rows": lines}, indent=2) + "\n", encoding="utf-8")
    for one in lines:
        console.print(json.dumps(one), soft_wrap=True, highlight=False, markup=False)


def line(budget: int, way: Way, predicted: float, found: ModeReport) -> dict[str, Any]:
    return {
        "budget": budget,
        "num_steps": way.num_steps,
        "num_positions": way.num_positions,
        "predicted": round(predicted, 4),
        "speedup": round(found.speedup, 4),
        "speedup_low": round(found.speedup_low, 4),
        "speedup_high": round(found.speedup_high, 4),
        "correct": found.correct,
        "total": found.total,
    }


def show(console: Console, title: str, lines: Sequence[Mapping[str, Any]]) -> None:
    table = Table("M", "steps x positions", "predicted, all free", "measured (95 %)", "right", title=title)
    for one in lines:
        gain = f"{one['speedup']:.2f} ({one['speedup_low']:.2f} to {one['speedup_high']:.2f})"
        shape = f"{one['num_steps']} x {one['num_positions']}"
        table.add_row(f"{one['budget']}", shape, f"{one['predicted']:.2f}", gain, f"{one['correct']}/{one['total']}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
