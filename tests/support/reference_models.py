"""Random models of transformers, and logits of theirs and of the engine's own computation, to compare them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.runner import ReferenceRunner
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import Sequence
from tests.support.embedded_engines import VOCAB, request

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, own factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
        "truncate": False,
        "beta_fast": 16,
    },
}


def reference_model(family: str, *, rope: str | None = None, **changes: Any) -> Any:
    """A random model whose norm weights and biases are not trivial; a head is 16 wide unless ``changes`` says otherwise."""
    config_class, model_class = FAMILIES[family]
    if family == "qwen3":
        changes = {"head_dim": 16} | changes
    if rope is not None:
        changes["rope_parameters"] = {"rope_theta": 1e4, **ROPES[rope]}
    torch.manual_seed(3)
    model = model_class(config_class(**SHAPE | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.4, 1.6)
            else:
                parameter.mul_(8.0 * (32 / SHAPE["hidden_size"]) ** 0.5)  # so that rows keep about their length
    return model


def logits_of_reference(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of all positions, in float32."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def logits_of(model: DecoderModel, tokens: tuple[int, ...], counts: list[int]) -> torch.Tensor:
    """Logits of all positions, computed in chunks of these sizes."""
    runner = ReferenceRunner(model, num_blocks=64, tokens_per_block=8)
    sequence = Sequence(0, request(tokens), lambda result: None, (), 1, 8)
    sequence.table.blocks = list(range(63, -1, -1))
    parts = []
    for count in counts:
        logits, _ = runner.run([Chunk(sequence, sequence.num_computed, count, count)])
        sequence.num_computed += count
        parts.append(logits)
    return torch.cat(parts)
