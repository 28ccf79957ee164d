"""Tiny real models and engines over them, for tests of the embedded engine."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.native.library import library
from lr_backend.embedded.random_checkpoint import write_random_checkpoint
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import NewTokens, Sequence
from lr_backend.engine.request import EngineRequest, EngineResponse, StopWords
from lr_backend.errors import LookaheadError

VOCAB = 61

NEEDS_LIBRARY = pytest.mark.skipif(library() is None and shutil.which("cc") is None, reason="no C compiler to build it with")
"""Of tests of what is written in C; where there is a compiler, a library that is missing fails them."""
KERNELS = ("reference", pytest.param("native", marks=NEEDS_LIBRARY))
"""Who computes, as a parameter of a test; the decoder in C wants heads that are a multiple of 16 wide."""


def tiny_checkpoint(folder: Path, **changes: Any) -> Path:
    """A sharp random Qwen3 whose greedy output does not repeat soon; a pass takes a fraction of a millisecond."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "gain": 2.0,
    }
    return write_random_checkpoint(folder, **shape | changes)


def padded_checkpoint(folder: Path, num_ids: int, **changes: Any) -> Path:
    """The same model with a tokenizer of fewer ids than its logits are wide."""
    tiny_checkpoint(folder, **changes)
    vocabulary = {f"word {token}": token for token in range(num_ids)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return folder


def poison(folder: Path, token: int) -> None:
    """Change a checkpoint so that whoever has read ``token`` computes nothing but NaN. All of its weights are finite.

    One number of the residual stream belongs to this token alone, and overflows in the first layer.
    """
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 0] = 0.0
    tensors["model.embed_tokens.weight"][token, 0] = 1.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    for name in ("gate", "up"):
        column = tensors[f"model.layers.0.mlp.{name}_proj.weight"][:, 0]
        column[::2], column[1::2] = 1e30, -1e30
    save_file(tensors, file, metadata={"format": "pt"})


def engine_config(checkpoint: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "num_threads": 1,
        "tokens_per_block": 4,
        "max_tokens_in_paged_kv_cache": 1024,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "max_seq_len": 256,
        "max_draft_len": 8,
    }
    return EngineConfig(checkpoint, **settings | changes)


def tiny_engine(checkpoint: Path, **changes: Any) -> EmbeddedEngine:
    return EmbeddedEngine(engine_config(checkpoint, **changes))


MakeEngine = Callable[..., EmbeddedEngine]


def engines(checkpoint: Path, **settings: Any) -> Iterator[MakeEngine]:
    """A factory of engines, for a fixture; after the test each is idle and its accounting adds up, unless it was closed."""
    made: list[EmbeddedEngine] = []

    def make(**changes: Any) -> EmbeddedEngine:
        made.append(tiny_engine(checkpoint, **settings | changes))
        return made[-1]

    yield make
    for engine in made:
        if not engine._inbox.closing:
            check_accounting(engine)
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
            assert stats.num_blocks_cached + stats.num_blocks_free == engine.config.num_blocks
            engine.close()


class Pending:
    """An answer that is still to come."""

    def __init__(self) -> None:
        self._answered = threading.Event()
        self.results: list[EngineResponse | LookaheadError] = []

    def __call__(self, result: EngineResponse | LookaheadError) -> None:
        self.results.append(result)
        self._answered.set()

    @property
    def done(self) -> bool:
        return self._answered.is_set()

    def result(self) -> EngineResponse:
        """The response. Raises: LookaheadError: the request failed."""
        assert self._answered.wait(30), "no answer"
        assert len(self.results) == 1
        result = self.results[0]
        if isinstance(result, EngineResponse):
            return result
        raise result


def start(engine: EmbeddedEngine, request: EngineRequest) -> Pending:
    pending = Pending()
    engine.submit(request, pending)
    return pending


def ask(engine: EmbeddedEngine, *requests: EngineRequest) -> list[EngineResponse]:
    """All at once; answers in order."""
    pending = [start(engine, request) for request in requests]
    return [one.result() for one in pending]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def request(
    input_ids: Iterable[int], max_new_tokens: int = 8, stop_words: Iterable[tuple[int, ...]] = (), **fields: Any
) -> EngineRequest:
    words = StopWords.of(stop_words)
    return EngineRequest(fields.pop("request_id", ""), tuple(input_ids), max_new_tokens, stop_words=words, **fields)


class Gate:
    """Holds the engine's thread between two iterations until opened; what comes meanwhile is then taken all at once."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._open, self._reached = threading.Event(), threading.Event()
        self._engine, self._take_work = engine, engine._take_work
        engine._take_work = self._hold  # type: ignore[method-assign]
        answered = Sequence(0, request(()), lambda result: None, (), 0, 1)
        with engine._inbox._changed:  # an idle thread wakes up as for a cancel that comes too late, and does nothing
            engine._inbox._cancelled.append(answered)
            engine._inbox._awaken()
        assert self._reached.wait(10)

    def _hold(self) -> bool:
        self._engine._take_work = self._take_work  # type: ignore[method-assign]
        self._reached.set()
        self._open.wait(30)
        return self._take_work()

    def open(self) -> None:
        self._open.set()


def check_accounting(engine: EmbeddedEngine) -> None:
    """Between two iterations of an engine that goes on. Raises: AssertionError: naming what does not add up."""
    gate = Gate(engine)
    try:
        engine._check_accounting()
    finally:
        gate.open()


class Pause:
    """Holds the engine's thread once it has decoded so many tokens in all, until ended or until the engine is to close.

    Attributes:
        begun: set when it holds.
    """

    def __init__(self, engine: EmbeddedEngine, *, after: int) -> None:
        self.begun, self._ended = threading.Event(), threading.Event()
        self._engine, self._after, self._advance = engine, after, engine._advance
        engine._advance = self._hold  # type: ignore[method-assign]

    def _hold(self, chunks: list[Chunk], gained: list[NewTokens]) -> None:
        self._advance(chunks, gained)
        if self._engine.stats().num_tokens_decoded >= self._after:
            self.begun.set()
            for _ in range(3000):
                if self._ended.wait(0.01) or self._engine._inbox.closing:
                    return

    def end(self) -> None:
        self._ended.set()


def greedy(engine: EmbeddedEngine, input_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The output of a plain greedy run."""
    return ask(engine, request(input_ids, count))[0].token_ids


def cancel(engine: EmbeddedEngine, request_id: str) -> Pending:
    return start(engine, request((), 0, request_id=request_id, stop=True))
