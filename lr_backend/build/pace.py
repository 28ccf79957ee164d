"""The pace of a deployment on GPUs: which profile each of its roles has, and who shares cards with whom."""

from __future__ import annotations

from dataclasses import replace

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.machine import Machine
from lr_backend.hardware.pace import EnginePace, Runtime
from lr_backend.hardware.profile import ProfileKey, find
from lr_backend.hardware.sharing import CardSharing


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


def pace_of(name: str, role: Role, system: str, *, drafts_itself: bool = False) -> EnginePace:
    """The pace of one role of the deployment ``name`` on a system.

    Args:
        drafts_itself: as an engine of the LLM API does, with the deployment's draft model over the same cards.

    Raises:
        ConfigError: there is no such deployment, or no profile.
    """
    spec = stood_for(name)
    engine = spec.engine(role)
    key = profile_key(spec, role, system)
    draft = profile_key(spec, Role.DRAFT, system, engine.tp_size) if drafts_itself else None
    for wanted in (key, draft):
        if wanted is not None:
            find(wanted)
    compiled = engine.runtime == "tensorrtllm" and not drafts_itself
    return EnginePace(
        profile=key,
        runtime=Runtime.COMPILED if compiled else Runtime.LLMAPI,
        poll_ms=getattr(engine, "recv_poll_period_ms", 0.0),
        one_hot=compiled and role is Role.TARGET and spec.loop_config().draft_logits == "one_hot",
        draft=draft,
        role=role.value,
        cards=_shared_cards(spec, role),
    )


def machine_of(
    name: str, system: str, *, drafts_itself: bool = False, card_sharing: CardSharing = CardSharing.MPS
) -> tuple[GpuDeployment, Machine]:
    """The deployment ``name``, and the machine that it is on a system.

    Args:
        drafts_itself: its target does, as an engine of the LLM API.

    Raises:
        ConfigError: there is no such deployment, or no profile.
    """
    spec = stood_for(name)
    paces = {role: pace_of(name, role, system, drafts_itself=drafts_itself and role is Role.TARGET) for role in Role}
    paces = {role: replace(pace, sharing=card_sharing) for role, pace in paces.items()}
    return spec, Machine.paced(paces, {role: spec.engine(role) for role in Role})


def _shared_cards(spec: GpuDeployment, role: Role) -> dict[str, tuple[int, ...]]:
    """The cards of every role, if this one shares any of its own."""
    own = set(spec.engine(role).gpu_device_ids)
    others = [set(spec.engine(other).gpu_device_ids) for other in Role if other is not role]
    if not any(own & cards for cards in others):
        return {}
    return {other.value: spec.engine(other).gpu_device_ids for other in Role}
