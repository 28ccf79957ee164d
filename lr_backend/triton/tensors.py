"""Tensors of the ``lookahead`` model to and from the request's nouns. Plain numpy; testable without Triton."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lr_backend.contract import TensorMap, TensorSpec
from lr_backend.errors import InvalidRequest, PromptTooLong
from lr_backend.fields import LOOKAHEAD_INPUTS, REQUEST_FIELDS
from lr_backend.loop.answer import Committed
from lr_backend.request import FinishReason, Usage, read_json
from lr_backend.telemetry import HEADERS
from lr_backend.trace.schema import Trace

KNOWN_PARAMETERS = frozenset((*HEADERS, "triton_enable_empty_final_response"))
"""Headers that Triton forwards, and what its gRPC clients ask of Triton itself."""
_JSON = {field.name: field.json for field in REQUEST_FIELDS if field.json}
_ONE_VALUE = frozenset(field.name for field in REQUEST_FIELDS if not (field.many or field.json))
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def request_fields(arrays: TensorMap, max_bytes: int, parameters: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Fields for :meth:`~lr_backend.request.LookaheadRequest.parse` from the inputs and parameters that a client sent.

    A parameter may say any field of one value, as in ``perf_analyzer --request-parameter max_tokens:256:int``.

    Args:
        max_bytes: of each input's strings together. More is not read as text at all, which would hold up every other request.
        parameters: of Triton's request. Its ``generate`` makes one of everything that is no input.

    Raises:
        InvalidRequest: an input has the wrong number of elements, is too long, is no UTF-8, or is no JSON where JSON is due; a
            parameter is no field, or an input says it too.
    """
    said = {name: value for name, value in (parameters or {}).items() if name not in KNOWN_PARAMETERS}
    for name, value in said.items():
        _check_parameter(name, value, arrays, max_bytes)
    return {**{spec.name: _value(spec, arrays[spec.name], max_bytes) for spec in LOOKAHEAD_INPUTS if spec.name in arrays}, **said}


def _check_parameter(name: str, value: object, arrays: TensorMap, max_bytes: int) -> None:
    if not _FIELD_NAME.fullmatch(name):
        raise InvalidRequest("parameters", name, "a name that is no field's")
    if name not in _ONE_VALUE:
        raise InvalidRequest(name, value, "no field of this model that a parameter can say")
    if name in arrays:
        raise InvalidRequest(name, value, "said twice, by an input and by a parameter")
    if isinstance(value, str):
        _check_length(name, len(value.encode(errors="surrogatepass")), max_bytes)


def _check_length(name: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        if name in ("text_input", "messages", "tools"):
            raise PromptTooLong(name, f"{num_bytes} bytes", f"{max_bytes} bytes of a prompt")
        raise InvalidRequest(name, f"{num_bytes} bytes", f"at most {max_bytes} bytes")


def _value(spec: TensorSpec, array: npt.NDArray[Any], max_bytes: int) -> Any:
    values = array.ravel().tolist()
    if spec.dims == (1,) and len(values) != 1:
        raise InvalidRequest(spec.name, f"shape {list(array.shape)}", "one element")
    if spec.dtype == "STRING":
        _check_length(spec.name, sum(len(value) for value in values if isinstance(value, bytes)), max_bytes)
        values = [_text(spec.name, value) for value in values]
    if spec.name in _JSON:
        return _json(spec.name, values[0])
    return tuple(values) if spec.dims == (-1,) else values[0]


def _text(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, value, "UTF-8 text") from error


def _json(name: str, text: str) -> Any:
    rule = f"a JSON {_JSON[name]}"
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, text, rule) from error
    if not isinstance(value, list if _JSON[name] == "list" else dict):
        raise InvalidRequest(name, text, rule)
    return value


def committed_tensors(committed: Committed) -> dict[str, npt.NDArray[Any]]:
    """One streamed response: newly committed text, and the step's record where it is traced."""
    values = {"text_output": committed.text}
    if committed.record is not None:
        values["step"] = committed.record.model_dump_json()
    return _outputs(committed.num_reasoning_chars, values)


def final_tensors(
    text: str, num_reasoning_chars: int, finish_reason: FinishReason, usage: Usage, trace: Trace | None = None
) -> dict[str, npt.NDArray[Any]]:
    """The last response. With a trace and no stream it also holds all step records, as a list."""
    values = {"text_output": text, "finish_reason": finish_reason.value, "usage": usage.as_json()}
    if trace is not None:
        values["trace"] = trace.as_json()
        if not trace.request.stream:
            values["step"] = "[" + ",".join(record.model_dump_json() for record in trace.steps) + "]"
    return _outputs(num_reasoning_chars, values)


def _outputs(num_reasoning_chars: int, texts: Mapping[str, str]) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {name: np.array([text.encode()], dtype=np.object_) for name, text in texts.items()}
    return found | {"num_reasoning_chars": np.array([num_reasoning_chars], np.int32)}
