"""``python -m lr_backend.torch_engine.bench [CHECKPOINT]``: what an iteration costs on this machine.

Every figure is the best of a few rounds, through the whole engine: scheduling, sampling and books included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from lr_backend.engine import Sampling
from lr_backend.torch_engine.checkpoint import read_spec
from lr_backend.torch_engine.config import EngineConfig
from lr_backend.torch_engine.engine import TorchEngine
from lr_backend.torch_engine.inprocess import run_all
from lr_backend.torch_engine.random_checkpoint import write_random_checkpoint
from lr_backend.torch_engine.request import EngineRequest

NUM_DECODED = 48


def decode_ms(engine: TorchEngine, prompts: list[tuple[int, ...]], sampling: Sampling, rounds: int) -> float:
    """Milliseconds of one decode iteration of all prompts together, prompts computed before."""
    run_all(engine, [EngineRequest("", prompt, 1) for prompt in prompts])
    best = float("inf")
    for seed in range(rounds):
        before = engine.stats()
        run_all(engine, [EngineRequest("", prompt, NUM_DECODED, sampling, seed=seed) for prompt in prompts])
        after = engine.stats()
        best = min(best, (after.busy_s - before.busy_s) / (after.num_iterations - before.num_iterations))
    return best * 1e3


def verify_ms(engine: TorchEngine, prompt: tuple[int, ...], num_drafts: int, rounds: int) -> float:
    """Milliseconds from submitting to the answer of one verification whose prompt is cached."""
    answer = run_all(engine, [EngineRequest("", prompt, num_drafts)])[0].token_ids
    request = EngineRequest("", prompt, num_drafts + 1, draft_ids=answer)
    return _best_ms(lambda: run_all(engine, [request]), rounds * 4)


def prefill_tokens_per_s(engine: TorchEngine, vocab_size: int, num_tokens: int, rounds: int) -> float:
    """Tokens a second of one prompt that nothing is known of."""
    prompts = iter([_prompt(vocab_size, num_tokens, 1000 + index) for index in range(rounds)])
    return num_tokens / _best_ms(lambda: run_all(engine, [EngineRequest("", next(prompts), 1)]), rounds) * 1e3


def _best_ms(action: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def _prompt(vocab_size: int, length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


def main(
    checkpoint: Annotated[Path | None, typer.Argument(help="Hugging Face folder; a random 7M Qwen3 when absent")] = None,
    threads: Annotated[int, typer.Option(help="torch threads")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    weight_dtype: Annotated[str, typer.Option(help="same, float16 or auto")] = "same",
    prefix: Annotated[int, typer.Option(help="prompt tokens before the decoding")] = 300,
    rounds: Annotated[int, typer.Option(help="rounds of each figure; the best counts")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Print what decode, verification and prefill cost."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint or write_random_checkpoint(Path(folder))
        max_seq_len = min(2048, read_spec(path).max_positions)
        config = EngineConfig(
            path, dtype=dtype, device=device, weight_dtype=weight_dtype, num_threads=threads, max_seq_len=max_seq_len
        )
        engine = TorchEngine(config)
    try:
        _report(engine, prefix, rounds)
    finally:
        engine.close()


def _report(engine: TorchEngine, prefix: int, rounds: int) -> None:
    vocab_size = engine.model.spec.vocab_size
    config = engine.config
    weights = f"{config.dtype}, weights {config.weight_dtype}"
    typer.echo(f"{engine.model.spec.architecture}, {weights}, {config.num_threads} threads, prefix {prefix}")
    for name, sampling in (("greedy", Sampling()), ("T 0.6 top_k 20 top_p 0.95", Sampling(0.6, 20, 0.95))):
        for batch in (1, 2, 4, 8):
            prompts = [_prompt(vocab_size, prefix, seed) for seed in range(batch)]
            typer.echo(f"decode {name}, batch {batch}: {decode_ms(engine, prompts, sampling, rounds):.2f} ms an iteration")
    prompt = _prompt(vocab_size, prefix, 0)
    typer.echo(f"verify 8 drafts: {verify_ms(engine, prompt, 8, rounds):.2f} ms a request")
    for length in (128, 512):
        typer.echo(f"prefill {length} tokens: {prefill_tokens_per_s(engine, vocab_size, length, rounds):.0f} tokens/s")


if __name__ == "__main__":
    torch.manual_seed(0)
    typer.run(main)
