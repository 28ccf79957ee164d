"""Products of rows with a weight matrix, by how the weights are held.

Decoding reads every weight once a token, so on a CPU its speed is the memory's. Weights packed to float16 halve that traffic;
in int8, with integer arithmetic, they quarter it and a verification costs hardly more than a token. Both kernels are FBGEMM's
and read the weights once for up to a dozen rows, where a float32 product of 2 to 8 rows packs them anew each time. Each row is
computed alike whatever stands beside it, so a batch changes no result; but in float16 only on a processor with AVX-512: elsewhere
the kernel adds up in an order that depends on the number of rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol, Self

import torch
from torch import Tensor

LARGEST_HALF = 65504.0
LARGEST_BYTE = 127
LEAST_SCALE = 1e-30
"""Keeps a row or channel of zeros from being divided by zero."""
PROBE_ROWS = (1, 4)
PROBE_ROUNDS = 15
MAX_PROBE_BYTES = 64 << 20
INT8_GAIN = 1.2
"""How much faster than the others int8 must be to be worth its rounding."""


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

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Lay out ``weight`` [out, in]."""
        return cls(weight.t().contiguous(), bias)

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


class ByteProduct:
    """Weights packed to int8 with a scale for each output, times rows rounded to int8 with a scale for each row.

    CPU only. Sums are integers and so exact; a product is off by about 1 % of its length (rounding of weights and rows).
    """

    def __init__(self, packed: torch.ScriptObject, bias: Tensor | None) -> None:
        self._packed = packed
        self._bias = bias

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Pack float32 ``weight`` [out, in]."""
        scales = weight.abs().amax(dim=1).clamp_(min=LEAST_SCALE).double() / LARGEST_BYTE
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            # torch wants quantized tensors gone some day. Nothing else packs weights for this kernel, and its absence is handled.
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            return cls(torch.ops.quantized.linear_prepack(rounded, None), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        product, scale = self._scaled(rows)
        return product.mul_(scale) if self._bias is None else torch.addcmul(self._bias, product, scale)

    def add_to(self, hidden: Tensor, rows: Tensor) -> None:
        product, scale = self._scaled(rows)
        hidden.addcmul_(product, scale)

    def _scaled(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The product of each row over its largest entry, and these entries [T, 1]."""
        scale = rows.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_SCALE)
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / scale, 1.0 / LARGEST_BYTE, LARGEST_BYTE, self._packed
        )
        return product, scale


Packer = Callable[[Tensor, Tensor | None], Product]
"""Lays a weight [out, in] and its bias out."""

PACKERS: Mapping[str, Packer] = {
    "same": DenseProduct.pack,
    "float16": HalfProduct.pack,
    "int8": ByteProduct.pack,
}
"""The kinds of weights by name."""


@cache
def is_available(kind: str) -> bool:
    """Whether this torch and this CPU compute ``kind`` right.

    Found out by a product whose sums are as large as can be: processors without 8-bit dot products saturate there.
    """
    if kind == "same":
        return True
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    weight = torch.ones(32, 256)
    try:
        product = PACKERS[kind](weight, None)(torch.ones(2, 256))
    except (RuntimeError, AttributeError):
        return False
    return bool(torch.allclose(product, torch.full_like(product, 256.0), rtol=0.02))


def available_packers() -> dict[str, Packer]:
    """Of the kinds by torch those that this machine computes right."""
    return {kind: pack for kind, pack in PACKERS.items() if is_available(kind)}


def fastest_kind(
    packers: Mapping[str, Packer], shapes: Sequence[tuple[int, int]], num_layers: int, num_threads: int | None
) -> str:
    """Time every kind on random weights of ``shapes`` (out, in), over so many layers that a cache which cannot hold
    the model does not hold these either. Int8 must be faster by ``INT8_GAIN``."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        bytes_a_layer = 4 * sum(rows * columns for rows, columns in shapes)
        num_timed = max(1, min(num_layers, MAX_PROBE_BYTES // bytes_a_layer))
        weights = [torch.randn(shape) for _ in range(num_timed) for shape in shapes]
        widths = [weight.shape[1] for weight in weights]
        seconds = {kind: _seconds([pack(one, None) for one in weights], widths) for kind, pack in packers.items()}
    finally:
        torch.set_num_threads(before)
    return min(seconds, key=lambda kind: seconds[kind] * (INT8_GAIN if kind == "int8" else 1.0))


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
