"""How many calls an iteration of a compiled engine admits, and how many requests that makes. Pure arithmetic.

Release 1.2.1 charges every call that joins its whole prefix against ``max_num_tokens``, cached or not, and reserves KV blocks for
prefix and output in full (:class:`~lr_backend.hardware.rules.UpstreamRules`). Every step of a branch is such a call, and so is
every verification. What is counted is one iteration that does nothing else; each decode beside it takes a token. Who is not
admitted waits for the next one, and in an iteration that is full upstream drops draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lr_backend.build.gpu_spec import GpuDeployment, TrtllmEngineSpec
from lr_backend.build.memory import GpuMemory, kv_tokens_of
from lr_backend.config import Limits
from lr_backend.engine import Role
from lr_backend.errors import ConfigError

PREFIXES = (1_024, 4_096, 16_384)
USUAL_PREFIX = 4_096
"""Behind it all branches of one request shall join at once; a reasoning answer is about half written there."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Calls behind one prefix that one iteration of an engine admits.

    Attributes:
        prefix: tokens before what the call computes.
        tokens, blocks: what a call takes of ``max_num_tokens``, and of the KV cache.
        by_tokens, by_blocks, by_sequences: how many calls each limit admits.
        branches: calls that one request of width 1 may have in flight.
    """

    role: Role
    prefix: int
    tokens: int
    blocks: int
    by_tokens: int
    by_blocks: int
    by_sequences: int
    branches: int

    @property
    def calls(self) -> int:
        return min(self.by_tokens, self.by_blocks, self.by_sequences)

    @property
    def binds(self) -> str:
        """The limit that is reached first."""
        limits = {"tokens": self.by_tokens, "KV blocks": self.by_blocks, "sequences": self.by_sequences}
        return min(limits, key=lambda name: limits[name])

    @property
    def requests(self) -> float:
        """Requests whose branches all join at once."""
        return self.calls / self.branches


def branches_of(limits: Limits) -> int:
    """Calls that one request of width 1 may have in flight at an engine: ``max_depth``, and one more after a correction, until
    those that have lost have ended."""
    return limits.max_depth + 1


def iteration_sizes(num_branches: int, num_drafts: int, longest: int) -> tuple[int, ...]:
    """Values of ``max_num_tokens`` worth a trial, small ones first: each lets a branch more join at once behind
    :data:`USUAL_PREFIX` tokens, and all admit a call behind ``longest``."""
    usual = min(USUAL_PREFIX, longest)
    sizes = {max(longest + num_drafts, num * (usual + num_drafts)) for num in range(1, num_branches + 1)}
    return tuple(sorted(sizes))


def branches_that_join(found: Iterable[Admission]) -> int:
    """Branches of one request that join at once behind :data:`USUAL_PREFIX` tokens, where fewest do: at target or draft."""
    rows = list(found)
    usual = {role: min(USUAL_PREFIX, max(one.prefix for one in rows if one.role is role)) for role in {one.role for one in rows}}
    return min((min(one.calls, one.branches) for one in rows if one.prefix == usual[one.role]), default=0)


def admissions(spec: GpuDeployment, memory: Iterable[GpuMemory]) -> tuple[Admission, ...]:
    """Target and draft behind each of :data:`PREFIXES` and behind the longest that the limits allow; compiled engines only."""
    limits = spec.loop_config().limits
    longest = limits.max_prompt_tokens + limits.max_tokens
    prefixes = (*(prefix for prefix in PREFIXES if prefix < longest), longest)
    kv_tokens = kv_tokens_of(memory)
    compiled = {role: one for role in (Role.TARGET, Role.DRAFT) if isinstance(one := spec.engine(role), TrtllmEngineSpec)}
    return tuple(
        admission(role, engine, prefix, kv_tokens[role], limits)
        for role, engine in compiled.items()
        if role in kv_tokens
        for prefix in prefixes
    )


def admission(role: Role, engine: TrtllmEngineSpec, prefix: int, kv_tokens: int, limits: Limits) -> Admission:
    """One engine behind one prefix, with so many tokens of KV memory."""
    drafts, size = engine.num_drafts, engine.tokens_per_block
    reserves = engine.batch_scheduler_policy == "guaranteed_no_evict"
    written = max(limits.max_step_tokens, drafts + 1) if reserves else drafts + 1
    blocks = -(-(prefix + written) // size)
    tokens = prefix + drafts
    return Admission(
        role=role,
        prefix=prefix,
        tokens=tokens,
        blocks=blocks,
        by_tokens=engine.max_num_tokens // tokens,
        by_blocks=kv_tokens // size // blocks,
        by_sequences=engine.max_batch_size,
        branches=branches_of(limits),
    )


def require_admission(spec: GpuDeployment, found: Iterable[Admission]) -> None:
    """Refuse what cannot look ahead.

    Raises:
        ConfigError: an iteration does not admit one call behind the longest prefix; the sum is shown.
    """
    for one in found:
        if one.calls:
            continue
        limits = spec.loop_config().limits
        taken = f"takes {one.tokens} of max_num_tokens = {spec.engine(one.role).max_num_tokens}"
        if one.by_tokens:
            taken = f"reserves {one.blocks} KV blocks, more than there are"
        raise ConfigError(
            f"{spec.name}: {one.role}: a call behind {one.prefix} tokens {taken}. TensorRT-LLM 1.2.1 charges the whole prefix,"
            f" cached or not: raise that, or lower limits.max_prompt_tokens = {limits.max_prompt_tokens} and limits.max_tokens ="
            f" {limits.max_tokens}"
        )


def shortfalls(spec: GpuDeployment, found: Iterable[Admission]) -> tuple[str, ...]:
    """Where the branches of one request cannot join at once behind :data:`USUAL_PREFIX` tokens, in words with the sum."""
    told = []
    for one in found:
        longest = spec.loop_config().limits
        if one.prefix != min(USUAL_PREFIX, longest.max_prompt_tokens + longest.max_tokens) or one.requests >= 1:
            continue
        limit = {
            "tokens": f"{one.branches * one.tokens} tokens, max_num_tokens is {spec.engine(one.role).max_num_tokens}",
            "KV blocks": f"{one.branches * one.blocks} KV blocks, the cache has as many as {one.by_blocks} such calls reserve",
            "sequences": f"{one.branches} sequences, max_batch_size is {one.by_sequences}",
        }[one.binds]
        told.append(
            f"{one.role}: behind {one.prefix} tokens an iteration admits {one.calls} calls, and a request has {one.branches}"
            f" branches (limits.max_depth, and one after a correction): {limit}. They take turns, and lookahead gains less"
        )
    return tuple(told)
