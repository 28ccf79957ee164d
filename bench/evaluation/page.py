"""The report as one HTML page: no script, nothing loaded from elsewhere, every text escaped; dark or light as its reader is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bench.evaluation import plots
from bench.evaluation.records import AnswerRecord
from bench.evaluation.statistics import NonInferiority
from bench.evaluation.summary import Run, Summary
from bench.evaluation.tables import TABLES, filled, method, percent, times, titled
from lr_backend.errors import TraceError
from lr_backend.request import Mode
from lr_backend.trace.analysis import analyse
from lr_backend.trace.html import ORIGINS, OUTCOMES, Timeline, lay_out, milliseconds, question
from lr_backend.trace.schema import Trace

PREFERRED = (Mode.LR, Mode.LR_SD, Mode.SD, Mode.AR)
"""Whose timeline is shown: that of the first of these modes that has a trace."""


@dataclass(frozen=True)
class Example:
    """One traced request, placed."""

    turn: str
    trace: Trace
    timeline: Timeline
    question: str


def page(summaries: Sequence[Summary], runs: Sequence[Run], title: str) -> str:
    """The whole page."""
    environment = Environment(loader=PackageLoader("bench.evaluation", "."), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"ms": milliseconds}
    sections = []
    for number, summary in enumerate(summaries):
        found = [
            (
                "Speed and accuracy",
                "One point a setting; the bars are 95 % intervals. Up and to the right is better.",
                plots.plane(summary),
            ),
            (
                "Verifiers on trial",
                "How much each verifier lets through, and what that does to the answers.",
                plots.trial(summary),
            ),
            ("Latency", "How many answers were there after so many seconds.", plots.latency(summary)),
            (
                "Acceptance by position",
                f"From traced answers; places with fewer than {plots.MIN_DECIDED} decisions are left out. Shaded: Wilson's 95 %.",
                plots.by_position(summary),
            ),
        ]
        sections.append(
            {
                "summary": summary,
                "method": method(summary),
                "cards": cards(summary),
                # Ids must differ between the data sets of one page.
                "plots": [
                    (titled(summary, name), note, Markup(_numbered(svg, number))) for name, note, svg in found if svg is not None
                ],
                "tables": [(titled(summary, name), *filled(columns, summary.rows)) for name, columns in TABLES],
                "example": example([run for run in runs if run.settings.data_set == summary.data_set]),
            }
        )
    template = environment.get_template("report.html.jinja")
    outcomes = [(outcome.value, text) for outcome, text in OUTCOMES.items()]
    return template.render(title=title, sections=sections, outcomes=outcomes, origins=ORIGINS)


def _numbered(svg: str, number: int) -> str:
    found = svg
    for name in ("plane", "latency", "position", "trial"):
        for before in ('id="', 'href="#', "url(#"):
            found = found.replace(f"{before}{name}-", f"{before}{name}{number}-")
    return found


def cards(summary: Summary) -> list[tuple[str, str]]:
    """(figure, what it is) for the top of the page: of the baseline, and of the fastest that is shown to be non-inferior.

    Where none is shown, no setting has a card. Chance as a verifier never has one.
    """
    found: list[tuple[str, str]] = []
    others = [row for row in summary.rows if row.name != summary.baseline and plots.series(row) != "by-chance"]
    shown = [row for row in others if row.verdict == NonInferiority.SHOWN and row.speedup is not None]
    best = max(shown, key=lambda row: row.speedup.value if row.speedup else 0.0, default=None)
    void = ", void: the paced engines were late" if summary.speeds_void else ""
    if best is not None:
        found.append((f"{times(best.speedup.value if best.speedup else None)} ×", f"{best.name} over {summary.baseline}{void}"))
        if best.accuracy is not None:
            found.append((percent(best.accuracy.value), f"its right answers: {best.verdict}"))
        if best.step_acceptance_rate is not None:
            found.append((percent(best.step_acceptance_rate, 0), "of its drafted steps accepted"))
    base = next((row for row in summary.rows if row.name == summary.baseline), None)
    if base is not None and base.accuracy is not None and base.tokens_per_s is not None:
        found.append((percent(base.accuracy.value), f"right answers of {base.name}"))
        found.append((f"{base.tokens_per_s.value:.0f}", f"tokens a second of {base.name}{void}"))
    return found


def example(runs: Sequence[Run]) -> Example | None:
    """The traced answer of median latency in the first preferred mode that has one."""
    by_mode: dict[str, list[AnswerRecord]] = {}
    for run in runs:
        modes = {turn.name: str(turn.fields.get("mode")) for turn in run.settings.turns}
        for answer in run.answers:
            if answer.trace is not None:
                by_mode.setdefault(modes.get(answer.turn, ""), []).append(answer)
    for mode in PREFERRED:
        if answers := by_mode.get(mode):
            middle = median(answer.latency_s for answer in answers)
            chosen = min(answers, key=lambda answer: abs(answer.latency_s - middle))
            try:
                trace = Trace.from_json(json.dumps(chosen.trace))
            except TraceError:
                return None  # a newer server's trace: the figures do not need it
            return Example(chosen.turn, trace, lay_out(trace, analyse(trace)), question(trace))
    return None
