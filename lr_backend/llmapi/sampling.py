"""An engine request as upstream's ``SamplingParams``, and what of the contract the LLM API cannot do.

What upstream was found to do (``sampling_params.py``, ``llmapi/llm.py``, ``executor/result.py``, ``_torch/pyexecutor/sampler.py``
as of 1.2 and of main in August 2026):

- **Draft tokens** cannot come with a request. ``generate_async`` and ``SamplingParams`` have no field for them (the early
  ``external_draft_tokens_config`` is gone); the ``draft_tokens`` of ``DisaggregatedParams`` belong to a context server's KV
  cache. ``UserProvidedDecodingConfig(drafter=...)`` takes one object per engine: its ``prepare_draft_tokens`` runs in the
  executor's process, sees upstream's own ``LlmRequest`` objects in their generation phase, and nothing that a caller could have
  laid beside one. So ``draft_input_ids`` is refused by name. :mod:`~lr_backend.llmapi.speculation` has what the engine drafts
  by itself.
- **Stop words** are token ids one by one (``stop_token_ids``) or strings that the tokenizer turns into ids of its own choice.
  Words of several ids have no public way in. So every word is matched on the stream, by
  :func:`lr_backend.engine.stopping.cut_at_end` as in the embedded engine; the engine gets the single ids as well, so that it
  stops by itself.
- **The end id** is emitted by the PyTorch flow. So upstream is told that there is none (``end_id`` -1, as ``ignore_eos`` would
  switch off stop ids as well) and gets it as a stop id, which ``min_tokens`` does not hold back. That is refused beside an end
  id; without one it means nothing.
- **Seeds**: 1.2's default sampler draws from one generator for all requests; a request's seed is passed on and counts only where
  ``sampler`` is ``TRTLLMSampler``. With ``coupled_noise`` it counts everywhere, as a logits processor draws.
- **Log-probabilities** are those of the k likeliest tokens. The drawn one is among them if k >= ``top_k``. The one-model EAGLE-3
  has none, and with ``coupled_noise`` upstream sees the drawn token alone. Where they cannot be had an answer comes without: the
  step loop is only surer with them, and must not lose its draft over them.
"""

from __future__ import annotations

from typing import Any

from lr_backend.engine.request import EngineRequest
from lr_backend.errors import EngineRejected
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.coupled_noise import CoupledNoise

NO_END_ID, PAD_ID = -1, 0
MAX_STOP_IDS = 32
"""Handed to the engine. It compares each with every token that it writes, one by one, on the thread that drives the GPU; more of
them are found on the stream here instead, at a token or two of waste a call."""
MAX_LOG_PROBS = 64
"""Beyond this many candidates a token the whole list would cross processes for one number of it."""


def check_request(request: EngineRequest, config: LlmApiConfig) -> int:
    """Check a request against the engine; the number of tokens that it may write.

    Raises:
        EngineRejected: the same request will always be refused; names the field.
    """
    if request.draft_ids or request.draft_logits is not None:
        raise EngineRejected("draft_input_ids: the LLM API takes no draft tokens with a request")
    if request.min_tokens and request.end_id is not None:
        raise EngineRejected("min_tokens: this engine cannot hold back end_id")
    _check_own_drafts(request, config)
    num_prompt = len(request.input_ids)
    if num_prompt >= config.max_seq_len:
        raise EngineRejected(f"input_ids: length {num_prompt} leaves no room for output in max_seq_len {config.max_seq_len}")
    if num_prompt > config.max_num_tokens and not config.enable_chunked_context:
        raise EngineRejected(
            f"input_ids: length {num_prompt} exceeds max_num_tokens {config.max_num_tokens}, and enable_chunked_context is off"
        )
    if min(request.input_ids) < 0:
        raise EngineRejected("input_ids: token ids must be at least 0")
    return min(request.max_new_tokens, config.max_seq_len - num_prompt)


def _check_own_drafts(request: EngineRequest, config: LlmApiConfig) -> None:
    """Fewer than the engine drafts may be asked for, or none: their number is the deployment's, and no token differs."""
    if request.num_draft_tokens > config.max_draft_len:
        found = f"drafts {config.max_draft_len} a pass" if config.drafts else "drafts nothing by itself"
        raise EngineRejected(f"num_draft_tokens: {request.num_draft_tokens} wanted, and this engine {found}")


def sampling_arguments(request: EngineRequest, config: LlmApiConfig, max_new_tokens: int) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``. Nothing is left to the checkpoint's ``generation_config.json``."""
    sampling = request.sampling
    chosen: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    if not sampling.greedy and config.coupled_noise:
        chosen["logits_processor"] = CoupledNoise(sampling, request.seed)
    elif not sampling.greedy:
        chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {
        **chosen,
        "end_id": NO_END_ID,
        "pad_id": PAD_ID,
        "max_tokens": max_new_tokens,
        "seed": request.seed,
        "stop_token_ids": engine_stop_ids(request) or None,
        "include_stop_str_in_output": True,
        "logprobs": num_log_probs(request, config) or None,
        "return_perf_metrics": request.return_perf_metrics,
        "detokenize": False,
        "add_special_tokens": False,
    }


def engine_stop_ids(request: EngineRequest) -> list[int]:
    """Single tokens at which the engine itself may stop without ever stopping too early; the stream finds the rest."""
    ids = {word[0] for word in request.stop_words.words if len(word) == 1}
    ids |= set() if request.end_id is None else {request.end_id}
    return sorted(ids) if len(ids) <= MAX_STOP_IDS else []


def num_log_probs(request: EngineRequest, config: LlmApiConfig) -> int:
    """Candidates to ask for, so that the drawn token is one of them; 0 where none are wanted, or no number suffices."""
    if not request.return_log_probs or config.speculative == "eagle3":
        return 0
    if request.sampling.greedy:
        return 1
    return 0 if config.coupled_noise or request.sampling.top_k > MAX_LOG_PROBS else request.sampling.top_k
