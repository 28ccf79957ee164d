"""What reports make of runs: figures that can be worked out by hand, the joining of runs, and a page that stands alone."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from lr_client import StepRecord
from rich.console import Console

from bench.evaluation import plots
from bench.evaluation.errors import EvaluationError
from bench.evaluation.page import cards, page
from bench.evaluation.quality import line
from bench.evaluation.records import OWN_SERVER, TIMED_OUT, AnswerRecord, Key, RunRecord, ScoreRecord, TaskRecord, TurnRecord
from bench.evaluation.scoring import Outcome
from bench.evaluation.summary import Position, Run, Summary, checked, positions, summarise
from bench.evaluation.tables import json_line, markdown, terminal
from bench.evaluation.tasks import Rule
from bench.kit import hardware
from bench.kit.hardware import Hardware
from lr_backend.hardware.lateness import Lateness
from lr_backend.policy.formulas import ceiling
from lr_backend.request import LookaheadRequest
from lr_backend.trace.schema import Trace
from tests.support.markup import read
from tests.support.traces import NUM_STEPS, numbered_world, traced

HOSTILE = '</title></svg><script>alert("1")</script> & <img src=x onerror=y> {{ 7 * 7 }} [red]'
FREE = Hardware(0.25, {1: 0.005, 2: 0.005, 4: 0.005}, 1.0)
SECONDS = {"ar": 2.0, "sd": 1.6, "lr": 1.0, "lr judge": 1.0, "lr chance_50": 0.8, "lr exact": 1.9}
ALPHA = {"lr": (3, 1), "lr judge": (3, 1), "lr chance_50": (2, 2), "lr exact": (0, 4)}


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Short simulations, where only their use is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "SIMULATED_STEPS", 12)
        patch.setattr(hardware, "SIMULATED_SEEDS", 1)
        yield


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(numbered_world(*(step for step in range(NUM_STEPS) if step % 3)), HOSTILE, mode="lr", max_depth=3)


def usage(name: str, seconds: float) -> dict[str, Any]:
    accepted, rejected = ALPHA.get(name, (0, 0))
    return {
        "completion_tokens": 100,
        "num_steps": 5,
        "num_steps_drafted": accepted + rejected,
        "num_steps_accepted": accepted,
        "num_steps_rejected": {"judge": rejected} if rejected else {},
        "mean_accepted_length": 1.5 if accepted else None,
        "num_draft_tokens": 50 if name == "sd" else 0,
        "num_accepted_tokens": 20 if name == "sd" else 0,
        "num_target_passes": 60 if name == "sd" else 100,
        "num_audited": 2,
        "num_false_accepts": 1 if name == "lr" else 0,
        "first_step_s": seconds / 4,
        "latency_s": seconds,
    }


def run(
    *names: str,
    path: str = "out/a",
    num_problems: int = 10,
    wrong: int = 2,
    trace: Trace | None = None,
    known: bool = True,
    **more: Any,
) -> Run:
    """Answers to ``num_problems`` problems: the last ``wrong`` are wrong in modes that judge steps, the last one in others."""
    tasks = [TaskRecord(id=str(number), question=f"question {number}", answer="1") for number in range(num_problems)]
    turns, answers, scores = [], [], {}
    for name in names:
        mode, _, verifier = name.partition(" ")
        fields = {"mode": mode, **({"verifier": verifier.split("@")[0]} if verifier else {})}
        request = LookaheadRequest.parse({**fields, "text_input": "-", "max_depth": 3}).model_dump(mode="json")
        turns.append(TurnRecord(name=name, fields=fields, request=request if known else None))
        for number in range(num_problems):
            seconds = SECONDS[name] * (1 + number % 3)
            answers.append(
                AnswerRecord(
                    task=str(number), turn=name, sample=0, seed=1, text=HOSTILE, finish_reason="stop", latency_s=seconds,
                    usage=usage(name, seconds), trace=json.loads(trace.as_json()) if trace and mode == "lr" else None,
                    steps=[json.loads(step.model_dump_json()) for step in trace.steps] if trace and mode == "lr" else (),
                )
            )  # fmt: skip
            failed = number >= num_problems - (wrong if name in ALPHA else 1)
            scores[answers[-1].key] = ScoreRecord.of(answers[-1].key, _score(failed))
    record = RunRecord(
        data_set="demo", rule=Rule.BOXED, source="generated, seed 1", fingerprint="f", num_problems=num_problems, start=0,
        turns=tuple(turns), num_samples=1, seed=0, concurrency=1, trace=trace is not None, endpoint="localhost:1",
        hardware="a machine", created="2026-01-01", tasks=tuple(tasks),
    )  # fmt: skip
    return replace(Run(path, record, tuple(answers), scores, 0, FREE), **more)


def _score(failed: bool) -> Any:
    from bench.evaluation.scoring import Score

    return Score(Outcome.WRONG if failed else Outcome.RIGHT, "1")


def row(summary: Summary, name: str) -> Any:
    return next(row for row in summary.rows if row.name == name)


# Figures -----------------------------------------------------------------------------------------------------------


def test_a_summary_has_the_figures_that_can_be_worked_out_by_hand() -> None:
    (found,) = summarise([run("ar", "sd", "lr")])

    lr, sd = row(found, "lr"), row(found, "sd")
    assert (lr.accuracy.value, row(found, "ar").accuracy.value) == (0.8, 0.9)
    assert lr.difference.value == pytest.approx(-0.1) and lr.difference.low < -0.1 < lr.difference.high
    assert (lr.verdict, lr.p_value) == ("undecided", 1.0)
    assert (lr.speedup.value, lr.speedup.low, lr.speedup.high) == pytest.approx((2.0, 2.0, 2.0))
    assert lr.token_speedup.value == pytest.approx(2.0) and sd.speedup.value == pytest.approx(1.25)
    assert lr.tokens_per_s.value == pytest.approx(1000 / 19.0)
    assert lr.latency_s["p50"] == 2.0 and lr.first_step_s["p50"] == 0.5
    assert (lr.step_acceptance_rate, sd.step_acceptance_rate) == (0.75, None)
    assert (sd.token_acceptance_rate, lr.token_acceptance_rate) == (0.4, None)
    assert (lr.completion_tokens, lr.passes_per_token, sd.passes_per_token) == (100.0, 1.0, 0.6)
    assert (lr.audits, lr.false_accepts) == (20, 10)
    assert lr.ceiling == pytest.approx(ceiling(0.75, 0.25, 3)) and sd.ceiling is None
    assert lr.realised_share == pytest.approx(lr.speedup.value / lr.hardware_ceiling)
    assert (found.baseline, found.num_problems, found.cost_ratio) == ("ar", 10, 0.25)


def test_speeds_weigh_a_problem_once_however_many_answers_it_has() -> None:
    one = run("ar", "lr", num_problems=3)  # the last one takes thrice as long as the first, and ``lr`` half of ``ar`` everywhere
    answers = tuple(answer.model_copy(update={"sample": sample}) for answer in one.answers for sample in range(3))
    kept = tuple(answer for answer in answers if (answer.turn, answer.task) != ("lr", "2") or answer.sample == 0)
    (found,) = summarise([replace(one, answers=kept)])

    lr = row(found, "lr")
    assert (lr.num_answers, row(found, "ar").num_answers) == (7, 9)
    for speedup in (lr.speedup, lr.token_speedup):
        assert (speedup.value, speedup.low, speedup.high) == pytest.approx((2.0, 2.0, 2.0))
    assert lr.tokens_per_s.value == pytest.approx(300 / 6.0)


def test_a_step_and_token_ceiling_is_that_of_a_target_as_fast_as_the_best_sd() -> None:
    SECONDS["lr_sd"], ALPHA["lr_sd"] = 1.0, (3, 1)
    (found,) = summarise([run("ar", "sd", "lr", "lr_sd")])

    steps, both = row(found, "lr"), row(found, "lr_sd")
    assert both.ceiling == pytest.approx(1.25 * ceiling(0.75, 1.25 * 0.25, 3))
    assert steps.ceiling < both.ceiling < 1.25 * steps.ceiling
    assert steps.hardware_ceiling < both.hardware_ceiling < 1.25 * steps.hardware_ceiling


def test_a_row_that_hardly_looks_ahead_has_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALPHA, "lr", (1, 1))
    (found,) = summarise([run("ar", "lr")])

    lr = row(found, "lr")
    assert (lr.num_decided, lr.step_acceptance_rate) == (20, 0.5)
    assert lr.ceiling is lr.hardware_ceiling is lr.realised_share is None


def test_unscored_answers_count_neither_way() -> None:
    one = run("ar", "lr")
    lost = ScoreRecord(task="9", turn="ar", sample=0, outcome=Outcome.UNSCORED, note="killed")
    (found,) = summarise([replace(one, scores={**one.scores, Key("9", "ar", 0): lost})])

    assert row(found, "ar").num_unscored == 1 and row(found, "ar").accuracy.value == 1.0
    assert row(found, "lr").difference.value == pytest.approx(-1 / 9)  # over the nine problems that are scored on both sides
    assert "1 answers are unscored and count neither way." in found.notes


def test_without_a_baseline_or_hardware_nothing_is_made_up() -> None:
    (found,) = summarise([run("lr", "sd", hardware=None)])

    assert found.baseline is None and found.cost_ratio is None
    assert all(one.speedup is None and one.difference is None and one.ceiling is None for one in found.rows)
    assert "There is no setting 'ar', so nothing is compared." in found.notes


def test_runs_are_joined_and_told_where_they_are_apart() -> None:
    (found,) = summarise([run("ar", path="out/a"), run("lr", path="out/b")])

    assert [one.name for one in found.rows] == ["ar", "lr"] and row(found, "lr").speedup.value == pytest.approx(2.0)
    assert any(note.startswith("Not of the same run as ar") and note.endswith("lr.") for note in found.notes)
    (twice,) = summarise([run("ar", "lr", path="out/a"), run("ar", "lr", path="out/b")])
    assert row(twice, "lr").num_answers == 20 and row(twice, "lr").num_problems == 10
    # The same answers again are no further evidence: problems are drawn, not answers.
    assert row(twice, "lr").accuracy.low == pytest.approx(row(found, "lr").accuracy.low, abs=0.03)


def test_the_last_word_on_quality_is_whether_a_loss_over_the_margin_is_excluded() -> None:
    (few,) = summarise([run("ar", "lr")])
    (many,) = summarise([run("ar", "lr", num_problems=400, wrong=3)])
    (lost,) = summarise([run("ar", "lr", num_problems=400, wrong=40)])

    assert [line(one, "lr")["loss_over_margin_excluded"] for one in (few, many, lost)] == [False, True, False]
    found = line(many, "lr")
    assert found["difference_points"][0] == -0.5 and found["difference_points"][1] > -1.5 == -found["margin_points"]
    assert found["num_accepted"] / found["num_decided"] == pytest.approx(found["alpha"], abs=1e-4)
    assert found["ar"][0] == 0.9975 and found["wrongly_accepted"] is None
    with pytest.raises(EvaluationError, match="scored in both ar and sd"):
        line(few, "sd")


def test_other_data_sets_have_summaries_of_their_own() -> None:
    one = run("ar", "lr")
    other = replace(one, settings=one.settings.model_copy(update={"data_set": "second"}))

    assert [summary.data_set for summary in summarise([one, other, one])] == ["demo", "second"]


def test_runs_that_do_not_fit_together_are_refused() -> None:
    one, other = run("ar", "lr"), run("ar", "lr", path="out/b")
    turns = tuple(turn.model_copy(update={"fields": {**turn.fields, "max_depth": 8}}) for turn in other.settings.turns)
    with pytest.raises(EvaluationError, match="out/a and out/b mean different settings by 'ar'"):
        summarise([one, replace(other, settings=other.settings.model_copy(update={"turns": turns}))])
    tasks = (TaskRecord(id="0", question="another", answer="1"),)
    with pytest.raises(EvaluationError, match="ask different questions as problem '0'"):
        summarise([one, replace(other, settings=other.settings.model_copy(update={"tasks": tasks}))])


def test_joined_runs_say_where_they_were_not_served_alike() -> None:
    def served(path: str, **changed: Any) -> Run:
        one = run("ar", "lr", path=path)
        settings = {"endpoint": f"{OWN_SERVER}demo", "served_hash": "s", "code_hash": "c", **changed}
        return replace(one, settings=one.settings.model_copy(update=settings))

    mixture = "Runs of different loads or machines are joined: speeds and speedups are over a mixture. Report them apart."
    (alike,) = summarise([served("out/a"), served("out/b")])
    assert not [note for note in alike.notes if "different" in note.lower()]
    assert (alike.runs[0]["served_hash"], alike.runs[0]["code_hash"]) == ("s", "c")
    for changed, note in (
        ({"served_hash": "t"}, "Servers of different specs or checkpoints were asked."),
        ({"code_hash": ""}, "Servers of different code were asked."),
        ({"concurrency": 2}, mixture),
        ({"hardware": "another"}, mixture),
    ):
        (found,) = summarise([served("out/a"), served("out/b", **changed)])
        assert [each for each in found.notes if "different" in each] == [note]
    deeper = tuple(
        turn.model_copy(update={"request": {**(turn.request or {}), **({"max_depth": 5} if turn.name == "lr" else {})}})
        for turn in served("out/b").settings.turns
    )
    (found,) = summarise([served("out/a"), served("out/b", turns=deeper)])
    assert any(note.endswith("so one name stands for different requests: lr.") for note in found.notes)


def test_speeds_of_engines_that_fell_behind_are_void_wherever_they_stand() -> None:
    late, in_time = (run("ar", "lr", lateness=Lateness(100.0, late_s)) for late_s in (2.0, 0.5))
    (void,), (kept,), (unpaced,) = (summarise([one]) for one in (late, in_time, run("ar", "lr")))

    assert (void.speeds_void, kept.speeds_void, unpaced.speeds_void) == (True, False, False)
    assert any(note.startswith("out/a: 2.0% late over 100 s") and "void" in note for note in void.notes)
    assert any(note.startswith("out/a: 0.5% late over 100 s") for note in kept.notes)
    assert not any("late" in note for note in unpaced.notes)
    assert [summary.runs[0]["late_share"] for summary in (void, kept, unpaced)] == [0.02, 0.005, None]
    for summary, one, is_void in ((void, late, True), (kept, in_time, False)):
        html, text = page([summary], [one], "title"), markdown([summary], "title")
        assert ("### Speed: void" in text) == ("Speed: void" in html) == ("Latency: void" in html) == is_void
        assert any("void" in told for _, told in cards(summary)) == is_void
        assert "Quality: void" not in html and any("speed: void" in str(table.title) for table in terminal(summary)) == is_void


def test_speeds_come_from_answers_without_a_trace_where_there_are_such(trace: Trace) -> None:
    slow = run("ar", "lr", path="out/traced", trace=trace)
    slow = replace(slow, answers=tuple(
        one.model_copy(update={"latency_s": 50.0, "trace": json.loads(trace.as_json())}) for one in slow.answers
    ))  # fmt: skip
    (joined,) = summarise([run("ar", "lr"), slow])
    (alone,) = summarise([slow])

    assert joined.speeds_from == "answers without a trace" and row(joined, "lr").latency_s["p99"] <= 3.0
    assert alone.speeds_from == "answers with a trace" and row(alone, "lr").latency_s["p50"] == 50.0
    assert row(joined, "lr").positions == row(alone, "lr").positions != ()


def test_a_trace_says_what_the_request_was_where_nobody_else_does(trace: Trace) -> None:
    (found,) = summarise([run("ar", "lr", trace=trace, known=False)])

    assert row(found, "lr").ceiling == pytest.approx(ceiling(0.75, 0.25, 3))


def step(
    index: int, origin: str, drafted: str | None, target: str | None, verifier: str | None, reason: str = "judge"
) -> StepRecord:
    return StepRecord(
        index=index,
        origin=origin,
        text=drafted or target or "",
        reason=reason,
        verifier=verifier,
        drafted_text=drafted,
        target_text=target,
    )


def test_verdicts_are_held_against_the_checker() -> None:
    steps = [
        step(0, "draft", "a", "A", "judge"),  # right to accept
        step(1, "draft", "a", "b", "judge"),  # wrong to accept
        step(2, "correction", "a", "b", "numbers"),  # right to reject
        step(3, "correction", "a", "A", "judge"),  # wrong to reject
        step(4, "draft", "a ", "a", "same_text", "same_text"),  # the same words: cannot be wrong
        step(5, "draft", "a", "a", None, "exact"),  # nobody had to say
        step(6, "correction", "a", "b", "judge", "late"),
        step(7, "target", None, "b", None, "none"),
    ]

    def alike(one: str, other: str) -> bool:
        return one.strip().lower() == other.strip().lower()

    found = checked([("a", one) for one in steps], alike)

    assert found is not None
    assert (found.agreed.hits, found.agreed.total) == (3, 5)
    assert (found.wrong.hits, found.wrong.total) == (1, 2)
    by = {"judge": (1, 3), "numbers": (1, 1), "same_text": (1, 1)}
    assert {name: (one.hits, one.total) for name, one in found.by.items()} == by
    # All verdicts are of one problem.
    assert found.agreed.worth == 1.0
    silent = [step(8, "correction", "a", "b", "judge", reason) for reason in ("timeout", "garbage", "judge_error", "capped")]
    silent.append(step(9, "correction", "a", "b", "exact", "risk_budget"))
    assert checked([("a", one) for one in (*steps, *silent)], alike) == found
    assert checked([("a", one) for one in steps[5:]], str.__eq__) is None
    accepted = [1, 1, 0, 0, 1, 1, 0]
    assert positions(("a", one) for one in steps) == tuple(Position(index, num, 1, 1.0) for index, num in enumerate(accepted))


def test_acceptance_by_position_has_an_interval_by_problem() -> None:
    steps = [(task, step(0, origin, "a", "A", "judge")) for task, origin in (("a", "draft"), ("b", "correction"))]

    (once,), (often,) = positions(steps), positions(steps * 16)

    assert (often.share.value, often.decided) == (0.5, 32)
    assert often.share.interval() == pytest.approx(once.share.interval(), abs=0.1)


def test_an_answer_that_was_given_up_counts_with_its_seconds_and_without_tokens(trace: Trace) -> None:
    whole = run("ar", "lr", trace=trace)
    given_up = {"finish_reason": TIMED_OUT, "usage": {}, "steps": (), "trace": None, "text": ""}
    late = tuple(one.model_copy(update=given_up if one.task == "0" else {}) for one in whole.answers)
    settings = whole.settings.model_copy(update={"trace": True})

    (found,), (before,) = summarise([replace(whole, answers=late, settings=settings)]), summarise([whole])

    for name in ("ar", "lr"):
        ours, theirs = row(found, name), row(before, name)
        assert (ours.num_cut, ours.completion_tokens, ours.accuracy) == (1, 100, theirs.accuracy)
    # Of a run with traces these alone have none, and are no sample of it.
    assert row(found, "lr").latencies_s == row(before, "lr").latencies_s
    assert row(found, "lr").tokens_per_s.value == pytest.approx(900 / 18.0)


# What is written ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(trace: Trace, short: None) -> tuple[list[Summary], list[Run], str]:
    """Two data sets, traces, verifiers on trial, and hostile texts everywhere."""
    one = run("ar", "sd", "lr", "lr judge", "lr chance_50", "lr exact", trace=trace)
    other = replace(one, settings=one.settings.model_copy(update={"data_set": "second", "source": HOSTILE, "endpoint": HOSTILE}))
    summaries = summarise([one, other])
    return summaries, [one, other], page(summaries, [one, other], HOSTILE)


def test_the_page_stands_alone_and_escapes_all_texts(full: tuple[list[Summary], list[Run], str]) -> None:
    reader = read(full[2])

    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in reader.elements}
    for _, attributes in reader.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("href", "xlink:href", "src") or (value or "").startswith("#"), (name, value)
    assert "url(http" not in full[2] and "@import" not in full[2]
    assert full[2].count("&lt;script&gt;") > 2 and "49" not in reader.texts


def test_the_page_has_every_plot_once_a_data_set_and_no_id_twice(full: tuple[list[Summary], list[Run], str]) -> None:
    reader = read(full[2])

    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = {
        str(value)[1:] for _, attributes in reader.elements for name, value in attributes.items() if name == "xlink:href"
    }
    assert references <= set(ids)
    assert sum(tag == "svg" for tag, _ in reader.elements) == 2 * 5  # plane, trial, latency, position, timeline
    shown = " ".join(reader.texts)
    for text in ("Speed and accuracy", "Verifiers on trial", "Latency", "Acceptance by position", "Timeline of one request"):
        assert text in shown
    assert "lr chance_50" in shown


def test_only_what_is_shown_to_keep_the_quality_has_a_card_and_chance_never() -> None:
    names = ("ar", "lr judge", "lr chance_50", "lr exact")  # chance is the fastest of them
    (few,) = summarise([run(*names)])
    (many,) = summarise([run(*names, num_problems=400, wrong=3)])

    assert {row.verdict for row in few.rows[1:]} == {"undecided"}
    assert [told for _, told in cards(few)] == ["right answers of ar", "tokens a second of ar"]
    assert row(many, "lr chance_50").verdict == "non-inferior"
    assert cards(many)[0] == ("2.00 ×", "lr judge over ar")


def test_the_plots_take_their_colours_from_the_page(full: tuple[list[Summary], list[Run], str]) -> None:
    for drawn in (plots.plane(full[0][0]), plots.latency(full[0][0]), plots.by_position(full[0][0]), plots.trial(full[0][0])):
        assert drawn is not None and drawn.startswith("<svg")
        assert "#0101" not in drawn and "#0102" not in drawn
        assert "var(--ink)" in drawn and "var(--grid)" in drawn
        used = {part.split(")")[0] for part in drawn.split("var(")[1:]}
        assert all(f"{name}:" in full[2] for name in used)


def test_plots_are_left_out_where_they_would_be_empty() -> None:
    (found,) = summarise([run("ar")])

    assert plots.plane(found) is None and plots.by_position(found) is None and plots.trial(found) is None
    html = page([found], [run("ar")], "title")
    read(html)
    assert "Timeline" not in html and "Latency" in html


def test_markdown_terminal_and_json_say_the_same(full: tuple[list[Summary], list[Run], str]) -> None:
    summaries = full[0]
    text = markdown(summaries, "Speed")
    console = Console(width=300, record=True, quiet=False, file=io.StringIO())
    for table in terminal(summaries[0]):
        console.print(table)
    shown = console.export_text()

    for cell in ("2.00 (2.00 to 2.00)", "80.0% (", "-10.0 (", "undecided", "0.75"):
        assert cell in text and cell in shown
    rows = [line for line in text.splitlines() if line.startswith("| lr judge")]
    assert len(rows) == 2 * 3 and len({line.count("|") for line in rows[:1]}) == 1
    line = json_line(summaries)
    assert line["demo"]["lr"]["speedup"] == [2.0, 2.0, 2.0] and line["second"]["ar"]["accuracy"][0] == 0.9
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    whole = json.loads(json.dumps(summaries[0].as_dict(), allow_nan=False))
    assert "latencies_s" not in whole["rows"][0] and whole["rows"][2]["checked"]["agreement"]["total"] > 0
