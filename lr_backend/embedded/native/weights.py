"""Weights laid out for the decoder in C: panels of outputs, in as few bits as they may have.

A kind says what may become of a weight:

    same      nothing: bfloat16 where that holds it exactly, as in checkpoints stored in it; else float32
    bfloat16  bfloat16, whatever it loses; the rows multiplied with them are rounded likewise, as in models of that dtype
    int8      eight bits, with a scale for each output; the rows multiplied with them are rounded too, each by its largest entry.
              Embedding and head keep 16 bits, because nothing evens out their rounding: bfloat16 where that holds them exactly,
              else float16 where its range allows (a weight is rounded by at most 2^-11 of itself), else float32

Sums are float32, or integers in int8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lr_backend.embedded.native.library import library

LANES = 16
"""Numbers in one vector. Head and hidden size must be multiples of it."""
PANEL = 2 * LANES
"""Outputs of one panel."""
GROUP = 4
"""Inputs that one instruction multiplies and adds, in int8."""
LARGEST_BYTE = 127
LARGEST_HALF = 65504.0
LEAST_SCALE = 1e-30
"""Keeps a row or channel of zeros from being divided by zero."""
OFFSET = 128
"""Added to a weight of eight bits: processors multiply unsigned bytes by signed ones."""

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64


class Format(IntEnum):
    """What the numbers of a matrix are kept in; ``enum Format`` of the C source."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    PAIRS = 4


class Matrix(ctypes.Structure):
    """``Matrix`` of the C source."""

    _fields_ = (
        *((name, _Size) for name in ("num_inputs", "num_outputs", "format")),
        *((name, _Pointer) for name in ("panels", "bias", "scales")),
    )


class Weights:
    """The weights of a model, kept for as long as this lives."""

    def __init__(self, kind: str = "same") -> None:
        self._kind = kind
        self._kept: list[object] = []

    def keep(self, one: object) -> None:
        """Keep what a structure points to from being collected."""
        self._kept.append(one)

    def vector(self, values: Tensor) -> int:
        """Address of ``values`` in float32."""
        return self._address_of(values.float())

    def table(self, weight: Tensor) -> tuple[int, Format]:
        """``weight`` [rows, width] as a table to look rows up in: its address and format."""
        rows, weight_format = self._narrowed(weight)
        return self._address_of(rows), weight_format

    def matrix(self, parts: Sequence[Tensor], bias: Tensor | None = None, *, in_bytes: bool = True) -> Matrix:
        """Panels of weights [out, in]. Two parts of one shape share each panel, for a gated product.

        ``in_bytes``: whether the kind ``int8`` means int8 here too.
        """
        num_outputs, num_inputs = parts[0].shape
        lanes = PANEL // len(parts)
        num_panels = -(-num_outputs // lanes)
        padded = [pad(part, (0, 0, 0, num_panels * lanes - num_outputs)) for part in parts]
        panels = torch.cat([part.view(num_panels, lanes, num_inputs) for part in padded], 1)
        bias_at = None if bias is None else self.vector(bias)
        if self._kind == "int8" and in_bytes:
            return Matrix(num_inputs, num_outputs, Format.INT8, *self._bytes(panels.float(), bias_at))
        if self._kind == "bfloat16" or (self._kind == "int8" and _is_bfloat16(panels)):
            halves = pad(panels.bfloat16(), (0, num_inputs % 2))
            pairs = halves.view(*halves.shape[:2], -1, 2).transpose(1, 2)
            return Matrix(num_inputs, num_outputs, Format.PAIRS, self._address_of(pairs), bias_at, None)
        rows, weight_format = self._narrowed(panels.transpose(1, 2))
        if weight_format is not Format.FLOAT32:  # 16 outputs share 32 bits each with the next 16, and are taken apart by a shift
            rows = rows.reshape(*rows.shape[:2], 2, LANES).transpose(2, 3)
        return Matrix(num_inputs, num_outputs, weight_format, self._address_of(rows), bias_at, None)

    def _bytes(self, panels: Tensor, bias_at: int | None) -> tuple[int, int | None, int]:
        """Addresses of ``panels`` [panels, PANEL, in] in bytes, of the bias and of the scales."""
        scales = panels.abs().amax(2).clamp_(min=LEAST_SCALE).div_(LARGEST_BYTE)
        whole = panels.div_(scales.unsqueeze(2)).round_().add_(OFFSET).to(torch.uint8)
        whole = pad(whole, (0, -whole.shape[2] % GROUP), value=OFFSET)
        grouped = whole.view(*whole.shape[:2], -1, GROUP).transpose(1, 2)
        return self._address_of(grouped), bias_at, self._address_of(scales)

    def _narrowed(self, weight: Tensor) -> tuple[Tensor, Format]:
        """``weight`` in as few bits as the kind allows, and its format."""
        if self._kind == "bfloat16" or _is_bfloat16(weight):
            return weight.bfloat16(), Format.BFLOAT16
        if self._kind == "int8" and weight.abs().max() <= LARGEST_HALF:
            return weight.half(), Format.FLOAT16
        return weight.float(), Format.FLOAT32

    def _address_of(self, tensor: Tensor) -> int:
        self.keep(tensor := tensor.contiguous())
        return tensor.data_ptr()


def _is_bfloat16(weight: Tensor) -> bool:
    """Whether that type holds it exactly."""
    return weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().float(), weight.float())


class NativeProduct:
    """One matrix as the decoder multiplies with it."""

    def __init__(self, weights: Weights, matrix: Matrix) -> None:
        opened = library()
        assert opened is not None
        self._library = opened
        self._weights = weights
        self._matrix = matrix

    @classmethod
    def pack(cls, kind: str, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Lay out ``weight`` [out, in]."""
        weights = Weights(kind)
        return cls(weights, weights.matrix([weight], bias))

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` [T, in] times the weights, plus the bias: [T, out]."""
        rows = rows.contiguous()
        count, matrix = len(rows), self._matrix
        product = torch.empty(count, matrix.num_outputs)
        scratch = torch.empty(count * (2 + -(-matrix.num_inputs // LANES) * LANES // 2))
        pointers = (rows.data_ptr(), product.data_ptr(), count, scratch.data_ptr())
        self._library.decoder_product(ctypes.addressof(matrix), *pointers)
        return product


def bytes_are_fast() -> bool:
    """Whether this processor multiplies bytes by instructions of its own."""
    opened = library()
    return opened is not None and bool(opened.bytes_are_fast())


def pairs_are_fast() -> bool:
    """Whether this processor multiplies bfloat16 by instructions of its own."""
    opened = library()
    return opened is not None and bool(opened.pairs_are_fast())
