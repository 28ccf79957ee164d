"""A deployment that ``lookahead init`` wrote for checkpoints of one's own, served by a real Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.cli.app import app
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.serve.warmup import post_json, warm_engines, warm_loop
from tests.support import tiny_models
from tests.support.own_checkpoints import make_pair

pytestmark = pytest.mark.integration
READY_S = 240.0


@pytest.mark.parametrize(("family", "thinks"), [("qwen2", False), ("llama", True)])
def test_what_init_writes_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, thinks: bool) -> None:
    if not thinks:
        monkeypatch.setattr(tiny_models, "THINK_TOKENS", ())
    target, draft = make_pair(tmp_path / "checkpoints", family)
    path = tmp_path / "engines" / "own.toml"
    written = CliRunner().invoke(app, ["init", "--target", str(target), "--draft", str(draft), "--output", str(path)])
    assert written.exit_code == 0, written.output

    report = build_repository(DeploymentSpec.load(path))
    with TritonServer(report.output, ServerOptions(exit_timeout_s=2)) as server:
        server.wait_ready(READY_S)
        warm_engines(server.http_url)
        warm_loop(server.http_url)
        for mode in ("ar", "auto"):
            body = {"text_input": "Count.", "mode": mode, "max_tokens": 24, "temperature": 0.0, "stream": False}
            answer = post_json(server.http_url, "lookahead", "generate", body, 60.0)
            assert answer["finish_reason"] in ("stop", "length")
