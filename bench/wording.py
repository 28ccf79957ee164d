"""What it costs that the target goes on from a draft's wording, by the temperature that the draft draws at.

One step at a time, in process, and the demo world's checker in the judge's place, which is never wrong: where the draft's step
means what the target's does, the draft's is kept. Whatever the answers lose beside the target's own is not a verifier's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.table import Table

from bench.evaluation.command import DATA_SEED
from bench.evaluation.statistics import paired_difference
from bench.kit.intervals import Cluster, Share
from bench.kit.models import CHAIN_TOKENS, CHECKPOINTS, STEP_TOKENS, TEMPERATURE, Model, end_tokens, sampling_at
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from demo.problems import Problem, check_answer, problems, same_step
from demo.tokenizer import END_THINK, chat
from lr_backend.engine import Sampling
from lr_backend.engine.inprocess import run_all
from lr_backend.engine.request import EngineRequest, StopWords

IN_FLIGHT = 64
"""Answers that are written at a time: their texts fit the KV cache."""


@dataclass
class Writing:
    """An answer that is being written, in tokens; ``prompt`` is its question's."""

    task: Problem
    prompt: list[int]
    written: list[int] = field(default_factory=list)
    is_reasoning: bool = True
    num_drafted: int = 0
    num_accepted: int = 0

    def request(self, sampling: Sampling, stops: StopWords, seed: int, most: int = CHAIN_TOKENS) -> EngineRequest:
        left = CHAIN_TOKENS - len(self.written)
        return EngineRequest("", (*self.prompt, *self.written), min(most, left), sampling, seed=seed, stop_words=stops)


def answers(target: Model, draft: Model, tasks: Sequence[Problem], temperature: float | None, seed: int) -> list[Writing]:
    """The tasks' answers with steps drafted at ``temperature``; None drafts none."""
    rng = Random(f"wording-{temperature}-{seed}")
    sampling, drafted_as = sampling_at(TEMPERATURE), sampling_at(temperature or 0.0)
    step_ends, turn_ends = end_tokens(target, at_steps=True), end_tokens(target, at_steps=False)
    at_steps, at_turns = (StopWords.of((token,) for token in ends) for ends in (step_ends, turn_ends))
    all_answers = [Writing(task, target.encode(chat(task.question))) for task in tasks]
    waiting, live = iter(all_answers), list[Writing]()
    while live := [*live, *islice(waiting, IN_FLIGHT - len(live))]:
        ends = [at_steps if one.is_reasoning else at_turns for one in live]
        own = run_all(
            target.engine, [one.request(sampling, end, rng.getrandbits(62)) for one, end in zip(live, ends, strict=True)]
        )
        reasoning = [one for one in live if one.is_reasoning and temperature is not None]
        asked = [one.request(drafted_as, at_steps, rng.getrandbits(62), STEP_TOKENS) for one in reasoning]
        drafted = dict(zip(map(id, reasoning), run_all(draft.engine, asked) if asked else (), strict=True))
        for one, generation in zip(live, own, strict=True):
            step = list(generation.token_ids)
            text = target.decode(step)
            if id(one) in drafted:
                guess = list(drafted[id(one)].token_ids)
                said = target.decode(guess)
                one.num_drafted += 1
                if (END_THINK in said) == (END_THINK in text) and same_step(said, text):
                    one.num_accepted += 1
                    step = guess
            one.is_reasoning = one.is_reasoning and END_THINK not in text
            one.written += step
        live = [one for one in live if one.written[-1] not in turn_ends and len(one.written) < CHAIN_TOKENS]
    return all_answers


Rights = Sequence[Sequence[bool]]
"""Whether each answer of each sample is right."""


def rights(target: Model, found: Sequence[Sequence[Writing]]) -> Rights:
    """Whether each answer of each sample is right."""
    return [[check_answer(one.task, target.decode(one.written)) for one in sample] for sample in found]


def figures(found: Sequence[Sequence[Writing]], each: Rights, first: Rights | None = None) -> dict[str, Any]:
    """Of the answers of several samples: the share that is right (95 %, by problem) and the share of drafted steps accepted.

    Args:
        first: of the first row, to which the difference is taken, paired by problem; None: this is the first row.
    """
    right = Share.of(answer for sample in each for answer in enumerate(sample))
    num_drafted = sum(one.num_drafted for sample in found for one in sample)
    num_accepted = sum(one.num_accepted for sample in found for one in sample)
    less = paired_difference(_by_problem(each), _by_problem(first)).scaled(100.0) if first is not None else None
    return {
        "answers": right.total,
        "right": [round(value, 4) for value in (right.value, *right.interval())],
        "each": [sum(sample) for sample in each],
        "difference_points": None if less is None else [round(value, 2) for value in (less.value, less.low, less.high)],
        "alpha": round(num_accepted / num_drafted, 4) if num_drafted else None,
    }


def _by_problem(each: Rights) -> list[Cluster]:
    return [Cluster(float(sum(answers)), float(len(answers))) for answers in zip(*each, strict=True)]


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1)] = 2000,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each problem in each row.")] = 3,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "wording.json",
) -> None:
    """Print a table, and one JSON line."""
    target, draft = (Model.load(CHECKPOINTS / role, os.cpu_count() or 1) for role in ("target", "draft"))
    tasks = list(islice(problems(DATA_SEED, "test"), num_problems))
    rows = {"the target alone": None, "drafted at temperature 0": 0.0, f"drafted at {TEMPERATURE:g}": TEMPERATURE}
    headings = ("", "right", "95 %", "less the target alone, points (95 %)", "of each sample", "steps accepted")
    table = Table(*headings, title=f"{num_problems} demo problems, a perfect checker")
    made: dict[str, Any] = {}
    first: Rights | None = None
    for name, temperature in rows.items():
        found = [answers(target, draft, tasks, temperature, seed) for seed in range(samples)]
        each = rights(target, found)
        one = figures(found, each, first)
        first = each if first is None else first
        value, low, high = one["right"]
        less = "{:+.1f} ({:+.1f} to {:+.1f})".format(*one["difference_points"]) if one["difference_points"] else ""
        accepted = f"{one['alpha']:.2f}" if one["alpha"] is not None else ""
        table.add_row(name, f"{value:.1%}", f"{low:.1%} to {high:.1%}", less, ", ".join(map(str, one["each"])), accepted)
        made[name] = one
    console_of_any_width().print(table)
    document = {"num_problems": num_problems, "num_samples": samples, "rows": made}
    write_json(output, document)
    print_line(console_of_any_width(), document)
