"""How much memory there is for keys and values."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lr_backend import free_memory
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.config import EngineConfig
from lr_backend.errors import ConfigError

_M_MMAP_THRESHOLD = -3
"""glibc's ``malloc.h``."""
_PIECE, _LARGEST_KEPT = 128 << 10, 32 << 20
"""glibc's first threshold, and the highest that it comes to by itself."""


@contextmanager
def freed_at_once() -> Iterator[None]:
    """What is freed inside goes back to the system, not into holes between what stays. Without glibc nothing happens.

    glibc maps large pieces on their own. With every such piece that is freed it raises the size from which it does so. Inside,
    that size stays low; afterwards it is as high as it would have become.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
    set_option(_M_MMAP_THRESHOLD, _PIECE)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


def with_kv_budget(
    config: EngineConfig, specs: Sequence[ModelSpec], free_bytes: int, *, slots_a_token: float = 1.0
) -> EngineConfig:
    """``config`` with its pool in tokens: as many as were asked for, within ``kv_cache_free_mem_fraction`` of ``free_bytes``.

    Args:
        specs: the models that keep keys and values of every token: the engine's, and its draft model.
        slots_a_token: memory of a block over that of its tokens.

    Raises:
        ConfigError: not even one sequence of ``max_seq_len`` fits, or fewer than two blocks.
    """
    fraction = config.kv_cache_free_mem_fraction
    if fraction is None:
        return config
    one_bytes = slots_a_token * sum(bytes_a_token(spec, getattr(torch, config.dtype)) for spec in specs)
    affordable = int(fraction * free_bytes / one_bytes)
    num_blocks = affordable // config.tokens_per_block
    if num_blocks < 2 or num_blocks * config.tokens_per_block < config.max_seq_len:
        raise ConfigError(
            f"kv_cache_free_mem_fraction={fraction}: of {free_bytes >> 20} MiB free, {num_blocks} blocks of"
            f" {config.tokens_per_block} tokens; at least two, and one sequence of max_seq_len has {config.max_seq_len}"
        )
    return config.model_copy(update={"max_tokens_in_paged_kv_cache": min(affordable, config.max_tokens_in_paged_kv_cache)})


def bytes_a_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def free_bytes(device: str) -> int:
    """Memory to be had on ``device`` now; on a CPU within the limit of the container."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return free_memory.free_bytes()
