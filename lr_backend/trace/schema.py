"""The trace of one request: what was asked, every step, every engine call, and the closing account.

One JSON document, ``schema`` and ``version`` first. A field that is removed or changes its meaning makes a new version; one that
is added does not, and has a default, so that this module reads every older document of its version. Call times are milliseconds
since the request was admitted; step records keep their seconds.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lr_backend.engine import Role
from lr_backend.errors import TraceError, first_error
from lr_backend.request import FinishReason, LookaheadRequest, StepRecord, Usage

VERSION = 2


class Purpose(StrEnum):
    """What an engine call is made for."""

    DRAFTED_STEP = "drafted_step"
    TARGET_STEP = "target_step"
    DRAFT_TOKENS = "draft_tokens"
    """Draft tokens of the draft model for a target step, or for the target alone."""
    VERDICT = "verdict"
    ALONE = "alone"
    """The target outside the step loop: the answer after the reasoning, and everything in a mode without steps."""


class CallOutcome(StrEnum):
    """What became of an engine call."""

    COMMITTED = "committed"
    """The target's tokens are in the answer."""
    ACCEPTED = "accepted"
    """Of a drafted step: it is in the answer. Of a verdict: it let a drafted step pass. Of draft tokens: the target took some."""
    VERIFIED = "verified"
    """The target's step by which a drafted step was accepted: it was needed, and its tokens are not in the answer."""
    REJECTED = "rejected"
    """Of a drafted step: it was compared and not taken. Of a verdict: it said no. Of draft tokens: the target took none."""
    WASTED = "wasted"
    """Completed, but the chain that it belongs to was dropped, a sibling won, or all its tokens stand behind a stop string."""
    CANCELLED = "cancelled"
    """Stopped before it completed: nothing could need it any more, or the request ended."""
    FAILED = "failed"
    """The engine failed or did not answer in time."""


class Call(BaseModel):
    """One engine call.

    Attributes:
        step: index of the step that it works on. Calls of dropped chains may name steps that other calls wrote in the end.
        depth: drafted steps between the committed text and that step when the work on it began; 0 is the root.
        sibling: which drafted candidate of the position it writes or judges.
        num_tokens: new tokens that came back; 0 for a call that was cancelled or failed.
        num_committed_tokens: how many of them are in the answer.
        num_draft_tokens: draft tokens offered, of which the target wrote ``num_accepted_tokens`` itself. Told of the call that
            verified them, and of the draft model's that wrote them.
        num_reused_tokens: prompt tokens that came from the engine's KV cache; None: the engine does not say, or the call
            was cancelled or failed.
        queue_ms: part of the time that the call waited inside the engine, where the engine says.
        engine_ms: part of the time that it was inside the engine; the rest it was on its way. 0: the engine does not say.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    purpose: Purpose
    outcome: CallOutcome
    step: int = Field(ge=0)
    depth: int = Field(default=0, ge=0)
    sibling: int = Field(default=0, ge=0)
    start_ms: float = Field(ge=0.0, allow_inf_nan=False)
    end_ms: float = Field(ge=0.0, allow_inf_nan=False)
    num_prompt_tokens: int = Field(default=0, ge=0)
    num_tokens: int = Field(default=0, ge=0)
    num_committed_tokens: int = Field(default=0, ge=0)
    num_draft_tokens: int = Field(default=0, ge=0)
    num_accepted_tokens: int = Field(default=0, ge=0)
    num_reused_tokens: int | None = Field(default=None, ge=0)
    queue_ms: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    engine_ms: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> Self:
        if self.end_ms < self.start_ms:
            raise ValueError(f"ends at {self.end_ms} ms, before its start at {self.start_ms} ms")
        return self

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms

    @property
    def way_ms(self) -> float:
        """Time outside the engine, on the way there and back, where the engine says how long it was inside."""
        return self.duration_ms - self.engine_ms

    @property
    def interval(self) -> tuple[float, float]:
        """Start and end, in milliseconds."""
        return self.start_ms, self.end_ms

    @property
    def begun_interval(self) -> tuple[float, float]:
        """The same without the time in the engine's queue."""
        return min(self.start_ms + self.queue_ms, self.end_ms), self.end_ms

    @property
    def completed(self) -> bool:
        """It came to an end of its own, and took some time."""
        begun_ms, end_ms = self.begun_interval
        return self.outcome not in (CallOutcome.CANCELLED, CallOutcome.FAILED) and end_ms > begun_ms

    @property
    def num_wasted_tokens(self) -> int:
        """As usage counts them: generated by target or draft, not in the answer, and not taken over by the target."""
        num_taken = self.num_accepted_tokens if self.purpose is Purpose.DRAFT_TOKENS else self.num_committed_tokens
        return 0 if self.role is Role.JUDGE else self.num_tokens - num_taken

    @property
    def useless(self) -> bool:
        """The answer would be the same without it: a dropped chain, a rejected draft, work that was cut short."""
        dropped = self.outcome in (CallOutcome.WASTED, CallOutcome.CANCELLED, CallOutcome.FAILED)
        return dropped or (self.purpose is not Purpose.VERDICT and self.outcome is CallOutcome.REJECTED)


class Trace(BaseModel):
    """One request from its admission to its end. ``calls`` are in the order in which they started.

    Attributes:
        pace: at whose pace the engines ran, where it was not this machine's own; it belongs beside every time.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    schema_name: Literal["lookahead-trace"] = Field(default="lookahead-trace", alias="schema")
    version: Literal[2] = 2
    request_id: str
    request: LookaheadRequest
    finish_reason: FinishReason
    steps: tuple[StepRecord, ...]
    calls: tuple[Call, ...]
    usage: Usage
    pace: str = ""

    @property
    def latency_ms(self) -> float:
        return 1e3 * self.usage.latency_s

    def as_json(self) -> str:
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a trace.

        Raises:
            TraceError: it is no trace, or one of a version that is not known here.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise TraceError(f"not a trace of version {VERSION}: {first_error(error)}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a trace file.

        Raises:
            TraceError: the file cannot be read, or holds no trace.
        """
        try:
            text = path.read_bytes()
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from error
        try:
            return cls.from_json(text)
        except TraceError as error:
            raise TraceError(f"{path}: {error.message}") from error
