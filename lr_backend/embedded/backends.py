"""Who computes a model: the decoder in C where it can, the reference everywhere else."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lr_backend.embedded.checkpoint import ModelSpec, num_token_ids, read_spec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.memory import free_bytes, with_kv_budget
from lr_backend.embedded.native.drafter import Drafter
from lr_backend.embedded.native.model import NativeModel, slots_of, why_not
from lr_backend.embedded.native.runner import NativeRunner
from lr_backend.embedded.native.trial import fastest_kind
from lr_backend.embedded.random_checkpoint import random_model
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.runner import ReferenceRunner
from lr_backend.embedded.runner import Runner
from lr_backend.errors import ConfigError

_logger = logging.getLogger(__name__)


def open_runner(config: EngineConfig) -> tuple[EngineConfig, Runner]:
    """Load the checkpoint. Returns ``config`` with its KV pool within the memory that is then free, and what computes.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: a setting cannot be kept: no kernel for the weights, too little memory for the KV cache.
    """
    return _open_native(config) if is_native(config) else _open_reference(config)


def is_native(config: EngineConfig) -> bool:
    """Whether the decoder in C computes this.

    Raises:
        CheckpointError: ``config.json`` cannot be read.
        ConfigError: the decoder in C was asked for, by ``kernels`` or by ``weight_dtype``, and cannot.
    """
    if not config.allows_native:
        return False
    reason = why_not(read_spec(config.checkpoint_dir))
    if reason is not None and config.kernels == "native":
        raise ConfigError(f"kernels='native': {reason}")
    if reason is not None and config.weight_dtype in ("bfloat16", "int8"):
        raise ConfigError(f"weight_dtype={config.weight_dtype!r}: only the native kernels hold weights so: {reason}")
    if reason is not None:
        _logger.warning("torch computes %s, several times slower: %s", config.checkpoint_dir, reason)
    return reason is None


def _open_native(config: EngineConfig) -> tuple[EngineConfig, Runner]:
    native = _native_model(config, config.checkpoint_dir, config.weight_dtype)
    draft = _draft_model(config, native.spec)
    specs = [native.spec, draft.spec] if draft else [native.spec]
    config = with_kv_budget(
        config, specs, free_bytes(config.device), slots_a_token=slots_of(config.tokens_per_block) / config.tokens_per_block
    )
    pool = {"num_blocks": config.num_blocks, "tokens_per_block": config.tokens_per_block}
    drafter = Drafter(draft, **pool, min_chance=config.speculative_min_chance) if draft else None
    num_ids = num_token_ids(config.checkpoint_dir, native.spec)
    return config, NativeRunner(native, **pool, num_ids=num_ids, drafter=drafter)


def _open_reference(config: EngineConfig) -> tuple[EngineConfig, Runner]:
    if config.speculative_model_dir is not None:
        raise ConfigError("speculative_model_dir: only the native kernels draft")
    dtype, folder = getattr(torch, config.dtype), config.checkpoint_dir
    if config.random_weights:
        model = random_model(read_spec(folder), dtype=dtype, device=config.device, max_seq_len=config.max_seq_len)
    else:
        model = DecoderModel.load(folder, dtype=dtype, device=config.device, max_seq_len=config.max_seq_len)
    config = with_kv_budget(config, [model.spec], free_bytes(config.device))
    pool = {"num_blocks": config.num_blocks, "tokens_per_block": config.tokens_per_block}
    return config, ReferenceRunner(model, **pool, num_ids=num_token_ids(folder, model.spec))


def _draft_model(config: EngineConfig, spec: ModelSpec) -> NativeModel | None:
    """The model that drafts for the one of ``spec``.

    Raises:
        CheckpointError: it cannot be served.
        ConfigError: the decoder in C cannot compute it, or it has another vocabulary.
    """
    folder = config.speculative_model_dir
    if folder is None:
        return None
    own = read_spec(folder)
    if reason := why_not(own):
        raise ConfigError(f"speculative_model_dir={str(folder)!r}: {reason}")
    if own.vocab_size != spec.vocab_size:
        sizes = f"vocabularies of {own.vocab_size} and {spec.vocab_size} tokens"
        raise ConfigError(f"speculative_model_dir={str(folder)!r}: {sizes}; both models must have the same")
    return _native_model(config, folder, config.speculative_weight_dtype)


def _native_model(config: EngineConfig, folder: Path, weight_dtype: str) -> NativeModel:
    kind = weight_dtype
    if weight_dtype == "auto":
        kind = fastest_kind(read_spec(folder))
        _logger.info("weights of %s are held as %r, the fastest of a trial", folder, kind)
    return NativeModel.load(folder, max_seq_len=config.max_seq_len, num_threads=config.num_threads or 1, kind=kind)
