"""Products with packed weights: near the exact ones, and the same whatever stands beside a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.reference import model as model_module
from lr_backend.embedded.reference import product as product_module
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.product import (
    PACKERS,
    ByteProduct,
    DenseProduct,
    HalfProduct,
    Product,
    available_packers,
    fastest_kind,
    is_available,
)
from lr_backend.errors import ConfigError
from tests.support.embedded_engines import ask, greedy, prompt, request, tiny_checkpoint, tiny_engine

needs_half = pytest.mark.skipif(not is_available("float16"), reason="this torch has no float16 kernel for this CPU")
needs_byte = pytest.mark.skipif(not is_available("int8"), reason="this torch has no int8 kernel for this CPU")
packed_kinds = pytest.mark.parametrize(
    "kind", [pytest.param("float16", marks=needs_half), pytest.param("int8", marks=needs_byte)]
)
LARGEST_ERROR = {"float16": 1e-3, "int8": 0.02}


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


@packed_kinds
def test_packed_products_are_near_the_exact_ones(kind: str) -> None:
    torch.manual_seed(0)
    weight, bias, rows, hidden = torch.randn(48, 320), torch.randn(48), torch.randn(9, 320), torch.randn(9, 48)
    exact, packed = DenseProduct.pack(weight, bias), PACKERS[kind](weight, bias)

    assert relative_error(packed(rows) - bias, exact(rows) - bias) < LARGEST_ERROR[kind]

    ours, theirs = hidden.clone(), hidden.clone()
    PACKERS[kind](weight, None).add_to(ours, rows)
    DenseProduct.pack(weight).add_to(theirs, rows)
    assert relative_error(ours - hidden, theirs - hidden) < LARGEST_ERROR[kind]


@needs_half
def test_half_products_round_weights_only() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(48, 32), torch.randn(9, 32)
    rounded = DenseProduct.pack(weight.half().float())
    torch.testing.assert_close(HalfProduct.pack(weight)(rows), rounded(rows), rtol=1e-5, atol=1e-5)


@needs_byte
def test_byte_products_round_weights_by_output_and_rows_by_their_largest_entry() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(48, 32), torch.randn(9, 32)
    sizes = torch.tensor([1e-6, 1.0, 1e6]).repeat(16)
    product = ByteProduct.pack(weight * sizes[:, None])
    rounded = (weight / weight.abs().amax(1, keepdim=True) * 127).round() * weight.abs().amax(1, keepdim=True) / 127
    steps = (rows / rows.abs().amax(1, keepdim=True) * 127).round() * rows.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(product(rows) / sizes, steps @ rounded.t(), rtol=1e-4, atol=1e-4)


@packed_kinds
@pytest.mark.parametrize("num_rows", [2, 3, 8, 13, 40])
def test_a_rows_packed_product_does_not_depend_on_its_batch(kind: str, num_rows: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(num_rows, 96) * torch.logspace(-3, 3, num_rows)[:, None]
    product = PACKERS[kind](torch.randn(80, 96), torch.randn(80))
    alone = torch.cat([product(row[None]) for row in rows])
    if kind == "float16" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        torch.testing.assert_close(product(rows), alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))
    else:
        assert torch.equal(product(rows), alone)


@needs_byte
def test_zeros_are_zeros_and_what_is_not_finite_stays_so() -> None:
    weight = torch.randn(8, 16)
    weight[3] = 0.0
    rows = torch.stack([torch.zeros(16), torch.full((16,), float("nan")), torch.ones(16)])
    product = ByteProduct.pack(weight)(rows)
    assert torch.equal(product[0], torch.zeros(8))
    assert not product[1].isfinite().any()
    assert product[2, 3] == 0.0
    assert product[2].isfinite().all()


@needs_half
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_half_weights_is_near_the_exact_one(tied: bool, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, gain=1.0, tie_word_embeddings=tied)
    exact, packed = (tiny_engine(tmp_path, weight_dtype=kind) for kind in ("same", "float16"))
    try:
        assert isinstance(packed._runner.model.layers[0].qkv, HalfProduct)
        assert greedy(exact, prompt(20), 12) == greedy(packed, prompt(20), 12)
    finally:
        exact.close()
        packed.close()


@needs_byte
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_a_model_with_byte_weights_answers_the_same_alone_batched_and_verified(architecture: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, gain=1.0, architecture=architecture)
    engine = tiny_engine(tmp_path, weight_dtype="int8")
    try:
        assert isinstance(engine._runner.model.layers[0].qkv, ByteProduct)
        assert not isinstance(engine._runner.model.head, ByteProduct)
        plain = greedy(engine, prompt(20), 12)
        batched = ask(engine, *(request(prompt(20 + length, length), 12) for length in (0, 3, 9)))[0].token_ids
        verified = ask(engine, request(prompt(20), 9, draft_ids=plain[:8]))[0]
        assert batched == plain
        assert (verified.token_ids, verified.num_accepted_tokens) == (plain[:9], 8)
    finally:
        engine.close()


@needs_half
def test_weights_beyond_float16_stay_as_they_are(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, gain=1e7)
    model = DecoderModel.load(tmp_path, dtype=torch.float32, device="cpu", max_seq_len=64, weight_dtype="float16")
    assert isinstance(model.layers[0].down, DenseProduct)


@needs_half
def test_a_bias_is_packed_with_its_weights() -> None:
    rows = torch.ones(1, 4)
    assert HalfProduct.pack(torch.zeros(3, 4), torch.tensor([1.0, 2.0, 3.0]))(rows).tolist() == [[1.0, 2.0, 3.0]]


def test_auto_takes_what_the_trial_found_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    asked: list[tuple[Any, ...]] = []
    kinds = [kind for kind in PACKERS if is_available(kind)]

    def trial(*arguments: Any) -> str:
        asked.append(arguments)
        return kinds[len(asked) - 1]

    monkeypatch.setattr(model_module, "fastest_kind", trial)
    taken = []
    for _ in kinds:
        model = DecoderModel.load(tmp_path, dtype=torch.float32, device="cpu", max_seq_len=64, weight_dtype="auto", num_threads=1)
        taken.append(type(model.layers[0].down))
    classes = {"same": DenseProduct, "float16": HalfProduct, "int8": ByteProduct}
    assert taken == [classes[kind] for kind in kinds]
    packers, *trial_of = asked[0]
    assert list(packers) == kinds
    assert trial_of == [[(64, 32), (32, 32), (96, 32), (32, 48)], 2, 1]


@needs_half
@needs_byte
@pytest.mark.parametrize(
    ("same_s", "half_s", "byte_s", "fastest"),
    [(2.0, 1.0, 1.5, "float16"), (1.0, 2.0, 0.9, "same"), (2.0, 1.0, 0.7, "int8")],
)
def test_the_trial_takes_int8_only_where_that_pays(
    same_s: float, half_s: float, byte_s: float, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(products: list[Product], widths: list[int]) -> float:
        assert len(products) == len(widths) == 6
        return {DenseProduct: same_s, HalfProduct: half_s, ByteProduct: byte_s}[type(products[0])]

    before = torch.get_num_threads()
    monkeypatch.setattr(product_module, "_seconds", seconds)
    assert fastest_kind(available_packers(), [(8, 4), (4, 8)], 3, before + 1) == fastest
    assert torch.get_num_threads() == before


def test_the_trial_runs() -> None:
    assert fastest_kind(available_packers(), [(64, 32)], 2, 1) in PACKERS


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_without_the_kernel_packed_weights_are_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(model_module, "is_available", lambda kind: False)
    with pytest.raises(ConfigError, match=kind):
        DecoderModel.load(tmp_path, dtype=torch.float32, device="cpu", max_seq_len=64, weight_dtype=kind)


@needs_byte
def test_a_kernel_that_saturates_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturated(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return DenseProduct.pack(weight * 0.9, bias)

    monkeypatch.setattr(product_module, "PACKERS", {**PACKERS, "int8": saturated})
    assert not is_available.__wrapped__("int8")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_dtype": "int4"},
        {"weight_dtype": "float16", "dtype": "bfloat16"},
        {"weight_dtype": "int8", "dtype": "bfloat16"},
        {"weight_dtype": "int8", "device": "cuda"},
    ],
)
def test_packed_weights_that_cannot_be_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="weight_dtype"):
        EngineConfig(Path("any"), **changes)
