"""Settings of an engine and the ``parameters`` of a Triton ``config.pbtxt``, which are text by name: read and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from lr_backend.errors import ConfigError

UPSTREAM_KEYS = {"checkpoint_dir": "gpt_model_path", "kv_cache_free_mem_fraction": "kv_cache_free_gpu_mem_fraction"}
"""TensorRT-LLM's names for fields that have another name here."""


class EngineParameters(BaseModel):
    """What an engine reads from its ``config.pbtxt``; an engine adds fields of its own.

    Attributes:
        checkpoint_dir: Hugging Face folder.
        exclude_input_in_output: what holds for requests that do not say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine_name: ClassVar[str]
    """As messages call it."""

    checkpoint_dir: Path
    exclude_input_in_output: bool = False

    def __init__(self, checkpoint_dir: Path, **settings: Any) -> None:
        """Raises: ConfigError: a setting is unknown or out of range; names it, its value and the rule."""
        try:
            super().__init__(checkpoint_dir=checkpoint_dir, **settings)
        except ValidationError as error:
            raise ConfigError(_in_words(error)) from error

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Settings from ``parameters`` (text to text). Keys are field names, or upstream's where :data:`UPSTREAM_KEYS` has one.

        Raises:
            ConfigError: naming the key that is unknown, missing, malformed or out of range.
        """
        names = {UPSTREAM_KEYS.get(name, name): name for name in cls.model_fields}
        values: dict[str, Any] = {}
        for key, text in parameters.items():
            if key not in names:
                raise ConfigError(f"{key}={text!r}: not a parameter of {cls.engine_name}")
            is_flag = cls.model_fields[names[key]].annotation is bool
            values[names[key]] = _flag(key, text) if is_flag else text
        if "checkpoint_dir" not in values:
            raise ConfigError(f"parameter {UPSTREAM_KEYS['checkpoint_dir']} is missing")
        return cls(**values)


def as_parameters(settings: Mapping[str, Any]) -> dict[str, str]:
    """``settings`` as ``parameters``, under upstream's keys where it has one; None is left out."""
    return {
        UPSTREAM_KEYS.get(name, name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in settings.items()
        if value is not None
    }


def _flag(key: str, text: str) -> bool:
    """Upstream's spellings and no others."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise ConfigError(f"{key}={text!r}: true or false")
    return text.lower() in ("true", "1")


def _in_words(error: ValidationError) -> str:
    """The first thing that is wrong: the setting, its value and the rule."""
    first = error.errors(include_url=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:  # a rule between settings, which names them itself
        return message
    name = str(first["loc"][0])
    return f"{UPSTREAM_KEYS.get(name, name)}={first['input']!r}: {message}"
