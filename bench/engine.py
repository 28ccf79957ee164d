"""What the embedded engine's iterations cost, beside transformers' ``generate()`` on the same machine.

Same checkpoint, dtype and threads for both; they take turns, so that a noisy machine is noisy to both. Prints a table and ends
with one JSON line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.kit.hardware import device_line
from bench.kit.output import PAGES, console_of_any_width, keep_json, print_line
from bench.kit.turns import Rounds, Spread, ratio, timed_rounds
from lr_backend.embedded.checkpoint import read_spec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.engine.inprocess import run_all
from lr_backend.engine.request import EngineRequest

CHECKPOINT = Path("demo/checkpoints/target")
NUM_DECODED = 48
NUM_DRAFTS = 8
BATCH = 8
BRANCHES = 8
PREFIX_TOKENS = 1000
BRANCH_TOKENS = 24

Tokens = tuple[int, ...]


def random_tokens(vocab_size: int, length: int, seed: int) -> Tokens:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


class Transformers:
    """The baseline: greedy ``generate()`` with its own KV cache, alone in its batch."""

    def __init__(self, checkpoint: Path, dtype: str, device: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device).eval()
        self._device = device

    def decode_ms(self, prompt: Tokens) -> float:
        """Milliseconds a token of a greedy run, its first token (the prompt's) not counted."""
        ids = torch.tensor([prompt], device=self._device)
        return (self._generate_ms(ids, NUM_DECODED + 1) - self._generate_ms(ids, 1)) / NUM_DECODED

    def _generate_ms(self, ids: torch.Tensor, count: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
            )
        if self._device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3


class Ours:
    """The embedded engine through its whole path: queue, schedule, forward, sampling, ends."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def decode_ms(self, prompts: Sequence[Tokens]) -> float:
        """Milliseconds of one iteration that decodes all ``prompts`` together, their prompts being cached."""
        return (self._run_ms(prompts, NUM_DECODED + 1) - self._run_ms(prompts, 1)) / NUM_DECODED

    def verify_ms(self, prompt: Tokens, repeats: int = 12) -> float:
        """Milliseconds of an iteration that verifies ``NUM_DRAFTS`` right drafts after a cached prompt."""
        drafts = run_all(self._engine, [EngineRequest("", prompt, NUM_DRAFTS)])[0].token_ids
        request = EngineRequest("", prompt, NUM_DRAFTS + 1, draft_ids=drafts)
        before = self._engine.stats()
        for _ in range(repeats):
            run_all(self._engine, [request])
        after = self._engine.stats()
        return (after.busy_s - before.busy_s) / (after.num_iterations - before.num_iterations) * 1e3

    def reused_share(self, prefix: Tokens, branches: Sequence[Tokens]) -> float:
        """Share of a cached prefix that branches which continue it, all at once, do not compute again."""
        run_all(self._engine, [EngineRequest("", prefix, 1)])
        answers = run_all(self._engine, [EngineRequest("", prefix + branch, 4) for branch in branches])
        return min(answer.num_reused_tokens or 0 for answer in answers) / len(prefix)

    def prefill_tokens_per_s(self, prompt: Tokens) -> float:
        """Tokens a second of a prompt of which nothing is cached."""
        return len(prompt) / self._run_ms([prompt], 1) * 1e3

    def beside_prompts_ms(self, prompt: Tokens, fresh: Iterator[Tokens]) -> float:
        """Milliseconds a token of one run while prompts of which nothing is cached come one after another."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._run_ms, [prompt], NUM_DECODED)
            while not running.done():
                run_all(self._engine, [EngineRequest("", next(fresh), 1)])
            return running.result() / NUM_DECODED

    def _run_ms(self, prompts: Sequence[Tokens], count: int) -> float:
        started = time.perf_counter()
        run_all(self._engine, [EngineRequest("", prompt, count) for prompt in prompts])
        return (time.perf_counter() - started) * 1e3


@dataclass(frozen=True)
class EngineFigures:
    """Milliseconds by what was timed, and the share of a branch's prefix that was reused."""

    ms: Rounds
    prefix_reused_share: float
    prefill_tokens_per_s: Spread

    @property
    def decode_vs_transformers(self) -> Spread:
        """Tokens a second of our greedy decode over those of ``generate()``, both alone."""
        return ratio(self.ms["transformers"], self.ms["decode 1"])

    @property
    def batch8_vs_transformers(self) -> Spread:
        """Tokens a second of 8 concurrent requests over those of ``generate()`` alone."""
        return ratio(self.ms["transformers"], self.ms[f"decode {BATCH}"], BATCH)

    @property
    def batch8_scaling(self) -> Spread:
        """Tokens a second of 8 concurrent requests over those of one."""
        return ratio(self.ms["decode 1"], self.ms[f"decode {BATCH}"], BATCH)

    @property
    def verify8_cost(self) -> Spread:
        """Time of verifying 8 drafts over that of decoding one token."""
        return ratio(self.ms["verify 8"], self.ms["decode 1"])

    @property
    def overlap_gain(self) -> Spread:
        """Time of a token beside prompts that take turns with decodes, over beside prompts computed at the same time."""
        return ratio(self.ms["beside prompts, in turns with them"], self.ms["beside prompts"])


def config_of(checkpoint: Path, **settings: Any) -> EngineConfig:
    """Room enough for all that is measured, whatever the checkpoint."""
    max_seq_len = min(2048, read_spec(checkpoint).max_positions)
    return EngineConfig(checkpoint_dir=checkpoint, max_seq_len=max_seq_len, max_tokens_in_paged_kv_cache=32768, **settings)


@contextmanager
def embedded_engine(config: EngineConfig) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(config)
    try:
        yield engine
    finally:
        engine.close()


def measure(config: EngineConfig, prefix_length: int, num_rounds: int) -> EngineFigures:
    """Time the checkpoint of ``config`` in both libraries, after prompts of ``prefix_length`` tokens."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    baseline = Transformers(config.checkpoint_dir, config.dtype, config.device)
    with embedded_engine(config) as engine:
        ours, vocab = Ours(engine), engine.spec.vocab_size
        prompts = [random_tokens(vocab, prefix_length, seed) for seed in range(BATCH)]
        actions = {"transformers": lambda: baseline.decode_ms(prompts[0])}
        actions |= {f"decode {n}": lambda n=n: ours.decode_ms(prompts[:n]) for n in (1, 2, 4, BATCH)}  # type: ignore[misc]
        actions["verify 8"] = lambda: ours.verify_ms(prompts[0])
        fresh_prompts = (random_tokens(vocab, prefix_length, seed) for seed in count(10_000))
        actions["beside prompts"] = lambda: ours.beside_prompts_ms(prompts[0], fresh_prompts)
        with embedded_engine(config.model_copy(update={"overlap_prefill": False})) as waiting:
            actions["beside prompts, in turns with them"] = lambda: Ours(waiting).beside_prompts_ms(prompts[0], fresh_prompts)
            figures = timed_rounds(actions, num_rounds)
        branches = [random_tokens(vocab, BRANCH_TOKENS, 100 + seed) for seed in range(BRANCHES)]
        reused = ours.reused_share(random_tokens(vocab, PREFIX_TOKENS, 99), branches)
        fresh = [ours.prefill_tokens_per_s(random_tokens(vocab, 512, 1000 + number)) for number in range(num_rounds)]
    return EngineFigures(figures, reused, Spread.of(fresh))


def show(console: Console, figures: EngineFigures, title: str) -> None:
    """Print the table."""
    table = Table("figure", "median (lowest to highest)", "wanted", title=title)
    for name, values in figures.ms.items():
        table.add_row(
            f"{name}, ms" + (" an iteration" if name.startswith(("decode", "verify")) else " a token"),
            Spread.of(values).text(),
            "",
        )
    table.add_row("prefill of 512 tokens, tokens/s", figures.prefill_tokens_per_s.text(0), "")
    table.add_section()
    table.add_row("decode, over transformers", figures.decode_vs_transformers.text(), "at least 2")
    table.add_row("8 requests, over transformers' one", figures.batch8_vs_transformers.text(), "at least 8")
    table.add_row("8 requests, over one", figures.batch8_scaling.text(), "at least 4")
    table.add_row("verifying 8 drafts, over a token", figures.verify8_cost.text(), "at most 1.5")
    table.add_row("a token beside prompts: in turns, over at once", figures.overlap_gain.text(), "")
    table.add_row("prefix reused by a branch", f"{figures.prefix_reused_share:.1%}", "at least 95 %")
    console.print(table)


def summary(figures: EngineFigures) -> dict[str, Any]:
    """What the JSON line says; ranges stand beside the medians."""
    ratios = ("decode_vs_transformers", "batch8_vs_transformers", "batch8_scaling", "verify8_cost", "overlap_gain")
    spreads: dict[str, Spread] = {name: getattr(figures, name) for name in ratios}
    line: dict[str, Any] = {name: round(spread.median, 3) for name, spread in spreads.items()}
    line["ranges"] = {name: [round(spread.low, 3), round(spread.high, 3)] for name, spread in spreads.items()}
    return line | {"prefix_reused_share": round(figures.prefix_reused_share, 4)}


# Each option is one setting of the engine.
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder.")] = CHECKPOINT,
    threads: Annotated[int, typer.Option(help="Threads that compute.")] = 1,
    kernels: Annotated[str, typer.Option(help="auto, native or reference")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    weight_dtype: Annotated[str, typer.Option(help="same, bfloat16, int8 or auto")] = "same",
    prefix: Annotated[int, typer.Option(help="Prompt tokens before the decoding.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each figure.")] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    output: Annotated[Path, typer.Option(help="Where the figures go; those of other runs stay.")] = PAGES / "engine.json",
) -> None:
    """Print what decode, verification and prefill cost, with ratios and spread, and one JSON line."""
    config = config_of(checkpoint, kernels=kernels, dtype=dtype, device=device, weight_dtype=weight_dtype, num_threads=threads)
    figures = measure(config, prefix, rounds)
    console, where = console_of_any_width(), device_line(threads, device)
    show(console, figures, f"{checkpoint.name}, {dtype}, kernels {kernels}, weights {weight_dtype}, prefix {prefix}\n{where}")
    line = {**summary(figures), "device": where}
    keep_json(output, name_of_run(kernels, dtype, weight_dtype, device), line)
    print_line(console, line)


def name_of_run(kernels: str, dtype: str, weight_dtype: str, device: str) -> str:
    """The command, with the options that are not the usual ones."""
    given = (("kernels", kernels, "auto"), ("dtype", dtype, "float32"), ("weight-dtype", weight_dtype, "same"))
    options = [f"--{name} {value}" for name, value, usual in (*given, ("device", device, "cpu")) if value != usual]
    return " ".join(["python -m bench engine", *options])
