"""Rotary position tables: default, linear, Llama 3 and YaRN scaling, with the numbers of transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Settings = Mapping[str, Any]


def rope_table(rope: Settings, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles by position, each float32 [num_positions, head_dim / 2].

    Entry i belongs to the pair (i, i + head_dim / 2) of a head. Scalings that also scale attention are multiplied in.
    """
    frequencies, scale = _SCALINGS[rope["rope_type"]](rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    cosines, sines = torch.view_as_real(torch.polar(torch.full_like(angles, scale), angles)).unbind(-1)
    return cosines, sines


def _default(rope: Settings, head_dim: int) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (float(rope["rope_theta"]) ** exponents), 1.0


def _linear(rope: Settings, head_dim: int) -> tuple[torch.Tensor, float]:
    return _default(rope, head_dim)[0] / float(rope["factor"]), 1.0


def _llama3(rope: Settings, head_dim: int) -> tuple[torch.Tensor, float]:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    frequencies, _ = _default(rope, head_dim)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / float(rope["factor"])), 1.0


def _yarn(rope: Settings, head_dim: int) -> tuple[torch.Tensor, float]:
    frequencies, _ = _default(rope, head_dim)
    factor, theta = float(rope["factor"]), float(rope["rope_theta"])
    original = float(rope["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return frequencies * ((1.0 - stretched) + stretched / factor), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Settings, factor: float) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(float(rope["mscale"])) / mscale(float(rope["mscale_all_dim"]))
    return mscale()


_SCALINGS: dict[str, Callable[[Settings, int], tuple[torch.Tensor, float]]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip
