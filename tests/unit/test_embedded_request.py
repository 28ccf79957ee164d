"""Reading contract tensors: every shape a scalar may come in, upstream's defaults, and refusals that name the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lr_backend.contract import BY_NAME, ENGINE_INPUTS, ENGINE_OUTPUTS, encode_stop_words, engine_tensor
from lr_backend.engine import GREEDY, EngineCall, Generation, Sampling, cancel_tensors, one_hot_logits
from lr_backend.engine.protocol import DOUBT
from lr_backend.engine.request import EngineRequest, EngineResponse, StopWords
from lr_backend.errors import EngineRejected

IDS = np.array([5, 6, 7], dtype=np.int32)


def tensors(batched: bool = True, **values: Any) -> dict[str, Any]:
    values = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4, **values}
    found = {name: engine_tensor(name, value) for name, value in values.items() if value is not None}
    return found if batched else {name: tensor[0] for name, tensor in found.items()}


def read(batched: bool = True, **values: Any) -> EngineRequest:
    return EngineRequest.from_tensors("id", tensors(batched, **values))


def test_a_stop_list_is_read_once_and_not_taken_for_another() -> None:
    def words(array: np.ndarray[Any, Any]) -> StopWords:
        return EngineRequest.from_call(EngineCall("id", IDS, 3, Sampling(), 11, array)).stop_words

    first = words(encode_stop_words([(1, 2), (3,)]))
    assert words(encode_stop_words([(1, 2), (3,)])) is first
    assert words(encode_stop_words([(1,), (2, 3)])) == StopWords.of([(1,), (2, 3)])
    assert words(encode_stop_words([(1, 2), (3,)]).astype(np.int64)) == first


@pytest.mark.parametrize("batched", [True, False])
def test_everything_is_read_with_and_without_a_batch_dimension(batched: bool) -> None:
    logits = np.zeros((2, 9), dtype=np.float32)
    asked = read(
        batched,
        draft_input_ids=[1, 2],
        draft_logits=logits,
        temperature=0.5,
        runtime_top_k=3,
        runtime_top_p=0.9,
        seed=2**64 - 1,
        end_id=8,
        stop_words_list=encode_stop_words([(1, 2), (3,)]),
        min_tokens=2,
        return_log_probs=True,
        return_perf_metrics=True,
        exclude_input_in_output=True,
    )
    assert asked.input_ids == (5, 6, 7)
    assert asked.draft_ids == (1, 2)
    assert asked.draft_logits is not None
    assert asked.draft_logits.shape == (2, 9)
    assert asked.sampling == Sampling(temperature=0.5, top_k=3, top_p=pytest.approx(0.9))
    assert (asked.seed, asked.end_id, asked.min_tokens, asked.max_new_tokens) == (2**64 - 1, 8, 2, 4)
    assert asked.stop_words == StopWords.of([(1, 2), (3,)])
    assert asked.return_log_probs
    assert asked.return_perf_metrics
    assert asked.exclude_input


def test_a_call_reads_the_same_either_way() -> None:
    call = EngineCall(
        "id", IDS, 3, Sampling(0.75, 5, 0.5), 11, encode_stop_words([(4,)]), np.array([1, 2], np.int32), None, 1, True
    )
    assert EngineRequest.from_tensors("id", call.tensors()) == EngineRequest.from_call(call)
    greedy = EngineCall("id", IDS, 3)
    assert EngineRequest.from_tensors("id", greedy.tensors()).sampling.greedy
    assert EngineRequest.from_call(greedy).sampling.greedy


def test_input_lengths_cut_padding_off() -> None:
    assert read(input_lengths=2).input_ids == (5, 6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GREEDY),
        ({"runtime_top_k": 1}, Sampling(1.0, 1)),
        ({"runtime_top_k": 0}, GREEDY),
        ({"temperature": 0.5}, GREEDY),
        ({"temperature": 0.5, "runtime_top_k": 3}, Sampling(0.5, 3)),
        ({"temperature": 0.5, "runtime_top_p": 1.0}, Sampling(0.5)),
        ({"runtime_top_p": 0.5}, Sampling(1.0, 0, 0.5)),
        ({"runtime_top_p": 0.0}, GREEDY),
        ({"runtime_top_p": -1.0, "temperature": 2.0}, GREEDY),
        ({"temperature": 0.0, "runtime_top_p": 0.5}, Sampling(0.0, 0, 0.5)),
    ],
)
def test_sampling_defaults_are_upstreams(values: dict[str, Any], expected: Sampling) -> None:
    assert read(**values).sampling == expected


def test_no_end_id_is_minus_one_or_none_given() -> None:
    assert read().end_id is None
    assert read(end_id=-1).end_id is None


@pytest.mark.parametrize("name", [spec.name for spec in ENGINE_INPUTS if not spec.embedded])
def test_unsupported_inputs_are_rejected_by_name(name: str) -> None:
    spec = BY_NAME[name]
    array = np.zeros([1, *(abs(dim) for dim in spec.dims)], dtype=spec.numpy_dtype)
    with pytest.raises(EngineRejected, match=f"{name}: this engine does not support"):
        EngineRequest.from_tensors("id", tensors() | {name: array})


def test_unknown_inputs_are_rejected_by_name() -> None:
    with pytest.raises(EngineRejected, match="no_such_input"):
        EngineRequest.from_tensors("id", tensors() | {"no_such_input": np.zeros(1)})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("streaming", {"streaming": True}),
        ("beam_width", {"beam_width": 2}),
        ("beam_width", {"beam_width": 0}),
        ("input_ids", {"input_ids": None}),
        ("input_lengths", {"input_lengths": None}),
        ("input_lengths", {"input_lengths": 4}),
        ("input_lengths", {"input_lengths": 0}),
        ("request_output_len", {"request_output_len": None}),
        ("request_output_len", {"request_output_len": 0}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
        ("runtime_top_k", {"runtime_top_k": -1}),
        ("runtime_top_p", {"runtime_top_p": 1.5}),
        ("runtime_top_p", {"runtime_top_p": float("nan")}),
        ("end_id", {"end_id": -2}),
        ("min_tokens", {"min_tokens": -1}),
        ("draft_logits", {"draft_input_ids": [1], "draft_logits": np.zeros((2, 9), np.float32)}),
        ("draft_logits", {"draft_logits": np.zeros((1, 9), np.float32)}),
        ("draft_logits", {"draft_input_ids": [1], "draft_logits": np.full((1, 9), np.nan, np.float32)}),
    ],
)
def test_bad_values_are_rejected_by_name(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(EngineRejected, match=f"^{name}"):
        read(**values)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("input_ids", np.zeros((2, 3), np.int32)),
        ("input_ids", np.zeros((1, 3), np.float32)),
        ("input_ids", np.zeros((1, 0), np.int32)),
        ("draft_input_ids", np.zeros((1, 0), np.int32)),
        ("temperature", np.zeros((1, 2), np.float32)),
        ("temperature", np.array([["hot"]], dtype=object)),
        ("seed", np.zeros((1, 1), np.float32)),
        ("stop", np.zeros((1, 1), np.int32)),
        ("stop_words_list", np.zeros((1, 3, 2), np.int32)),
        ("stop_words_list", np.array([["a", "b"], [1, 2]], dtype=object)),
        ("stop_words_list", np.array([[[1, 2], [2, 1]]], np.int32)),
        ("draft_logits", np.zeros((1, 1, 9), np.int32)),
    ],
)
def test_bad_shapes_and_types_are_rejected_by_name(name: str, array: Any) -> None:
    expected = "input_lengths" if name == "input_ids" and array.size == 0 else name
    with pytest.raises(EngineRejected, match=f"^{expected}"):
        EngineRequest.from_tensors("id", tensors() | {name: array})


def test_a_cancel_reads_as_one_whatever_else_it_holds() -> None:
    asked = EngineRequest.from_tensors("id", cancel_tensors())
    assert asked.stop
    assert asked.request_id == "id"


def test_one_hot_logits_need_no_conversion_on_their_way() -> None:
    logits = one_hot_logits(np.array([3, 0], np.int32), 9)
    assert np.shares_memory(engine_tensor("draft_logits", logits), logits), "of the contract's type already"
    asked = EngineRequest.from_tensors("id", tensors(draft_input_ids=[3, 0]) | {"draft_logits": logits[np.newaxis]})
    assert asked.draft_logits is not None
    chances = np.exp(asked.draft_logits) / np.exp(asked.draft_logits).sum(axis=1, keepdims=True)
    assert chances == pytest.approx(np.eye(9)[[3, 0]], abs=DOUBT)


def test_draft_logits_are_a_copy() -> None:
    logits = one_hot_logits(np.array([3], np.int32), 9)[np.newaxis]
    asked = EngineRequest.from_tensors("id", tensors(draft_input_ids=[3]) | {"draft_logits": logits})
    logits[:] = 7
    assert asked.draft_logits is not None
    assert asked.draft_logits.max() == 0.0


def response(**fields: Any) -> EngineResponse:
    values: dict[str, Any] = {
        "token_ids": (1, 2),
        "log_probs": (-0.5, -1.5),
        "num_draft_tokens": 4,
        "num_accepted_tokens": 1,
        "num_reused_tokens": 70,
        "num_allocated_blocks": 3,
        "tokens_per_block": 32,
        "arrival_ns": 10,
        "first_scheduled_ns": 20,
        "first_token_ns": 30,
        "last_token_ns": 40,
    }
    return EngineResponse(read(**fields), **values)


def test_outputs_are_the_contracts() -> None:
    asked: dict[str, Any] = dict.fromkeys(
        ("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"), True
    )
    outputs = response(**asked, exclude_input_in_output=True).tensors()

    assert set(outputs) == {spec.name for spec in ENGINE_OUTPUTS if spec.embedded}
    for name, array in outputs.items():
        assert array.dtype == BY_NAME[name].numpy_dtype
        assert array.ndim == 1 + len(BY_NAME[name].dims)
    assert outputs["output_ids"].tolist() == [[[1, 2]]]
    assert outputs["sequence_length"].tolist() == [[2]]
    assert outputs["cum_log_probs"].tolist() == [[-2.0]]
    assert outputs["acceptance_rate"].tolist() == [[0.25]]
    assert outputs["kv_cache_reused_blocks"].tolist() == [[2]]
    assert outputs["kv_cache_alloc_total_blocks"].tolist() == [[5]]
    assert outputs["num_input_tokens"].tolist() == [[3]]
    assert Generation.from_tensors(outputs, tokens_per_block=32).token_ids == (1, 2)


def test_outputs_without_being_asked_are_ids_and_length_with_the_prompt() -> None:
    outputs = response().tensors()
    assert set(outputs) == {"output_ids", "sequence_length"}
    assert outputs["output_ids"].tolist() == [[[5, 6, 7, 1, 2]]]
    assert outputs["sequence_length"].tolist() == [[5]]


def test_both_ways_to_a_generation_agree() -> None:
    direct = response(return_log_probs=True, return_perf_metrics=True, exclude_input_in_output=True)
    decoded = Generation.from_tensors(direct.tensors(), tokens_per_block=32)
    assert (decoded.queue_s, decoded.total_s) == (direct.generation().queue_s, direct.generation().total_s)
    assert decoded.total_s > 0.0
    assert decoded.num_accepted_tokens == direct.generation().num_accepted_tokens == 1
    assert decoded.log_probs == pytest.approx(direct.generation().log_probs)
    assert (decoded.num_reused_tokens, direct.generation().num_reused_tokens) == (64, 70)


def test_what_an_engine_was_not_asked_is_unknown() -> None:
    asked_little = response(return_perf_metrics=False, exclude_input_in_output=True)
    assert Generation.from_tensors(asked_little.tensors()).num_reused_tokens is None
