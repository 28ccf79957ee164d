"""Random models of real shapes: they cost what trained ones cost, and their steps are as long as their cap."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from bench.kit.serving import demo_spec
from bench.kit.verifiers import chance
from lr_backend.build.base import Layout
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.embedded.random_checkpoint import write_random_checkpoint, write_random_config
from lr_backend.engine import Role
from lr_backend.triton.models import load_tokenizer

STEP_TOKENS = 24
TIMEOUT_S = 300.0
"""Of a request to such models."""
KV_TOKENS = {"cpu": 4096, "cuda": 16384}
CUDA_LOAD_TIMEOUT_S = 1800


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any) -> Mapping[str, Any]:
    numbers = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads}
    return {"head_dim": 64, **numbers, "intermediate_size": inner, **more}


_QWEN: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 40960}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": _shape(64, 2, 2, 1, 96, head_dim=32),
    "3m": _shape(256, 3, 4, 4, 768),
    "10m": _shape(384, 5, 6, 6, 1152),
    "35m": _shape(512, 9, 8, 8, 1536),
    "100m": _shape(768, 12, 12, 12, 2304),
    "300m": _shape(1280, 14, 20, 20, 3840),
    "qwen3-1.7b": _shape(2048, 28, 16, 8, 6144, vocab_size=151936, **_QWEN),
    "qwen3-8b": _shape(4096, 36, 32, 8, 12288, vocab_size=151936, tie_word_embeddings=False, **_QWEN),
    "qwen3-32b": _shape(5120, 64, 64, 8, 25600, vocab_size=151936, tie_word_embeddings=False, **_QWEN),
    "qwen2.5-7b": _shape(
        3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False, architecture="Qwen2ForCausalLM", **_QWEN
    ),
}
"""Shapes by name, small ones with the demo's vocabulary. The large ones are those of their models' ``config.json``."""


def chance_of(alpha: float) -> str:
    """Name of the verifier that accepts with a probability."""
    return f"chance_{round(1000 * alpha)}"


def random_deployment(
    folder: Path, shapes: Mapping[Role, str], *, device: str = "cpu", alphas: Sequence[float] = ()
) -> EmbeddedDeployment:
    """The demo's deployment with random models of these shapes; the prompt opens the reasoning, and steps end at their cap.

    For each of the ``alphas`` it has a verifier that accepts with that probability, in the time of a judge where there is one.

    On a CPU checkpoints are written, since the decoder in C reads files. On CUDA the engines draw their weights: 32 billion of
    them would need 64 GB of disk.
    """
    spec = demo_spec(Layout.PROCESS_A_ROLE)
    changed: dict[str, Any] = {}
    for role, name in shapes.items():
        source, checkpoint = spec.checkpoint_dir(role), folder / role.value
        shape = {"vocab_size": json.loads((source / "config.json").read_text())["vocab_size"], **SHAPES[name]}
        if device == "cpu":
            write_random_checkpoint(checkpoint, **shape)
            silence(checkpoint, ending_ids(load_tokenizer(source)))
        else:
            write_random_config(checkpoint, **shape)
        for path in source.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                shutil.copy(path, checkpoint)
        if role is not Role.JUDGE:
            template = checkpoint / "chat_template.jinja"
            template.write_text(template.read_text().rstrip("\n") + "<think>\n")
        update: dict[str, Any] = {"checkpoint": checkpoint, "max_tokens_in_paged_kv_cache": KV_TOKENS[device]}
        if device == "cuda":
            update |= {"device": "cuda", "dtype": "bfloat16", "weight_dtype": "same", "random_weights": True}
        changed[role.value] = spec.engine(role).model_copy(update=update)
    lookahead = {name: value for name, value in spec.lookahead.items() if name != "audit"}
    lookahead |= {
        "limits": spec.lookahead["limits"] | {"max_step_tokens": STEP_TOKENS},
        "verifiers": {chance_of(alpha): chance(alpha, asks_judge=Role.JUDGE in shapes) for alpha in alphas},
        "draft_temperature": 0.6,  # greedy drafts of random weights repeat one token for ever
    }
    server = spec.server.model_copy(update={"load_timeout_s": CUDA_LOAD_TIMEOUT_S} if device == "cuda" else {})
    return spec.model_copy(update={**changed, "lookahead": lookahead, "server": server})


def ending_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that may end a step, the reasoning or the answer."""
    texts = ((token, str(tokenizer.decode([token]))) for token in range(len(tokenizer)))
    return frozenset(token for token, text in texts if "\n" in text) | frozenset(tokenizer.get_added_vocab().values())


def silence(checkpoint: Path, token_ids: Collection[int]) -> None:
    """Give these tokens a logit of 0, so that ``top_k`` leaves them out: the best 20 of a thousand are far above."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    head[sorted(token_ids)] = 0.0
    save_file(tensors, path)
