"""The demo world: problems, meanings, pairs, tokenizer and the shipped checkpoints."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import fields
from itertools import islice

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.kit.models import Model
from demo.judge_pairs import change, drafted_pairs, pairs
from demo.problems import (
    LARGEST,
    Meaning,
    boxed,
    check_answer,
    compute,
    meaning,
    patterns,
    phrase,
    problems,
    same_meaning,
    same_step,
    say,
    split_of,
)
from demo.sentences import FRACTIONS, ITEMS, NAMES, OPERATOR, STEPS
from lr_backend.verify.numeric import veto
from tests.support.checkpoints import CHECKPOINTS
from tests.support.right_steps import is_right

ROLES = ("target", "draft", "judge")
TEMPLATES = [(family, template) for family, templates in STEPS.items() for template in templates]
names = st.sampled_from(NAMES)
counts = st.integers(0, LARGEST)


def stated(family: str, template: str, full: Meaning) -> Meaning:
    """``full`` reduced to the fields that ``template`` states."""
    marks = {"subject": "{s}", "other": "{t}", "a": "{a}", "b": "{b}", "result": "{r}", "wrong": "{w}"}
    blank = Meaning(family, full.unit)
    kept = {name: getattr(full if mark in template else blank, name) for name, mark in marks.items()}
    op = full.op if "{o}" in template else OPERATOR.get(family, "")
    return Meaning(family, full.unit, op=op, **kept)


@pytest.mark.parametrize(("family", "template"), TEMPLATES)
@settings(max_examples=5, deadline=None)
@given(s=names, t=names, u=st.sampled_from(ITEMS), a=counts, b=counts, r=counts, w=counts, o=st.sampled_from("+-*/"))
def test_every_phrasing_reads_back(
    family: str, template: str, s: str, t: str, u: str, a: int, b: int, r: int, w: int, o: str
) -> None:
    assume(s != t)
    if "{f}" in template:
        b = 2 + b % len(FRACTIONS)
    full = Meaning(family, u, s, t, a, o, b, r, w)
    assert meaning(phrase(template, full)) == stated(family, template, full)


@pytest.mark.parametrize("family", STEPS)
def test_each_family_has_eight_phrasings_of_the_same_fields(family: str) -> None:
    templates = STEPS[family]
    assert len(set(templates)) == len(templates) >= 8
    full = Meaning(family, "books", "Mia", "Tom", 12, "+", 3, 15, 16)
    assert len({stated(family, template, full) for template in templates}) == 1


def test_no_text_fits_two_phrasings() -> None:
    rng = random.Random(0)
    for problem in islice(problems(5, slip_rate=0.2), 60):
        for step in problem.steps:
            text = say(rng, step.meaning)
            assert sum(pattern.fullmatch(text) is not None for _, pattern in patterns()) == 1


def test_problems_are_seeded() -> None:
    def first(seed: int) -> list[str]:
        return [problem.question + problem.completion for problem in islice(problems(seed), 20)]

    assert first(3) == first(3) != first(4)


@pytest.mark.parametrize("slip_rate", [0.0, 0.3])
def test_solutions_are_right(slip_rate: float) -> None:
    for problem in islice(problems(1, "test", slip_rate), 400):
        assert 4 <= len(problem.steps) <= 14
        assert check_answer(problem, problem.completion)
        assert problem.completion.startswith("<think>\n")
        thought = problem.completion.removeprefix("<think>\n").split("\n</think>\n\n")[0]
        assert thought.split("\n\n") == [step.text for step in problem.steps]
        for step in problem.steps:
            assert meaning(step.text) == step.meaning
            assert is_right(step.text) is not step.slip
            assert max(step.meaning.a, step.meaning.b, step.meaning.result) <= LARGEST
        for slip, mend in zip(problem.steps, problem.steps[1:], strict=False):
            if slip.slip:
                assert (mend.meaning.family, mend.meaning.wrong) == ("mend", slip.meaning.result)
        assert slip_rate or not any(step.slip for step in problem.steps)


def test_splits_do_not_meet() -> None:
    questions = {
        split: {problem.question for problem in islice(problems(2, split), 300)} for split in ("train", "validation", "test")
    }
    for split, asked in questions.items():
        assert {split_of(question) for question in asked} == {split}


@pytest.mark.parametrize(
    ("text", "answer"),
    [("\\boxed{4} then \\boxed{ 36 }", "36"), ("\\boxed{Mia}", "Mia"), ("36", None), ("\\boxed{36", None), ("", None)],
)
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


def test_answer_must_be_exact() -> None:
    problem = next(problems(0))
    assert not check_answer(problem, f"\\boxed{{{problem.answer}0}}")
    assert not check_answer(problem, problem.answer)


@pytest.mark.parametrize(
    ("a", "op", "b", "result"), [(7, "+", 5, 12), (7, "-", 5, 2), (7, "*", 5, 35), (36, "/", 3, 12), (7, "/", 5, None)]
)
def test_compute(a: int, op: str, b: int, result: int | None) -> None:
    assert compute(a, op, b) == result


@given(st.text(max_size=60))
def test_foreign_text_has_no_meaning(text: str) -> None:
    assert meaning(text) is None
    assert not is_right(text)
    assert same_meaning(text, text)
    assert not same_meaning(text, text + "?")


def test_contradicting_words_are_not_read() -> None:
    assert meaning("Mia has 12 pens, and Tom has half as many, and 12 / 2 = 6, so Tom has 6 pens.") is not None
    assert meaning("Mia has 12 pens, and Tom has half as many, and 12 / 3 = 4, so Tom has 4 pens.") is None
    assert meaning("Mia has 12 pens, and Tom has half as many, and 12 / 2 = 6, so Ben has 6 pens.") is None


def test_pairs_are_half_and_half_and_labelled_by_the_checker() -> None:
    drawn = list(islice(pairs(0), 2000))
    assert 0.45 < sum(pair.aligned for pair in drawn) / len(drawn) < 0.55
    assert all(pair.aligned == same_meaning(pair.first, pair.second) for pair in drawn)
    assert all(pair.first != pair.second for pair in drawn)
    made, num_pairs = islice(problems(0, slip_rate=0.15), drawn[-1].problem), Counter(pair.problem for pair in drawn)
    assert [num_pairs[number] for number in range(drawn[-1].problem)] == [len(problem.steps) for problem in made]


def test_drafted_pairs_are_what_a_judge_is_asked_half_of_them_to_be_rejected() -> None:
    draft = Model.load(CHECKPOINTS / "draft", threads=1)
    drawn = list(islice(drafted_pairs(draft, 0, "validation"), 400))
    assert 0.4 < sum(pair.aligned for pair in drawn) / len(drawn) < 0.6
    for pair in drawn:
        assert meaning(pair.first) is not None
        assert pair.aligned == same_meaning(pair.first, pair.second)
        assert pair.first != pair.second
        assert veto(pair.first, pair.second) is None
    # What no made pair holds: a sentence that cannot be read, a person compared with themselves.
    refused = [read for pair in drawn if not pair.aligned for read in [meaning(pair.second)]]
    assert any(read is None for read in refused)
    assert any(read is not None and read.subject == read.other != "" for read in refused)


def test_a_change_changes_the_meaning() -> None:
    rng = random.Random(0)
    for problem in islice(problems(3, slip_rate=0.2), 200):
        for step in problem.steps:
            changed = change(rng, step.meaning)
            assert changed != step.meaning
            assert not same_meaning(step.text, say(rng, changed))
            differ = {f.name for f in fields(changed) if getattr(changed, f.name) != getattr(step.meaning, f.name)}
            assert len(differ) == 1 or differ in ({"subject", "other"}, {"family", "op"})


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / "target")


def test_a_subtle_change_is_a_number_or_who_is_who() -> None:
    rng = random.Random(4)
    for problem in islice(problems(4), 40):
        for step in problem.steps:
            one, two = step.meaning, change(rng, step.meaning, subtly=True)
            if not (one.a or one.b or one.result or one.wrong or one.other):
                continue  # nothing subtle to change
            assert (one.unit, one.op, one.family) == (two.unit, two.op, two.family)
            assert {one.subject, one.other} == {two.subject, two.other}


def test_tokenizer_is_shared_and_small(tokenizer) -> None:  # type: ignore[no-untyped-def]
    contents = {(CHECKPOINTS / role / "tokenizer.json").read_bytes() for role in ROLES}
    assert len(contents) == 1
    assert len(tokenizer) <= 1024


@given(text=st.text(max_size=80))
def test_tokenizer_round_trip(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("text", "special"),
    [
        ("<|im_start|>", True), ("<|im_end|>", True), ("<|endoftext|>", True),
        ("<think>", False), ("</think>", False), ("aligned", False), ("unaligned", False),
    ],
)  # fmt: skip
def test_single_tokens(tokenizer, text: str, special: bool) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == ("" if special else text)


def test_delimiter_hides_inside_tokens(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.tokenize("12.\n\nThen") == ["1", "2", ".ĊĊ", "Then"]


def test_chat_template(tokenizer) -> None:  # type: ignore[no-untyped-def]
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    answered = tokenizer.apply_chat_template([*conversation, {"role": "assistant", "content": "Ho"}], tokenize=False)
    assert answered.endswith("<|im_start|>assistant\nHo<|im_end|>\n")


def test_checkpoints_are_small() -> None:
    files = [path for role in ROLES for path in (CHECKPOINTS / role).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 48 * 2**20


@pytest.mark.parametrize(("role", "least", "most"), [("target", 9e6, 12e6), ("draft", 0.8e6, 1.3e6), ("judge", 2.5e6, 3.5e6)])
def test_checkpoints_load(role: str, least: float, most: float) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / role)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert least <= model.num_parameters() <= most
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 2048
    settings = json.loads((CHECKPOINTS / role / "generation_config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / role)
    assert tokenizer.convert_ids_to_tokens(settings["eos_token_id"]) == ["<|im_end|>", "<|endoftext|>"]
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.6, 0.95, 20)


def test_a_step_names_the_fact_that_it_works_on() -> None:
    for problem in islice(problems(5), 300):
        facts = re.split(r"(?<=[.?]) ", problem.question)
        for step in problem.steps:
            fact, kind = facts[step.fact], step.meaning.kind
            if kind in ("goal", "compare", "conclude"):
                assert fact.endswith("?")
            elif step.meaning.family in ("given", "start", "total"):
                assert fact.startswith(f"{step.meaning.subject} ")  # the sentence that introduced the person
            else:
                assert step.meaning.subject in fact


def test_the_marks_of_the_reasoning_are_no_part_of_a_steps_meaning() -> None:
    rng = random.Random(0)
    for step in next(iter(problems(3, "test"))).steps:
        other = say(rng, step.meaning)
        assert same_step(f"<think>\n{step.text}\n\n", f"\n{other}\n</think>")
        changed = say(rng, change(rng, step.meaning))
        assert not same_step(f"<think>\n{step.text}\n\n", f"<think>\n{changed}\n\n")
