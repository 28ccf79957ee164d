"""What is wanted of the demo models, and when a figure misses it."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.kit.intervals import Share
from demo import check
from demo.check import Figure, report

TARGET = Figure("target right", Share(467, 500), 0.92)
DRAFT = Figure("draft right", Share(180, 500), 0.3, 0.7)


@pytest.mark.parametrize(
    ("figure", "wanted", "is_missed"),
    [
        (TARGET, "at least 92%", False),
        (Figure("a little below", Share(455, 500), 0.92), "at least 92%", False),
        (Figure("below", Share(430, 500), 0.92), "at least 92%", True),
        (DRAFT, "30% to 70%", False),
        (Figure("above", Share(400, 500), 0.3, 0.7), "30% to 70%", True),
        (Figure("anything goes", Share(0, 500)), "", False),
    ],
    ids=lambda each: each.name if isinstance(each, Figure) else "",
)
def test_a_figure_is_missed_where_its_interval_lies_outside(figure: Figure, wanted: str, is_missed: bool) -> None:
    assert figure.wanted == wanted
    assert figure.is_missed is is_missed


@pytest.mark.parametrize("is_missed", [False, True])
def test_a_missed_figure_fails_the_check_and_is_named(is_missed: bool) -> None:
    judge = Figure("judge agrees", Share(90 if is_missed else 100, 100), 0.98)
    text = StringIO()
    assert report(Console(file=text, width=110), [TARGET, DRAFT, judge], 1.0) == int(is_missed)
    told = text.getvalue().splitlines()
    assert ("not as wanted: judge agrees" in told) is is_missed
    assert json.loads(told[-1])["judge agrees"]["share"] == (0.9 if is_missed else 1.0)


def test_pairs_of_one_problem_are_no_independent_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "judge_all", lambda judge, steps: [True] * len(steps))

    found = check.judge_figures(None, 200)  # type: ignore[arg-type]

    assert (found.agree.hits, found.agree.total) == (found.aligned_accepted.total, 200)
    assert found.changed_accepted.hits == found.changed_accepted.total == 200 - found.aligned_accepted.total
    # Of each problem there are many pairs, and all agree.
    assert found.aligned_accepted.worth is not None and found.aligned_accepted.worth < found.aligned_accepted.total / 2
