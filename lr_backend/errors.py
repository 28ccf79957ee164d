"""Typed failures, ordered by what the caller can do about them.

    LookaheadError
    ├── InvalidRequest        mend the named field and send again
    │   └── PromptTooLong     shorten the prompt
    ├── Overloaded            send again later; nothing was started
    ├── Cancelled             the caller asked for this
    ├── TargetUnavailable     the target engine is down; retry later or elsewhere
    ├── EngineError           one engine call failed
    │   ├── EngineRejected    the engine refused the call; the same call will fail again
    │   ├── NotFinite         the model computed no numbers for this request; others are served
    │   ├── EngineUnavailable the engine cannot be reached or died
    │   └── EngineTimeout     no answer within the role's time limit
    ├── BuildError        a command that compiles an engine failed; its log says why
    ├── TraceError            a file is no trace that can be read, or traces hold too little
    └── ConfigError           a deployment, checkpoint or setting is wrong; the server does not start
        └── CheckpointError   a checkpoint directory is missing parts, corrupt or unsupported

Each class has a stable ``code``, which leads the message that leaves the server and on which clients match, and the ``status``
of Triton's protocol that says whose turn it is.
This module imports nothing of the project.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any, Protocol


class LookaheadError(Exception):
    """Base of every failure that this project raises on purpose."""

    code = "LR_INTERNAL"
    status = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def public(self) -> str:
        """The text that may leave the server: stable code first, no internals."""
        return f"{self.code}: {self.message}"


class InvalidRequest(LookaheadError):
    """A request field breaks a rule.

    Attributes:
        field: name of the input as the client sent it.
        rule: what a valid value looks like.
    """

    code = "LR_INVALID_REQUEST"
    status = "INVALID_ARG"

    def __init__(self, field: str, value: object, rule: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}={shown}: {rule}")
        self.field = field
        self.rule = rule


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens than the deployment takes. ``limit`` says what is counted."""

    code = "LR_PROMPT_TOO_LONG"

    def __init__(self, field: str, found: str, limit: str) -> None:
        # Words that clients of OpenAI's API look for, to shorten the conversation by themselves.
        super().__init__(field, found, f"This model's maximum context length is {limit}")


class Overloaded(LookaheadError):
    """The admission limit or an engine queue is full."""

    code = "LR_OVERLOADED"
    status = "UNAVAILABLE"


class Cancelled(LookaheadError):
    """The client cancelled the request, or went away."""

    code = "LR_CANCELLED"
    status = "CANCELLED"


class TargetUnavailable(LookaheadError):
    """The target engine does not answer; without it there is no answer of the promised quality."""

    code = "LR_TARGET_UNAVAILABLE"
    status = "UNAVAILABLE"


class EngineError(LookaheadError):
    """One engine call failed."""

    code = "LR_ENGINE_ERROR"


class EngineRejected(EngineError):
    """The engine refused the call: too long, an unsupported tensor, more drafts than it was built for."""

    code = "LR_ENGINE_REJECTED"
    status = "INVALID_ARG"


class NotFinite(EngineError):
    """The model computed NaN or infinity for this request. It fails alone: whoever shares its iterations is served."""

    code = "LR_NOT_FINITE"

    def __init__(self, message: str = "the model computed logits that are not finite for this request") -> None:
        super().__init__(message)


class EngineUnavailable(EngineError):
    """The engine is not loaded, not reachable, or died with the call in flight."""

    code = "LR_ENGINE_UNAVAILABLE"
    status = "UNAVAILABLE"


class EngineTimeout(EngineError):
    """The engine did not answer within the limit of its role."""

    code = "LR_ENGINE_TIMEOUT"
    status = "UNAVAILABLE"


class TraceError(LookaheadError):
    """A document is no trace, or one of a version that is not known here; or traces hold too little for what is asked."""

    code = "LR_TRACE"


class BuildError(LookaheadError):
    """A command that compiles an engine failed, or did not write what it should have."""

    code = "LR_BUILD"


class ConfigError(LookaheadError):
    """A deployment file or setting is wrong."""

    code = "LR_CONFIG"


class CheckpointError(ConfigError):
    """A checkpoint directory cannot be served."""

    code = "LR_CHECKPOINT"


class _Validation(Protocol):
    def errors(self, *, include_url: bool) -> Any: ...


def first_error(error: _Validation, leave_out: Container[object] = ()) -> str:
    """The first thing that pydantic found wrong, in one line with its place.

    Args:
        leave_out: parts of a place that say nothing, as the name of the class that was tried.
    """
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part not in leave_out)
    return f"{where + ': ' if where else ''}{str(first['msg']).removeprefix('Value error, ')}"


ENDS = (asyncio.CancelledError, KeyboardInterrupt)
"""What ends a task or the program, and is nobody's to keep."""


def contained(error: BaseException) -> Exception:
    """The error in a form with which a task may end while its event loop goes on.

    A library in Rust panics with what is no ``Exception``, and a plug-in may exit. That would pass every handler, and nobody
    would be answered.
    """
    if isinstance(error, Exception):
        return error
    found = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    found.__cause__ = error
    return found


def heed_cancel(error: BaseException | None = None) -> None:
    """End the task that runs if it is to end, or the program where it is interrupted. What a plug-in makes of that does not
    tell: it may swallow it, turn it into another ``error``, or pass on the end of another task that it waited for."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError from error
    if isinstance(error, KeyboardInterrupt):
        raise error


def require_in_time(limit: asyncio.Timeout) -> None:
    """What a plug-in returns after it was told to end counts for nothing.

    Raises:
        CancelledError: the task that runs is to end.
        TimeoutError: the plug-in's time was up.
    """
    heed_cancel()
    if limit.expired():
        raise TimeoutError
