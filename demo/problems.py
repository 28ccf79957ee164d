"""The demo world: word problems about one kind of item, and the reasoning steps that solve them.

Everything a step can say is one of the sentences in :mod:`demo.sentences`. Each family holds at least eight phrasings that
state the same fields, so two right steps seldom match word for word, while ``meaning`` can still read the fields back exactly.
All counts are whole numbers from 2 to 99. Pure and seeded.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from demo.sentences import ANSWERS, FACTS, FRACTIONS, INVERSE, ITEMS, KIND, NAMES, OPERATOR, QUESTIONS, STEPS

Split = Literal["train", "validation", "test"]

LARGEST = 99
SMALLEST = 2
FEWEST_STEPS = 4
MOST_STEPS = 14
DELIMITER = "\n\n"

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
    """One sentence of reasoning. ``fact`` is the sentence of the question that it works on, by its place there; ``slip`` marks
    a result that is wrong on purpose, mended by the next step."""

    text: str
    meaning: Meaning
    fact: int
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


def phrasings(steps: Mapping[str, tuple[str, ...]], fields: Mapping[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(family, pattern) of every template in ``steps``; ``fields`` has what each field can say."""
    return tuple((family, _pattern(template, fields)) for family, templates in steps.items() for template in templates)


def _pattern(template: str, fields: Mapping[str, str]) -> re.Pattern[str]:
    """A regular expression that matches exactly what ``template`` can say; repeated fields must repeat."""
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        field = match[1]
        if field in seen:
            return f"(?P={field})"
        seen.add(field)
        return f"(?P<{field}>{fields[field]})"

    return re.compile(re.sub(r"\\{([a-z])\\}", group, re.escape(template)))


@cache
def patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(family, pattern) of every phrasing."""
    return phrasings(STEPS, _PATTERNS)


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


def same_step(a: str, b: str) -> bool:
    """:func:`same_meaning` of two steps as a model writes them: the marks of the reasoning say nothing."""
    return same_meaning(*(text.replace("<think>", "").replace("</think>", "").strip() for text in (a, b)))


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
CHECK_RATE = 0.3


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
        self.steps: list[tuple[Meaning, int]] = []

    def tell(self, family: str, fact: Meaning) -> None:
        self.facts.append(phrase(self.rng.choice(FACTS[family]), fact))

    def note(self, step: Meaning, fact: int | None = None) -> None:
        """Append a step that works on ``fact``, by default the last one told."""
        self.steps.append((step, len(self.facts) - 1 if fact is None else fact))

    def work(self, family: str, subject: str, a: int, b: int, other: str = "", fact: int | None = None) -> int:
        """Append the step ``a op b`` of ``family``, sometimes with a check; its result."""
        op = OPERATOR[family]
        result = compute(a, op, b)
        if result is None or not SMALLEST <= result <= LARGEST:
            raise _Unsuited
        self.note(Meaning(family, self.unit, subject, other, a, op, b, result), fact)
        if family not in ("total", "more-than") and self.rng.random() < CHECK_RATE:
            self.note(Meaning("check", self.unit, subject, "", result, INVERSE[op], b, a))
        return result

    def introduce(self, person: str) -> None:
        """Say how many items ``person`` has, outright or by comparison."""
        if not self.count or self.rng.random() < 0.25:
            start = self.rng.choice(range(4, 49))
            given = Meaning("given", self.unit, person, result=start)
            self.tell("given", given)
            self.note(given)
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
        self.steps.insert(0, (wanted, len(self.facts) - 1))
        if goal == "goal-who":
            return self._who(s, t)
        result = self.count[s]
        if goal == "goal-more":
            result = self.work("more-than", s, self.count[s], self.count[t], t)
        elif goal == "goal-total":
            result = self.count[self.people[0]]
            self.note(Meaning("start", self.unit, self.people[0], result=result), fact=0)
            for fact, person in enumerate(self.people[1:], start=1):  # each was introduced by one fact, in this order
                result = self.work("total", person, result, self.count[person], fact=fact)
        subject = s if goal == "goal-now" else ""
        self.note(Meaning(goal.replace("goal", "conclude"), self.unit, subject, result=result))
        return str(result)

    def _who(self, s: str, t: str) -> str:
        if self.count[s] == self.count[t]:
            raise _Unsuited
        first, second = (s, t) if self.count[s] > self.count[t] else (t, s)
        self.note(Meaning("who", self.unit, first, second, self.count[first], "", self.count[second]))
        self.note(Meaning("conclude-who", self.unit, first))
        return first


def _slip(rng: random.Random, right: int) -> int:
    """A plausible wrong result beside ``right``."""
    near = {right + shift for shift in (-10, -3, -2, -1, 1, 2, 3, 10)} | {int(str(right)[::-1])}
    return rng.choice(sorted(n for n in near if n != right and SMALLEST <= n <= LARGEST))


def _worded(rng: random.Random, steps: list[tuple[Meaning, int]], slip_rate: float) -> Iterator[Step]:
    """Steps in words; a share ``slip_rate`` of the operations goes wrong first and is mended."""
    for step, fact in steps:
        if step.kind == "op" and rng.random() < slip_rate:
            wrong = _slip(rng, step.result)
            slipped = replace(step, result=wrong)
            mended = Meaning("mend", step.unit, step.subject, "", step.a, step.op, step.b, step.result, wrong)
            yield Step(say(rng, slipped), slipped, fact, slip=True)
            yield Step(say(rng, mended), mended, fact)
        else:
            yield Step(say(rng, step), step, fact)


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
