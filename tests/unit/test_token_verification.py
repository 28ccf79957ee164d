"""Draft tokens must not change what comes out: chi-square against exact probabilities, and the rule that fails it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lr_backend.engine import Sampling, one_hot_logits
from lr_backend.torch_engine.native_library import library
from lr_backend.torch_engine.sampler import target_probs
from lr_backend.torch_engine.verification import (
    Verdict,
    impossible_to_zero,
    verify_biased,
    verify_greedy,
    verify_in_c,
    verify_tokens,
    verify_with_logits,
)
from tests.support.torch_engines import NEEDS_LIBRARY

N = 100_000
VOCAB = 5
FIRST = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
SECOND = torch.tensor(  # by first token
    [[0.1, 0.2, 0.3, 0.2, 0.2], [0.6, 0.1, 0.1, 0.1, 0.1], [0.2] * 5, [0.0, 0.5, 0.5, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0, 0.0]]
)


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pvalue(counts: Tensor, probs: Tensor) -> float:
    """Chi-square of counts against exact probabilities; 0 when something impossible occurred."""
    observed, expected = counts.double().numpy().ravel(), probs.double().numpy().ravel()
    if observed[expected == 0].any():
        return 0.0
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(stats.chisquare(observed, expected / expected.sum() * observed.sum()).pvalue)


def one_position(rule: str, draft: int, seed: int) -> Tensor:
    """Counts of the first output token over N verifications of one draft."""
    probs = torch.stack([FIRST, SECOND[draft]]).expand(N, 2, VOCAB)
    drafts = torch.full((N, 1), draft)
    verdict = apply(rule, probs, drafts, seed)
    first = torch.where(verdict.num_accepted > 0, drafts[:, 0], verdict.next_token)
    return torch.bincount(first, minlength=VOCAB)


def apply(rule: str, probs: Tensor, drafts: Tensor, seed: int) -> Verdict:
    num_rows, num_drafts = drafts.shape
    first, second = uniforms(num_rows, num_drafts, seed=seed), uniforms(num_rows, num_drafts + 1, seed=seed + 1)
    if rule == "biased":
        return verify_biased(probs, drafts, first, second)
    if rule == "one-hot logits":
        logits = torch.from_numpy(one_hot_logits(drafts.reshape(-1).int().numpy(), VOCAB)).view(num_rows, num_drafts, VOCAB)
        return verify_with_logits(probs, torch.softmax(impossible_to_zero(logits), -1), drafts, first, second)
    if rule == "in C":
        return in_c(probs[0].log(), drafts[0].tolist(), Sampling(1.0), num_rows, seed)
    return verify_tokens(probs, drafts, first, second)


def in_c(logits: Tensor, drafts: list[int], sampling: Sampling, count: int, first_seed: int) -> Verdict:
    """So many verifications of the same drafts, each with a seed of its own."""
    native = library()
    assert native is not None
    seeds = range(first_seed * count, (first_seed + 1) * count)
    verdicts = [verify_in_c(native, logits, drafts, sampling, seed, 7) for seed in seeds]
    return Verdict(*torch.tensor(verdicts).unbind(1))


IN_C = pytest.param("in C", marks=NEEDS_LIBRARY)


@pytest.mark.parametrize("rule", ["tokens", "one-hot logits", IN_C])
@pytest.mark.parametrize("draft", range(VOCAB))
def test_a_token_only_draft_does_not_change_the_distribution(rule: str, draft: int) -> None:
    assert pvalue(one_position(rule, draft, seed=draft), FIRST) > 1e-3


@pytest.mark.parametrize("draft", range(VOCAB))
def test_upstreams_rule_does(draft: int) -> None:
    counts = one_position("biased", draft, seed=draft)

    assert pvalue(counts, FIRST) < 1e-9
    p = float(FIRST[draft])
    assert int(counts[draft]) / N == pytest.approx(p + (1 - p) * p, abs=0.01)


@pytest.mark.parametrize("rule", ["tokens", "one-hot logits", IN_C])
def test_two_drafts_do_not_change_the_joint_distribution(rule: str) -> None:
    counts = joint(rule, seed=3)

    assert pvalue(counts, FIRST[:, None] * SECOND) > 1e-3


def test_upstreams_rule_changes_the_joint_distribution() -> None:
    assert pvalue(joint("biased", seed=3), FIRST[:, None] * SECOND) < 1e-9


def joint(rule: str, seed: int) -> Tensor:
    """Counts of the first two tokens: two drafts, and where the first was rejected a plain draw after it."""
    drafts = torch.tensor([[0, 2]]).expand(N, 2)
    third = torch.full((VOCAB,), 0.2)
    probs = torch.stack([FIRST, SECOND[0], third]).expand(N, 3, VOCAB)
    verdict = apply(rule, probs, drafts, seed)
    first = torch.where(verdict.num_accepted > 0, drafts[:, 0], verdict.next_token)
    after = torch.multinomial(SECOND[first], 1, generator=torch.Generator().manual_seed(9)).squeeze(1)
    second = torch.where(verdict.num_accepted == 1, verdict.next_token, drafts[:, 1])
    second = torch.where(verdict.num_accepted == 0, after, second)
    return torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_drafts_sampled_from_draft_logits_do_not_change_the_distribution(mix: float) -> None:
    proposal = mix * FIRST + (1 - mix) * torch.tensor([0.05, 0.05, 0.5, 0.4, 0.0])
    drafts = torch.multinomial(proposal.expand(N, -1), 1, generator=torch.Generator().manual_seed(1))
    probs = torch.stack([FIRST, torch.full((VOCAB,), 0.2)]).expand(N, 2, VOCAB)
    verdict = verify_with_logits(probs, proposal.expand(N, 1, -1), drafts, uniforms(N, 1), uniforms(N, 2, seed=1))
    first = torch.where(verdict.num_accepted > 0, drafts[:, 0], verdict.next_token)

    assert pvalue(torch.bincount(first, minlength=VOCAB), FIRST) > 1e-3
    expected = float(torch.minimum(FIRST, proposal).sum())
    assert float(verdict.num_accepted.double().mean()) == pytest.approx(expected, abs=0.01)


def test_the_bonus_token_follows_the_last_distribution() -> None:
    probs = torch.stack([torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), FIRST]).expand(N, 2, VOCAB)
    verdict = verify_tokens(probs, torch.full((N, 1), 1), uniforms(N, 1), uniforms(N, 2, seed=1))

    assert verdict.num_accepted.min() == 1
    assert pvalue(torch.bincount(verdict.next_token, minlength=VOCAB), FIRST) > 1e-3


def test_impossible_drafts_are_never_accepted() -> None:
    probs = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]).expand(N, 2, VOCAB)
    drafts = torch.full((N, 1), 4)

    for rule in ("tokens", "one-hot logits", "biased", *(("in C",) if library() else ())):
        verdict = apply(rule, probs, drafts, 0)
        assert verdict.num_accepted.max() == 0
        assert verdict.next_token.max() <= 1


@NEEDS_LIBRARY
@pytest.mark.parametrize("sampling", [Sampling(0.6, 3, 1.0), Sampling(1.5, 0, 0.8), Sampling(0.8, 4, 0.9)], ids=str)
@pytest.mark.parametrize("draft", [0, 2, 4])
def test_in_c_temperature_top_k_and_top_p_count_for_drafts(sampling: Sampling, draft: int) -> None:
    logits = torch.stack([FIRST, FIRST.roll(draft)]).log()  # no two alike: of equals, which one top-k keeps is open
    verdict = in_c(logits, [draft], sampling, N, draft)
    first = torch.where(verdict.num_accepted > 0, draft, verdict.next_token)

    expected = target_probs(logits, [sampling] * 2)
    assert pvalue(torch.bincount(first, minlength=VOCAB), expected[0]) > 1e-3
    bonus = verdict.next_token[verdict.num_accepted > 0]
    assert (len(bonus) > 0) == bool(expected[0, draft] > 0)
    assert not len(bonus) or pvalue(torch.bincount(bonus, minlength=VOCAB), expected[1]) > 1e-3


@NEEDS_LIBRARY
def test_in_c_greedy_drafts_stand_while_they_are_the_most_likely() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1).tolist()

    for right in range(5):
        drafts = [*best[:right], *((best[at] + 1) % 40 for at in range(right, 4))]
        assert in_c(logits, drafts, Sampling(), 1, 0) == Verdict(torch.tensor([right]), torch.tensor([best[right]]))


def test_a_rejection_that_only_rounding_made_leaves_the_targets_own_draw() -> None:
    certain = torch.tensor([[[1.0 - 6e-8, 0.0], [0.5, 0.5]]])
    almost_one = torch.tensor([[1.0 - 2.0**-53]], dtype=torch.float64)
    verdict = verify_tokens(certain, torch.tensor([[0]]), almost_one, uniforms(1, 2))

    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 0)


def test_greedy_accepts_while_equal() -> None:
    best = torch.tensor([[3, 1, 4, 1], [3, 1, 4, 1], [3, 1, 4, 1]])
    drafts = torch.tensor([[3, 1, 4], [3, 0, 4], [0, 1, 4]])

    verdict = verify_greedy(best, drafts)

    assert verdict.num_accepted.tolist() == [3, 1, 0]
    assert verdict.next_token.tolist() == [1, 1, 3]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0, 1e6])
def test_one_hot_logits_stay_one_hot_at_any_temperature(temperature: float) -> None:
    logits = torch.from_numpy(one_hot_logits(np.array([2, 0], dtype=np.int32), VOCAB))
    probs = target_probs(impossible_to_zero(logits), [Sampling(temperature)] * 2)

    assert probs.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
