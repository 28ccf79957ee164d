"""How the texts of a deployment behave: the one description that planner and emulation share. A TOML file holds it.

``published.toml`` beside this file has one for each data set and pair of models that the paper has measured (arXiv 2506.19830,
table 1), by name.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from lr_backend.errors import ConfigError, first_error

PUBLISHED = Path(__file__).with_name("published.toml")


@with_config(ConfigDict(extra="forbid"))
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
        ngram_hit_rate: share of the target's tokens that are found by looking up where the two before them stood earlier.
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
    ngram_hit_rate: float = 0.0
    prompt_tokens: int = 3
    step_tokens: int = 24
    step_spread: float = 0.0
    num_steps: int = 60
    answer_tokens: int = 0
    verdict_prefix_tokens: int = 0
    verdict_tokens: int = 16

    def __post_init__(self) -> None:
        rates = ("acceptance_rate", "exact_rate", "token_agreement", "word_agreement")
        rules: dict[str, bool] = {name: 0.0 <= getattr(self, name) <= 1.0 for name in rates}
        rules |= {
            "sibling_acceptance_rate": self.sibling_acceptance_rate is None or 0.0 <= self.sibling_acceptance_rate <= 1.0,
            "length_bias": -1.0 <= self.length_bias <= 1.0,
            "ngram_hit_rate": 0.0 <= self.ngram_hit_rate <= 0.8,
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
        if self.exact_rate > self.acceptance_rate:
            raise ValueError(f"exact_rate={self.exact_rate} is part of acceptance_rate={self.acceptance_rate}, and more than it")

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A workload by the path of its file (it ends in ``.toml``), or one of the published ones by name.

        Raises:
            ConfigError: there is none of that name, the file cannot be read, or it contradicts itself.
        """
        text = str(name_or_path)
        if not text.endswith(".toml"):
            if text not in published():
                raise ConfigError(f"no workload named {text!r}; known: {', '.join(published())}; a file's name ends in .toml")
            return cls(**asdict(published()[text]))
        return cls.parse(_read(Path(text)), Path(text).name)

    @classmethod
    def parse(cls, fields: Any, name: str) -> Self:
        """Raises: ConfigError: these are no fields of a workload; ``name`` says whose they are."""
        try:
            found = _ADAPTER.validate_python(fields)
        except ValidationError as error:
            raise ConfigError(f"workload {name}: {first_error(error)}") from error
        assert isinstance(found, cls)
        return found

    def as_toml(self, said: str = "") -> str:
        """The file, with what is ``said`` in its first line."""
        fields = "".join(f"{name} = {value}\n" for name, value in asdict(self).items() if value is not None)
        return f"# {said}\n{fields}" if said else fields

    @property
    def longest_step(self) -> int:
        """Tokens that no step exceeds."""
        return int(self.step_tokens * (1.0 + self.step_spread)) + 2

    @property
    def max_tokens(self) -> int:
        """Tokens that no answer exceeds."""
        return self.longest_step * (self.num_steps + 2) + self.answer_tokens


_ADAPTER = TypeAdapter(Workload)


@cache
def published() -> dict[str, Workload]:
    """Workloads of the paper, by name."""
    tables = _read(PUBLISHED)
    shared = tables.pop("shared")
    return {name: Workload.parse({**shared, **fields}, name) for name, fields in tables.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"workload {path.name} cannot be read: {error}") from error
