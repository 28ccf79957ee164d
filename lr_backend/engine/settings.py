"""Settings of the embedded engine that a deployment file says and the engine takes: said once, for both."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

WeightDtype = Literal["auto", "same", "bfloat16", "int8"]
"""How the decoder in C holds weights.

``same``: as the checkpoint does, in bfloat16 or float32, and nothing is rounded. ``bfloat16`` and ``int8`` round the weights and
the rows that are multiplied with them. ``auto``: the fastest of these in a short trial at start-up.
"""


class EmbeddedSettings(BaseModel):
    """How one model is served. Sizes are in tokens unless said otherwise.

    Attributes:
        dtype: what is computed in.
        device: ``cuda`` is for the reference alone.
        weight_dtype: see :data:`WeightDtype`. The reference computes with weights in ``dtype``: there ``auto`` means ``same``.
        kernels: ``native``, the decoder in C (device cpu and dtype float32 only); ``reference``, plain torch; ``auto``, the
            former where it can.
        num_threads: threads that compute; torch's are of the whole process. None: one in C, and torch's as they are.
        tokens_per_block: granularity of the KV cache: what is shared, copied and evicted.
        max_tokens_in_paged_kv_cache: size of the KV pool, for all sequences together.
        kv_cache_free_mem_fraction: holds the pool within this share of the memory that is free once the model is loaded; the
            smaller of the two limits counts. None: no such limit.
        max_batch_size: sequences in one iteration.
        max_num_tokens: tokens in one iteration; longer prompts are prefilled in chunks.
        max_queue_size: requests that may wait; the next one is refused at once, but for calls of a loop in the same process,
            which wait there.
        max_seq_len: prompt and output of one request together.
        max_draft_len: most draft tokens of one verification; 0 refuses drafts, as upstream without the mode.
        speculative_min_chance: an engine with a draft model of its own stops drafting for a pass where the draft model gives all
            its tokens together less probability than this to stand.
        enable_kv_cache_reuse: keep and share the blocks of computed prefixes.
        overlap_prefill: compute longer chunks of prompts on a second thread, while others decode. Native kernels only.
        random_weights: draw the weights instead of reading them, by the reference; the checkpoint needs ``config.json`` alone.
            For benchmarks of a size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    weight_dtype: WeightDtype = "same"
    kernels: Literal["auto", "native", "reference"] = "auto"
    num_threads: int | None = Field(default=None, ge=1, le=256)
    tokens_per_block: int = Field(default=32, ge=1)
    max_tokens_in_paged_kv_cache: int = 16384
    kv_cache_free_mem_fraction: float | None = Field(default=None, gt=0, le=1)
    max_batch_size: int = Field(default=16, ge=1)
    max_num_tokens: int = 512
    max_queue_size: int = Field(default=256, ge=1)
    max_seq_len: int = Field(default=2048, ge=2)
    max_draft_len: int = Field(default=16, ge=0)
    speculative_min_chance: float = Field(default=0.5, ge=0, le=1)
    enable_kv_cache_reuse: bool = True
    overlap_prefill: bool = True
    random_weights: bool = False

    @property
    def allows_native(self) -> bool:
        """Whether nothing asked for here is the reference's alone."""
        return (self.device, self.dtype) == ("cpu", "float32") and self.kernels != "reference" and not self.random_weights

    @model_validator(mode="after")
    def _kernels_can(self) -> Self:
        if self.kernels == "native" and not self.allows_native:
            raise ValueError("kernels='native': only with device cpu and dtype float32, and without random_weights")
        if self.weight_dtype in ("bfloat16", "int8") and not self.allows_native:
            rule = "only the native kernels hold weights so, which need device cpu and dtype float32"
            raise ValueError(f"weight_dtype={self.weight_dtype!r}: {rule}")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        least = self.max_batch_size + self.max_draft_len
        if self.max_num_tokens < least:
            rule = f"at least max_batch_size + max_draft_len = {least}, so that a verification always fits beside the decodes"
            raise ValueError(f"max_num_tokens={self.max_num_tokens}: {rule}")
        if self.max_tokens_in_paged_kv_cache < 2 * self.tokens_per_block:
            raise ValueError(f"max_tokens_in_paged_kv_cache={self.max_tokens_in_paged_kv_cache}: at least two blocks")
        return self
