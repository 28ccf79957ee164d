"""Which kind of weights is fastest on this machine: a short trial at start-up."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.native.weights import NativeProduct, bytes_are_fast, pairs_are_fast

ROWS = (1, 4)
"""Rows of the timed products: a decode alone, and a small batch."""
ROUNDS = 15
MAX_BYTES = 64 << 20
"""Float32 weights that are timed at most. A cache that cannot hold the model must not hold these either."""
INT8_GAIN = 1.2
"""How much faster than the others int8 must be to be worth its rounding."""


def fastest_kind(spec: ModelSpec) -> str:
    """Time every kind that this processor has instructions for, on random weights of the shapes of ``spec``.

    The weights are bfloat16 numbers, as checkpoints have them. One thread computes.
    """
    shapes = layer_shapes(spec)
    bytes_a_layer = 4 * sum(rows * columns for rows, columns in shapes)
    num_timed = max(1, min(spec.num_layers, MAX_BYTES // bytes_a_layer))
    weights = [torch.randn(shape).bfloat16() for _ in range(num_timed) for shape in shapes]
    widths = [weight.shape[1] for weight in weights]
    seconds = {kind: _seconds([NativeProduct.pack(kind, weight) for weight in weights], widths) for kind in fast_kinds()}
    return min(seconds, key=lambda kind: seconds[kind] * (INT8_GAIN if kind == "int8" else 1.0))


def fast_kinds() -> tuple[str, ...]:
    """The kinds worth a trial on this machine: those that round rows only where the processor has instructions for them."""
    return ("same", *(("bfloat16",) if pairs_are_fast() else ()), *(("int8",) if bytes_are_fast() else ()))


def layer_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of the products of one layer: queries, keys and values; output; gate and up; down."""
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    return [(width + 2 * spec.num_kv_heads * spec.head_dim, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner)]


@torch.inference_mode()
def _seconds(products: Sequence[NativeProduct], widths: Sequence[int]) -> float:
    """The best pass over all products with one row, plus that with a few."""
    total = 0.0
    for num_rows in ROWS:
        inputs = [torch.randn(num_rows, width) for width in widths]
        best = float("inf")
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for product, rows in zip(products, inputs, strict=True):
                product(rows)
            best = min(best, time.perf_counter() - started)
        total += best
    return total
