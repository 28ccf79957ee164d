"""What a tensor is, and the tensors of an engine, written once.

``ENGINE_INPUTS`` and ``ENGINE_OUTPUTS`` are the ``tensorrt_llm`` model of TensorRT-LLM 1.2.1
(``triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt``): same names, dtypes, dims, reshape, ragged and
optional flags. Every engine of ours, compiled or embedded, is served behind them. What clients of the ``lookahead`` model see is
made from the request (:mod:`lr_backend.fields`).

Config files, encoding, decoding and tests read these tables; nothing else in the project spells a tensor's dtype or dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lr_backend.errors import InvalidRequest

IntArray = npt.NDArray[np.int32]
TensorMap = Mapping[str, npt.NDArray[Any]]

NUMPY_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a Triton model.

    Attributes:
        dims: shape without the batch dimension; -1 is free.
        scalar: the backend sees shape ``[]``: ``reshape { shape: [] }`` in the config file.
        ragged: requests of one Triton batch may differ in the free dims.
        embedded: the embedded engine implements it; an input it does not implement is refused by name.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = True
    scalar: bool = False
    ragged: bool = False
    embedded: bool = False

    @property
    def numpy_dtype(self) -> Any:
        return NUMPY_DTYPES[self.dtype]

    def pbtxt(self) -> str:
        """The entry of this tensor in an ``input`` or ``output`` list of ``config.pbtxt``."""
        dims = ", ".join(str(dim) for dim in self.dims)
        lines = [f'name: "{self.name}"', f"data_type: TYPE_{self.dtype}", f"dims: [ {dims} ]"]
        if self.scalar:
            lines.append("reshape: { shape: [ ] }")
        if self.ragged:
            lines.append("allow_ragged_batch: true")
        if self.optional:
            lines.append("optional: true")
        return "  {\n" + "".join(f"    {line}\n" for line in lines) + "  }"


def _scalar(name: str, dtype: str, *, optional: bool = True, embedded: bool = False) -> TensorSpec:
    return TensorSpec(name, dtype, (1,), optional=optional, scalar=True, embedded=embedded)


def _ragged(name: str, dtype: str, *dims: int, embedded: bool = False) -> TensorSpec:
    return TensorSpec(name, dtype, dims, ragged=True, embedded=embedded)


def _output(name: str, dtype: str, *dims: int, embedded: bool = False) -> TensorSpec:
    return TensorSpec(name, dtype, dims, optional=False, embedded=embedded)


LOGITS_DTYPE = "FP16"
"""Of all logits that cross an engine's boundary; a compiled engine's own (``--logits_dtype``) are of this type too.

Half the bytes of FP32 on each of the many copies of draft logits, and nothing is lost: a bfloat16 model's logits have 8 bits,
which FP16's 11 hold. The limit: upstream's sampler then works in FP16 as well, so after the temperature a logit is rounded once
more, by at most 1/64 up to 64. Its backend misreads ``generation_logits`` of this type (tensorrtllm_backend #598); nobody here
asks for them.
"""

ENGINE_INPUTS: tuple[TensorSpec, ...] = (
    _ragged("input_ids", "INT32", -1, embedded=True),
    _ragged("encoder_input_features", "FP16", -1, -1),
    _scalar("encoder_output_lengths", "INT32"),
    _scalar("input_lengths", "INT32", optional=False, embedded=True),
    _scalar("request_output_len", "INT32", optional=False, embedded=True),
    _scalar("num_return_sequences", "INT32"),
    _ragged("draft_input_ids", "INT32", -1, embedded=True),
    _ragged("decoder_input_ids", "INT32", -1),
    _scalar("decoder_input_lengths", "INT32"),
    _ragged("draft_logits", LOGITS_DTYPE, -1, -1, embedded=True),
    _scalar("draft_acceptance_threshold", "FP32"),
    _scalar("end_id", "INT32", embedded=True),
    _scalar("pad_id", "INT32", embedded=True),
    _ragged("stop_words_list", "INT32", 2, -1, embedded=True),
    _ragged("bad_words_list", "INT32", 2, -1),
    _ragged("embedding_bias", "FP32", -1),
    _scalar("beam_width", "INT32", embedded=True),
    _scalar("temperature", "FP32", embedded=True),
    _scalar("runtime_top_k", "INT32", embedded=True),
    _scalar("runtime_top_p", "FP32", embedded=True),
    _scalar("runtime_top_p_min", "FP32"),
    _scalar("runtime_top_p_decay", "FP32"),
    _scalar("runtime_top_p_reset_ids", "INT32"),
    _scalar("len_penalty", "FP32"),
    _scalar("repetition_penalty", "FP32"),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("beam_search_diversity_rate", "FP32"),
    _scalar("early_stopping", "BOOL"),
    _scalar("min_tokens", "INT32", embedded=True),
    _scalar("seed", "UINT64", embedded=True),
    _scalar("return_log_probs", "BOOL", embedded=True),
    _scalar("return_context_logits", "BOOL"),
    _scalar("return_generation_logits", "BOOL"),
    _scalar("return_perf_metrics", "BOOL", embedded=True),
    _scalar("return_num_input_tokens", "BOOL", embedded=True),
    _scalar("return_num_output_tokens", "BOOL", embedded=True),
    _scalar("exclude_input_in_output", "BOOL", embedded=True),
    _scalar("stop", "BOOL", embedded=True),
    _scalar("streaming", "BOOL", embedded=True),
    _ragged("prompt_embedding_table", "FP16", -1, -1),
    _ragged("prompt_table_extra_ids", "UINT64", -1),
    _scalar("prompt_vocab_size", "INT32"),
    _ragged("cross_attention_mask", "BOOL", -1, -1),
    TensorSpec("mrope_rotary_cos_sin", "FP32", (-1,)),
    TensorSpec("mrope_position_deltas", "INT64", (1,)),
    _scalar("lora_task_id", "UINT64"),
    _ragged("lora_weights", "FP16", -1, -1),
    _ragged("lora_config", "INT32", -1, 3),
    _ragged("context_phase_params", "UINT8", -1),
    _ragged("skip_cross_attn_blocks", "BOOL", 1),
    _ragged("retention_token_range_starts", "INT32", -1),
    _ragged("retention_token_range_ends", "INT32", -1),
    _ragged("retention_token_range_priorities", "INT32", -1),
    _ragged("retention_token_range_durations_ms", "INT32", -1),
    _ragged("retention_decode_priority", "INT32", 1),
    _ragged("retention_decode_duration_ms", "INT32", 1),
    _ragged("guided_decoding_guide_type", "STRING", 1),
    _ragged("guided_decoding_guide", "STRING", 1),
    _ragged("lookahead_window_size", "INT32", 1),
    _ragged("lookahead_ngram_size", "INT32", 1),
    _ragged("lookahead_verification_set_size", "INT32", 1),
)

DRAFTING_ENGINE_INPUTS: tuple[TensorSpec, ...] = (*ENGINE_INPUTS, _scalar("num_draft_tokens", "INT32", embedded=True))
"""What an engine takes that may draft by itself: upstream's, and how many draft tokens it may write for a pass."""

ENGINE_OUTPUTS: tuple[TensorSpec, ...] = (
    _output("output_ids", "INT32", -1, -1, embedded=True),
    _output("sequence_length", "INT32", -1, embedded=True),
    _output("cum_log_probs", "FP32", -1, embedded=True),
    _output("output_log_probs", "FP32", -1, -1, embedded=True),
    _output("context_logits", LOGITS_DTYPE, -1, -1),
    _output("generation_logits", LOGITS_DTYPE, -1, -1, -1),
    _output("batch_index", "INT32", 1),
    _output("sequence_index", "INT32", 1),
    _output("context_phase_params", "UINT8", -1),
    _output("kv_cache_alloc_new_blocks", "INT32", 1, embedded=True),
    _output("kv_cache_reused_blocks", "INT32", 1, embedded=True),
    _output("kv_cache_alloc_total_blocks", "INT32", 1, embedded=True),
    _output("arrival_time_ns", "INT64", 1, embedded=True),
    _output("first_scheduled_time_ns", "INT64", 1, embedded=True),
    _output("first_token_time_ns", "INT64", 1, embedded=True),
    _output("last_token_time_ns", "INT64", 1, embedded=True),
    _output("acceptance_rate", "FP32", 1, embedded=True),
    _output("total_accepted_draft_tokens", "INT32", 1, embedded=True),
    _output("total_draft_tokens", "INT32", 1, embedded=True),
    _output("num_input_tokens", "INT32", 1, embedded=True),
    _output("num_output_tokens", "INT32", 1, embedded=True),
)


BY_NAME: dict[str, TensorSpec] = {spec.name: spec for spec in DRAFTING_ENGINE_INPUTS + ENGINE_OUTPUTS}


def engine_tensor(name: str, values: Any) -> npt.NDArray[Any]:
    """One engine tensor in its contract dtype, with the leading batch dimension of a caller.

    A scalar becomes ``[1, 1]``, a vector ``[1, N]``, a matrix ``[1, M, N]``.
    """
    array = np.atleast_1d(np.asarray(values, dtype=BY_NAME[name].numpy_dtype))
    batched: npt.NDArray[Any] = array[np.newaxis]
    return batched


def encode_stop_words(words: Iterable[Sequence[int]]) -> IntArray:
    """``stop_words_list`` for token-id words: row 0 the ids end to end, row 1 inclusive ends padded with -1.

    Returns shape [2, L] where L is the number of ids of all words together.

    Raises:
        ValueError: there is no word, or one is empty (upstream checks strictly increasing ends).
    """
    words = [tuple(word) for word in words]
    if not words or not all(words):
        raise ValueError("stop words must be non-empty token sequences")
    ids = [token for word in words for token in word]
    ends = np.full(len(ids), -1, dtype=np.int32)
    ends[: len(words)] = np.cumsum([len(word) for word in words])
    return np.stack([np.asarray(ids, dtype=np.int32), ends])


def decode_stop_words(array: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    """The words of a [2, L] ``stop_words_list``.

    Raises:
        InvalidRequest: the layout breaks a rule that upstream checks too.
    """
    rule = "shape [2, L]: ids, then strictly increasing ends within L, padded with -1"
    if array.ndim != 2 or array.shape[0] != 2:
        raise InvalidRequest("stop_words_list", array.shape, rule)
    ids, raw_ends = array[0].tolist(), array[1].tolist()
    num_words = raw_ends.index(-1) if -1 in raw_ends else len(raw_ends)
    ends = raw_ends[:num_words]
    starts = [0, *ends[:-1]] if ends else []
    valid = all(end == -1 for end in raw_ends[num_words:])
    valid = valid and all(0 <= start < end <= len(ids) for start, end in zip(starts, ends, strict=True))
    if not valid:
        raise InvalidRequest("stop_words_list", raw_ends, rule)
    return tuple(tuple(ids[start:end]) for start, end in zip(starts, ends, strict=True))


def tensor_list_pbtxt(kind: str, specs: Iterable[TensorSpec]) -> str:
    """A whole ``input`` or ``output`` list of a ``config.pbtxt``."""
    return f"{kind} [\n" + ",\n".join(spec.pbtxt() for spec in specs) + "\n]\n"
