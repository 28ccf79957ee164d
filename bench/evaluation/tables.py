"""A summary as people read it: Markdown, the terminal's tables, and one line of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.evaluation.summary import Row, Summary
from bench.kit.intervals import Estimate, Share


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, what stands below it, and what it means; a column whose cells are all empty is left out."""

    heading: str
    cell: Callable[[Row], str]
    meaning: str


def percent(one: Estimate | Share | float | None, digits: int = 1) -> str:
    """A share, with its interval where it has one."""
    if isinstance(one, Share):
        if not one.total:
            return ""
        one = Estimate(one.value, *one.interval())
    if isinstance(one, Estimate):
        return f"{one.value:.{digits}%} ({one.low:.{digits}%} to {one.high:.{digits}%})"
    return "" if one is None else f"{one:.{digits}%}"


def points(one: Estimate | None) -> str:
    """A difference of shares, in percentage points."""
    return "" if one is None else f"{100 * one.value:+.1f} ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


def times(one: Estimate | float | None) -> str:
    if isinstance(one, Estimate):
        return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"
    return "" if one is None else f"{one:.2f}"


def seconds(found: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.2f}" for value in found.values())


QUALITY = (
    Column("setting", lambda row: row.name, "a mode, and the verifier where one was asked for"),
    Column("answers", lambda row: f"{row.num_answers}", "of all problems and samples"),
    Column("right (95 %)", lambda row: percent(row.accuracy), "Wilson, by problem"),
    Column("less baseline, points (95 %)", lambda row: points(row.difference), "paired by problem, where both answered"),
    Column("p", lambda row: "" if row.p_value is None else f"{row.p_value:.2f}", "of no difference: signs flipped by problem"),
    Column("at the margin", lambda row: row.verdict or "", "non-inferior: the interval lies above minus the margin"),
    Column(
        "no answer",
        lambda row: f"{row.num_without_answer}" if row.num_without_answer else "",
        "nothing to score; counts as wrong",
    ),
    Column("cut", lambda row: f"{row.num_cut}" if row.num_cut else "", "ended by length, deadline or timeout"),
    Column("unscored", lambda row: f"{row.num_unscored}" if row.num_unscored else "", "the scorer failed; counts neither way"),
    Column("tokens", lambda row: f"{row.completion_tokens:.0f}", "mean length of an answer"),
)
SPEED = (
    Column("setting", lambda row: row.name, ""),
    Column("speedup (95 %)", lambda row: times(row.speedup), "seconds of the baseline over its own, same problems"),
    Column("by tokens/s (95 %)", lambda row: times(row.token_speedup), "the same of tokens a second: length set aside"),
    Column("tokens/s (95 %)", lambda row: _rate(row.tokens_per_s), "of a whole request, by the client's clock"),
    Column("E2E p50 / p90 / p99, s", lambda row: seconds(row.latency_s), "submit to last event"),
    Column("first step p50 / p90 / p99, s", lambda row: seconds(row.first_step_s), "by the server's clock"),
    Column(
        "ceiling",
        lambda row: times(row.ceiling),
        "the paper's S1 or S2, over a target like the best sd where tokens are speculated too",
    ),
    Column("hardware ceiling", lambda row: times(row.hardware_ceiling), "the loop without overhead on engines as fast as these"),
    Column("realised", lambda row: percent(row.realised_share, 0), "speedup over hardware ceiling"),
)
SPECULATION = (
    Column("setting", lambda row: row.name, ""),
    Column("α", lambda row: times(row.step_acceptance_rate), "accepted steps over those compared or late at the root"),
    Column("accepted length", lambda row: times(row.mean_accepted_length), "consecutive accepted steps before a correction"),
    Column("token acceptance", lambda row: times(row.token_acceptance_rate), "accepted over verified draft tokens"),
    Column("passes/token", lambda row: times(row.passes_per_token), "target passes"),
    Column("wasted tokens", lambda row: percent(row.wasted_share, 0), "of all that were written"),
    Column(
        "judge agrees (95 %)",
        lambda row: percent(row.checked.by.get("judge")) if row.checked else "",
        "the judge's own verdicts that say what the checker says",
    ),
    Column("verdicts agree (95 %)", lambda row: percent(row.checked.agreed) if row.checked else "", "the same of all verdicts"),
    Column(
        "wrongly accepted (95 %)",
        lambda row: percent(row.checked.wrong) if row.checked else "",
        "accepted steps, other words than the target's, that mean something else; by problem",
    ),
    Column("audits wrong", lambda row: f"{row.false_accepts}/{row.audits}" if row.audits else "", "the server's own audits"),
)
TABLES = (("Quality", QUALITY), ("Speed", SPEED), ("Speculation", SPECULATION))


OF_SPEED = ("Speed", "Speed and accuracy", "Latency")
"""What is void where paced engines were too late, by its title."""


def titled(summary: Summary, name: str) -> str:
    """A table's or plot's title, which says that it is void if it is."""
    return f"{name}: void, the paced engines were late" if summary.speeds_void and name in OF_SPEED else name


def _rate(one: Estimate | None) -> str:
    return "" if one is None else f"{one.value:.0f} ({one.low:.0f} to {one.high:.0f})"


def filled(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[list[Column], list[list[str]]]:
    """The columns that say something, and their cells row by row; rows that say nothing but their name are left out."""
    kept = [column for column in columns if any(column.cell(row) for row in rows)]
    cells = [[column.cell(row) for column in kept] for row in rows]
    return kept, [line for line in cells if any(line[1:])]


def method(summary: Summary) -> list[str]:
    """How it was measured, a sentence each."""
    found = [
        f"{summary.num_problems} problems of {summary.data_set} ({summary.source}), scored by the rule {summary.rule!r}.",
        f"Baseline: {summary.baseline or 'none'}. Margin of non-inferiority: {100 * summary.margin:g} points. "
        f"Speeds from {summary.speeds_from}.",
    ]
    if summary.cost_ratio is not None:
        found.append(f"A drafted step costs {summary.cost_ratio:.2f} of a target step ({summary.cost_ratio_from}).")
    for run in summary.runs:
        found.append(
            f"{run['num_answers']} answers in {run['path']}: {run['endpoint']}, on {run['hardware']}; seed {run['seed']}, "
            f"{run['num_samples']} sample(s), {run['concurrency']} in flight, not streamed, "
            f"{'with' if run['trace'] else 'without'} traces, {run['created']}."
        )
    if summary.num_failures:
        found.append(f"{summary.num_failures} requests failed and are in no figure.")
    return [*found, *summary.notes]


def markdown(summaries: Sequence[Summary], title: str) -> str:
    """The whole report."""
    return "\n".join(_markdown(summaries, title)) + "\n"


def _markdown(summaries: Sequence[Summary], title: str) -> Iterator[str]:
    yield f"# {title}"
    for summary in summaries:
        yield f"\n## {summary.data_set}\n"
        yield from (f"- {line}" for line in method(summary))
        for name, columns in TABLES:
            kept, cells = filled(columns, summary.rows)
            if not cells:
                continue
            yield f"\n### {titled(summary, name)}\n"
            yield f"| {' | '.join(column.heading for column in kept)} |"
            yield f"|{' --- |' * len(kept)}"
            yield from (f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells)
            yield ""
            yield from (f"- **{column.heading}**: {column.meaning}." for column in kept if column.meaning)


def terminal(summary: Summary) -> Iterator[Table]:
    """The tables for a terminal."""
    for name, columns in TABLES:
        kept, cells = filled(columns, summary.rows)
        if not cells:
            continue
        table = Table(title=f"{summary.data_set}: {titled(summary, name).lower()}")
        for place, column in enumerate(kept):
            table.add_column(column.heading, justify="right" if place else "left")
        for line in cells:
            table.add_row(*line)
        yield table


def json_line(summaries: Sequence[Summary]) -> dict[str, Any]:
    """The figures that are compared most often, for a log."""
    return {
        summary.data_set: {
            row.name: {
                "answers": row.num_answers,
                "accuracy": _rounded(row.accuracy),
                "difference": _rounded(row.difference),
                "verdict": row.verdict,
                "speedup": _rounded(row.speedup),
                "tokens_per_s": _rounded(row.tokens_per_s),
                "p50_s": round(row.latency_s["p50"], 4),
                "p99_s": round(row.latency_s["p99"], 4),
                "alpha": None if row.step_acceptance_rate is None else round(row.step_acceptance_rate, 4),
                "realised": None if row.realised_share is None else round(row.realised_share, 4),
            }
            for row in summary.rows
        }
        for summary in summaries
    }


def _rounded(one: Estimate | None) -> list[float] | None:
    return None if one is None else [round(value, 4) for value in (one.value, one.low, one.high)]
