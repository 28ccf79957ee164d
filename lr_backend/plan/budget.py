"""How to split a budget of parallel work between steps and tokens (the paper's section 3.3, Theorems 3 and 4).

The budget M is how many tokens the target may verify or decode at a time: target steps in flight, times the positions that each
verifies in one pass. The gain is taken to be the product of both: :func:`lr_backend.policy.formulas.ceiling` for the steps,
and the classic formula for the tokens. One step and all positions is plain token speculation, one position and all steps plain
lookahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lr_backend.policy.formulas import ceiling, useful_depth

BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known of the two speculations.

    Attributes:
        step_acceptance: alpha_1, share of drafted steps that are accepted, in [0, 1).
        step_cost: c_1, time of a drafted step over that of a target step, in (0, 1].
        token_acceptance: alpha_2, chance that a draft token after accepted ones is accepted, in [0, 1).
        token_cost: c_2, time of a drafted token over that of a target token, in [0, 1]; 0 for lookups.
    """

    step_acceptance: float
    step_cost: float
    token_acceptance: float
    token_cost: float


@dataclass(frozen=True, slots=True)
class Split:
    """One way to spend a budget, and what it gains.

    Attributes:
        num_steps: k_1, target steps in flight (``max_depth``); 1: no lookahead.
        num_positions: k_2, positions verified in one pass (``num_draft_tokens`` + 1); 1: no draft tokens.
        speedup: over the target alone.
    """

    num_steps: int
    num_positions: int
    speedup: float


def token_speedup(acceptance: float, cost: float, num_positions: int) -> float:
    """What verifying ``num_positions`` in one pass gains over decoding token by token; 1 for one position.

    Raises:
        ValueError: an argument out of its range.
    """
    if not (0.0 <= acceptance < 1.0 and 0.0 <= cost <= 1.0 and num_positions >= 1):
        raise ValueError(f"acceptance={acceptance}, cost={cost}, num_positions={num_positions}: out of range")
    return (1.0 - acceptance**num_positions) / ((1.0 - acceptance) * (1.0 - cost + cost * num_positions))


def splits(budget: int, rates: Rates) -> Iterator[Split]:
    """Every split that nothing can be added to within the budget: for each number of steps, as many positions as are left.

    Steps beyond :func:`~lr_backend.policy.formulas.useful_depth` are never in flight, and are left out.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} is out of range")
    for num_steps in range(1, min(budget, useful_depth(rates.step_cost)) + 1):
        by_steps = ceiling(rates.step_acceptance, rates.step_cost, num_steps)
        # Drafting costs time: the best number of positions may leave some of the budget unused.
        gains = {k: token_speedup(rates.token_acceptance, rates.token_cost, k) for k in range(1, budget // num_steps + 1)}
        num_positions = max(gains, key=gains.__getitem__)
        yield Split(num_steps, num_positions, by_steps * gains[num_positions])


def best_split(budget: int, rates: Rates) -> Split:
    """The split that gains most; of equal ones that with the fewest steps."""
    return max(splits(budget, rates), key=lambda split: split.speedup)


def acceptance_from_length(mean_accepted: float, num_drafts: int) -> float:
    """alpha_2 for which of ``num_drafts`` draft tokens ``mean_accepted`` are accepted on average up to the first that is not."""
    if not 0.0 <= mean_accepted <= num_drafts:
        raise ValueError(f"mean_accepted={mean_accepted} is out of range")
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        expected = sum(middle**k for k in range(1, num_drafts + 1))
        low, high = (middle, high) if expected < mean_accepted else (low, middle)
    return low
