"""Checkpoint checks: a good one passes, each kind of damage is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file as save_torch_file

from lr_backend.build.checkpoints import check_checkpoint, check_same_vocabulary
from lr_backend.build.shapes import find_source
from lr_backend.errors import CheckpointError
from tests.support.tiny_models import make_checkpoint

NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def edit_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (content | values).items() if value is not None}))


def shard(checkpoint: Path) -> Path:
    """Split the weights over two files with an index; returns the second file."""
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: weights[name] for name in members}, checkpoint / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return checkpoint / "b.safetensors"


def test_a_good_checkpoint_passes(checkpoint: Path) -> None:
    info = check_checkpoint(checkpoint)
    assert (info.architecture, info.vocab_size, info.max_positions) == ("Qwen3ForCausalLM", 261, 2048)
    weights = load_file(checkpoint / "model.safetensors")
    assert info.num_parameters == sum(array.size for array in weights.values())
    assert info.vocabulary["<|im_end|>"] == 2
    assert {path.name for path in info.files} >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


def test_a_stored_head_that_is_tied_is_no_parameter(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=True)
    weights = load_file(checkpoint / "model.safetensors")
    head = weights["model.embed_tokens.weight"]
    save_file({name: array for name, array in weights.items() if name != "lm_head.weight"}, checkpoint / "model.safetensors")
    without = check_checkpoint(checkpoint).num_parameters
    save_file(weights | {"lm_head.weight": head}, checkpoint / "model.safetensors")
    assert check_checkpoint(checkpoint).num_parameters == without
    edit_json(checkpoint / "config.json", tie_word_embeddings=False)
    assert check_checkpoint(checkpoint).num_parameters == without + head.size


def test_weights_that_are_quantised_already_are_for_an_engine_that_loads_them(checkpoint: Path) -> None:
    """As Qwen3-32B-FP8 has them: matrices in FP8, a scale for each of their blocks."""
    path, shape = checkpoint / "model.safetensors", find_source(checkpoint, "")
    weights = load_torch_file(path)
    linear = [name for name in weights if "_proj.weight" in name]
    assert linear and not shape.weights.fp8
    num_fp8 = sum(weights[name].numel() for name in linear)
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in linear}
    save_torch_file(weights | scales | {name: weights[name].to(torch.float8_e4m3fn) for name in linear}, path)
    with pytest.raises(CheckpointError, match="is F8_E4M3, not one of F32, F16, BF16"):
        check_checkpoint(checkpoint)
    check_checkpoint(checkpoint, fp8=True)
    found = find_source(checkpoint, "")
    assert found.weights == replace(shape.weights, linear=shape.weights.linear + len(linear), fp8=num_fp8)
    path.unlink()
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "fp8"})
    planned = find_source(checkpoint, "").weights
    assert planned.fp8 == planned.linear, "before its weights are there"


def test_a_sharded_checkpoint_passes(checkpoint: Path) -> None:
    shard(checkpoint)
    assert {path.name for path in check_checkpoint(checkpoint).files} >= {"a.safetensors", "b.safetensors"}


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def drop_tensor(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights[NORM]
    save_file(weights, checkpoint / "model.safetensors")


def integer_tensor(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights[NORM] = weights[NORM].astype(np.int8)
    save_file(weights, checkpoint / "model.safetensors")


def lose_shard(checkpoint: Path) -> None:
    shard(checkpoint).unlink()


def empty_shard(checkpoint: Path) -> None:
    save_file({}, shard(checkpoint))


def escape(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no config", lambda path: (path / "config.json").unlink(), r"config\.json is missing"),
    ("config is no json", lambda path: (path / "config.json").write_text("{"), r"config\.json cannot be read"),
    ("config is a list", lambda path: (path / "config.json").write_text("[]"), "not a JSON object"),
    ("architecture", lambda path: edit_json(path / "config.json", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    ("no architecture", lambda path: edit_json(path / "config.json", architectures=None), "architecture None"),
    ("no layers", lambda path: edit_json(path / "config.json", num_hidden_layers=True), "num_hidden_layers=True"),
    ("more layers", lambda path: edit_json(path / "config.json", num_hidden_layers=3), r"11 tensors are missing.*layers\.2"),
    ("untied", lambda path: edit_json(path / "config.json", tie_word_embeddings=False), r"lm_head\.weight"),
    ("vocabulary size", lambda path: edit_json(path / "config.json", vocab_size=300), r"\(261, 32\).*vocab_size 300"),
    ("no weights", lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors nor"),
    ("truncated weights", lambda path: cut(path / "model.safetensors", 0.9), "truncated or corrupt"),
    ("truncated header", lambda path: cut(path / "model.safetensors", 0.001), "cut short"),
    ("empty weights", lambda path: (path / "model.safetensors").write_bytes(b""), "no safetensors file"),
    ("garbage", lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64), "no safetensors file"),
    ("git pointer", lambda path: (path / "model.safetensors").write_text("version https://git-lfs"), "no safetensors file"),
    (
        "header is a list",
        lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
        "no safetensors file",
    ),
    ("a tensor is missing", drop_tensor, f"1 tensors are missing, the first is {NORM}"),
    ("a tensor of integers", integer_tensor, "is I8"),
    ("a shard is missing", lose_shard, r"b\.safetensors is missing \(1 of 2"),
    ("a shard without its tensors", empty_shard, "in the index but in no file"),
    ("the index leads outside", escape, "outside of the checkpoint"),
    ("no tokenizer", lambda path: (path / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    ("an empty tokenizer", lambda path: (path / "tokenizer.json").write_text("{}"), "holds no vocabulary"),
    ("no chat template", lambda path: (path / "chat_template.jinja").unlink(), "no chat template"),
]


@pytest.mark.parametrize(("damage", "said"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damage_is_named(checkpoint: Path, damage: Callable[[Path], Any], said: str) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=said):
        check_checkpoint(checkpoint)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        check_checkpoint(tmp_path / "nowhere")


def test_vocabularies_are_compared_token_by_token(tmp_path: Path, checkpoint: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    check_same_vocabulary(check_checkpoint(checkpoint), check_checkpoint(other))
    content = json.loads((other / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"2 tokens differ: 'A' \(target \d+, draft \d+\)"):
        check_same_vocabulary(check_checkpoint(checkpoint), check_checkpoint(other))
