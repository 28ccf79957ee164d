"""Settings of one LLM API engine: read from a ``config.pbtxt``, checked when made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lr_backend.errors import ConfigError
from lr_backend.parameters import EngineParameters

WITH_MODEL = ("draft_target", "eagle3")
"""Kinds of speculation that a checkpoint of its own drafts for."""


def _split(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class LlmApiConfig(EngineParameters):
    """How one checkpoint is served. The PyTorch flow quantizes nothing by itself: it serves what the checkpoint holds.

    Attributes:
        tp_size: GPUs over which each weight is split.
        gpu_device_ids: among those that the server may see; empty: the first ``tp_size``.
        dtype: what is computed in; ``auto`` takes the checkpoint's.
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
        sampler: upstream's ``sampler_type``. Up to 1.2 only ``TRTLLMSampler`` heeds a request's seed.
        coupled_noise: sampled requests draw with the noise of their seed as on the embedded engine, by a logits processor; the
            engine then runs without upstream's overlap scheduler. See :mod:`~lr_backend.llmapi.coupled_noise`.
        speculative: where draft tokens come from that the engine writes by itself, in every request; see
            :mod:`~lr_backend.llmapi.speculation`.
        max_draft_len: so many for each pass of the model; 0 goes with ``none``.
        speculative_model_dir: Hugging Face folder of the draft model or the EAGLE-3 head.
        max_matching_ngram_size: tokens that must have stood there before, for ``ngram``.
    """

    engine_name: ClassVar = "the LLM API engine"

    tp_size: int = Field(default=1, ge=1)
    gpu_device_ids: Annotated[tuple[int, ...], BeforeValidator(_split)] = ()
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_batch_size: int = Field(default=64, ge=1)
    max_num_tokens: int = Field(default=8192, ge=1)
    max_queue_size: int = Field(default=256, ge=1)
    max_seq_len: int = Field(default=8192, ge=2)
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_free_gpu_mem_fraction: float = Field(default=0.9, gt=0, lt=1)
    tokens_per_block: int = Field(default=32, ge=1)
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    sampler: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    coupled_noise: bool = False
    speculative: Literal["none", "ngram", "draft_target", "eagle3"] = "none"
    max_draft_len: int = Field(default=0, ge=0)
    speculative_model_dir: Path | None = None
    max_matching_ngram_size: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        ids = self.gpu_device_ids
        if ids and len(ids) != self.tp_size:
            raise ValueError(f"gpu_device_ids={ids}: {self.tp_size} of them, one for each rank")
        if len(set(ids)) != len(ids) or any(each < 0 for each in ids):
            raise ValueError(f"gpu_device_ids={ids}: different GPUs")
        tokens = self.max_tokens_in_paged_kv_cache
        if tokens is not None and tokens < self.max_seq_len:
            raise ValueError(f"max_tokens_in_paged_kv_cache={tokens}: at least max_seq_len")
        return self

    @model_validator(mode="after")
    def _speculates(self) -> Self:
        if self.drafts != (self.max_draft_len > 0):
            rule = "at least 1" if self.drafts else "0, as nothing drafts"
            raise ValueError(f"max_draft_len={self.max_draft_len}: speculative={self.speculative!r} wants {rule}")
        if (self.speculative in WITH_MODEL) != (self.speculative_model_dir is not None):
            raise ValueError(f"speculative_model_dir goes with speculative = {' or '.join(WITH_MODEL)}, and with no other")
        if self.drafts and self.coupled_noise:
            raise ValueError("coupled_noise: upstream takes no logits processor beside speculative decoding")
        if self.drafts and self.sampler == "TRTLLMSampler":
            raise ValueError("sampler='TRTLLMSampler': upstream verifies draft tokens with its TorchSampler alone")
        return self

    @property
    def drafts(self) -> bool:
        """Whether the engine writes draft tokens by itself, in every request."""
        return self.speculative != "none"

    def check_checkpoint(self) -> None:
        """Raises: ConfigError: there is no checkpoint."""
        for key, folder in (("gpt_model_path", self.checkpoint_dir), ("speculative_model_dir", self.speculative_model_dir)):
            if folder is not None and not (folder / "config.json").is_file():
                raise ConfigError(f"{key}={str(folder)!r}: no config.json there: not a Hugging Face checkpoint")
