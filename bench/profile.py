"""``python -m bench.profile``: where the time of one decode iteration goes, part by part, at batch 1 and 8.

The engine's own functions are wrapped with a stopwatch that counts exclusive time: what a part spends in another part is the
other's. A wrapped call costs under half a microsecond, so that the parts add up to the iteration.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.engine import CHECKPOINT, config_of, device_line, embedded_engine, random_tokens
from lr_backend.embedded import engine as engine_module
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.native.model import NativeModel
from lr_backend.embedded.native.run import RunAhead
from lr_backend.embedded.native.runner import NativeRunner
from lr_backend.embedded.reference.attention import DecodeGroup, IterationAttention
from lr_backend.embedded.reference.decode_window import DecodeWindow
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.product import ByteProduct, DenseProduct, HalfProduct
from lr_backend.embedded.reference.runner import TorchRunner
from lr_backend.embedded.scheduler import Scheduler
from lr_backend.engine import Sampling
from lr_backend.engine.inprocess import run_all
from lr_backend.engine.request import EngineRequest

NUM_DECODED = 64
SAMPLINGS = {"greedy": Sampling(), "T 0.6, top_k 20, top_p 0.95": Sampling(0.6, 20, 0.95)}
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("books: wake, tokens, ends", EmbeddedEngine, "_iterate"),
    ("books: wake, tokens, ends", EmbeddedEngine, "_take_work"),
    ("schedule", Scheduler, "schedule"),
    ("inputs: lists to tensors", TorchRunner, "run"),
    ("inputs: lists to tensors", NativeRunner, "run"),
    ("inputs: lists to tensors", NativeModel, "forward"),
    ("inputs: lists to tensors", NativeRunner, "run_ahead"),
    ("inputs: lists to tensors", RunAhead, "__call__"),
    ("in C: decoder, draws", NativeModel, "_compute"),
    ("in C: decoder, draws", NativeModel, "run"),
    ("embedding, norms, rotary, silu", DecoderModel, "forward"),
    ("matrix products", DenseProduct, "__call__"),
    ("matrix products", DenseProduct, "add_to"),
    ("matrix products", HalfProduct, "__call__"),
    ("matrix products", HalfProduct, "add_to"),
    ("matrix products", ByteProduct, "__call__"),
    ("matrix products", ByteProduct, "add_to"),
    ("attention", IterationAttention, "__call__"),
    ("attention", DecodeGroup, "_attend_run"),
    ("KV writes", KvStore, "write"),
    ("KV writes", DecodeWindow, "append"),
    ("sampling", engine_module, "choose_tokens"),
)
"""(name, owner, function) of each part; the rest of a function that calls others is its own."""


class Stopwatch:
    """Exclusive seconds by name, of functions that call one another on one thread."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*positional: Any, **named: Any) -> Any:
            self._switch(name)
            try:
                return function(*positional, **named)
            finally:
                self._back()

        return timed

    def _switch(self, name: str) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._running.append(name)
        self._since = time.perf_counter()

    def _back(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running.pop()] += now - self._since
        self._since = time.perf_counter()


def profile(config: EngineConfig, batch: int, sampling: Sampling, prefix_length: int) -> dict[str, float]:
    """Microseconds an iteration by part, in the order of ``PARTS``; those of the kernels that were not used are left out."""
    watch = Stopwatch()
    with embedded_engine(config) as engine, ExitStack() as patched:
        vocab = engine.spec.vocab_size
        prompts = [random_tokens(vocab, prefix_length, seed) for seed in range(batch)]
        for seed in (0, 1):  # the first round warms up
            requests = [EngineRequest("", prompt, NUM_DECODED, sampling, seed=seed) for prompt in prompts]
            if seed:
                for name, owner, function in PARTS:
                    patched.enter_context(patch.object(owner, function, watch.wrap(name, getattr(owner, function))))
                run_all(engine, [EngineRequest("", prompt, 1) for prompt in prompts])
                watch.seconds.clear()
            before = engine.stats().num_iterations
            run_all(engine, requests)
        iterations = engine.stats().num_iterations - before
    names = dict.fromkeys(name for name, _, _ in PARTS if name in watch.seconds)
    return {name: watch.seconds[name] / iterations * 1e6 for name in names}


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder")] = CHECKPOINT,
    threads: Annotated[int, typer.Option(help="threads that compute")] = 1,
    kernels: Annotated[str, typer.Option(help="auto, native or torch")] = "auto",
    weight_dtype: Annotated[str, typer.Option(help="same, float16, bfloat16, int8 or auto")] = "float16",
    prefix: Annotated[int, typer.Option(help="prompt tokens before the decoding")] = 300,
    batch: Annotated[list[int] | None, typer.Option(help="batch sizes")] = None,
) -> None:
    """Print a table and one JSON line."""
    config = config_of(checkpoint, kernels=kernels, weight_dtype=weight_dtype, num_threads=threads)
    columns = {
        f"{size}, {name}": profile(config, size, sampling, prefix)
        for size in batch or (1, 8)
        for name, sampling in SAMPLINGS.items()
    }
    console, where = Console(width=130), device_line(config)
    table = Table("part, us an iteration", *(f"batch {name}" for name in columns), title=f"{checkpoint.name}, {where}")
    for part in next(iter(columns.values())):
        table.add_row(
            part, *(f"{figures[part]:.0f}  {figures[part] / sum(figures.values()):4.0%}" for figures in columns.values())
        )
    table.add_section()
    table.add_row("sum", *(f"{sum(figures.values()):.0f}" for figures in columns.values()))
    console.print(table)
    rounded = {name: {part: round(us) for part, us in figures.items()} for name, figures in columns.items()}
    console.print(json.dumps({"us_an_iteration": rounded, "device": where}), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    torch.manual_seed(0)
    typer.run(main)
