"""Runs against a fake endpoint: what is asked, in which order, what is kept, and how a run goes on after what stopped it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import typer
from grpc import StatusCode
from lr_client import Client
from lr_client.client import DEFAULT_TIMEOUT_S
from rich.console import Console
from typer.testing import CliRunner

from bench.evaluation import asking, grading, quality
from bench.evaluation import command as evaluation_command
from bench.evaluation.asking import ask_all
from bench.evaluation.command import Settings, answer_limit, app, run_evaluation
from bench.evaluation.errors import EndpointLost, EvaluationError
from bench.evaluation.records import ANSWERS, FAILURES, LATENESS, OWN_SERVER, RUN, TIMED_OUT, Key, LatenessRecord, RunDirectory
from bench.evaluation.sandbox import RunResult
from bench.evaluation.scoring import Outcome, Score
from bench.evaluation.summary import Run
from bench.evaluation.tasks import CodeTest, DataSet, Rule, Task, load
from bench.evaluation.turns import option_fields, rounds, seed_of, turns
from bench.kit.served import code_hash
from bench.kit.serving import demo_spec
from lr_backend.cli import app as cli
from lr_backend.cli import checkout
from lr_backend.engine import Role
from lr_backend.hardware.lateness import Lateness
from tests.support.fake_lookahead import Abort, Fail, FakeServer, Gate, Reply

USAGE = {"completion_tokens": 20, "latency_s": 0.1, "num_steps": 2, "num_target_passes": 20, "first_step_s": 0.05}
STEPS = [
    {"index": 0, "origin": "draft", "text": "We are done.", "reason": "judge", "verifier": "judge", "num_tokens": 5,
     "drafted_text": "We are done.", "target_text": "We are done!"},
    {"index": 1, "origin": "correction", "text": "b", "reason": "judge", "verifier": "judge", "num_tokens": 5,
     "drafted_text": "a", "target_text": "b"},
]  # fmt: skip
NAMES = ("ar", "lr")


def script(text: str) -> list[Any]:
    return [*(Reply(step=step) for step in STEPS), Reply(text=text), Reply(finish="stop", usage=USAGE)]


@pytest.fixture(scope="module")
def data() -> DataSet:
    return load("demo", seed=1, end=4)


@pytest.fixture
def server(data: DataSet) -> Iterator[FakeServer]:
    """Answers every problem right but the last one."""
    answers = [task.answer for task in data.tasks[:-1]] + ["no"]
    scripts = {task.question: script(f"\\boxed{{{said}}}") for task, said in zip(data.tasks, answers, strict=True)}
    with FakeServer(scripts) as running:
        yield running


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PAUSES_S", (0.0,))


def settings(data: DataSet, **changed: Any) -> Settings:
    return Settings(data, turns(NAMES, (), {"temperature": 0.6}), **{"trace": False, **changed})


def evaluate(server: FakeServer, out: Path, chosen: Settings) -> RunDirectory:
    return run_evaluation(chosen, out, url=server.url, deployment=None, console=Console(quiet=True))


def keys(path: Path) -> list[Key]:
    return [answer.key for answer in RunDirectory(path).answers()]


# What is asked -----------------------------------------------------------------------------------------------------


def test_turns_rotate_from_problem_to_problem_and_never_mix() -> None:
    found = list(rounds(["a", "b"], ["ar", "sd", "lr"], num_samples=1, concurrency=1))
    assert found == [[Key("a", turn, 0)] for turn in ("ar", "sd", "lr")] + [[Key("b", turn, 0)] for turn in ("sd", "lr", "ar")]

    crowded = list(rounds(["a", "b", "c"], ["ar", "lr"], num_samples=2, concurrency=4))
    assert [len(group) for group in crowded] == [4, 4, 2, 2]
    assert all(len({key.turn for key in group}) == 1 for group in crowded)
    assert [group[0].turn for group in crowded] == ["ar", "lr", "lr", "ar"]
    assert Counter(key for group in crowded for key in group) == Counter(
        Key(task, turn, sample) for task in "abc" for turn in ("ar", "lr") for sample in (0, 1)
    )


def test_no_two_answers_share_a_seed() -> None:
    found = {seed_of(run, Key(task, turn, sample)) for run in (0, 1) for task in "ab" for turn in NAMES for sample in range(3)}
    assert len(found) == 24 and all(0 <= seed < 2**48 for seed in found)


def test_verifiers_multiply_the_modes_that_judge_steps() -> None:
    found = turns(("ar", "lr"), ("judge", "embedding_90"), {"max_tokens": 9})

    assert [turn.name for turn in found] == ["ar", "lr judge", "lr embedding_90"]
    assert found[2].fields == {"max_tokens": 9, "mode": "lr", "verifier": "embedding_90"}


@pytest.mark.parametrize(
    ("modes", "verifiers", "message"),
    [
        (("fast",), (), "no mode 'fast': there are auto, ar, sd, lr, lr_sd, lossless"),
        (("lr",), ("judge", "judge"), "must be there and differ"),
        (("ar", "ar"), (), "must be there and differ"),
        ((), (), "none given"),
    ],
)
def test_bad_turns_are_refused(modes: tuple[str, ...], verifiers: tuple[str, ...], message: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(message)):
        turns(modes, verifiers, {})


def test_options_are_fields_of_the_request() -> None:
    fields = option_fields(["max_depth=8", "proposer=ngram", "deterministic=true"])
    assert fields == {"max_depth": 8, "proposer": "ngram", "deterministic": True}
    for text, message in (("depth", "give name=value"), ("deep=8", "give name=value"), ("seed=1", "seed is set by")):
        with pytest.raises(EvaluationError, match=message):
            option_fields([text])


def test_the_endpoint_gets_the_turns_fields_and_the_answers_seed(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    evaluate(server, tmp_path / "run", settings(data, trace=True))

    warm_ups, asked = server.requests[:2], server.requests[2:]
    assert [seen.inputs["mode"] for seen in warm_ups] == [["ar"], ["lr"]]
    assert len(asked) == 8 and {name: asked[0].inputs[name] for name in ("mode", "stream", "trace", "seed")} == {
        "mode": ["ar"],
        "stream": [False],
        "trace": [True],
        "seed": [seed_of(0, Key("0", "ar", 0))],
    }
    assert [seen.inputs["mode"][0] for seen in asked] == ["ar", "lr", "lr", "ar"] * 2


# What is kept ------------------------------------------------------------------------------------------------------


def test_a_run_keeps_answers_steps_and_scores(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    directory = evaluate(server, tmp_path / "run", settings(data, samples=2))

    answers = directory.answers()
    assert len(answers) == len(set(keys(directory.path))) == 16
    assert answers[0].use.completion_tokens == 20 and answers[0].latency_s > 0 and answers[0].finish_reason == "stop"
    assert [step.verifier for step in answers[0].step_records] == ["judge", "judge"]
    outcomes = {key: record.outcome for key, record in directory.scores().items()}
    assert outcomes == {key: Outcome.WRONG if key.task == "3" else Outcome.RIGHT for key in keys(directory.path)}
    run = directory.run()
    assert [task.question for task in run.tasks] == [task.question for task in data.tasks]
    assert (run.data_set, run.rule, run.num_samples, run.endpoint) == ("demo", Rule.BOXED, 2, server.url)


@pytest.mark.parametrize(
    ("text", "more", "outcome"),
    [
        ("<think>\\boxed{RIGHT}? Or", {}, Outcome.NO_ANSWER),
        ("\\boxed{RIGHT}? Or", {"reasoning_tokens": 20}, Outcome.NO_ANSWER),  # it was opened by the prompt
        ("<think>so</think>\\boxed{RIGHT}, since", {"reasoning_tokens": 9}, Outcome.RIGHT),
        ("\\boxed{RIGHT}, since", {}, Outcome.RIGHT),  # it does not reason
    ],
)
def test_what_was_cut_inside_its_reasoning_has_no_answer(
    server: FakeServer, data: DataSet, tmp_path: Path, text: str, more: dict[str, int], outcome: Outcome
) -> None:
    said = text.replace("RIGHT", data.tasks[0].answer)
    server.scripts[data.tasks[0].question] = [Reply(text=said), Reply(finish="length", usage={**USAGE, **more})]

    scores = evaluate(server, tmp_path / "run", settings(data)).scores()

    assert scores[Key("0", "ar", 0)].outcome is outcome
    assert scores[Key("1", "ar", 0)].outcome is Outcome.RIGHT


def test_a_complete_run_asks_nothing_and_may_be_scored_again(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    directory = evaluate(server, tmp_path / "run", settings(data))
    num_asked = len(server.requests)

    evaluate(server, tmp_path / "run", settings(data))
    assert len(server.requests) == num_asked
    grading.grade_all(directory, data, again=True)
    assert len((directory.path / "scores.jsonl").read_text().splitlines()) == 16 and len(directory.scores()) == 8


# What goes wrong ---------------------------------------------------------------------------------------------------


def test_an_endpoint_that_dies_midway_costs_nothing_that_was_measured(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {task.question: script(f"\\boxed{{{task.answer}}}") for task in data.tasks}
    chosen, directory = settings(data), RunDirectory(tmp_path / "run")
    seen: list[Key] = []
    with FakeServer(scripts) as first, Client(first.url) as client:
        directory.path.mkdir()
        directory.begin(chosen.record(first.url))

        stream, asked = client.stream, count(1)

        def dies(*args: Any, **kwargs: Any) -> Any:
            if next(asked) == 4:
                first.die_seen_by(client._channel)
            return stream(*args, **kwargs)

        monkeypatch.setattr(client, "stream", dies)
        told = r"3 requests failed in a row.*3 of 8 answers are kept in .*run; the same command"
        with pytest.raises(EndpointLost, match=told) as lost:
            ask_all(client, chosen.plan(first.url), directory, progress=seen.append, pause=lambda seconds: None)
    assert "no answer from" in lost.value.message
    assert keys(directory.path) == seen and len(seen) == 3
    assert len(directory.failures()) == 3 and "ServerUnreachable" in directory.failures()[0].error

    with FakeServer(scripts) as second:  # at another address
        evaluate(second, directory.path, chosen)
        assert len(second.requests) == 2 + 5  # two to warm up
    assert {answer.endpoint for answer in directory.answers()} == {first.url, second.url}
    assert Counter(keys(directory.path)) == Counter(key for group in chosen.plan().rounds for key in group)


def test_what_was_answered_before_the_endpoint_died_is_scored(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    server.scripts[data.tasks[2].question] = [Fail("LR_TARGET_UNAVAILABLE: gone")]
    server.scripts[data.tasks[3].question] = [Fail("LR_TARGET_UNAVAILABLE: gone")]

    with pytest.raises(EndpointLost, match="gone"):
        evaluate(server, tmp_path / "run", settings(data))
    directory = RunDirectory(tmp_path / "run")
    assert [record.outcome for record in directory.scores().values()] == [Outcome.RIGHT] * 4
    with directory.appending(LATENESS) as late:  # as the server of each part of a run at a pace leaves one
        late.add(LatenessRecord(paced_s=90.0, late_s=1.5))
        late.add(LatenessRecord(paced_s=10.0, late_s=0.5))
    read = Run.read(directory)
    assert (len(read.answers), read.num_failures) == (4, 3)
    assert (read.lateness, read.is_late) == (Lateness(100.0, 2.0), True)

    server.scripts |= {task.question: script(f"\\boxed{{{task.answer}}}") for task in data.tasks}
    evaluate(server, tmp_path / "run", settings(data))
    assert Run.read(directory).num_failures == 0 and len(directory.scores()) == 8


def test_a_request_that_fails_alone_is_told_and_asked_again(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    question = data.tasks[1].question
    good = server.scripts[question]
    server.scripts[question] = [Fail("LR_ENGINE_REJECTED: too long")]

    with pytest.raises(EvaluationError, match=r"2 requests failed .*failures.jsonl says why"):
        evaluate(server, tmp_path / "run", settings(data))
    assert len(keys(tmp_path / "run")) == 6

    server.scripts[question] = good
    evaluate(server, tmp_path / "run", settings(data))
    assert len(keys(tmp_path / "run")) == 8


def test_an_overloaded_endpoint_is_asked_again_after_a_pause(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    question = data.tasks[0].question
    good = server.scripts[question]
    server.scripts[question] = [Fail("LR_OVERLOADED: full")]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        server.scripts[question] = good

    with Client(server.url) as client:
        found = asking.ask(client, settings(data).plan(), Key("0", "ar", 0), pause)

    assert found.key == Key("0", "ar", 0) and pauses == [0.0]


def test_an_answer_that_is_not_there_in_time_is_wrong_and_kept(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    server.scripts[data.tasks[1].question] = [
        Reply(text=f"<think></think>\\boxed{{{data.tasks[1].answer}}}"),
        Abort(StatusCode.DEADLINE_EXCEEDED, ""),
    ]

    directory = evaluate(server, tmp_path / "run", settings(data))

    (ours,) = (answer for answer in directory.answers() if answer.key == Key("1", "ar", 0))
    assert (ours.finish_reason, directory.failures()) == (TIMED_OUT, [])
    assert directory.scores()[ours.key].outcome is Outcome.NO_ANSWER
    assert Settings(data, ()).timeout_s == DEFAULT_TIMEOUT_S
    with pytest.raises(EndpointLost, match=r"does not answer within 910 s"), Client(server.url) as client:
        asking.warm_up(client, settings(data).plan(), "1")


def test_an_endpoint_that_hangs_has_no_late_answers(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    for task in data.tasks:
        server.scripts[task.question] = [Abort(StatusCode.DEADLINE_EXCEEDED, "")]
    server.models.clear()
    directory = RunDirectory(tmp_path / "run")

    with directory.alone(), Client(server.url) as client, pytest.raises(EndpointLost, match=r"3 requests failed in a row"):
        asking.ask_all(client, settings(data).plan(), directory)

    assert list(directory.answers()) == [] and len(directory.failures()) >= asking.MAX_FAILURES


def test_a_refused_turn_and_a_dead_address_end_a_run_at_once(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    server.scripts[data.tasks[0].question] = [Fail("LR_INVALID_REQUEST: mode=lr: not here")]
    with pytest.raises(EvaluationError, match=r"refuses the turn 'ar': mode=lr: not here"):
        evaluate(server, tmp_path / "refused", settings(data))
    server.die()
    with pytest.raises(EndpointLost, match="does not answer"):
        evaluate(server, tmp_path / "dead", settings(data))


def test_half_a_line_is_cut_off_and_done_again(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    directory = evaluate(server, tmp_path / "run", settings(data))
    path = directory.path / ANSWERS
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert len(directory.answers()) == 7

    evaluate(server, tmp_path / "run", settings(data))
    assert len(directory.answers()) == 8 and path.read_bytes().endswith(b"}\n")
    assert path.read_bytes().splitlines()[:7] == whole.splitlines()[:7]


def test_a_broken_line_in_the_middle_is_named(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    directory = evaluate(server, tmp_path / "run", settings(data))
    path = directory.path / ANSWERS
    lines = path.read_text().splitlines()
    lines[2] = '{"task": 3}'
    path.write_text("\n".join(lines) + "\n")

    with pytest.raises(EvaluationError, match=r"answers.jsonl, line 3: task: "):
        directory.answers()


def test_a_run_of_other_settings_is_refused_with_what_differs(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    evaluate(server, tmp_path / "run", settings(data))

    hotter = Settings(data, turns(NAMES, (), {"temperature": 1.0}), seed=2, trace=False)
    with pytest.raises(EvaluationError) as refused:
        evaluate(server, tmp_path / "run", hotter)
    assert "seed was 0 and is 2" in refused.value.message
    assert "turns ar temperature was 0.6 and is 1.0; turns lr temperature was 0.6 and is 1.0" in refused.value.message
    fewer = Settings(data, turns(("ar",), (), {"temperature": 0.6}), trace=False)
    with pytest.raises(EvaluationError, match=r"turns lr was \{.*\} and is not there"):
        evaluate(server, tmp_path / "run", fewer)
    with pytest.raises(EvaluationError, match=r"fingerprint was .* and is "):
        evaluate(server, tmp_path / "run", settings(load("demo", seed=2, end=4)))
    document = tmp_path / "run" / "run.json"
    document.write_text(json.dumps(json.loads(document.read_text()) | {"hardware": "another machine"}))
    with pytest.raises(EvaluationError, match='hardware was "another machine" and is '):
        evaluate(server, tmp_path / "run", settings(data))


def test_a_run_goes_on_at_another_address_and_with_no_other_spec(data: DataSet, tmp_path: Path) -> None:
    def begun(name: str, endpoint: str) -> bool:
        directory = RunDirectory(tmp_path / name)
        directory.path.mkdir(exist_ok=True)
        return not directory.begin(settings(data).record(endpoint))

    paced = f"{OWN_SERVER}demo.h200_sxm"
    assert begun("own", paced) and not begun("own", paced)
    with pytest.raises(EvaluationError, match=f'served was "{paced}" and is "{OWN_SERVER}demo"'):
        begun("own", f"{OWN_SERVER}demo")
    with pytest.raises(EvaluationError, match='and is "by its address"'):
        begun("own", "localhost:8001")
    assert begun("theirs", "localhost:8001") and not begun("theirs", "localhost:9001")


def test_a_run_does_not_go_on_with_models_that_were_trained_anew(data: DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(b"old")
    demo = demo_spec()
    engines = {role.value: demo.engine(role).model_copy(update={"checkpoint": folder}) for role in Role}
    own = demo.model_copy(update=engines)

    before = settings(data).record(f"{OWN_SERVER}demo", own).compared()
    same = settings(data).record(f"{OWN_SERVER}demo", own).compared()
    weights.write_bytes(b"new weights")
    after = settings(data).record(f"{OWN_SERVER}demo", own).compared()

    assert before == same
    assert {name for name in before if before[name] != after[name]} == {"served_hash"}


def test_a_run_does_not_go_on_under_other_code(data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, chosen = RunDirectory(tmp_path), settings(data)
    directory.begin(chosen.record(f"{OWN_SERVER}demo", demo_spec()))
    assert directory.begin(chosen.record(f"{OWN_SERVER}demo", demo_spec()))

    monkeypatch.setattr(evaluation_command, "code_hash", lambda: "of other code")
    with pytest.raises(EvaluationError, match=r"other code than today's.* delete it .*or give another directory with --out"):
        directory.begin(chosen.record(f"{OWN_SERVER}demo", demo_spec()))
    before_hashes = directory.run().model_dump(exclude={"code_hash"})
    (tmp_path / RUN).write_text(json.dumps(before_hashes))
    with pytest.raises(EvaluationError, match="other code than today's"):
        directory.begin(chosen.record(f"{OWN_SERVER}demo", demo_spec()))
    assert chosen.record("localhost:8001").code_hash == ""


def test_code_is_told_by_what_its_files_hold_and_are_called(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    source, unread = tmp_path / "native" / "draw.c", tmp_path / "__pycache__.pyc"
    seen = []
    for content in ("int x;", "int y;"):
        source.write_text(content)
        unread.write_text(content)
        seen.append(code_hash(tmp_path))
        unread.write_text("compiled")
        assert code_hash(tmp_path) == seen[-1]
    source.rename(tmp_path / "draw.c")
    assert len({*seen, code_hash(tmp_path)}) == 3


def test_a_directory_is_written_by_one_run_and_holds_nothing_else(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").alone(), pytest.raises(EvaluationError, match="another run is writing"):
        evaluate(server, tmp_path / "run", settings(data))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(EvaluationError, match="holds other files and no run"):
        evaluate(server, tmp_path / "mine", settings(data))
    with pytest.raises(EvaluationError, match=f"holds no run: there is no {RUN}"):
        RunDirectory(tmp_path / "mine").run()


def test_a_run_whose_time_is_up_keeps_what_it_has(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    chosen, directory = settings(data), RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    with Client(server.url) as client:
        outcome = ask_all(client, chosen.plan(), directory, time_is_up=lambda: len(server.requests) >= 5)

    assert (outcome.num_answered, outcome.num_failed, outcome.time_is_up) == (5, 0, True)
    assert len(keys(directory.path)) == 5


def test_an_answer_waits_for_no_slower_one_and_an_interrupt_for_none(server: FakeServer, data: DataSet, tmp_path: Path) -> None:
    chosen, directory, never = settings(data, concurrency=4), RunDirectory(tmp_path / "run"), Gate()
    server.scripts[data.tasks[0].question] = [never, *script("late")]
    directory.path.mkdir()
    kept: list[Key] = []

    def interrupted(key: Key) -> None:
        kept.append(key)
        if len(kept) == 3:
            assert never.reached.wait(30.0)
            raise KeyboardInterrupt

    with Client(server.url) as client, pytest.raises(KeyboardInterrupt):
        ask_all(client, chosen.plan(), directory, concurrency=4, progress=interrupted)

    assert keys(directory.path) == kept and {key.task for key in kept} == {"1", "2", "3"}
    held = next(seen for seen in server.requests if seen.inputs["text_input"] == [data.tasks[0].question])
    assert held.was_cancelled() and not never.opened.is_set()


def test_a_scorer_that_hangs_leaves_the_others_scored_and_is_asked_again(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSet("mine", Rule.MATH, (Task("1", "a", "1"), Task("2", "b", "2")), "here")
    server.scripts |= {"a": script("\\boxed{1}"), "b": script("\\boxed{2}")}
    hung = ["2"]

    def score_all(jobs: Any, **_: Any) -> Any:
        for answer, gold, text in jobs:
            yield answer, Score(Outcome.UNSCORED, note="killed") if gold in hung else Score(Outcome.RIGHT, text)

    monkeypatch.setattr(grading.workers, "score_all", score_all)
    directory = evaluate(server, tmp_path / "run", settings(data))
    assert sorted(record.outcome for record in directory.scores().values()) == ["right", "right", "unscored", "unscored"]

    hung.clear()
    evaluate(server, tmp_path / "run", settings(data))
    assert {record.outcome for record in directory.scores().values()} == {Outcome.RIGHT}
    assert len((directory.path / "scores.jsonl").read_text().splitlines()) == 6  # the right ones were not scored again


@pytest.mark.parametrize(("held", "warned"), [((), True), (("network", "processes", "files"), False)])
def test_programs_that_had_the_network_are_told_of(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...], warned: bool
) -> None:
    code = CodeTest("def f(x):\n", "f", "def check(f):\n    pass\n")
    data = DataSet("mine", Rule.CODE, (Task("1", "a", "", code),), "here")
    server.scripts["a"] = script("    return x\n")
    monkeypatch.setattr(grading.sandbox, "run_program", lambda program, limits: RunResult(True, "", held))
    console = Console(record=True, width=200)

    run_evaluation(settings(data), tmp_path / "run", url=server.url, deployment=None, console=console)

    assert ("2 programs could reach the network" in console.export_text()) is warned


# The commands ------------------------------------------------------------------------------------------------------


def test_the_command_asks_scores_and_reports(server: FakeServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = CliRunner().invoke(
        app, ["eval", "--url", server.url, "--end", "4", "--data-seed", "1", "--modes", "ar,lr", "--out", str(run), "--no-trace"]
    )
    assert asked.exit_code == 0, asked.output
    assert "6 right, 2 wrong" in asked.output
    assert all("max_tokens" not in seen.inputs for seen in server.requests)  # the server's own limit

    told = CliRunner().invoke(app, ["report", str(run), "--margin", "0.05"])
    assert told.exit_code == 0, told.output
    line = json.loads(told.output.strip().splitlines()[-1])
    assert line["demo"]["lr"]["accuracy"][0] == 0.75 and line["demo"]["lr"]["answers"] == 4
    assert {path.name for path in run.iterdir()} >= {"report.md", "report.json", "report.html", FAILURES}


def test_the_demo_has_the_limit_of_its_published_figures() -> None:
    assert answer_limit(None, None) == {"max_tokens": 640}
    assert answer_limit(None, "localhost:1") == {}
    assert answer_limit(9, None) == answer_limit(9, "localhost:1") == {"max_tokens": 9}


def test_the_command_on_quality_ends_in_its_verdict(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "DATA_SEED", 1)
    command = typer.Typer()
    command.command()(quality.main)
    arguments = ["--url", server.url, "--problems", "4", "--mode", "lr", "--margin", "90", "--out", str(tmp_path / "run")]
    arguments += ["--output", str(tmp_path / "quality.json")]

    told = CliRunner().invoke(command, arguments)

    assert told.exit_code == 0, told.output
    found = json.loads(told.output.strip().splitlines()[-1])
    assert (found["num_problems"], found["ar"][0], found["lr"][0], found["difference_points"][0]) == (4, 0.75, 0.75, 0.0)
    name = f"demo, lr, 4 problems, temperature 0.6, {server.url}"
    assert json.loads((tmp_path / "quality.json").read_text()) == {name: found}
    assert (found["margin_points"], found["loss_over_margin_excluded"]) == (90.0, True)
    assert {seen.inputs["mode"][0] for seen in server.requests} == {"ar", "lr"}
    assert all("max_tokens" not in seen.inputs for seen in server.requests)

    other = ["--problems", "2", "--samples", "2", "--concurrency", "2", "--max-tokens", "9", "--out", str(tmp_path / "other")]
    told = CliRunner().invoke(command, [*arguments, *other])
    assert told.exit_code == 0, told.output
    more = f"demo, lr, 2 problems, temperature 0.6, {server.url}, 2 samples, 2 in flight, max_tokens 9"
    kept = json.loads((tmp_path / "quality.json").read_text())
    assert (list(kept), kept[name]) == ([name, more], found)


def test_the_main_command_hands_on_and_fails_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["eval", "--dataset", str(tmp_path / "none.jsonl")], "no data set"),
        (["eval", "--option", "max_depth"], "give name=value"),
        (["report", str(tmp_path)], "holds no answers yet"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.app(arguments)
        told = capsys.readouterr().err
        assert ended.value.code == 1 and message in told and len(told.strip().splitlines()) == 1
    with pytest.raises(SystemExit) as ended:
        cli.app(["eval", "--help"])
    assert ended.value.code == 0 and "--dataset" in capsys.readouterr().out


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("no", name="pebble")

    monkeypatch.setattr(checkout.importlib, "import_module", missing)
    with pytest.raises(SystemExit) as ended:
        cli.app(["report", "somewhere"])
    assert ended.value.code == 2 and "pebble is not installed: pip install -e '" in capsys.readouterr().err
