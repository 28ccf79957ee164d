"""The second domain: readable back exactly, right, seeded, and in the demo world's words."""

from __future__ import annotations

import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo import sentences
from demo.problems import boxed, compute
from demo.problems import same_step as demo_same_step
from demo.second_domain import (
    FACTS,
    OPERATOR,
    QUESTIONS,
    STEPS,
    Meaning,
    meaning,
    pairs,
    patterns,
    phrase,
    problems,
    same_meaning,
    same_step,
)
from demo.sentences import NAMES
from demo.tokenizer import load_tokenizer
from tests.support.checkpoints import CHECKPOINTS

TEMPLATES = [(family, template) for family, templates in STEPS.items() for template in templates]
names = st.lists(st.sampled_from(NAMES), min_size=3, max_size=3, unique=True)
counts = st.integers(0, 99)


@given(st.sampled_from(TEMPLATES), names, counts, counts, counts)
def test_every_phrasing_reads_back(one: tuple[str, str], people: list[str], a: int, b: int, r: int) -> None:
    family, template = one
    s, m, t = people
    stated = {"s": s, "m": m, "t": t, "a": a, "b": b, "r": r}
    kept = {name: value for name, value in stated.items() if f"{{{name}}}" in template}
    text = phrase(template, Meaning(family, s, m, t, a, b, r))

    assert meaning(text) == Meaning(family, **kept)  # type: ignore[arg-type]
    assert sum(pattern.fullmatch(text) is not None for _, pattern in patterns()) == 1


@pytest.mark.parametrize("family", STEPS)
def test_each_family_has_eight_phrasings_of_the_same_fields(family: str) -> None:
    fields = {frozenset(re.findall(r"\{([a-z])\}", template)) for template in STEPS[family]}
    assert len(set(STEPS[family])) == 8 and len(fields) == 1


def is_right(step_text: str) -> bool:
    """Whether a step is readable and its arithmetic holds. Steps without arithmetic hold."""
    read = meaning(step_text)
    return read is not None and (read.family not in OPERATOR or compute(read.a, OPERATOR[read.family], read.b) == read.r)


def test_problems_are_right_and_seeded() -> None:
    for problem in islice(problems(1), 200):
        assert all(is_right(text) and meaning(text) == step for text, step in problem.steps)
        assert problem.steps[-1][1].r == int(problem.answer) and boxed(problem.completion) == problem.answer
        assert all(2 <= step.r <= 99 for _, step in problem.steps if step.r)
    assert list(islice(problems(2), 5)) == list(islice(problems(2), 5)) != list(islice(problems(3), 5))


def test_pairs_are_what_they_say() -> None:
    found = list(islice(pairs(1), 600))

    assert all(same_meaning(first, second) == same for first, second, same, _ in found)
    assert 0.4 < sum(same for *_, same, _ in found) / len(found) < 0.6
    assert not any(first == second for first, second, *_ in found)
    made = [text for problem in islice(problems(1), found[-1][3]) for text, _ in problem.steps]
    assert made == [first for first, *_, problem in found if problem < found[-1][3]]


def test_the_demo_worlds_steps_are_read_too() -> None:
    first, second = (
        sentences.STEPS["given"][0].format(s="Mia", r=4, u="pens"),
        sentences.STEPS["given"][1].format(s="Mia", r=4, u="pens"),
    )
    assert same_step(f"<think>\n{first}", second) and demo_same_step(first, second)
    assert not same_step(first, second.replace("4", "5"))
    assert same_step("So it goes.", " So it goes.") and not same_step("So it goes.", "So.")
    assert not same_step("We know that Mia is 4 ahead of Tom.", first)


def test_no_demo_model_has_seen_its_sentences_but_all_of_its_words() -> None:
    def words(templates: list[str]) -> set[str]:
        return {word for text in templates for word in re.findall(r"[A-Za-z]+", re.sub(r"\{[a-z]\}", "", text))}

    world = [*sentences.ANSWERS]
    for table in (sentences.STEPS, sentences.FACTS, sentences.QUESTIONS):
        world += [template for templates in table.values() for template in templates]
    own = [template for table in (STEPS, FACTS) for templates in table.values() for template in templates] + list(QUESTIONS)
    assert words(own) <= words(world)
    assert not set(own) & set(world)


def test_the_demo_tokenizer_has_its_words_whole() -> None:
    tokenizer = load_tokenizer(CHECKPOINTS / "target")
    counts = []
    for problem in islice(problems(1), 50):
        for text, _ in problem.steps:
            counts.append(
                len(tokenizer.encode(text, add_special_tokens=False)) / len(re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]", text))
            )
    assert sum(counts) / len(counts) < 1.15
