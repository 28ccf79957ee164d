"""``make bench-gpu``: how near decoding by the embedded engine comes to what the card allows, with and without CUDA graphs.

Decoding reads every weight once an iteration, so the roof of one sequence's speed is the memory's bandwidth over the bytes that a
token needs. The bandwidth is measured on the same card, by copying; the model has random weights, which cost the same. With
``--system`` the kernel tables' time of the same iterations stands beside them. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.engine import NUM_DECODED, Ours, device_line, embedded_engine, random_tokens
from bench.timing import Spread, in_turns
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.memory import bytes_a_token
from lr_backend.embedded.random_checkpoint import random_model, tensor_shapes
from lr_backend.errors import ConfigError
from lr_backend.hardware.cost import Iteration, ProfileCosts
from lr_backend.hardware.overheads import Overheads
from lr_backend.hardware.profile import Profile, ProfileKey, find

_PROFILED = {"qwen3-32b": "Qwen3-32B", "qwen3-1.7b": "Qwen3-1.7B", "qwen3-8b": "Qwen3-8B"}
"""Model of a hardware profile by shape."""
BATCHES = (1, 4, 16, 64)
NUM_COPIES = 10
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
BLOCK = 32


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3ForCausalLM",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        rope={"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 40960},
    )


SHAPES: Mapping[str, ModelSpec] = {
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 128, 25600, 151936),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 128, 12288, 151936),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 128, 6144, 151936),
    "tiny": _qwen3(32, 2, 4, 2, 8, 48, 61),
}


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What was measured.

    Attributes:
        bandwidth: bytes a second of a copy, read and written.
        bytes_a_token: what a decode iteration of one sequence reads.
        tokens_per_s: of all sequences together, by launch ("graphs", "eager") and batch.
    """

    bandwidth: Spread
    bytes_a_token: int
    tokens_per_s: Mapping[str, Mapping[int, Spread]]

    @property
    def roof(self) -> float:
        """Most tokens a second of one sequence."""
        return self.bandwidth.median / self.bytes_a_token

    def share_of_roof(self, launch: str) -> float:
        return self.tokens_per_s[launch][1].median / self.roof


def bytes_read_a_token(spec: ModelSpec, dtype: torch.dtype, context: int) -> int:
    """What one sequence's decode iteration reads: all weights but the embedding, of which it takes one row, and its context."""
    shapes = tensor_shapes(spec)
    if not spec.tie_word_embeddings:
        shapes["model.embed_tokens.weight"] = (spec.hidden_size,)
    return sum(map(prod, shapes.values())) * dtype.itemsize + context * bytes_a_token(spec, dtype)


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.zeros(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    _wait_for(device)
    started = time.perf_counter()
    for _ in range(NUM_COPIES):
        target.copy_(source)
    _wait_for(device)
    return 2 * NUM_COPIES * source.numel() / (time.perf_counter() - started)


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def config_for(device: str, dtype: str, prefix: int, max_batch_size: int) -> EngineConfig:
    """An engine with room for so many sequences, and for the decode window's up to 512 tokens more in each."""
    return EngineConfig(
        Path("random"),
        dtype=dtype,
        device=device,
        tokens_per_block=BLOCK,
        max_tokens_in_paged_kv_cache=max_batch_size * (prefix + NUM_DECODED + 512 + BLOCK),
        max_batch_size=max_batch_size,
        max_num_tokens=2048,
        max_seq_len=prefix + NUM_DECODED + BLOCK,
    )


def measure(spec: ModelSpec, device: str, dtype: str, prefix: int, num_rounds: int, batches: Sequence[int]) -> GpuFigures:
    """Time a random model of ``spec`` after prompts of ``prefix`` tokens; on a CPU there are no graphs to compare with."""
    computed: torch.dtype = getattr(torch, dtype)
    bandwidth = Spread.of([copy_bandwidth(device) for _ in range(num_rounds)])
    config = config_for(device, dtype, prefix, max(batches))
    model = random_model(spec, dtype=computed, device=device, max_seq_len=config.max_seq_len)
    prompts = [random_tokens(spec.vocab_size, prefix, seed) for seed in range(max(batches))]
    launches = ("graphs", "eager") if device == "cuda" else ("eager",)
    with ExitStack() as opened:
        actions: dict[str, Callable[[], float]] = {}
        for launch in launches:
            # They share one model: its weights are only read, and one engine runs at a time.
            engine = embedded_engine(replace(config, use_cuda_graphs=launch == "graphs"), model)
            ours = Ours(opened.enter_context(engine))
            # The largest first, so that what is recorded in the round before the first stays valid.
            for batch in sorted(batches, reverse=True):
                actions[f"{launch} {batch}"] = partial(ours.decode_ms, prompts[:batch])
        ms = in_turns(actions, num_rounds)
    tokens_per_s = {
        launch: {batch: Spread.of([batch / one * 1e3 for one in ms[f"{launch} {batch}"]]) for batch in batches}
        for launch in launches
    }
    return GpuFigures(bandwidth, bytes_read_a_token(spec, computed, prefix + NUM_DECODED // 2), tokens_per_s)


def table_ms(profile: Profile, batch: int, context: int) -> float:
    """Kernel time of one decode iteration by the tables."""
    return ProfileCosts(profile, Overheads.llmapi(profile)).kernels_ms(Iteration((), batch, batch * context))


def show(console: Console, figures: GpuFigures, title: str, tables: Mapping[int, float] | None = None) -> None:
    """Print the table; ``tables``: milliseconds of an iteration by the kernel tables, by batch."""
    launches = list(figures.tokens_per_s)
    columns = () if tables is None else ("ms an iteration", "by the kernel tables")
    table = Table("tokens/s, median (lowest to highest)", *launches, *columns, title=title)
    for batch in figures.tokens_per_s[launches[0]]:
        found = [figures.tokens_per_s[launch][batch] for launch in launches]
        beside = () if tables is None else (f"{1e3 * batch / found[0].median:.2f}", f"{tables[batch]:.2f}")
        table.add_row(f"batch {batch}", *(one.text(0) for one in found), *beside)
    table.add_section()
    table.add_row("batch 1, share of the roof", *(f"{figures.share_of_roof(launch):.0%}" for launch in launches))
    console.print(table)
    gigabytes = Spread(*(value / 1e9 for value in (figures.bandwidth.median, figures.bandwidth.low, figures.bandwidth.high)))
    roof = f"{figures.bytes_a_token / 1e9:.3f} GB a token: at most {figures.roof:.1f} tokens/s"
    console.print(f"copy bandwidth {gigabytes.text(1)} GB/s, {roof}")


def summary(figures: GpuFigures) -> dict[str, Any]:
    """What the JSON line says: medians, each with lowest and highest."""
    return {
        "copy_bandwidth_gb_s": _rounded(figures.bandwidth, 1e9),
        "gb_a_token": round(figures.bytes_a_token / 1e9, 6),
        "roof_tokens_per_s": round(figures.roof, 2),
        "share_of_roof": {launch: round(figures.share_of_roof(launch), 4) for launch in figures.tokens_per_s},
        "tokens_per_s": {
            launch: {str(batch): _rounded(spread) for batch, spread in by_batch.items()}
            for launch, by_batch in figures.tokens_per_s.items()
        },
    }


def _rounded(spread: Spread, unit: float = 1.0) -> list[float]:
    return [round(value / unit, 2) for value in (spread.median, spread.low, spread.high)]


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    device: Annotated[str, typer.Option(help="cuda; cpu to see that it runs")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    prefix: Annotated[int, typer.Option(help="prompt tokens before the decoding")] = 300,
    rounds: Annotated[int, typer.Option(help="rounds of each figure")] = 5,
    batch: Annotated[list[int] | None, typer.Option(help="batch sizes; 1 is always among them")] = None,
    system: Annotated[str | None, typer.Option(help="also what the kernel tables say of this system, such as h200_sxm")] = None,
) -> None:
    """Print tokens/s by batch, their share of the memory's roof, and one JSON line. Exit code 2: there is no such device."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is not one of {', '.join(SHAPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        typer.echo("bench.gpu needs a CUDA device; --shape tiny --device cpu runs it without one")
        raise typer.Exit(2)
    batches = sorted({1, *(batch or BATCHES)})
    tables, label = None, ""
    if system is not None:
        try:
            profile = find(ProfileKey(system, _PROFILED.get(shape, shape), 1, dtype))
        except ConfigError as error:
            raise typer.BadParameter(error.message) from error
        label = profile.label
        tables = {size: table_ms(profile, size, prefix + NUM_DECODED // 2) for size in batches}
    figures = measure(SHAPES[shape], device, dtype, prefix, rounds, batches)
    config = config_for(device, dtype, prefix, max(batches))
    console, where = Console(width=110), device_line(config)
    show(console, figures, f"{shape}, random weights, {dtype}, prefix {prefix}\n{where}", tables)
    if label:
        console.print(f"[yellow]the last column: {label}[/]", soft_wrap=True, highlight=False)
    line = {
        "shape": shape,
        "dtype": dtype,
        "prefix": prefix,
        **summary(figures),
        "tables_ms": tables,
        "tables_label": label,
        "device": where,
    }
    console.print(json.dumps(line), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
