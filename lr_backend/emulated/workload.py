"""How the texts of a deployment behave: the one description that planner and emulation share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Lengths of texts, and how draft and target agree. Lengths are in tokens.

    Attributes:
        acceptance_rate: alpha, share of drafted steps whose meaning is the target's, in [0, 1].
        sibling_acceptance_rate: the same of a further candidate for a position, where those before it are not accepted. None: as
            if candidates had nothing in common.
        exact_rate: share of drafted steps that are the target's own word for word, and need no verdict; part of acceptance_rate.
        length_bias: by how much less than acceptance_rate a step of twice the mean length is accepted; long steps hold more that
            may differ.
        token_agreement: chance that the draft model's best next token, behind the target's own text, is the target's.
        word_agreement: the same behind the draft's own text: how much of a drafted step goes on like the target's, once it has
            left the target's words.
        prompt_tokens: length of a question with all that is around it.
        step_tokens: mean length of a step.
        step_spread: steps are as long as that, give or take this share, uniformly.
        num_steps: steps of an answer.
        answer_tokens: after the reasoning; the target writes them alone.
        verdict_prefix_tokens: what every verdict's prompt begins with, the same each time.
        verdict_tokens: what is new of it beside the two steps.
    """

    acceptance_rate: float
    sibling_acceptance_rate: float | None = None
    exact_rate: float = 0.0
    length_bias: float = 0.0
    token_agreement: float = 0.0
    word_agreement: float = 0.0
    prompt_tokens: int = 3
    step_tokens: int = 24
    step_spread: float = 0.0
    num_steps: int = 60
    answer_tokens: int = 0
    verdict_prefix_tokens: int = 0
    verdict_tokens: int = 16

    def __post_init__(self) -> None:
        rates = ("acceptance_rate", "exact_rate", "token_agreement", "word_agreement")
        rules = {name: 0.0 <= getattr(self, name) <= 1.0 for name in rates}
        rules |= {
            "sibling_acceptance_rate": self.sibling_acceptance_rate is None or 0.0 <= self.sibling_acceptance_rate <= 1.0,
            "length_bias": -1.0 <= self.length_bias <= 1.0,
            "prompt_tokens": self.prompt_tokens >= 3,
            "step_tokens": self.step_tokens >= 2,
            "step_spread": 0.0 <= self.step_spread < 1.0,
            "num_steps": self.num_steps >= 1,
            "answer_tokens": self.answer_tokens >= 0,
            "verdict_prefix_tokens": self.verdict_prefix_tokens >= 0,
            "verdict_tokens": self.verdict_tokens >= 0,
        }
        if bad := [name for name, valid in rules.items() if not valid]:
            raise ValueError(", ".join(f"{name}={getattr(self, name)} is out of range" for name in bad))

    @property
    def longest_step(self) -> int:
        """Tokens that no step exceeds."""
        return int(self.step_tokens * (1.0 + self.step_spread)) + 2

    @property
    def max_tokens(self) -> int:
        """Tokens that no answer exceeds."""
        return self.longest_step * (self.num_steps + 2) + self.answer_tokens
