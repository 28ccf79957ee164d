"""What is answered: events of the server become documents of OpenAI's API. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from secrets import token_hex
from typing import Any

from lr_client import Event, FinishEvent, ReasoningSplitter, StepEvent, TextEvent

from lr_backend.frontend.asked import Asked
from lr_backend.frontend.tool_calls import ToolCalls

Document = dict[str, Any]

FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length"}
"""OpenAI's word for the server's. An answer that was cut by time was cut; ``lookahead.finish_reason`` says by what."""
_Parts = tuple[str, str, Sequence[Document]]
"""Reasoning, content and calls."""
_OF_TOKENS = ("prompt_tokens", "completion_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class Head:
    """What every document of one answer says. ``created``: seconds since 1970."""

    request_id: str
    created: int
    model: str
    chat: bool
    version: str

    def document(self, *, chunk: bool) -> Document:
        """Without choices and usage."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"lookahead-{self.version}",
        }


@dataclass(frozen=True, slots=True)
class Verbatim:
    """What is JSON already. A trace may have megabytes: all others would wait while it is read and written again."""

    json: str


@dataclass(slots=True)
class Choice:
    """One choice as it comes.

    Attributes:
        splitter: None where the text is sent as it is.
        calls: takes the calls of tools out of the answer; None: they are text.
    """

    index: int
    splitter: ReasoningSplitter | None
    finish: FinishEvent | None = None
    calls: ToolCalls | None = None
    _steps: list[Document] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)

    def opening(self) -> Document:
        """The choice in a chunk that says whose words follow. A stream of a chat begins with that of each choice, in order:
        OpenAI's client makes a list of them, and puts what follows where it belongs."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, event: Event) -> list[Document]:
        """The choice in each chunk that an event of a stream makes."""
        match event:
            case TextEvent():
                return self._text_chunks(self._split(event))
            case StepEvent(record):
                return [self._chunk({}, lookahead={"step": asdict(record)})]
            case FinishEvent(reason):
                self.finish = event
                rest = self._text_chunks(self._flushed())
                return [*rest, self._chunk({}, finish_reason=self._finish_reason(reason), lookahead=_told(event))]

    def add(self, event: Event) -> None:
        """Take an event of an answer that is not streamed."""
        match event:
            case TextEvent():
                self._keep(self._split(event))
            case StepEvent(record):
                self._steps.append(asdict(record))
            case FinishEvent():
                self._keep(self._flushed())
                self.finish = event

    def whole(self) -> Document:
        """The choice, once its finish has come."""
        assert self.finish is not None
        told = _told(self.finish) | ({"steps": self._steps} if self._steps else {})
        last = {"finish_reason": self._finish_reason(self.finish.finish_reason), "logprobs": None, "lookahead": told}
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        if self.splitter is None:
            return {"index": self.index, "text": content, **last}
        message: Document = {"role": "assistant", "content": content, "reasoning_content": reasoning or None, "refusal": None}
        if self._found:
            message |= {"content": content or None, "tool_calls": self._found}
        return {"index": self.index, "message": message, **last}

    def _split(self, event: TextEvent) -> _Parts:
        if self.splitter is None:
            return "", event.text, ()
        return self._without_calls(*self.splitter.feed(event.text, event.num_reasoning_chars))

    def _flushed(self) -> _Parts:
        if self.splitter is None:
            return "", "", ()
        return self._without_calls(*self.splitter.flush(), is_last=True)

    def _without_calls(self, reasoning: str, content: str, *, is_last: bool = False) -> _Parts:
        return (reasoning, content, ()) if self.calls is None else (reasoning, *self.calls.feed(content, is_last=is_last))

    def _keep(self, parts: _Parts) -> None:
        self._reasoning.append(parts[0])
        self._content.append(parts[1])

    def _text_chunks(self, parts: _Parts) -> list[Document]:
        reasoning, content, calls = parts
        said: list[Document] = [{"reasoning_content": reasoning}] if reasoning else []
        said += [{"content": content}] if content else []
        first = len(self._found) - len(calls)
        said += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls, first)]
        return [self._chunk(one) for one in said]

    @property
    def _found(self) -> list[Document]:
        return [] if self.calls is None else self.calls.found

    def _finish_reason(self, reason: str) -> str:
        told = FINISH_REASONS.get(reason, reason)
        return "tool_calls" if told == "stop" and self._found else told

    def _chunk(self, delta: Document, finish_reason: str | None = None, lookahead: Document | None = None) -> Document:
        said: Document = {"text": delta.get("content", "")} if self.splitter is None else {"delta": delta}
        more = {} if lookahead is None else {"lookahead": lookahead}
        return {"index": self.index, **said, "finish_reason": finish_reason, "logprobs": None, **more}


def counts_document(asked: Asked, choices: Sequence[Choice]) -> Document:
    """``usage``, and the counts of speculation beside it, over all choices. The tokens of a prompt count once.

    ``usage`` has OpenAI's fields alone: who accounts for tokens may refuse others.
    """
    usages = [choice.finish.usage for choice in choices if choice.finish is not None]
    of_prompts = {job.prompt: usage.prompt_tokens for job, usage in zip(asked.jobs, usages, strict=True)}
    prompt_tokens = sum(of_prompts.values())
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }
    return {"usage": usage, "lookahead": _counts(asdict(usage) for usage in usages)}


def counted(counts: Document) -> Document:
    """What of it the log says."""
    return {name: counts["usage"][name] for name in ("prompt_tokens", "completion_tokens")}


def _counts(usages: Iterable[Mapping[str, Any]]) -> Document:
    """Everything that counts, added up; rates and times are the choices' own."""
    total: Document = {}
    for usage in usages:
        for name, value in usage.items():
            if isinstance(value, Mapping):
                total[name] = dict(Counter(total.get(name, {})) + Counter(value))
            elif name.startswith("num_"):
                before = total.get(name)
                total[name] = value if before is None else before + (value or 0)  # None: nobody has counted
    return total


def _told(finish: FinishEvent) -> Document:
    """What the server says of one answer beside its text."""
    usage = {name: value for name, value in asdict(finish.usage).items() if name not in _OF_TOKENS}
    trace = {} if finish.trace is None else {"trace": Verbatim(finish.trace)}
    return {"finish_reason": finish.finish_reason, **usage, **trace}


def to_json(document: Document) -> bytes:
    """JSON on one line, as it is sent."""
    mark, found = token_hex(), list[str]()

    def marked(value: object) -> str:
        assert isinstance(value, Verbatim), value
        found.append(value.json)
        return mark

    text = json.dumps(document, default=marked, ensure_ascii=False, separators=(",", ":"))
    first, *rest = text.split(f'"{mark}"') if found else (text,)
    return "".join((first, *chain(*zip(found, rest, strict=True)))).encode("utf-8")
