"""Settings of one embedded engine, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lr_backend.errors import ConfigError
from lr_backend.hardware.pace import EnginePace
from lr_backend.parameters import CHECKPOINT_KEY, read_parameters, readers_of, require

DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = ("auto", "same", "float16", "bfloat16", "int8")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "native", "torch")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one checkpoint is served.

    Attributes:
        checkpoint_dir: Hugging Face folder: ``config.json`` and safetensors.
        weight_dtype: how weights are held: ``same`` as ``dtype``; ``float16``, ``bfloat16`` or ``int8``, which halve and quarter
            what decoding must read from memory (CPU with dtype float32 only; the latter two round what is multiplied with
            the weights likewise; by torch bfloat16 is float16); ``auto``: the fastest in a short trial at start-up.
        kernels: who computes: ``native``, the decoder in C (CPU with dtype float32, weights not int8); ``torch``; or
            ``auto``: the former where it can.
        num_threads: threads that compute; torch's are of the whole process. None: one in C, and torch's as they are.
        tokens_per_block: KV cache granularity: what is shared, copied and evicted.
        max_tokens_in_paged_kv_cache: KV pool size in tokens, all sequences together; decoding sequences are held a second time,
            side by side, in at most as much again.
        kv_cache_free_mem_fraction: holds the pool (and that second copy) within this share of the memory that is free once the
            model is loaded; the smaller of the two limits counts. None: no such limit.
        max_batch_size: sequences in one iteration.
        max_num_tokens: tokens in one iteration; longer prompts are prefilled in chunks.
        max_queue_size: requests that may wait; the next one is refused at once.
        max_seq_len: prompt and output of one request together.
        max_draft_len: most draft tokens of one verification; 0 refuses drafts, as upstream without the mode.
        speculative_model_dir: a draft model of the same vocabulary for the engine itself to draft with, for the requests that ask
            for it (``num_draft_tokens``); None: there is none. Native kernels only.
        speculative_weight_dtype: ``weight_dtype`` of that model.
        speculative_min_chance: its draft tokens for one pass end where it takes all of them together to stand with less
            probability than this.
        enable_kv_cache_reuse: keep and share the blocks of computed prefixes.
        overlap_prefill: compute longer chunks of prompts on a second thread, while others decode. Native kernels only.
        use_cuda_graphs: replay iterations that only decode as CUDA graphs; on a CPU it means nothing. Their memory is not counted
            in ``kv_cache_free_mem_fraction``: leave them some.
        random_weights: draw the weights instead of reading them; the checkpoint needs ``config.json`` alone. For benchmarks.
        ends_drafted_requests: a request with draft tokens ends once they are verified, as upstream's do.
        exclude_input_in_output: what holds for requests that do not say.
        pace: of an engine that :func:`~lr_backend.emulated.open.open_engine` opens: iterations last as long as those of the
            hardware that it stands for, and calls take its hops; None: as long as they take here.
        script: of an engine that writes scripted texts instead of a model's: :class:`~lr_backend.emulated.texts.Script` as JSON.
    """

    checkpoint_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    weight_dtype: str = "same"
    kernels: str = "auto"
    num_threads: int | None = None
    tokens_per_block: int = 32
    max_tokens_in_paged_kv_cache: int = 16384
    kv_cache_free_mem_fraction: float | None = None
    max_batch_size: int = 16
    max_num_tokens: int = 512
    max_queue_size: int = 256
    max_seq_len: int = 2048
    max_draft_len: int = 16
    speculative_model_dir: Path | None = None
    speculative_weight_dtype: str = "auto"
    speculative_min_chance: float = 0.5
    enable_kv_cache_reuse: bool = True
    overlap_prefill: bool = True
    use_cuda_graphs: bool = True
    random_weights: bool = False
    ends_drafted_requests: bool = True
    exclude_input_in_output: bool = False
    pace: EnginePace | None = None
    script: str | None = None

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        require(self.weight_dtype in WEIGHT_DTYPES, "weight_dtype", self.weight_dtype, f"one of {', '.join(WEIGHT_DTYPES)}")
        if self.weight_dtype in ("float16", "bfloat16", "int8"):
            packable = (self.device, self.dtype) == ("cpu", "float32")
            require(packable, "weight_dtype", self.weight_dtype, "only with device cpu and dtype float32")
        dtype = self.speculative_weight_dtype
        require(dtype in WEIGHT_DTYPES, "speculative_weight_dtype", dtype, f"one of {', '.join(WEIGHT_DTYPES)}")
        chance = self.speculative_min_chance
        require(0.0 <= chance <= 1.0, "speculative_min_chance", chance, "from 0 to 1")
        require(self.kernels in KERNELS, "kernels", self.kernels, f"one of {', '.join(KERNELS)}")
        if self.kernels == "native":
            rule = "only with device cpu and dtype float32"
            require(self.allows_native, "kernels", self.kernels, rule)
        for name in ("tokens_per_block", "max_batch_size", "max_queue_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.num_threads is None or self.num_threads >= 1, "num_threads", self.num_threads, "at least 1")
        require(self.max_seq_len >= 2, "max_seq_len", self.max_seq_len, "at least 2")
        require(self.max_draft_len >= 0, "max_draft_len", self.max_draft_len, "at least 0")
        least = self.max_batch_size + self.max_draft_len
        require(
            self.max_num_tokens >= least,
            "max_num_tokens",
            self.max_num_tokens,
            f"at least max_batch_size + max_draft_len = {least}, so that a verification always fits beside the decodes",
        )
        fraction = self.kv_cache_free_mem_fraction
        require(fraction is None or 0.0 < fraction <= 1.0, "kv_cache_free_mem_fraction", fraction, "above 0 and at most 1")
        require(
            self.max_tokens_in_paged_kv_cache >= 2 * self.tokens_per_block,
            "max_tokens_in_paged_kv_cache",
            self.max_tokens_in_paged_kv_cache,
            "at least two blocks",
        )

    @property
    def allows_native(self) -> bool:
        """Whether nothing asked for here is torch's alone."""
        return (self.device, self.dtype) == ("cpu", "float32") and not self.random_weights

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences may hold; the pool has two more, which it needs itself."""
        return self.max_tokens_in_paged_kv_cache // self.tokens_per_block

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], **defaults: Any) -> Self:
        """Settings from the ``parameters`` of a Triton ``config.pbtxt`` (text to text).

        Keys are field names, with upstream's ``gpt_model_path`` for ``checkpoint_dir`` and ``kv_cache_free_gpu_mem_fraction``
        for ``kv_cache_free_mem_fraction``; upstream keys that leave this engine no choice are checked and dropped.
        ``defaults`` hold where a key is absent.

        Raises:
            ConfigError: naming the key that is unknown, missing, malformed or out of range.
        """
        values = {**defaults, **read_parameters(parameters, _READERS, _FIXED, "the embedded engine")}
        if "checkpoint_dir" not in values:
            raise ConfigError(f"parameter {CHECKPOINT_KEY} is missing")
        return cls(**values)


_READERS = readers_of(
    EngineConfig, {"checkpoint_dir": CHECKPOINT_KEY, "kv_cache_free_mem_fraction": "kv_cache_free_gpu_mem_fraction"}
)
_FIXED = {
    "max_beam_width": ("1",),
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
    "batch_scheduler_policy": ("max_utilization",),
    "enable_chunked_context": ("true", "1"),
    "FORCE_CPU_ONLY_INPUT_TENSORS": ("yes", "no"),
}
