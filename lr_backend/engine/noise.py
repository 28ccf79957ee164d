"""The noise that tokens are drawn with: Gumbel noise, a function of a call's seed, a position and a token, and of nothing else.

At temperature > 0 the token at a position is the highest of

    logit / temperature + noise(seed, position, token)

among the tokens that top-k and top-p keep. With noise -log(-log(u)) and u uniform in (0, 1) a token is drawn with exactly the
probability that the softmax gives it. Why this way: two calls that write the same position under the same seed draw with the same
noise, whoever computes the logits. So models that nearly agree nearly always draw the same token: with distributions p and q at
least as often as (1 - TV(p, q)) / (1 + TV(p, q)) says, where independent draws agree with the sum of p times q. A draft token is
verified by drawing and comparing, hence the text is the same with and without draft tokens, whoever proposes them. And as nothing
is drawn from a stream, neither chunks nor batches nor preemption change a draw.

The uniform number comes from a counter-based hash, three rounds of SplitMix64 (all in 64 bits, unsigned, overflow dropped):

    absorb(state, number) = mix(state + (number + 1) * 0x9E3779B97F4A7C15)
    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    hash = absorb(absorb(absorb(0, seed), position), token)
    u    = (2 * (hash >> 12) + 1) / 2^53

``position`` counts from the first token of the sequence, prompt included. u is odd over 2^53: never 0 or 1, and exact in float64.
So noise lies between -3.61 and 36.74. A vocabulary that is padded has the same noise. ``native/draw.c`` is the same in C: the
bits of u are equal everywhere, noise up to the rounding of a logarithm.

On other hardware, and in batches of other shapes, logits themselves differ by rounding. Where two tokens are as close as that,
equal noise promises no equal texts.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def noise_keys(seeds: Iterable[int], positions: Iterable[int]) -> list[int]:
    """What the noise of each position is made of, for :func:`gumbel_noise`; signed, since torch has no other 64-bit integers."""
    return [_signed(_absorbed(_absorbed(0, seed), at)) for seed, at in zip(seeds, positions, strict=True)]


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """2^53 times the uniform numbers of ``tokens``, int64; ``keys`` and ``tokens`` are int64 and broadcast."""
    state = keys + (tokens + 1) * _signed(_GAMMA)
    for shift, factor in _ROUNDS:
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return (_shifted(state ^ _shifted(state, _LAST_SHIFT), 12) << 1) | 1


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """The noise of ``tokens``, float64; arguments as of :func:`noise_bits`."""
    return noise_bits(keys, tokens).double().mul_(2.0**-53).log_().neg_().log_().neg_()


def _absorbed(state: int, number: int) -> int:
    value = (state + (number + 1) * _GAMMA) & _MASK
    for shift, factor in _ROUNDS:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> _LAST_SHIFT)


def _signed(value: int) -> int:
    """The same 64 bits; torch's integers overflow as unsigned ones do."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(value: Tensor, count: int) -> Tensor:
    """To the right, without copies of the sign."""
    shifted: Tensor = (value >> count) & ((1 << (64 - count)) - 1)
    return shifted
