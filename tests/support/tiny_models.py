"""Tiny random checkpoints for tests: Qwen3 of 2 layers with a byte-level tokenizer. Made in milliseconds, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")
MAX_POSITIONS = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny Qwen3."""

    hidden: int = 32
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    intermediate: int = 64


def make_tiny_models(folder: Path, shape: Shape = Shape()) -> dict[str, Path]:
    """Three checkpoints under ``folder``: role to directory. Each has other weights; all share one vocabulary."""
    return {role: make_checkpoint(folder / role, seed, shape) for seed, role in enumerate(("target", "draft", "judge"))}


def make_checkpoint(directory: Path, seed: int = 0, shape: Shape = Shape()) -> Path:
    """One random checkpoint; the same seed gives the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = _save_tokenizer(directory)
    _save_json(directory / "config.json", _config(shape, vocab_size))
    end = _tokenizer().token_to_id("<|im_end|>")
    _save_json(directory / "generation_config.json", {"eos_token_id": [end, 0]})
    save_file(_weights(np.random.default_rng(seed), shape, vocab_size), directory / "model.safetensors", {"format": "pt"})
    return directory


def write_spec(path: Path, checkpoints: dict[str, Path], name: str = "tiny", **server: int | str) -> Path:
    """A deployment spec over ``checkpoints`` with small sizes."""
    engine = "num_threads = 1\nmax_tokens_in_paged_kv_cache = 8192\nmax_batch_size = 8\nmax_num_tokens = 256\n"
    engine += "max_queue_size = 64\nmax_seq_len = 2048\n"
    sections = [f'name = "{name}"\nruntime = "embedded"\n']
    for role, checkpoint in checkpoints.items():
        drafts = 16 if role == "target" else 0
        sections.append(f'[{role}]\ncheckpoint = "{checkpoint}"\n{engine}max_draft_len = {drafts}\n')
    sections.append("[lookahead.limits]\nmax_tokens = 256\nmax_step_tokens = 16\n")
    values: dict[str, int | str] = {"exit_timeout_s": 5, **server}
    sections.append("[server]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(sections), encoding="utf-8")
    return path


def _tokenizer() -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK_TOKENS])
    return tokenizer


def _save_tokenizer(directory: Path) -> int:
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    _save_json(directory / "tokenizer_config.json", config)
    return tokenizer.get_vocab_size()


def _config(shape: Shape, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": vocab_size,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _weights(random: np.random.Generator, shape: Shape, vocab_size: int) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(vocab_size, shape.hidden), "model.norm.weight": ones(shape.hidden)}
    for layer in range(shape.layers):
        tensors = {
            "input_layernorm.weight": ones(shape.hidden),
            "post_attention_layernorm.weight": ones(shape.hidden),
            "self_attn.q_proj.weight": matrix(queries, shape.hidden),
            "self_attn.k_proj.weight": matrix(keys, shape.hidden),
            "self_attn.v_proj.weight": matrix(keys, shape.hidden),
            "self_attn.o_proj.weight": matrix(shape.hidden, queries),
            "self_attn.q_norm.weight": ones(shape.head_dim),
            "self_attn.k_norm.weight": ones(shape.head_dim),
            "mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            "mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            "mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}
    return weights


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
