"""A sentence-transformers checkpoint, run with transformers alone: encoder, pooling, normalisation as its files say.

Layout (that of all-MiniLM-L6-v2 and all-mpnet-base-v2): ``modules.json`` lists the modules in order,
``1_Pooling/config.json`` says how token vectors become one, ``sentence_bert_config.json`` how many tokens count.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lr_backend.errors import CheckpointError, LookaheadError

_POOLING_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """What the checkpoint's files say. ``pooling``: mean, cls or max; ``max_tokens`` None: the tokenizer's own limit."""

    encoder_dir: Path
    pooling: str
    max_tokens: int | None

    @classmethod
    def read(cls, directory: Path) -> EmbeddingLayout:
        """Read the layout.

        Raises:
            CheckpointError: a file is missing or unreadable, or asks for a module or pooling that is not supported.
        """
        modules = _json(directory, "modules.json")
        try:
            kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
            paths = [directory / str(module["path"]) for module in modules]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{directory.name}/modules.json: not a list of modules") from error
        # Cosine is taken in the end, so that a missing Normalize changes nothing.
        if tuple(kinds) not in (_MODULES, _MODULES[:2]):
            raise CheckpointError(f"{directory.name}: modules {', '.join(kinds)}; supported: {', '.join(_MODULES)}")
        encoder_dir = paths[0]
        limits = _json(encoder_dir, "sentence_bert_config.json") if (encoder_dir / "sentence_bert_config.json").exists() else {}
        return cls(encoder_dir, _pooling(paths[1]), limits.get("max_seq_length"))


def _pooling(directory: Path) -> str:
    settings = _json(directory, "config.json")
    active = [key for key, value in settings.items() if key.startswith("pooling_mode") and value is True]
    named = settings.get("pooling_mode")
    modes = [_POOLING_KEYS.get(key, key) for key in active] or [named or "mean"]
    if len(modes) != 1 or modes[0] not in _POOLING_KEYS.values():
        raise CheckpointError(f"{directory.name}: pooling {', '.join(map(str, modes))}; supported: mean, cls or max, one of them")
    return str(modes[0])


def _json(directory: Path, name: str) -> Any:
    try:
        return json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory.name}: {name} cannot be read: {error}") from error


def pool(states: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One vector a text, [N, D], of token states [N, L, D]; ``mask`` [N, L] is 0 at padding. ``mode``: mean, cls or max."""
    if mode == "cls":
        return states[:, 0]
    weights = mask[:, :, None].to(states.dtype)
    if mode == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)


class EmbeddingModel:
    """A loaded checkpoint on the CPU. Its work runs on a thread of its own, one batch at a time, off the event loop."""

    def __init__(self, encoder: Any, tokenizer: Any, layout: EmbeddingLayout, *, num_threads: int = 1) -> None:
        self._encoder = encoder.eval()
        self._tokenizer = tokenizer
        self._layout = layout
        # OpenMP's thread count belongs to the thread that sets it.
        self._executor = ThreadPoolExecutor(1, "embedding", initializer=torch.set_num_threads, initargs=(num_threads,))

    @classmethod
    def load(cls, directory: Path, *, num_threads: int = 1) -> EmbeddingModel:
        """Load a local checkpoint; nothing is downloaded and no code of it is run.

        Raises:
            CheckpointError: it cannot be served.
        """
        from transformers import AutoModel, AutoTokenizer

        layout = EmbeddingLayout.read(directory)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            tokenizer = AutoTokenizer.from_pretrained(layout.encoder_dir, **options)
            encoder = AutoModel.from_pretrained(layout.encoder_dir, dtype=torch.float32, **options)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory.name}: the embedding model cannot be loaded: {error}") from error
        return cls(encoder, tokenizer, layout, num_threads=num_threads)

    def embed(self, texts: list[str]) -> Tensor:
        """Unit vectors, float32 [N, D]."""
        limit = self._layout.max_tokens
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        with torch.inference_mode():
            states = self._encoder(**batch).last_hidden_state
            return torch.nn.functional.normalize(pool(states, batch["attention_mask"], self._layout.pooling), dim=-1)

    async def similarity(self, first: str, second: str) -> float:
        """Cosine of the two texts' embeddings.

        Raises:
            LookaheadError: the model failed.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._cosine, first, second)
        except Exception as error:  # whatever a model raises at a text, the verdict is a rejection
            raise LookaheadError(f"the embedding model failed: {error}") from error

    def _cosine(self, first: str, second: str) -> float:
        one, other = self.embed([first, second])
        return float(one @ other)

    def close(self) -> None:
        """Give the thread back; nothing may be asked any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
