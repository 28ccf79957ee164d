"""The same deployment placed otherwise: its target over more or fewer cards, draft and judge beside it or apart."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.memory import estimate
from lr_backend.build.pace import on_system
from lr_backend.build.shapes import find_sources
from lr_backend.engine import Role
from lr_backend.errors import ConfigError

JUDGE_KV_TOKENS = 65_536
"""Where it shares a card: verdicts are short."""
KV_STEP = 1024
PEAKS = 0.9
"""Of what is left of a shared card, so much goes to the KV caches; the rest is for peaks."""


class Where(StrEnum):
    """Where draft and judge run."""

    NOWHERE = "target alone"
    OWN_CARDS = "draft and judge on cards of their own"
    TARGETS_CARDS = "draft and judge on the target's cards"


def where(spec: GpuDeployment) -> Where:
    """Whether draft or judge share a card with the target."""
    own = set(spec.target.gpu_device_ids)
    beside = any(own & set(spec.engine(role).gpu_device_ids) for role in (Role.DRAFT, Role.JUDGE))
    return Where.TARGETS_CARDS if beside else Where.OWN_CARDS


def placed(spec: GpuDeployment, system: str, tp_size: int, where: Where, num_cards: int) -> GpuDeployment:
    """The deployment with its target over ``tp_size`` of so many cards; KV budgets follow from what the cards have.

    Args:
        where: with ``NOWHERE`` two more cards are there for draft and judge, which nobody calls or counts. Roles that share no
            card have a share of what is free on theirs.

    Raises:
        ConfigError: the cards are too few, or their memory is.
    """
    spare = num_cards - tp_size
    if tp_size > num_cards or (where is Where.OWN_CARDS and not spare):
        raise ConfigError(f"{num_cards} cards are too few for a target over {tp_size} and {where}")
    first, second = {
        Where.NOWHERE: (tp_size, tp_size + 1),
        Where.OWN_CARDS: (tp_size, min(tp_size + 1, num_cards - 1)),
        Where.TARGETS_CARDS: (0, min(1, tp_size - 1)),
    }[where]
    own = {"max_tokens_in_paged_kv_cache": None, "kv_cache_free_gpu_mem_fraction": PEAKS}
    roles: dict[Role, dict[str, Any]] = {
        Role.TARGET: {"tp_size": tp_size, "gpu_device_ids": tuple(range(tp_size)), **own},
        Role.DRAFT: {"tp_size": 1, "gpu_device_ids": (first,), **own},
        Role.JUDGE: {"tp_size": 1, "gpu_device_ids": (second,), **own},
    }
    hardware = spec.hardware.model_copy(update={"num_gpus": max(num_cards, second + 1)})
    moved = _with(spec.model_copy(update={"hardware": hardware}), roles)
    return with_budgets(on_system(moved, system))


def resized(spec: GpuDeployment, max_batch_size: int, max_num_tokens: int, max_seq_len: int | None = None) -> GpuDeployment:
    """The deployment with target and draft built for so many sequences and tokens in an iteration.

    Args:
        max_seq_len: tokens of a sequence; None: as they are.
    """
    sizes = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens}
    if max_seq_len is not None:
        sizes["max_seq_len"] = max_seq_len
    return _with(spec, {Role.TARGET: sizes, Role.DRAFT: sizes, Role.JUDGE: {"max_batch_size": max_batch_size}})


def with_budgets(spec: GpuDeployment) -> GpuDeployment:
    """Roles that share a card get budgets in tokens: target and draft, which hold the same texts, as much as fits of both.

    Raises:
        ConfigError: not even one sequence of each fits.
    """
    shares = {role: any(len(spec.roles_on(gpu)) > 1 for gpu in spec.engine(role).gpu_device_ids) for role in Role}
    if not any(shares.values()):
        return spec
    sources = find_sources(spec)

    def budgets(tokens: int) -> GpuDeployment:
        given = {Role.TARGET: tokens, Role.DRAFT: tokens, Role.JUDGE: min(tokens, JUDGE_KV_TOKENS)}
        none = {"kv_cache_free_gpu_mem_fraction": None}
        return _with(spec, {role: {**none, "max_tokens_in_paged_kv_cache": given[role]} for role in Role if shares[role]})

    def fits(tokens: int) -> bool:
        return all(gpu.fits for gpu in estimate(budgets(tokens), sources))

    least = max(spec.engine(role).max_seq_len for role in Role)
    if not fits(least):
        full = next(gpu for gpu in estimate(budgets(least), sources) if not gpu.fits)
        raise ConfigError(f"it does not fit: {full.sum_in_words()}")
    low, high = least // KV_STEP, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * KV_STEP) else (low, middle)
    return budgets(max(least, int(PEAKS * low * KV_STEP)))


def _with(spec: GpuDeployment, changes: dict[Role, dict[str, Any]]) -> GpuDeployment:
    engines = {role.value: spec.engine(role).model_copy(update=update) for role, update in changes.items()}
    changed = spec.model_copy(update=engines)
    changed._path = spec.path
    return changed
