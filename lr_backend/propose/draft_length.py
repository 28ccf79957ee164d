"""How many token drafts to verify at once: as many as bring most, by what was accepted of late (dynamic speculation lookahead,
arXiv 2405.04304).

If each token draft is accepted with probability a, a verification of K of them brings (1 - a^(K + 1)) / (1 - a) tokens (arXiv
2211.17192, equation 1), the target's own included; what it takes grows with K. The length is the K that brings most for its time.
It counts tokens and never seconds, so that what is proposed follows from what was written.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.9
"""What an observation counts for after one more."""
PRIOR_ACCEPTANCE = 0.7
PRIOR_TOKENS = 4.0
"""The prior weighs as much as so many token drafts: a request begins with middling lengths."""


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """What token speculation takes, in tokens that the target decodes meanwhile.

    Attributes:
        verification: a verification, call and all.
        verified_token: what each token draft adds to it.
        drafted_token: a token of the draft model; 0 where drafts are looked up.
    """

    verification: float = 1.0
    verified_token: float = 0.0
    drafted_token: float = 0.0

    def of(self, num_draft_tokens: int) -> float:
        """A verification of so many token drafts, drafted for it."""
        return self.verification + num_draft_tokens * (self.verified_token + self.drafted_token)


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens that a verification brings, the target's own included, if each draft is accepted with ``acceptance`` in [0, 1]."""
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return float((1.0 - acceptance ** (num_draft_tokens + 1)) / (1.0 - acceptance))


def best_length(acceptance: float, costs: DraftCosts, most: int) -> int:
    """The number of token drafts, 1 to ``most``, that brings most tokens for its time; of equal ones the smallest."""
    return max(range(1, most + 1), key=lambda number: expected_tokens(acceptance, number) / costs.of(number), default=0)


class DraftLength:
    """The running length of one request, or of one step."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._accepted = self._ended = 0.0

    @property
    def acceptance(self) -> float:
        """Probability that the next token draft is accepted: accepted ones over those that were put to the test."""
        return (self._accepted + PRIOR_ACCEPTANCE * PRIOR_TOKENS) / (self._accepted + self._ended + PRIOR_TOKENS)

    def next(self, most: int) -> int:
        """Token drafts to ask for, at most ``most``; at least one, so that better times are noticed."""
        return best_length(self.acceptance, self._costs, most)

    def observed(self, num_accepted: int, ended: bool) -> None:
        """So many drafts were accepted in a row. ``ended``: one more was asked for and was of no use, be it that the target
        wrote another token or that the draft was not sure of it."""
        self._accepted = FADE * self._accepted + num_accepted
        self._ended = FADE * self._ended + ended
