"""The KV pool stays within its budget: tokens, or a share of what memory is free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lr_backend.errors import ConfigError
from lr_backend.torch_engine import engine as engine_module
from lr_backend.torch_engine import memory
from lr_backend.torch_engine.checkpoint import read_spec
from lr_backend.torch_engine.config import EngineConfig
from lr_backend.torch_engine.memory import bytes_a_token, with_kv_budget
from tests.support.torch_engines import greedy, prompt, tiny_checkpoint, tiny_engine

BYTES_A_TOKEN = 2 * 2 * 2 * 8 * 4  # layers, keys and values, kv heads, head size, float32


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
    budgeted = with_kv_budget(config, read_spec(checkpoint), free_tokens * BYTES_A_TOKEN)
    assert budgeted.max_tokens_in_paged_kv_cache == pool


def test_memory_for_less_than_one_sequence_is_refused_by_name(checkpoint: Path) -> None:
    config = EngineConfig(checkpoint, kv_cache_free_mem_fraction=0.5, max_seq_len=256)
    with pytest.raises(ConfigError, match=r"kv_cache_free_mem_fraction=0\.5: .* 250 tokens; .* max_seq_len has 256"):
        with_kv_budget(config, read_spec(checkpoint), 1000 * BYTES_A_TOKEN)


def test_an_engine_keeps_to_its_share(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 1200 * BYTES_A_TOKEN)
    engine = tiny_engine(checkpoint, kv_cache_free_mem_fraction=0.5)
    try:
        assert engine.stats().num_blocks_free == 300 // engine.config.tokens_per_block
        assert len(greedy(engine, prompt(9), 8)) == 8
    finally:
        engine.close()


@pytest.mark.parametrize(("limit", "left"), [("1000", 400), ("500", 0), ("max", 1 << 62), (None, 1 << 62)])
def test_a_containers_limit_counts(limit: str | None, left: int, tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("600\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert memory._free_in_cgroup(tmp_path) == left


def test_free_memory_is_known() -> None:
    assert 0 < memory.free_bytes("cpu") < 1 << 62
