"""The noise: the same bits in C, by torch and by its definition, on every machine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lr_backend.embedded.native.library import library
from lr_backend.engine.noise import gumbel_noise, noise_bits, noise_keys
from tests.support import noise as reference
from tests.support.embedded_engines import NEEDS_LIBRARY

VECTORS = json.loads((Path(__file__).parent.parent / "data/noise/vectors.json").read_text())["vectors"]
Numbers = tuple[list[int], list[float]]
Noise = Callable[[int, int, list[int]], Numbers]
"""Bits and noise of tokens, of a seed and a position."""


def in_c(seed: int, position: int, tokens: list[int]) -> Numbers:
    native = library()
    assert native is not None
    ids, count = np.array(tokens, np.int64), len(tokens)
    bits, noise = np.empty(count, np.uint64), np.empty(count)
    native.noise_at(seed, position, ids.ctypes.data, count, bits.ctypes.data, noise.ctypes.data)
    return bits.tolist(), noise.tolist()


def by_torch(seed: int, position: int, tokens: list[int]) -> Numbers:
    keys, ids = torch.tensor(noise_keys([seed], [position])), torch.tensor(tokens)
    return noise_bits(keys, ids).tolist(), gumbel_noise(keys, ids).tolist()


def by_definition(seed: int, position: int, tokens: list[int]) -> Numbers:
    return reference.bits(seed, position, tokens).tolist(), reference.noise(seed, position, tokens).tolist()


EVERYONE = [pytest.param(in_c, marks=NEEDS_LIBRARY), by_torch, by_definition]


@pytest.mark.parametrize("noise", EVERYONE)
def test_the_golden_vectors(noise: Noise) -> None:
    for seed, position, token, bits, expected in VECTORS:
        (found_bits,), (found,) = noise(seed, position, [token])
        assert found_bits == bits
        # Around 1 / e the outer logarithm is next to 0, where it magnifies what the inner one rounded.
        assert abs(found - expected) <= 4 * max(math.ulp(expected), math.ulp(1.0))


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.data()
)
@NEEDS_LIBRARY
def test_everyone_has_the_same_bits(seed: int, position: int, tokens: list[int], data: st.DataObject) -> None:
    expected_bits, expected = by_definition(seed, position, tokens)
    for noise in (in_c, by_torch):
        bits, found = noise(seed, position, tokens)
        assert bits == expected_bits
        assert found == pytest.approx(expected, rel=1e-14, abs=1e-15)
    one = data.draw(st.integers(0, len(tokens) - 1))
    assert by_torch(seed, position, [tokens[one]])[0] == [expected_bits[one]]


def test_noise_is_finite_and_bounded_by_its_bits() -> None:
    ends = torch.tensor([1, 2**53 - 1], dtype=torch.float64) * 2.0**-53
    lowest, highest = (-torch.log(-torch.log(ends))).tolist()
    assert -3.61 < lowest < highest < 36.74
    bits = np.concatenate([reference.bits(seed, 0, np.arange(10_000)) for seed in range(10)])
    assert (bits % 2 == 1).all()
    assert bits.max() < 2**53


MANY = np.arange(100_000)


@pytest.mark.parametrize(
    "along",
    [(3, 9, MANY), (3, MANY, 5), (MANY, 9, 5), (MANY, MANY, MANY), (MANY + 2**40, MANY + 7, 3 * MANY)],
    ids=["tokens", "positions", "seeds", "all together", "all apart"],
)
def test_it_is_uniform_and_independent_along_each_argument(along: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]) -> None:
    found = reference.uniforms(*along)
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    for lag in (1, 2, 7):
        table, _, _ = np.histogram2d(found[:-lag], found[lag:], bins=12, range=[[0, 1], [0, 1]])
        assert stats.chi2_contingency(table)[1] > 1e-3
    assert len(np.unique(found)) == len(found)


def test_positions_and_seeds_next_to_each_other_share_nothing() -> None:
    tokens = np.arange(2000)
    rows = [reference.uniforms(seed, position, tokens) for seed in (0, 1, 2**63) for position in range(4)]
    for left, right in pairwise(rows):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.08
        assert not np.isin(left, right).any()
