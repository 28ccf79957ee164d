"""What the token budget of an iteration is worth, behind longer and longer prefixes.

The real loop on a virtual clock, as in ``maps``: deployment ``qwen3-32b-apart`` on H200s, with scripted texts, prompts that are
computed already, and so many requests in flight at all times. By upstream's rule a call takes its whole prefix of
``max_num_tokens``, cached or not. One half of the rows has the 4,096 tokens that were shipped once, the other what the spec has
now.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.maps import DEPLOYMENT, EQUAL_ALPHA, NUM_STEPS, POLICIES, TEXTS, predicted
from lr_backend.build.admission import admission
from lr_backend.build.gpu_spec import TrtllmEngineSpec
from lr_backend.build.pace import kv_tokens, machine_of, pace_of, stood_for
from lr_backend.build.placements import resized
from lr_backend.engine import Role
from lr_backend.hardware.profile import find, label_of
from lr_backend.plan.simulation import Scenario, ms_a_token

SYSTEM = "h200_sxm"
ONCE = 4_096
CONTEXTS = (1_000, 4_000, 16_000)
MODES = ("ar", "lr", "lr_sd")


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds a token of one request by mode, where an iteration admits so many ``calls`` behind the ``context``."""

    max_num_tokens: int
    load: int
    context: int
    calls: int
    ar: float
    lr: float
    lr_sd: float


def measure(max_num_tokens: int, load: int, context: int) -> Row:
    """All modes, with the same texts."""
    spec = resized(stood_for(DEPLOYMENT), stood_for(DEPLOYMENT).target.max_batch_size, max_num_tokens)
    texts = replace(TEXTS, acceptance_rate=EQUAL_ALPHA, prompt_tokens=context, num_steps=NUM_STEPS)
    config = spec.loop_config()
    asked = Scenario.of(config, texts, machine_of(spec, SYSTEM), prompts_are_cached=True)
    found = {name: ms_a_token(predicted(asked, replace(POLICIES[name], num_requests=load)).usages) for name in MODES}
    assert isinstance(spec.target, TrtllmEngineSpec)
    calls = admission(Role.TARGET, spec.target, context, kv_tokens(spec, SYSTEM)[Role.TARGET], config.limits).calls
    return Row(max_num_tokens, load, context, calls, **found)


def table_of(rows: Sequence[Row]) -> Table:
    """Speedups are over ``ar`` with the same budget."""
    table = Table(title=f"{DEPLOYMENT} on {SYSTEM}, {rows[0].load} requests in flight: speedup over ar, by the token budget")
    for name in ("max_num_tokens", "prefix", "calls admitted", "ar, ms a token", "lr", "lr_sd"):
        table.add_column(name, justify="right")
    for row in rows:
        gains = (f"{row.ar / row.lr:.2f}", f"{row.ar / row.lr_sd:.2f}")
        table.add_row(f"{row.max_num_tokens:,}", f"{row.context:,}", str(row.calls), f"{row.ar:.1f}", *gains)
    return table


def main(
    load: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    contexts: Annotated[list[int] | None, typer.Option("--context", help="Tokens; by default 1,000 to 16,000.")] = None,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "admission.json",
) -> None:
    """Print a table and one line of JSON."""
    console = console_of_any_width()
    budgets = (ONCE, stood_for(DEPLOYMENT).target.max_num_tokens)
    asked = [(budget, load, context) for budget in budgets for context in contexts or CONTEXTS]
    with ProcessPoolExecutor(workers) as pool:
        rows = list(pool.map(measure, *zip(*asked, strict=True)))
    label = label_of([find(pace_of(stood_for(DEPLOYMENT), role, SYSTEM).profile) for role in Role])
    console.print(table_of(rows))
    console.print(f"[yellow]the loop is real, texts are scripted, no model; {label}[/]", soft_wrap=True)
    write_json(output, {"label": label, "rows": [asdict(row) for row in rows]})
    print_line(console, {f"{row.max_num_tokens} {row.context}": round(row.ar / row.lr, 3) for row in rows})
