"""Draws, in C and by torch, against the definition: what may be drawn, which token it is, and how often that is each."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from lr_backend.embedded import sampler
from lr_backend.embedded.sampler import Draw, chosen_log_probs, drawn_tokens
from lr_backend.engine import Sampling, drawing
from lr_backend.engine.drawing import kept_logits
from tests.support import noise as reference
from tests.support.embedded_engines import KERNELS, NEEDS_LIBRARY

NUM_DRAWS = 30_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, float("-inf"), 0.0, -1.0, 1.5, 0.9, -3.0])

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
    if request.param == "reference":
        monkeypatch.setattr(sampler, "library", lambda: None)
    return str(request.param)


def draws(logits: torch.Tensor, sampling: Sampling, seed: int, positions: Items[int]) -> npt.NDArray[np.int64]:
    """A token for each position, all from the same logits."""
    asked = [Draw(0, position, sampling, seed) for position in positions]
    return np.array(drawn_tokens(logits[None], asked)).ravel()


def by_torch(logits: torch.Tensor, asked: Items[Draw], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "library", lambda: None)
        return drawn_tokens(logits, asked)


def array(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = logits.numpy()
    return values


def fits(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> bool:
    """Chi-square at 0.1%; what is impossible must not occur."""
    possible = probs > 0
    if counts[~possible].any():
        return False
    return bool(possible.sum() == 1 or stats.chisquare(counts[possible], probs[possible] * counts.sum()).pvalue > 1e-3)


# Which tokens may be drawn


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_kept_follows_the_definition(sampling: Sampling) -> None:
    values, tokens = kept_logits(LOGITS[None], [sampling])
    found = {token for token, value in zip(tokens[0].tolist(), values[0].tolist(), strict=True) if value > float("-inf")}
    assert found == set(reference.kept(array(LOGITS), sampling)) - {3}


def test_of_equals_the_lower_token_is_kept() -> None:
    level = torch.zeros(2, 40)
    for sampling in (Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.09)):
        values, tokens = kept_logits(level, [sampling] * 2)
        assert tokens[:, :4].tolist() == [[0, 1, 2, 3]] * 2
        assert (values > float("-inf")).sum() == 8
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0]])
    assert kept_logits(zeros, [Sampling(1.0, top_k=2)])[1].tolist() == [[0, 1]]


# Which token is drawn

LOGIT = st.floats(-8.0, 8.0, width=32) | st.sampled_from([0.0, -0.0, 1.0, float("-inf")])
SEEDS, POSITIONS = st.integers(0, 2**64 - 1), st.integers(0, 2**20)
HOW = {
    "temperature": st.floats(0.05, 5.0),
    "top_k": st.just(0) | st.integers(2, 30),
    "top_p": st.just(1.0) | st.floats(0.01, 0.999),
}


@NEEDS_LIBRARY
@given(rows=st.lists(st.lists(LOGIT, min_size=12, max_size=12), min_size=1, max_size=5), seed=SEEDS, position=POSITIONS, **HOW)
@settings(max_examples=150)
def test_everyone_draws_the_same(
    rows: list[list[float]], seed: int, position: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits, sampling = torch.tensor(rows), Sampling(temperature, top_k, top_p)
    assume(bool((logits.amax(dim=-1) > float("-inf")).all()))
    for row in logits:  # where rounding decides whether one token more is within top-p, either is right
        edges = [min(1.0, top_p * by) for by in (1 - 1e-6, 1.0, 1 + 1e-6)]
        near = [reference.kept(array(row), Sampling(temperature, top_k, edge)) for edge in edges]
        assume(near[0] == near[1] == near[2])

    asked = [Draw(row, position + row, sampling, seed) for row in range(len(rows))]
    expected = [[reference.draw(array(row), sampling, seed, position + at)] for at, row in enumerate(logits)]

    assert drawn_tokens(logits, asked) == expected
    with pytest.MonkeyPatch.context() as patched:
        assert by_torch(logits, asked, patched) == expected


@NEEDS_LIBRARY
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 255, 256, 257, 1000])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 10.0])
@pytest.mark.parametrize("temperature", [1e-3, 0.6, 3.0])
def test_the_bound_on_the_noise_rules_nothing_out_that_wins(vocab_size: int, spread: float, temperature: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = (rng.normal(size=(40, vocab_size)) * spread).astype(np.float32)
    sampling = Sampling(temperature)

    found = drawn_tokens(torch.from_numpy(logits), [Draw(row, 5, sampling, row) for row in range(40)])

    assert found == [[reference.draw(logits[row], sampling, row, 5)] for row in range(40)]


@NEEDS_LIBRARY
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(2.0), Sampling(0.9, 50, 0.95), Sampling(1.0, top_p=0.9)])
def test_a_vocabulary_padded_to_another_width_draws_the_same(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widths of Qwen3's tokenizer and of its checkpoints."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(3, 151_936)).astype(np.float32) * 3.0)
    padded = torch.cat([logits, torch.full((3, 152_064 - 151_936), float("-inf"))], dim=1)
    asked = [Draw(row, 1000 + row, sampling, 17) for row in range(3)]
    expected = [[reference.draw(array(row), sampling, 17, 1000 + at)] for at, row in enumerate(logits)]

    for width in (logits, padded):
        assert drawn_tokens(width, asked) == expected
        assert by_torch(width, asked, monkeypatch) == expected


@given(values=st.lists(LOGIT, min_size=2, max_size=20), padding=st.integers(1, 300), seed=SEEDS, position=POSITIONS, **HOW)
def test_padding_changes_no_draw(
    values: list[float], padding: int, seed: int, position: int, temperature: float, top_k: int, top_p: float
) -> None:
    assume(max(values) > float("-inf"))
    asked = [Draw(0, position, Sampling(temperature, top_k, top_p), seed)]
    logits, padded = torch.tensor([values]), torch.tensor([values + [float("-inf")] * padding])
    assert drawn_tokens(padded, asked) == drawn_tokens(logits, asked)
    with pytest.MonkeyPatch.context() as patched:
        assert by_torch(padded, asked, patched) == by_torch(logits, asked, patched)


@NEEDS_LIBRARY
@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=700), Sampling(0.8, top_k=2999, top_p=0.9)])
def test_a_long_list_of_likely_tokens_is_the_definitions(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equals the lower tokens are kept, as in a short one."""
    logits = torch.tensor(np.random.default_rng(1).integers(-20, 20, 3000) / 4, dtype=torch.float32)[None]
    asked = [Draw(0, position, sampling, 5) for position in range(40)]
    assert drawn_tokens(logits, asked) == by_torch(logits, asked, monkeypatch)


@pytest.mark.usefixtures("kernels")
def test_rows_of_a_batch_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [*SAMPLINGS, Sampling(), *SAMPLINGS[::-1], Sampling(1.0, top_k=1)]
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(len(samplings), 50)).astype(np.float32))
    asked = [Draw(row, 3 * row, sampling, row % 4) for row, sampling in enumerate(samplings)]

    together = drawn_tokens(logits, asked)

    assert together == [drawn_tokens(logits, [one])[0] for one in asked]
    assert together == drawn_tokens(logits, asked[::-1])[::-1]
    monkeypatch.setattr(drawing, "MAX_NUMBERS", 120)
    assert together == drawn_tokens(logits, asked)
    greedy = [row for row, sampling in enumerate(samplings) if sampling.greedy]
    assert [together[row][0] for row in greedy] == logits[greedy].argmax(-1).tolist()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.9)])
def test_rows_need_not_lie_side_by_side(sampling: Sampling) -> None:
    wide = torch.zeros(200, 3, 61)
    wide[:, 1, 17], wide[:, 1, 50] = 99.0, 999.0
    assert drawn_tokens(wide[:, 1, :40], [Draw(row, row, sampling, 0) for row in range(200)]) == [[17]] * 200


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sampling", [Sampling(1e-60), Sampling(1e-60, top_k=3), Sampling(1e-60, top_p=0.5)])
def test_a_temperature_that_float32_has_not_is_greedy(sampling: Sampling) -> None:
    assert set(draws(torch.tensor([0.0, 2.0, 1.0, -5.0]), sampling, 1, range(20))) == {1}


@pytest.mark.usefixtures("kernels")
def test_settings_mean_the_same_in_a_call_as_in_tensors() -> None:
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=200).astype(np.float32))
    for exact in (Sampling(0.6, 20, 0.95), Sampling(0.7), Sampling(0.9, 0, 0.8)):
        as_tensor = Sampling(float(np.float32(exact.temperature)), exact.top_k, float(np.float32(exact.top_p)))
        assert (draws(logits, exact, 2, range(300)) == draws(logits, as_tensor, 2, range(300))).all()


# How often it is each


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_follow_the_softmax_of_what_is_kept(sampling: Sampling) -> None:
    for seed, positions in ((4, range(NUM_DRAWS)), (2**63 + 1, range(10**6, 10**6 + NUM_DRAWS))):
        counts = np.bincount(draws(LOGITS, sampling, seed, positions), minlength=len(LOGITS))
        assert fits(counts, reference.probs(array(LOGITS), sampling))


@NEEDS_LIBRARY
def test_draws_along_seeds_follow_it_too() -> None:
    asked = [Draw(0, 40, Sampling(0.9, 6), seed) for seed in range(NUM_DRAWS)]
    counts = np.bincount(np.array(drawn_tokens(LOGITS[None], asked)).ravel(), minlength=len(LOGITS))
    assert fits(counts, reference.probs(array(LOGITS), Sampling(0.9, 6)))


@NEEDS_LIBRARY
@pytest.mark.parametrize("step", [(0, 1), (0, 2), (1, 0), (2**32, 0), (1, 1), (1, -1)], ids=str)
def test_draws_at_other_positions_and_of_other_seeds_are_independent(step: tuple[int, int]) -> None:
    asked = [Draw(0, 10 + number % 100, Sampling(1.0), 1000 + number // 100) for number in range(NUM_DRAWS)]
    other = [Draw(0, one.position + step[1], one.sampling, one.seed + step[0]) for one in asked]
    logits = torch.tensor([[0.5, 0.0, 1.0, -0.5]])
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (np.array(drawn_tokens(logits, asked))[:, 0], np.array(drawn_tokens(logits, other))[:, 0]), 1)
    assert stats.chi2_contingency(pairs)[1] > 1e-3


@NEEDS_LIBRARY
@pytest.mark.parametrize("noise", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, 6, 0.9)], ids=str)
def test_two_models_draw_the_same_token_as_often_as_coupling_promises(noise: float, sampling: Sampling) -> None:
    rng = np.random.default_rng(8)
    ours = rng.normal(size=12).astype(np.float32)
    theirs = (ours + noise * rng.normal(size=12)).astype(np.float32)
    p, q = reference.probs(ours, sampling), reference.probs(theirs, sampling)
    total_variation = 0.5 * float(np.abs(p - q).sum())
    both = (p > 0) & (q > 0)
    # Token i is drawn by both if its exponential clock rings first under both rates.
    exact = sum(1.0 / np.maximum(p / p[i], q / q[i]).sum() for i in np.flatnonzero(both))

    mine, other = (draws(torch.from_numpy(logits), sampling, 6, range(NUM_DRAWS)) for logits in (ours, theirs))

    agreement = float((mine == other).mean())
    assert agreement == pytest.approx(exact, abs=4 * (exact * (1 - exact) / NUM_DRAWS) ** 0.5)
    assert exact >= (1 - total_variation) / (1 + total_variation)
    assert agreement > float((p * q).sum()), "independent draws agree less often"
    shifted = draws(torch.from_numpy(theirs), sampling, 7, range(NUM_DRAWS))
    assert float((mine == shifted).mean()) == pytest.approx(float((p * q).sum()), abs=0.02)


# Draft tokens


@given(
    drafts=st.lists(st.integers(0, 4), max_size=6), right=st.integers(0, 6), seed=SEEDS, position=POSITIONS,
    temperature=st.just(0.0) | HOW["temperature"], top_k=HOW["top_k"], top_p=HOW["top_p"], data=st.data(),
)  # fmt: skip
def test_draft_tokens_stand_as_long_as_they_are_what_is_drawn(
    drafts: list[int], right: int, seed: int, position: int, temperature: float, top_k: int, top_p: float, data: st.DataObject
) -> None:
    size = len(drafts) + 1
    values = data.draw(st.lists(st.floats(-4, 4, width=32), min_size=5 * (size + 1), max_size=5 * (size + 1)))
    logits, sampling = torch.tensor(values).view(-1, 5), Sampling(temperature, top_k, top_p)

    def check() -> None:
        # The first row is another's.
        plain = [drawn_tokens(logits, [Draw(1 + at, position + at, sampling, seed)])[0][0] for at in range(size)]
        sent = [*plain[:right], *drafts[right:]][: size - 1]
        num_right = next((at for at, token in enumerate(sent) if token != plain[at]), len(sent))
        asked = [Draw(1, position, sampling, seed, sent), Draw(0, 0, sampling, seed)]
        assert drawn_tokens(logits, asked)[0] == plain[: num_right + 1]

    check()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "library", lambda: None)
        check()


def test_log_probs_are_of_the_model_itself() -> None:
    expected: Any = torch.log_softmax(LOGITS, dim=-1)[2]
    assert chosen_log_probs(LOGITS[None], torch.tensor([2])).tolist() == pytest.approx([float(expected)])
