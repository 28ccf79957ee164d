"""A deployment that ``lookahead init`` wrote for checkpoints of one's own, served by a real Triton."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lr_client import Client, Options, ServerError
from tokenizers import Tokenizer
from typer.testing import CliRunner

from lr_backend.build.base import Layout
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.cli.app import app
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.serve.warmup import post_json, warm_engines, warm_loop
from tests.support import tiny_models
from tests.support.embedded_engines import poison
from tests.support.own_checkpoints import make_pair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
READY_S = 240.0


@pytest.mark.parametrize(
    ("family", "thinks", "layout"), [("qwen2", False, Layout.ONE_PROCESS), ("llama", True, Layout.PROCESS_A_ROLE)]
)
def test_what_init_writes_answers_and_a_prompt_that_the_target_cannot_compute_fails_alone_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, thinks: bool, layout: Layout
) -> None:
    """Behind one letter the model computes NaN. Who uses it is told; who asks at the same time is answered as without it."""
    if not thinks:
        monkeypatch.setattr(tiny_models, "THINK_TOKENS", ())
    target, draft = make_pair(tmp_path / "checkpoints", family)
    poison(target, Tokenizer.from_file(str(target / "tokenizer.json")).token_to_id("~"))
    path = tmp_path / "engines" / "own.toml"
    written = CliRunner().invoke(app, ["init", "--target", str(target), "--draft", str(draft), "--output", str(path)])
    assert written.exit_code == 0, written.output
    spec = DeploymentSpec.load(path)
    spec = spec.model_copy(update={"server": spec.server.model_copy(update={"layout": layout})})
    options = Options(mode="lr_sd", verifier="exact", max_tokens=48, seed=1, deterministic=True)

    report = build_repository(spec)
    with TritonServer(report.output, ServerOptions(exit_timeout_s=2)) as server:
        server.wait_ready(READY_S)
        if layout is Layout.PROCESS_A_ROLE:  # else they are no models of the server
            warm_engines(server.http_url)
        warm_loop(server.http_url)
        for mode in ("ar", "auto"):
            body = {"text_input": "Count.", "mode": mode, "max_tokens": 24, "temperature": 0.0, "stream": False}
            answer = post_json(server.http_url, "lookahead", "generate", body, 60.0)
            assert answer["finish_reason"] in ("stop", "length")

        with Client(server.grpc_url, timeout_s=60.0) as client, ThreadPoolExecutor(16) as pool:
            before = client.ask("Count.", options)
            good = [pool.submit(client.ask, "Count.", options) for _ in range(8)]
            bad = [pool.submit(client.ask, "Count ~ this.", options) for _ in range(8)]
            for each in bad:
                with pytest.raises(ServerError) as told:
                    each.result()
                assert told.value.code == "LR_NOT_FINITE"
            answers = [each.result() for each in good]
            assert {(each.text, each.usage.degraded) for each in answers} == {(before.text, ())}
