"""The KV pool stays within its budget: tokens, or a share of what memory is free."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lr_backend import free_memory
from lr_backend.embedded import backends, memory
from lr_backend.embedded.checkpoint import read_spec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.memory import bytes_a_token, with_kv_budget
from lr_backend.embedded.native.weights import LANES
from lr_backend.embedded.random_checkpoint import write_random_checkpoint
from lr_backend.errors import ConfigError
from tests.support.embedded_engines import KERNELS, NEEDS_LIBRARY, greedy, prompt, tiny_checkpoint, tiny_engine

BYTES_A_TOKEN = 2 * 2 * 2 * 8 * 4  # layers, keys and values, kv heads, head size, float32

LOAD = """
import sys
from pathlib import Path
from unittest.mock import patch
import torch
from lr_backend.embedded.checkpoint import TensorFiles
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.native.model import NativeModel

def private_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watched(files, name, *shape):
    tensor = read(files, name, *shape)
    seen.append(private_bytes())
    return tensor

read, seen = TensorFiles.read, []
before = private_bytes()
with patch.object(TensorFiles, "read", watched):
    if sys.argv[2] == "native":
        model = NativeModel.load(Path(sys.argv[1]), max_seq_len=64)
    else:
        model = DecoderModel.load(Path(sys.argv[1]), dtype=torch.float32, device="cpu", max_seq_len=64)
print(max(*seen, private_bytes()) - before)
"""
"""Prints the most private memory that loading a checkpoint took, in bytes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_a_tokens_bytes_follow_from_the_model(checkpoint: Path) -> None:
    spec = read_spec(checkpoint)
    assert bytes_a_token(spec, torch.float32) == BYTES_A_TOKEN
    assert bytes_a_token(spec, torch.bfloat16) == BYTES_A_TOKEN // 2


@pytest.mark.parametrize(
    ("fraction", "free_tokens", "pool"),
    [(None, 0, 1000), (0.5, 1200, 300), (1.0, 1200, 600), (0.5, 100_000, 1000)],
)
def test_the_smaller_budget_counts(checkpoint: Path, fraction: float | None, free_tokens: int, pool: int) -> None:
    config = EngineConfig(checkpoint, max_tokens_in_paged_kv_cache=1000, kv_cache_free_mem_fraction=fraction, max_seq_len=256)
    budgeted = with_kv_budget(config, [read_spec(checkpoint)] * 2, free_tokens * BYTES_A_TOKEN)
    assert budgeted.max_tokens_in_paged_kv_cache == pool


def test_memory_for_less_than_one_sequence_is_refused_by_name(checkpoint: Path) -> None:
    config = EngineConfig(checkpoint, kv_cache_free_mem_fraction=0.5, max_seq_len=256)
    with pytest.raises(ConfigError, match=r"kv_cache_free_mem_fraction=0\.5: .* 7 blocks of 32 tokens; .* max_seq_len has 256"):
        with_kv_budget(config, [read_spec(checkpoint)] * 2, 1000 * BYTES_A_TOKEN)


@pytest.mark.parametrize(("max_seq_len", "free_tokens"), [(250, 250), (30, 60)], ids=["seven blocks and a part", "one block"])
def test_a_part_of_a_block_holds_nothing(max_seq_len: int, free_tokens: int, checkpoint: Path) -> None:
    config = EngineConfig(checkpoint, kv_cache_free_mem_fraction=1.0, max_seq_len=max_seq_len, max_draft_len=1)
    with pytest.raises(ConfigError, match="of 32 tokens"):
        with_kv_budget(config, [read_spec(checkpoint)], free_tokens * BYTES_A_TOKEN)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_engine_keeps_to_its_share(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path, head_dim=16)
    # Blocks of four tokens take the native kernels whole vectors.
    slots_a_token = LANES // 4 if kernels == "native" else 1
    monkeypatch.setattr(backends, "free_bytes", lambda device: slots_a_token * 1200 * 2 * BYTES_A_TOKEN)
    engine = tiny_engine(tmp_path, kernels=kernels, kv_cache_free_mem_fraction=0.5)
    try:
        assert engine.config.tokens_per_block == 4 and engine.stats().num_blocks_free == 150
        assert len(greedy(engine, prompt(9), 8)) == 8
    finally:
        engine.close()


@pytest.mark.parametrize(("limit", "left"), [("1000", 650), ("300", 0), ("max", 1 << 62), (None, 1 << 62)])
def test_a_containers_limit_counts(limit: str | None, left: int, tmp_path: Path) -> None:
    """Files that were read once count as used until somebody wants the memory."""
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 300\ninactive_file 250\nactive_file 50\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert free_memory._free_in(tmp_path) == left


def test_free_memory_is_known() -> None:
    assert 0 < memory.free_bytes("cpu") < 1 << 62


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 M parameters in float32, many times what an interpreter's memory wavers by."""
    sizes = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "intermediate_size": 1536}
    return write_random_checkpoint(tmp_path_factory.mktemp("large"), vocab_size=4096, **sizes)


def test_loading_never_needs_twice_what_the_model_takes(large_checkpoint: Path) -> None:
    assert 0 < peak_of_loading(large_checkpoint, "reference") < 1.6 * size_of(large_checkpoint)


@NEEDS_LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_natively_holds_little_more_than_the_weights(dtype: torch.dtype, large_checkpoint: Path, tmp_path: Path) -> None:
    """In either type, as large as its file."""
    checkpoint = Path(shutil.copytree(large_checkpoint, tmp_path / "checkpoint"))
    path = checkpoint / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)

    peak = peak_of_loading(checkpoint, "native")

    assert 0.9 * size_of(checkpoint) < peak < 1.3 * size_of(checkpoint)


def peak_of_loading(checkpoint: Path, how: str) -> int:
    loading = [sys.executable, "-c", LOAD, str(checkpoint), how]
    return int(subprocess.run(loading, check=True, capture_output=True, text=True).stdout)


def size_of(checkpoint: Path) -> int:
    return (checkpoint / "model.safetensors").stat().st_size
