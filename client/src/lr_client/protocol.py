"""What crosses the wire, as pure functions.

Question and options -> tensors, outputs -> events, failures -> typed errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from lr_client.errors import (
    Cancelled,
    ClientError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ServerError,
    ServerUnreachable,
    TargetUnavailable,
)
from lr_client.fields import FIELDS, Options, as_json
from lr_client.reasoning import ReasoningSplitter
from lr_client.types import (
    Event,
    FinishEvent,
    Message,
    Question,
    Result,
    StepEvent,
    StepRecord,
    TextEvent,
    Usage,
)

INPUTS: dict[str, str] = {"text_input": "BYTES", "messages": "BYTES"} | {
    name: field.datatype for name, field in FIELDS.items()
}
"""Inputs of the ``lookahead`` model and their Triton datatypes; all optional, all of rank 1."""

OUTPUTS = ("text_output", "num_reasoning_chars", "step", "finish_reason", "usage", "trace")
"""Outputs of the ``lookahead`` model: one string or number each, and any may be missing from a response."""


# --- question and options -> tensors ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input: Triton's datatype, and values of shape [n] (bytes objects for ``BYTES``)."""

    name: str
    datatype: str
    values: npt.NDArray[Any]


def encode(question: Question, options: Options | None) -> tuple[Tensor, ...]:
    """The inputs of one request; fields that are None stay at home.

    Raises:
        InvalidRequest: a value does not fit its tensor. Every other rule is the server's.
    """
    options = checked_options(options)
    given = _prompt(question) | {name: getattr(options, name) for name in FIELDS}
    return tuple(_tensor(name, value) for name, value in given.items() if _is_given(value))


def checked_options(options: Options | None) -> Options:
    """The options; None has none.

    Raises:
        InvalidRequest: they are something else, such as a dict.
    """
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise InvalidRequest("options: give Options(...)", field="options")
    return options


def read_at_once(options: Options | None) -> Options:
    """The options of an answer that nobody reads as it comes: whole, where they do not say.

    For a stream the server writes step by step, which costs it a call for each.

    Raises:
        InvalidRequest: they are no ``Options``.
    """
    options = checked_options(options)
    return replace(options, stream=False) if options.stream is None else options


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, tuple) and not value)


def _prompt(question: Question) -> dict[str, str]:
    if isinstance(question, str):
        return {"text_input": question}
    rule = "give a string, or a list of {'role': ..., 'content': ...}"
    try:
        messages = [dict(one) for one in question]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"messages={shown(question)}: {rule}", field="messages") from error
    if any(not {"role", "content"} <= one.keys() for one in messages):
        raise InvalidRequest(f"messages={shown(question)}: {rule}", field="messages")
    if others := {str(key) for one in messages for key in one} - Message.__annotations__.keys():
        raise InvalidRequest(f"messages: unknown {', '.join(sorted(others))}: {rule}", field="messages")
    return {"messages": as_json("messages", messages)}


def _tensor(name: str, value: object) -> Tensor:
    datatype = INPUTS[name]
    convert, numpy_dtype, rule = _CODECS[datatype]
    items = value if isinstance(value, tuple) else (value,)
    try:
        values = np.array([convert(item) for item in items], dtype=numpy_dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name}={shown(value)}: {rule}", field=name) from error
    return Tensor(name, datatype, values)


def shown(value: object) -> str:
    """A value in a message: no longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bool(value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _int(low: int, high: int) -> Callable[[object], int]:
    # numpy would cut 1.5 to 1 and, in some versions, wrap what is out of range; neither may happen silently.
    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError
        if not low <= value <= high:
            raise ValueError
        return int(value)

    return convert


def _float32(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError
    number = float(value)
    if not abs(number) <= _FLOAT32_MAX:  # false for NaN too
        raise ValueError
    return number


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return value.encode("utf-8")


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_CODECS: dict[str, tuple[Callable[[object], Any], Any, str]] = {
    "BYTES": (_bytes, np.object_, "text that UTF-8 can encode"),
    "BOOL": (_bool, np.bool_, "True or False"),
    "INT32": (_int(-(2**31), 2**31 - 1), np.int32, "a whole number of 32 bits"),
    "UINT64": (_int(0, 2**64 - 1), np.uint64, "a whole number from 0 to 2**64 - 1"),
    "FP32": (_float32, np.float32, "a finite number"),
}


# --- outputs -> events ------------------------------------------------------------------------------------


class Decoder:
    """Turns the responses of one request into events. Holds their one rule: the finish comes once, last."""

    def __init__(self) -> None:
        self.finished = False

    def feed(self, outputs: Mapping[str, Any]) -> tuple[Event, ...]:
        """The events of one response: its step, its text, its finish; empty outputs make none.

        Args:
            outputs: by name, text as bytes.

        Raises:
            ServerError: an output is unreadable, or comes after the finish.
        """
        events = tuple(_events(outputs))
        if events and self.finished:
            raise ServerError("the server sent more after the end of the answer", advice=_VERSION_ADVICE)
        self.finished = self.finished or any(isinstance(event, FinishEvent) for event in events)
        return events

    def end(self) -> None:
        """The server closed the stream.

        Raises:
            ServerError: the answer had not ended.
        """
        if not self.finished:
            advice = "look at the server's log, then send again"
            raise ServerError("the stream ended before the answer did", advice=advice)


def _events(outputs: Mapping[str, Any]) -> Iterable[Event]:
    if step := outputs.get("step"):
        yield from map(StepEvent, read_steps(step))
    if text := outputs.get("text_output"):
        if "num_reasoning_chars" not in outputs:
            raise ServerError("the server does not say what is reasoning", advice=_VERSION_ADVICE)
        yield TextEvent(text.decode("utf-8", errors="replace"), outputs["num_reasoning_chars"])
    if reason := outputs.get("finish_reason"):
        usage = outputs.get("usage") or b"{}"
        trace = outputs.get("trace")
        yield FinishEvent(
            reason.decode("utf-8", errors="replace"),
            read_record(Usage, usage),
            trace.decode("utf-8", errors="replace") if trace else None,
        )


RecordT = TypeVar("RecordT", StepRecord, Usage)
_VERSION_ADVICE = "client and server are of different versions: update the older one"


def read_record(cls: type[RecordT], raw: bytes) -> RecordT:
    """A ``StepRecord`` or ``Usage`` from its JSON. Unknown keys are ignored: a newer server may send more.

    Raises:
        ServerError: it is not JSON, a needed key is missing, or a value has the wrong type.
    """
    with _readable(cls, raw):
        return _reader_of(cls)(json.loads(raw))


def read_steps(raw: bytes) -> list[StepRecord]:
    """The records in a ``step`` output: one, or with ``stream`` false a list of all.

    Raises:
        ServerError: as :func:`read_record`.
    """
    with _readable(StepRecord, raw):
        document, read = json.loads(raw), _reader_of(StepRecord)
        return [read(one) for one in (document if isinstance(document, list) else [document])]


@contextmanager
def _readable(cls: type[RecordT], raw: bytes) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        shown = raw[:80].decode("utf-8", errors="replace")
        message = f"unreadable {cls.__name__} from the server: {shown}"
        raise ServerError(message, advice=_VERSION_ADVICE) from error


def _reader_of(cls: type[RecordT]) -> Callable[[object], RecordT]:
    readers = {name: _READERS[hint] for name, hint in get_type_hints(cls).items()}

    def read_all(document: object) -> RecordT:
        if not isinstance(document, dict):
            raise TypeError("not an object")
        return cls(**{name: read(document[name]) for name, read in readers.items() if name in document})

    return read_all


def _of(*types: type) -> Callable[[object], Any]:
    def read(value: object) -> object:
        if type(value) not in types:  # not isinstance: True is no number here
            raise TypeError(f"{value!r} is not one of {types}")
        return float(value) if float in types and type(value) is int else value

    return read


def _optional(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


def _strings(value: object) -> tuple[str, ...]:
    return tuple(_of(str)(item) for item in _of(list)(value))


def _counts(value: object) -> dict[str, int]:
    return {name: _of(int)(count) for name, count in _of(dict)(value).items()}


_READERS: dict[Any, Callable[[object], Any]] = {
    bool: _of(bool),
    int: _of(int),
    float: _of(float, int),
    str: _of(str),
    int | None: _optional(_of(int)),
    float | None: _optional(_of(float, int)),
    str | None: _optional(_of(str)),
    tuple[str, ...]: _strings,
    Mapping[str, int]: _counts,
}


class Collector:
    """Adds events up to a :class:`Result`."""

    def __init__(self) -> None:
        self._texts: list[TextEvent] = []
        self._steps: list[StepRecord] = []
        self._finish = FinishEvent("", Usage())

    def add(self, event: Event) -> None:
        """Take the next event of the stream."""
        match event:
            case TextEvent():
                self._texts.append(event)
            case StepEvent(record):
                self._steps.append(record)
            case FinishEvent():
                self._finish = event

    def result(self) -> Result:
        """The whole answer, once the stream has ended."""
        splitter = ReasoningSplitter()
        parts = [splitter.feed(one.text, one.num_reasoning_chars) for one in self._texts]
        reasoning, answer = ("".join(part).strip() for part in zip(*parts, splitter.flush(), strict=True))
        return Result(
            text="".join(one.text for one in self._texts),
            reasoning=reasoning,
            answer=answer,
            finish_reason=self._finish.finish_reason,
            usage=self._finish.usage,
            steps=tuple(self._steps),
            trace=self._finish.trace,
        )


# --- failures -> typed errors -----------------------------------------------------------------------------

_CODED = re.compile(r"\b(LR_[A-Z][A-Z_]*[A-Z]): *(.*)", re.DOTALL)
_TRACEBACK = re.compile(r"\n\s*(?:At:|Traceback \().*", re.DOTALL)
_FIELD = re.compile(r"([A-Za-z_][\w.]*)=")
# Who cancels a call hears no more of it: whoever is told so has met a server that ends.
_TYPES: dict[str, type[ClientError]] = {
    "LR_OVERLOADED": Overloaded,
    "LR_CANCELLED": ServerUnreachable,
    "LR_TARGET_UNAVAILABLE": TargetUnavailable,
}
_AWAY = re.compile(
    r"has no available versions|is not (?:ready|healthy|available)|server is stopping", re.IGNORECASE
)
"""Triton's words for a model that it knows and that does not answer now."""
_CUT_OFF = "Stream removed"
"""gRPC's words, at times, for a connection that broke; the status is UNKNOWN then (grpc/grpc#34076)."""
_ADVICE = {
    "LR_ENGINE_REJECTED": "the same request will fail again: shorten the question or max_tokens",
    "LR_CANCELLED": "the server is ending: send again after a pause, or ask another one",
    "LR_NOT_FINITE": "the same request will most likely fail again: change the prompt",
}


def error_from_text(text: str) -> ClientError:
    """The error behind a server's message: ``LR_CODE: text``, maybe with Triton's own words around it."""
    coded = _CODED.search(text)
    if coded is None:
        if _AWAY.search(text):
            return ServerUnreachable(_first(text), advice="it ends or starts: send again after a pause")
        advice = "check the model's name, and that the server loaded it" if "unknown model" in text else None
        return ServerError(_first(text) or "the server failed without saying why", advice=advice)
    code, message = coded[1], _first(coded[2])
    if code in ("LR_INVALID_REQUEST", "LR_PROMPT_TOO_LONG"):
        named = _FIELD.match(message)
        return InvalidRequest(message, field=named[1] if named else None, code=code)
    kind = _TYPES.get(code, ServerError)
    return kind(message or f"the server answered {code}", code=code, advice=_ADVICE.get(code))


def _first(text: str) -> str:
    # What follows is the stack of the server's Python: of no use here.
    return _TRACEBACK.sub("", text).strip()


def error_from_status(
    status: str, details: str, *, url: str, timeout_s: float, cancelled: bool
) -> ClientError:
    """The error behind a gRPC status that is not OK.

    Args:
        status: name of the status, such as ``UNAVAILABLE``.
        cancelled: this client cancelled the call; CANCELLED from elsewhere is a server shutting down.
    """
    if cancelled:
        return Cancelled("the request was cancelled")
    if _CODED.search(details):
        return error_from_text(details)
    if status == "DEADLINE_EXCEEDED":
        return RequestTimeout(f"no end of the answer within {timeout_s:g} s")
    if status in ("UNAVAILABLE", "CANCELLED") or details == _CUT_OFF:
        return ServerUnreachable(f"no answer from {url}: {_first(details) or status}")
    if status == "RESOURCE_EXHAUSTED":
        return Overloaded(_first(details) or "the server is out of resources")
    if status == "INVALID_ARGUMENT":
        return InvalidRequest(_first(details) or "the server refused the request")
    if status == "UNIMPLEMENTED":
        return ServerError(
            f"{url} is no Triton server", advice="check the address; Triton's gRPC port is 8001"
        )
    return ServerError(f"{status}: {_first(details)}")
