"""Whether verifying token drafts pays, by the tokens that the last verifications brought.

Counts tokens and never seconds, so that what is proposed follows from what was written: by this request and, where they share
:class:`Verifications`, by those before.
"""

from __future__ import annotations

from lr_backend.loop.average import Average


class Verifications:
    """What verifications have lately brought, and how long they rest where they do not pay.

    A chance costs a few calls. So it comes after some plain tokens, and after twice as many each time that it was none: of all
    requests that share this one together.
    """

    MEMORY = 256
    LEAST_SEEN = 8
    """Verifications from which on they are believed."""
    LEAST_REST, MOST_REST = 128, 2048
    """Plain tokens until the next chance."""
    LEAST_CALL = 64
    """A call is not cut shorter for it: one more costs more than a chance that comes a step later."""

    def __init__(self) -> None:
        self._tokens = Average(self.MEMORY)
        self._rest = self.LEAST_REST
        self._num_rested = 0

    @property
    def count(self) -> int:
        """How many are remembered."""
        return self._tokens.count

    @property
    def mean_tokens(self) -> float | None:
        """Tokens that one brings; None while too few were seen."""
        return self._tokens.value if self.count >= self.LEAST_SEEN else None

    @property
    def tokens_left(self) -> int:
        """Plain tokens to decode in one call before the next chance."""
        return max(self.LEAST_CALL, self._rest - self._num_rested)

    def verified(self, num_tokens: float) -> None:
        """One brought ``num_tokens``."""
        self._tokens.add(num_tokens)

    def rested(self, num_tokens: int) -> bool:
        """``num_tokens`` were decoded without drafts where these do not pay; whether they now get a chance."""
        self._num_rested += num_tokens
        if self._num_rested < self._rest:
            return False
        self._num_rested = 0
        return True

    def had_a_chance(self, *, pays: bool) -> None:
        """What became of it."""
        self._rest = self.LEAST_REST if pays else min(self.MOST_REST, 2 * self._rest)


class Payoff:
    """What one request, or one step, expects of its next verification."""

    WEIGHT = 0.3
    MAX_IDLE_CALLS = 2
    """Calls without a proposal after which a chance is over: each cuts the decoding short."""

    def __init__(self, cost: float, lately: Verifications | None = None) -> None:
        """Args: cost: tokens that a verification must bring; lately: shared with other requests, None: with nobody."""
        self._cost = cost
        self._lately = lately or Verifications()
        known = self._lately.mean_tokens
        self._gain = known if known is not None else cost + 1.0  # the benefit of the doubt
        self._num_idle_calls = 0
        self._gain_before_chance: float | None = None

    @property
    def pays(self) -> bool:
        """Verify what is proposed; always true while it has its chance."""
        return self._gain >= self._cost

    @property
    def tokens_until_chance(self) -> int:
        """Tokens to decode in one call while it does not pay."""
        return self._lately.tokens_left

    def verified(self, num_tokens: float) -> None:
        """A verification brought ``num_tokens``, the target's own included, less what it took to draft them."""
        self._gain += self.WEIGHT * (num_tokens - self._gain)
        self._lately.verified(num_tokens)
        if self._gain_before_chance is not None:
            self._gain_before_chance = None
            self._lately.had_a_chance(pays=self.pays)

    def decoded(self, num_tokens: int) -> None:
        """``num_tokens`` were decoded without drafts."""
        if self._gain_before_chance is not None:
            self._num_idle_calls += 1
            if self._num_idle_calls == self.MAX_IDLE_CALLS:
                self._gain, self._gain_before_chance = self._gain_before_chance, None
                self._lately.had_a_chance(pays=False)
        elif not self.pays and self._lately.rested(num_tokens):
            self._gain_before_chance, self._gain, self._num_idle_calls = self._gain, self._cost, 0
