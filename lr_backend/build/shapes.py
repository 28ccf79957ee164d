"""The sizes of a model that its memory follows from: from a checkpoint's ``config.json``, or for known models without one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lr_backend.build.checkpoints import FP8_DTYPE, naming, read_header
from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.engine import Role
from lr_backend.engine.checkpoint import architecture_of, json_object, positive_int, weight_files
from lr_backend.errors import CheckpointError

KNOWN_MODELS = Path(__file__).with_name("known_models.toml")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder.

    Attributes:
        tied_embeddings: one table reads tokens in and out.
        max_positions: longest sequence that the model was made for, in tokens.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Elements of a model's weights, by how tensor parallelism treats them.

    Attributes:
        linear: matrices of attention and MLP, with their biases: split over the ranks, and what FP8 quantizes.
        embedding: the input table: on every rank.
        head: the output matrix: split over the ranks. TensorRT-LLM keeps one of its own also where the checkpoint ties it.
        replicated: norms: on every rank.
        fp8: of ``linear``, what the files hold in FP8, quantised already.
    """

    linear: int
    embedding: int
    head: int
    replicated: int
    fp8: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A model's shape and weights, and where they were learned.

    Attributes:
        origin: in words, for the table.
        exact: the weights were counted in the checkpoint's files.
        drafter: of the draft model or the head that an engine of the LLM API drafts with by itself.
    """

    shape: ModelShape
    weights: WeightCounts
    origin: str
    exact: bool
    drafter: Source | None = None


def count_weights(shape: ModelShape) -> WeightCounts:
    """What a checkpoint of this shape holds."""
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    layer = hidden * shape.qkv_width + queries * hidden + 3 * hidden * shape.intermediate_size
    if shape.architecture == "Qwen2ForCausalLM":
        layer += shape.qkv_width  # biases
    norms = 2 * hidden + (2 * shape.head_dim if shape.architecture == "Qwen3ForCausalLM" else 0)
    table = shape.vocab_size * hidden
    return WeightCounts(shape.num_layers * layer, table, table, shape.num_layers * norms + hidden)


def count_stored_weights(directory: Path) -> WeightCounts:
    """What a checkpoint's files hold, from their headers.

    Raises:
        CheckpointError: a file is missing, no safetensors, or cut short.
    """
    stored = {name: tensor for path in weight_files(directory) for name, tensor in read_header(path).items()}
    sizes = {name: tensor.size for name, tensor in stored.items()}
    embedding = sizes.pop("model.embed_tokens.weight", 0)
    head = sizes.pop("lm_head.weight", embedding)
    replicated = sum(size for name, size in sizes.items() if "norm" in name)
    fp8 = sum(size for name, size in sizes.items() if stored[name].dtype == FP8_DTYPE)
    return WeightCounts(sum(sizes.values()) - replicated, embedding, head, replicated, fp8)


def shape_from_config(config: Mapping[str, Any], where: Path) -> ModelShape:
    """Read ``config.json``. ``where`` leads an error.

    Raises:
        CheckpointError: an architecture that cannot be built, or a size is missing.
    """
    architecture = architecture_of(config, where)
    heads, hidden = positive_int(config, "num_attention_heads", where), positive_int(config, "hidden_size", where)
    return ModelShape(
        architecture=architecture,
        num_layers=positive_int(config, "num_hidden_layers", where),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", where, heads),
        head_dim=positive_int(config, "head_dim", where, hidden // heads),
        intermediate_size=positive_int(config, "intermediate_size", where),
        vocab_size=positive_int(config, "vocab_size", where),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=positive_int(config, "max_position_embeddings", where),
    )


@cache
def known_models() -> Mapping[str, ModelShape]:
    """Shapes by name on the hub."""
    tables = tomllib.loads(KNOWN_MODELS.read_text(encoding="utf-8"))
    return {name: ModelShape(**table) for name, table in tables.items()}


def find_source(checkpoint: Path, hub: str) -> Source:
    """The best that is known of a model: the checkpoint's files, else its ``config.json``, else the known model ``hub``.

    Raises:
        CheckpointError: none of these is there, or what is there cannot be read.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        if hub not in known_models():
            raise CheckpointError(f"{checkpoint} has no config.json, and {hub or 'no hub name'} is not a known model")
        shape = known_models()[hub]
        return Source(shape, count_weights(shape), f"known shape of {hub}", exact=False)
    config = json_object(path)
    shape = shape_from_config(config, path)
    if any(checkpoint.glob("*.safetensors")):
        return Source(shape, count_stored_weights(checkpoint), f"files of {checkpoint}", exact=True)
    counts, quantization = count_weights(shape), config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8":
        counts = replace(counts, fp8=counts.linear)
    return Source(shape, counts, f"config.json of {checkpoint}", exact=False)


def find_head(checkpoint: Path, target: ModelShape) -> Source:
    """An EAGLE-3 head of a target: what its files hold; while they are not there, one layer of the target's sizes.

    Raises:
        CheckpointError: what is there cannot be read, or was trained for another vocabulary.
    """
    shape = replace(target, num_layers=1)
    path = checkpoint / "config.json"
    if not path.is_file():
        return Source(shape, _assumed_head(target), "a layer of the target's sizes, as the head is not there", exact=False)
    vocab_size = positive_int(json_object(path), "vocab_size", path, target.vocab_size)
    if vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{checkpoint}: the head has a vocabulary of {vocab_size}, the target one of {target.vocab_size}: it was trained for"
            " another target"
        )
    if any(checkpoint.glob("*.safetensors")):
        return Source(shape, count_stored_weights(checkpoint), f"files of {checkpoint}", exact=True)
    return Source(shape, _assumed_head(target), f"a layer of the target's sizes, as {checkpoint} has no safetensors", exact=False)


def _assumed_head(target: ModelShape) -> WeightCounts:
    """Three of the target's hidden states become one; one layer reads it beside the token's own row. The input table is the
    target's. The output matrix counts whole, though most heads know only the usual tokens."""
    hidden = target.hidden_size
    layer = hidden * (2 * target.qkv_width + target.num_heads * target.head_dim + 3 * target.intermediate_size)
    return WeightCounts(layer + 3 * hidden * hidden, 0, target.vocab_size * hidden, 4 * hidden)


def find_sources(spec: GpuDeployment) -> dict[Role, Source]:
    """The shapes of a deployment's models, the target's with that of what its engine drafts with.

    A server of some roles needs no other models: only theirs may be on its machine.

    Raises:
        CheckpointError: one is not known, or cannot be read; names the role.
    """
    found: dict[Role, Source] = {}
    for role in Role if spec.runs_loop else spec.roles_here:
        with naming(role):
            found[role] = find_source(spec.checkpoint_dir(role), spec.engine(role).hub)
    if Role.TARGET not in spec.roles_here:
        return found
    with naming("target.speculative"):
        found[Role.TARGET] = replace(found[Role.TARGET], drafter=_find_drafter(spec, found[Role.TARGET].shape))
    return found


def _find_drafter(spec: GpuDeployment, target: ModelShape) -> Source | None:
    folder, ours = spec.speculative_dir, spec.speculation
    if folder is None or ours is None:
        return None
    if ours.kind == "eagle3":
        return find_head(folder, target)
    return find_source(folder, spec.draft.hub if ours.checkpoint is None else ours.hub)
