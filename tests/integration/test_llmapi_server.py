"""The LLM API engine in a real Triton, over a stand-in for TensorRT-LLM; and what an administrator alone may use there."""

from __future__ import annotations

import asyncio
import http.client
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from lr_backend.build.render import TEMPLATES, _render_folder
from lr_backend.contract import ENGINE_INPUTS, ENGINE_OUTPUTS, encode_stop_words, tensor_list_pbtxt
from lr_backend.engine import EngineCall, Generation, Sampling
from lr_backend.errors import EngineRejected
from lr_backend.serve.backend_dir import PACKAGE
from lr_backend.serve.restrictions import HEADER
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.triton.remote_engine import RemoteEngine

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PROMPT = np.array([50, 60], np.int32)
KEY = "0123456789abcdef"
STAND_IN = """
import os
from tests.support.fake_llmapi import fake_upstream, scripted

assert os.environ["CUDA_VISIBLE_DEVICES"] == "2", "before the import"
_upstream = fake_upstream(scripted(lambda context, draw: len(context) - 2))
LLM, SamplingParams = _upstream.LLM, _upstream.SamplingParams
KvCacheConfig, CudaGraphConfig = _upstream.KvCacheConfig, _upstream.CudaGraphConfig
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("llmapi")
    package = folder / "packages" / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "llmapi.py").write_text("from tensorrt_llm import CudaGraphConfig, KvCacheConfig\n")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text("{}")
    values = {
        "role": "target",
        "spec_name": "test",
        "max_batch_size": 64,
        "inputs": tensor_list_pbtxt("input", ENGINE_INPUTS),
        "outputs": tensor_list_pbtxt("output", ENGINE_OUTPUTS),
        "parameters": {"gpt_model_path": str(folder / "checkpoint"), "gpu_device_ids": "2", "max_seq_len": "512"},
    }
    for name, text in _render_folder(TEMPLATES / "llmapi", "target", values).items():
        (folder / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "repository" / name).write_text(text)
    options = ServerOptions(packages=(PACKAGE, package, ROOT / "tests"), exit_timeout_s=5, admin_key=KEY)
    with TritonServer(folder / "repository", options) as server:
        server.wait_ready(120)
        yield server
    shutil.rmtree(folder / "packages")


def ask(server: TritonServer, *calls: EngineCall) -> list[Generation]:
    async def main() -> list[Generation]:
        engine = RemoteEngine(f"grpc://{server.grpc_url}", "target")
        try:
            return list(await asyncio.gather(*(engine.generate(call) for call in calls)))
        finally:
            await engine.close()

    return asyncio.run(main())


def test_the_contract_over_the_wire(server: TritonServer) -> None:
    stop = encode_stop_words([[7, 8, 9]])
    calls = [EngineCall(str(number), PROMPT, 20, stop_words=stop, return_log_probs=True) for number in range(12)]
    answers = ask(server, *calls)
    assert {answer.token_ids for answer in answers} == {tuple(range(10))}
    assert all(answer.log_probs == (-0.25,) * 10 for answer in answers)
    (unscored,) = ask(server, replace(calls[0], sampling=Sampling(0.5, 0)))  # of a token among all nobody says how likely it is
    assert len(unscored.token_ids) > 0 and unscored.log_probs == ()


def test_drafts_are_refused_by_name(server: TritonServer) -> None:
    with pytest.raises(EngineRejected, match="draft_input_ids"):
        ask(server, EngineCall("a", PROMPT, 3, draft_ids=np.array([1, 2], np.int32)))


def repository_index(server: TritonServer, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=10)
    try:
        connection.request("POST", "/v2/repository/index", "{}", {"Connection": "close", **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def test_restricted_parts_open_to_the_key_alone(server: TritonServer) -> None:
    assert repository_index(server, {}) == 403
    assert repository_index(server, {HEADER: "wrong-wrong-wrong"}) == 403
    assert repository_index(server, {HEADER: KEY}) == 200
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_ready() and client.get_model_config("target")
        for refused in (client.get_model_repository_index, client.get_system_shared_memory_status, client.get_log_settings):
            with pytest.raises(InferenceServerException, match="triton-grpc-protocol-lookahead-admin-key"):
                refused()
        assert client.get_model_repository_index(headers={f"triton-grpc-protocol-{HEADER}": KEY})
