"""Reads what ``trtllm-build`` wrote beside an engine, and holds it against the spec: upstream changes some limits silently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lr_backend.build.gpu_spec import TrtllmEngineSpec
from lr_backend.engine import Role
from lr_backend.errors import BuildError


def check_engine(role: Role, engine: TrtllmEngineSpec, directory: Path) -> None:
    """Check ``config.json`` of a compiled engine.

    Raises:
        BuildError: it cannot be read, or the engine is not what the spec asks for.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError(f"{role}: {path} cannot be read: {error}") from error
    if wrong := differences(engine, config if isinstance(config, dict) else {}):
        raise BuildError(f"{role}: the engine in {directory} is not what was asked for: {'; '.join(wrong)}")


def differences(engine: TrtllmEngineSpec, config: Mapping[str, Any]) -> list[str]:
    """What an engine's configuration has otherwise than its spec. Limits that upstream raises by itself may be higher."""
    equal = {
        "build_config.max_batch_size": engine.max_batch_size,
        "build_config.max_draft_len": engine.max_draft_len,
        "build_config.plugin_config.tokens_per_block": engine.tokens_per_block,
        "build_config.plugin_config.use_paged_context_fmha": True,
        "pretrained_config.mapping.tp_size": engine.tp_size,
    }
    at_least = {"build_config.max_num_tokens": engine.max_num_tokens, "build_config.max_seq_len": engine.max_seq_len}
    found = [f"{name} is {value!r}, not {wanted!r}" for name, wanted in equal.items() if (value := _at(config, name)) != wanted]
    for name, wanted in at_least.items():
        value = _at(config, name)
        if not isinstance(value, int) or value < wanted:
            found.append(f"{name} is {value!r}, below {wanted}")
    return found


def _at(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
