"""Tiny random checkpoints of every family that is served, with a tokenizer: what a stranger brings along."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.reference_models import reference_model
from tests.support.tiny_models import make_checkpoint

FAMILIES = ("qwen3", "qwen2", "llama")
POSITIONS = 2048


def make_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """A target and a draft of one family, in bfloat16."""
    target, draft = (_make(folder / role, family, layers) for role, layers in (("target", 3), ("draft", 1)))
    return target, draft


def _make(directory: Path, family: str, num_layers: int) -> Path:
    make_checkpoint(directory)  # for its tokenizer
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    sizes = {"vocab_size": config["vocab_size"], "num_hidden_layers": num_layers, "max_position_embeddings": POSITIONS}
    reference_model(family, **sizes).bfloat16().save_pretrained(directory)
    generation = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    end = {"eos_token_id": config["eos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps({**generation, **sampling, **end}), encoding="utf-8")
    return directory
