"""``make demo``: one problem streamed live, then problems answered in every mode but ``lossless``, all through a real Triton.

First at production pace, as on the hardware that the server is for (:mod:`bench.kit.pace`), and then at this CPU's own pace.
There the baseline of every speedup is ``ar`` with ``stream=false``: one uninterrupted engine request, nothing else running, at
the thread setting that is best for it. So a second server runs the target alone at each other thread setting; ``ar`` is asked of
both, and the faster one is the baseline. Modes take turns, so that a noisy machine is noisy to all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from lr_client import Client, FinishEvent, Options
from lr_client.render import ConsoleRenderer
from rich.console import Console
from rich.table import Table

from bench.kit import pace
from bench.kit.hardware import cost_ratio
from bench.kit.measure import LEARNS_FROM, ModeReport, Sample, best_baseline, report
from bench.kit.output import console_of_any_width, print_line, write_json
from bench.kit.serving import (
    ALONE,
    MAX_TOKENS,
    REQUEST_TIMEOUT_S,
    TEMPERATURE,
    ask,
    demo_spec,
    engines_alone,
    other_thread_counts,
    serving,
    thread_setting,
    with_threads,
)
from bench.kit.turns import in_turns
from demo.problems import Problem, problems
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.policy.formulas import ceiling
from lr_backend.request import LookaheadRequest
from lr_backend.trace.analysis import analyse
from lr_backend.trace.html import page
from lr_backend.trace.schema import Trace

MODES = ("ar", "sd", "lr", "lr_sd", "auto")
PROBLEM_SEED = 2025
WARM_UP_PROBLEMS = 2
LEAST_FOR_INTERVAL = 6
"""Problems. Over fewer a bootstrap's interval is too narrow to hold 95 %."""
PACED_PROBLEMS, LEAST_PACED_PROBLEMS = 12, LEAST_FOR_INTERVAL
"""Problems at production pace: so many where nothing is in slow motion, and fewer in proportion."""
SHORT = ("mode", "right", "tokens/s", "seconds", "speedup (95 %)")
"""Columns of every table."""
TIMELINE = "demo-timeline.html"


def ceilings(rows: Mapping[str, ModeReport], c: float, max_depth: int) -> dict[str, float]:
    """What step speculation could gain at most, were parallel steps and verdicts free; ``lr_sd`` over a target like ``sd``."""
    found = {}
    for mode, factor in (("lr", 1.0), ("lr_sd", max(1.0, rows["sd"].speedup))):
        alpha = rows[mode].step_acceptance_rate
        if alpha is not None and alpha < 1.0 and 0.0 < c <= 1.0:
            found[mode] = ceiling(alpha, c, max_depth, by_tokens=factor)
    return found


def show_one(client: Client, problem: Problem, console: Console) -> Trace | None:
    """Stream one answer step by step, coloured by origin, by steps and draft tokens throughout; returns its trace."""
    console.rule("[bold]one question, live, at production pace: lr_sd")
    console.print(f"[bold]{problem.question}[/]\n", highlight=False)
    renderer = ConsoleRenderer(console, legend=True)
    options = Options(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=1, trace=True, **pace.ROWS["lr_sd"])
    recorded = None
    try:
        with client.stream(problem.question, options, timeout_s=REQUEST_TIMEOUT_S) as stream:
            for event in stream:
                renderer.show(event)
                if isinstance(event, FinishEvent):
                    recorded = event.trace
                    break
    finally:
        renderer.close()
    console.print(f"[dim]right answer: {problem.answer}[/]")
    trace = Trace.from_json(recorded) if recorded else None
    if trace is not None:
        console.print(f"[yellow]{trace.pace}[/]\n", highlight=False, soft_wrap=True)
    return trace


def compare(
    clients: Mapping[str, Client], baselines: Mapping[str, Client], questions: list[Problem], console: Console
) -> list[Sample]:
    """Every mode on every problem, in turns whose order rotates."""
    turns = [*((mode, client, mode) for mode, client in clients.items()), *((name, c, "ar") for name, c in baselines.items())]
    samples = []
    for index, problem, (name, client, mode) in in_turns(turns, questions, "at this CPU's own pace", console):
        samples.append(ask(client, problem, {"mode": mode}, index, name=name)[0])
    return samples


def table(rows: Mapping[str, ModeReport], title: str) -> Table:
    """The comparison as people read it."""
    view = Table(title=title)
    rates = ("step acc.", "accepted length", "token acc.", "passes/token")
    for name in (*SHORT, *rates):
        view.add_column(name, justify="left" if name == "mode" else "right")
    for mode, row in rows.items():
        view.add_row(
            mode,
            f"{row.correct}/{row.total}",
            f"{row.tokens_per_s:.0f}",
            f"{row.latency_s:.2f}",
            _speedup(row),
            _number(row.step_acceptance_rate),
            _number(row.mean_accepted_length),
            _number(row.token_acceptance_rate),
            _number(row.passes_per_token),
        )
    return view


def small_table(rows: Mapping[str, ModeReport], title: str) -> Table:
    """The same of what is not the point: as little as there is to know."""
    view = Table(title=title, style="dim", box=None)
    for name in SHORT:
        view.add_column(name, style="dim", justify="left" if name == "mode" else "right")
    for mode, row in rows.items():
        view.add_row(mode, f"{row.correct}/{row.total}", f"{row.tokens_per_s:.0f}", f"{row.latency_s:.2f}", _speedup(row))
    return view


def _speedup(row: ModeReport) -> str:
    interval = f" ({row.speedup_low:.2f} to {row.speedup_high:.2f})" if row.total >= LEAST_FOR_INTERVAL else ""
    return f"{row.speedup:.2f}{interval}"


def figures(rows: Mapping[str, ModeReport]) -> dict[str, dict[str, object]]:
    """The comparison as JSON has it: without an interval where the problems are too few for one."""
    none = {"speedup_low": None, "speedup_high": None}
    return {mode: row.as_dict() | (none if row.total < LEAST_FOR_INTERVAL else {}) for mode, row in rows.items()}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def at_production_pace(
    spec: EmbeddedDeployment,
    questions: list[Problem],
    num_problems: int | None,
    console: Console,
    folder: Path,
) -> tuple[pace.Paced, Trace | None]:
    """One answer live, and every row on some problems; also the live one's trace."""
    probes, questions = questions[:2], questions[2:]
    with ExitStack() as stack:
        with console.status("starting Triton at the pace of H200s: lookahead, target, draft and judge"):
            stage = stack.enter_context(pace.stage(spec, pace.SYSTEM, probes, folder, console))
        urls = f"Triton {stage.server.grpc_url} (gRPC), {stage.server.http_url} (HTTP): lookahead, target, draft, judge"
        console.print(urls, highlight=False)
        if stage.spec.slow_motion > 1.0:
            slower = f"in slow motion: {stage.spec.slow_motion:g} times as long here; tables have the hardware's seconds"
            console.print(f"[dim]{slower}[/]", highlight=False)
        trace = show_one(stage.client, questions[0], console)
        fewer = max(LEAST_PACED_PROBLEMS, int(PACED_PROBLEMS / stage.spec.slow_motion))
        asked = questions[1 : 1 + (num_problems or fewer)]
        pace.learn(stage, questions[-LEARNS_FROM:], console)
        found = pace.compare(stage, asked, console)
    like = f"{len(asked)} problems at production pace, temperature {TEMPERATURE:g}, one at a time"
    console.print(table(found.rows, like))
    share = found.realised_share("auto")
    console.print("[dim]speedup: seconds of ar, one uninterrupted request with nothing else running, over the row's;[/]")
    console.print(
        f"[dim]auto: the request that chooses nothing, after {LEARNS_FROM} others; {share:.0%} of what the loop gains where "
        "nothing but engines takes time[/]"
    )
    pace.note_pace(console, found)
    console.print()
    return found, trace


def on_this_cpu(
    spec: EmbeddedDeployment,
    questions: list[Problem],
    learned: list[Problem],
    console: Console,
    folder: Path,
) -> dict[str, Any]:
    """The modes unpaced, each against the best setting of ``ar``.

    Args:
        learned: answered before by the mode that learns.
    """
    with console.status("timing draft and target alone"), engines_alone(spec, folder / "alone") as alone:
        c = cost_ratio(alone, spec, questions[0])
    with ExitStack() as stack:
        with console.status("starting Triton without a pace"):
            server = stack.enter_context(serving(spec, folder / "all"))
            client = stack.enter_context(Client(server.grpc_url))
            baselines = {}
            for threads in other_thread_counts(spec):
                other = stack.enter_context(serving(with_threads(spec, threads), folder / f"ar-{threads}", only=ALONE))
                baselines[thread_setting(threads)] = stack.enter_context(Client(other.grpc_url))
            for index in range(WARM_UP_PROBLEMS):
                for mode in MODES:
                    ask(client, questions[0], {"mode": mode}, index)
                for other_client in baselines.values():
                    ask(other_client, questions[0], {"mode": "ar"}, index)
        with console.status("auto learns what pays"):
            for index, problem in enumerate(learned):
                ask(client, problem, {"mode": "auto"}, index)
        samples = compare(dict.fromkeys(MODES, client), baselines, questions[1:], console)
    samples, baseline = best_baseline(samples)
    rows = {mode: found for mode, found in report(samples, "ar").items() if mode in MODES}
    setting = baseline if baseline != "ar" else thread_setting(spec.target.num_threads)
    most = ceilings(rows, c, LookaheadRequest.parse({**spec.loop_config().defaults, "text_input": "any"}).max_depth)
    console.print(small_table(rows, f"this CPU at its own pace, {len(questions) - 1} problems: over {setting}, its best setting"))
    return {"baseline": setting, "cost_ratio": c, "ceilings": most, "modes": figures(rows)}


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="At this CPU's own pace.")] = 12,
    paced_problems: Annotated[int | None, typer.Option(min=1, help="At production pace; by default 6 to 12.")] = None,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/demo.json"),
) -> None:
    """Serve the demo models and compare the modes, at production pace and at this CPU's own."""
    console = console_of_any_width()
    most = 3 + max(num_problems, paced_problems or PACED_PROBLEMS) + LEARNS_FROM
    questions = list(islice(problems(PROBLEM_SEED, "test"), most))
    with tempfile.TemporaryDirectory(prefix="lookahead-demo-") as name:
        folder = Path(name)
        found, trace = at_production_pace(demo_spec(), questions, paced_problems, console, folder / "paced")
        asked, learned = questions[: num_problems + 1], questions[-LEARNS_FROM:]
        own = on_this_cpu(demo_spec(), asked, learned, console, folder)
    paced = found.as_dict()
    modes = {mode: paced["modes"][mode] | figure for mode, figure in figures(found.rows).items()}
    write_json(output, {"temperature": TEMPERATURE, **own, "pace": {**paced, "modes": modes}})
    console.print(f"written to {output}")
    if trace is not None:
        timeline = output.with_name(TIMELINE)
        timeline.write_text(page(trace, analyse(trace)), encoding="utf-8")
        console.print(f"the live answer's timeline: {timeline}")
    print_line(console, {"speedup_at_production_pace": {name: round(row.speedup, 4) for name, row in found.rows.items()}})


if __name__ == "__main__":
    typer.run(main)
