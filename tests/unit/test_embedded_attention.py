"""Decoding sequences that share the first blocks of their prefix attend over them once, with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.embedded.reference.attention import MIN_SHARED_TOKENS, DecodeGroup, Run, runs_of
from lr_backend.embedded.reference.decode_window import DecodeRow, DecodeWindow
from lr_backend.embedded.reference.kv_store import KvStore
from tests.support.embedded_engines import ask, prompt, request, tiny_checkpoint, tiny_engine

SIZE = 8
BRANCHES = (
    DecodeRow(1, 83, (*range(9), 20, 21)),
    DecodeRow(2, 84, (*range(9), 30, 31)),
    DecodeRow(3, 97, (*range(10), 40, 41, 42)),
)
STRANGER = DecodeRow(4, 70, tuple(range(50, 59)))


def test_branches_of_one_answer_are_one_run() -> None:
    assert runs_of(BRANCHES, SIZE) == [Run(0, 3, 72)]


def test_strangers_attend_together_and_alone_between_runs() -> None:
    rows = (STRANGER, DecodeRow(5, 9, (60, 61)), *BRANCHES, DecodeRow(6, 3, (70,)))
    assert runs_of(rows, SIZE) == [Run(0, 2, 0), Run(2, 3, 72), Run(5, 1, 0)]


def test_a_short_common_prefix_is_not_worth_a_run() -> None:
    short = MIN_SHARED_TOKENS // SIZE - 1
    rows = [DecodeRow(key, 200, (*range(short), *range(100 * key, 100 * key + 30))) for key in (1, 2)]
    assert runs_of(rows, SIZE) == [Run(0, 2, 0)]


def test_a_long_shared_prefix_is_not_given_up_for_one_who_shares_little() -> None:
    rows = [DecodeRow(key, 400, (*range(40), 100 + key, *range(50, 60))) for key in (1, 2)]
    rows.append(DecodeRow(3, 400, (*range(9), *range(200, 242))))
    assert runs_of(rows, SIZE) == [Run(0, 2, 320), Run(2, 1, 0)]


@st.composite
def any_rows(draw: st.DrawFn) -> list[DecodeRow]:
    rows = []
    for key in range(draw(st.integers(1, 7))):
        shared = draw(st.integers(0, 20))
        blocks = (*range(shared), *range(1000 * (key + 1), 1000 * (key + 1) + 8))
        rows.append(DecodeRow(key, draw(st.integers(0, len(blocks) * SIZE - 1)), blocks))
    return rows


@given(any_rows())
def test_runs_cover_the_rows_and_share_only_equal_full_blocks(rows: list[DecodeRow]) -> None:
    runs = runs_of(rows, SIZE)
    assert [place for run in runs for place in range(run.first, run.first + run.count)] == list(range(len(rows)))
    for run in runs:
        members = rows[run.first : run.first + run.count]
        assert run.shared == 0 or run.shared >= MIN_SHARED_TOKENS
        assert run.shared % SIZE == 0 and all(run.shared <= row.length for row in members)
        assert len({tuple(row.blocks[: run.shared // SIZE]) for row in members}) == 1 or not run.shared


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [BRANCHES, (STRANGER, *BRANCHES), BRANCHES[:2], (STRANGER,)])
def test_decodes_equal_attention_over_each_whole_sequence(rows: tuple[DecodeRow, ...], num_kv_heads: int) -> None:
    torch.manual_seed(1)
    num_heads, head_dim, device = 4, 16, torch.device("cpu")
    store = KvStore(
        num_layers=2,
        num_blocks=64,
        tokens_per_block=SIZE,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=device,
    )
    store.rows.normal_()
    window = DecodeWindow(store, max_tokens=4096)
    order = window.arrange(rows)
    assert order == list(range(len(rows)))
    group = DecodeGroup(store, window, rows)
    for layer in (0, 1):
        query = torch.randn(len(rows), num_heads * head_dim)
        key_value = torch.randn(len(rows), store.width)
        attended = group.attend(layer, query, key_value)
        for row, one, new, answer in zip(rows, query, key_value, attended, strict=True):
            slots = [row.blocks[at // SIZE] * SIZE + at % SIZE for at in range(row.length)]
            whole = torch.cat([store.rows[layer, slots], new[None]])
            keys, values = (part.repeat_interleave(num_heads // num_kv_heads, 0) for part in store.split_heads(whole))
            expected = F.scaled_dot_product_attention(one.view(num_heads, 1, head_dim), keys, values)
            torch.testing.assert_close(answer, expected.flatten(), rtol=1e-5, atol=1e-5)


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
