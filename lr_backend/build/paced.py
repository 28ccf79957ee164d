"""A deployment on the embedded engine at the pace of one on GPUs: that one's spec of engines and loop, over our own models."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lr_backend.build.base import Layout
from lr_backend.build.embedded_spec import EmbeddedDeployment
from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import stood_for
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, first_error

OF_UNCOUPLED_ENGINES = ("draft_temperature",)
"""Settings of ``[lookahead]`` that say what is best where target and draft have no noise in common."""
OF_THE_LIMITS = ("max_depth", "max_width", "max_in_flight_requests")


def paced(
    spec: EmbeddedDeployment,
    system: str,
    like: str | None = None,
    *,
    drafts_itself: bool = False,
    shares_noise: bool = False,
    slow_motion: float = 1.0,
) -> EmbeddedDeployment:
    """The same models, served as the deployment ``like`` would be served on ``system``.

    From that one come the pace of each role, the sizes of its iterations, the limits of the loop, how drafted steps are drawn,
    and the defaults of a request; the models, the length of their texts and the KV memory stay.

    Args:
        like: name of a deployment on GPUs; None: the one that ``spec`` stands for anyway.
        drafts_itself: the target drafts by itself, as an engine of the LLM API does.
        shares_noise: engines take that time and draw as ours do, with noise that target and draft have in common.
        slow_motion: everything takes so many times as long.

    Raises:
        ConfigError: there is no such deployment, or no profile of it on that system.
    """
    like = like or spec.paced_as
    other = stood_for(like)
    if drafts_itself and not spec.target.holds_draft_model:
        raise ConfigError(f"{spec.name}: its target holds no draft model to draft with by itself")
    roles = {role.value: _role(spec, other, role, system, drafts_itself) for role in Role}
    lookahead = _lookahead(spec, other, slow_motion, shares_noise=shares_noise)
    server = spec.server.model_copy(update={"layout": Layout.PROCESS_A_ROLE, "thread_pool_size": other.server.thread_pool_size})
    changed: dict[str, Any] = {"paced_as": like, "lookahead": lookahead, "server": server, **roles}
    changed |= {"name": f"{spec.name}.{system}", "slow_motion": slow_motion, "shares_noise": shares_noise}
    try:
        fresh = EmbeddedDeployment.model_validate({**dict(spec), **{name: _plain(value) for name, value in changed.items()}})
    except ValidationError as error:
        raise ConfigError(f"{spec.name} cannot stand for {like}: {first_error(error)}") from error
    fresh._path = spec.path
    for role in Role:
        fresh.engine_pace(role)
    return fresh


def _role(spec: EmbeddedDeployment, other: GpuDeployment, role: Role, system: str, drafts_itself: bool) -> dict[str, Any]:
    own, engine = spec.engine(role), other.engine(role)
    return {
        **own.model_dump(),
        "pace": system,
        "max_batch_size": engine.max_batch_size,
        "max_num_tokens": engine.max_num_tokens,
        "max_draft_len": engine.num_drafts,
        "holds_draft_model": own.holds_draft_model and drafts_itself,
        "speculative_min_chance": 0.0,  # the LLM API drafts as many tokens as it is told to, whatever their chances
    }


def _lookahead(spec: EmbeddedDeployment, other: GpuDeployment, slow_motion: float, *, shares_noise: bool) -> dict[str, Any]:
    own, theirs = spec.lookahead, other.lookahead
    taken = () if shares_noise else OF_UNCOUPLED_ENGINES
    limits = {name: value for name, value in theirs.get("limits", {}).items() if name in OF_THE_LIMITS}
    return {
        **{name: value for name, value in own.items() if name not in taken},
        **{name: theirs[name] for name in taken if name in theirs},
        "limits": {**own.get("limits", {}), **limits},
        "timeouts": spec.loop_config().timeouts.in_slow_motion(slow_motion),
        "defaults": theirs.get("defaults", {}),
    }


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
