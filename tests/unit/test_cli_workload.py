"""``lookahead workload``: a file from traces, or of the paper; and ``lookahead plan`` over it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lr_backend.cli.app import app
from lr_backend.emulated.workload import Workload, published
from lr_backend.errors import TraceError
from lr_backend.plan import table
from lr_backend.plan.fit_texts import fit_workload
from lr_backend.plan.simulation import Policy, Scenario, simulate
from lr_backend.request import Mode
from lr_backend.trace.schema import Trace
from tests.support.texts import share_looked_up

TEXTS = Workload(
    0.7,
    token_agreement=0.8,
    word_agreement=0.4,
    ngram_hit_rate=0.3,
    prompt_tokens=120,
    step_tokens=24,
    num_steps=30,
    answer_tokens=60,
    verdict_prefix_tokens=20,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})


def recorded(policy: Policy = Policy(), seeds: range = range(3)) -> list[Trace]:  # noqa: B008
    return [trace for seed in seeds for trace in simulate(Scenario(TEXTS), policy, seed, trace=True).traces]


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    drafting = Policy(Mode.SD, fields={"proposer": "draft_model", "num_draft_tokens": 4})
    return [*recorded(), *recorded(drafting, range(1)), *recorded(Policy(Mode.AR), range(1))]


@pytest.fixture(scope="module")
def files(traces: list[Trace], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, arguments = tmp_path_factory.mktemp("traces"), []
    for number, trace in enumerate(traces):
        (folder / f"{number}.json").write_text(trace.as_json())
        arguments += ["--trace", str(folder / f"{number}.json")]
    return arguments


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LEAST_STEPS", 60)


def test_the_workload_of_the_traces_is_found_again(traces: list[Trace]) -> None:
    found = fit_workload(traces)
    assert found.acceptance_rate == pytest.approx(TEXTS.acceptance_rate, abs=0.1)
    assert found.token_agreement == pytest.approx(TEXTS.token_agreement, abs=0.05)
    assert found.ngram_hit_rate == pytest.approx(share_looked_up(TEXTS, (0, 1, 2, 0, 0)), rel=0.06)
    assert found.answer_tokens == pytest.approx(TEXTS.answer_tokens, abs=1)
    assert (found.prompt_tokens, found.step_tokens, found.num_steps) == (120, 24, 30)


def test_texts_that_repeat_nothing_are_seen_to() -> None:
    plain = Scenario(Workload(0.7, num_steps=30))
    assert fit_workload(simulate(plain, Policy(), trace=True).traces).ngram_hit_rate < 0.01


def test_words_that_always_follow_one_another_are_hits_up_to_what_a_workload_can_say(traces: list[Trace]) -> None:
    def droning(trace: Trace) -> Trace:
        steps = tuple(step.model_copy(update={"text": " so it is\n\n", "target_text": None}) for step in trace.steps)
        return trace.model_copy(update={"steps": steps})

    assert fit_workload([droning(trace) for trace in traces]).ngram_hit_rate == 0.8


def test_what_is_printed_is_the_file_of_what_was_fitted(traces: list[Trace], files: list[str]) -> None:
    result = run("workload", *files, "--name", "mine")
    assert result.exit_code == 0, result.output
    first, *_ = result.output.splitlines()
    assert first == f"# mine: fitted to {len(traces)} traces"
    found, fitted = Workload.parse(tomllib.loads(result.output), "printed"), fit_workload(traces)
    assert found.acceptance_rate == pytest.approx(fitted.acceptance_rate, abs=1e-4)
    assert found.num_steps == fitted.num_steps
    assert run("workload", *files[:2]).output.startswith("# fitted to 1 trace\n")


def test_it_is_written_where_it_is_to_be(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    result = run("workload", *files, "-o", path)
    assert (result.exit_code, result.output) == (0, f"wrote {path}\n")
    assert path.read_text() == run("workload", *files).output
    assert Workload.load(path).num_steps == TEXTS.num_steps


def test_a_published_one_is_printed_by_its_name(tmp_path: Path) -> None:
    for name, one in published().items():
        result = run("workload", name)
        assert result.output.startswith(f"# {name}\n")
        assert Workload.parse(tomllib.loads(result.output), name) == one
    assert run("workload", "r1-gpqa", "--output", tmp_path / "gpqa.toml").exit_code == 0
    assert Workload.load(tmp_path / "gpqa.toml") == published()["r1-gpqa"]


def test_without_either_all_that_there_are_are_listed() -> None:
    result = run("workload")
    assert result.exit_code == 0
    for name, one in published().items():
        (line,) = [line for line in result.output.splitlines() if f" {name} " in line]
        assert f"{one.acceptance_rate:.2f}" in line


def test_a_trace_that_is_none_is_one_clear_line(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"schema": "something else"}')
    (tmp_path / "ar.json").write_text(recorded(Policy(Mode.AR), range(1))[0].as_json())
    for path, said in (
        ("none.json", "cannot read"),
        ("bad.json", "not a trace of version 2"),
        ("ar.json", "no trace with lookahead among 1"),
    ):
        result = run("workload", *(files if path != "ar.json" else []), "--trace", tmp_path / path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["essays"], 1, "no workload named 'essays'; known: r1-aime24"),
        (["none.toml"], 1, "workload none.toml cannot be read"),
        (["r1-gpqa", "--trace", "some.json"], 2, "r1-gpqa is published and needs no --trace"),
        (["r1-gpqa", "--name", "mine"], 2, "--name goes with --trace"),
        (["--output", "some.toml"], 2, "--output goes with a name or with --trace"),
        (["r1-gpqa", "--output", "some.json"], 2, "--output some.json: the name of a workload's file ends in .toml"),
        (["r1-gpqa", "--output", "/none/some.toml"], 1, "cannot write /none/some.toml: No such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: list[str], status: int, said: str) -> None:
    result = run("workload", *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_traces_with_too_little_are_refused_by_the_fit_too() -> None:
    with pytest.raises(TraceError, match="no trace with lookahead among 0"):
        fit_workload([])


# The plan over one --------------------------------------------------------------------------------------------------------

SMALL = ["--steps", "20", "--step-tokens", "6", "--step-spread", "0", "--k", "2", "--json"]


@pytest.mark.usefixtures("few_texts")
def test_a_plan_goes_over_a_workload_by_name_or_file(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text("acceptance_rate = 0.9\n")
    good, poor = (
        json.loads(run("plan", "--workload", name, "--c", "0.1", *SMALL).output)["speedup"]
        for name in (tmp_path / "good.toml", "qwen3-gpqa")
    )
    assert good > poor + 0.2


@pytest.mark.usefixtures("few_texts")
def test_what_is_given_counts_more_than_what_the_workload_says() -> None:
    plain, given, alone = (
        run("plan", *texts, "--c", "0.1", *SMALL).output
        for texts in (["--workload", "qwen3-gpqa"], ["--workload", "qwen3-gpqa", "--alpha", "0.9"], ["--alpha", "0.9"])
    )
    assert json.loads(given)["speedup"] > json.loads(plain)["speedup"] + 0.2
    assert json.loads(given)["speedup"] == pytest.approx(json.loads(alone)["speedup"], rel=0.2)


@pytest.mark.usefixtures("few_texts")
def test_it_goes_together_with_a_system() -> None:
    result = run("plan", "--workload", "r1-gsm8k", "--system", "h200_sxm", "--steps", "20", "--k", "3", "--json")
    assert result.exit_code == 0, result.output
    assert "not a run on h200_sxm" in json.loads(result.output)["label"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--workload", "r1-gpqa", "--trace", "some.json"], 2, "--workload is what --trace is fitted to; give one of the two"),
        (["--workload", "r1-gpqa"], 2, "--alpha or --workload and either --c or --system are needed"),
        (["--workload", "essays", "--c", "0.1"], 1, "no workload named 'essays'"),
    ],
)
def test_a_plan_over_none_is_refused(arguments: list[str], status: int, said: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == status
    assert said in result.stderr
