"""The benchmark runs and names its figures."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from lr_backend.torch_engine.bench import main
from tests.support.torch_engines import tiny_checkpoint


def test_the_benchmark_prints_its_figures(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    arguments = [str(tiny_checkpoint(tmp_path, max_position_embeddings=1024)), "--rounds", "1", "--prefix", "20"]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    for figure in ("decode greedy, batch 8", "verify 8 drafts", "prefill 512 tokens"):
        assert figure in result.output
