"""Specs of the runtime ``embedded``: three checkpoints on the embedded engine, which needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lr_backend.build.base import DeploymentSpec, EngineSpec, Layout
from lr_backend.build.pace import pace_of, stood_for
from lr_backend.contract import DRAFTING_ENGINE_INPUTS, TensorSpec
from lr_backend.engine import Role
from lr_backend.engine.settings import EmbeddedSettings
from lr_backend.hardware.pace import EnginePace
from lr_backend.hardware.profile import find, label_of
from lr_backend.hardware.sharing import CardSharing
from lr_backend.parameters import as_parameters


class EmbeddedEngineSpec(EmbeddedSettings, EngineSpec):  # type: ignore[misc]  # its queue always has a limit
    """One role on the embedded engine.

    Attributes:
        holds_draft_model: the target's engine has a draft model of its own, the deployment's, to write draft tokens with
            (proposer ``engine``). Native kernels only.
        pace: iterations last as long as on this system (``h200_sxm`` and so on) those of the same role of the deployment that
            is stood for (``paced_as``); None: as long as they take here. An engine that holds a draft model is paced as the
            LLM API's, one that does not as a compiled one.
    """

    max_draft_len: int = Field(default=0, ge=0)
    holds_draft_model: bool = False
    pace: str | None = None

    @model_validator(mode="after")
    def _holds_one_sequence(self) -> Self:
        in_blocks = self.max_tokens_in_paged_kv_cache // self.tokens_per_block * self.tokens_per_block
        if in_blocks < self.max_seq_len:
            rule = f"one sequence of max_seq_len = {self.max_seq_len}, and is {in_blocks} in whole blocks"
            raise ValueError(f"max_tokens_in_paged_kv_cache must hold {rule}")
        return self

    @property
    def num_drafts(self) -> int:
        return self.max_draft_len

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return DRAFTING_ENGINE_INPUTS

    def parameters(self, model_dir: Path) -> dict[str, str]:
        settings = {name: getattr(self, name) for name in EmbeddedSettings.model_fields}
        return as_parameters({"checkpoint_dir": model_dir, "exclude_input_in_output": True, **settings})


class EmbeddedDeployment(DeploymentSpec):
    """Three checkpoints on the embedded engine.

    Attributes:
        paced_as: the deployment on GPUs for whose engines those with a ``pace`` stand: its models, parallelism and placement.
        card_sharing: what runs where roles of that one share cards: CUDA MPS, or nothing, and then they take turns.
        slow_motion: of engines with a pace: everything takes so many times as long, where this machine cannot keep the pace.
        shares_noise: engines with a pace take the time of those that they stand for, and draw as the embedded engine does: with
            noise that target and draft have in common.
    """

    runtime: Literal["embedded"]
    paced_as: str = "qwen3-32b-apart"
    card_sharing: CardSharing = CardSharing.MPS
    slow_motion: float = Field(default=1.0, ge=1.0, le=100.0)
    shares_noise: bool = False
    target: EmbeddedEngineSpec
    draft: EmbeddedEngineSpec
    judge: EmbeddedEngineSpec

    def engine(self, role: Role) -> EmbeddedEngineSpec:
        engine: EmbeddedEngineSpec = getattr(self, role.value)
        return engine

    @model_validator(mode="after")
    def _only_the_target_drafts(self) -> Self:
        if self.draft.holds_draft_model or self.judge.holds_draft_model:
            raise ValueError("holds_draft_model belongs to the section target: nobody drafts for the draft or the judge")
        if self.target.holds_draft_model and not self.target.max_draft_len:
            raise ValueError("target.holds_draft_model needs target.max_draft_len of at least 1")
        return self

    @model_validator(mode="after")
    def _paced_engines_have_processes(self) -> Self:
        if self.server.layout is Layout.ONE_PROCESS and any(self.engine(role).pace for role in Role):
            raise ValueError("server.layout: a pace needs process_a_role, as the engines that are stood for have it")
        return self

    def runtime_loop_settings(self) -> dict[str, Any]:
        if self.server.layout is not Layout.ONE_PROCESS:
            return {"pace": self.pace_label}
        return {"engines": {role.value: self.engine_parameters(role, self.checkpoint_dir(role)) for role in Role}}

    def engine_parameters(self, role: Role, model_dir: Path) -> dict[str, str]:
        parameters = super().engine_parameters(role, model_dir)
        if (pace := self.engine_pace(role)) is not None:
            parameters["pace"] = pace.as_json()
        if not self.engine(role).holds_draft_model:
            return parameters
        return parameters | {
            "speculative_model_dir": str(self.checkpoint_dir(Role.DRAFT)),
            "speculative_weight_dtype": self.draft.weight_dtype,
        }

    def engine_pace(self, role: Role) -> EnginePace | None:
        """At whose pace a role's engine runs; None: at this machine's own.

        Raises:
            ConfigError: the deployment that is stood for cannot be read, or has no profile on that system.
        """
        engine = self.engine(role)
        if engine.pace is None:
            return None
        pace = pace_of(stood_for(self.paced_as), role, engine.pace, drafts_itself=engine.holds_draft_model)
        # Logits of draft tokens serve upstream's rule for accepting them, not ours.
        one_hot = pace.one_hot and not self.shares_noise
        return replace(pace, one_hot=one_hot, sharing=self.card_sharing, slow_motion=self.slow_motion)

    @property
    def pace_label(self) -> str:
        """What must stand beside every time that is measured of the deployment; empty where it is this machine's own."""
        paces = {role: pace for role in Role if (pace := self.engine_pace(role)) is not None}
        if not paces:
            return ""
        parts = ["real server, loop and models", label_of([find(pace.profile) for pace in paces.values()])]
        if own := [role.value for role in Role if role not in paces]:
            parts.append(f"{' and '.join(own)} at this machine's own pace")
        if self.shares_noise:
            parts.append("target and draft draw with noise in common, as no compiled engine does")
        if self.slow_motion > 1.0:
            parts.append(f"in slow motion: all of it takes {self.slow_motion:g} times as long here")
        return "; ".join(parts)

    @property
    def engine_drafts(self) -> bool:
        return self.target.holds_draft_model

    @property
    def coupled_noise(self) -> bool:
        # Where an engine stands for one of TensorRT-LLM's, seeds are used as that one would use them.
        return self.shares_noise or (self.target.pace is None and self.draft.pace is None)


EmbeddedDeployment.register("embedded")
