"""How TensorRT-LLM 1.2.1 words its refusals: every one comes back as INTERNAL, and only its text says what it is.

Texts and places are of upstream's ``llmRequest.h`` (validate), ``executorImpl.cpp`` (fetchNewRequests, enqueueRequests,
forwardSync) and the backend's ``model_instance_state.cc``. A file, a line and a stack trace may stand around them: look for
them, never compare.
"""

from __future__ import annotations

from lr_backend.errors import EngineError, EngineRejected

_OF_ONE_REQUEST = "Executor failed process requestId {number} due to the following error: "
_FETCHING = "Encountered an error when fetching new request: "
_PROMPT = (
    "Prompt length ({length}) exceeds maximum input length ({most}). "
    "Set log level to info and check TRTGptModel logs for how maximum input length is set"
)
_DRAFTS = "Draft tokens length ({length}) exceeds maximum draft tokens length ({most})."
_QUEUE = "Maximum queue size of {most} has been reached, please try again later"
REFUSALS = ("Prompt length (", "Draft tokens length (", "mMaxNewTokens > 0", "is not present in the request")
BUSY = ("Maximum queue size of", "Exceeds maximum queue size")
_ITERATION = ("error in forwardSync function", "error in forwardAsync function")
"""One iteration failed, and with it what was in flight; the executor goes on with what comes next."""
_BROKEN = ("shutting down", "CUDA", "NCCL")
"""Words of errors after which an engine mostly serves no other request either."""


class UpstreamFailure(EngineError):
    """A failure in upstream's words; Triton calls it INTERNAL."""

    def public(self) -> str:
        return self.message


def prompt_too_long(number: int, length: int, most: int) -> UpstreamFailure:
    """``number``: the executor's own of the request."""
    return UpstreamFailure(_OF_ONE_REQUEST.format(number=number) + _FETCHING + _PROMPT.format(length=length, most=most))


def too_many_drafts(number: int, length: int, most: int) -> UpstreamFailure:
    return UpstreamFailure(_OF_ONE_REQUEST.format(number=number) + _FETCHING + _DRAFTS.format(length=length, most=most))


def queue_full(number: int, most: int) -> UpstreamFailure:
    """As an orchestrator says it."""
    return UpstreamFailure(_OF_ONE_REQUEST.format(number=number) + _QUEUE.format(most=most))


def kind_of(text: str) -> type[EngineError] | None:
    """What an INTERNAL error's text says: the request is at fault, the queue is full, an iteration failed; None: it may be the
    engine."""
    if any(words in text for words in REFUSALS):
        return EngineRejected
    passes = is_full(text) or (any(words in text for words in _ITERATION) and not is_broken(text))
    return EngineError if passes else None


def is_broken(text: str) -> bool:
    """The engine is out of order, by an error's text."""
    return any(words in text for words in _BROKEN)


def is_full(text: str) -> bool:
    """The engine's queue, by an error's text."""
    return any(words in text for words in BUSY)
