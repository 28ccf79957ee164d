"""Draws, in C and by torch: the distribution that was asked for, at every uniform and in every company."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from lr_backend.engine import Sampling
from lr_backend.torch_engine import sampler
from lr_backend.torch_engine.sampler import next_tokens, target_probs
from tests.support.torch_engines import KERNELS, NEEDS_LIBRARY

NUM_DRAWS = 100_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, float("-inf"), 0.0, -1.0, 1.5, 0.9, -3.0])
LAST = 1.0 - 2.0**-53
"""The largest uniform."""

SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(2.5),
    Sampling(1.0, top_k=5),
    Sampling(0.8, top_k=100),
    Sampling(1.0, top_p=0.75),
    Sampling(1.7, top_p=0.97),
    Sampling(1.0, top_p=1e-6),
    Sampling(0.7, top_k=6, top_p=0.8),
]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who draws."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "library", lambda: None)
    return str(request.param)


def draws(logits: torch.Tensor, sampling: Sampling, uniforms: Items[float]) -> torch.Tensor:
    """A token for each uniform."""
    count = len(uniforms)
    return torch.tensor(next_tokens(logits.repeat(count, 1), [sampling] * count, uniforms))


def shares(logits: torch.Tensor, sampling: Sampling, num_points: int) -> torch.Tensor:
    """How much of [0, 1) gives each token, to ``1 / num_points``: a token has one interval, and the points lie evenly."""
    points = (np.arange(num_points) + 0.5) / num_points
    return torch.bincount(draws(logits, sampling, points.tolist()), minlength=len(logits)) / num_points


@NEEDS_LIBRARY
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_follow_the_probabilities(sampling: Sampling) -> None:
    uniforms = np.random.default_rng(7).random(NUM_DRAWS)
    counts = torch.bincount(draws(LOGITS, sampling, uniforms.tolist()), minlength=len(LOGITS)).numpy()
    probs = target_probs(LOGITS[None], [sampling])[0].double().numpy()

    possible = probs > 0
    assert not counts[~possible].any()
    if possible.sum() > 1:
        expected = probs[possible] / probs[possible].sum() * NUM_DRAWS
        assert stats.chisquare(counts[possible], expected).pvalue > 1e-3


@pytest.mark.usefixtures("kernels")
def test_rows_of_a_batch_do_not_see_each_other() -> None:
    samplings = [*SAMPLINGS, Sampling(), *SAMPLINGS[::-1], Sampling(1.0, top_k=1)]
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(len(samplings), 50)).astype(np.float32))
    uniforms = rng.random(len(samplings)).tolist()

    together = next_tokens(logits, samplings, uniforms)

    if sampler.library() is not None:
        alone = [next_tokens(logits[row : row + 1], [samplings[row]], [uniforms[row]])[0] for row in range(len(samplings))]
        assert together == alone
    greedy = [row for row, sampling in enumerate(samplings) if sampling.greedy]
    assert len(greedy) == 2
    for row in greedy:
        assert together[row] == int(logits[row].argmax())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_impossible_is_never_drawn(sampling: Sampling) -> None:
    """At the ends above all: minus infinity first, last and between."""
    low = float("-inf")
    for values in ([low, 1.0, low, 1.5, low], [low] * 30 + [0.0] + [low] * 30, [0.0, low, -200.0]):
        logits = torch.tensor(values)
        tokens = draws(logits, sampling, [0.0, 2.0**-53, 0.5, LAST])
        assert (target_probs(logits[None], [sampling])[0, tokens] > 0.0).all()


@pytest.mark.usefixtures("kernels")
def test_the_ends_of_the_uniforms_draw_the_first_and_the_last() -> None:
    logits = torch.tensor([-1.0, 0.5, 0.0, 2.0, -4.0])
    assert draws(logits, Sampling(1.0), [0.0, LAST]).tolist() == [0, 4]
    # By likelihood, once it is cut.
    assert draws(logits, Sampling(1.0, top_k=3), [0.0, LAST]).tolist() == [3, 2]
    assert draws(logits, Sampling(1.0, top_p=0.9), [0.0, LAST]).tolist() == [3, 2]


@NEEDS_LIBRARY
def test_of_equals_the_lower_token_is_kept() -> None:
    level = torch.zeros(40)
    assert next_tokens(level[None], [Sampling()], [0.5]) == [0]
    assert shares(level, Sampling(1.0, top_k=4), 400)[:4].tolist() == pytest.approx([0.25] * 4, abs=3e-3)
    assert shares(level, Sampling(1.0, top_p=0.09), 400)[:4].tolist() == pytest.approx([0.25] * 4, abs=3e-3)
    logits = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    assert next_tokens(logits[None], [Sampling()], [0.5]) == [1]
    assert shares(logits, Sampling(1.0, top_k=2), 400).tolist() == pytest.approx([0.0, 0.5, 0.5, 0.0, 0.0], abs=3e-3)


LOGIT = st.floats(-8.0, 8.0, width=32) | st.sampled_from([0.0, 1.0, float("-inf")])


@NEEDS_LIBRARY
@given(
    values=st.lists(LOGIT, min_size=1, max_size=24).filter(lambda values: max(values) > float("-inf")),
    temperature=st.floats(0.2, 4.0),
    top_k=st.just(0) | st.integers(2, 30),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
)
def test_every_token_has_its_share_of_the_uniforms(values: list[float], temperature: float, top_k: int, top_p: float) -> None:
    logits, sampling = torch.tensor(values), Sampling(temperature, top_k, top_p)
    # Where rounding decides whether one token more is within top-p, either is right.
    near = [target_probs(logits[None], [Sampling(temperature, top_k, top_p * by)])[0] for by in (0.9999, 1.0, 1.0001)]
    assume(all(int((probs > 0).sum()) == int((near[1] > 0).sum()) for probs in near))

    found = shares(logits, sampling, 2000)

    # Of equals at the edge torch may keep another; the shares, and that the likelier has the larger, are the same.
    assert (found.sort().values - near[1].sort().values).abs().max() < 1.1e-3
    by_likelihood = sorted(range(len(values)), key=lambda token: (values[token], -token))
    assert (found[by_likelihood].diff() > -1.1e-3).all()


@NEEDS_LIBRARY
@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 4.0])
def test_top_p_counts_what_it_need_not_sort(spread: float, top_p: float) -> None:
    """Many unlikely tokens are left out unsorted; together they still are a part of the whole that top-p is of."""
    values = np.random.default_rng(1).normal(size=400) * spread
    values[::2] -= 2.0
    logits, sampling = torch.from_numpy(values.astype(np.float32)), Sampling(1.0, top_p=top_p)
    expected = target_probs(logits[None], [sampling])[0]

    found = shares(logits, sampling, 4000)

    # Rounding may decide about one token more; of equals at the edge torch may keep others.
    assert abs(int((found > 0).sum()) - int((expected > 0).sum())) <= 1
    assert (found.sort().values - expected.sort().values).abs().max() < 6e-4


@NEEDS_LIBRARY
def test_rows_need_not_lie_side_by_side() -> None:
    wide = torch.zeros(2000, 3, 61)
    wide[:, 1, 17] = 9.0
    assert next_tokens(wide[:, 1], [Sampling()] * 2000, [0.5] * 2000) == [17] * 2000


@NEEDS_LIBRARY
@pytest.mark.parametrize("sampling", [Sampling(1e-60), Sampling(1e-60, top_k=3), Sampling(1e-60, top_p=0.5)])
def test_a_temperature_that_float32_has_not_is_greedy(sampling: Sampling) -> None:
    assert set(draws(torch.tensor([0.0, 2.0, 1.0, -5.0]), sampling, [0.0, 0.5, LAST]).tolist()) == {1}
