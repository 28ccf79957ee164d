"""The pace of a deployment on GPUs: each role's profile, who shares cards with whom, and what its memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lr_backend.build.gpu_spec import GpuDeployment, LlmapiEngineSpec, TrtllmEngineSpec
from lr_backend.build.memory import DTYPE_BYTES, EngineMemory, estimate, kv_tokens_of
from lr_backend.build.shapes import find_sources
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.pace import EnginePace, Runtime
from lr_backend.hardware.profile import Profile, ProfileKey, find
from lr_backend.hardware.rules import OWN_RULES, UpstreamRules
from lr_backend.hardware.sharing import CardSharing

CARD_MEMORY_GIB: Mapping[str, float] = {"h100_sxm": 79.1, "h200_sxm": 139.8, "b200_sxm": 178.3, "l40s": 44.4}
"""Memory of one card as CUDA reports it: some less than what is printed on it."""
CARD_CAPABILITY: Mapping[str, str] = {"h100_sxm": "9.0", "h200_sxm": "9.0", "b200_sxm": "10.0", "l40s": "8.9"}
"""Compute capability of one card."""


def system_of(gpu: str) -> str | None:
    """The system of the kernel tables that has cards of this name; None: there is none."""
    return next((system for system in CARD_MEMORY_GIB if system.partition("_")[0].upper() in gpu.upper()), None)


def stood_for(name: str) -> GpuDeployment:
    """The deployment on GPUs of this name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return GpuDeployment.load(name)
    except ConfigError as error:
        raise ConfigError(f"whose pace it is: {error.message}") from error


def profile_key(spec: GpuDeployment, role: Role, system: str, tp_size: int | None = None) -> ProfileKey:
    """The profile of one role on a system, with another parallelism if one is given."""
    engine = spec.engine(role)
    return ProfileKey.of(system, engine.hub, tp_size or engine.tp_size, engine.weight_dtype)


def drafts_with_its_draft(spec: GpuDeployment) -> bool:
    """Whether the target's engine drafts by itself, with the deployment's draft.

    Raises:
        ConfigError: it does with something else, of which no pace is known.
    """
    ours = spec.speculation
    if ours is not None and (ours.kind != "draft_target" or ours.checkpoint is not None):
        what = "another draft model" if ours.kind == "draft_target" else ours.kind
        raise ConfigError(f"{spec.name}: target.speculative: only of the deployment's own draft a pace is known, not of {what}")
    return ours is not None


def pace_of(spec: GpuDeployment, role: Role, system: str, *, drafts_itself: bool = False) -> EnginePace:
    """The pace of one role of a deployment on a system.

    Args:
        drafts_itself: as an engine of the LLM API does, with the deployment's draft model over the same cards.

    Raises:
        ConfigError: there is no profile, or none with such keys and values, or the role spans machines.
    """
    _require_one_machine(spec)
    engine = spec.engine(role)
    key = profile_key(spec, role, system)
    draft = profile_key(spec, Role.DRAFT, system, engine.tp_size) if drafts_itself else None
    for wanted in (key, draft):
        if wanted is not None:
            _require_kv_dtype(spec, role, find(wanted))
    compiled = engine.runtime == "tensorrtllm" and not drafts_itself
    return EnginePace(
        profile=key,
        runtime=Runtime.COMPILED if compiled else Runtime.LLMAPI,
        poll_ms=getattr(engine, "recv_poll_period_ms", 0.0),
        one_hot=compiled and role is Role.TARGET and spec.loop_config().draft_logits == "one_hot",
        draft=draft,
        role=role.value,
        cards=_shared_cards(spec, role),
        rules=_rules(engine) if compiled else OWN_RULES,
    )


def machine_of(
    spec: GpuDeployment, system: str, *, drafts_itself: bool = False, card_sharing: CardSharing = CardSharing.MPS
) -> Machine:
    """The machine that a deployment is on a system: its pace, its upstream's rules, and its KV memory.

    Args:
        drafts_itself: its target does, as an engine of the LLM API.

    Raises:
        ConfigError: there is no profile, or the deployment does not fit the system's cards.
    """
    paces = {role: pace_of(spec, role, system, drafts_itself=drafts_itself and role is Role.TARGET) for role in Role}
    paces = {role: replace(pace, sharing=card_sharing) for role, pace in paces.items()}
    return Machine.paced(paces, {role: spec.engine(role) for role in Role}, kv_tokens(spec, system, drafts_itself=drafts_itself))


def kv_tokens(spec: GpuDeployment, system: str, *, drafts_itself: bool = False) -> dict[Role, int]:
    """KV memory of each role in tokens, on the cards of a system.

    Args:
        drafts_itself: the target's engine holds the draft model too, split like its own, with keys and values of its own.

    Raises:
        ConfigError: a role has no room for one sequence there, is served elsewhere, or the system's cards are not known.
    """
    gpus = estimate(on_system(spec, system), find_sources(spec))
    if full := [gpu for gpu in gpus if not gpu.fits]:
        raise ConfigError(f"{spec.name} does not fit {system}: {full[0].sum_in_words()}")
    found = kv_tokens_of(gpus)
    if elsewhere := [role for role in Role if role not in found]:
        raise ConfigError(f"{spec.name}: {elsewhere[0]} runs on another machine, and what it runs on is not known here")
    if drafts_itself and spec.speculative_dir is None:  # else it is counted already
        memory = {engine.role: engine for gpu in gpus for engine in gpu.engines}
        found[Role.TARGET] = _beside_a_draft(memory[Role.TARGET], memory[Role.DRAFT], spec)
    for role, tokens in found.items():
        if tokens < spec.engine(role).max_seq_len:
            raise ConfigError(
                f"{spec.name} does not fit {system}: {role} has memory for {tokens} tokens of KV, less than one sequence"
            )
    return found


def _beside_a_draft(target: EngineMemory, draft: EngineMemory, spec: GpuDeployment) -> int:
    """Tokens of KV that both models of an engine have room for."""
    share = spec.draft.tp_size / spec.target.tp_size
    a_token = target.kv_cache / target.kv_tokens + share * draft.kv_cache / draft.kv_tokens
    return max(0, int((target.kv_cache - share * draft.weights) / a_token))


def on_system(spec: GpuDeployment, system: str) -> GpuDeployment:
    """The deployment on cards with the memory of that system's.

    Raises:
        ConfigError: they are not known, or a role spans machines.
    """
    _require_one_machine(spec)
    if system not in CARD_MEMORY_GIB:
        raise ConfigError(f"how much memory a card of {system} has is not known; known: {', '.join(CARD_MEMORY_GIB)}")
    hardware = spec.hardware.model_copy(update={"gpu_memory_gib": CARD_MEMORY_GIB[system]})
    there = spec.model_copy(update={"hardware": hardware})
    there._path = spec.path
    return there


def _require_one_machine(spec: GpuDeployment) -> None:
    for role in Role:
        if (nodes := spec.engine(role).num_nodes) > 1:
            raise ConfigError(f"{spec.name}: {role}.num_nodes={nodes}: the kernel tables are of one machine, so no pace is known")


def _require_kv_dtype(spec: GpuDeployment, role: Role, profile: Profile) -> None:
    """Attention reads as many bytes as its keys and values have: times and memory must agree on them."""
    ours = spec.engine(role).kv_dtype
    if DTYPE_BYTES[ours] != DTYPE_BYTES[profile.kv_dtype]:
        raise ConfigError(
            f"{spec.name}: {role}.kv_cache_dtype: the hardware profile of {profile.key} has attention over {profile.kv_dtype}, "
            f"and no pace is known over {ours}"
        )


def _rules(engine: TrtllmEngineSpec | LlmapiEngineSpec) -> UpstreamRules:
    """Those of release 1.2.1, with the engine's own settings."""
    assert isinstance(engine, TrtllmEngineSpec), engine
    return UpstreamRules(
        reserves_kv_in_full=engine.batch_scheduler_policy == "guaranteed_no_evict",
        cancellation_check_period_ms=engine.cancellation_check_period_ms,
    )


def _shared_cards(spec: GpuDeployment, role: Role) -> dict[str, tuple[int, ...]]:
    """The cards of every role, if this one shares any of its own."""
    own = set(spec.engine(role).gpu_device_ids)
    others = [set(spec.engine(other).gpu_device_ids) for other in Role if other is not role]
    if not any(own & cards for cards in others):
        return {}
    return {other.value: spec.engine(other).gpu_device_ids for other in Role}
