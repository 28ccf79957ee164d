"""The fields of a request as data, read off :class:`~lr_backend.request.LookaheadRequest`, and the tensors that carry them.

``config.pbtxt``, the client's copy of the fields, its command line and the tables of the documentation are made from
``REQUEST_FIELDS``, all but the first by ``python -m tools.request_fields``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from lr_backend.contract import TensorSpec
from lr_backend.request import LookaheadRequest

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a request.

    Attributes:
        dtype: of the Triton tensor that carries it; what is JSON comes in a STRING.
        many: it holds any number of values; every other holds one.
        json: what the text holds, as JSON, ``list`` or ``object``; empty where it is no JSON.
        choices: the words that it may be, where it is one of a few.
        rule: what else it may be, such as ``0 to 16``; empty where the type says all.
        default: as JSON writes it, without quotes; empty where there is none.
        meaning: what it says, without a capital and a full stop.
    """

    name: str
    dtype: str
    many: bool
    json: str
    choices: tuple[str, ...]
    rule: str
    default: str
    meaning: str

    @property
    def tensor(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, (-1 if self.many else 1,))


def _read(name: str, info: FieldInfo) -> RequestField:
    kind, *more = get_args(info.annotation) or (info.annotation,)  # T, of ``T | None`` and ``tuple[T, ...]`` too
    bounds = {key: value for rule in info.metadata for key in _BOUNDS if (value := getattr(rule, key, None)) is not None}
    return RequestField(
        name=name,
        dtype=_dtype(kind, most=bounds.get("le", 0)),
        many=kind is str and Ellipsis in more,
        json=_JSON.get(get_origin(kind), ""),
        choices=tuple(word.value for word in kind) if issubclass(kind, StrEnum) else (),
        rule=_rule(**bounds),
        default="" if info.default_factory or info.default in (None, ()) else _default(info.default),
        meaning=" ".join((info.description or "").split()),
    )


_JSON: dict[Any, str] = {tuple: "list", dict: "object"}
_BOUNDS = ("ge", "gt", "le", "min_length", "max_length")


def _dtype(kind: type, *, most: float) -> str:
    if issubclass(kind, int):
        return "BOOL" if kind is bool else "INT32" if most <= MAX_INT32 else "UINT64"
    return "FP32" if issubclass(kind, float) else "STRING"


def _default(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')


def _rule(
    *, ge: float = 0, gt: float | None = None, le: float | None = None, min_length: int = 0, max_length: int | None = None
) -> str:
    if le is not None:
        return f"{_shown(ge)} to {_shown(le)}" if gt is None else f"above {_shown(gt)}, to {_shown(le)}"
    if max_length is not None:
        return f"{min_length} to {max_length} characters" if min_length else f"at most {max_length}"
    return "not empty" if min_length else ""


def _shown(bound: float) -> str:
    """A bound as one reads it: a large power of two, and one less than it, as a power."""
    for less, suffix in ((0, ""), (1, " - 1")):
        power = int(bound) + less
        if power >= 1 << 16 and power.bit_count() == 1:
            return f"2^{power.bit_length() - 1}{suffix}"
    return f"{bound:g}"


REQUEST_FIELDS: tuple[RequestField, ...] = tuple(_read(name, info) for name, info in LookaheadRequest.model_fields.items())

LOOKAHEAD_INPUTS: tuple[TensorSpec, ...] = tuple(field.tensor for field in REQUEST_FIELDS)
"""All optional; the request says which go together."""

_OUTPUTS = {
    "text_output": "STRING",
    "num_reasoning_chars": "INT32",
    "step": "STRING",
    "finish_reason": "STRING",
    "usage": "STRING",
    "trace": "STRING",
}
LOOKAHEAD_OUTPUTS: tuple[TensorSpec, ...] = tuple(
    TensorSpec(name, dtype, (1,), optional=False) for name, dtype in _OUTPUTS.items()
)
