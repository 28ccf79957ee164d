"""Checks of a checkpoint folder before anything is built from it: complete, not truncated, supported, with a tokenizer.

Reads headers only, so that a folder of any size is checked in milliseconds, and needs no torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lr_backend.engine import Role
from lr_backend.engine.checkpoint import (
    WEIGHT_INDEX,
    architecture_of,
    json_object,
    num_positions,
    positive_int,
    read_vocabulary,
    weight_files,
)
from lr_backend.errors import CheckpointError, ConfigError

FLOAT_DTYPES = ("F32", "F16", "BF16")
FP8_DTYPE = "F8_E4M3"
"""Of weights that are quantised already, with scales beside them. The LLM API loads them as they are."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger number is garbage, not a header."""

_LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
_EXTRA_LAYER_TENSORS: Mapping[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "Qwen2ForCausalLM": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "LlamaForCausalLM": (),
}
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint that passed.

    Attributes:
        vocab_size: width of the logits; at least the tokenizer's size.
        max_positions: longest sequence that the model was made for, in tokens.
        stretched_positions: the same for an engine that computes what ``rope_scaling`` says.
        vocabulary: token text to id, added tokens too.
        files: what the checkpoint consists of; what a manifest hashes.
    """

    directory: Path
    architecture: str
    vocab_size: int
    max_positions: int
    stretched_positions: int
    num_parameters: int
    vocabulary: Mapping[str, int]
    files: tuple[Path, ...]

    @property
    def in_words(self) -> str:
        millions = self.num_parameters / 1e6
        size = f"{millions / 1e3:.2f} B" if millions >= 1e3 else f"{millions:.2f} M"
        counted = f" {size} parameters," if millions else ""  # no weights were looked at
        return f"{self.architecture},{counted} vocabulary {self.vocab_size}, {self.max_positions} positions"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size


def check_checkpoint(directory: Path, *, weights_needed: bool = True, fp8: bool = False) -> CheckpointInfo:
    """Check one checkpoint folder.

    Args:
        weights_needed: False for an engine that draws its weights; then none are looked for.
        fp8: its matrices may be quantised, for an engine that loads such.

    Raises:
        CheckpointError: names the folder, the file or tensor, and what is wrong with it.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder")
    path = directory / "config.json"
    config = json_object(path)
    architecture = architecture_of(config, path)
    vocab_size, num_layers, max_positions = (
        positive_int(config, key, path) for key in ("vocab_size", "num_hidden_layers", "max_position_embeddings")
    )
    tied = bool(config.get("tie_word_embeddings", False))
    weights = weight_files(directory) if weights_needed else []
    # An index may lie beside weights that are not wanted here, and were not brought.
    tensors = _tensors(weights, directory) if weights_needed else {}
    if weights_needed:
        required = _require_tensors(tensors, architecture, num_layers, tied, directory)
        _require_dtypes(tensors, required, (*FLOAT_DTYPES, FP8_DTYPE) if fp8 else FLOAT_DTYPES, directory)
        _require_shapes(tensors, vocab_size, directory)
    vocabulary = read_vocabulary(directory)
    if vocabulary and max(vocabulary.values()) >= vocab_size:
        raise CheckpointError(f"{directory}: the tokenizer has ids beyond the model's vocabulary of {vocab_size}")
    _require_chat_template(directory)
    named = [path, *(directory / name for name in _TOKENIZER_FILES)]
    return CheckpointInfo(
        directory=directory,
        architecture=architecture,
        vocab_size=vocab_size,
        max_positions=max_positions,
        stretched_positions=num_positions(config, path),
        num_parameters=sum(tensor.size for tensor in without_tied_head(tensors, tied=tied).values()),
        vocabulary=vocabulary,
        files=tuple(sorted({*weights, *(file for file in named if file.is_file())})),
    )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A CheckpointError of the block says first whose checkpoint it is: a role's, or that of a section of the spec."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error.message}") from error


def require_positions(role: Role, wanted: int, most: int) -> None:
    """Raises: ConfigError: the spec wants longer sequences than the checkpoint was made for."""
    if wanted > most:
        raise ConfigError(f"{role}.max_seq_len={wanted} is beyond the checkpoint's {most} positions")


def without_tied_head(tensors: Mapping[str, StoredTensor], *, tied: bool) -> dict[str, StoredTensor]:
    """What is computed with. Some checkpoints store an output matrix though theirs is ``tied`` to the input table."""
    return {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}


def check_same_vocabulary(target: CheckpointInfo, draft: CheckpointInfo) -> None:
    """Draft steps become target prefixes as token ids, so both must read every id alike.

    Raises:
        CheckpointError: naming tokens that differ.
    """
    if target.vocabulary == draft.vocabulary:
        return
    tokens = target.vocabulary.keys() | draft.vocabulary.keys()
    differing = sorted(token for token in tokens if target.vocabulary.get(token) != draft.vocabulary.get(token))
    shown = ", ".join(
        f"{token!r} (target {target.vocabulary.get(token, 'none')}, draft {draft.vocabulary.get(token, 'none')})"
        for token in differing[:3]
    )
    raise CheckpointError(f"target and draft must share a vocabulary; {len(differing)} tokens differ: {shown}")


def has_weights(directory: Path) -> bool:
    """Whether there is a file of weights that the LLM API loads."""
    return any(any(directory.glob(f"*{ending}")) for ending in (".safetensors", ".bin", ".pth"))


def _tensors(files: Iterable[Path], directory: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        tensors |= read_header(path)
    index = directory / WEIGHT_INDEX
    promised = json_object(index)["weight_map"] if index.is_file() else {}
    absent = sorted(set(promised) - set(tensors))
    if absent:
        raise CheckpointError(f"{directory}: tensor {absent[0]} is in the index but in no file")
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, types and shapes of a safetensors file, whose size must be exactly what its header promises.

    Raises:
        CheckpointError: it is no safetensors file, or cut short.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            text = file.read(length)
        header = json.loads(text)
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
        }
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file or is cut short: {error}") from error
    size, expected = path.stat().st_size, 8 + length + end
    if size != expected:
        raise CheckpointError(f"{path} has {size} bytes, its header promises {expected}: truncated or corrupt")
    return tensors


def _require_tensors(
    tensors: Mapping[str, StoredTensor], architecture: str, num_layers: int, tied: bool, directory: Path
) -> set[str]:
    """The names of all tensors that there must be."""
    per_layer = (*_LAYER_TENSORS, *_EXTRA_LAYER_TENSORS[architecture])
    required = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    required |= {f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in per_layer}
    missing = sorted(required - set(tensors))
    if missing:
        raise CheckpointError(f"{directory}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return required


def _require_dtypes(
    tensors: Mapping[str, StoredTensor], required: Iterable[str], dtypes: tuple[str, ...], directory: Path
) -> None:
    for name in required:
        if tensors[name].dtype not in dtypes:
            raise CheckpointError(f"{directory}: {name} is {tensors[name].dtype}, not one of {', '.join(dtypes)}")


def _require_shapes(tensors: Mapping[str, StoredTensor], vocab_size: int, directory: Path) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors and tensors[name].shape[:1] != (vocab_size,):
            raise CheckpointError(
                f"{directory}: {name} has shape {tensors[name].shape}, config.json says vocab_size {vocab_size}"
            )


def _require_chat_template(directory: Path) -> None:
    if (directory / "chat_template.jinja").is_file():
        return
    if not json_object(directory / "tokenizer_config.json").get("chat_template"):
        raise CheckpointError(f"{directory}: the tokenizer has no chat template")
