"""Pairs of steps that the judge learns from: one meaning in two wordings, one field changed, or what a draft really writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from bench.kit.models import Model, compared_steps
from demo.problems import LARGEST, SMALLEST, Meaning, Split, meaning, phrase, problems, same_meaning, say, spans
from demo.sentences import FRACTIONS, INVERSE, ITEMS, NAMES, OPERATOR, STEPS
from lr_backend.verify.numeric import veto

DRAFTED_PROBLEMS = 256
"""Problems that are drafted at a time."""
WORDINGS = 3
"""Of the worked step, beside each drafted one."""

TWINS = {
    "add": "sub", "sub": "add", "mul": "div", "div": "mul", "more": "fewer", "fewer": "more",
    "times": "fraction", "fraction": "times",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Two steps and the checker's verdict on them.

    ``fields``: for each field that ``second`` states, where its first mention ends (in characters) and whether ``first``
    states the same; empty for two steps of different families. ``problem``: the number of a made pair's problem.
    """

    first: str
    second: str
    aligned: bool
    fields: tuple[tuple[int, bool], ...] = ()
    problem: int = 0


def _other_number(rng: random.Random, number: int) -> int:
    """Another count; near misses and swapped digits as often as any."""
    near = [number + shift for shift in (-10, -2, -1, 1, 2, 10)] + [int(str(number)[::-1])]
    choices = [n for n in near if SMALLEST <= n <= LARGEST and n != number]
    if choices and rng.random() < 0.6:
        return rng.choice(choices)
    return rng.choice([n for n in range(SMALLEST, LARGEST + 1) if n != number])


def _changes(rng: random.Random, step: Meaning) -> list[Meaning]:
    """``step`` with each of its fields changed, one at a time."""
    return [*_other_words(rng, step), *_subtle_changes(rng, step), *_other_operator(step)]


def _subtle_changes(rng: random.Random, step: Meaning) -> list[Meaning]:
    """The changes that are hard to see: another number, or the two people swapped."""
    swapped = [replace(step, subject=step.other, other=step.subject)] if step.other else []
    return [*swapped, *_other_numbers(rng, step)]


def _other_words(rng: random.Random, step: Meaning) -> Iterator[Meaning]:
    """Another unit, another person."""
    people = [name for name in NAMES if name not in (step.subject, step.other)]
    yield replace(step, unit=rng.choice([item for item in ITEMS if item != step.unit]))
    if step.subject:
        yield replace(step, subject=rng.choice(people))
    if step.other:
        yield replace(step, other=rng.choice(people))


def _other_numbers(rng: random.Random, step: Meaning) -> Iterator[Meaning]:
    """Another first or second operand, another result, another slip."""
    if step.a:
        yield replace(step, a=_other_number(rng, step.a))
    if step.b and step.family in ("fraction", "part"):
        yield replace(step, b=rng.choice([b for b in FRACTIONS if b != step.b]))
    elif step.b:
        yield replace(step, b=_other_number(rng, step.b))
    if step.result:
        yield replace(step, result=_other_number(rng, step.result))
    if step.wrong:
        yield replace(step, wrong=_other_number(rng, step.wrong))


def _other_operator(step: Meaning) -> Iterator[Meaning]:
    """The inverse operator, with the words that belong to it."""
    if step.kind in ("check", "mend"):
        yield replace(step, op=INVERSE[step.op])
    elif step.family in TWINS and (TWINS[step.family] != "fraction" or step.b in FRACTIONS):
        twin = TWINS[step.family]
        yield replace(step, family=twin, op=OPERATOR[twin])


def change(rng: random.Random, step: Meaning, *, subtly: bool = False) -> Meaning:
    """``step`` with exactly one number, operator, unit or name changed; ``subtly``: where that is hard to see, if it can be."""
    return rng.choice((_subtle_changes(rng, step) if subtly else []) or _changes(rng, step))


def _steps(seed: int, split: Split) -> Iterator[tuple[Meaning, ...]]:
    """The meanings of one problem's steps, endlessly; slips and mends among them."""
    for problem in problems(seed, split, slip_rate=0.15):
        yield tuple(step.meaning for step in problem.steps)


def _fields(first: Meaning, second: Meaning, text: str) -> tuple[tuple[int, bool], ...]:
    """The fields of ``text``, which says ``second``, against those of ``first``: (end of the mention, the same)."""
    if first.family != second.family:
        return ()
    return tuple((end, getattr(first, field) == getattr(second, field)) for field, (_, end) in spans(text).items())


def pairs(
    seed: int,
    split: Split = "train",
    stray_rate: float = 0.1,
    echo_rate: float = 0.0,
    blur_rate: float = 0.0,
    subtle_rate: float = 0.0,
) -> Iterator[Pair]:
    """Half in other words, half with one field changed.

    A share ``stray_rate`` of the latter are two different steps of one problem instead. Easier pairs, to learn from: a share
    ``echo_rate`` of all keeps the wording of the first step, and a share ``blur_rate`` of the changed is changed further. Harder
    ones: of a share ``subtle_rate`` of the changed it is a number, or who is who.
    """
    rng = random.Random(f"pairs-{split}-{seed}")
    for problem, steps in enumerate(_steps(seed, split)):
        for step in steps:
            second = step
            if rng.random() < 0.5:
                stray = rng.random() < stray_rate
                second = rng.choice(steps) if stray else change(rng, step, subtly=rng.random() < subtle_rate)
                for _ in range(rng.randint(1, 4) if rng.random() < blur_rate else 0):
                    second = change(rng, second)
            wording = rng.randrange(len(STEPS[step.family]))
            one = two = phrase(STEPS[step.family][wording], step)
            if rng.random() < echo_rate:
                two = phrase(STEPS[second.family][wording % len(STEPS[second.family])], second)
            else:
                while two == one:
                    two = say(rng, second)
            yield Pair(one, two, same_meaning(one, two), _fields(step, second, two), problem)


def drafted_pairs(draft: Model, seed: int, split: Split = "train") -> Iterator[Pair]:
    """Worked steps in other words, each beside what ``draft`` writes after the same prefix; endlessly.

    Nobody would invent how a draft goes wrong: it compares a person with themselves, or breaks a sentence off. Left out is what
    a judge is not asked: the same text, and what the numeric veto rejects. Of the rest, half are made to be rejections.
    """
    rng = random.Random(f"drafted-{split}-{seed}")
    worked = problems(seed, split)
    while True:
        tasks = list(islice(worked, DRAFTED_PROBLEMS))
        chains = [draft.encode(task.completion) for task in tasks]
        compared = [step for step in compared_steps(draft, draft, tasks, chains) if step.same_end]
        drawn = [
            Pair(text, step.drafted_text, same_meaning(text, step.drafted_text), _fields_of(text, step.drafted_text))
            for step in compared
            if (stated := meaning(step.target_text)) is not None
            for text in {say(rng, stated): None for _ in range(WORDINGS)}
            if text != step.drafted_text and veto(text, step.drafted_text) is None
        ]
        rejected = [pair for pair in drawn if not pair.aligned]
        accepted = [pair for pair in drawn if pair.aligned]
        balanced = rejected + rng.sample(accepted, min(len(accepted), len(rejected)))
        rng.shuffle(balanced)
        yield from balanced


def _fields_of(first: str, second: str) -> tuple[tuple[int, bool], ...]:
    one, two = meaning(first), meaning(second)
    return _fields(one, two, second) if one is not None and two is not None else ()
