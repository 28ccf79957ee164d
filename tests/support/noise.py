"""The noise and the draws by their definition, in a few lines of numpy that share nothing with what is shipped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lr_backend.engine import Sampling

Reals = npt.NDArray[np.float64]


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashes(*numbers: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix(state + (np.atleast_1d(np.asarray(number, np.uint64)) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return state


def bits(seed: npt.ArrayLike, position: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """2^53 times the uniform numbers."""
    return np.uint64(2) * (hashes(seed, position, tokens) >> np.uint64(12)) + np.uint64(1)


def uniforms(seed: npt.ArrayLike, position: npt.ArrayLike, tokens: npt.ArrayLike) -> Reals:
    found: Reals = bits(seed, position, tokens) / 2.0**53
    return found


def noise(seed: npt.ArrayLike, position: npt.ArrayLike, tokens: npt.ArrayLike) -> Reals:
    found: Reals = -np.log(-np.log(uniforms(seed, position, tokens)))
    return found


def kept(logits: npt.NDArray[np.float32], sampling: Sampling) -> list[int]:
    """Tokens that top-k and then top-p keep, most likely first."""
    order = np.lexsort((np.arange(len(logits)), -logits))[: sampling.top_k or None]
    top_p = float(np.float32(sampling.top_p))
    if top_p >= 1.0:
        return order.tolist()
    scaled = logits[order].astype(np.float64) / float(np.float32(sampling.temperature))
    reached = np.cumsum(np.exp(scaled - scaled[0]))
    return order[: int(np.searchsorted(reached, top_p * reached[-1])) + 1].tolist()


def probs(logits: npt.NDArray[np.float32], sampling: Sampling) -> Reals:
    """What a draw follows: the softmax of logits / temperature over what is kept."""
    found, tokens = np.zeros(len(logits)), kept(logits, sampling)
    found[tokens] = np.exp((logits[tokens].astype(np.float64) - logits.max()) / sampling.temperature)
    return found / found.sum()


def draw(logits: npt.NDArray[np.float32], sampling: Sampling, seed: int, position: int) -> int:
    if sampling.greedy or np.float32(sampling.temperature) == 0.0:
        return int(np.argmax(logits))
    tokens = np.sort(kept(logits, sampling))
    with np.errstate(invalid="ignore"):
        scores = logits[tokens].astype(np.float64) / float(np.float32(sampling.temperature)) + noise(seed, position, tokens)
    return int(tokens[np.argmax(scores)])
