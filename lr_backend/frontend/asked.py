"""What a request asks, checked: a document of OpenAI's API becomes questions and options for Triton. Pure.

Fields that both know are checked by :class:`~lr_backend.request.LookaheadRequest`, which says them; this module knows OpenAI's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from lr_client import Message, Options, Question
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lr_backend.engine.request import MAX_SEED
from lr_backend.errors import InvalidRequest
from lr_backend.fields import REQUEST_FIELDS
from lr_backend.frontend.errors import ApiError, place
from lr_backend.frontend.settings import Deployed
from lr_backend.frontend.tool_calls import ToolCalls
from lr_backend.request import CalledFunction, Checked, Function, LookaheadRequest, Tool, ToolCall, Turn, draw_seed

MAX_CHOICES = 8
"""Answers to one request: ``n`` for each of its prompts."""

SAME = ("max_tokens", "temperature", "top_p", "seed", "stop", "stream")
"""Fields that OpenAI's API has under the same names, and that stand outside the object ``lookahead``."""
PROMPT = ("text_input", "messages", "tools", "raw")
"""What a route says of the prompt."""
LOOKAHEAD = tuple(field.name for field in REQUEST_FIELDS if field.name not in (*SAME, *PROMPT))
"""Fields of the object ``lookahead``."""
BESIDE = ("top_k", "chat_template_kwargs", "thinking_token_budget")
"""Fields of that object that other servers of OpenAI's API take outside, where they are taken too."""

Unsupported = Mapping[str, tuple[Any, ...]]
"""Fields that OpenAI's API has and this server has not, with the values that ask for nothing; null is always one."""
_BOTH: Unsupported = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
NOT_IN_CHAT: Unsupported = {
    **_BOTH,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NOT_IN_COMPLETIONS: Unsupported = {
    **_BOTH,
    "chat_template_kwargs": ({},),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}
OF_OTHERS: Unsupported = {
    "ignore_eos": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
}
"""The same of other servers of that API: clients that were written for them send all of their fields."""

_LIMITS = {
    "max_tokens": "max_tokens",
    "max_depth": "max_depth",
    "width": "max_width",
    "num_draft_tokens": "max_draft_len",
    "deadline_s": "request_s",
}
"""Fields that Triton's port cuts at a limit of the deployment; here what does not fit is refused."""


def _no_token_ids(value: object) -> object:
    if isinstance(value, int | list):
        raise PydanticCustomError("token_ids", "token ids are not taken, send text")
    return value


_Text = Annotated[str, Field(min_length=1), BeforeValidator(_no_token_ids)]
_Null = Annotated[None, BeforeValidator(lambda value: None if value == [] else value)]
"""A field of an answer that is always empty there, so that an answer may be sent back as it came."""
_GATEWAYS = ("provider_specific_fields", "thinking_blocks")
"""What a gateway adds to an answer. It says no more than the answer's own fields."""


def _said(given: object) -> object:
    """Without the fields that are null: clients that send one form of turn for all send what it has not as null."""
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class _Sparse(Checked):
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        return _said(given)


class _Part(_Sparse):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None


_Content = Annotated[
    Annotated[str, Tag("_text")] | Annotated[Annotated[list[_Part], Field(min_length=1, fail_fast=True)], Tag("_parts")],
    Discriminator(lambda value: "_parts" if isinstance(value, list) else "_text"),
]


class _CalledFunction(CalledFunction, _Sparse):
    parsed_arguments: Any = Field(default=None, exclude=True)
    """What OpenAI's client made of them."""


class _ToolCall(ToolCall, _Sparse):
    function: _CalledFunction
    index: int | None = Field(default=None, exclude=True)
    """Clients that put streams together leave it in."""


class _Turn(Turn):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content
    tool_calls: list[_ToolCall] | None = Field(default=None, fail_fast=True)  # type: ignore[assignment]
    name: str | None = None
    type: Literal["text"] | None = None
    refusal: _Null = None
    annotations: _Null = None
    audio: _Null = None
    function_call: _Null = None

    @model_validator(mode="before")
    @classmethod
    def _may_come_back(cls, given: object) -> object:
        """An answer may have no content, as one that was cut while reasoning, and may be sent back as a gateway has made it."""
        given = _said(given)
        if not isinstance(given, dict):
            return given
        empty: dict[str, object] = {"tool_calls": [], "reasoning_content": ""}
        given = {name: value for name, value in given.items() if name not in empty or value != empty[name]}
        if given.get("role") != "assistant":
            return given
        said = {name: value for name, value in given.items() if name not in _GATEWAYS}
        if said.get("reasoning_content") in (None, said.get("reasoning")):  # its name at other servers
            said["reasoning_content"] = said.pop("reasoning", None)
        return said if said.get("content") is not None else {**said, "content": ""}

    @field_validator("content")
    @classmethod
    def _asks_something(cls, content: str | list[_Part], info: ValidationInfo) -> str | list[_Part]:
        if info.data.get("role") == "user" and not _text_of(content):
            raise ValueError("is empty")
        return content

    def message(self) -> Message:
        """As the server takes it."""
        said = self.model_dump(include=set(Turn.model_fields), exclude_none=True)
        role = "system" if self.role == "developer" else self.role
        return cast("Message", {**said, "role": role, "content": _text_of(self.content)})


def _text_of(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content if part.text)


class _Function(Function, _Sparse):
    strict: bool = Field(default=False, exclude=True)
    """Asked for by some clients always. Calls are the model's own words, whatever it says."""


class _Tool(Tool, _Sparse):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Sparse):
    include_usage: bool | None = False
    include_obfuscation: Literal[False] | None = False
    continuous_usage_stats: bool | None = False


class _Body(Checked):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    user: str = Field(default="", max_length=256)
    stream_options: _StreamOptions = _StreamOptions()
    lookahead: dict[str, Any] = Field(default_factory=dict)


class _ChatBody(_Body):
    messages: list[_Turn] = Field(min_length=1, fail_fast=True)
    tools: list[_Tool] = Field(default_factory=list, fail_fast=True)
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_key: str = Field(default="", max_length=256)
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: str = Field(default="", max_length=256)


class _CompletionBody(_Body):
    prompt: Annotated[
        Annotated[_Text, Tag("_one")]
        | Annotated[Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)], Tag("_many")],
        Discriminator(lambda value: "_many" if isinstance(value, list) else "_one"),
    ]


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to get. ``prompt``: the number of the prompt that it answers."""

    question: Question
    options: Options
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        jobs: a choice each, in order.
        chat: answered as a chat, with the reasoning apart; else as plain text.
        tokens_field: what the client called ``max_tokens``.
        outside: fields of ``lookahead`` that were given beside it.
        new_calls: makes what takes the calls of tools out of one answer; None: they are text.
    """

    jobs: tuple[Job, ...]
    chat: bool
    stream: bool
    include_usage: bool
    tokens_field: str = "max_tokens"
    outside: frozenset[str] = frozenset()
    new_calls: Callable[[], ToolCalls] | None = None

    def param_of(self, field: str) -> str:
        """A field of the server's by the name that it has in this request."""
        prompt = "messages" if self.chat else "prompt"
        first, dot, rest = field.partition(".")
        said = {name: name for name in self.outside}
        names = {**said, "text_input": prompt, "raw": prompt, "max_tokens": self.tokens_field}
        return names.get(first, _outside(first)) + dot + rest

    @classmethod
    def chat_of(cls, document: Mapping[str, Any], deployed: Deployed) -> Self:
        """Read the body of ``/v1/chat/completions``.

        Raises:
            ApiError: names the first field at fault.
        """
        body, shared = _read(_ChatBody, document, NOT_IN_CHAT, deployed)
        field = "max_tokens"
        if body.max_completion_tokens is not None:
            if shared.setdefault("max_tokens", body.max_completion_tokens) != body.max_completion_tokens:
                raise ApiError("invalid_value", "max_tokens and max_completion_tokens are one field and differ", "max_tokens")
            field = "max_completion_tokens"
        has_tools = bool(body.tools) and body.tool_choice == "auto"
        if has_tools:
            shared["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
        options = _options(body, shared, deployed, field)
        messages = [turn.message() for turn in body.messages]
        question = [message for message in messages if message["content"] or message["role"] != "system"]
        if not question:
            raise ApiError("invalid_value", "messages: nothing but empty system turns", "messages")
        jobs = tuple(Job(question, one) for one in _seeded(options, body.n))
        new_calls = partial(ToolCalls, None if body.parallel_tool_calls else 1) if has_tools else None
        return cls(jobs, True, bool(options.stream), bool(body.stream_options.include_usage), field, frozenset(shared), new_calls)

    @classmethod
    def completion_of(cls, document: Mapping[str, Any], deployed: Deployed) -> Self:
        """The same of ``/v1/completions``."""
        body, shared = _read(_CompletionBody, document, NOT_IN_COMPLETIONS, deployed)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if len(prompts) * body.n > MAX_CHOICES:
            raise ApiError("invalid_value", f"{len(prompts)} prompts of {body.n} answers: at most {MAX_CHOICES}", "prompt")
        options = replace(_options(body, shared, deployed), raw=True)
        jobs = tuple(Job(text, one, number) for number, text in enumerate(prompts) for one in _seeded(options, body.n))
        return cls(jobs, False, bool(options.stream), bool(body.stream_options.include_usage), outside=frozenset(shared))


BodyT = TypeVar("BodyT", bound=_Body)


def _read(
    kind: type[BodyT], document: Mapping[str, Any], unsupported: Unsupported, deployed: Deployed
) -> tuple[BodyT, dict[str, Any]]:
    """(fields of OpenAI's alone, fields that the server has too and that are checked with ``lookahead``)."""
    given = {name: value for name, value in document.items() if value is not None}
    for name, harmless in {**unsupported, **OF_OTHERS}.items():
        if name in given and not _is_one_of(given.pop(name), harmless):
            raise ApiError("unsupported_field", f"{name}: not supported by this server; leave it out", name)
    shared = {name: given.pop(name) for name in (*SAME, *BESIDE) if name in given}
    if shared.get("top_k") == -1:  # off, as others say it
        shared["top_k"] = 0
    for name in LOOKAHEAD:
        if name in given:
            raise ApiError("unknown_field", f"{name}: no such field here; it belongs in the object lookahead", name)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _refused(error) from None
    if body.model != deployed.name:
        raise ApiError("model_not_found", f"model: this server has {deployed.name}", "model")
    return body, shared


def _is_one_of(value: object, harmless: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless)  # False == 0


def _options(body: _Body, shared: Mapping[str, Any], deployed: Deployed, tokens_field: str = "max_tokens") -> Options:
    """The options that were given, by the server's own rules, and none beyond a limit of the deployment."""
    inside = {name: value for name, value in body.lookahead.items() if value is not None}
    for name in inside:
        if name not in LOOKAHEAD:
            known = f"has {', '.join(LOOKAHEAD)}" if name not in (*SAME, *PROMPT) else "has what the fields beside it do not say"
            raise ApiError("unknown_field", f"lookahead.{name[:80]}: no such field; lookahead {known}", f"lookahead.{name}")
    for name in BESIDE:
        if name in inside and shared.get(name, inside[name]) != inside[name]:
            raise ApiError("invalid_value", f"{name} and lookahead.{name} are one field and differ", name)
    sent = {"stream": False, **shared, **inside}
    if isinstance(sent.get("stop"), str):
        sent["stop"] = [sent["stop"]]
    names = {name: _outside(name) for name in LOOKAHEAD if name not in shared} | {"max_tokens": tokens_field}
    try:
        asked = LookaheadRequest.model_validate_json(json.dumps({"text_input": "?", **sent}))
    except ValidationError as error:
        raise _refused(error, names) from None
    except InvalidRequest as error:
        raise ApiError("invalid_value", f"{error.field}: {error.rule}", names.get(error.field, error.field)) from None
    for name, limit in _LIMITS.items():
        if name in sent and getattr(asked, name) > (most := getattr(deployed, limit)):
            raise ApiError("over_limit", f"{names[name]}: this server takes {most:g} at most", names[name])
    return Options(**asked.model_dump(mode="json", include=set(sent)))


def _seeded(options: Options, num_choices: int) -> Iterator[Options]:
    """The options of each choice: the first has the request's seed, the next the one after it."""
    first = draw_seed() if options.seed is None else options.seed
    for number in range(num_choices):
        yield replace(options, seed=(first + number) % (MAX_SEED + 1))


def _outside(field: str) -> str:
    """A field of the server's by its place in a document of OpenAI's."""
    return f"lookahead.{field}" if field in LOOKAHEAD else field


_CODES = {"extra_forbidden": "unknown_field", "missing": "missing_field", "none_required": "unsupported_field"}
_WORDS = {"unknown_field": "no such field", "unsupported_field": "not supported by this server; leave it out"}


def _refused(error: ValidationError, names: Mapping[str, str] | None = None) -> ApiError:
    """The first fault that pydantic found; without the value, which may be a prompt."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where, code = place(first["loc"]), _CODES.get(first["type"], "invalid_value")
    param = (names or {}).get(where, where)
    return ApiError(code, f"{param[:80]}: {_WORDS.get(code, first['msg'])}", param)
