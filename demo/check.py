"""Measure the demo models: ``python -m demo.check [--problems 500] [--pairs 2000]``. Prints a table and one JSON line."""

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


def judge_figures(judge: Model, count: int, seed: int) -> JudgeFigures:
    """The judge on ``count`` unseen pairs: half in other words, half with one field changed."""
    tested = list(islice(pairs(seed, "test", stray_rate=0.0), count))
    verdicts = [v is True for v in judge_all(judge, [(pair.first, pair.second) for pair in tested])]
    aligned = [v for pair, v in zip(tested, verdicts, strict=True) if pair.aligned]
    changed = [v for pair, v in zip(tested, verdicts, strict=True) if not pair.aligned]
    return JudgeFigures(
        Share(sum(aligned) + len(changed) - sum(changed), count),
        Share(sum(aligned), len(aligned)),
        Share(sum(changed), len(changed)),
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


def report(console: Console, rows: Sequence[tuple[str, Share, str]], seconds: float) -> None:
    """Print the figures as a table and as one JSON line."""
    table = Table("figure", "measured", "95 % interval", "of", "wanted", title=f"demo models, {seconds:.0f} s")
    for name, share, wanted in rows:
        low, high = share.interval()
        table.add_row(name, f"{share.value:.1%}", f"{low:.1%} to {high:.1%}", str(share.total), wanted)
    console.print(table)
    line = {name: {**asdict(share), "share": round(share.value, 4)} for name, share, _ in rows}
    console.print(json.dumps(line), soft_wrap=True, highlight=False)


def main(
    problem_count: Annotated[int, typer.Option("--problems", help="Unseen problems to solve.")] = 500,
    pair_count: Annotated[int, typer.Option("--pairs", help="Unseen pairs to judge.")] = 2000,
    acceptance_count: Annotated[int, typer.Option("--acceptance", help="Problems whose steps are drafted.")] = 100,
    validation: Annotated[bool, typer.Option(help="Use the validation split, as during development.")] = False,
    seed: Annotated[int, typer.Option()] = 1,
    threads: Annotated[int, typer.Option(help="torch threads")] = os.cpu_count() or 1,
    checkpoints: Annotated[Path, typer.Option()] = CHECKPOINTS,
    weight_dtype: Annotated[WeightDtype, typer.Option(help="same, bfloat16, int8 or auto: how weights are held")] = "same",
) -> None:
    """Measure target, draft and judge on problems that were never trained on."""
    started = time.monotonic()
    split: Split = "validation" if validation else "test"
    tasks = list(islice(problems(seed, split), problem_count))
    rows: list[tuple[str, Share, str]] = []
    there = [role for role in ("target", "draft", "judge") if _there(checkpoints, role)]
    if not there:
        raise typer.BadParameter(f"there is no model in {checkpoints}")
    models = {role: Model.load(checkpoints / role, threads, weight_dtype) for role in there}
    chains: list[list[int]] = []
    for role, wanted in (("target", "at least 92 %"), ("draft", "30 to 70 %")):
        if model := models.get(role):
            rows.append((f"{role} right, greedy", right_answers(model, tasks, solve(model, tasks, 0.0)), wanted))
            sampled = solve(model, tasks, TEMPERATURE)
            rows.append((f"{role} right, T {TEMPERATURE}", right_answers(model, tasks, sampled), ""))
            chains = sampled if role == "target" else chains
    if judge := models.get("judge"):
        figures = judge_figures(judge, pair_count, seed)
        rows.append(("judge agrees with checker", figures.agree, "at least 98 %"))
        rows.append(("judge accepts other words", figures.aligned_accepted, ""))
        rows.append(("judge accepts a changed field", figures.changed_accepted, ""))
    if len(models) == 3:
        n = acceptance_count
        met = acceptance_figures(models["target"], models["draft"], models["judge"], tasks[:n], chains[:n])
        rows.append((f"steps accepted by judge, T {TEMPERATURE}", met.judge, "40 to 70 %"))
        rows.append((f"steps accepted by checker, T {TEMPERATURE}", met.checker, ""))
        rows.append((f"steps with identical text, T {TEMPERATURE}", met.identical, "rarer"))
        rows.append(("accepted by judge, not by checker", met.wrongly_accepted, ""))
    for model in models.values():
        model.engine.close()
    report(Console(width=110), rows, time.monotonic() - started)


def _there(checkpoints: Path, role: str) -> bool:
    return (checkpoints / role / "model.safetensors").exists()


if __name__ == "__main__":
    typer.run(main)
