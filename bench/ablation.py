"""What each part of lookahead is worth, against its absence, on the demo models through a real Triton.

One row a setting. Every row answers the same problems as ``ar``, in turns whose order rotates, and its speedup is the ratio of
the seconds. ``ar`` is one uninterrupted request at its best thread setting. Settings that no request carries have servers of
their own.

With ``--pace`` the engines keep the pace of a system (:mod:`bench.kit.pace`), and only the parts of the loop have rows.

At this machine's own pace two bounds stand beside it. ``ceiling`` is the paper's (S1 and S2) at the measured acceptance and cost
ratio, where parallel steps and verdicts are free. ``hardware_ceiling`` is what the real loop gains on a virtual clock
(:mod:`lr_backend.plan`) over engines as fast as they were measured here: the target's time a token by sequences in its batch, how
much a busy draft slows it down on the shared cores, and no overhead at all: no hand-over, no prefill, no verdicts. Rows that
speculate by draft tokens too have both over a target that is as fast as the best measured ``sd``. ``realised_share`` is speedup
over hardware ceiling.

Beside the timed run, a few problems of each row are asked again with ``trace``, untimed, and the drafted steps that were
accepted are read by the demo world's checker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client, StepRecord
from rich.console import Console
from rich.table import Table

from bench.kit.hardware import Hardware, ceilings, device_line, measure_hardware
from bench.kit.intervals import Share
from bench.kit.measure import LEARNS_FROM, ModeReport, Sample, best_baseline, compared, looks_ahead, mean_step_tokens, report
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.rows import AS_IT_IS, PROBLEM_SEED, Change, Row, ask, compare
from bench.kit.serving import (
    TEMPERATURE,
    LatenessSince,
    demo_spec,
    engines_alone,
    late_by_row,
    other_thread_counts,
    serving,
    thread_setting,
    together,
    with_verifiers,
)
from bench.kit.verifiers import chance, grade
from demo.problems import Problem, problems, same_step
from lr_backend.build.paced import paced
from lr_backend.config import LoopConfig
from lr_backend.errors import ConfigError
from lr_backend.hardware.lateness import Lateness
from lr_backend.request import VerifierName

PUBLISHED, PUBLISHED_PACED = PAGES / "ablation.json", PAGES / "ablation_paced.json"
BASELINE = "ar"
PARTS = (
    "sd",
    "lr",
    "lr depth 4",
    "lr width 2",
    "lr own branches off",
    "lr_sd",
    "lr_sd num_draft_tokens 4",
    "lr_sd own branches off",
    "auto",
)
"""Rows at the pace of a system, unless others are named: each part of the loop is on, off or of another size in one of them."""
VERIFIERS: Mapping[str, Mapping[str, Any]] = {"chance": chance(0.5), "grade": grade(9.0)}
"""That the server has beside its own."""


def all_rows(config: LoopConfig, other_threads: Iterable[int] = ()) -> tuple[Row, ...]:
    """Every row that such servers can serve: ``ar`` first, ``auto``, which takes every default, last.

    ``sd``, ``lr`` and ``lr_sd`` are the rows of their group that take every other default.
    """
    alone = [Row(thread_setting(threads), {"mode": "ar"}, Change(threads=threads)) for threads in other_threads]
    sd: dict[str, dict[str, Any]] = {
        "sd": {},
        "sd num_draft_tokens 4": {"num_draft_tokens": 4},
        "sd num_draft_tokens 16": {"num_draft_tokens": 16},
        "sd proposer ngram": {"proposer": "ngram"},
        "sd proposer draft_model": {"proposer": "draft_model"},
    }
    lr: dict[str, dict[str, Any]] = {
        "lr depth 1": {"max_depth": 1},
        "lr depth 2": {"max_depth": 2},
        "lr depth 4": {"max_depth": 4},
        "lr": {},
        "lr width 2": {"width": 2},
        "lr width 4": {"width": 4},
    }
    others = [str(name) for name in (*VerifierName, *config.verifiers) if name != config_verifier(config)]
    lr |= {f"lr verifier {name}": {"verifier": name} for name in others}
    both: dict[str, dict[str, Any]] = {
        "lr_sd num_draft_tokens 4": {"num_draft_tokens": 4},
        "lr_sd num_draft_tokens 16": {"num_draft_tokens": 16},
        "lr_sd proposer ngram": {"proposer": "ngram"},
        "lr_sd proposer draft_model": {"proposer": "draft_model"},
        "lr_sd": {},
    }
    root_alone = Change(own_branches=False)
    return (
        Row(BASELINE, {"mode": "ar"}),
        *alone,
        *(Row(name, {"mode": "sd", **fields}) for name, fields in sd.items()),
        *(Row(name, {"mode": "lr", **fields}) for name, fields in lr.items()),
        Row("lr own branches off", {"mode": "lr"}, root_alone),
        *(Row(name, {"mode": "lr_sd", **fields}) for name, fields in both.items()),
        Row("lr_sd own branches off", {"mode": "lr_sd"}, root_alone),
        *([Row("lossless", {"mode": "lossless"})] if config.lacks_mode("lossless") is None else []),
        Row("auto", {"mode": "auto"}),
    )


def config_verifier(config: LoopConfig) -> str:
    """The verifier of a request that names none."""
    return Row("", {}).request(config).verifier


def chosen(rows: Sequence[Row], names: Sequence[str] | None) -> tuple[Row, ...]:
    """The rows of these names in their usual order, and always the baselines; all of them without names.

    Raises:
        ValueError: a name that no row has.
    """
    known = [row.name for row in rows]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"no row {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    return tuple(row for row in rows if not names or row.name in names or row.fields["mode"] == "ar")


# What the rows say -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """Drafted steps that were compared at the root of some answers, and what the demo world's checker says of the accepted.

    Attributes:
        accepted: of the compared ones.
        wrong: of the accepted ones, those that do not mean what the target's own step says.
    """

    accepted: Share
    wrong: Share

    @classmethod
    def of(cls, answers: Iterable[Iterable[StepRecord]]) -> Checked:
        """Of the steps of each answer, one to a problem."""
        decided = [(number, step) for number, steps in enumerate(answers) for step in steps if compared(step)]
        accepted = [(number, step) for number, step in decided if step.origin == "draft"]
        return cls(
            Share.of((number, step.origin == "draft") for number, step in decided),
            Share.of((number, not same_step(step.target_text or "", step.drafted_text or "")) for number, step in accepted),
        )


@dataclass(frozen=True)
class Line:
    """One row of the result.

    Attributes:
        measured: rates, and the speedup over ``ar`` with its 95 % interval.
        cost_ratio, ceiling, hardware_ceiling: see the module; None at the pace of a system, or where no steps are speculated.
        checked: None where no problem was asked again.
        lateness: of the engines in this row's turns; None where they keep no pace.
    """

    name: str
    fields: Mapping[str, Any]
    measured: ModeReport
    cost_ratio: float | None = None
    ceiling: float | None = None
    hardware_ceiling: float | None = None
    checked: Checked | None = field(default=None)
    lateness: Lateness | None = None

    @property
    def realised_share(self) -> float | None:
        return self.measured.speedup / self.hardware_ceiling if self.hardware_ceiling else None

    def as_dict(self) -> dict[str, object]:
        """What the JSON line says; a figure that does not apply is null."""
        one = self.measured
        line: dict[str, object] = {
            "name": self.name,
            "speedup": _rounded(one.speedup),
            "speedup_low": _rounded(one.speedup_low),
            "speedup_high": _rounded(one.speedup_high),
            "alpha": _rounded(one.step_acceptance_rate),
            "c": _rounded(self.cost_ratio),
            "ceiling": _rounded(self.ceiling),
            "hardware_ceiling": _rounded(self.hardware_ceiling),
            "realised_share": _rounded(self.realised_share),
            "correct": one.correct,
            "total": one.total,
            "token_acceptance_rate": _rounded(one.token_acceptance_rate),
            "mean_accepted_length": _rounded(one.mean_accepted_length),
            "fields": dict(self.fields),
        }
        if self.lateness is not None:
            line |= {"late_share": _rounded(self.lateness.share), "void": self.lateness.void}
        if self.checked is not None and self.checked.accepted.total:
            wrong = self.checked.wrong
            line["accept_rate"] = _rounded(self.checked.accepted.value)
            line["false_accept_rate"] = _rounded(wrong.value) if wrong.total else None
            line["false_accept_interval"] = [_rounded(bound) for bound in wrong.interval()] if wrong.total else None
        return line


def lines(
    rows: Sequence[Row],
    samples: Sequence[Sample],
    hardware: Hardware | None,
    config: LoopConfig,
    checked: Mapping[str, Checked] | None = None,
    lateness: Mapping[str, Lateness] | None = None,
) -> list[Line]:
    """One line a row that has samples, in the order of ``rows``; ``samples`` hold one answer a row and problem.

    Rows that speculate by steps and tokens have the ceilings of a target as fast as the best ``sd`` row, where that gains. Rows
    that hardly look ahead (:data:`bench.kit.measure.MIN_DECIDED_SHARE`) have none.
    """
    found = report(samples, BASELINE)
    kept = [row for row in rows if row.name in found]
    by_tokens = max([1.0, *(found[row.name].speedup for row in kept if row.fields["mode"] == "sd")])
    step_tokens = mean_step_tokens(samples)
    result = []
    for row in kept:
        one, request = found[row.name], row.request(config)
        most: tuple[float | None, float | None] = (None, None)
        alpha = one.step_acceptance_rate
        ahead = request.mode.speculates_steps and looks_ahead([sample.usage for sample in samples if sample.mode == row.name])
        if hardware is not None and ahead and alpha is not None and alpha < 1.0:
            own_branches = row.change.own_branches
            most = ceilings(hardware, request, alpha, step_tokens, by_tokens=by_tokens, own_branches=own_branches)
        cost_ratio = hardware.cost_ratio if hardware is not None else None
        known = (checked or {}).get(row.name), (lateness or {}).get(row.name)
        result.append(Line(row.name, row.fields, one, cost_ratio, *most, *known))
    return result


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


HEADINGS = (
    "row",
    "speedup (95 %)",
    "α",
    "ceiling",
    "hardware ceiling",
    "realised",
    "right",
    "accepts",
    "wrongly accepted (95 %)",
)


def cells(line: Line) -> tuple[str, ...]:
    """The row as people read it, one text for each of :data:`HEADINGS`."""
    one, checked = line.measured, line.checked
    wrong = checked.wrong if checked is not None else Share(0, 0)
    low, high = wrong.interval()
    return (
        f"`{line.name}`",
        f"{one.speedup:.2f} ({one.speedup_low:.2f} to {one.speedup_high:.2f})",
        _number(one.step_acceptance_rate),
        _number(line.ceiling),
        _number(line.hardware_ceiling),
        "" if line.realised_share is None else f"{line.realised_share:.0%}",
        f"{one.correct}/{one.total}",
        f"{checked.accepted.value:.0%}" if checked is not None and checked.accepted.total else "",
        f"{wrong.value:.1%} ({low:.1%} to {high:.1%})" if wrong.total else "",
    )


def markdown(result: Sequence[Line]) -> str:
    """The table of docs/benchmarks/ablation.md."""
    table = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, result)]
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# The run -----------------------------------------------------------------------------------------------------------


def check(client: Client, row: Row, questions: Sequence[Problem]) -> Checked:
    """Ask a few problems again, with records of the steps; not timed."""
    answers = (ask(client, row, problem, index, trace=True)[1] for index, problem in enumerate(questions))
    return Checked.of(answer.steps for answer in answers)


def show(console: Console, result: Sequence[Line], title: str) -> None:
    table = Table(title=title)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for line in result:
        table.add_row(*(cell.strip("`") for cell in cells(line)))
    console.print(table)


def hardware_line(hardware: Hardware) -> str:
    batches = ", ".join(f"{num}: {1e3 * seconds:.2f} ms" for num, seconds in hardware.target_token_s.items())
    return (
        f"a target token by sequences in its batch: {batches}; beside a busy draft {hardware.beside_draft:.2f} times that "
        f"alone; a drafted step costs {hardware.cost_ratio:.2f} of a target step"
    )


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="Answered by every row.")] = 60,
    num_checked: Annotated[int, typer.Option("--checked", min=0, help="Asked again, untimed, to check what was accepted.")] = 8,
    names: Annotated[
        list[str] | None, typer.Option("--row", help="Only these rows; by default all, at a pace the parts.")
    ] = None,
    pace: Annotated[str | None, typer.Option(help="A system whose pace the engines keep, such as h200_sxm.")] = None,
    slow_motion: Annotated[
        float, typer.Option(min=1.0, max=100.0, help="With --pace: this machine takes so many times as long.")
    ] = 1.0,
    output: Annotated[Path, typer.Option(help="Where the figures go; at a pace, by default to ablation_paced.json.")] = PUBLISHED,
    page: Annotated[Path | None, typer.Option(help="Where the table goes as Markdown.")] = None,
) -> None:
    """Print a table, and one JSON line a row, the default last."""
    console = console_of_any_width()
    if pace is None and slow_motion != 1.0:
        raise typer.BadParameter("slow motion is of a pace; give --pace too", param_hint="--slow-motion")
    spec = with_verifiers(demo_spec(), VERIFIERS)
    if pace is not None:
        try:
            spec = paced(spec, pace, slow_motion=slow_motion)
        except ConfigError as error:
            raise typer.BadParameter(error.message, param_hint="--pace") from None
    config = spec.loop_config()
    try:
        rows = chosen(all_rows(config, () if pace else other_thread_counts(spec)), names or (PARTS if pace else None))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--row") from None
    asked = list(islice(problems(PROBLEM_SEED, "test"), LEARNS_FROM + num_problems))
    learned, questions = asked[:LEARNS_FROM], asked[LEARNS_FROM:]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-ablation-")))
        hardware: Hardware | None = None
        if pace is None:
            with engines_alone(spec, folder / "alone") as alone:
                hardware = measure_hardware(alone, spec, learned[0])
        servers = {
            change: stack.enter_context(serving(change.of(spec), folder / str(change), only=change.models))
            for change in dict.fromkeys((AS_IT_IS, *(row.change for row in rows)))
        }
        clients = {change: stack.enter_context(Client(server.grpc_url)) for change, server in servers.items()}
        for row in rows:  # a row that is refused fails here and not in the middle of the run
            for problem in learned if row.fields["mode"] == "auto" else learned[:1]:
                ask(clients[row.change], row, problem, 0)
        late_since = {change: LatenessSince(server) for change, server in servers.items()} if pace else {}
        turns: dict[str, list[Lateness]] = {row.name: [] for row in rows} if pace else {}

        def answered(row: Row) -> None:
            if pace is not None:
                turns[row.name].append(late_since[row.change]())

        samples = [
            replace(sample, latency_s=sample.latency_s / slow_motion)
            for sample in compare(clients, rows, questions, console, answered)
        ]
        late_rows = {name: together(of_row) for name, of_row in turns.items()}
        lateness = together(list(late_rows.values()))
        stepwise = [row for row in rows if row.request(config).mode.speculates_steps]
        with console.status("checking what was accepted"):
            checked = {row.name: check(clients[row.change], row, questions[:num_checked]) for row in stepwise}
    samples, baseline = best_baseline(samples)
    setting = baseline if baseline != BASELINE or pace else thread_setting(spec.target.num_threads)
    result = lines(rows, samples, hardware, config, checked, late_rows)
    show(console, result, f"{num_problems} problems at temperature {TEMPERATURE:g}, one at a time, over {setting}")
    console.print(f"[dim]{hardware_line(hardware) if hardware is not None else f'{spec.pace_label}; {lateness}'}[/]")
    if late_rows:
        console.print(f"[dim]{late_by_row(late_rows)}[/]", highlight=False, soft_wrap=True)
    paced_on = {"pace": spec.pace_label, "late_share": lateness.share, "void": lateness.void}
    document = {
        "num_problems": num_problems,
        "temperature": TEMPERATURE,
        "baseline": setting,
        **({"hardware": hardware.as_dict()} if hardware is not None else paced_on),
        "rows": [line.as_dict() for line in result],
        "device": device_line(spec.target.num_threads),
    }
    write_json(PUBLISHED_PACED if pace and output == PUBLISHED else output, document)
    if page is not None:
        page.write_text(markdown(result), encoding="utf-8")
    for line in result:
        print_line(console, line.as_dict())
