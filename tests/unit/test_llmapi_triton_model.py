"""The LLM API engine as a Triton model, against stand-ins for Triton's stub and for TensorRT-LLM."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from lr_backend.contract import encode_stop_words
from lr_backend.engine import EngineCall, Generation, cancel_tensors
from lr_backend.notice import NOTICE_VARIABLE
from tests.support.fake_llmapi import fake_classes, fake_upstream, scripted
from tests.support.fake_pb_utils import StubError, StubException, StubFamily, StubRequest, StubResponse, stub_module
from tests.support.llmapi_engines import really_close
from tests.support.observed import WAIT_S, reached_within

PROMPT = (50, 60)


def counting(context: tuple[int, ...]) -> int:
    return len(context) - len(PROMPT)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``lr_backend.triton.llmapi_model``, imported over the stand-ins; tokens after ``PROMPT`` are 0, 1, 2 ..."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub_module())
    monkeypatch.delitem(sys.modules, "lr_backend.triton.llmapi_model", raising=False)
    upstream = fake_upstream(scripted(lambda context, draw: counting(context)), counting)
    package, arguments = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.llmapi")
    package.LLM, package.SamplingParams = upstream.LLM, upstream.SamplingParams  # type: ignore[attr-defined]
    arguments.KvCacheConfig, arguments.CudaGraphConfig = upstream.KvCacheConfig, upstream.CudaGraphConfig  # type: ignore[attr-defined]
    for name, made in fake_classes().items():
        setattr(arguments, name, made)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", arguments)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("lr_backend.triton.metrics.REFRESH_S", 0.01)
    import lr_backend.triton.llmapi_model as module

    StubFamily.values.clear()
    yield module
    sys.modules.pop("lr_backend.triton.llmapi_model", None)


def arguments(tmp_path: Path, **parameters: str) -> dict[str, str]:
    folder = tmp_path / "1" / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    sizes = {"max_batch_size": "4", "max_seq_len": "256", "max_queue_size": "3"}
    values = {"gpt_model_path": str(folder), **sizes, **parameters}
    config = {"parameters": {key: {"string_value": value} for key, value in values.items()}}
    return {"model_config": json.dumps(config), "model_name": "target", "model_repository": str(tmp_path)}


@pytest.fixture
def model(module: Any, tmp_path: Path) -> Iterator[Any]:
    model = module.TritonPythonModel()
    model.initialize(arguments(tmp_path, gpu_device_ids="3"))
    yield model
    model.finalize()


def test_its_own_events_are_lines_of_json(module: Any, tmp_path: Path) -> None:
    model = module.TritonPythonModel()
    model.initialize(arguments(tmp_path))
    model.finalize()
    assert isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer)


def tensors(max_new_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return EngineCall("a", np.array(PROMPT, np.int32), max_new_tokens, **fields).tensors()


def test_settings_and_gpus_are_set_before_the_model_loads(model: Any) -> None:
    assert (model._config.max_batch_size, model._config.max_queue_size) == (4, 3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_request_is_answered_once_in_the_contracts_tensors(model: Any) -> None:
    request = StubRequest(tensors(stop_words=encode_stop_words([[3, 4]]), return_log_probs=True))
    model.execute([request])
    answer = request.answer()
    assert answer.error is None
    generation = Generation.from_tensors(answer.outputs)
    assert generation.token_ids == (0, 1, 2, 3, 4)
    assert len(generation.log_probs) == 5
    assert answer.outputs["output_ids"].shape == (1, 1, 5)


def test_only_wanted_outputs_are_sent_and_the_prompt_is_there_unless_excluded(model: Any) -> None:
    asked = tensors(3)
    del asked["exclude_input_in_output"]
    request = StubRequest(asked, "a", ("output_ids", "sequence_length"))
    model.execute([request])
    outputs = request.answer().outputs
    assert set(outputs) == {"output_ids", "sequence_length"}
    assert outputs["output_ids"].ravel().tolist() == [*PROMPT, 0, 1, 2]


def test_refusals_carry_a_name_and_a_code(model: Any) -> None:
    drafted = StubRequest(tensors(3, draft_ids=np.array([1, 2], np.int32)), "a")
    unsupported = StubRequest(tensors() | {"embedding_bias": np.zeros((1, 61), np.float32)}, "b")
    model.execute([drafted, unsupported])
    for request, name in ((drafted, "draft_input_ids"), (unsupported, "embedding_bias")):
        assert request.error().code == StubError.INVALID_ARG
        assert request.error().message.startswith(f"LR_ENGINE_REJECTED: {name}")


def test_a_full_queue_and_a_cancel(model: Any) -> None:
    model._engine._llm.gate.clear()
    requests = [StubRequest(tensors(200), str(number)) for number in range(7)]
    late, cancel = StubRequest(tensors(), "late"), StubRequest(cancel_tensors(), "0")
    model.execute([*requests, late])
    assert late.error().code == StubError.UNAVAILABLE
    model.execute([cancel])
    assert cancel.answer().outputs["output_ids"].size == 0
    # A cancel is answered at once and then works its way to the executor, which must not run before it is there.
    assert model._engine._llm.heard_abort.wait(30)
    model._engine._llm.gate.set()
    assert requests[0].answer().outputs["output_ids"].size < 200
    assert all(request.answer().outputs["output_ids"].size == 200 for request in requests[1:])


def test_a_call_ends_with_its_client(model: Any) -> None:
    """A step loop elsewhere may go away without a word."""
    model._engine._llm.gate.clear()
    gone, stays = StubRequest(tensors(200), "gone", is_gone=True), StubRequest(tensors(200), "stays")
    model.execute([gone, stays])
    assert model._engine._llm.heard_abort.wait(30)
    model._engine._llm.gate.set()
    assert gone.answer().outputs["output_ids"].size < 200
    assert stays.answer().outputs["output_ids"].size == 200


@pytest.mark.parametrize("end", ["dies", "dies unwatched", "is closed"])
def test_a_process_ends_with_its_llm_where_the_launcher_sees_it(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """Triton would keep the model ready. What is in flight is answered first."""
    model, request, ends = module.TritonPythonModel(), StubRequest(tensors(200)), []
    if end != "dies unwatched":
        monkeypatch.setenv(NOTICE_VARIABLE, "watched")
    monkeypatch.setattr("lr_backend.llmapi.engine.LOOK_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda status: ends.append((status, request.answers[0].error.code)))
    of_other_tests = set(threading.enumerate())
    model.initialize(arguments(tmp_path))
    (watching,) = (each for each in set(threading.enumerate()) - of_other_tests if each.name == "end of the engine")
    model._engine._llm.gate.clear()
    model.execute([request])
    if end == "is closed":
        model.finalize()
    else:
        model._engine._llm.shutdown()
    watching.join(WAIT_S)
    assert not watching.is_alive()
    assert request.error().code == StubError.UNAVAILABLE
    assert ends == ([(1, StubError.UNAVAILABLE)] if end == "dies" else [])
    assert ("the engine died: it has shut down" in caplog.text) == (end != "is closed")
    if end != "is closed":
        model.finalize()
        really_close(model._engine)


class Unsendable(StubRequest):
    def send(self, response: StubResponse, flags: int) -> None:
        raise StubException("Failed to increase the shared memory pool size")


@pytest.mark.parametrize("asked", [tensors(), tensors(4096)], ids=["answered", "refused"])
def test_an_answer_that_triton_does_not_take_is_logged_by_its_request(model: Any, asked: dict[str, Any]) -> None:
    with capture_logs() as lines:
        model.execute([Unsendable(asked, "full")])
        reached_within(WAIT_S, lambda: bool(lines))
    assert [(line["event"], line["request_id"], line["log_level"]) for line in lines] == [("request_unanswered", "full", "error")]


def test_metrics_are_its_own(model: Any) -> None:
    request = StubRequest(tensors(3))
    model.execute([request])
    request.answer()
    model._metrics.refresh()
    values = {name: value for (name, _), value in StubFamily.values.items()}
    assert values["lr_engine_requests_total"] == 1
    assert values["lr_engine_tokens_decoded_total"] == 3
    assert not any("blocks" in name or "draft" in name for name in values), "what nobody counted is not shown as zero"


def test_an_engine_that_drafts_by_itself_says_how_much_and_counts_it(module: Any, tmp_path: Path) -> None:
    model = module.TritonPythonModel()
    model.initialize(arguments(tmp_path, speculative="ngram", max_draft_len="3"))
    request = StubRequest(tensors(9, num_draft_tokens=3, return_perf_metrics=True))
    model.execute([request])
    generation = Generation.from_tensors(request.answer().outputs)
    assert generation.token_ids == tuple(range(9))
    assert (generation.num_draft_tokens, generation.num_accepted_tokens) == (6, 6)
    model._metrics.refresh()
    values = {name: value for (name, _), value in StubFamily.values.items()}
    assert (values["lr_engine_draft_tokens_total"], values["lr_engine_accepted_tokens_total"]) == (6, 6)
    model.finalize()


def test_packages_of_its_own_stand_first_for_itself_and_for_its_workers(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "own_packages", lambda: tmp_path / "lib")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    model = module.TritonPythonModel()
    model.initialize(arguments(tmp_path))
    assert sys.path[0] == str(tmp_path / "lib")
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'lib'}:/elsewhere"
    model.finalize()


@pytest.mark.parametrize(
    ("message", "parameters"),
    [("no_such_key", {"no_such_key": "1"}), ("elsewhere", {"gpt_model_path": "elsewhere"})],
)
def test_what_is_wrong_keeps_the_model_from_loading(message: str, parameters: Any, module: Any, tmp_path: Path) -> None:
    with pytest.raises(StubException, match=message):
        module.TritonPythonModel().initialize(arguments(tmp_path, **parameters))


def test_without_tensorrt_llm_it_says_what_to_install(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(StubException, match="runtime 'llmapi' needs TensorRT-LLM"):
        module.TritonPythonModel().initialize(arguments(tmp_path))
