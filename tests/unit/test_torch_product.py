"""Products with weights packed to float16: near the exact ones, and the same whatever stands beside a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lr_backend.errors import ConfigError
from lr_backend.torch_engine import model as model_module
from lr_backend.torch_engine import product as product_module
from lr_backend.torch_engine.config import EngineConfig
from lr_backend.torch_engine.model import DecoderModel
from lr_backend.torch_engine.product import DenseProduct, HalfProduct, half_is_available, half_is_faster
from tests.support.torch_engines import greedy, prompt, tiny_checkpoint, tiny_engine

needs_half = pytest.mark.skipif(not half_is_available(), reason="this torch has no FBGEMM")


@needs_half
def test_half_products_round_weights_only() -> None:
    torch.manual_seed(0)
    weight, bias, rows, hidden = torch.randn(48, 32), torch.randn(48), torch.randn(9, 32), torch.randn(9, 48)
    rounded = DenseProduct(weight.half().float().t().contiguous(), bias)
    half = HalfProduct.pack(weight, bias)
    torch.testing.assert_close(half(rows), rounded(rows), rtol=1e-5, atol=1e-5)
    plain, packed = DenseProduct(weight.half().float().t().contiguous()), HalfProduct.pack(weight)
    ours, theirs = hidden.clone(), hidden.clone()
    packed.add_to(ours, rows)
    plain.add_to(theirs, rows)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_half
@pytest.mark.parametrize("num_rows", [2, 3, 8, 13, 40])
def test_a_rows_half_product_does_not_depend_on_its_batch(num_rows: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(num_rows, 96)
    product = HalfProduct.pack(torch.randn(80, 96))
    alone = torch.cat([product(row[None]) for row in rows])
    assert torch.equal(product(rows), alone)


@needs_half
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_half_weights_is_near_the_exact_one(tied: bool, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, gain=1.0, tie_word_embeddings=tied)
    exact, packed = (tiny_engine(tmp_path, weight_dtype=kind) for kind in ("same", "float16"))
    try:
        assert isinstance(packed.model.layers[0].qkv, HalfProduct)
        assert greedy(exact, prompt(20), 12) == greedy(packed, prompt(20), 12)
    finally:
        exact.close()
        packed.close()


@needs_half
def test_weights_beyond_float16_stay_as_they_are(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, gain=1e7)
    model = DecoderModel.load(tmp_path, dtype=torch.float32, device="cpu", max_seq_len=64, weight_dtype="float16")
    assert isinstance(model.layers[0].down, DenseProduct)


@needs_half
def test_a_bias_is_packed_with_its_weights() -> None:
    rows = torch.ones(1, 4)
    assert HalfProduct.pack(torch.zeros(3, 4), torch.tensor([1.0, 2.0, 3.0]))(rows).tolist() == [[1.0, 2.0, 3.0]]


def test_auto_takes_what_the_trial_found_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    asked: list[tuple[Any, ...]] = []

    def trial(*arguments: Any) -> bool:
        asked.append(arguments)
        return half_is_available() and len(asked) > 1

    monkeypatch.setattr(model_module, "half_is_faster", trial)
    kinds = []
    for _ in range(2):
        model = DecoderModel.load(tmp_path, dtype=torch.float32, device="cpu", max_seq_len=64, weight_dtype="auto", num_threads=1)
        kinds.append(type(model.layers[0].down))
    assert kinds == [DenseProduct, HalfProduct if half_is_available() else DenseProduct]
    assert asked[0] == ([(64, 32), (32, 32), (96, 32), (32, 48)], 2, 1)


@needs_half
@pytest.mark.parametrize(("dense_s", "half_s"), [(2.0, 1.0), (1.0, 2.0)])
def test_the_trial_compares_both_kinds_and_leaves_the_threads_alone(
    dense_s: float, half_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(products: list[Any], widths: list[int]) -> float:
        assert len(products) == len(widths) == 6
        return half_s if isinstance(products[0], HalfProduct) else dense_s

    before = torch.get_num_threads()
    monkeypatch.setattr(product_module, "_seconds", seconds)
    assert half_is_faster([(8, 4), (4, 8)], 3, before + 1) is (half_s < dense_s)
    assert torch.get_num_threads() == before


@needs_half
def test_the_trial_runs() -> None:
    assert half_is_faster([(64, 32)], 2, 1) in (True, False)


def test_without_the_kernel_half_weights_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(model_module, "half_is_available", lambda: False)
    with pytest.raises(ConfigError, match="FBGEMM"):
        DecoderModel.load(tmp_path, dtype=torch.float32, device="cpu", max_seq_len=64, weight_dtype="float16")


@pytest.mark.parametrize("changes", [{"weight_dtype": "int4"}, {"weight_dtype": "float16", "dtype": "bfloat16"}])
def test_half_weights_that_cannot_be_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="weight_dtype"):
        EngineConfig(Path("any"), **changes)
