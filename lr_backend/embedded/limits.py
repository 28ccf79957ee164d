"""What a request must keep to on one engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from lr_backend.embedded.config import EngineConfig
from lr_backend.engine.request import EngineRequest
from lr_backend.engine.upstream_errors import prompt_too_long, too_many_drafts
from lr_backend.errors import EngineRejected


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How a request is run. Drafts and output that do not fit are shortened silently, as upstream does.

    Attributes:
        drafts: draft tokens to verify; the request ends with them.
    """

    drafts: tuple[int, ...]
    max_new_tokens: int


def plan_run(request: EngineRequest, config: EngineConfig, vocab_size: int) -> RunPlan:
    """Check a request against the engine.

    Raises:
        EngineRejected: the same request will always be refused; names the field.
    """
    num_prompt, num_drafts = len(request.input_ids), len(request.draft_ids)
    if num_drafts > config.max_draft_len:
        raise EngineRejected(f"draft_input_ids: length {num_drafts} exceeds max_draft_len {config.max_draft_len}")
    if not num_prompt:
        raise EngineRejected("input_ids: empty; at least one token")
    if num_prompt >= config.max_seq_len:
        raise EngineRejected(f"input_ids: length {num_prompt} leaves no room for output in max_seq_len {config.max_seq_len}")
    _check_engine_drafts(request, config)
    _check_ids("input_ids", request.input_ids, vocab_size)
    _check_ids("draft_input_ids", request.draft_ids, vocab_size)
    if request.end_id is not None:
        _check_ids("end_id", (request.end_id,), vocab_size)
    if request.draft_logits is not None and request.draft_logits.shape[1] != vocab_size:
        raise EngineRejected(f"draft_logits: width {request.draft_logits.shape[1]}, the vocabulary has {vocab_size}")
    room = config.max_seq_len - num_prompt
    drafts = request.draft_ids[: room - 1]
    longest = len(drafts) + 1 if num_drafts else min(request.max_new_tokens, room)
    if longest < 1:
        raise EngineRejected(f"request_output_len={request.max_new_tokens}: at least 1")
    capacity = config.num_blocks * config.tokens_per_block
    if num_prompt + longest > capacity:
        raise EngineRejected(f"input_ids: {num_prompt} tokens and {longest} of output exceed the KV cache of {capacity} tokens")
    return RunPlan(drafts, max_new_tokens=longest)


def refuse_as_upstream(request: EngineRequest, number: int, config: EngineConfig) -> None:
    """Refuse in upstream's words what its executor would refuse when it fetches it.

    Args:
        number: the executor's own of the request.

    Raises:
        UpstreamFailure: too long a prompt, or too many draft tokens.
    """
    if len(request.input_ids) >= config.max_seq_len:
        raise prompt_too_long(number, len(request.input_ids), config.max_seq_len - 1)
    if len(request.draft_ids) > config.max_draft_len:
        raise too_many_drafts(number, len(request.draft_ids), config.max_draft_len)


def _check_engine_drafts(request: EngineRequest, config: EngineConfig) -> None:
    if (wanted := request.num_draft_tokens) == 0:
        return
    if config.speculative_model_dir is None:
        raise EngineRejected(f"num_draft_tokens: {wanted} wanted, and this engine holds no draft model")
    if request.draft_ids:
        raise EngineRejected("num_draft_tokens: not beside draft_input_ids; either the engine drafts or the caller")
    if wanted > config.max_draft_len:
        raise EngineRejected(f"num_draft_tokens: {wanted} exceeds max_draft_len {config.max_draft_len}")


def _check_ids(name: str, ids: Items[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise EngineRejected(f"{name}: token ids must be from 0 to {vocab_size - 1}")
