"""How much memory each GPU of a deployment needs, before anything is built. Pure arithmetic; every allowance is named here.

Of one engine on one of its GPUs, in bytes:

- *weights*: matrices split over ``tp_size`` ranks, the input table and the norms whole on each. FP8 halves the matrices of
  attention and MLP; tables stay in ``dtype``.
- *KV*: tokens x layers x 2 x KV heads of the rank x head size x bytes of ``kv_cache_dtype``.
- *speculation* of a compiled engine: TensorRT-LLM's decoder holds draft and target probabilities for every slot, [max_batch_size,
  max_draft_len + 1, padded vocabulary] each (``DecoderState::reshapeSpeculativeDecodingBuffers``), in the type of the logits.
  Of an engine of the LLM API: the weights of the draft model or the EAGLE-3 head that it drafts with, split like its own. That
  model's keys and values are *KV*, for as many tokens (``KvCacheCreator._get_kv_size_per_token``). N-grams take neither.
- *draft logits*: one such tensor more, where the one-hot rows of a verification arrive; pinned host memory holds it again.
  The LLM API takes none.
- *logits*: what the engine puts out for every row of an iteration, and the samplers' workspace.
- *workspace*: activations of ``max_num_tokens`` tokens, and a fixed allowance for the CUDA context, cuBLAS, NCCL and TensorRT.

Of each GPU besides: Triton's own CUDA context, the server of CUDA MPS where engines share a card, and the spec's reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lr_backend.build.gpu_spec import GpuDeployment, LlmapiEngineSpec, TrtllmEngineSpec
from lr_backend.build.shapes import Source
from lr_backend.contract import LOGITS_DTYPE, NUMPY_DTYPES
from lr_backend.engine import Role
from lr_backend.errors import ConfigError

GIB = 1024**3
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1}
LOGITS_BYTES = np.dtype(NUMPY_DTYPES[LOGITS_DTYPE]).itemsize
MAX_TENSOR_ELEMENTS = 1 << 31
"""TensorRT takes no tensor of as many (its page of ``ITensor``); an engine's widest is the MLP's two halves, computed as one."""
FIXED_BYTES = GIB
"""Of each engine on each of its GPUs: CUDA context, libraries, NCCL's buffers, TensorRT's own."""
SERVER_CONTEXT_BYTES = GIB // 2
"""Of Triton's own process on every GPU that it sees, with or without a model there: below 500 MB (server issue 8368)."""
MPS_SERVER_BYTES = GIB // 16
"""Of the server of CUDA MPS on every GPU: ``nvidia-smi`` is seen to show 25 to 30 MiB for it."""
SAMPLER_COPIES, SAMPLER_BYTES = 3, 4
"""Rows of the vocabulary that the samplers keep for each slot, and bytes of a value: token ids, sorted, and scratch."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One engine on one of its GPUs, in bytes. ``kv_tokens`` is the budget that ``kv_cache`` holds."""

    role: Role
    weights: int
    kv_cache: int
    kv_tokens: int
    speculation: int
    draft_logits: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.speculation + self.draft_logits + self.logits + self.workspace


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """All that one GPU must hold, in bytes. ``server`` is Triton's own context, ``mps`` the server of CUDA MPS."""

    gpu: int
    capacity: int
    reserve: int
    engines: tuple[EngineMemory, ...]
    server: int = 0
    mps: int = 0

    @property
    def total(self) -> int:
        return self.reserve + self.server + self.mps + sum(engine.total for engine in self.engines)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def sum_in_words(self) -> str:
        named = [(engine.role.value, engine.total) for engine in self.engines]
        named += [("Triton", self.server), ("CUDA MPS", self.mps), ("reserve", self.reserve)]
        parts = " + ".join(f"{name} {gib(size)}" for name, size in named if size)
        return f"GPU {self.gpu}: {parts} = {gib(self.total)} of {gib(self.capacity)}"


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """Width of an engine's logits: the vocabulary, filled up to a multiple of its ranks."""
    return -(-vocab_size // tp_size) * tp_size


def estimate(spec: GpuDeployment, sources: Mapping[Role, Source]) -> tuple[GpuMemory, ...]:
    """What each GPU must hold, for the roles in ``sources``."""
    hardware = spec.hardware
    capacity, reserve = int(hardware.gpu_memory_gib * GIB), int(hardware.reserve_gib * GIB)
    numbers = range(hardware.num_gpus)
    mps = MPS_SERVER_BYTES if any(len(spec.roles_on(number)) > 1 for number in numbers) else 0
    available = capacity - reserve - SERVER_CONTEXT_BYTES - mps
    gpus = []
    for number in numbers:
        roles = [role for role in spec.roles_on(number) if role in sources]
        engines = tuple(engine_memory(role, spec.engine(role), sources[role], available) for role in roles)
        gpus.append(GpuMemory(number, capacity, reserve, engines, SERVER_CONTEXT_BYTES, mps))
    return tuple(gpus)


def kv_tokens_of(memory: Iterable[GpuMemory]) -> dict[Role, int]:
    """KV memory of each role in tokens, on its fullest card."""
    found: dict[Role, int] = {}
    for gpu in memory:
        for engine in gpu.engines:
            found[engine.role] = min(engine.kv_tokens, found.get(engine.role, engine.kv_tokens))
    return found


def engine_memory(role: Role, engine: TrtllmEngineSpec | LlmapiEngineSpec, source: Source, available: int) -> EngineMemory:
    """One engine on each of its GPUs. ``available`` bytes are its own where its KV budget is a fraction of what is left."""
    tp, drafts = engine.tp_size, engine.num_drafts
    row = padded_vocab(source.shape.vocab_size, tp) * LOGITS_BYTES
    slots = engine.max_batch_size * (drafts + 1)
    verifies = slots * row if isinstance(engine, TrtllmEngineSpec) and drafts else 0
    without_kv = EngineMemory(
        role=role,
        weights=_weights(engine, source),
        kv_cache=0,
        kv_tokens=0,
        speculation=2 * verifies if source.drafter is None else _weights(engine, source.drafter),
        draft_logits=verifies,
        logits=slots * row + SAMPLER_COPIES * engine.max_batch_size * row // LOGITS_BYTES * SAMPLER_BYTES,
        workspace=FIXED_BYTES + _activations(engine, source),
    )
    per_token = kv_bytes_per_token(engine, source)
    tokens = engine.max_tokens_in_paged_kv_cache
    if tokens is None:
        assert engine.kv_cache_free_gpu_mem_fraction is not None
        free = max(0, available - without_kv.total)
        tokens = int(free * engine.kv_cache_free_gpu_mem_fraction) // per_token
    kept = {name: getattr(without_kv, name) for name in ("weights", "speculation", "draft_logits", "logits", "workspace")}
    return EngineMemory(role=role, kv_cache=tokens * per_token, kv_tokens=tokens, **kept)


def verification_bytes(engine: TrtllmEngineSpec | LlmapiEngineSpec, source: Source) -> int:
    """One-hot logits of the longest sampled verification; 0 where no draft tokens are sent."""
    if not isinstance(engine, TrtllmEngineSpec):
        return 0
    return engine.num_drafts * padded_vocab(source.shape.vocab_size, engine.tp_size) * LOGITS_BYTES


def require_tensors(spec: GpuDeployment, sources: Mapping[Role, Source]) -> None:
    """Refuse iterations of more tokens than a compiled engine has tensors for.

    Raises:
        ConfigError: with the sum.
    """
    for role, source in sources.items():
        engine = spec.engine(role)
        if not isinstance(engine, TrtllmEngineSpec):
            continue
        width = -(-max(2 * source.shape.intermediate_size, source.shape.qkv_width) // engine.tp_size)
        if engine.max_num_tokens * width >= MAX_TENSOR_ELEMENTS:
            raise ConfigError(
                f"{role}.max_num_tokens={engine.max_num_tokens} x {width} values of the widest layer on a card is beyond"
                f" TensorRT's 2^31 values a tensor: at most {(MAX_TENSOR_ELEMENTS - 1) // width} tokens, or a larger tp_size"
            )


def require_fit(spec: GpuDeployment, gpus: tuple[GpuMemory, ...]) -> None:
    """Refuse what cannot fit.

    Raises:
        ConfigError: a GPU must hold more than it has, or a KV budget cannot hold one sequence; the sum is shown.
    """
    full = [gpu for gpu in gpus if not gpu.fits]
    if full:
        raise ConfigError(f"{spec.name} does not fit. " + "; ".join(gpu.sum_in_words() for gpu in full))
    for gpu in gpus:
        for engine in gpu.engines:
            wanted = spec.engine(engine.role).max_seq_len
            if engine.kv_tokens < wanted:
                raise ConfigError(
                    f"{spec.name} does not fit. {engine.role} has memory for {engine.kv_tokens} tokens of KV, less than one"
                    f" sequence of max_seq_len = {wanted}. {gpu.sum_in_words()}"
                )


def _weights(engine: TrtllmEngineSpec | LlmapiEngineSpec, source: Source) -> int:
    counts, plain = source.weights, DTYPE_BYTES[engine.dtype]
    matrices = (counts.linear - counts.fp8) * DTYPE_BYTES[engine.weight_dtype] + counts.fp8 * DTYPE_BYTES["fp8"]
    split = matrices + counts.head * plain
    return -(-split // engine.tp_size) + (counts.embedding + counts.replicated) * plain


def kv_bytes_per_token(engine: TrtllmEngineSpec | LlmapiEngineSpec, source: Source) -> int:
    """Keys and values of one token on one card, with those of the model that the engine drafts with."""
    shape = source.shape
    heads = max(1, -(-shape.num_kv_heads // engine.tp_size))  # fewer heads than ranks are copied
    size = DTYPE_BYTES[engine.kv_dtype]
    drafters = 0 if source.drafter is None else kv_bytes_per_token(engine, source.drafter)
    return shape.num_layers * 2 * heads * shape.head_dim * size + drafters


def _activations(engine: TrtllmEngineSpec | LlmapiEngineSpec, source: Source) -> int:
    """The widest moment of a layer: residual, its norm, attention's rows, or the MLP's two halves and their product."""
    shape, tp = source.shape, engine.tp_size
    width = 4 * shape.hidden_size + -(-(shape.qkv_width + 3 * shape.intermediate_size) // tp)
    return engine.max_num_tokens * width * DTYPE_BYTES[engine.dtype]
