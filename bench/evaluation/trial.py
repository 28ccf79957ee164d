"""Verifiers on trial: ``python -m bench.evaluation.trial``. What each lets through, and what that does to the answers.

Every verifier answers the same problems in mode ``lr``, beside ``ar``, once in the demo world and once in a domain that neither
draft nor judge has learned (:mod:`demo.second_domain`). Each is a run of ``lookahead eval``, so that both go on where they were
stopped; one report joins them. What the verifiers say of single pairs of steps, off the server: ``python -m bench.verifiers``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.evaluation.command import DATA_SEED, Settings, console_of_any_width, run_evaluation, write_report
from bench.evaluation.summary import BASELINE, DEFAULT_MARGIN
from bench.evaluation.tasks import load
from bench.evaluation.turns import turns
from demo.asking import MAX_TOKENS, demo_spec
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.request import VerifierName

ALWAYS = ("random@0.3", "random@0.5", "random@0.7", "random@0.9", "exact", "judge", "cascade")
WITH_EMBEDDING = ("embedding@0.8", "embedding@0.85", "embedding@0.9", "embedding@0.95", "embedding@0.99")
DOMAINS = ("demo", "second")


def chosen_verifiers(given: str, embedding: bool) -> tuple[str, ...]:
    """Those that are named, or all that a server with these models can serve."""
    if given:
        return tuple(part.strip() for part in given.split(",") if part.strip())
    return (*ALWAYS, *(WITH_EMBEDDING if embedding else ()))


def deployment(embedding_dir: Path | None) -> EmbeddedDeployment:
    """The demo's, with a sentence embedding where there is one."""
    spec = demo_spec()
    if embedding_dir is None:
        return spec
    settings = {**spec.lookahead, "embedding_dir": str(embedding_dir.resolve())}
    found = spec.model_copy(update={"lookahead": settings})
    assert found.loop_config().lacks(VerifierName.EMBEDDING.value) is None
    return found


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1, help="In each domain.")] = 60,
    verifiers: Annotated[str, typer.Option(help="Such as judge,random@0.5; by default all that can be served.")] = "",
    embedding_dir: Annotated[Path | None, typer.Option(help="A sentence-transformers folder; without: no such rows.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0)] = 0.6,
    seed: Annotated[int, typer.Option()] = 0,
    domain: Annotated[list[str] | None, typer.Option(help="demo or second; by default both.")] = None,
    out: Annotated[Path, typer.Option(help="A run directory for each domain, and the report.")] = Path("out/trial"),
) -> None:
    """Print the tables, write a page, and end with one JSON line."""
    console = console_of_any_width()
    spec = deployment(embedding_dir)
    common = {"max_tokens": MAX_TOKENS, "temperature": temperature}
    settled = turns((BASELINE, "lr"), chosen_verifiers(verifiers, embedding_dir is not None), common)
    folders = []
    for name in domain or DOMAINS:
        data = load(name, seed=DATA_SEED, end=num_problems)
        folders.append(out / name)
        run_evaluation(Settings(data, settled, seed=seed), folders[-1], url=None, deployment=spec, console=console)
    write_report(folders, out, margin=DEFAULT_MARGIN, baseline=BASELINE, console=console, title="Verifiers on trial")


if __name__ == "__main__":
    typer.run(main)
