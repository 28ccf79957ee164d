"""Turns on a noisy machine: what is compared takes turns, and every ratio is taken within one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
Asked = TypeVar("Asked")


def rotated(turns: Sequence[T], number: int) -> list[T]:
    """The turns of one round. Their order rotates from round to round, so that none always comes first."""
    shift = number % len(turns)
    return [*turns[shift:], *turns[:shift]]


def in_turns(turns: Sequence[T], questions: Sequence[Asked], title: str, console: Console) -> Iterator[tuple[int, Asked, T]]:
    """Every turn of every problem, with the problem's number, behind a progress bar.

    Turns that follow one another ask different problems, as far apart as there are. Otherwise all but the first would find the
    question, and the beginning of the answer, in the KV cache. That spares whoever computes most prompts the most.
    """
    apart = max(1, len(questions) // len(turns))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=len(questions) * len(turns))
        for number in range(len(questions)):
            for place in rotated(range(len(turns)), number):
                index = (number + apart * place) % len(questions)
                yield index, questions[index], turns[place]
                progress.advance(task)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


Rounds = dict[str, list[float]]


def timed_rounds(actions: Mapping[str, Callable[[], float]], num_rounds: int) -> Rounds:
    """Run every action once a round, in an order that rotates; each returns its figure. The first round is not kept."""
    names = list(actions)
    for name in names:
        actions[name]()
    figures: Rounds = {name: [] for name in names}
    for number in range(num_rounds):
        for name in rotated(names, number):
            figures[name].append(actions[name]())
    return figures


def ratio(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> Spread:
    """``factor * over / under``, round by round."""
    return Spread.of([factor * one / other for one, other in zip(over, under, strict=True)])
