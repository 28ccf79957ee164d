"""What is read of a checkpoint's JSON files, whoever serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lr_backend.errors import CheckpointError


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
