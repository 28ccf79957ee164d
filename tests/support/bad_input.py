"""What a server must refuse, a row each with its one stable code: at the front end's door, and at the step loop's.

One table for every test that sends bad input: in process, over HTTP, and through a real Triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from lr_backend.engine.request import MAX_SEED
from lr_backend.fields import REQUEST_FIELDS, RequestField
from lr_backend.frontend.asked import LOOKAHEAD, MAX_CHOICES, NOT_IN_CHAT, SAME, _ChatBody, _CompletionBody
from lr_backend.frontend.body import MAX_DEPTH
from tests.support.frontend import CHAT, COMPLETIONS, JSON

Document = dict[str, Any]


@dataclass(frozen=True)
class DoorRow:
    """One HTTP request that is refused. ``param``: the field at fault, where there is one."""

    code: str
    param: str | None = None
    path: str = CHAT
    body: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)


@dataclass(frozen=True)
class LoopRow:
    """Inputs of the model ``lookahead`` that are refused, and the field that is named. Beside them stands a good ``text_input``,
    unless they say the prompt."""

    name: str
    inputs: Mapping[str, Any]
    code: str = "LR_INVALID_REQUEST"


def chat(**fields: Any) -> Document:
    return {"model": "demo", "messages": [{"role": "user", "content": "q"}], **fields}


def turn(**fields: Any) -> Document:
    return chat(messages=[{"role": "user", "content": "q", **fields}])


def called(function: Document) -> Document:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]
    return chat(messages=turns)


def with_tool(**function: Any) -> Document:
    return chat(tools=[{"type": "function", "function": function}])


def plain(**fields: Any) -> Document:
    return {"model": "demo", "prompt": "q", **fields}


def inside(**fields: Any) -> Document:
    return chat(lookahead=fields)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth > 1 else []


def without(name: str, document: Document) -> Document:
    return {key: value for key, value in document.items() if key != name}


UNKNOWN = (
    *("", "__proto__", "constructor", "$ref", "messages ", "Model", "\uff4dodel", "temperature ", "max-tokens", "maxTokens"),
    *("stop_sequences", "guided_json", "best_of", "echo", "suffix", "stop_token_ids", "x" * 60),
    *("priority", "add_generation_prompt", "chat_template", "raw", "trace", "request_id", "text_output"),
)
UNSUPPORTED: Document = {
    "audio": {"voice": "alloy"},
    "function_call": {"name": "f"},
    "moderation": True,
    "prediction": {"type": "content", "content": "q"},
    "service_tier": "flex",
    "verbosity": "low",
    "web_search_options": {},
    "repetition_penalty": 1.1,
    "min_p": 0.1,
    "min_tokens": 1,
    "ignore_eos": True,
}
KINDS = (
    *("", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "application/xml"),
    *("application/json; charset=utf-16", "multipart/form-data; boundary=x", "application/json, text/plain", "*/*"),
)


GOOD_BODY = json.dumps(chat()).encode()
_CHATS: list[tuple[Document, str, str | None]] = [
    (without("model", chat()), "missing_field", "model"),
    (chat(model=None), "missing_field", "model"),
    (chat(model=""), "invalid_value", "model"),
    (chat(model=7), "invalid_value", "model"),
    (chat(model="x" * 257), "invalid_value", "model"),
    (chat(model="gpt-5"), "model_not_found", "model"),
    (without("messages", chat()), "missing_field", "messages"),
    (chat(messages=[]), "invalid_value", "messages"),
    (chat(messages="q"), "invalid_value", "messages"),
    (chat(messages={}), "invalid_value", "messages"),
    (chat(messages=["q"]), "invalid_value", "messages[0]"),
    (chat(messages=[{"content": "q"}]), "missing_field", "messages[0].role"),
    (turn(role=None), "missing_field", "messages[0].role"),
    (chat(messages=[{"role": "user"}]), "missing_field", "messages[0].content"),
    (turn(content=None), "missing_field", "messages[0].content"),
    (turn(content=""), "invalid_value", "messages[0].content"),
    (turn(content=7), "invalid_value", "messages[0].content"),
    (turn(content={}), "invalid_value", "messages[0].content"),
    (turn(content=[]), "invalid_value", "messages[0].content"),
    (turn(content=["q"]), "invalid_value", "messages[0].content[0]"),
    (turn(content=[{"type": "text"}]), "missing_field", "messages[0].content[0].text"),
    (turn(content=[{"type": "text", "text": ""}]), "invalid_value", "messages[0].content"),
    (chat(messages=[{"role": "system", "content": ""}]), "invalid_value", "messages"),
    (chat(messages=[{"role": "developer", "content": [{"type": "text", "text": ""}]}]), "invalid_value", "messages"),
    (chat(messages=[{"role": "system"}]), "missing_field", "messages[0].content"),
    (turn(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "invalid_value", "messages[0].content[0].type"),
    (turn(content=[{"type": "text", "text": "q", "more": 1}]), "unknown_field", "messages[0].content[0].more"),
    (turn(name=7), "invalid_value", "messages[0].name"),
    (turn(tool_calls=[{}]), "missing_field", "messages[0].tool_calls[0].function"),
    (turn(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "invalid_value", "messages[0]"),
    (turn(tool_call_id="x"), "invalid_value", "messages[0]"),
    (turn(reasoning_content="x"), "invalid_value", "messages[0]"),
    *(
        (called(function), code, f"messages[1].tool_calls[0].function{where}")
        for function, code, where in (
            ({"name": "f"}, "missing_field", ".arguments"),
            ({"name": "", "arguments": "{}"}, "invalid_value", ".name"),
            ({"name": "f", "arguments": "{"}, "invalid_value", ".arguments"),
            ({"name": "f", "arguments": "[]"}, "invalid_value", ".arguments"),
            ({"name": "f", "arguments": '{"a": "\\ud800"}'}, "invalid_value", ".arguments"),
            ({"name": "f", "arguments": '{"a": ' * 90 + "1" + "}" * 90}, "invalid_value", ".arguments"),
            ({"name": "f", "arguments": "{}", "more": 1}, "unknown_field", ".more"),
        )
    ),
    (turn(provider_specific_fields={}), "unknown_field", "messages[0].provider_specific_fields"),
    (turn(role="assistant", reasoning="a", reasoning_content="b"), "unknown_field", "messages[0].reasoning"),
    (turn(colour="red"), "unknown_field", "messages[0].colour"),
    (chat(temprature=1), "unknown_field", "temprature"),
    (chat(max_depth=1), "unknown_field", "max_depth"),
    (chat(top_k=-2), "invalid_value", "top_k"),
    (chat(mode="lr"), "unknown_field", "mode"),
    (chat(prompt="q"), "unknown_field", "prompt"),
    (chat(text_input="q"), "unknown_field", "text_input"),
    (chat(temperature="1"), "invalid_value", "temperature"),
    (chat(temperature=True), "invalid_value", "temperature"),
    (chat(temperature=nested(MAX_DEPTH - 1)), "invalid_value", "temperature"),
    (chat(temperature=-0.1), "invalid_value", "temperature"),
    (chat(temperature=5.1), "invalid_value", "temperature"),
    (chat(top_p=0), "invalid_value", "top_p"),
    (chat(top_p=1.1), "invalid_value", "top_p"),
    (chat(max_tokens=0), "invalid_value", "max_tokens"),
    (chat(max_tokens=1.5), "invalid_value", "max_tokens"),
    (chat(max_tokens="9"), "invalid_value", "max_tokens"),
    (chat(max_tokens=101), "over_limit", "max_tokens"),
    (chat(max_tokens=2**40), "invalid_value", "max_tokens"),
    (chat(max_completion_tokens=101), "over_limit", "max_completion_tokens"),
    (chat(max_completion_tokens=-1), "invalid_value", "max_completion_tokens"),
    (chat(max_tokens=9, max_completion_tokens=10), "invalid_value", "max_tokens"),
    (chat(seed=-1), "invalid_value", "seed"),
    (chat(seed=MAX_SEED + 1), "invalid_value", "seed"),
    (chat(seed=1.5), "invalid_value", "seed"),
    (chat(stop=7), "invalid_value", "stop"),
    (chat(stop=""), "invalid_value", "stop"),
    (chat(stop=["x" * 129]), "invalid_value", "stop"),
    (chat(stop=["a", 7]), "invalid_value", "stop[1]"),
    (chat(stop=[str(number) for number in range(17)]), "invalid_value", "stop"),
    (chat(stream="yes"), "invalid_value", "stream"),
    (chat(stream=1), "invalid_value", "stream"),
    (chat(n=0), "invalid_value", "n"),
    (chat(n=MAX_CHOICES + 1), "invalid_value", "n"),
    (chat(n="2"), "invalid_value", "n"),
    (chat(n=True), "invalid_value", "n"),
    (chat(user=7), "invalid_value", "user"),
    (chat(user="x" * 257), "invalid_value", "user"),
    (chat(metadata=["a"]), "invalid_value", "metadata"),
    (chat(prompt_cache_key=7), "invalid_value", "prompt_cache_key"),
    (chat(safety_identifier="x" * 257), "invalid_value", "safety_identifier"),
    (chat(stream_options={"continuous_usage_stats": 1}), "invalid_value", "stream_options.continuous_usage_stats"),
    (chat(stream_options=[]), "invalid_value", "stream_options"),
    (chat(stream_options={"include_usage": 1}), "invalid_value", "stream_options.include_usage"),
    (chat(stream_options={"usage": True}), "unknown_field", "stream_options.usage"),
    (chat(stream_options={"include_obfuscation": True}), "invalid_value", "stream_options.include_obfuscation"),
    (chat(lookahead=[]), "invalid_value", "lookahead"),
    (inside(depth=2), "unknown_field", "lookahead.depth"),
    (inside(temperature=1), "unknown_field", "lookahead.temperature"),
    (inside(text_input="q"), "unknown_field", "lookahead.text_input"),
    (inside(mode="fast"), "invalid_value", "lookahead.mode"),
    (inside(mode=1), "invalid_value", "lookahead.mode"),
    (inside(max_depth=17), "invalid_value", "lookahead.max_depth"),
    (inside(max_depth=5), "over_limit", "lookahead.max_depth"),
    (inside(width=3), "over_limit", "lookahead.width"),
    (chat(thinking_token_budget=0), "invalid_value", "thinking_token_budget"),
    (chat(thinking_token_budget=9, lookahead={"thinking_token_budget": 8}), "invalid_value", "thinking_token_budget"),
    (inside(num_draft_tokens=9), "over_limit", "lookahead.num_draft_tokens"),
    (inside(deadline_s=61), "over_limit", "lookahead.deadline_s"),
    (inside(verifier=""), "invalid_value", "lookahead.verifier"),
    (inside(proposer="x" * 65), "invalid_value", "lookahead.proposer"),
    (inside(audit_rate=1.1), "invalid_value", "lookahead.audit_rate"),
    (inside(risk_budget="0.1"), "invalid_value", "lookahead.risk_budget"),
    (inside(trace="yes"), "invalid_value", "lookahead.trace"),
    (inside(deterministic=0), "invalid_value", "lookahead.deterministic"),
    (inside(top_k=-1), "invalid_value", "lookahead.top_k"),
    (chat(tools={}), "invalid_value", "tools"),
    (chat(tools=[{"type": "function"}]), "missing_field", "tools[0].function"),
    (chat(tools=[{"type": "web_search"}]), "invalid_value", "tools[0].type"),
    (chat(tools=[{"type": "function", "function": {}}]), "missing_field", "tools[0].function.name"),
    (chat(tools=[{"type": "function", "function": {"name": "x" * 65}}]), "invalid_value", "tools[0].function.name"),
    (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]),
        "invalid_value",
        "tools[0].function.parameters",
    ),
    (chat(tools=[{"type": "function", "function": {"name": "f", "more": 1}}]), "unknown_field", "tools[0].function.more"),
    (chat(tool_choice="required"), "invalid_value", "tool_choice"),
    (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "invalid_value", "tool_choice"),
    (chat(parallel_tool_calls="yes"), "invalid_value", "parallel_tool_calls"),
    (chat(chat_template_kwargs=[]), "invalid_value", "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": {}}), "invalid_value", "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": 1}, lookahead={"chat_template_kwargs": {"a": 2}}), "invalid_value", "chat_template_kwargs"),
    (chat(functions=[{"name": "f"}]), "unsupported_field", "functions"),
    (chat(logprobs=True), "unsupported_field", "logprobs"),
    (chat(top_logprobs=2), "unsupported_field", "top_logprobs"),
    (chat(logit_bias={"7": 1}), "unsupported_field", "logit_bias"),
    (chat(frequency_penalty=0.5), "unsupported_field", "frequency_penalty"),
    (chat(frequency_penalty=False), "unsupported_field", "frequency_penalty"),
    (chat(presence_penalty=-1), "unsupported_field", "presence_penalty"),
    (chat(response_format={"type": "json_object"}), "unsupported_field", "response_format"),
    (chat(reasoning_effort="high"), "unsupported_field", "reasoning_effort"),
    (chat(modalities=["audio"]), "unsupported_field", "modalities"),
    (chat(store=True), "unsupported_field", "store"),
    (chat(model=[]), "invalid_value", "model"),
    (chat(model={}), "invalid_value", "model"),
    (chat(model=True), "invalid_value", "model"),
    (chat(model="demo "), "model_not_found", "model"),
    (chat(model="DEMO"), "model_not_found", "model"),
    (chat(model="../demo"), "model_not_found", "model"),
    (chat(model="demo\x00"), "model_not_found", "model"),
    (chat(messages=None), "missing_field", "messages"),
    (chat(messages=7), "invalid_value", "messages"),
    (chat(messages=[None]), "invalid_value", "messages[0]"),
    (chat(messages=[[]]), "invalid_value", "messages[0]"),
    (chat(messages=[{}]), "missing_field", "messages[0].role"),
    (chat(messages=[{"role": "user", "content": "q"}, {"role": "user", "content": ""}]), "invalid_value", "messages[1].content"),
    (chat(messages=[{"role": "user", "content": "q"}] * 3 + ["q"]), "invalid_value", "messages[3]"),
    (turn(role="User"), "invalid_value", "messages[0].role"),
    (turn(role="function"), "invalid_value", "messages[0].role"),
    (turn(role=["user"]), "invalid_value", "messages[0].role"),
    (turn(role="user\n"), "invalid_value", "messages[0].role"),
    (turn(content=True), "invalid_value", "messages[0].content"),
    (turn(content=[None]), "invalid_value", "messages[0].content[0]"),
    (turn(content=[{"type": "text", "text": 7}]), "invalid_value", "messages[0].content[0].text"),
    (turn(content=[{"text": "q"}]), "missing_field", "messages[0].content[0].type"),
    (turn(content=[{"type": "input_audio", "input_audio": {}}]), "invalid_value", "messages[0].content[0].type"),
    (turn(reasoning_content=7), "invalid_value", "messages[0].reasoning_content"),
    (turn(function_call={"name": "f"}), "unsupported_field", "messages[0].function_call"),
    (turn(**{"": 1}), "unknown_field", "messages[0]."),
    *((chat(**{name: 1}), "unknown_field", name) for name in UNKNOWN),
    *((chat(temperature=value), "invalid_value", "temperature") for value in ([], {}, "", 10**400)),
    *((chat(top_p=value), "invalid_value", "top_p") for value in ("x", [], -1, True)),
    *((chat(max_tokens=value), "invalid_value", "max_tokens") for value in ([], {}, True, -1, 2**31, 2**63, -(2**63), 10**400)),
    *((chat(seed=value), "invalid_value", "seed") for value in (True, "1", [], 2**65)),
    *((chat(stop=value), "invalid_value", "stop") for value in ({}, True, [""], ["a", ""])),
    (chat(stop=[None]), "invalid_value", "stop[0]"),
    *((chat(stream=value), "invalid_value", "stream") for value in ({}, [], "true", 0)),
    *((chat(n=value), "invalid_value", "n") for value in (-1, 1.5, [], 2**63)),
    *((chat(user=value), "invalid_value", "user") for value in ([], {}, True)),
    *((chat(stream_options=value), "invalid_value", "stream_options") for value in ("x", 7, True)),
    (chat(stream_options={"include_usage": "yes"}), "invalid_value", "stream_options.include_usage"),
    *((chat(lookahead=value), "invalid_value", "lookahead") for value in ("lr", 7, True)),
    *((inside(**{name: value}), "invalid_value", f"lookahead.{name}") for name in LOOKAHEAD for value in ([], [{}])),
    *((inside(**{name: 1}), "unknown_field", f"lookahead.{name}") for name in ("", "Mode", "__class__", "x" * 70)),
    *((chat(**{name: value}), "unsupported_field", name) for name, value in UNSUPPORTED.items()),
]
_COMPLETIONS: list[tuple[Document, str, str | None]] = [
    (without("prompt", plain()), "missing_field", "prompt"),
    (plain(prompt=""), "invalid_value", "prompt"),
    (plain(prompt=[]), "invalid_value", "prompt"),
    (plain(prompt=[1, 2]), "invalid_value", "prompt[0]"),
    (plain(prompt=["q", ""]), "invalid_value", "prompt[1]"),
    (plain(prompt={}), "invalid_value", "prompt"),
    (plain(prompt=["q"] * 9), "invalid_value", "prompt"),
    (plain(prompt=["q"] * 5, n=2), "invalid_value", "prompt"),
    (plain(messages=[]), "unknown_field", "messages"),
    (plain(max_completion_tokens=5), "unknown_field", "max_completion_tokens"),
    (plain(echo=True), "unsupported_field", "echo"),
    (plain(best_of=2), "unsupported_field", "best_of"),
    (plain(min_p=1), "unsupported_field", "min_p"),
    (plain(chat_template_kwargs={"enable_thinking": False}), "unsupported_field", "chat_template_kwargs"),
    (plain(suffix="end"), "unsupported_field", "suffix"),
    (plain(logprobs=1), "unsupported_field", "logprobs"),
    (plain(raw=True), "unknown_field", "raw"),
    (plain(model="x"), "model_not_found", "model"),
    (plain(max_tokens=101), "over_limit", "max_tokens"),
    (plain(prompt=None), "missing_field", "prompt"),
    (plain(prompt=7), "invalid_value", "prompt"),
    (plain(prompt=[[1, 2], [3]]), "invalid_value", "prompt[0]"),
    (plain(prompt=["q", None]), "invalid_value", "prompt[1]"),
    (plain(text_input="q"), "unknown_field", "text_input"),
    (plain(tools=[]), "unknown_field", "tools"),
    (plain(logit_bias={"1": 100}), "unsupported_field", "logit_bias"),
    (plain(lookahead={"raw": True}), "unknown_field", "lookahead.raw"),
    (plain(lookahead={"mode": "\uff4c\uff52"}), "invalid_value", "lookahead.mode"),
]
NESTED = b"[" * 800 + b"]" * 800
"""It can be read, but whoever compares it may run out of stack."""
DEEP = b"[" * 100_000 + b"]" * 100_000
_BODIES: list[tuple[bytes, str, str | None]] = [
    (b"", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"[]", "invalid_json", None),
    (b"null", "invalid_json", None),
    (b'"q"', "invalid_json", None),
    (b'{"model": NaN}', "invalid_json", None),
    (b'{"temperature": -Infinity}', "invalid_json", None),
    (b'{"temperature": 1e999}', "invalid_json", None),
    (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json", None),
    (b'{"model": "a", "model": "b"}', "invalid_json", "model"),
    (b'{"lookahead": {"mode": "lr", "mode": "ar"}}', "invalid_json", "mode"),
    (b'{"user": "\xff"}', "invalid_json", None),
    (b'{"user": "\\ud800"}', "invalid_json", None),
    (b"\xef\xbb\xbf{}", "invalid_json", None),
    ('{"model": "demo"}'.encode("utf-16"), "invalid_json", None),
    (b'{"model": "demo", "messages": ' + DEEP + b"}", "invalid_json", None),
    (GOOD_BODY[:-1] + b', "temperature": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "invalid_json", None),
    (b'{"max_tokens": %b, "max_completion_tokens": %b}' % (NESTED, NESTED), "invalid_json", None),
    (b'{"model": "demo"} x', "invalid_json", None),
    (b"\x00", "invalid_json", None),
    (GOOD_BODY + b"\x00", "invalid_json", None),
    (GOOD_BODY[:-1], "invalid_json", None),
    (GOOD_BODY * 2, "invalid_json", None),
    (b"<model>demo</model>", "invalid_json", None),
    (b"model=demo&messages=q", "invalid_json", None),
    (b'{"model": undefined}', "invalid_json", None),
    (b"{'model': 'demo'}", "invalid_json", None),
    (b'{"model": "demo",}', "invalid_json", None),
    (b'{"user": "\\udc00\\ud800"}', "invalid_json", None),
    (b'{"user": "\xed\xa0\x80"}', "invalid_json", None),
    (b'{"user": "\xc0\xaf"}', "invalid_json", None),
    (b'{"user": "a\nb"}', "invalid_json", None),
    (b'{"seed": 0x10}', "invalid_json", None),
    (b'{"seed": 01}', "invalid_json", None),
    (b'{"temperature": .5}', "invalid_json", None),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "invalid_json", None),
    (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "invalid_json", None),
]
_HEADERS: list[tuple[Mapping[str, str], str]] = [
    *(({"Content-Type": kind} if kind else {}, "unsupported_media_type") for kind in KINDS),
    *(({**JSON, "Content-Encoding": how}, "unsupported_media_type") for how in ("gzip", "br", "deflate", "zstd", "gzip, gzip")),
]
_ROUTES: list[tuple[str, str, str]] = [
    ("GET", "/index", "not_found"),
    ("GET", "/v1", "not_found"),
    ("POST", "/v1/embeddings", "not_found"),
    ("GET", "/v1/models/other", "model_not_found"),
    ("GET", "/docs", "not_found"),
    ("GET", "/openapi.json", "not_found"),
    ("GET", "/v1/chat/completions/", "not_found"),
    ("GET", "/v1/models/../../etc/passwd", "not_found"),
    ("GET", "/v1//models", "not_found"),
    ("GET", "/v1/models/%00", "model_not_found"),
    ("GET", "/%2e%2e/%2e%2e/etc/passwd", "not_found"),
    ("POST", "/v2/models/lookahead/generate", "not_found"),
    ("POST", "/v2/repository/index", "not_found"),
    ("GET", CHAT, "method_not_allowed"),
    ("PUT", CHAT, "method_not_allowed"),
    ("DELETE", COMPLETIONS, "method_not_allowed"),
    ("POST", "/health", "method_not_allowed"),
    ("POST", "/metrics", "method_not_allowed"),
    ("TRACE", CHAT, "method_not_allowed"),
    ("BREW", CHAT, "method_not_allowed"),
]

DOOR_ROWS: tuple[DoorRow, ...] = (
    *(DoorRow(code, param, body=json.dumps(document).encode()) for document, code, param in _CHATS),
    *(DoorRow(code, param, COMPLETIONS, json.dumps(document).encode()) for document, code, param in _COMPLETIONS),
    *(DoorRow(code, param, body=body) for body, code, param in _BODIES),
    *(DoorRow(code, None, CHAT, GOOD_BODY, headers=headers) for headers, code in _HEADERS),
    *(DoorRow(code, None, path, method=method, headers={}) for method, path, code in _ROUTES),
)

_FIELDS: list[tuple[str, Any]] = [
    ("text_input", None),
    ("text_input", ""),
    ("text_input", ["a", "b"]),
    ("messages", "[]"),
    ("messages", "{"),
    ("messages", '{"role": "user"}'),
    ("messages", '[{"role": "nobody", "content": "x"}]'),
    ("messages", '[{"role": "user", "content": ""}]'),
    ("messages", '[{"role": "user", "content": "x", "extra": 1}]'),
    ("messages", "[" * 60_000),
    ("messages", '[{"role": "user", "content": "x", "tool_call_id": "y"}]'),
    ("messages", '[{"role": "tool", "content": "x", "tool_calls": []}]'),
    *[("tools", value) for value in ("", "{}", "[]", "[{}]", "[" * 60_000, '[{"function": {"name": ""}}]', b"\xff")],
    ("tools", '[{"function": {"name": "f", "parameters": ' + '{"a": ' * 90 + "1" + "}" * 92 + "]"),
    ("tools", '[{"function": {"name": "f"}}]'),  # by the template, which shows none
    ("chat_template_kwargs", '{"enable_thinking": false}'),
    *[("chat_template_kwargs", value) for value in ("", "[]", '{"a": null}', '{"a": []}', '{"\\ud800": 1}')],
    *[(name, value) for name in ("max_tokens", "thinking_token_budget") for value in (0, -1, 2**31 - 1)],
    *[("temperature", value) for value in (-0.1, 5.1, float("nan"), float("inf"), float("-inf"))],
    *[("top_p", value) for value in (0.0, -1.0, 1.1, float("nan"))],
    *[("top_k", value) for value in (-1, 2**31 - 1)],
    *[("stop", value) for value in ([""], ["x" * 129], ["x"] * 17)],
    *[("mode", value) for value in ("", "LR", "fast", "lr-sd")],
    *[("max_depth", value) for value in (-1, 17, 2**31 - 1)],
    *[("width", value) for value in (0, -1, 9)],
    *[("num_draft_tokens", value) for value in (-1, 65)],
    *[("verifier", value) for value in ("", "yes", "judge ", "likelihood", "x" * 65)],
    *[("proposer", value) for value in ("", "eagle", "draft", "draft_step")],
    *[(name, value) for name in ("audit_rate", "risk_budget") for value in (-0.1, 1.1, float("nan"))],
    *[("deadline_s", value) for value in (-1.0, float("nan"), 1e9)],
    ("text_input", []),
    ("text_input", b"\xff"),
    ("text_input", b"\xed\xa0\x80"),
    *[("messages", value) for value in ("", "null", "7", '"x"', "[1]", '["x"]', "[null]", "[[]]", "[{}]", "[", "[{]", "[NaN")],
    *[("messages", value) for value in (b"\xff", b"[\xff]", '[{"role": "user"}]', '[{"content": "x"}]', ["[]", "[]"])],
    *[("messages", f'[{{"role": {role}, "content": "x"}}]') for role in ('"User"', '"function"', "null", "7", "[]", '""')],
    *[("messages", f'[{{"role": "user", "content": {content}}}]') for content in ("null", "7", "[]", "{}", "true", "9" * 5000)],
    *[("messages", f'[{{"role": "user", "content": "x{half}"}}]') for half in (r"\ud800", r"\udc00\ud800")],
    *[("max_tokens", value) for value in (-(2**31), [1, 2])],
    *[("temperature", value) for value in ([0.0, 0.0], 3e38)],
    *[("top_p", value) for value in (float("inf"), -0.0)],
    *[("stop", value) for value in (["a", ""], [b"\xff"])],
    *[("mode", value) for value in ("lr\x00", "\uff4c\uff52", " lr", b"\xff", "auto,lr")],
    *[("max_depth", value) for value in (-(2**31), [1, 1])],
    *[("width", value) for value in (-(2**31), 2**31 - 1)],
    *[("num_draft_tokens", value) for value in (-(2**31), 2**31 - 1)],
    *[("verifier", value) for value in ("\x00", "../exact", b"\xff")],
    *[("proposer", value) for value in ("\x00", "x" * 65)],
    *[(name, float("inf")) for name in ("audit_rate", "risk_budget", "deadline_s")],
]
LOOP_ROWS: tuple[LoopRow, ...] = (
    *(LoopRow(name, {"messages": value, "raw": False} if name == "messages" else {name: value}) for name, value in _FIELDS),
    LoopRow("text_input", {"text_input": "x", "messages": '[{"role": "user", "content": "x"}]', "raw": False}),
    LoopRow("raw", {"messages": '[{"role": "user", "content": "x"}]', "raw": True}),
)
ROWS: tuple[DoorRow | LoopRow, ...] = (*DOOR_ROWS, *LOOP_ROWS)

# ---------------------------------------------------------------------------------------------------------------------- anything

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    sorted({*NOT_IN_CHAT, *SAME, *LOOKAHEAD, *_ChatBody.model_fields, *_CompletionBody.model_fields, "role", "content"})
)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": st.text() | JSON_VALUES}), max_size=3)
_GOOD_TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(min_size=1, max_size=20)}),
    min_size=1,
    max_size=3,
)
_GOOD_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 1),
    "top_p": st.floats(0.1, 1),
    "max_tokens": st.integers(1, 8),
    "seed": st.integers(0, 2**31),
    "n": st.integers(1, 2),
    "stop": st.sampled_from(["zz", ["zz", "</a>"]]),
    "stream": st.booleans(),
    "lookahead": st.fixed_dictionaries({}, optional={"mode": st.sampled_from(["ar", "lr", "auto"]), "width": st.integers(1, 2)}),
}
_GOOD_BODIES = st.fixed_dictionaries(
    {"model": st.just("demo"), "messages": _GOOD_TURNS}, optional=_GOOD_OPTIONS
) | st.fixed_dictionaries({"model": st.just("demo"), "prompt": st.text(min_size=1, max_size=20)}, optional=_GOOD_OPTIONS)
DOCUMENTS: st.SearchStrategy[Document] = st.builds(
    lambda good, more: {**good, **more},
    _GOOD_BODIES,
    st.just({}) | st.dictionaries(NAMES | st.text(max_size=8), JSON_VALUES, min_size=1, max_size=1),
)
"""Bodies for the door: some of them good, many nearly so."""


def _values(field: RequestField) -> st.SearchStrategy[Any]:
    """Of one input: what fits its tensor, in any number."""
    words = st.text(max_size=8) | st.binary(max_size=8) | st.sampled_from(["", "\x00", "<|im_end|>", "</think>", "[", "[[]]"])
    one: st.SearchStrategy[Any] = {
        "STRING": st.sampled_from(field.choices or ("exact", "judge", "ngram", "engine")) | words,
        "BOOL": st.booleans(),
        "INT32": st.integers(0, 20) | st.integers(-(2**31), 2**31 - 1),
        "UINT64": st.integers(0, 2**64 - 1),
        "FP32": st.floats(0, 1, width=32) | st.floats(width=32),
    }[field.dtype]
    return one | st.lists(one, max_size=3)


_WORDS = {
    "verifier": ("exact", "judge", "cascade"),
    "proposer": ("draft_model", "ngram", "engine"),
    "stop": ("zz", "\x00", "</a>"),
}


def _good_values(field: RequestField) -> st.SearchStrategy[Any]:
    """Of one input: what each rule allows."""
    if field.many:
        return st.lists(st.sampled_from(_WORDS[field.name]), min_size=1, max_size=3)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "BOOL": st.booleans(),
        "INT32": st.integers(1, 2),
        "UINT64": st.integers(0, 2**64 - 1),
        "FP32": st.floats(0.125, 1, width=32),
    }
    return kinds[field.dtype] if field.dtype in kinds else st.sampled_from(field.choices or _WORDS[field.name])


_OPTIONS = [field for field in REQUEST_FIELDS if not field.json and field.name not in ("text_input", "raw")]
_TURN_TEXTS = st.builds(json.dumps, TURNS | JSON_VALUES)
_PROMPTS = (
    st.fixed_dictionaries({"text_input": st.text(min_size=1, max_size=20)})
    | st.fixed_dictionaries({"messages": _TURN_TEXTS})
    | st.fixed_dictionaries({}, optional={"text_input": st.text() | st.binary(max_size=8), "messages": _TURN_TEXTS})
)
INPUTS: st.SearchStrategy[dict[str, Any]] = st.builds(
    lambda good, bad, prompt: {**good, **bad, **prompt},
    st.fixed_dictionaries({}, optional={field.name: _good_values(field) for field in _OPTIONS}),
    st.just({}) | st.sampled_from(REQUEST_FIELDS).flatmap(lambda field: st.fixed_dictionaries({field.name: _values(field)})),
    _PROMPTS,
)
"""Inputs for the step loop: some of them good, many nearly so."""
