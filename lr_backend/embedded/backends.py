"""Who computes a model: the decoder in C where it can, torch everywhere else."""

from __future__ import annotations

from pathlib import Path

import torch

from lr_backend.embedded.checkpoint import ModelSpec, read_spec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.memory import free_bytes, with_kv_budget
from lr_backend.embedded.native.drafter import Drafter
from lr_backend.embedded.native.model import NativeModel, why_not
from lr_backend.embedded.native.runner import NativeRunner
from lr_backend.embedded.native.weights import bytes_are_fast
from lr_backend.embedded.native.weights import packers as native_packers
from lr_backend.embedded.random_checkpoint import random_model
from lr_backend.embedded.reference.decode_graphs import CudaGraphRecorder, GraphSettings
from lr_backend.embedded.reference.model import DecoderModel, layer_shapes
from lr_backend.embedded.reference.product import fastest_kind
from lr_backend.embedded.reference.runner import TorchRunner
from lr_backend.embedded.runner import Runner
from lr_backend.errors import ConfigError


def open_runner(
    config: EngineConfig, model: DecoderModel | None = None, graphs: GraphSettings | None = None
) -> tuple[EngineConfig, Runner]:
    """Load the checkpoint (unless a model is given), and ``config`` with its KV pool within the memory that is then free.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: a setting cannot be kept: no kernel for the weights, too little memory for the KV cache.
    """
    if model is None and graphs is None and is_native(config):
        native = _native_model(config, config.checkpoint_dir, config.weight_dtype)
        draft = _draft_model(config, native.spec)
        # Attention reads the pool itself: there is no second copy of what decodes.
        specs = [native.spec, draft.spec] if draft else [native.spec]
        config = with_kv_budget(config, specs, free_bytes(config.device))
        pool = {"num_blocks": config.num_blocks, "tokens_per_block": config.tokens_per_block}
        drafter = Drafter(draft, **pool, min_chance=config.speculative_min_chance) if draft else None
        return config, NativeRunner(native, **pool, drafter=drafter)
    if config.speculative_model_dir is not None:
        raise ConfigError("speculative_model_dir: only the native kernels draft")
    if model is None and config.random_weights:
        spec, dtype = read_spec(config.checkpoint_dir), getattr(torch, config.dtype)
        model = random_model(spec, dtype=dtype, device=config.device, max_seq_len=config.max_seq_len)
    model = model or DecoderModel.load(
        config.checkpoint_dir,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        max_seq_len=config.max_seq_len,
        # Torch has no product for a CPU that rounds rows to bfloat16 and keeps its sums in float32.
        weight_dtype="float16" if config.weight_dtype == "bfloat16" else config.weight_dtype,
        num_threads=config.num_threads,
    )
    # The pool's, and the decode window's, which may grow as large.
    config = with_kv_budget(config, [model.spec, model.spec], free_bytes(config.device))
    if graphs is None and config.device == "cuda" and config.use_cuda_graphs:
        graphs = GraphSettings(CudaGraphRecorder)
    return config, TorchRunner(model, num_blocks=config.num_blocks, tokens_per_block=config.tokens_per_block, graphs=graphs)


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
    num_threads = config.num_threads or 1
    kind = native_kind(folder, weight_dtype, num_threads)
    return NativeModel.load(folder, max_seq_len=config.max_seq_len, num_threads=num_threads, kind=kind)


def native_kind(checkpoint_dir: Path, weight_dtype: str, num_threads: int) -> str:
    """How the decoder in C keeps a model's weights: as asked for, or what is faster here."""
    if weight_dtype != "auto":
        return weight_dtype
    spec = read_spec(checkpoint_dir)
    return fastest_kind(native_packers(), layer_shapes(spec), spec.num_layers, num_threads)


def is_native(config: EngineConfig) -> bool:
    """Whether the decoder in C computes this.

    Raises:
        CheckpointError: ``config.json`` cannot be read.
        ConfigError: it was asked for and cannot.
    """
    if config.kernels == "torch" or not config.allows_native:
        return False
    reason = why_not(read_spec(config.checkpoint_dir))
    if config.kernels == "native":
        if reason is not None:
            raise ConfigError(f"kernels='native': {reason}")
        return True
    # Without instructions for bytes torch's own int8 kernel is the faster one.
    return reason is None and (config.weight_dtype != "int8" or bytes_are_fast())
