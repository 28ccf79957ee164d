"""Settings of one LLM API engine: read from a ``config.pbtxt``, checked when made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lr_backend.errors import ConfigError
from lr_backend.parameters import CHECKPOINT_KEY, read_parameters, readers_of, require

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8")
SAMPLERS = ("auto", "TorchSampler", "TRTLLMSampler")
CHECKPOINT, NONE = "checkpoint", "none"
QUANTIZATION_FILE = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class LlmApiConfig:
    """How one checkpoint is served.

    Attributes:
        checkpoint_dir: Hugging Face folder.
        tp_size: GPUs over which each weight is split.
        gpu_device_ids: among those that the server may see; empty: the first ``tp_size``.
        dtype: what is computed in; ``auto`` takes the checkpoint's.
        quantization: what the checkpoint must be: ``none``, an algorithm by upstream's name ("FP8", "NVFP4" ...), or
            ``checkpoint``, whatever it is. The PyTorch flow quantizes nothing by itself: it serves what the checkpoint holds.
        kv_cache_dtype: ``fp8`` halves the cache of a 16-bit model.
        max_batch_size: sequences in one iteration.
        max_num_tokens: tokens in one iteration; without chunked context also the longest prompt.
        max_queue_size: requests that may wait beside those; the next one is refused at once.
        max_seq_len: prompt and output of one request together.
        max_tokens_in_paged_kv_cache: KV pool size in tokens; None: only the fraction counts.
        kv_cache_free_gpu_mem_fraction: share of the memory that is free once the model is loaded; the smaller limit counts.
        tokens_per_block: KV cache granularity.
        enable_kv_cache_reuse: share the blocks of computed prefixes.
        enable_chunked_context: prefill longer prompts in pieces of ``max_num_tokens``.
        use_cuda_graphs: replay iterations that only decode.
        sampler: upstream's ``sampler_type``. Up to 1.2 only ``TRTLLMSampler`` heeds a request's seed.
        coupled_noise: sampled requests draw with the noise of their seed as on the embedded engine, by a logits processor; the
            engine then runs without upstream's overlap scheduler. See :mod:`~lr_backend.llmapi.coupled_noise`.
        max_engine_stop_ids: single stop tokens that are handed to the engine. It compares each with every token that it writes,
            one by one, on the thread that drives the GPU; more of them are found on the stream here instead, at a token or two of
            waste a call.
        cancellation_grace_ms: how long a cancelled request is waited for; then it is answered with what is there.
        exclude_input_in_output: what holds for requests that do not say.
    """

    checkpoint_dir: Path
    tp_size: int = 1
    gpu_device_ids: tuple[int, ...] = ()
    dtype: str = "auto"
    quantization: str = CHECKPOINT
    kv_cache_dtype: str = "auto"
    max_batch_size: int = 64
    max_num_tokens: int = 8192
    max_queue_size: int = 256
    max_seq_len: int = 8192
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_free_gpu_mem_fraction: float = 0.9
    tokens_per_block: int = 32
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    use_cuda_graphs: bool = True
    sampler: str = "auto"
    coupled_noise: bool = False
    max_engine_stop_ids: int = 32
    cancellation_grace_ms: int = 1000
    exclude_input_in_output: bool = False

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(self.kv_cache_dtype in KV_CACHE_DTYPES, "kv_cache_dtype", self.kv_cache_dtype, "auto or fp8")
        require(self.sampler in SAMPLERS, "sampler", self.sampler, f"one of {', '.join(SAMPLERS)}")
        for name in ("tp_size", "max_batch_size", "max_num_tokens", "max_queue_size", "tokens_per_block"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("max_engine_stop_ids", "cancellation_grace_ms"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(self.max_seq_len >= 2, "max_seq_len", self.max_seq_len, "at least 2")
        ids = self.gpu_device_ids
        require(not ids or len(ids) == self.tp_size, "gpu_device_ids", ids, f"{self.tp_size} of them, one for each rank")
        require(len(set(ids)) == len(ids) and all(each >= 0 for each in ids), "gpu_device_ids", ids, "different GPUs")
        fraction = self.kv_cache_free_gpu_mem_fraction
        require(0.0 < fraction < 1.0, "kv_cache_free_gpu_mem_fraction", fraction, "above 0 and below 1")
        tokens = self.max_tokens_in_paged_kv_cache
        require(tokens is None or tokens >= self.max_seq_len, "max_tokens_in_paged_kv_cache", tokens, "at least max_seq_len")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], **defaults: Any) -> Self:
        """Settings from the ``parameters`` of a Triton ``config.pbtxt`` (text to text).

        Keys are field names, with upstream's ``gpt_model_path`` for ``checkpoint_dir``; keys of the compiled engine that leave
        this one no choice are checked and dropped. ``defaults`` hold where a key is absent.

        Raises:
            ConfigError: naming the key that is unknown, missing, malformed or out of range.
        """
        values = {**defaults, **read_parameters(parameters, _READERS, _FIXED, "the LLM API engine")}
        if "checkpoint_dir" not in values:
            raise ConfigError(f"parameter {CHECKPOINT_KEY} is missing")
        return cls(**values)

    def check_checkpoint(self) -> None:
        """Raises: ConfigError: there is no checkpoint, or it is not quantized as ``quantization`` says."""
        if not (self.checkpoint_dir / "config.json").is_file():
            raise ConfigError(f"gpt_model_path={str(self.checkpoint_dir)!r}: no config.json there: not a Hugging Face checkpoint")
        found = checkpoint_quantization(self.checkpoint_dir)
        if self.quantization != CHECKPOINT and self.quantization.lower() != found.lower():
            raise ConfigError(
                f"quantization={self.quantization!r}: the checkpoint is {found!r}, and the LLM API quantizes nothing by itself; "
                "give it a checkpoint that is (for example by NVIDIA's Model Optimizer)"
            )


def checkpoint_quantization(checkpoint_dir: Path) -> str:
    """How a checkpoint is quantized, as the PyTorch flow will find it: an algorithm, or ``none``.

    Model Optimizer writes ``hf_quant_config.json``; others a ``quantization_config`` into ``config.json``.

    Raises:
        ConfigError: one of the two is damaged.
    """
    try:
        path = checkpoint_dir / QUANTIZATION_FILE
        if path.is_file():
            return str(json.loads(path.read_text(encoding="utf-8"))["quantization"]["quant_algo"] or NONE)
        config = json.loads((checkpoint_dir / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        return str(config["quant_method"]) if config else NONE
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint_dir.name}: the quantization cannot be read: {type(error).__name__}: {error}") from error


_READERS = readers_of(LlmApiConfig, {"checkpoint_dir": CHECKPOINT_KEY})
_FIXED = {
    "max_beam_width": ("1",),
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
    "max_draft_len": ("0",),
    "FORCE_CPU_ONLY_INPUT_TENSORS": ("yes",),
}
