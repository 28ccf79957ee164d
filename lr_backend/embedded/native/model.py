"""The decoder in C (``native/decoder.c``): weights laid out for it (``native/weights.py``), and one call a forward pass."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec, TensorFiles, check_length, read_spec
from lr_backend.embedded.memory import freed_at_once
from lr_backend.embedded.native.library import DOES_NOT_OPEN, library, locked_library, open_library
from lr_backend.embedded.native.weights import LANES, Matrix, Weights
from lr_backend.embedded.rope import rope_table
from lr_backend.embedded.runner import Span

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Size) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "inner_size")),
        ("eps", ctypes.c_float),
        *((name, _Pointer) for name in ("layers", "cosines", "sines", "embedding")),
        ("embedding_format", _Size),
        ("norm", _Pointer),
        ("head", Matrix),
    )


class _Pool(ctypes.Structure):
    _fields_ = (("blocks", _Pointer), ("num_blocks", _Size), ("tokens_per_block", _Size), ("num_slots", _Size))


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, _Size) for name in ("num_chunks", "num_rows", "num_logits")),
        *((name, _Pointer) for name in ("tokens", "starts", "counts", "first_blocks", "blocks", "logit_counts")),
        *((name, _Pointer) for name in ("logits", "scratch")),
    )


def why_not(spec: ModelSpec) -> str | None:
    """What keeps the decoder in C from computing ``spec``; None when nothing does."""
    if isinstance(missing := open_library(), str):
        return f"the decoder in C {'' if missing.startswith(DOES_NOT_OPEN) else 'was '}{missing}"
    if spec.hidden_size % LANES or spec.head_dim % LANES:
        return f"hidden size {spec.hidden_size} and head size {spec.head_dim} must be multiples of {LANES}"
    return None


def slots_of(tokens_per_block: int) -> int:
    """Of a block: its tokens, filled up to whole vectors."""
    return -(-tokens_per_block // LANES) * LANES


class NativePool:
    """Keys and values by block and head: a head's keys [head_dim, slots], then its values [slots, head_dim]."""

    def __init__(self, spec: ModelSpec, *, num_blocks: int, tokens_per_block: int) -> None:
        slots = slots_of(tokens_per_block)
        by_head = (spec.num_layers, num_blocks, spec.num_kv_heads)
        self._memory = torch.zeros(*by_head, 2, slots * spec.head_dim)
        self.tokens_per_block = tokens_per_block
        self.struct = _Pool(self._memory.data_ptr(), num_blocks, tokens_per_block, slots)

    def clear(self, blocks: Items[int]) -> None:
        """Zero blocks: a masked number may be stale, but must not be NaN."""
        self._memory[:, list(blocks)] = 0.0

    def reset(self) -> None:
        self._memory.zero_()


class NativeModel:
    """Qwen3, Qwen2 or Llama on a CPU. Several threads may compute at once if they write to different blocks."""

    def __init__(self, spec: ModelSpec, files: TensorFiles, *, max_seq_len: int, num_threads: int, kind: str) -> None:
        opened = library()
        assert opened is not None, why_not(spec)
        self.spec = spec
        self._library = opened
        self._num_threads = num_threads
        self._weights = Weights(kind)
        self._model = self._structure(files, max_seq_len)
        self.address = ctypes.addressof(self._model)
        self._scratch_a_row: int = opened.decoder_scratch(self.address, 1)
        self._local = threading.local()

    @classmethod
    def load(cls, checkpoint_dir: Path, *, max_seq_len: int, num_threads: int = 1, kind: str = "same") -> Self:
        """Read a checkpoint tensor by tensor.

        ``kind``: how weights are held; see :mod:`~lr_backend.embedded.native.weights`.

        Raises:
            CheckpointError: anything in the folder that keeps it from being served, by name.
        """
        spec = read_spec(checkpoint_dir)
        check_length(spec, max_seq_len, checkpoint_dir)
        files = TensorFiles(checkpoint_dir)
        with freed_at_once():
            model = cls(spec, files, max_seq_len=max_seq_len, num_threads=num_threads, kind=kind)
        files.require_all_read(*(("lm_head.weight",) if spec.tie_word_embeddings else ()))
        return model

    def forward(self, pool: NativePool, tokens: list[int], spans: Items[Span], num_logits: list[int]) -> Tensor:
        """Logits, float32 [R, vocabulary], of the last ``num_logits`` tokens of each chunk; all keys and values go to the pool.

        Args:
            tokens: those of all chunks, one after another.
            spans: for each chunk, its place in its sequence, and the blocks that hold it and all before it.
        """
        first_blocks, blocks = one_after_another(span.blocks for span in spans)
        _kept, pointers = _joined(
            tokens, [span.start for span in spans], [span.count for span in spans], first_blocks, blocks, num_logits
        )
        num_rows = sum(num_logits)
        logits = torch.empty(num_rows, self.spec.vocab_size)
        scratch = self.scratch(self.scratch_floats(len(tokens)))
        self._compute(pool, _Batch(len(spans), len(tokens), num_rows, *pointers, logits.data_ptr(), scratch))
        return logits

    def copy_prefix(self, pool: NativePool, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens' keys and values of one block to another, in all layers."""
        locked_library().decoder_copy_prefix(self.address, ctypes.addressof(pool.struct), source, target, num_tokens)

    def run(self, pool: NativePool, run: ctypes.Structure) -> int:
        """Call ``decoder_run`` of ``native/run.c``, without the interpreter's lock; returns the number of passes."""
        address = ctypes.addressof(pool.struct)
        num_passes: int = self._library.decoder_run(self.address, address, ctypes.addressof(run), self._num_threads)
        return num_passes

    def _compute(self, pool: NativePool, batch: _Batch) -> None:
        """Without the interpreter's lock."""
        self._library.decoder_forward(self.address, ctypes.addressof(pool.struct), ctypes.addressof(batch), self._num_threads)

    def scratch_floats(self, num_rows: int) -> int:
        """Floats of :meth:`scratch` that a pass over ``num_rows`` rows needs."""
        return self._scratch_a_row * num_rows

    def scratch(self, num_floats: int) -> int:
        """Address of the calling thread's memory to compute in; valid until the thread asks for more."""
        scratch: Tensor | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.numel() < num_floats:
            self._local.scratch = scratch = torch.empty(num_floats)
        return scratch.data_ptr()

    def _structure(self, files: TensorFiles, max_seq_len: int) -> _Model:
        spec = self.spec
        layers = (_Layer * spec.num_layers)(*(self._layer(files, f"model.layers.{at}.") for at in range(spec.num_layers)))
        self._weights.keep(layers)
        cosines, sines = rope_table(spec.rope, spec.head_dim, max_seq_len + 1)
        embedding = files.read("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        separate, embedding_format = (None, 0) if spec.tie_word_embeddings else self._weights.table(embedding)
        head = embedding if spec.tie_word_embeddings else files.read("lm_head.weight", spec.vocab_size, spec.hidden_size)
        return _Model(
            spec.num_layers,
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.intermediate_size,
            spec.rms_norm_eps,
            ctypes.addressof(layers),
            self._weights.vector(cosines),
            self._weights.vector(sines),
            separate,
            embedding_format,
            self._weights.vector(files.read("model.norm.weight", spec.hidden_size)),
            self._weights.matrix([head], in_bytes=False),
        )

    def _layer(self, files: TensorFiles, prefix: str) -> _Layer:
        spec, attention, mlp = self.spec, f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        qkv = torch.cat([files.read(f"{attention}{name}.weight", width, hidden) for name, width in widths.items()])
        biases = [files.read(f"{attention}{name}.bias", width) for name, width in widths.items() if spec.qkv_bias]
        gate_up = [files.read(f"{mlp}{name}.weight", inner, hidden) for name in ("gate_proj", "up_proj")]

        def vector(name: str, width: int) -> int:
            return self._weights.vector(files.read(name, width))

        return _Layer(
            vector(f"{prefix}input_layernorm.weight", hidden),
            vector(f"{prefix}post_attention_layernorm.weight", hidden),
            vector(f"{attention}q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            vector(f"{attention}k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            self._weights.matrix([qkv], torch.cat(biases) if biases else None),
            self._weights.matrix([files.read(f"{attention}o_proj.weight", hidden, queries)]),
            self._weights.matrix(gate_up),
            self._weights.matrix([files.read(f"{mlp}down_proj.weight", hidden, inner)]),
        )


def one_after_another(tables: Iterable[Items[int]]) -> tuple[list[int], list[int]]:
    """All tables joined, after the index at which each of them begins."""
    firsts: list[int] = []
    joined: list[int] = []
    for table in tables:
        firsts.append(len(joined))
        joined += table
    return firsts, joined


def _joined(*lists: list[int]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """All numbers in one array, and the address of each list in it; valid as long as the array is kept."""
    numbers = np.array([number for values in lists for number in values], dtype=np.int64)
    at, pointers = numbers.ctypes.data, []
    for values in lists:
        pointers.append(at)
        at += 8 * len(values)
    return numbers, pointers
