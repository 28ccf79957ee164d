"""How many draft tokens to verify at once: as many as bring most for their time, by what was accepted and what it took.

If each draft token is accepted with probability a, a verification of K of them brings (1 - a^(K + 1)) / (1 - a) tokens (arXiv
2211.17192, equation 1), the target's own included. Meanwhile the draft writes the next K. So a round takes as long as the
slower of the two; and where the target has disagreed, the draft begins anew and the target waits for it.
"""

from __future__ import annotations

from lr_backend.policy.average import Average
from lr_backend.policy.prices import Crowding

LEAST_SEEN = 16
"""Verifications before they are believed."""


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
        self._accepted, self._ended = Average(memory=256), Average(memory=256)
        self._verifying, self._drafting = Crowding(), Crowding()
        """Seconds of a call, by the draft tokens that it verifies or writes: what the call itself takes, and so much for each."""

    def verified(self, num_proposed: int, num_accepted: int, seconds: float) -> None:
        """One verification took ``seconds`` > 0."""
        self._accepted.add(num_accepted)
        self._ended.add(float(num_accepted < num_proposed))
        self._verifying.add(num_proposed, seconds)

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """One call of the draft took ``seconds`` > 0; never told where draft tokens are looked up."""
        self._drafting.add(num_tokens, seconds)

    def best(self, most: int) -> int:
        """The number of draft tokens, 1 to ``most``; ``most`` while little is known."""
        if self._accepted.count < LEAST_SEEN:
            return most
        accepted, ended = self._accepted.value or 0.0, self._ended.value or 0.0
        chance = accepted / (accepted + ended) if accepted else 0.0

        def tokens_a_second(num: int) -> float:
            verifying, drafting = self._verifying.at(num), self._drafting.at(num)
            waiting = (1.0 - chance**num) * drafting
            return expected_tokens(chance, num) / (max(verifying, drafting) + waiting)

        return max(range(1, most + 1), key=tokens_a_second)
