"""How many draft tokens to verify at once: as many as bring most for their time, by what was accepted and what it took.

If each draft token is accepted with probability a, a verification of K of them brings (1 - a^(K + 1)) / (1 - a) tokens (arXiv
2211.17192, equation 1), the target's own included. Meanwhile the draft writes the next K. So a round takes as long as the
slower of the two; and where the target has disagreed, the draft begins anew and the target waits for it.

Where a step begins the target waits as well, and how steps begin is what two models agree on least. So the first draft tokens of
a step are fewer: as many as bring most for the time of draft and verification together.
"""

from __future__ import annotations

from collections.abc import Callable

from lr_backend.policy.average import Average
from lr_backend.policy.prices import Crowding

LEAST_SEEN, MEMORY = 16, 256
"""Verifications before they are believed, and after which older ones have faded to about a third."""


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens that a verification brings, the target's own included.

    Args:
        acceptance: of each draft token, in [0, 1].
    """
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return float((1.0 - acceptance ** (num_draft_tokens + 1)) / (1.0 - acceptance))


class DraftLength:
    """What the verifications of one proposer's draft tokens have lately brought."""

    def __init__(self) -> None:
        self._accepted, self._ended = Average(MEMORY), Average(MEMORY)
        self._accepted_first, self._ended_first = Average(), Average()
        """Of the first verifications of steps."""
        self._verifying, self._drafting = Crowding(), Crowding()
        """Seconds of a call, by the draft tokens that it verifies or writes: what the call itself takes, and so much for each."""

    def verified(self, num_proposed: int, num_accepted: int, seconds: float) -> None:
        """One verification took ``seconds`` > 0."""
        self._accepted.add(num_accepted)
        self._ended.add(float(num_accepted < num_proposed))
        self._verifying.add(num_proposed, seconds)

    def verified_first(self, num_proposed: int, num_accepted: int) -> None:
        """Of the draft tokens that a step began with so many were accepted."""
        self._accepted_first.add(num_accepted)
        self._ended_first.add(float(num_accepted < num_proposed))

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """One call of the draft took ``seconds`` > 0; never told where draft tokens are looked up."""
        self._drafting.add(num_tokens, seconds)

    def best(self, most: int) -> int:
        """The number of draft tokens, 1 to ``most``; ``most`` while little is known."""
        chance = _chance(self._accepted, self._ended)

        def seconds(num: int) -> float:
            verifying, drafting = self._verifying.at(num), self._drafting.at(num)
            return max(verifying, drafting) + (1.0 - chance**num) * drafting

        return self._best(most, self._accepted, chance, seconds)

    def first(self, most: int) -> int:
        """The number of draft tokens that a step begins with, 1 to ``most``; ``most`` while little is known."""
        chance = _chance(self._accepted_first, self._ended_first)
        return self._best(most, self._accepted_first, chance, lambda num: self._verifying.at(num) + self._drafting.at(num))

    def _best(self, most: int, seen: Average, chance: float, seconds: Callable[[int], float]) -> int:
        """As many as bring most tokens a second."""
        if min(seen.count, self._accepted.count) < LEAST_SEEN:
            return most
        return max(range(1, most + 1), key=lambda num: expected_tokens(chance, num) / seconds(num))


def _chance(accepted: Average, ended: Average) -> float:
    """That a draft token is accepted where those before it were."""
    num_accepted, num_ended = accepted.value or 0.0, ended.value or 0.0
    return num_accepted / (num_accepted + num_ended) if num_accepted else 0.0
