"""The paper's table 2 for this project's verifiers.

Drafted and target steps are compared at every step prefix of the demo target's own chains, in process: how often each verifier
accepts, how often it says what the demo world's checker says, which share of its acceptances the checker would not have given
(95 % interval, by problem), and what a verdict takes, one at a time. Pairs that no verifier is asked about (equal tokens, one of
the two ends the reasoning) are left out. What a changed name, number or word does is measured on the checker's own pairs
(``--pairs``), where half are changed in one field, and on the same kind of pairs of a domain that no demo model has learned
(:mod:`demo.second_domain`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.kit.intervals import Share
from bench.kit.models import CHECKPOINTS, Model, compared_steps, solve
from bench.kit.output import console_of_any_width, print_line, write_json
from bench.plug_ins.embedding_model import EmbeddingModel
from bench.plug_ins.verifiers import Chance, Embedding, Grade
from demo import second_domain
from demo.judge_pairs import pairs
from demo.problems import problems
from lr_backend.config import LoopConfig
from lr_backend.engine.inprocess import InProcessEngine
from lr_backend.request import LookaheadRequest, VerifierName
from lr_backend.steps.step import Step, StepEnd
from lr_backend.verify import Reason, StepPair, Verdict, Verifier, VerifierParts, VerifierPlugIn, make_verifier
from lr_backend.verify.cascade import CascadeVerifier, numeric_veto
from lr_backend.verify.judge_prompt import JudgePrompt, judges_prefill

TEMPERATURE = 0.6
SEED = 1
COSINES = (0.85, 0.9, 0.95, 0.99)
GRADES = (7.0, 9.0)


@dataclass(frozen=True)
class Case:
    """A pair, what the demo world's checker says of it, and of which problem it is; pairs of one problem are alike."""

    pair: StepPair
    same: bool
    problem: int


@dataclass(frozen=True)
class VerifierFigures:
    """One row. ``wrong`` is the share of its acceptances that the checker would not have given; ``by`` counts who decided."""

    accepted: Share
    agreed: Share
    wrong: Share
    ms_a_verdict: float
    by: Mapping[str, int]

    @classmethod
    def of(cls, cases: Sequence[Case], verdicts: Sequence[Verdict], seconds: Sequence[float]) -> VerifierFigures:
        """The figures of ``verdicts`` on ``cases``, each of which took its ``seconds``."""
        judged = [(case, verdict.accepted) for case, verdict in zip(cases, verdicts, strict=True)]
        by: dict[str, int] = {}
        for verdict in verdicts:
            by[verdict.verifier or ""] = by.get(verdict.verifier or "", 0) + 1
        return cls(
            Share.of((case.problem, accepted) for case, accepted in judged),
            Share.of((case.problem, accepted == case.same) for case, accepted in judged),
            Share.of((case.problem, not case.same) for case, accepted in judged if accepted),
            median(seconds) * 1e3 if seconds else 0.0,
            by,
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "num_pairs": self.accepted.total,
            "accept_rate": round(self.accepted.value, 4),
            "agreement": round(self.agreed.value, 4),
            "false_accept_rate": round(self.wrong.value, 4) if self.wrong.total else None,
            "false_accept_interval": [round(bound, 4) for bound in self.wrong.interval()] if self.wrong.total else None,
            "ms_a_verdict_p50": round(self.ms_a_verdict, 3),
            "decided_by": dict(self.by),
        }


class Accepting:
    """Stands behind a stage, to show what the stage alone lets through."""

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(True, Reason.PLUG_IN, verifier="nobody")


def drafted_cases(target: Model, draft: Model, num_problems: int, seed: int) -> list[Case]:
    """Pairs as the server meets them: the draft's step at every step prefix of the target's chains."""
    tasks = list(islice(problems(seed, "test"), num_problems))
    chains = solve(target, tasks, TEMPERATURE)
    cases = []
    for index, one in enumerate(compared_steps(target, draft, tasks, chains)):
        if one.identical or not one.same_end:
            continue
        first, second = Step(tuple(one.target_ids), StepEnd.DELIMITER), Step(tuple(one.drafted_ids), StepEnd.DELIMITER)
        prefix = np.asarray(one.prefix, dtype=np.int32)
        pair = StepPair(first, second, one.target_text, one.drafted_text, f"drafted/{index}", prefix)
        cases.append(Case(pair, one.same, one.problem))
    return cases


def checker_cases(target: Model, num_pairs: int, seed: int) -> list[Case]:
    """The judge's own kind of pairs: half in other words, half with one field changed."""
    found = islice(pairs(seed, "test", stray_rate=0.0), num_pairs)
    return pair_cases(target, ((one.first, one.second, one.aligned, one.problem) for one in found), "checker")


def second_cases(target: Model, num_pairs: int, seed: int) -> list[Case]:
    """The same kind of pairs of a domain that no demo model has learned."""
    return pair_cases(target, islice(second_domain.pairs(seed), num_pairs), "second")


def pair_cases(target: Model, found: Iterable[tuple[str, str, bool, int]], name: str) -> list[Case]:
    """Pairs (a step, another, whether they mean the same, of which problem) as cases. There is no prefix but a full stop."""
    prefix = np.asarray(target.encode("."), dtype=np.int32)
    cases = []
    for index, (first, second, same, problem) in enumerate(found):
        steps = [Step(tuple(target.encode(text)), StepEnd.DELIMITER) for text in (first, second)]
        cases.append(Case(StepPair(steps[0], steps[1], first, second, f"{name}/{index}", prefix), same, problem))
    return cases


def plug_ins(embedding_dir: Path | None) -> dict[str, VerifierPlugIn]:
    """The verifiers of the paper that a server does without, by row."""
    found: dict[str, VerifierPlugIn] = {"chance 0.5": Chance(0.5)}
    if embedding_dir is not None:
        model = EmbeddingModel.load(embedding_dir)
        found |= {f"embedding {least:g}": Embedding(least=least, model=model) for least in COSINES}
    return found | {f"grade {least:g}": Grade(least) for least in GRADES}


def verifiers(parts: VerifierParts, config: LoopConfig) -> Iterator[tuple[str, Verifier]]:
    """(row, verifier) of all that this machine can run."""
    for name in VerifierName:
        yield name, make_verifier(LookaheadRequest(text_input="-", verifier=name), config, parts)
    yield "numeric veto alone", CascadeVerifier((numeric_veto,), Accepting())
    for row, plug_in in parts.plug_ins.items():
        yield row, plug_in.for_request(LookaheadRequest(text_input="-", seed=0), parts)


async def measure(verifier: Verifier, cases: Sequence[Case]) -> VerifierFigures:
    """One verdict after another; the first is given twice and the first time not counted."""
    verdicts, seconds = [], []
    for case in cases[:1]:
        await verifier.verify(case.pair)
    for case in cases:
        started = time.perf_counter()
        verdicts.append(await verifier.verify(case.pair))
        seconds.append(time.perf_counter() - started)
    return VerifierFigures.of(cases, verdicts, seconds)


def show(console: Console, title: str, rows: Mapping[str, VerifierFigures]) -> None:
    columns = ("verifier", "accepts", "agrees with checker", "wrongly accepted", "95 % interval", "ms a verdict", "decided by")
    table = Table(*columns, title=title)
    for name, one in rows.items():
        low, high = one.wrong.interval()
        by = ", ".join(f"{who} {count}" for who, count in sorted(one.by.items()))
        wrong = (f"{one.wrong.value:.1%}", f"{low:.1%} to {high:.1%}") if one.wrong.total else ("", "")
        table.add_row(name, f"{one.accepted.value:.1%}", f"{one.agreed.value:.1%}", *wrong, f"{one.ms_a_verdict:.2f}", by)
    console.print(table)


def main(
    num_problems: Annotated[int, typer.Option("--problems", help="problems whose steps are drafted")] = 40,
    num_pairs: Annotated[int, typer.Option("--pairs", help="pairs of the demo world's checker")] = 500,
    checkpoints: Annotated[Path, typer.Option(help="folder of target, draft and judge")] = CHECKPOINTS,
    embedding_dir: Annotated[Path | None, typer.Option(help="a sentence-transformers checkpoint; without: no such rows")] = None,
    judge_dir: Annotated[Path | None, typer.Option("--judge", help="another judge, for instance one of half the size")] = None,
    threads: Annotated[int, typer.Option(help="torch threads")] = os.cpu_count() or 1,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/verifiers.json"),
) -> None:
    """Print a table for drafted, one for changed steps and one for those of another domain, and one JSON line."""
    folders = {role: checkpoints / role for role in ("target", "draft", "judge")} | ({"judge": judge_dir} if judge_dir else {})
    models = {role: Model.load(folder, threads) for role, folder in folders.items()}
    target, judge = models["target"], models["judge"]
    config = LoopConfig(tokenizer_dir=checkpoints / "target", judge_tokenizer_dir=folders["judge"])
    parts = VerifierParts(
        InProcessEngine(target.engine),
        InProcessEngine(judge.engine),
        target.tokenizer,
        JudgePrompt.from_tokenizer(judge.tokenizer, prefill=judges_prefill(judge.tokenizer)),
        judge.tokenizer,
        think_open=config.think_open,
        think_close=config.think_close,
        plug_ins=plug_ins(embedding_dir),
    )
    sets = {
        "drafted": drafted_cases(target, models["draft"], num_problems, SEED),
        "changed": checker_cases(target, num_pairs, SEED),
        "second domain": second_cases(target, num_pairs, SEED),
    }

    async def all_rows() -> dict[str, dict[str, VerifierFigures]]:
        return {
            name: {row: await measure(verifier, cases) for row, verifier in verifiers(parts, config)}
            for name, cases in sets.items()
        }

    figures = asyncio.run(all_rows())
    for model in models.values():
        model.engine.close()
    console = console_of_any_width()
    for name, rows in figures.items():
        show(console, f"{name} steps: {len(sets[name])} pairs, {sum(case.same for case in sets[name])} the same", rows)
    line = {name: {row: one.as_dict() for row, one in rows.items()} for name, rows in figures.items()}
    write_json(output, line)
    print_line(console, line)
