"""The engine as a Triton model, against a stand-in for Triton's stub: one final answer a request, whatever happens."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from lr_backend.contract import encode_stop_words
from lr_backend.engine import EngineCall, Generation, cancel_tensors
from lr_backend.notice import NOTICE_VARIABLE
from tests.support.embedded_engines import Gate, Pause, check_accounting, prompt, tiny_checkpoint
from tests.support.fake_pb_utils import StubError, StubException, StubFamily, StubRequest, stub_module
from tests.support.observed import WAIT_S


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``lr_backend.triton.engine_model``, imported over the stand-in."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub_module())
    monkeypatch.delitem(sys.modules, "lr_backend.triton.engine_model", raising=False)
    import lr_backend.triton.engine_model as module

    monkeypatch.setattr("lr_backend.triton.metrics.REFRESH_S", 0.01)
    StubFamily.values.clear()
    yield module
    sys.modules.pop("lr_backend.triton.engine_model", None)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder / "1" / "checkpoint")
    return folder


def arguments(repository: Path, **changes: str) -> dict[str, str]:
    parameters = {
        "gpt_model_path": str(repository / "1" / "checkpoint"),
        "max_batch_size": "4",
        "max_seq_len": "256",
        "max_tokens_in_paged_kv_cache": "1024",
        "max_num_tokens": "64",
        "max_draft_len": "8",
        "num_threads": "1",
        "max_queue_size": "3",
        **changes,
    }
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {"model_config": json.dumps(config), "model_name": "target", "model_repository": str(repository)}


@pytest.fixture
def model(module: Any, repository: Path) -> Iterator[Any]:
    model = module.TritonPythonModel()
    model.initialize(arguments(repository))
    yield model
    check_accounting(model._engine)
    model.finalize()


def test_its_own_events_are_lines_of_json(module: Any, repository: Path) -> None:
    model = module.TritonPythonModel()
    model.initialize(arguments(repository))
    model.finalize()
    assert isinstance(structlog.get_config()["processors"][-1], structlog.processors.JSONRenderer)


def tensors(length: int = 9, max_new_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return EngineCall("a", np.array(prompt(length), np.int32), max_new_tokens, **fields).tensors()


def test_config_reaches_the_engine(model: Any) -> None:
    config = model._config
    assert (config.max_batch_size, config.max_queue_size, config.max_seq_len) == (4, 3, 256)


def test_each_request_gets_one_final_answer_later(model: Any) -> None:
    gate = Gate(model._engine)
    requests = [StubRequest(tensors(length), str(length)) for length in (5, 6, 7)]
    assert model.execute(requests) is None
    assert not any(request.answers for request in requests)
    gate.open()
    for request in requests:
        answer = request.answer()
        assert answer.error is None
        assert answer.outputs["output_ids"].shape == (1, 1, 8)
        assert Generation.from_tensors(answer.outputs).token_ids
    assert model._engine.stats().mean_batch_size > 2


def test_scalars_may_come_reshaped_as_triton_reshapes_them(model: Any) -> None:
    request = StubRequest({name: array if name == "input_ids" else array.reshape(1) for name, array in tensors().items()})
    model.execute([request])
    assert request.answer().outputs["sequence_length"].tolist() == [[8]]


def test_only_wanted_outputs_are_sent(model: Any) -> None:
    asked = tensors(return_log_probs=True, return_perf_metrics=True)
    first = StubRequest(asked, "a", ("output_ids", "sequence_length", "acceptance_rate"))
    second = StubRequest(asked, "b", ("output_ids",))
    model.execute([first, second])
    assert set(first.answer().outputs) == {"output_ids", "sequence_length", "acceptance_rate"}
    assert "sequence_length" in second.error().message


def test_the_prompt_is_in_the_output_unless_excluded(model: Any) -> None:
    asked = tensors()
    del asked["exclude_input_in_output"]
    request = StubRequest(asked)
    model.execute([request])
    assert request.answer().outputs["output_ids"].ravel()[:9].tolist() == list(prompt(9))


def test_a_verification_and_stop_words(model: Any) -> None:
    plain = StubRequest(tensors())
    model.execute([plain])
    full = plain.answer().outputs["output_ids"].ravel()
    verified = StubRequest(tensors(draft_ids=full[:7], stop_words=encode_stop_words([full[2:4].tolist()])))
    model.execute([verified])
    assert verified.answer().outputs["output_ids"].ravel().tolist() == full[:4].tolist()


def test_errors_carry_a_code_each(model: Any) -> None:
    rejected = StubRequest(tensors() | {"embedding_bias": np.zeros((1, 61), np.float32)}, "a")
    malformed = StubRequest(tensors() | {"temperature": np.zeros((1, 3), np.float32)}, "b")
    gate = Gate(model._engine)
    accepted = [StubRequest(tensors(), str(number)) for number in range(3)]
    twin = StubRequest(tensors(), "0")
    late = StubRequest(tensors(), "late")
    model.execute([rejected, malformed, *accepted, twin, late])
    assert rejected.error().code == malformed.error().code == twin.error().code == StubError.INVALID_ARG
    assert rejected.error().message.startswith("LR_ENGINE_REJECTED: embedding_bias")
    assert late.error().code == StubError.UNAVAILABLE
    gate.open()
    assert all(request.answer().error is None for request in accepted)


def test_what_nobody_foresaw_is_answered_too(model: Any) -> None:
    broken = StubRequest(tensors())
    broken.inputs = lambda: [None]  # type: ignore[method-assign,list-item,return-value]
    fine = StubRequest(tensors(), "b")
    model.execute([broken, fine])
    assert broken.error().code == StubError.INTERNAL
    assert fine.answer().error is None


def test_a_failed_iteration_is_internal(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(model._engine)
    monkeypatch.setattr(model._engine._runner, "run", lambda chunks: 1 / 0)
    request = StubRequest(tensors())
    model.execute([request])
    gate.open()
    assert request.error().code == StubError.INTERNAL


def test_a_cancel_of_the_same_id_ends_the_run(model: Any) -> None:
    pause = Pause(model._engine, after=3)
    running = StubRequest(tensors(max_new_tokens=240), "x")
    model.execute([running])
    pause.begun.wait(10)
    cancel, unknown = StubRequest(cancel_tensors(), "x"), StubRequest(cancel_tensors(), "unknown")
    model.execute([cancel, unknown])
    pause.end()
    assert cancel.answer().outputs["output_ids"].size == unknown.answer().outputs["output_ids"].size == 0
    assert 0 < running.answer().outputs["output_ids"].size < 240


def test_metrics_follow_the_engine(model: Any) -> None:
    request = StubRequest(tensors(draft_ids=np.array([1, 2], np.int32), max_new_tokens=3))
    model.execute([request])
    request.answer()
    check_accounting(model._engine)  # runs after the iteration that answered, when that is booked
    model._metrics.refresh()
    values = {name: value for (name, role), value in StubFamily.values.items() if role == "target"}
    assert all(name.startswith("lr_engine_") for name in values)
    assert values["lr_engine_requests_total"] == 1
    assert values["lr_engine_draft_tokens_total"] == 2
    assert values["lr_engine_busy_seconds_total"] > 0
    assert values["lr_engine_running"] == 0
    assert values["lr_engine_blocks_cached"] > 0


@pytest.mark.parametrize("dies", [True, False])
def test_a_process_ends_with_its_engine(module: Any, repository: Path, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """Triton would keep the model ready, and it refuse all calls. What is in flight is answered first."""
    model, request, ends = module.TritonPythonModel(), StubRequest(tensors()), []
    monkeypatch.setenv(NOTICE_VARIABLE, "watched")
    monkeypatch.setattr(os, "_exit", lambda status: ends.append((status, request.answers[0].error.code)))
    of_other_tests = set(threading.enumerate())
    model.initialize(arguments(repository))
    (watching,) = (each for each in set(threading.enumerate()) - of_other_tests if each.name == "end of the engine")
    if dies:
        monkeypatch.setattr(model._engine, "_iterate", lambda: 1 / 0)
        model.execute([request])
    else:
        model.finalize()
    watching.join(WAIT_S)
    assert ends == ([(1, StubError.UNAVAILABLE)] if dies else [])
    if dies:
        model.finalize()


def test_finalize_answers_what_is_in_flight(module: Any, repository: Path) -> None:
    model = module.TritonPythonModel()
    model.initialize(arguments(repository))
    pause = Pause(model._engine, after=3)
    requests = [StubRequest(tensors(max_new_tokens=240), str(number)) for number in range(3)]
    model.execute(requests)
    assert pause.begun.wait(10)
    model.finalize()
    assert all(len(request.answers) == 1 for request in requests)
    assert all(request.answers[0].error is not None for request in requests)
    late = StubRequest(tensors(), "late")
    model._enqueue(late)
    assert late.error().code == StubError.UNAVAILABLE


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("no_such_key", {"no_such_key": "1"}),
        ("elsewhere", {"gpt_model_path": "elsewhere"}),
    ],
)
def test_what_is_wrong_keeps_the_model_from_loading(message: str, changes: Any, module: Any, repository: Path) -> None:
    with pytest.raises(StubException, match=message):
        module.TritonPythonModel().initialize(arguments(repository, **changes))
