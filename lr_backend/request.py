"""The nouns of one request: what was asked, what came back.

Everything a client may send is a field of :class:`LookaheadRequest`, checked when it is made; past this module nothing is
optional and nothing is re-validated. Knows no tensors, no engine, no tokenizer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lr_backend.engine import Sampling
from lr_backend.engine.request import MAX_SEED
from lr_backend.errors import InvalidRequest


def draw_seed() -> int:
    """The seed of a request that names none. JavaScript's numbers hold it exactly, and those that follow it."""
    return secrets.randbits(52)


class Mode(StrEnum):
    """How an answer is speculated: not at all, by draft tokens, by drafted steps, or by both."""

    AUTO = "auto"
    """Steps and draft tokens, as far as measurements say that they pay."""
    AR = "ar"
    SD = "sd"
    LR = "lr"
    LR_SD = "lr_sd"
    LOSSLESS = "lossless"
    """Steps and draft tokens; a drafted step is accepted only if its tokens are the target's own."""

    @property
    def speculates_steps(self) -> bool:
        return self in (Mode.AUTO, Mode.LR, Mode.LR_SD, Mode.LOSSLESS)

    @property
    def speculates_tokens(self) -> bool:
        return self in (Mode.AUTO, Mode.SD, Mode.LR_SD, Mode.LOSSLESS)

    @property
    def chooses(self) -> bool:
        """Depth and draft tokens are chosen by measurement; ``max_depth`` and ``num_draft_tokens`` are upper bounds."""
        return self is Mode.AUTO


class VerifierName(StrEnum):
    """Who decides whether a drafted step means the same as the target's, of those that every server has."""

    EXACT = "exact"
    """Equal tokens, nothing else."""
    JUDGE = "judge"
    """The judge's word."""
    CASCADE = "cascade"
    """Cheap checks first, the judge for the rest."""


class ProposerName(StrEnum):
    """Where draft tokens come from, of what every server knows."""

    DRAFT_MODEL = "draft_model"
    """The draft model, after the target's own prefix; beside a drafted step that step, until the target leaves it."""
    NGRAM = "ngram"
    """Prompt lookup."""
    ENGINE = "engine"
    """The target's engine itself, with a draft model of its own: no call and no wait for a verification."""


class FinishReason(StrEnum):
    """Why a generation ended. Every answer has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"


class Checked(BaseModel):
    """A part of a document that a client sent. Of its unknown names only the first is looked at: it is enough to refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: object) -> object:
        """The event loop waits while faults are collected, and a long document may have many."""
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        unknown = next((name for name in given if name not in known), None)
        return given if unknown is None else {name: given[name] for name in (*known, unknown) if name in given}


def read_json(text: str) -> Any:
    """What JSON text of a client says.

    Raises:
        ValueError: it is no JSON, has a number of thousands of digits, or half a surrogate pair, which is no text.
        RecursionError: it is nested too deeply to be read.
    """
    value = json.loads(text)
    if "\\u" in text:  # the one way to half a surrogate pair
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


MAX_NESTING = 64
"""Of a JSON object that a request holds: whatever walks through one has a bound."""


def is_nested_deeper(value: object, max_nesting: int) -> bool:
    """Whether JSON's lists and objects stand in each other more than so many deep."""
    level: list[Any] = [value]
    for _ in range(max_nesting + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    if is_nested_deeper(value, MAX_NESTING):
        raise ValueError(f"is nested more than {MAX_NESTING} deep")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]


class Function(Checked):
    """What a model may call. ``parameters``: a JSON schema."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(Checked):
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Checked):
    name: str = Field(min_length=1)
    arguments: JsonObject

    @field_validator("arguments", mode="before")
    @classmethod
    def _read(cls, arguments: object) -> object:
        """OpenAI's API has them as JSON text, chat templates as an object."""
        if not isinstance(arguments, str):
            return arguments
        try:
            return read_json(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError("is no JSON") from None


class ToolCall(Checked):
    """A call that the model has made."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


class Turn(Checked):
    """What a turn may have beside its words, at every port. Reasoning and calls are the assistant's; what a call came to is one
    of its own."""

    role: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, fail_fast=True)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_what_its_role_may(self) -> Self:
        for name, role in (("reasoning_content", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise ValueError(f"{name} goes with the role {role}")
        return self


class Message(Turn):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    """Taken, as OpenAI's API has it; the model does not see it."""

    @field_validator("content")
    @classmethod
    def _asks_something(cls, content: str, info: ValidationInfo) -> str:
        """A former answer may be empty: its first token was the last. An empty system turn counts as none."""
        if not content and info.data.get("role") == "user":
            raise ValueError("is empty")
        return content

    @property
    def counts(self) -> bool:
        """It is a turn, and no empty one of the system."""
        return bool(self.content) or self.role != "system"

    def as_turn(self) -> dict[str, Any]:
        """As a chat template takes it."""
        turn = self.model_dump(exclude={"name"}, exclude_none=True)
        return {name: value for name, value in turn.items() if value or name == "content"}


MOST_TOKENS = 1 << 20
"""That a request may ask for."""


FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""Fields that only a chat template reads."""


class LookaheadRequest(BaseModel):
    """One question and how to answer it. Exactly one of ``text_input`` and ``messages`` is given.

    This is the one place that says a field: its name, type, bounds, default and, in the text below it, its meaning. Tensors,
    client, command line and documentation are made from it (:mod:`lr_backend.fields`, ``python -m tools.request_fields``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    text_input: str | None = Field(default=None, min_length=1)
    """one user turn, rendered with the target's chat template"""
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, fail_fast=True)
    """a chat in place of `text_input`: a JSON list of `{role, content}`; a turn of the assistant may have `reasoning_content` and
    `tool_calls`, one of the role `tool` a `tool_call_id`"""
    tools: tuple[Tool, ...] | None = Field(default=None, min_length=1, fail_fast=True)
    """functions that the target may call, as its chat template shows them: a JSON list of `{type, function}`, a function with
    `name`, `description` and `parameters`"""
    chat_template_kwargs: dict[str, Any] | None = None
    """what else the chat template reads, as a JSON object: for Qwen3 `enable_thinking` may be false"""
    raw: bool = False
    """`text_input` is the prompt itself, rendered by no template; control tokens in it are text, unless the deployment has
    `raw_prompts`"""
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """tokens of the answer, reasoning included, at most; unset or beyond it, the server's limit"""
    thinking_token_budget: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """tokens after which the reasoning writes one last step; then the server closes it, and the answer follows; unset, the
    reasoning ends by itself"""
    temperature: float = Field(default=0.0, ge=0.0, le=5.0, allow_inf_nan=False)
    """0 is greedy"""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    """share of the probability to sample from"""
    top_k: int = Field(default=0, ge=0, le=1 << 20)
    """number of tokens to sample from; 0 is all; of more than 1024 TensorRT-LLM takes 1024"""
    seed: int = Field(default_factory=draw_seed, ge=0, le=MAX_SEED)
    """every draw derives from it; unset, the server draws one at random and tells it in `usage`"""
    stop: tuple[str, ...] = Field(default=(), max_length=16)
    """strings of 1 to 128 characters that end the answer; they are not part of it"""
    stream: bool = True
    """false: one response with the whole answer"""
    mode: Mode = Mode.AUTO
    """how the answer is speculated: `auto` by steps and draft tokens, as far as measurements say that they pay; `ar` not at all;
    `sd` by draft tokens; `lr` by steps; `lr_sd` by both; `lossless` by both, and a drafted step is accepted only if its tokens
    are the target's own: the text is what `ar` writes with the same seed, on GPUs up to rounding"""
    max_depth: int = Field(default=8, ge=0, le=16)
    """steps that are worked on at a time, with `auto` at most (1 gains nothing, 0: no steps); cut at the server's limit"""
    width: int = Field(default=1, ge=1, le=8)
    """candidate steps at each position; cut at the server's limit"""
    num_draft_tokens: int = Field(default=8, ge=0, le=64)
    """draft tokens in one verification, with `auto` at most; a step may begin with fewer; cut at the engine's limit"""
    proposer: str = Field(default=ProposerName.DRAFT_MODEL.value, min_length=1, max_length=64)
    """where draft tokens come from: `draft_model`; `ngram`, lookup of what last followed the same few tokens; `engine`, the
    target's engine itself; or a plug-in of the server's"""
    verifier: str = Field(default=VerifierName.JUDGE.value, min_length=1, max_length=64)
    """who decides whether a drafted step means the same as the target's: `exact` (equal tokens), `judge`, `cascade` (cheap
    checks, the judge for the rest), or a plug-in of the server's"""
    audit_rate: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """share of the accepted steps that the server's auditor judges again, off the critical path; steps of equal tokens, or of
    the same words, need no audit and are not among them"""
    risk_budget: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """a tripwire on wrongly accepted steps: while the server measures a larger share of them than this beyond doubt, the request
    accepts equal tokens only; it is no bound, and a share a little above it is noticed late or not at all; 0 is none"""
    deterministic: bool = False
    """the result does not depend on which engine answers first; `auto` then takes its upper bounds"""
    deadline_s: float = Field(default=0.0, ge=0.0, le=86400.0, allow_inf_nan=False)
    """seconds until the answer is cut with finish reason `deadline`; 0 is the server's limit"""
    trace: bool = False
    """send a record of every step, and in the end the trace of the request"""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _plain_values(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, value in (values or {}).items():  # the first fault is enough
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"{name[:64]} is no text, no number and no truth value")
        return values

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text_input is None) == (self.messages is None):
            raise InvalidRequest("text_input", self.text_input, "give exactly one of text_input and messages")
        if self.raw and self.messages is not None:
            raise InvalidRequest("raw", True, "goes with text_input; messages are always rendered by the chat template")
        for name in FOR_TEMPLATES:
            if self.raw and getattr(self, name):
                raise InvalidRequest(name, "", "does not go with raw: only a chat template reads it")
        if self.messages is not None and not any(message.counts for message in self.messages):
            raise InvalidRequest("messages", "", "there is nothing but empty system turns")
        for stop in self.stop:
            if not 1 <= len(stop) <= 128:
                raise InvalidRequest("stop", stop, "each stop string has 1 to 128 characters")
        return self

    @classmethod
    def parse(cls, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Check the fields that a client sent.

        Args:
            defaults: of fields that it did not send.

        Raises:
            InvalidRequest: names the first bad field, its value and the rule it breaks.
        """
        said = {**(defaults or {}), **fields}
        if said.get("raw"):
            said = {name: value for name, value in said.items() if name in fields or name not in FOR_TEMPLATES}
        try:
            return cls.model_validate(said, strict=False)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or "request"
            raise InvalidRequest(name, first.get("input"), first["msg"]) from error

    @property
    def effective_verifier(self) -> str:
        """Whose word accepts drafted steps: the named verifier's, or in the mode ``lossless`` that of equal tokens."""
        return VerifierName.EXACT if self.mode is Mode.LOSSLESS else self.verifier

    @property
    def is_watched(self) -> bool:
        """Somebody waits for single steps: for their text, for a stop string in it, or for what there is when time is up."""
        return self.stream or bool(self.stop) or self.deadline_s > 0.0

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The chat to render with the target's template."""
        if self.messages is not None:
            return [one.as_turn() for one in self.messages if one.counts]
        assert self.text_input is not None
        return [{"role": "user", "content": self.text_input}]


class Origin(StrEnum):
    """Who wrote a committed step."""

    DRAFT = "draft"
    """The draft wrote it and the verifier accepted it."""
    CORRECTION = "correction"
    """The target's own step where no drafted step was accepted."""
    TARGET = "target"
    """The target's step where none was drafted."""


class StepRecord(BaseModel):
    """What became of one position of the answer; sent with ``trace``.

    ``reason`` says why: ``exact``, ``judge`` ... for an accepted draft; for the target's step the reason for which no
    drafted step was taken (``judge``, ``marker``, ``capped``, ``timeout``, ``garbage``, ``late``, ``draft_error`` ...), or
    ``none`` where nothing was drafted. ``verifier`` decided on ``drafted_text`` (of a cascade: the stage that did), with
    ``score`` where it has one; None where nobody had to. Times are seconds since the request was admitted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    origin: Origin
    reason: str
    verifier: str | None = None
    score: float | None = None
    text: str
    num_tokens: int
    sibling: int | None = None
    drafted_text: str | None = None
    target_text: str | None = None
    drafted_started_s: float | None = None
    drafted_finished_s: float | None = None
    target_started_s: float | None = None
    target_finished_s: float | None = None
    committed_s: float = 0.0


class Usage(BaseModel):
    """Counts and rates of one finished request; sent with its last response.

    ``num_steps_accepted_by`` counts accepted steps by reason. ``num_steps_rejected`` counts drafted steps that were not taken,
    by reason; ``num_steps_late`` positions at the root where no draft was ready. ``step_acceptance_rate`` = accepted /
    (accepted + rejected + late) at the root, but for failures of the draft. ``token_acceptance_rate`` = accepted / verified
    draft tokens. ``mean_accepted_length`` = mean number of consecutive accepted steps before each correction.
    ``num_wasted_tokens`` were generated by target or draft and not committed; of calls for draft tokens, those that the target
    took over are not among them. ``num_reused_tokens`` of prompts came from the engines' KV cache, as far as they say; None
    where none does: over Triton one is asked where the request is traced, or the target drafts. ``num_audited`` accepted steps of
    this answer were audited when it ended, and ``num_false_accepts`` of them found wrong; ``num_audits_pending`` audits were
    still to come. ``false_accept_rate`` and its 95 % interval are the server's, for the request's verifier; None where it asked
    for no audits, or there were none yet. ``risk_budget_spent``: the budget was spent at some moment of this request, which
    then accepted equal tokens only. ``seed`` is the request's, or the one that the server drew for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    num_steps: int = 0
    num_steps_drafted: int = 0
    num_steps_accepted: int = 0
    num_steps_accepted_by: dict[str, int] = Field(default_factory=dict)
    num_steps_late: int = 0
    num_steps_rejected: dict[str, int] = Field(default_factory=dict)
    step_acceptance_rate: float | None = None
    mean_accepted_length: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_acceptance_rate: float | None = None
    num_target_calls: int = 0
    num_draft_calls: int = 0
    num_judge_calls: int = 0
    num_target_passes: int = 0
    num_wasted_tokens: int = 0
    num_reused_tokens: int | None = None
    num_audited: int = 0
    num_audits_pending: int = 0
    num_false_accepts: int = 0
    false_accept_rate: float | None = None
    false_accept_rate_low: float | None = None
    false_accept_rate_high: float | None = None
    risk_budget_spent: bool = False
    first_step_s: float | None = None
    latency_s: float = 0.0
    mode: Mode = Mode.AR
    seed: int = 0
    degraded: tuple[str, ...] = ()

    def as_json(self) -> str:
        return self.model_dump_json()


def rate(part: int, whole: int) -> float | None:
    """``part / whole``, or None where nothing was counted."""
    return part / whole if whole else None
