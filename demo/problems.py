"""The demo world: word problems about one kind of item, and the reasoning steps that solve them.

Everything a step can say is one of the sentences in ``STEPS``. Each family holds at least eight phrasings that state the
same fields, so two right steps seldom match word for word, while ``meaning`` can still read the fields back exactly.
All counts are whole numbers from 2 to 99. Pure and seeded; standard library only.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

Split = Literal["train", "validation", "test"]

LARGEST = 99
SMALLEST = 2
FEWEST_STEPS = 4
MOST_STEPS = 14
DELIMITER = "\n\n"

NAMES = (
    "Mia", "Tom", "Ben", "Ana", "Leo", "Zoe", "Sam", "Eva", "Max",
    "Ivy", "Kai", "Lily", "Noah", "Ruth", "Omar", "Nina", "Hugo", "Emma",
)  # fmt: skip
ITEMS = (
    "apples", "books", "coins", "cards", "pens", "stamps", "marbles", "shells",
    "stickers", "cookies", "pears", "balls", "stones", "beads", "tickets", "flowers",
)  # fmt: skip
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter"}

# --------------------------------------------------------------------------------------------------------------------
# Sentences. {s} subject, {t} the other person, {a} {o} {b} = {r} the arithmetic, {f} the fraction 1/b in words,
# {w} the wrong result that is mended, {u} the unit.

_HAS = (", so {s} has {r} {u}.", ", and now {s} has {r} {u}.", ", which means that {s} has {r} {u}.", ". So {s} has {r} {u}.")
_GOES = (", so {r} {u} go away.", ", and these {r} {u} go away.", ", which means that {r} {u} go.", ". So {r} {u} go away.")
_SUM = (", so the sum is {r}.", ", and now the sum is {r}.", ", which means that the sum is {r}.", ". So the sum is {r}.")


def _with(endings: tuple[str, ...], *openings: str) -> tuple[str, ...]:
    """Every opening with every ending."""
    return tuple(opening + ending for opening in openings for ending in endings)


STEPS: Mapping[str, tuple[str, ...]] = {
    "goal-now": (
        "We need to find how many {u} {s} has now.",
        "The question asks for the number of {u} that {s} has now.",
        "Let me work out how many {u} {s} has now.",
        "So the goal is to count the {u} that {s} has now.",
        "Okay, I want to know how many {u} {s} has now.",
        "First, note that we are asked how many {u} {s} has now.",
        "What is asked is how many {u} are with {s} now.",
        "I should follow the facts to see how many {u} {s} has now.",
    ),
    "goal-total": (
        "We need to find how many {u} they all have together.",
        "The question asks for the number of {u} that they have together.",
        "Let me work out how many {u} there are together.",
        "So the goal is to add up all the {u} of everyone.",
        "Okay, I want to know how many {u} everyone has together.",
        "First, note that we are asked for all the {u} together.",
        "What is asked is how many {u} all of them have in total.",
        "I should follow the facts and then add up all the {u}.",
    ),
    "goal-more": (
        "We need to find how many more {u} {s} has than {t}.",
        "The question asks how far {s} is ahead of {t} in {u}.",
        "Let me work out how many {u} {s} has beyond those of {t}.",
        "So the goal is the lead in {u} that {s} has over {t}.",
        "Okay, I want to know how many more {u} are with {s} than with {t}.",
        "First, note that we are asked how many {u} more {s} has than {t}.",
        "What is asked is by how many {u} {s} beats {t}.",
        "I should follow the facts and then compare {s} with {t} in {u}.",
    ),
    "goal-who": (
        "We need to find who has more {u}, {s} or {t}.",
        "The question asks which of {s} and {t} has more {u}.",
        "Let me work out whether {s} or {t} has more {u}.",
        "So the goal is to see who of {s} and {t} has more {u}.",
        "Okay, I want to know if {s} or {t} ends up with more {u}.",
        "First, note that we are asked who has more {u}, either {s} or {t}.",
        "What is asked is the one with more {u}, which is {s} or {t}.",
        "I should follow the facts and see whether {s} or {t} leads in {u}.",
    ),
    "given": (
        "We know that {s} has {r} {u}.",
        "At the start, {s} has {r} {u}.",
        "It is given that {s} has {r} {u}.",
        "The problem says that {s} has {r} {u}.",
        "To begin with, {s} has {r} {u}.",
        "From the first facts, {s} has {r} {u}.",
        "Let me write down that {s} has {r} {u}.",
        "Okay, at first {s} has {r} {u}.",
    ),
    "add": _with(
        _HAS,
        "{s} has {a} {u} and gets {b} more, and {a} + {b} = {r}",
        "Since {s} has {a} {u}, adding {b} gives {a} + {b} = {r}",
        "Then {s} has {a} {u} and {b} new ones, which makes {a} + {b} = {r}",
        "So far {s} has {a} {u}, and with {b} more we get {a} + {b} = {r}",
        "Now {s} has {a} {u} and gains {b}, so we have {a} + {b} = {r}",
        "Next, {s} has {a} {u} that grow by {b}, and {a} + {b} = {r}",
        "As {s} has {a} {u} and {b} come on top, the count is {a} + {b} = {r}",
        "Before that {s} has {a} {u}, and after getting {b} it is {a} + {b} = {r}",
    ),
    "sub": _with(
        _HAS,
        "{s} has {a} {u} and loses {b} of them, and {a} - {b} = {r}",
        "Since {s} has {a} {u}, taking {b} away gives {a} - {b} = {r}",
        "Then {s} has {a} {u} and {b} of them leave, which makes {a} - {b} = {r}",
        "So far {s} has {a} {u}, and with {b} fewer we get {a} - {b} = {r}",
        "Now {s} has {a} {u} and parts with {b}, so we have {a} - {b} = {r}",
        "Next, {s} has {a} {u} that shrink by {b}, and {a} - {b} = {r}",
        "As {s} has {a} {u} and {b} are gone, the count is {a} - {b} = {r}",
        "Before that {s} has {a} {u}, and after {b} go away it is {a} - {b} = {r}",
    ),
    "mul": _with(
        _HAS,
        "{s} has {a} {u} and the number grows {b} times, and {a} * {b} = {r}",
        "Since {s} has {a} {u}, taking them {b} times gives {a} * {b} = {r}",
        "Then {s} has {a} {u} that become {b} times as many, which makes {a} * {b} = {r}",
        "So far {s} has {a} {u}, and with {b} times as many we get {a} * {b} = {r}",
        "Now {s} has {a} {u} and works for {b} times that, so we have {a} * {b} = {r}",
        "Next, {s} has {a} {u} that multiply by {b}, and {a} * {b} = {r}",
        "As {s} has {a} {u} and gets {b} times as many, the count is {a} * {b} = {r}",
        "Before that {s} has {a} {u}, and after growing {b} times it is {a} * {b} = {r}",
    ),
    "div": _with(
        _HAS,
        "{s} has {a} {u} and keeps one of {b} equal bags, and {a} / {b} = {r}",
        "Since {s} has {a} {u}, sharing them among {b} bags gives {a} / {b} = {r}",
        "Then {s} has {a} {u} that go into {b} bags, and one bag makes {a} / {b} = {r}",
        "So far {s} has {a} {u}, and with one bag of {b} we get {a} / {b} = {r}",
        "Now {s} has {a} {u} and keeps one bag of {b}, so we have {a} / {b} = {r}",
        "Next, {s} has {a} {u} that are divided by {b}, and {a} / {b} = {r}",
        "As {s} has {a} {u} in {b} equal bags, the count of one is {a} / {b} = {r}",
        "Before that {s} has {a} {u}, and after sharing by {b} it is {a} / {b} = {r}",
    ),
    "part": _with(
        _GOES,
        "{s} has {a} {u}, and {f} of them is {a} / {b} = {r}",
        "Since {s} has {a} {u}, taking {f} of them gives {a} / {b} = {r}",
        "Then {s} has {a} {u} to take {f} of, which makes {a} / {b} = {r}",
        "So far {s} has {a} {u}, and for {f} of them we get {a} / {b} = {r}",
        "Now {s} has {a} {u} and parts with {f}, so we have {a} / {b} = {r}",
        "Next, {s} has {a} {u}, and we need {f} of that, and {a} / {b} = {r}",
        "As {s} has {a} {u} and {f} will go, the number is {a} / {b} = {r}",
        "Before that {s} has {a} {u}, and finding {f} of it means {a} / {b} = {r}",
    ),
    "more": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {b} more, and {a} + {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {b} more than that, we get {a} + {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {b} more, which makes {a} + {b} = {r}",
        "So far {t} has {a} {u}, and with {b} more for {s} we get {a} + {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {b} more than that, we have {a} + {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {b} more than that, so {a} + {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {b} more is {a} + {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {b} more makes {a} + {b} = {r}",
    ),
    "fewer": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {b} fewer, and {a} - {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {b} fewer than that, we get {a} - {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {b} fewer, which makes {a} - {b} = {r}",
        "So far {t} has {a} {u}, and with {b} fewer for {s} we get {a} - {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {b} fewer than that, we have {a} - {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {b} fewer than that, so {a} - {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {b} fewer is {a} - {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {b} fewer makes {a} - {b} = {r}",
    ),
    "times": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {b} times as many, and {a} * {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {b} times that, we get {a} * {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {b} times as many, which makes {a} * {b} = {r}",
        "So far {t} has {a} {u}, and with {b} times as many for {s} we get {a} * {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {b} times that, we have {a} * {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {b} times that, so {a} * {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {b} times as many is {a} * {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {b} times as many makes {a} * {b} = {r}",
    ),
    "fraction": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {f} as many, and {a} / {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {f} of that, we get {a} / {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {f} as many, which makes {a} / {b} = {r}",
        "So far {t} has {a} {u}, and with {f} as many for {s} we get {a} / {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {f} of that, we have {a} / {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {f} of that, so {a} / {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {f} as many is {a} / {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {f} as many makes {a} / {b} = {r}",
    ),
    "start": (
        "To add them up, {s} has {r} {u}, so the sum is {r}.",
        "We begin to count: {s} has {r} {u}, so the sum is {r}.",
        "First for the sum, {s} has {r} {u}, and the sum is {r}.",
        "Let me add up: {s} has {r} {u}, so the sum is {r}.",
        "Now for the total, {s} has {r} {u}, so the sum is {r}.",
        "I start with {s}, and {s} has {r} {u}, so the sum is {r}.",
        "Counting all, {s} has {r} {u}, which means the sum is {r}.",
        "So for all {u}, {s} has {r} of them, and the sum is {r}.",
    ),
    "total": _with(
        _SUM,
        "The sum is {a}, and {s} has {b} {u}, and {a} + {b} = {r}",
        "Since the sum is {a} and {s} has {b} {u}, we get {a} + {b} = {r}",
        "Then the sum is {a}, and {s} has {b} {u}, which makes {a} + {b} = {r}",
        "So far the sum is {a}, and {s} has {b} {u}, so {a} + {b} = {r}",
        "Now the sum is {a}, and as {s} has {b} {u}, we have {a} + {b} = {r}",
        "Next, the sum is {a}, and {s} has {b} {u} to add, and {a} + {b} = {r}",
        "As the sum is {a} and {s} has {b} {u}, it goes to {a} + {b} = {r}",
        "Before that the sum is {a}, and {s} has {b} {u}, so it is {a} + {b} = {r}",
    ),
    "more-than": (
        "{s} has {a} {u} and {t} has {b}, so the lead is {a} - {b} = {r}.",
        "Since {s} has {a} {u} and {t} has {b}, the lead is {a} - {b} = {r}.",
        "Then {s} has {a} {u} and {t} has {b}, which makes a lead of {a} - {b} = {r}.",
        "So far {s} has {a} {u} and {t} has {b}, and the gap is {a} - {b} = {r}.",
        "Now {s} has {a} {u} and {t} has only {b}, so we have {a} - {b} = {r} more.",
        "Next, {s} has {a} {u} and {t} has {b}, and {a} - {b} = {r} is the gap.",
        "As {s} has {a} {u} and {t} has {b}, the lead of {s} is {a} - {b} = {r}.",
        "Comparing, {s} has {a} {u} and {t} has {b}, and {a} - {b} = {r}.",
    ),
    "who": (
        "{s} has {a} {u} and {t} has {b}, so {s} has more.",
        "{t} has {b} {u} and {s} has {a}, so {s} has more.",
        "Since {s} has {a} {u} and {t} has {b}, the one with more is {s}.",
        "Since {t} has {b} {u} and {s} has {a}, the one with more is {s}.",
        "Comparing, {s} has {a} {u} and {t} has {b}, so the winner is {s}.",
        "Comparing, {t} has {b} {u} and {s} has {a}, so the winner is {s}.",
        "Now {s} has {a} {u} and {t} has {b}, and the higher count is for {s}.",
        "Now {t} has {b} {u} and {s} has {a}, and the higher count is for {s}.",
    ),
    "check": (
        "{s} check: {a} {o} {b} = {r} {u}, which fits.",
        "Checking the {u} of {s} backwards, {a} {o} {b} = {r}, which is right.",
        "Let me verify this for {s}: {a} {o} {b} = {r} {u}, good.",
        "To be sure about {s}, going back gives {a} {o} {b} = {r} {u} again.",
        "Going backwards for {s}, we see {a} {o} {b} = {r} {u}, as before.",
        "Indeed, for {s} the way back is {a} {o} {b} = {r} {u}, so it holds.",
        "A quick test of the {u} of {s}: {a} {o} {b} = {r}, fine.",
        "That is right for {s}, because {a} {o} {b} = {r} {u}.",
    ),
    "mend": (
        "Wait, {a} {o} {b} is not {w} but {r}, so {s} has {r} {u}.",
        "Hmm, {w} is wrong, because {a} {o} {b} = {r}, so {s} has {r} {u}.",
        "No, that slipped: {a} {o} {b} = {r} and not {w}, so {s} has {r} {u}.",
        "Actually, I made a mistake with {w}, and {a} {o} {b} = {r}, so {s} has {r} {u}.",
        "Oops, it is {a} {o} {b} = {r} and not {w}, so {s} has {r} {u}.",
        "Sorry, the {w} must be {r}, since {a} {o} {b} = {r}, so {s} has {r} {u}.",
        "But {a} {o} {b} is {r}, and {w} was a slip, so {s} has {r} {u}.",
        "Correction: not {w} but {a} {o} {b} = {r}, so {s} has {r} {u}.",
    ),
    "conclude-now": (
        "So {s} has {r} {u}, and the answer is {r}.",
        "Therefore, {s} has {r} {u}, so the answer is {r}.",
        "In the end, {s} has {r} {u}, and the answer is {r}.",
        "This means that {s} has {r} {u}, so the answer is {r}.",
        "All in all, {s} has {r} {u}, which gives the answer {r}.",
        "Thus, {s} has {r} {u}, and {r} is what was asked for.",
        "We are done: {s} has {r} {u}, so the answer is {r}.",
        "Okay, {s} has {r} {u}, and so the result is {r}.",
    ),
    "conclude-total": (
        "So the sum is {r} {u}, and the answer is {r}.",
        "Therefore, the sum is {r} {u}, so the answer is {r}.",
        "In the end, the sum is {r} {u}, and the answer is {r}.",
        "This means that the sum is {r} {u}, so the answer is {r}.",
        "All in all, the sum is {r} {u}, which gives the answer {r}.",
        "Thus, the sum is {r} {u}, and {r} is what was asked for.",
        "We are done: the sum is {r} {u}, so the answer is {r}.",
        "Okay, the sum is {r} {u}, and so the result is {r}.",
    ),
    "conclude-more": (
        "So the lead is {r} {u}, and the answer is {r}.",
        "Therefore, the lead is {r} {u}, so the answer is {r}.",
        "In the end, the lead is {r} {u}, and the answer is {r}.",
        "This means that the lead is {r} {u}, so the answer is {r}.",
        "All in all, the lead is {r} {u}, which gives the answer {r}.",
        "Thus, the lead is {r} {u}, and {r} is what was asked for.",
        "We are done: the lead is {r} {u}, so the answer is {r}.",
        "Okay, the lead is {r} {u}, and so the result is {r}.",
    ),
    "conclude-who": (
        "So the answer is {s}, who has more {u}.",
        "Therefore, the one with more {u} is {s}.",
        "That gives {s} as the one who has more {u}.",
        "In the end, {s} has more {u}, and that is the answer.",
        "This means that the answer for the {u} is {s}.",
        "All in all, {s} leads in {u}, which answers the question.",
        "Thus, {s} is the one with more {u} that was asked for.",
        "We are done, and {s} has more {u}.",
    ),
}

FACTS: Mapping[str, tuple[str, ...]] = {
    "given": ("{s} has {r} {u}.", "{s} starts with {r} {u}.", "{s} owns {r} {u}."),
    "more": ("{s} has {b} more {u} than {t}.", "{s} has {b} {u} more than {t}."),
    "fewer": ("{s} has {b} fewer {u} than {t}.", "{s} has {b} {u} fewer than {t}."),
    "times": ("{s} has {b} times as many {u} as {t}.", "{s} has {b} times the {u} of {t}."),
    "fraction": ("{s} has {f} as many {u} as {t}.", "{s} has {f} of the number of {u} that {t} has."),
    "add": ("{s} buys {b} more {u}.", "{s} finds {b} {u}.", "{s} gets {b} {u} from a friend."),
    "sub": ("{s} loses {b} {u}.", "{s} gives away {b} {u}.", "{s} sells {b} {u}."),
    "mul": ("{s} works until there are {b} times as many {u}.", "The {u} of {s} become {b} times as many."),
    "div": ("{s} packs the {u} into {b} equal bags and keeps one bag.",
            "{s} shares the {u} equally among {b} bags and keeps one."),
    "part": ("{s} gives away {f} of the {u}.", "{s} sells {f} of the {u}.", "{s} loses {f} of the {u}."),
    "give": ("{s} gives {b} {u} to {t}.", "{s} hands {b} {u} to {t}."),
}  # fmt: skip

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "goal-now": ("How many {u} does {s} have now?", "How many {u} are with {s} now?"),
    "goal-total": ("How many {u} do they have together?", "How many {u} are there in total?"),
    "goal-more": ("How many more {u} does {s} have than {t}?", "By how many {u} does {s} beat {t}?"),
    "goal-who": ("Who has more {u}, {s} or {t}?", "Which of {s} and {t} has more {u}?"),
}

ANSWERS = (
    "The answer is \\boxed{{{x}}}.",
    "So the answer is \\boxed{{{x}}}.",
    "Answer: \\boxed{{{x}}}.",
    "The result is \\boxed{{{x}}}.",
)

OPERATOR: Mapping[str, str] = {
    "add": "+", "more": "+", "total": "+", "sub": "-", "fewer": "-", "more-than": "-",
    "mul": "*", "times": "*", "div": "/", "part": "/", "fraction": "/",
}  # fmt: skip
INVERSE: Mapping[str, str] = {"+": "-", "-": "+", "*": "/", "/": "*"}
KIND: Mapping[str, str] = {
    "given": "given", "check": "check", "mend": "mend", "more-than": "compare", "who": "compare",
    "start": "given", **dict.fromkeys(("conclude-now", "conclude-total", "conclude-more", "conclude-who"), "conclude"),
    **{family: "goal" for family in STEPS if family.startswith("goal")},
    **{family: "op" for family in ("add", "sub", "mul", "div", "part", "more", "fewer", "times", "fraction", "total")},
}  # fmt: skip

# --------------------------------------------------------------------------------------------------------------------
# Meanings


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a step states, apart from its wording. Fields a family does not state keep their defaults (0 or "")."""

    family: str
    unit: str
    subject: str = ""
    other: str = ""
    a: int = 0
    op: str = ""
    b: int = 0
    result: int = 0
    wrong: int = 0

    @property
    def kind(self) -> str:
        """One of goal, given, op, check, mend, compare, conclude."""
        return KIND[self.family]


@dataclass(frozen=True, slots=True)
class Step:
    """One sentence of reasoning. ``slip`` marks a result that is wrong on purpose, mended by the next step."""

    text: str
    meaning: Meaning
    slip: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with one worked solution."""

    question: str
    steps: tuple[Step, ...]
    answer: str
    closing: str

    @property
    def completion(self) -> str:
        """The assistant turn, without its end token."""
        return f"<think>\n{DELIMITER.join(step.text for step in self.steps)}\n</think>\n\n{self.closing}"


def phrase(template: str, meaning: Meaning) -> str:
    """The sentence that ``template`` makes of ``meaning``."""
    return template.format(
        s=meaning.subject, t=meaning.other, a=meaning.a, o=meaning.op, b=meaning.b, r=meaning.result,
        w=meaning.wrong, u=meaning.unit, f=FRACTIONS.get(meaning.b, "a part"),
    )  # fmt: skip


def say(rng: random.Random, meaning: Meaning) -> str:
    """``meaning`` in one of its phrasings, drawn uniformly."""
    return phrase(rng.choice(STEPS[meaning.family]), meaning)


FIELDS: Mapping[str, str] = {
    "s": "subject", "t": "other", "a": "a", "o": "op", "b": "b", "r": "result", "w": "wrong", "u": "unit", "f": "f",
}  # fmt: skip
_PATTERNS: Mapping[str, str] = {
    "s": "|".join(NAMES), "t": "|".join(NAMES), "u": "|".join(ITEMS), "o": r"[-+*/]",
    "f": "|".join(FRACTIONS.values()), **dict.fromkeys("abrw", r"0|[1-9]\d{0,3}"),
}  # fmt: skip


def _pattern(template: str) -> re.Pattern[str]:
    """A regular expression that matches exactly what ``template`` can say; repeated fields must repeat."""
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        field = match[1]
        if field in seen:
            return f"(?P={field})"
        seen.add(field)
        return f"(?P<{field}>{_PATTERNS[field]})"

    return re.compile(re.sub(r"\\{([a-z])\\}", group, re.escape(template)))


@cache
def patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(family, pattern) of every phrasing."""
    return tuple((family, _pattern(template)) for family, templates in STEPS.items() for template in templates)


@cache
def _by_first_word() -> Mapping[str, tuple[tuple[str, re.Pattern[str]], ...]]:
    """The patterns by the first word of their phrasing; those that open with a name are filed under ""."""
    table: dict[str, tuple[tuple[str, re.Pattern[str]], ...]] = {}
    rows = zip(patterns(), (t for templates in STEPS.values() for t in templates), strict=True)
    for row, template in rows:
        word = template.split(" ", 1)[0]
        key = "" if "{" in word else word
        table[key] = (*table.get(key, ()), row)
    return table


def _read(family: str, match: re.Match[str]) -> Meaning | None:
    """The meaning of a matched phrasing, or None where its words contradict its numbers."""
    found = match.groupdict()
    fraction = found.pop("f", None)
    if fraction is not None and FRACTIONS.get(int(found["b"])) != fraction:
        return None
    fields = {FIELDS[key]: int(text) if key in "abrw" else text for key, text in found.items()}
    return Meaning(family, **{"op": OPERATOR.get(family, ""), **fields})  # type: ignore[arg-type]


def meaning(step_text: str) -> Meaning | None:
    """What a step states, or None for a sentence outside the demo world. Surrounding space is ignored."""
    text = step_text.strip()
    table = _by_first_word()
    for family, pattern in (*table.get(text.split(" ", 1)[0], ()), *table.get("", ())):
        if match := pattern.fullmatch(text):
            return _read(family, match)
    return None


def spans(step_text: str) -> Mapping[str, tuple[int, int]]:
    """Where a readable step first states each field of its meaning: field -> (start, end) in characters."""
    found: dict[str, tuple[int, int]] = {}
    for _, pattern in patterns():
        if match := pattern.fullmatch(step_text):
            for key in match.groupdict():
                field = "b" if key == "f" else FIELDS[key]
                found[field] = min(match.span(key), found.get(field, match.span(key)))
            return found
    return found


def same_meaning(a: str, b: str) -> bool:
    """The checker's verdict on two steps: the same text, or both readable with the same meaning."""
    if a.strip() == b.strip():
        return True
    read = meaning(a)
    return read is not None and read == meaning(b)


def compute(a: int, op: str, b: int) -> int | None:
    """``a op b`` in whole numbers, or None where it is not one."""
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/" if b and a % b == 0:
            return a // b
    return None


def is_right(step_text: str) -> bool:
    """Whether a step is readable and its arithmetic holds. Steps without arithmetic hold."""
    read = meaning(step_text)
    if read is None:
        return False
    if read.family == "who":
        return read.a > read.b
    return not read.op or compute(read.a, read.op, read.b) == read.result


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` in ``text``, or None."""
    found: list[str] = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else None


def check_answer(problem: Problem, text: str) -> bool:
    """Whether the last boxed answer in ``text`` is exactly the problem's."""
    return boxed(text) == problem.answer


# --------------------------------------------------------------------------------------------------------------------
# Problems

RELATIONS = ("more", "fewer", "times", "fraction")
EVENTS = ("add", "sub", "mul", "div", "part", "give")
CHECK_RATE = 0.12


class _Unsuited(Exception):
    """The draw left the world's bounds; draw again."""


def _amount(rng: random.Random, family: str, a: int) -> int:
    """A second operand for ``family`` at ``a`` that keeps the result a whole number within bounds."""
    match OPERATOR[family]:
        case "+":
            choices = range(2, min(LARGEST - a, 30) + 1)
        case "-":
            choices = range(2, min(a - SMALLEST, 30) + 1)
        case "*":
            choices = range(2, min(LARGEST // a, 6) + 1)
        case _:
            most = 4 if family in ("fraction", "part") else 6
            options = [b for b in range(2, most + 1) if a % b == 0 and a // b >= SMALLEST]
            if not options:
                raise _Unsuited
            return rng.choice(options)
    if not choices:
        raise _Unsuited
    return rng.choice(choices)


class _Story:
    """A problem being told: facts on one side, the steps they call for on the other, counts in between."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.unit = rng.choice(ITEMS)
        self.people = tuple(rng.sample(NAMES, rng.choices((2, 3, 4), (6, 3, 1))[0]))
        self.count: dict[str, int] = {}
        self.facts: list[str] = []
        self.steps: list[Meaning] = []

    def tell(self, family: str, fact: Meaning) -> None:
        self.facts.append(phrase(self.rng.choice(FACTS[family]), fact))

    def work(self, family: str, subject: str, a: int, b: int, other: str = "") -> int:
        """Append the step ``a op b`` of ``family``, sometimes with a check; its result."""
        op = OPERATOR[family]
        result = compute(a, op, b)
        if result is None or not SMALLEST <= result <= LARGEST:
            raise _Unsuited
        self.steps.append(Meaning(family, self.unit, subject, other, a, op, b, result))
        if family not in ("total", "more-than") and self.rng.random() < CHECK_RATE:
            self.steps.append(Meaning("check", self.unit, subject, "", result, INVERSE[op], b, a))
        return result

    def introduce(self, person: str) -> None:
        """Say how many items ``person`` has, outright or by comparison."""
        if not self.count or self.rng.random() < 0.25:
            start = self.rng.choice(range(4, 49))
            given = Meaning("given", self.unit, person, result=start)
            self.tell("given", given)
            self.steps.append(given)
            self.count[person] = start
            return
        family = self.rng.choice(RELATIONS)
        other = self.rng.choice(tuple(self.count))
        a = self.count[other]
        b = _amount(self.rng, family, a)
        self.tell(family, Meaning(family, self.unit, person, other, a, "", b))
        self.count[person] = self.work(family, person, a, b, other)

    def happen(self) -> None:
        """Tell one event and work out what it does."""
        family = self.rng.choice(EVENTS)
        person = self.rng.choice(self.people)
        a = self.count[person]
        if family == "give":
            other = self.rng.choice([name for name in self.people if name != person])
            b = _amount(self.rng, "sub", a)
            self.tell("give", Meaning("give", self.unit, person, other, a, "", b))
            self.count[person] = self.work("sub", person, a, b)
            self.count[other] = self.work("add", other, self.count[other], b)
            return
        b = _amount(self.rng, family, a)
        self.tell(family, Meaning(family, self.unit, person, "", a, "", b))
        result = self.work(family, person, a, b)
        self.count[person] = self.work("sub", person, a, result) if family == "part" else result

    def ask(self) -> str:
        """Ask the question, work out its answer; the answer."""
        goal = self.rng.choice(tuple(QUESTIONS))
        s, t = self.rng.sample(self.people, 2)
        if goal == "goal-more" and self.count[s] < self.count[t]:
            s, t = t, s
        wanted = {
            "goal-now": Meaning(goal, self.unit, s),
            "goal-total": Meaning(goal, self.unit),
        }.get(goal, Meaning(goal, self.unit, s, t))
        self.facts.append(phrase(self.rng.choice(QUESTIONS[goal]), wanted))
        self.steps.insert(0, wanted)
        if goal == "goal-who":
            return self._who(s, t)
        result = self.count[s]
        if goal == "goal-more":
            result = self.work("more-than", s, self.count[s], self.count[t], t)
        elif goal == "goal-total":
            result = self.count[self.people[0]]
            self.steps.append(Meaning("start", self.unit, self.people[0], result=result))
            for person in self.people[1:]:
                result = self.work("total", person, result, self.count[person])
        subject = s if goal == "goal-now" else ""
        self.steps.append(Meaning(goal.replace("goal", "conclude"), self.unit, subject, result=result))
        return str(result)

    def _who(self, s: str, t: str) -> str:
        if self.count[s] == self.count[t]:
            raise _Unsuited
        first, second = (s, t) if self.count[s] > self.count[t] else (t, s)
        self.steps.append(Meaning("who", self.unit, first, second, self.count[first], "", self.count[second]))
        self.steps.append(Meaning("conclude-who", self.unit, first))
        return first


def _slip(rng: random.Random, right: int) -> int:
    """A plausible wrong result beside ``right``."""
    near = {right + shift for shift in (-10, -3, -2, -1, 1, 2, 3, 10)} | {int(str(right)[::-1])}
    return rng.choice(sorted(n for n in near if n != right and SMALLEST <= n <= LARGEST))


def _worded(rng: random.Random, steps: list[Meaning], slip_rate: float) -> Iterator[Step]:
    """Steps in words; a share ``slip_rate`` of the operations goes wrong first and is mended."""
    for step in steps:
        if step.kind == "op" and rng.random() < slip_rate:
            wrong = _slip(rng, step.result)
            slipped = replace(step, result=wrong)
            mended = Meaning("mend", step.unit, step.subject, "", step.a, step.op, step.b, step.result, wrong)
            yield Step(say(rng, slipped), slipped, slip=True)
            yield Step(say(rng, mended), mended)
        else:
            yield Step(say(rng, step), step)


def _draw(rng: random.Random, slip_rate: float) -> Problem | None:
    """One problem, or None where the draw left the world's bounds."""
    story = _Story(rng)
    try:
        for person in story.people:
            story.introduce(person)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 4))):
            story.happen()
        answer = story.ask()
    except _Unsuited:
        return None
    steps = tuple(_worded(rng, story.steps, slip_rate))
    if not FEWEST_STEPS <= len(steps) <= MOST_STEPS:
        return None
    return Problem(" ".join(story.facts), steps, answer, rng.choice(ANSWERS).format(x=answer))


def split_of(question: str) -> Split:
    """The split a question belongs to, by its hash: 90 % train, 5 % validation, 5 % test."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % 20
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def problems(seed: int, split: Split = "train", slip_rate: float = 0.0) -> Iterator[Problem]:
    """An endless, seeded stream of problems of one split."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        problem = _draw(rng, slip_rate)
        if problem is not None and split_of(problem.question) == split:
            yield problem
