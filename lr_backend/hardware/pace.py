"""At whose pace an engine runs: the profile, the runtime and the placement that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from lr_backend.errors import ConfigError, first_error
from lr_backend.hardware.cost import CostModel, DraftingCosts, ProfileCosts
from lr_backend.hardware.overheads import Bound, Overheads
from lr_backend.hardware.profile import ProfileKey, find
from lr_backend.hardware.rules import OWN_RULES, UpstreamRules
from lr_backend.hardware.sharing import Board, CardSharing


class Runtime(StrEnum):
    """What serves the engine that is stood for."""

    COMPILED = "compiled"
    """An engine of ``trtllm-build`` behind Triton's C++ backend: draft tokens come from outside, one verification a call."""
    LLMAPI = "llmapi"
    """TensorRT-LLM's LLM API: it drafts by itself, within its iterations."""


@dataclass(frozen=True)
class EnginePace:
    """How long one engine's iterations and calls are made to last.

    Attributes:
        poll_ms: ``recv_poll_period_ms`` of a compiled engine.
        one_hot: sampled verifications are charged for logits of their draft tokens, as that engine needs them.
        draft: the model with which the engine drafts by itself; None: it does not.
        role: whose engine it is, among those of ``cards``.
        cards: of every role that shares a card with this one, itself included, its cards; empty: nobody does.
        board: file over which these tell one another what they do.
        rules: what the runtime does beside taking time.
        slow_motion: everything takes so many times as long, for machines that cannot keep the pace itself.
    """

    profile: ProfileKey
    runtime: Runtime = Runtime.COMPILED
    poll_ms: float = 1.0
    one_hot: bool = True
    draft: ProfileKey | None = None
    role: str = ""
    cards: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sharing: CardSharing = CardSharing.MPS
    board: Path | None = None
    rules: UpstreamRules = OWN_RULES
    bound: Bound = Bound.VALUE
    slow_motion: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.slow_motion <= 100.0:
            raise ConfigError(f"slow_motion={self.slow_motion}: from 1 to 100")

    def overheads(self) -> Overheads:
        """Raises: ConfigError: there is no such profile."""
        profile = find(self.profile)
        if self.runtime is Runtime.LLMAPI:
            return Overheads.llmapi(profile, self.bound)
        return Overheads.compiled(profile, self.poll_ms, self.bound)

    def costs(self) -> CostModel:
        """Raises: ConfigError: there is no such profile."""
        costs = ProfileCosts(find(self.profile), self.overheads())
        return costs if self.draft is None else DraftingCosts(costs, find(self.draft))

    def open_board(self) -> Board | None:
        """Raises: ConfigError: it shares cards and has no file for that, or one that cannot be written."""
        if not self.cards:
            return None
        if self.board is None:
            raise ConfigError(f"the {self.role} shares cards with others, and there is no file on which they meet")
        return Board.of(self.board, self.role, self.cards, self.sharing)

    @property
    def label(self) -> str:
        """What the engine stands for, in a few words."""
        return f"{self.profile.model} TP {self.profile.tp_size} {self.profile.dtype} on {self.profile.system}, {self.runtime}"

    def as_json(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises: ConfigError: it is none."""
        try:
            pace = _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"pace: {first_error(error)}") from error
        assert isinstance(pace, cls)
        return pace


_ADAPTER = TypeAdapter(EnginePace)
