"""Products of rows with a weight matrix, by how the weights are held.

Decoding reads every weight once a token, so on a CPU its speed is the memory's. Weights packed to float16 halve that traffic, and
their kernel (FBGEMM's, which computes in float32) reads them once for up to a dozen rows, where a float32 product of 2 to 8 rows
packs them anew each time. Each row is computed alike whatever stands beside it, so a batch changes no result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

LARGEST_HALF = 65504.0
PROBE_ROWS = (1, 4)
PROBE_ROUNDS = 15
MAX_PROBE_BYTES = 64 << 20


class Product(Protocol):
    """``rows`` [T, in] times one weight matrix (plus its bias): [T, out]."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, hidden: Tensor, rows: Tensor) -> None:
        """Add the product to ``hidden`` [T, out] in place."""
        ...


class DenseProduct:
    """Weights in the dtype computed in, [in, out]: the layout whose small products are fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.mm(rows, self._weight) if self._bias is None else torch.addmm(self._bias, rows, self._weight)

    def add_to(self, hidden: Tensor, rows: Tensor) -> None:
        hidden.addmm_(rows, self._weight)


class HalfProduct:
    """Weights packed to float16, computed with in float32. CPU only; rounds a weight by at most 2^-11 of itself."""

    def __init__(self, packed: torch.ScriptObject) -> None:
        self._packed = packed

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Pack float32 ``weight`` [out, in]."""
        return cls(torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias))

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        return product

    def add_to(self, hidden: Tensor, rows: Tensor) -> None:
        hidden.add_(self(rows))


def half_is_available() -> bool:
    """Whether this torch and this CPU have the float16 kernel."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def half_is_faster(shapes: Sequence[tuple[int, int]], num_layers: int, num_threads: int | None) -> bool:
    """Time both kinds of product on random weights of ``shapes`` (out, in), over so many layers that a cache which cannot hold
    the model does not hold these either."""
    if not half_is_available():
        return False
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        bytes_a_layer = 4 * sum(rows * columns for rows, columns in shapes)
        num_timed = max(1, min(num_layers, MAX_PROBE_BYTES // bytes_a_layer))
        weights = [torch.randn(shape) for _ in range(num_timed) for shape in shapes]
        kinds: tuple[list[Product], ...] = (
            [DenseProduct(weight.t().contiguous()) for weight in weights],
            [HalfProduct.pack(weight) for weight in weights],
        )
        dense_s, half_s = (_seconds(products, [weight.shape[1] for weight in weights]) for products in kinds)
    finally:
        torch.set_num_threads(before)
    return half_s < dense_s


@torch.inference_mode()
def _seconds(products: Sequence[Product], widths: Sequence[int]) -> float:
    """The best pass over all products with one row, plus that with a few."""
    total = 0.0
    for num_rows in PROBE_ROWS:
        inputs = [torch.randn(num_rows, width) for width in widths]
        best = float("inf")
        for _ in range(PROBE_ROUNDS):
            started = time.perf_counter()
            for product, rows in zip(products, inputs, strict=True):
                product(rows)
            best = min(best, time.perf_counter() - started)
        total += best
    return total
