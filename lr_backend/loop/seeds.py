"""Which noise an engine call draws with.

An engine draws the token at a position with noise that follows from the call's seed and the position (where it can:
:attr:`~lr_backend.config.LoopConfig.coupled_noise`). Calls of one seed share that noise. So target and draft, given the same
seed, agree far more often than their distributions must (arXiv 2408.07978), and a text does not depend on the calls in which it
was written.

The noise of a position may decide what is committed there once, and nothing else:

- Where drafted steps are accepted for their meaning, a verdict looks at both steps to their ends, and the committed one may be
  the shorter. The next step would then meet noise that the verdict has depended on, and its words would be biased. So each step
  has a seed of its own, by where it begins: on a committed path no two steps begin at the same place.
- Where only the target's own words are accepted, the text is the target's whatever was drafted. One seed for the whole request
  then makes it the same text in every mode, streamed or whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from lr_backend.engine import Role


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of one request's calls: functions of their arguments alone, whatever the order of completions.

    Attributes:
        request_seed: what all derive from.
        coupled: engines draw by seed and position; otherwise no two calls share a seed.
        by_step: drafted steps are accepted for their meaning.
    """

    request_seed: int
    coupled: bool = False
    by_step: bool = True

    def step(self, start: int, offset: int, role: Role, sibling: int = 0) -> int:
        """A 63-bit seed for the call that writes from ``offset`` on, of the step that begins at ``start`` (absolute, in tokens).

        Only the first drafted step after a prefix is coupled with the target's: the others must differ from it.
        """
        if self.coupled:  # the position is part of the noise already
            return self._shared(start) if sibling == 0 or role is Role.TARGET else self._own(f"{start}/{role.value}/{sibling}")
        return self._own(f"{start}/{offset}/{role.value}/{sibling}")

    def draft_tokens(self, start: int, offset: int) -> int:
        """The same for draft tokens."""
        return self._shared(start) if self.coupled else self._own(f"{start}/{offset}/draft_tokens/0")

    def _shared(self, start: int) -> int:
        return self._own(f"step/{start}" if self.by_step else "answer")

    def _own(self, what: str) -> int:
        digest = blake2b(f"{self.request_seed}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
