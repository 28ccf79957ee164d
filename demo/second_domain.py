"""A second generated domain, of which no demo model has learned anything: who is how far ahead of whom.

The demo world counts items that people have. Here nobody has anything: people are ahead of one another by so much, gain and
lose, and the question is for a lead that is not told, to be put together from those that are. The sentences are others; the
words are all the demo world's, so the demo tokenizer has them whole. ``meaning`` reads every step back exactly, as in the demo
world, so that a verdict on two steps can be checked. Pure and seeded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from demo import problems as demo_world
from demo.problems import DELIMITER, LARGEST, SMALLEST, compute
from demo.sentences import ANSWERS, NAMES

# {s} is ahead of {t} (or of {m}, who is between them); {a} and {b} are known, {r} is stated or worked out.

STEPS: Mapping[str, tuple[str, ...]] = {
    "goal": (
        "We need to find how far {s} is ahead of {t}.",
        "The question asks how far {s} is ahead of {t} in the end.",
        "Let me work out how far {s} is ahead of {t}.",
        "So the goal is to see how far {s} leads {t}.",
        "Okay, I want to know by how many {s} leads {t}.",
        "First, note that we are asked how far {s} is beyond {t}.",
        "What is asked is the gap by which {s} leads {t}.",
        "I should follow the facts to see how far {s} leads {t}.",
    ),
    "given": (
        "We know that {s} is {r} ahead of {t}.",
        "At the start, {s} is {r} ahead of {t}.",
        "It is given that {s} leads {t} by {r}.",
        "The problem says that {s} is {r} ahead of {t}.",
        "To begin with, {s} leads {t} by {r}.",
        "From the first facts, {s} is {r} ahead of {t}.",
        "Let me write down that {s} leads {t} by {r}.",
        "Okay, at first {s} is {r} ahead of {t}.",
    ),
    "join": (
        "{s} is {a} ahead of {m} and {m} is {b} ahead of {t}, so {s} is {a} + {b} = {r} ahead of {t}.",
        "Since {s} leads {m} by {a} and {m} leads {t} by {b}, we get {a} + {b} = {r} for {s} over {t}.",
        "Then {s} is {a} beyond {m}, and {m} is {b} beyond {t}, which makes {a} + {b} = {r} from {t} up to {s}.",
        "Next, from {t} to {m} it is {b}, and from {m} to {s} it is {a}, so {s} leads {t} by {a} + {b} = {r}.",
        "Now we add: {s} over {m} is {a}, {m} over {t} is {b}, and {s} over {t} is {a} + {b} = {r}.",
        "As {m} is {b} ahead of {t} and {s} is {a} ahead of {m}, {s} leads {t} by {a} + {b} = {r}.",
        "So far {s} leads {m} by {a}, and with {b} more down to {t} we get {a} + {b} = {r} for {s}.",
        "To add {a} for {s} over {m} to {b} for {m} over {t} gives {a} + {b} = {r} for {s} over {t}.",
    ),
    "part": (
        "{s} is {a} ahead of {t} and {m} is {b} ahead of {t}, so {s} is {a} - {b} = {r} ahead of {m}.",
        "Since {s} leads {t} by {a} and {m} leads {t} by {b}, we get {a} - {b} = {r} for {s} over {m}.",
        "Then {s} is {a} beyond {t}, and {m} is {b} beyond {t}, which makes {a} - {b} = {r} from {m} up to {s}.",
        "Next, from {t} to {s} it is {a}, and from {t} to {m} it is {b}, so {s} leads {m} by {a} - {b} = {r}.",
        "Now we compare: {s} over {t} is {a}, {m} over {t} is {b}, and {s} over {m} is {a} - {b} = {r}.",
        "As {m} is {b} ahead of {t} and {s} is {a} ahead of {t}, {s} leads {m} by {a} - {b} = {r}.",
        "So far {s} leads {t} by {a}, and with {b} fewer up from {m} we get {a} - {b} = {r} for {s}.",
        "Okay, taking {b} for {m} over {t} away from {a} for {s} over {t} gives {a} - {b} = {r} for {s} over {m}.",
    ),
    "gain": (
        "{s} is {a} ahead of {t} and gains {b} more, so the lead of {s} over {t} grows to {a} + {b} = {r}.",
        "Since {s} leads {t} by {a}, getting {b} more gives {s} a lead of {a} + {b} = {r} over {t}.",
        "Then {s} leads {t} by {a} and gets {b} on top, which makes {a} + {b} = {r} over {t}.",
        "Next, the gap of {a} from {t} up to {s} grows by {b}, and {a} + {b} = {r}.",
        "Now {s} is {a} beyond {t} and goes {b} up, so {s} is {a} + {b} = {r} ahead of {t}.",
        "As {s} leads {t} by {a} and {b} come on top, the lead is {a} + {b} = {r}.",
        "Before that {s} leads {t} by {a}, and after getting {b} it is {a} + {b} = {r}.",
        "Okay, with {b} more on the {a} that {s} is ahead of {t}, we have {a} + {b} = {r}.",
    ),
    "lose": (
        "{s} is {a} ahead of {t} and loses {b}, so the lead of {s} over {t} is down to {a} - {b} = {r}.",
        "Since {s} leads {t} by {a}, going {b} back gives {s} a lead of {a} - {b} = {r} over {t}.",
        "Then {s} leads {t} by {a} and {b} of it are gone, which makes {a} - {b} = {r} over {t}.",
        "Next, the gap of {a} from {t} up to {s} will shrink by {b}, and {a} - {b} = {r}.",
        "Now {s} is {a} beyond {t} and goes {b} down, so {s} is {a} - {b} = {r} ahead of {t}.",
        "As {s} leads {t} by {a} and {b} go away, the lead is {a} - {b} = {r}.",
        "Before that {s} leads {t} by {a}, and after {b} are gone it is {a} - {b} = {r}.",
        "Okay, with {b} fewer of the {a} that {s} is ahead of {t}, we have {a} - {b} = {r}.",
    ),
    "conclude": (
        "So {s} is {r} ahead of {t}, and the answer is {r}.",
        "Therefore, {s} leads {t} by {r}, so the answer is {r}.",
        "In the end, {s} is {r} ahead of {t}, and the answer is {r}.",
        "This means that {s} leads {t} by {r}, so the answer is {r}.",
        "All in all, {s} is {r} ahead of {t}, which gives the answer {r}.",
        "Thus, {s} is {r} beyond {t}, and {r} is what was asked for.",
        "We are done: {s} leads {t} by {r}, so the answer is {r}.",
        "Okay, {s} is {r} ahead of {t}, and so the result is {r}.",
    ),
}
FACTS: Mapping[str, tuple[str, ...]] = {
    "lead": ("{s} is {r} ahead of {t}.", "{s} leads {t} by {r}.", "{s} beats {t} by {r}."),
    "gain": ("{s} gains {b} on {t}.", "The lead of {s} over {t} grows by {b}."),
    "lose": ("{s} loses {b} to {t}.", "{b} of the lead of {s} over {t} go away."),
}
QUESTIONS = ("How far is {s} ahead of {t} now?", "By how many does {s} beat {t} in the end?")
OPERATOR: Mapping[str, str] = {"join": "+", "gain": "+", "part": "-", "lose": "-"}
EVENTS = ("join-front", "join-back", "part", "gain", "lose")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a step states, apart from its wording. Fields that a family does not state keep their defaults."""

    family: str
    s: str = ""
    m: str = ""
    t: str = ""
    a: int = 0
    b: int = 0
    r: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with one worked solution."""

    question: str
    steps: tuple[tuple[str, Meaning], ...]
    answer: str
    closing: str

    @property
    def completion(self) -> str:
        """The assistant turn, without its end token."""
        return f"<think>\n{DELIMITER.join(text for text, _ in self.steps)}\n</think>\n\n{self.closing}"


def phrase(template: str, meaning: Meaning) -> str:
    """The sentence that ``template`` makes of ``meaning``."""
    return template.format(s=meaning.s, m=meaning.m, t=meaning.t, a=meaning.a, b=meaning.b, r=meaning.r)


@cache
def patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(family, pattern) of every phrasing."""
    return demo_world.phrasings(STEPS, dict.fromkeys("smt", "|".join(NAMES)) | dict.fromkeys("abr", "0|[1-9][0-9]{0,3}"))


def meaning(step_text: str) -> Meaning | None:
    """What a step states, or None for a sentence outside this domain. Surrounding space is ignored."""
    text = step_text.strip()
    for family, pattern in patterns():
        if match := pattern.fullmatch(text):
            fields: dict[str, Any] = {name: found if name in "smt" else int(found) for name, found in match.groupdict().items()}
            return Meaning(family, **fields)
    return None


def same_meaning(a: str, b: str) -> bool:
    """The checker's verdict on two steps: the same text, or both readable with the same meaning."""
    if a.strip() == b.strip():
        return True
    read = meaning(a)
    return read is not None and read == meaning(b)


def same_step(a: str, b: str) -> bool:
    """:func:`same_meaning` of two steps as a model writes them: the marks of the reasoning say nothing.

    A model that falls back into the demo world's sentences is read there. What neither world can read is the same only if its
    words are.
    """
    first, second = (text.replace("<think>", "").replace("</think>", "").strip() for text in (a, b))
    return same_meaning(first, second) or demo_world.same_meaning(first, second)


def _draw(rng: random.Random) -> Problem | None:
    """One problem, or None where a lead left the bounds."""
    people = rng.sample(NAMES, 5)
    s, t = people.pop(), people.pop()
    lead = rng.randint(5, 30)
    steps = [Meaning("given", s, "", t, r=lead)]
    facts = [phrase(rng.choice(FACTS["lead"]), Meaning("", s, "", t, r=lead))]
    for _ in range(rng.choice((1, 2, 2, 3, 3))):
        event = rng.choice(EVENTS if people else ("gain", "lose"))
        b = rng.randint(2, 20)
        family = event.split("-")[0]
        result = compute(lead, OPERATOR[family], b)
        if result is None or not SMALLEST <= result <= LARGEST:
            return None
        match event:
            case "join-front":
                other = people.pop()
                facts.append(phrase(rng.choice(FACTS["lead"]), Meaning("", other, "", s, r=b)))
                steps.append(Meaning("join", other, s, t, b, lead, result))
                s = other
            case "join-back":
                other = people.pop()
                facts.append(phrase(rng.choice(FACTS["lead"]), Meaning("", t, "", other, r=b)))
                steps.append(Meaning("join", s, t, other, lead, b, result))
                t = other
            case "part":
                other = people.pop()
                facts.append(phrase(rng.choice(FACTS["lead"]), Meaning("", other, "", t, r=b)))
                steps.append(Meaning("part", s, other, t, lead, b, result))
                t = other
            case _:
                facts.append(phrase(rng.choice(FACTS[event]), Meaning("", s, "", t, b=b)))
                steps.append(Meaning(event, s, "", t, lead, b, result))
        lead = result
    asked = Meaning("goal", s, "", t)
    steps = [asked, *steps, Meaning("conclude", s, "", t, r=lead)]
    worded = tuple((phrase(rng.choice(STEPS[step.family]), step), step) for step in steps)
    question = " ".join([*facts, phrase(rng.choice(QUESTIONS), asked)])
    return Problem(question, worded, str(lead), rng.choice(ANSWERS).format(x=lead))


def problems(seed: int) -> Iterator[Problem]:
    """An endless, seeded stream of problems. There are no splits: nothing is trained on it."""
    rng = random.Random(f"second-{seed}")
    while True:
        problem = _draw(rng)
        if problem is not None:
            yield problem


def pairs(seed: int) -> Iterator[tuple[str, str, bool, int]]:
    """(step, another, whether they mean the same, of which problem), without end: in other words, and in half of them with a
    field changed."""
    rng = random.Random(f"second-pairs-{seed}")
    for number, problem in enumerate(problems(seed)):
        for text, step in problem.steps:
            others = [template for template in STEPS[step.family] if phrase(template, step) != text]
            same = rng.random() < 0.5
            yield text, phrase(rng.choice(others), step if same else _changed(rng, step)), same, number


def _changed(rng: random.Random, step: Meaning) -> Meaning:
    """``step`` with a number changed, or two names changed about. Where arithmetic is stated, its result follows."""
    names = [name for name in "smt" if getattr(step, name)]
    numbers = [name for name in "ab" if step.family in OPERATOR] or (["r"] if step.r else [])
    if numbers and rng.random() < 0.6:
        name = rng.choice(numbers)
        shift = rng.choice([shift for shift in (-3, -2, -1, 1, 2, 3, 10) if getattr(step, name) + shift >= SMALLEST])
        changed = replace(step, **{name: getattr(step, name) + shift})
        if step.family in OPERATOR:
            changed = replace(changed, r=max(0, compute(changed.a, OPERATOR[step.family], changed.b) or 0))
        return changed
    first, second = rng.sample(names, 2)
    return replace(step, **{first: getattr(step, second), second: getattr(step, first)})
