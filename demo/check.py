"""Measure the demo models: ``python -m demo.check [--problems 500] [--pairs 2000]``. Prints a table and one JSON line.

Exit status 1: the interval of a figure lies wholly outside of what is wanted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.kit.intervals import Share
from bench.kit.models import CHECKPOINTS, TEMPERATURE, Model, compared_steps, generate_all, solve
from demo.judge_pairs import pairs
from demo.problems import Problem, Split, check_answer, problems
from lr_backend.engine.settings import WeightDtype
from lr_backend.verify.judge_prompt import JudgePrompt, parse_verdict

SEED = 1


def right_answers(model: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]]) -> Share:
    """How many problems are answered right."""
    texts = [model.decode(chain) for chain in chains]
    return Share(sum(check_answer(task, text) for task, text in zip(tasks, texts, strict=True)), len(tasks))


def judge_all(judge: Model, steps: Sequence[tuple[str, str]]) -> list[bool | None]:
    """The judge's verdict on each (target step, drafted step)."""
    prompt = JudgePrompt.from_tokenizer(judge.tokenizer)
    prompts = []
    for first, second in steps:
        ids = prompt.ids(first, second)
        assert ids is not None, "a step is longer than the judge reads"
        prompts.append(ids)
    made = generate_all(judge, prompts, at_steps=False, max_new_tokens=1, temperature=0.0)
    return [parse_verdict(judge.decode(ids)) for ids in made]


@dataclass(frozen=True)
class JudgeFigures:
    """Agreement of judge and checker."""

    agree: Share
    aligned_accepted: Share
    changed_accepted: Share


def judge_figures(judge: Model, count: int) -> JudgeFigures:
    """The judge on ``count`` unseen pairs: half in other words, half with one field changed."""
    tested = list(islice(pairs(SEED, "test", stray_rate=0.0), count))
    verdicts = [v is True for v in judge_all(judge, [(pair.first, pair.second) for pair in tested])]
    judged = list(zip(tested, verdicts, strict=True))
    return JudgeFigures(
        Share.of((pair.problem, v == pair.aligned) for pair, v in judged),
        Share.of((pair.problem, v) for pair, v in judged if pair.aligned),
        Share.of((pair.problem, v) for pair, v in judged if not pair.aligned),
    )


@dataclass(frozen=True)
class AcceptanceFigures:
    """What becomes of the draft's steps beside the target's at the same prefix. ``wrongly_accepted`` is the share of the
    judge's acceptances that the checker would not have given."""

    judge: Share
    checker: Share
    identical: Share
    wrongly_accepted: Share


def acceptance_figures(
    target: Model, draft: Model, judge: Model, tasks: Sequence[Problem], chains: Sequence[Sequence[int]]
) -> AcceptanceFigures:
    """Sample the draft's step at every step prefix of the target's chains, and compare."""
    steps = compared_steps(target, draft, tasks, chains)
    verdicts = judge_all(judge, [(step.target_text, step.drafted_text) for step in steps])
    judged = [step.identical or (step.same_end and v is True) for step, v in zip(steps, verdicts, strict=True)]
    return AcceptanceFigures(
        Share.of((step.problem, j) for step, j in zip(steps, judged, strict=True)),
        Share.of((step.problem, step.same) for step in steps),
        Share.of((step.problem, step.identical) for step in steps),
        Share.of((step.problem, not step.same) for step, j in zip(steps, judged, strict=True) if j),
    )


@dataclass(frozen=True)
class Figure:
    """A measured share, and the least and the most that are wanted of it."""

    name: str
    share: Share
    least: float = 0.0
    most: float = 1.0

    @property
    def wanted(self) -> str:
        if self.most < 1.0:
            return f"{self.least:.0%} to {self.most:.0%}" if self.least > 0.0 else f"at most {self.most:.0%}"
        return f"at least {self.least:.0%}" if self.least > 0.0 else ""

    @property
    def is_missed(self) -> bool:
        """Whether the 95 % interval lies wholly outside of what is wanted."""
        low, high = self.share.interval()
        return high < self.least or low > self.most


def report(console: Console, figures: Sequence[Figure], seconds: float) -> int:
    """Print the figures as a table and as one JSON line. Exit status: 1 where one is missed."""
    table = Table("figure", "measured", "95 % interval", "of", "wanted", title=f"demo models, {seconds:.0f} s")
    for each in figures:
        low, high = each.share.interval()
        table.add_row(each.name, f"{each.share.value:.1%}", f"{low:.1%} to {high:.1%}", str(each.share.total), each.wanted)
    console.print(table)
    missed = [each.name for each in figures if each.is_missed]
    if missed:
        console.print(f"[bold red]not as wanted:[/] {', '.join(missed)}", soft_wrap=True)
    line = {each.name: {**asdict(each.share), "share": round(each.share.value, 4)} for each in figures}
    console.print(json.dumps(line), soft_wrap=True, highlight=False)
    return int(bool(missed))


def main(
    problem_count: Annotated[int, typer.Option("--problems", help="Unseen problems to solve.")] = 500,
    pair_count: Annotated[int, typer.Option("--pairs", help="Unseen pairs to judge.")] = 2000,
    acceptance_count: Annotated[int, typer.Option("--acceptance", help="Problems whose steps are drafted.")] = 100,
    validation: Annotated[bool, typer.Option(help="Use the validation split, as during development.")] = False,
    checkpoints: Annotated[Path, typer.Option()] = CHECKPOINTS,
    weight_dtype: Annotated[WeightDtype, typer.Option(help="same, bfloat16, int8 or auto: how weights are held")] = "same",
) -> None:
    """Measure target, draft and judge on problems that were never trained on."""
    started = time.monotonic()
    split: Split = "validation" if validation else "test"
    tasks = list(islice(problems(SEED, split), problem_count))
    rows: list[Figure] = []
    there = [role for role in ("target", "draft", "judge") if _there(checkpoints, role)]
    if not there:
        raise typer.BadParameter(f"there is no model in {checkpoints}")
    models = {role: Model.load(checkpoints / role, os.cpu_count() or 1, weight_dtype) for role in there}
    chains: list[list[int]] = []
    for role, least, most in (("target", 0.92, 1.0), ("draft", 0.3, 0.7)):
        if model := models.get(role):
            rows.append(Figure(f"{role} right, greedy", right_answers(model, tasks, solve(model, tasks, 0.0)), least, most))
            sampled = solve(model, tasks, TEMPERATURE)
            rows.append(Figure(f"{role} right, T {TEMPERATURE}", right_answers(model, tasks, sampled)))
            chains = sampled if role == "target" else chains
    if judge := models.get("judge"):
        figures = judge_figures(judge, pair_count)
        rows.append(Figure("judge agrees with checker", figures.agree, 0.98))
        rows.append(Figure("judge accepts other words", figures.aligned_accepted))
        rows.append(Figure("judge accepts a changed field", figures.changed_accepted))
    if len(models) == 3:
        n = acceptance_count
        met = acceptance_figures(models["target"], models["draft"], models["judge"], tasks[:n], chains[:n])
        rows.append(Figure(f"steps accepted by judge, T {TEMPERATURE}", met.judge, 0.4, 0.7))
        rows.append(Figure(f"steps accepted by checker, T {TEMPERATURE}", met.checker))
        rows.append(Figure(f"steps with identical text, T {TEMPERATURE}", met.identical, most=met.judge.value))
        rows.append(Figure("accepted by judge, not by checker", met.wrongly_accepted))
    for model in models.values():
        model.engine.close()
    raise typer.Exit(report(Console(width=110), rows, time.monotonic() - started))


def _there(checkpoints: Path, role: str) -> bool:
    return (checkpoints / role / "model.safetensors").exists()


if __name__ == "__main__":
    typer.run(main)
