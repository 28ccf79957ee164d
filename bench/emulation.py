"""How near an emulated server on the wall's clock comes to the same engines on the virtual one.

A real Triton serves ``qwen3-32b-apart`` emulated; so many clients ask at a time, each a question of its own. The virtual clock
runs the same loop over the same timelines and texts. Milliseconds a token of both stand side by side; what is off is Triton,
Python, and this machine's haste.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client, Options
from rich.table import Table

from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import LatenessSince, serving, short_texts
from lr_backend.build.emulated_spec import DEFAULT_WORKLOAD, EmulatedDeployment, emulated
from lr_backend.build.pace import machine_of, stood_for
from lr_backend.emulated.texts import Texts
from lr_backend.hardware.lateness import Lateness
from lr_backend.hardware.overheads import BLS_MS
from lr_backend.plan.equal_gpus import DRAFT_TOKENS
from lr_backend.plan.simulation import Policy, Scenario, ms_a_token, simulate
from lr_backend.request import Mode

DEPLOYMENT, SYSTEM = "qwen3-32b-apart", "h200_sxm"
LOADS = (1, 4, 8)
JUDGED: Mapping[str, Any] = {"verifier": "judge"}
ROWS: Mapping[str, Policy] = {
    "ar": Policy(Mode.AR, 0),
    "sd": Policy(Mode.SD, 0, fields=DRAFT_TOKENS),
    "lr": Policy(Mode.LR, 4, fields=JUDGED),
    "lr_sd": Policy(Mode.LR_SD, 4, fields={**JUDGED, **DRAFT_TOKENS}),
}
LIMITS = {Mode.AR: 0.05, Mode.LR: 0.05, Mode.SD: 0.08, Mode.LR_SD: 0.08}
"""How far the two may be apart."""
NUM_STEPS = 12
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """One row at one load: milliseconds a token, by the wall's clock and by the virtual one.

    Attributes:
        late: how late the paced engines were meanwhile.
    """

    row: str
    load: int
    wall_ms: float
    virtual_ms: float
    limit: float
    late: Lateness

    @property
    def off(self) -> float:
        return self.wall_ms / self.virtual_ms - 1.0

    def as_dict(self) -> dict[str, Any]:
        derived = {"late_share": self.late.share, "void": self.late.void, "off": round(self.off, 4), "within": self.within}
        return {**asdict(self), **derived}

    @property
    def within(self) -> bool:
        return not self.late.void and abs(self.off) <= self.limit


def measure(deployment: EmulatedDeployment, folder: Path, loads: Sequence[int] = LOADS) -> list[Held]:
    """Every row at every load, each with questions that were never asked before."""
    texts, scenario = Texts(deployment.texts, 0), virtual(deployment)
    found, first = [], 0
    with serving(deployment, folder) as server:
        lateness = LatenessSince(server)
        for load in loads:
            for row, policy in ROWS.items():
                numbers = range(first, first + load)
                wall_ms = _ask(server.grpc_url, texts, policy, numbers) / deployment.slow_motion
                virtual_ms = ms_a_token(simulate(scenario, replace(policy, num_requests=load), first=first).usages)
                found.append(Held(row, load, wall_ms, virtual_ms, LIMITS[policy.mode], lateness()))
                first += load
    return found


def virtual(deployment: EmulatedDeployment) -> Scenario:
    """The same deployment for the virtual clock."""
    machine = machine_of(stood_for(deployment.emulates), deployment.system)
    # Triton's own hop is real, and is not in slow motion with the rest.
    faster_s = BLS_MS.value * (1.0 - 1.0 / deployment.slow_motion) / 2e3
    machine = machine.with_longer_hops(dict.fromkeys(machine.places, -faster_s))
    return Scenario.of(deployment.loop_config(), deployment.texts, machine)


def _ask(url: str, texts: Texts, policy: Policy, numbers: range) -> float:
    """Milliseconds a token of requests that are asked at once."""
    shape = {"mode": policy.mode.value, "max_depth": max(1, policy.max_depth), "max_tokens": texts.workload.max_tokens}
    options = Options(stream=False, temperature=0.6, seed=0, **{**shape, **policy.fields})

    def ask(number: int) -> tuple[float, int]:
        with Client(url) as client:
            result = client.ask(texts.question(number), options, timeout_s=TIMEOUT_S)
        return result.usage.latency_s, result.usage.completion_tokens

    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = list(pool.map(ask, numbers))
    return 1e3 * sum(seconds for seconds, _ in answers) / sum(tokens for _, tokens in answers)


def main(
    slow_motion: Annotated[float, typer.Option(min=1.0, max=100.0, help="So many times as long as there.")] = 6.0,
    loads: Annotated[list[int] | None, typer.Option("--load", min=1, help="Requests in flight; by default 1, 4 and 8.")] = None,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "emulation.json",
) -> None:
    """Print a table and one line of JSON."""
    console = console_of_any_width()
    with tempfile.TemporaryDirectory(prefix="lookahead-emulation-") as name:
        folder = Path(name)
        deployment = emulated(DEPLOYMENT, SYSTEM, short_texts(DEFAULT_WORKLOAD, NUM_STEPS, folder), slow_motion=slow_motion)
        found = measure(deployment, folder / "repository", loads or LOADS)
    table = Table(title=f"{DEPLOYMENT} emulated on {SYSTEM}: ms a token, the wall's clock and the virtual one")
    for name in ("in flight", "mode", "wall", "virtual", "off", "late"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for one in found:
        off = f"[{'green' if one.within else 'bold red'}]{one.off:+.1%}[/]"
        late = f"{one.late.share:.1%}{' (void)' * one.late.void}"
        table.add_row(str(one.load), one.row, f"{one.wall_ms:.2f}", f"{one.virtual_ms:.2f}", off, late)
    console.print(table)
    console.print(f"[yellow]{deployment.pace_label}[/]", soft_wrap=True, highlight=False)
    rows = [one.as_dict() for one in found]
    write_json(output, {"label": deployment.pace_label, "rows": rows})
    void = sum(one.late.void for one in found)
    worst = max((abs(one.off) for one in found if not one.late.void), default=None)
    told = {
        "rows": len(found),
        "void": void,
        "within": sum(one.within for one in found),
        "worst": None if worst is None else round(worst, 4),
    }
    print_line(console, told)
