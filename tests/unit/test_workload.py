"""Workload files: what they say, and what is refused in one line."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.emulated.workload import PUBLISHED, Workload, published
from lr_backend.errors import ConfigError

SETS = ("aime24", "amc23", "gsm8k", "humaneval", "gpqa", "mt-bench", "livecodebench")
PAIRS = ("r1", "qwen3")
ACCEPTANCE = {
    "r1": (0.47, 0.58, 0.63, 0.44, 0.35, 0.48, 0.47),
    "qwen3": (0.43, 0.53, 0.50, 0.39, 0.30, 0.38, 0.40),
}
"""Table 1 of the paper, by pair, in the order of ``SETS``."""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Workload.load(path)
    assert "\n" not in caught.value.message
    return caught.value.message


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    share = st.floats(0.0, 1.0)
    rate = draw(share)
    return Workload(
        acceptance_rate=rate,
        sibling_acceptance_rate=draw(st.none() | share),
        exact_rate=rate * draw(share),
        length_bias=draw(st.floats(-1.0, 1.0)),
        token_agreement=draw(share),
        word_agreement=draw(share),
        ngram_hit_rate=draw(st.floats(0.0, 0.8)),
        prompt_tokens=draw(st.integers(3, 10_000)),
        step_tokens=draw(st.integers(2, 500)),
        step_spread=draw(st.floats(0.0, 1.0, exclude_max=True)),
        num_steps=draw(st.integers(1, 1000)),
        answer_tokens=draw(st.integers(0, 5000)),
        verdict_prefix_tokens=draw(st.integers(0, 500)),
        verdict_tokens=draw(st.integers(0, 500)),
    )


@given(workloads())
def test_a_workload_survives_the_way_through_its_file(workload: Workload) -> None:
    assert Workload.parse(tomllib.loads(workload.as_toml("of a test")), "a test") == workload
    assert workload.as_toml("of a test") == "# of a test\n" + workload.as_toml()


def test_a_file_is_loaded_by_its_path_and_leaves_out_what_it_likes(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.toml", "acceptance_rate = 0.5\nstep_tokens = 12\n")
    assert Workload.load(path) == Workload.load(str(path)) == Workload(0.5, step_tokens=12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "workload mine.toml: acceptance_rate: Field required"),
        ("acceptance_rate = 1.5", "workload mine.toml: acceptance_rate=1.5 is out of range"),
        ("acceptance_rate = 'high'", "workload mine.toml: acceptance_rate: "),
        ("acceptance_rate = 0.5\nmood = 1", "workload mine.toml: mood: "),
        ("acceptance_rate = 0.5\nstep_tokens = 1", "workload mine.toml: step_tokens=1 is out of range"),
        ("acceptance_rate = 0.5\nstep_tokens = 2.5", "workload mine.toml: step_tokens: "),
        ("acceptance_rate = 0.5\nprompt_tokens = 2", "workload mine.toml: prompt_tokens=2 is out of range"),
        ("acceptance_rate = 0.5\nngram_hit_rate = 0.9", "workload mine.toml: ngram_hit_rate=0.9 is out of range"),
        (
            "acceptance_rate = 0.5\nsibling_acceptance_rate = -1",
            "workload mine.toml: sibling_acceptance_rate=-1.0 is out of range",
        ),
        (
            "acceptance_rate = 0.5\nexact_rate = 0.6",
            "workload mine.toml: exact_rate=0.6 is part of acceptance_rate=0.5, and more than it",
        ),
        ("acceptance_rate = nan", "workload mine.toml: acceptance_rate=nan is out of range"),
        ("acceptance_rate", "workload mine.toml cannot be read: "),
        ("[other]\nacceptance_rate = 0.5", "workload mine.toml: "),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert refused(written(tmp_path / "mine.toml", text)).startswith(said)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.toml").startswith("workload none.toml cannot be read: ")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert refused(tmp_path / "binary.toml").startswith("workload binary.toml cannot be read: ")


def test_a_name_that_nobody_knows_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^no workload named 'essays'; known: r1-aime24, .*; a file's name ends in .toml$"):
        Workload.load("essays")


def test_every_data_set_and_pair_of_the_paper_has_one_with_its_published_acceptance() -> None:
    rates = {f"{pair}-{name}": rate for pair in PAIRS for name, rate in zip(SETS, ACCEPTANCE[pair], strict=True)}
    assert len(rates) == 14
    assert {name: one.acceptance_rate for name, one in published().items()} == rates
    assert all(Workload.load(name) == one for name, one in published().items())
    assert PUBLISHED.read_text(encoding="utf-8").startswith("# ")


def test_nobody_changes_what_others_load() -> None:
    assert Workload.load("r1-gsm8k") is not published()["r1-gsm8k"]


@pytest.mark.parametrize("name", [field.name for field in fields(Workload)])
def test_every_field_is_explained(name: str) -> None:
    assert Workload.__doc__ is not None
    assert f"        {name}: " in Workload.__doc__


def test_no_step_and_no_answer_is_longer_than_is_said() -> None:
    workload = replace(published()["qwen3-gsm8k"], num_steps=7)
    assert workload.longest_step >= workload.step_tokens * (1.0 + workload.step_spread)
    assert workload.max_tokens >= 7 * workload.longest_step + asdict(workload)["answer_tokens"]
