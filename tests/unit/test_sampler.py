"""Distributions and draws against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from lr_backend.engine import Sampling
from lr_backend.torch_engine.sampler import Purpose, chosen_log_probs, draw, draw_tokens, target_probs, uniform

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 1.5]])
NUM_DRAWS = 100_000


def reference_probs(logits: list[float], sampling: Sampling) -> list[float]:
    """The plain definition, in double precision."""
    scaled = np.array(logits) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: sampling.top_k or len(order)]
    probs = np.exp(scaled[kept] - scaled.max())
    probs /= probs.sum()
    reached = np.searchsorted(np.cumsum(probs), sampling.top_p - 1e-9) + 1
    result = np.zeros(len(order))
    result[kept[:reached]] = probs[:reached]
    return (result / result.sum()).tolist()


SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(2.5),
    Sampling(1.0, top_k=3),
    Sampling(0.8, top_k=100),
    Sampling(1.0, top_p=0.7),
    Sampling(1.0, top_p=1e-6),
    Sampling(0.7, top_k=4, top_p=0.8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_target_probs_follow_the_definition(sampling: Sampling) -> None:
    expected = reference_probs(LOGITS[0].tolist(), sampling)
    assert target_probs(LOGITS, [sampling])[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    together = target_probs(LOGITS.expand(len(SAMPLINGS), -1), SAMPLINGS)
    points = torch.full((len(SAMPLINGS),), 0.9, dtype=torch.float64)
    drawn = draw_tokens(LOGITS.expand(len(SAMPLINGS), -1), SAMPLINGS, points)
    for row, sampling in enumerate(SAMPLINGS):
        assert torch.allclose(together[row], target_probs(LOGITS, [sampling])[0], atol=1e-7)
        if sampling.top_k or sampling.top_p < 1.0:
            assert drawn[row] == draw_tokens(LOGITS, [sampling], points[:1])[0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_follow_the_probabilities(sampling: Sampling) -> None:
    probs = target_probs(LOGITS, [sampling])
    uniforms = torch.tensor([uniform(5, offset, Purpose.DRAW) for offset in range(NUM_DRAWS)], dtype=torch.float64)
    direct = draw_tokens(LOGITS.expand(NUM_DRAWS, -1), [sampling] * NUM_DRAWS, uniforms)

    for tokens in (draw(probs.expand(NUM_DRAWS, -1), uniforms), direct):
        assert fits(torch.bincount(tokens, minlength=6).numpy(), probs[0].numpy())


def fits(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Chi-square at 0.1%; a token of probability zero must not occur."""
    possible = probs > 0
    if counts[~possible].any():
        return False
    expected = probs[possible].astype(np.float64)
    expected *= counts.sum() / expected.sum()
    return possible.sum() == 1 or stats.chisquare(counts[possible], expected).pvalue > 1e-3


def test_extreme_uniforms_never_draw_the_impossible() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]] * 3)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53, 0.3], dtype=torch.float64)

    assert draw(probs, uniforms).tolist()[:2] == [1, 3]
    assert draw(torch.tensor([[0.0, 0.0, 1e-30]]), torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)).tolist() == [2]


def test_uniforms_depend_on_each_argument_and_on_nothing_else() -> None:
    values = {uniform(seed, offset, purpose) for seed in (0, 1, 2**64 - 1) for offset in range(100) for purpose in Purpose}
    assert len(values) == 3 * 100 * 3
    assert uniform(7, 3, Purpose.DRAW) == uniform(7, 3, Purpose.DRAW)
    assert all(0.0 <= value < 1.0 for value in values)


def test_uniforms_are_uniform_along_offsets_seeds_and_pairs() -> None:
    along_offsets = [uniform(1, offset, Purpose.DRAW) for offset in range(20_000)]
    along_seeds = [uniform(seed, 0, Purpose.ACCEPT) for seed in range(20_000)]
    assert stats.kstest(along_offsets, "uniform").pvalue > 1e-3
    assert stats.kstest(along_seeds, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(along_offsets[:-1], along_offsets[1:])[0, 1]) < 0.03
    accepts = [uniform(1, offset, Purpose.ACCEPT) for offset in range(20_000)]
    assert abs(np.corrcoef(along_offsets, accepts)[0, 1]) < 0.03


def test_log_probs_are_of_the_model_itself() -> None:
    expected = torch.log_softmax(LOGITS, dim=-1)[0, 3]
    assert chosen_log_probs(LOGITS, torch.tensor([3])).tolist() == pytest.approx([float(expected)])
