"""Verifiers on trial: what each lets through, and what that does to the answers.

Every verifier answers the same problems in mode ``lr``, beside ``ar``, once in the demo world and once in a domain that neither
draft nor judge has learned (:mod:`demo.second_domain`). Each is a run of ``lookahead eval``, so that both go on where they were
stopped; one report joins them. What the verifiers say of single pairs of steps, off the server: :mod:`bench.verifiers`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from bench.evaluation.command import DATA_SEED, Settings, run_evaluation, write_report
from bench.evaluation.summary import BASELINE, DEFAULT_MARGIN
from bench.evaluation.tasks import load
from bench.evaluation.turns import turns
from bench.kit.output import PAGES, console_of_any_width
from bench.kit.serving import MAX_TOKENS, demo_spec, with_verifiers
from bench.kit.verifiers import Section, chance, embedding
from lr_backend.request import VerifierName

DOMAINS = ("demo", "second")
CHANCES = (0.3, 0.5, 0.7, 0.9)
COSINES = (0.8, 0.85, 0.9, 0.95, 0.99)


def plug_ins(embedding_dir: Path | None) -> dict[str, Section]:
    """Verifiers that the server takes on for the trial, by name."""
    found = {f"chance_{round(100 * share)}": chance(share) for share in CHANCES}
    if embedding_dir is not None:
        found |= {f"embedding_{round(100 * least)}": embedding(embedding_dir, least) for least in COSINES}
    return found


def chosen_verifiers(given: str, taken_on: Iterable[str]) -> tuple[str, ...]:
    """Those that are named, or all that the server has."""
    named = tuple(part.strip() for part in given.split(",") if part.strip())
    return named or (*VerifierName, *taken_on)


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="In each domain.")] = 60,
    verifiers: Annotated[str, typer.Option(help="Such as judge,chance_50; by default all that can be served.")] = "",
    embedding_dir: Annotated[Path | None, typer.Option(help="A sentence-transformers folder; without: no such rows.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    out: Annotated[Path, typer.Option(help="A run directory for each domain, and the report.")] = Path("out/trial"),
    output: Annotated[Path, typer.Option(help="Where the report's figures go too.")] = PAGES / "trial.json",
) -> None:
    """Print the tables, write a page, and end with one JSON line."""
    console = console_of_any_width()
    taken_on = plug_ins(embedding_dir)
    spec = with_verifiers(demo_spec(), taken_on)
    common = {"max_tokens": MAX_TOKENS, "temperature": temperature}
    settled = turns((BASELINE, "lr"), chosen_verifiers(verifiers, taken_on), common)
    folders = []
    for name in DOMAINS:
        data = load(name, seed=DATA_SEED, end=num_problems)
        folders.append(out / name)
        run_evaluation(Settings(data, settled), folders[-1], url=None, deployment=spec, console=console)
    write_report(folders, out, margin=DEFAULT_MARGIN, baseline=BASELINE, console=console, title="Verifiers on trial")
    shutil.copy(out / "report.json", output)
