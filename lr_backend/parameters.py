"""Settings of an engine from the ``parameters`` of a Triton ``config.pbtxt``, which are text by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lr_backend.errors import ConfigError
from lr_backend.hardware.pace import EnginePace

CHECKPOINT_KEY = "gpt_model_path"
"""Upstream's name for the checkpoint or engine directory."""
Read = Callable[[str, str], Any]
"""(key, text) -> value. Raises ConfigError."""
Readers = Mapping[str, tuple[str, Read]]
"""Field name and reader by key."""


def require(valid: bool, name: str, value: object, rule: str) -> None:
    """Raises: ConfigError: ``valid`` does not hold; names the setting, its value and the rule."""
    if not valid:
        raise ConfigError(f"{name}={value!r}: {rule}")


def readers_of(settings: Any, upstream_names: Mapping[str, str]) -> Readers:
    """How each field of a dataclass is read, by its key: upstream's name for it where it has one, else its own."""
    return {upstream_names.get(field.name, field.name): (field.name, _BY_TYPE[str(field.type)]) for field in fields(settings)}


def read_parameters(
    parameters: Mapping[str, str], readers: Readers, fixed: Mapping[str, tuple[str, ...]], engine: str
) -> dict[str, Any]:
    """Values by field name. Keys of ``fixed`` leave the engine no choice: they are checked (in lower case) and dropped.

    Raises:
        ConfigError: naming the key that is unknown or malformed.
    """
    values: dict[str, Any] = {}
    for key, text in parameters.items():
        if key in fixed:
            require(text.lower() in fixed[key], key, text, f"this engine has only {' or '.join(fixed[key])}")
            continue
        require(key in readers, key, text, f"not a parameter of {engine}")
        name, read = readers[key]
        values[name] = read(key, text)
    return values


def _integer(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{key}={text!r}: an integer") from None


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key}={text!r}: a number") from None


def _boolean(key: str, text: str) -> bool:
    """Upstream's spellings and no others."""
    if text in ("True", "true", "TRUE", "1"):
        return True
    require(text in ("False", "false", "FALSE", "0"), key, text, "true or false")
    return False


def _path(key: str, text: str) -> Path:
    require(bool(text) and not text.startswith("${"), key, text, "a checkpoint directory")
    return Path(text)


def _text(key: str, text: str) -> str:
    return text


def _integers(key: str, text: str) -> tuple[int, ...]:
    return tuple(_integer(key, part.strip()) for part in text.split(",")) if text.strip() else ()


_BY_TYPE: Mapping[str, Read] = {
    "Path": _path,
    "Path | None": _path,
    "str": _text,
    "str | None": _text,
    "int": _integer,
    "int | None": _integer,
    "float": _number,
    "float | None": _number,
    "bool": _boolean,
    "tuple[int, ...]": _integers,
    "EnginePace | None": lambda key, text: EnginePace.from_json(text),
}
