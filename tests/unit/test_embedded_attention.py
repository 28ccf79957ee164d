"""Attention of the reference: each chunk over its own sequence, whatever stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lr_backend.embedded.checkpoint import read_spec
from lr_backend.embedded.reference.attention import ChunkAttention
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.runner import Span
from tests.support.embedded_engines import ask, prompt, request, tiny_checkpoint, tiny_engine

SIZE, NUM_BLOCKS, HEADS, HEAD_DIM = 8, 64, 4, 16
BRANCHES = (
    Span(83, 1, (*range(9), 20, 21)),
    Span(84, 1, (*range(9), 30, 31)),
    Span(72, 20, (*range(9), 40, 41, 42)),
)
"""Three that share nine blocks."""
STRANGER = Span(0, 50, tuple(range(50, 57)))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spans", [BRANCHES, (STRANGER, *BRANCHES), BRANCHES[:2], (STRANGER,)])
def test_chunks_attend_as_by_the_formula_and_as_they_do_alone(spans: tuple[Span, ...], num_kv_heads: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    spec = read_spec(tiny_checkpoint(tmp_path, head_dim=HEAD_DIM, num_kv_heads=num_kv_heads))
    store = KvStore(spec, num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, dtype=torch.float32, device=torch.device("cpu"))
    store._rows.normal_()
    together = ChunkAttention(store, spans)
    counts = [span.count for span in spans]
    for layer in (0, 1):
        query = torch.randn(sum(counts), HEADS, HEAD_DIM)
        key, value = torch.randn(2, sum(counts), num_kv_heads, HEAD_DIM)
        attended = together(layer, query, key, value).split(counts)
        parts = zip(spans, query.split(counts), key.split(counts), value.split(counts), attended, strict=True)
        for span, own_query, own_key, own_value, answer in parts:
            assert torch.equal(ChunkAttention(store, [span])(layer, own_query, own_key, own_value), answer)
            torch.testing.assert_close(answer, by_formula(store, layer, span, own_query), rtol=1e-5, atol=1e-5)


def by_formula(store: KvStore, layer: int, span: Span, query: torch.Tensor) -> torch.Tensor:
    """Row by row: softmax of the scores of all tokens up to its own, times their values."""
    slots = [span.blocks[at // SIZE] * SIZE + at % SIZE for at in range(span.end)]
    rows = []
    for row, position in enumerate(range(span.start, span.end)):
        keys, values = (
            part.repeat_interleave(HEADS // part.shape[1], 1) for part in store._rows[layer, :, slots[: position + 1]]
        )
        weights = torch.softmax(torch.einsum("hd,shd->hs", query[row], keys) / HEAD_DIM**0.5, dim=-1)
        rows.append(torch.einsum("hs,shd->hd", weights, values))
    return torch.stack(rows)


def test_what_was_never_written_is_never_read(tmp_path: Path) -> None:
    """Blocks come back from sequences that ended or failed, and hold anything."""
    engine = tiny_engine(tiny_checkpoint(tmp_path))
    wanted = [request(prompt(length, length), 12) for length in (2, 9, 50)]
    expected = [answer.token_ids for answer in ask(engine, *wanted)]
    engine.close()
    engine = tiny_engine(tmp_path)
    engine._runner._store._rows.fill_(float("nan"))  # type: ignore[attr-defined]
    assert [answer.token_ids for answer in ask(engine, *wanted)] == expected
    engine.close()


def test_kernels_may_lay_out_what_they_return_as_they_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash and memory-efficient kernels return heads interleaved, which a CPU's do not."""
    engine = tiny_engine(tiny_checkpoint(tmp_path), enable_kv_cache_reuse=False)
    wanted = [request(prompt(length, length), 12) for length in (2, 9, 50)]
    expected = [answer.token_ids for answer in ask(engine, *wanted)]
    kernel = F.scaled_dot_product_attention

    def interleaved(*positional: Any, **named: Any) -> torch.Tensor:
        return kernel(*positional, **named).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", interleaved)
    assert [answer.token_ids for answer in ask(engine, *wanted)] == expected
    engine.close()
