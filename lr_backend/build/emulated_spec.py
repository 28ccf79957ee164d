"""Specs of the runtime ``emulated``: a deployment on GPUs without the GPUs and without weights.

Engines take the time, keep the rules and hold the KV memory of the deployment that is emulated; scripted texts stand in for its
models'. Loop, server and contract are the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from lr_backend.build.base import DeploymentSpec, EngineSpec
from lr_backend.build.pace import drafts_with_its_draft, kv_tokens, pace_of, stood_for
from lr_backend.contract import EMBEDDED_ENGINE_INPUTS, TensorSpec
from lr_backend.emulated.texts import DRAFT_TEMPERATURE, Script
from lr_backend.emulated.vocabulary import TOKENIZER_DIR
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, first_error
from lr_backend.hardware.pace import EnginePace
from lr_backend.hardware.profile import find, label_of
from lr_backend.hardware.sharing import CardSharing

DEFAULT_WORKLOAD = "qwen3-gsm8k"
MAX_QUEUE_SIZE = 4096
"""Where the deployment has no limit of its own."""


class EmulatedEngineSpec(EngineSpec):
    """One role, with the sizes of the engine that is emulated. Sizes are in tokens, but for ``max_batch_size``: sequences."""

    checkpoint: Path = TOKENIZER_DIR
    max_queue_size: int | None = Field(default=MAX_QUEUE_SIZE, ge=1)
    max_batch_size: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    max_draft_len: int = Field(default=0, ge=0)
    max_tokens_in_paged_kv_cache: int = Field(ge=64)
    enable_kv_cache_reuse: bool = True

    @property
    def num_drafts(self) -> int:
        return self.max_draft_len

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return EMBEDDED_ENGINE_INPUTS

    def parameters(self, model_dir: Path) -> dict[str, str]:
        numbers = ("tokens_per_block", "max_batch_size", "max_num_tokens", "max_queue_size", "max_seq_len", "max_draft_len")
        return {
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": str(model_dir),
            "max_tokens_in_paged_kv_cache": str(self.max_tokens_in_paged_kv_cache),
            "enable_kv_cache_reuse": str(self.enable_kv_cache_reuse).lower(),
            "enable_chunked_context": "true",
            "exclude_input_in_output": "true",
            "max_beam_width": "1",
            "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",
            **{name: str(getattr(self, name)) for name in numbers},
        }


class EmulatedDeployment(DeploymentSpec):
    """A deployment on GPUs, emulated. Engines, limits and defaults are that one's.

    Attributes:
        emulates: which one, by name or by the path of its file.
        system: on which cards: ``h200_sxm`` and so on.
        workload: how its texts behave: a published one by name, or a file.
        card_sharing: what runs where roles share cards: CUDA MPS, or nothing, and then they take turns.
        drafts_itself: its target does, as an engine of the LLM API.
        slow_motion: everything takes so many times as long, where this machine cannot keep the pace.
    """

    runtime: Literal["emulated"]
    emulates: str = "qwen3-32b-apart"
    system: str = "h200_sxm"
    workload: str = DEFAULT_WORKLOAD
    card_sharing: CardSharing = CardSharing.MPS
    drafts_itself: bool = False
    slow_motion: float = Field(default=1.0, ge=1.0, le=100.0)
    target: EmulatedEngineSpec
    draft: EmulatedEngineSpec
    judge: EmulatedEngineSpec

    @model_validator(mode="before")
    @classmethod
    def _take_over(cls, raw: Any) -> Any:
        """What the file does not say is as in the deployment that is emulated."""
        if not isinstance(raw, Mapping):
            return raw
        spec = stood_for(str(raw.get("emulates", "qwen3-32b-apart")))
        try:
            if drafts_with_its_draft(spec):
                raw = {**raw, "drafts_itself": True}
            kept = kv_tokens(spec, str(raw.get("system", "h200_sxm")), drafts_itself=bool(raw.get("drafts_itself")))
        except ConfigError as error:
            raise ValueError(error.message) from error
        sections = {name: raw.get(name, {}) for name in ("lookahead", "server", *(role.value for role in Role))}
        if bad := [name for name, section in sections.items() if not isinstance(section, Mapping)]:
            raise ValueError(f"{bad[0]} must be a table")
        roles = {}
        for role in Role:
            engine = spec.engine(role)
            names = ("max_seq_len", "tokens_per_block", "max_batch_size", "max_num_tokens", "enable_kv_cache_reuse")
            sizes = {name: getattr(engine, name) for name in names}
            if engine.max_queue_size is not None:
                sizes["max_queue_size"] = engine.max_queue_size
            sizes |= {"max_draft_len": engine.num_drafts, "max_tokens_in_paged_kv_cache": kept[role]}
            roles[role.value] = {**sizes, **sections[role.value]}
        # Token ids are few: what they say of their chances needs no rows of the vocabulary. Their time is charged all the same.
        loop = {**spec.lookahead, "draft_logits": "none", "draft_temperature": DRAFT_TEMPERATURE}
        if raw.get("drafts_itself"):
            loop = _over(loop, {"defaults": {"proposer": "engine"}})
        timeouts = spec.loop_config().timeouts.model_dump()
        slower = {name: seconds * float(raw.get("slow_motion", 1.0)) for name, seconds in timeouts.items()}
        loop = _over({**loop, "timeouts": slower}, sections["lookahead"])
        # Whoever emulates has not the cores of that machine: one process of the loop, unless more are asked for.
        server = _over({**spec.server.model_dump(), "num_loops": 1}, sections["server"])
        return {**raw, **roles, "lookahead": loop, "server": server}

    @model_validator(mode="after")
    def _known(self) -> Self:
        """Raises: ConfigError: no such profile or workload; a workload's file is read when it is known where the spec lies."""
        for role in Role:
            self.engine_pace(role)
        if not self.workload.endswith(".toml"):
            Workload.load(self.workload)
        return self

    def engine(self, role: Role) -> EmulatedEngineSpec:
        engine: EmulatedEngineSpec = getattr(self, role.value)
        return engine

    def template(self, role: Role) -> str:
        return "embedded"

    @property
    def texts(self) -> Workload:
        """Raises: ConfigError: there is no such workload, or it contradicts itself."""
        path = Path(self.workload)
        return Workload.load(self.root / path if path.suffix == ".toml" and not path.is_absolute() else self.workload)

    def engine_pace(self, role: Role) -> EnginePace:
        """At whose pace a role's engine runs.

        Raises:
            ConfigError: there is no such deployment, or no profile of it on that system.
        """
        drafts_itself = self.drafts_itself and role is Role.TARGET
        pace = pace_of(stood_for(self.emulates), role, self.system, drafts_itself=drafts_itself)
        return replace(pace, sharing=self.card_sharing, slow_motion=self.slow_motion)

    def engine_parameters(self, role: Role, model_dir: Path) -> dict[str, str]:
        parameters = super().engine_parameters(role, model_dir)
        parameters |= {"pace": self.engine_pace(role).as_json(), "script": Script(role, self.texts).as_json()}
        return parameters | ({"speculative_model_dir": str(model_dir)} if self.drafts_itself and role is Role.TARGET else {})

    def runtime_loop_settings(self) -> dict[str, Any]:
        return {"pace": self.pace_label}

    @property
    def shares_cards(self) -> bool:
        return stood_for(self.emulates).shares_cards

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


def _over(taken: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, over what is taken over: table by table."""
    merged = {**taken, **given}
    tables = [name for name in given if isinstance(given[name], Mapping) and isinstance(taken.get(name), Mapping)]
    return {**merged, **{name: _over(taken[name], given[name]) for name in tables}}


EmulatedDeployment.register("emulated")


def emulated(spec_name: str, system: str, workload: str | None = None, **settings: Any) -> EmulatedDeployment:
    """A deployment on GPUs by its name, emulated on a system.

    Args:
        workload: by name or file; None: the default one.
        settings: more of :class:`EmulatedDeployment`.

    Raises:
        ConfigError: there is no such deployment, workload, or profile.
    """
    spec = stood_for(spec_name)
    chosen = {"emulates": str(spec.path), "system": system, "workload": workload or DEFAULT_WORKLOAD, **settings}
    if chosen["workload"].endswith(".toml"):
        chosen["workload"] = str(Path(chosen["workload"]).resolve())
    try:
        found = EmulatedDeployment.model_validate({"name": f"{spec.name}.{system}", "runtime": "emulated", **chosen})
    except ValidationError as error:
        raise ConfigError(f"{spec.name} cannot be emulated: {first_error(error)}") from error
    found._path = spec.path
    Workload.load(found.workload)
    return found
