"""The runtime ``emulated``: a deployment on GPUs without the GPUs and without weights. No file says it: :func:`emulated` does.

Engines take the time, keep the rules and hold the KV memory of the deployment that is emulated; scripted texts stand in for its
models'. Loop, server and contract are the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lr_backend.build.base import DeploymentSpec, EngineSpec
from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import drafts_with_its_draft, kv_tokens, pace_of, stood_for
from lr_backend.contract import DRAFTING_ENGINE_INPUTS, TensorSpec
from lr_backend.emulated.texts import DRAFT_TEMPERATURE, Script
from lr_backend.emulated.vocabulary import TOKENIZER_DIR
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, first_error
from lr_backend.hardware.pace import EnginePace
from lr_backend.hardware.profile import find, label_of
from lr_backend.parameters import as_parameters

DEFAULT_WORKLOAD = "qwen3-gsm8k"
MAX_QUEUE_SIZE = 4096
"""Where the deployment has no limit of its own."""


class EmulatedEngineSpec(EngineSpec):
    """One role, with the sizes of the engine that is emulated. Sizes are in tokens, but for ``max_batch_size``: sequences."""

    checkpoint: Path = TOKENIZER_DIR
    max_batch_size: int
    max_num_tokens: int
    max_draft_len: int
    max_tokens_in_paged_kv_cache: int
    enable_kv_cache_reuse: bool

    @property
    def num_drafts(self) -> int:
        return self.max_draft_len

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return DRAFTING_ENGINE_INPUTS

    def parameters(self, model_dir: Path) -> dict[str, str]:
        settings = self.model_dump(exclude={"url", "checkpoint"})
        return as_parameters({"checkpoint_dir": model_dir, "exclude_input_in_output": True, **settings})


class EmulatedDeployment(DeploymentSpec):
    """A deployment on GPUs, emulated. Engines, limits and defaults are that one's.

    Attributes:
        emulates: which one, by the path of its file.
        system: on which cards: ``h200_sxm`` and so on.
        workload: how its texts behave: a published one by name, or a file.
        drafts_itself: its target does, as an engine of the LLM API.
        slow_motion: everything takes so many times as long, where this machine cannot keep the pace.
    """

    runtime: Literal["emulated"] = "emulated"
    emulates: str
    system: str
    workload: str
    drafts_itself: bool
    slow_motion: float = Field(ge=1.0, le=100.0)
    target: EmulatedEngineSpec
    draft: EmulatedEngineSpec
    judge: EmulatedEngineSpec

    def engine(self, role: Role) -> EmulatedEngineSpec:
        engine: EmulatedEngineSpec = getattr(self, role.value)
        return engine

    def template(self, role: Role) -> str:
        return "embedded"

    @property
    def texts(self) -> Workload:
        """Raises: ConfigError: there is no such workload, or it contradicts itself."""
        return Workload.load(self.workload)

    def engine_pace(self, role: Role) -> EnginePace:
        """At whose pace a role's engine runs.

        Raises:
            ConfigError: there is no such deployment, or no profile of it on that system.
        """
        drafts_itself = self.drafts_itself and role is Role.TARGET
        pace = pace_of(stood_for(self.emulates), role, self.system, drafts_itself=drafts_itself)
        return replace(pace, slow_motion=self.slow_motion)

    def engine_parameters(self, role: Role, model_dir: Path) -> dict[str, str]:
        parameters = super().engine_parameters(role, model_dir)
        parameters |= {"pace": self.engine_pace(role).as_json(), "script": Script(role, self.texts).as_json()}
        return parameters | ({"speculative_model_dir": str(model_dir)} if self.drafts_itself and role is Role.TARGET else {})

    def runtime_loop_settings(self) -> dict[str, Any]:
        return {"pace": self.pace_label}

    @property
    def engine_drafts(self) -> bool:
        return self.drafts_itself

    @property
    def pace_label(self) -> str:
        """What must stand beside every time that is measured of the deployment."""
        profiles = [find(self.engine_pace(role).profile) for role in Role]
        parts = ["real server and loop, scripted texts, no model", label_of(profiles)]
        if self.slow_motion > 1.0:
            parts.append(f"in slow motion: all of it takes {self.slow_motion:g} times as long here")
        return "; ".join(parts)


def emulated(spec_name: str, system: str, workload: str | None = None, *, slow_motion: float = 1.0) -> EmulatedDeployment:
    """A deployment on GPUs by its name, emulated on a system.

    Args:
        workload: by name or file; None: the default one.

    Raises:
        ConfigError: there is no such deployment, workload, or profile.
    """
    spec = stood_for(spec_name)
    texts = workload or DEFAULT_WORKLOAD
    drafts_itself = drafts_with_its_draft(spec)
    kept = kv_tokens(spec, system)
    try:
        found = EmulatedDeployment(
            name=f"{spec.name}.{system}",
            emulates=str(spec.path),
            system=system,
            workload=str(Path(texts).resolve()) if texts.endswith(".toml") else texts,
            drafts_itself=drafts_itself,
            slow_motion=slow_motion,
            lookahead=_lookahead(spec, slow_motion, drafts_itself=drafts_itself),
            # Whoever emulates has not the cores of that machine.
            server=spec.server.model_copy(update={"num_loops": 1}),
            target=_engine(spec, Role.TARGET, kept),
            draft=_engine(spec, Role.DRAFT, kept),
            judge=_engine(spec, Role.JUDGE, kept),
        )
    except ValidationError as error:
        raise ConfigError(f"{spec.name} cannot be emulated: {first_error(error)}") from error
    found._path = spec.path
    Workload.load(found.workload)
    return found


def _engine(spec: GpuDeployment, role: Role, kept: Mapping[Role, int]) -> EmulatedEngineSpec:
    engine = spec.engine(role)
    return EmulatedEngineSpec(
        max_seq_len=engine.max_seq_len,
        tokens_per_block=engine.tokens_per_block,
        max_queue_size=engine.max_queue_size or MAX_QUEUE_SIZE,
        max_batch_size=engine.max_batch_size,
        max_num_tokens=engine.max_num_tokens,
        max_draft_len=engine.num_drafts,
        max_tokens_in_paged_kv_cache=kept[role],
        enable_kv_cache_reuse=engine.enable_kv_cache_reuse,
    )


def _lookahead(spec: GpuDeployment, slow_motion: float, *, drafts_itself: bool) -> dict[str, Any]:
    return {
        **spec.lookahead,
        # Token ids are few: what they say of their chances needs no rows of the vocabulary. Their time is charged all the same.
        "draft_logits": "none",
        "draft_temperature": DRAFT_TEMPERATURE,
        "defaults": {**spec.lookahead.get("defaults", {}), **({"proposer": "engine"} if drafts_itself else {})},
        "timeouts": spec.loop_config().timeouts.in_slow_motion(slow_motion),
    }
