"""What is read of a checkpoint's JSON files, and which files hold its weights, whoever serves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from lr_backend.errors import CheckpointError

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
WEIGHT_INDEX = "model.safetensors.index.json"
"""Of a sharded checkpoint: which file holds which tensor."""


def json_object(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError: the file is missing, cannot be read, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def architecture_of(config: Mapping[str, Any], where: Path) -> str:
    """The first of a ``config.json``'s ``architectures``. ``where`` leads an error.

    Raises:
        CheckpointError: it is none of :data:`ARCHITECTURES`.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise CheckpointError(f"{where}: architecture {name} is not one of {', '.join(ARCHITECTURES)}")
    return str(name)


def positive_int(config: Mapping[str, Any], name: str, where: Path, default: int | None = None) -> int:
    """A size of a ``config.json``; ``default`` where it is absent or null. ``where`` leads an error.

    Raises:
        CheckpointError: it is something else, or absent without a default.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:  # True is an int too
        raise CheckpointError(f"{where}: {name}={value!r} must be a positive integer")
    return value


def num_positions(config: Mapping[str, Any], where: Path) -> int:
    """Longest sequence of a model. Linear and YaRN scaling stretch it; of Llama 3's, ``config.json`` says the stretched length.

    Raises:
        CheckpointError: ``max_position_embeddings`` is no positive integer.
    """
    most = positive_int(config, "max_position_embeddings", where)
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return most
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", most)
    stretches = (scaling.get("rope_type") or scaling.get("type")) in ("linear", "yarn")
    if not stretches or not all(isinstance(number, int | float) and isfinite(number) for number in (factor, original)):
        return most
    return max(most, int(original * factor))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, those of the index where there is one. All of them are there.

    Raises:
        CheckpointError: one is missing, or the index is malformed or leads outside of the folder.
    """
    index = directory / WEIGHT_INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{directory} has neither model.safetensors nor {index.name}")
        return [single]
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside of the checkpoint")
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        raise CheckpointError(f"{directory}: {missing[0]} is missing ({len(missing)} of {len(names)} weight files are)")
    return [directory / name for name in sorted(names)]


def read_vocabulary(directory: Path) -> dict[str, int]:
    """Every token of ``tokenizer.json`` with its id, whatever kind of model it holds.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    path = directory / "tokenizer.json"
    content = json_object(path)
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(listed, dict):
            vocabulary = {str(token): int(number) for token, number in listed.items()}
        elif isinstance(listed, list):
            vocabulary = {str(entry[0]): number for number, entry in enumerate(listed)}
        else:
            raise CheckpointError(f"{path} holds no vocabulary")
        vocabulary |= {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or ()}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}") from error
    return vocabulary
