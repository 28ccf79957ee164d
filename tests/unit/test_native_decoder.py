"""The decoder in C: logits of transformers, to the same bit in whatever company, and who gets to compute what."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lr_backend.embedded import backends, sampler
from lr_backend.embedded.backends import is_native
from lr_backend.embedded.checkpoint import read_spec
from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.native import library as native_library
from lr_backend.embedded.native import model as native_model
from lr_backend.embedded.native import trial
from lr_backend.embedded.native import weights as native_weights
from lr_backend.embedded.native.library import library
from lr_backend.embedded.native.model import NativeModel, NativePool
from lr_backend.embedded.native.runner import NativeRunner
from lr_backend.embedded.native.weights import Format, NativeProduct, Weights, bytes_are_fast, pairs_are_fast
from lr_backend.embedded.reference.runner import ReferenceRunner
from lr_backend.embedded.runner import Span
from lr_backend.errors import ConfigError
from tests.support.embedded_engines import NEEDS_LIBRARY, greedy, prompt, tiny_checkpoint, tiny_engine
from tests.support.reference_models import logits_of_reference, reference_model

pytestmark = NEEDS_LIBRARY

DEMO_TARGET = Path(__file__).parents[2] / "demo" / "checkpoints" / "target"
NUM_BLOCKS = 80
MAX_SEQ_LEN = 256


@dataclass
class Stored:
    """A sequence in a pool."""

    tokens: tuple[int, ...]
    blocks: list[int]
    num_computed: int = 0


def advance(model: NativeModel, pool: NativePool, chunks: list[tuple[Stored, int]]) -> list[torch.Tensor]:
    """Logits of all rows of each chunk: so many further tokens of its sequence."""
    size = pool.tokens_per_block
    spans = [Span(one.num_computed, count, one.blocks[: -(-(one.num_computed + count) // size)]) for one, count in chunks]
    tokens = [token for (one, _), span in zip(chunks, spans, strict=True) for token in one.tokens[span.start : span.end]]
    logits = model.forward(pool, tokens, spans, [span.count for span in spans])
    for (one, _), span in zip(chunks, spans, strict=True):
        one.num_computed = span.end
    return list(logits.split([count for _, count in chunks]))


def new_pool(model: NativeModel, tokens_per_block: int) -> NativePool:
    """Every number that no token has been stored in is not one, and must not show."""
    pool = NativePool(model.spec, num_blocks=NUM_BLOCKS, tokens_per_block=tokens_per_block)
    pool._memory.fill_(float("nan"))
    return pool


def logits_of(model: NativeModel, tokens: tuple[int, ...], counts: list[int], tokens_per_block: int) -> torch.Tensor:
    """Logits of all positions, computed in chunks of these sizes, in blocks that lie in no order."""
    pool = new_pool(model, tokens_per_block)
    one = Stored(tokens, [number * 7 % NUM_BLOCKS for number in range(-(-len(tokens) // tokens_per_block))])
    return torch.cat([advance(model, pool, [(one, count)])[0] for count in counts])


# Against transformers

VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    # Of each: family, tokens per block, what differs. Attention takes 16 or 32 keys at a time, and heads in parts of 64.
    "qwen3": ("qwen3", 4, {}),
    "qwen3 tied": ("qwen3", 16, {"tie_word_embeddings": True, "vocab_size": 80}),
    "qwen3 one kv head": ("qwen3", 32, {"head_dim": 32, "num_key_value_heads": 1, "intermediate_size": 40}),
    "qwen3 no gqa": ("qwen3", 48, {"head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 17}),
    "qwen3 yarn": ("qwen3", 32, {"rope": "yarn", "intermediate_size": 90}),
    "qwen3 heads of 64": ("qwen3", 32, {"head_dim": 64, "vocab_size": 97}),
    "qwen3 heads of 64, blocks of 48": ("qwen3", 48, {"head_dim": 64, "num_key_value_heads": 1}),
    "qwen3 heads of 80": ("qwen3", 32, {"head_dim": 80, "hidden_size": 48}),
    "qwen3 heads of 128": ("qwen3", 32, {"head_dim": 128}),
    "qwen3 heads of 128, blocks of 4": ("qwen3", 4, {"head_dim": 128, "vocab_size": 33}),
    "qwen3 blocks of 20": ("qwen3", 20, {}),
    "qwen2": ("qwen2", 32, {"vocab_size": 97, "intermediate_size": 40}),
    "qwen2 tied": ("qwen2", 16, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2 yarn, own factor": ("qwen2", 4, {"rope": "yarn, own factor"}),
    "llama": ("llama", 48, {"hidden_size": 128}),
    "llama3 rope": ("llama", 16, {"rope": "llama3", "head_dim": 64}),
    "llama linear rope": ("llama", 32, {"rope": "linear", "tie_word_embeddings": True}),
}
COUNTS = [50, 1, 1, 20, 48]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, tokens_per_block, changes = VARIANTS[name]
    reference = reference_model(family, **changes)
    reference.save_pretrained(tmp_path)
    tokens = tuple(token % changes.get("vocab_size", 61) for token in prompt(sum(COUNTS)))
    expected = logits_of_reference(reference, tokens)

    model = NativeModel.load(tmp_path, max_seq_len=sum(COUNTS))

    assert expected.std() > 0.5
    assert (logits_of(model, tokens, COUNTS, tokens_per_block) - expected).abs().max() < 1e-4


def test_gates_that_are_shut_far_let_nothing_through(tmp_path: Path) -> None:
    """e to their negative leaves float32; they are then zero, as they are in the limit."""
    reference = reference_model("qwen3")
    gates: list[torch.Tensor] = []
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.mlp.gate_proj.weight.mul_(60.0)
            layer.mlp.gate_proj.register_forward_hook(lambda module, inputs, output: gates.append(output.flatten()))
    reference.save_pretrained(tmp_path)
    tokens = prompt(60)
    expected = logits_of_reference(reference, tokens)

    ours = logits_of(NativeModel.load(tmp_path, max_seq_len=60), tokens, [60], 16)

    depths = torch.cat(gates)
    assert ((depths < -89) & (depths > -177)).sum() > 100
    assert (depths < -200).any()
    assert (ours - expected).abs().max() < 1e-3


# Weights


def rounded(reference: Any, dtype: torch.dtype) -> Any:
    """The same model in float32, with weights that are numbers of ``dtype``."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))
    return reference


def formats_of(model: NativeModel) -> set[Format]:
    layers = (native_model._Layer * model.spec.num_layers).from_address(model._model.layers)
    matrices = [matrix for layer in layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return {Format(matrix.format) for matrix in (*matrices, model._model.head)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_bfloat16_checkpoints_are_kept_as_they_are_and_lose_nothing(
    family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = rounded(reference_model(family, tie_word_embeddings=tied), torch.bfloat16)
    deepcopy(reference).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    reference.save_pretrained(tmp_path / "float")
    tokens = prompt(60)
    expected = logits_of_reference(reference, tokens)
    half, same_values = (NativeModel.load(tmp_path / name, max_seq_len=60) for name in ("half", "float"))
    monkeypatch.setattr(native_weights, "_is_bfloat16", lambda weight: False)
    widened = NativeModel.load(tmp_path / "half", max_seq_len=60)

    logits = logits_of(half, tokens, [40, 1, 19], 16)

    assert formats_of(half) == formats_of(same_values) == {Format.BFLOAT16}
    assert formats_of(widened) == {Format.FLOAT32}
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits, logits_of(same_values, tokens, [40, 1, 19], 16))
    assert torch.equal(logits, logits_of(widened, tokens, [40, 1, 19], 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_bfloat16_would_round_are_kept_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = rounded(reference_model("qwen3"), dtype)
    deepcopy(reference).to(dtype).save_pretrained(tmp_path)
    expected = logits_of_reference(reference, prompt(40))

    model = NativeModel.load(tmp_path, max_seq_len=40)

    assert formats_of(model) == {Format.FLOAT32}
    assert (logits_of(model, prompt(40), [40], 16) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(33, 17), (1, 1), (64, 128), (100, 90)])
def test_heads_beside_bytes_are_kept_in_float16(num_outputs: int, num_inputs: int) -> None:
    """Subnormal numbers of float16 among them."""
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    weight[: num_outputs // 2] *= 2.0**-15
    rows = torch.randn(13, num_inputs, generator=generator)
    weights = Weights("int8")
    matrix = weights.matrix([weight], in_bytes=False)

    product = NativeProduct(weights, matrix)

    assert matrix.format == Format.FLOAT16
    expected = rows.double() @ weight.half().double().T
    for count in (1, 2, 5, 13):
        torch.testing.assert_close(product(rows[:count]).double(), expected[:count], rtol=1e-4, atol=1e-9 * num_inputs)


def test_weights_out_of_the_range_of_float16_are_not_rounded() -> None:
    weight = torch.randn(40, 20)
    weight[0, 0] = 70001.0

    assert Weights("int8").matrix([weight], in_bytes=False).format == Format.FLOAT32


# In eight bits


def as_bytes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers of at most 127 for the rows of ``values``, and what 1 stands for in each [rows, 1]."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scales).round().double(), scales.double()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(33, 17), (1, 1), (64, 128), (100, 90), (32, 3000)])
def test_products_of_bytes_are_those_of_rounded_rows_and_weights(num_outputs: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    rows = torch.randn(30, num_inputs, generator=generator) * torch.logspace(-3, 3, 30).unsqueeze(1)
    rows[7] = 0.0
    bias = torch.randn(num_outputs, generator=generator)
    (whole_rows, row_scales), (whole_weight, weight_scales) = as_bytes(rows), as_bytes(weight)
    expected = (whole_rows @ whole_weight.T) * row_scales * weight_scales.T + bias

    product = NativeProduct.pack("int8", weight, bias)

    for count in (1, 2, 5, 6, 11, 12, 13, 30):
        torch.testing.assert_close(product(rows[:count]).double(), expected[:count], rtol=1e-5, atol=1e-6 * num_inputs)
    assert torch.equal(torch.cat([product(rows[at : at + 1]) for at in range(30)]), product(rows))


def test_sums_of_bytes_hold_the_largest_there_are() -> None:
    weight = torch.ones(32, 16384)
    weight[1] = -1.0

    product = NativeProduct.pack("int8", weight)(torch.ones(1, 16384))

    torch.testing.assert_close(product[0, :2], torch.tensor([16384.0, -16384.0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_stay_so_in_bytes(bad: float) -> None:
    rows = torch.ones(2, 40)
    rows[1, 33] = bad

    product = NativeProduct.pack("int8", torch.ones(8, 40))(rows)

    assert torch.isfinite(product[0]).all()
    assert not torch.isfinite(product[1]).any()


# In bfloat16, rows and all


def nearest_halves(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(33, 17), (1, 1), (64, 128), (100, 90), (32, 900)])
def test_products_of_halves_add_the_odd_input_first(num_outputs: int, num_inputs: int) -> None:
    """To the bit: a product of two such numbers is exact, and each sum is rounded once."""
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    rows = torch.randn(30, num_inputs, generator=generator) * torch.logspace(-3, 3, 30).unsqueeze(1)
    bias = torch.randn(num_outputs, generator=generator)
    expected = torch.zeros(30, num_outputs)
    halves, half_weight = nearest_halves(rows), nearest_halves(weight)
    for even in range(0, num_inputs, 2):
        for at in (even + 1, even):
            if at < num_inputs:
                expected += halves[:, at : at + 1] * half_weight[:, at]

    product = NativeProduct.pack("bfloat16", weight, bias)

    assert torch.equal(product(rows), expected + bias)
    for count in (1, 2, 5, 11, 12, 13, 25):
        assert torch.equal(product(rows[:count]), expected[:count] + bias)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_processors_with_and_without_instructions_for_halves_agree(num_pairs: int, num_rows: int, seed: int) -> None:
    opened = library()
    assert opened is not None
    generator = torch.Generator().manual_seed(seed)
    panel = torch.randn(num_pairs, 32, 2, generator=generator).bfloat16()
    rows = (torch.randn(num_rows, num_pairs + 7, 2, generator=generator) * 1e3).bfloat16()
    sums = torch.full((2, num_rows, 32), float("nan"))

    for path, products in enumerate((opened.pair_products, opened.portable_pair_products)):
        pointers = (ctypes.c_void_p(panel.data_ptr()), ctypes.c_int64(num_pairs), ctypes.c_void_p(rows.data_ptr()))
        sizes = (ctypes.c_int64(2 * (num_pairs + 7)), ctypes.c_int64(num_rows))
        products(*pointers, *sizes, ctypes.c_void_p(sums[path].data_ptr()))

    assert torch.equal(sums[0], sums[1])
    assert torch.isfinite(sums).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_stay_so_in_halves(bad: float) -> None:
    rows = torch.ones(2, 40)
    rows[1, 33] = bad
    rows.view(torch.int32)[1, 7] |= 0x7FFF  # of an ordinary number all lower bits

    product = NativeProduct.pack("bfloat16", torch.ones(8, 40))(rows)

    assert torch.isfinite(product[0]).all()
    assert not torch.isfinite(product[1]).any()


@pytest.mark.parametrize(
    ("kind", "formats", "largest_error"),
    [("int8", {Format.INT8, Format.FLOAT16}, 0.05), ("bfloat16", {Format.PAIRS}, 0.02)],
    ids=["int8", "bfloat16"],
)
@pytest.mark.parametrize("name", ["qwen3 tied", "qwen2", "qwen3 no gqa", "llama"])
def test_a_model_of_rounded_rows_is_near_the_one_it_was_made_of(
    name: str, kind: str, formats: set[Format], largest_error: float, tmp_path: Path
) -> None:
    family, tokens_per_block, changes = VARIANTS[name]
    reference = reference_model(family, **changes)
    reference.save_pretrained(tmp_path)
    tokens = tuple(token % changes.get("vocab_size", 61) for token in prompt(sum(COUNTS)))
    expected = logits_of_reference(reference, tokens)

    model = NativeModel.load(tmp_path, max_seq_len=sum(COUNTS), kind=kind)
    logits = logits_of(model, tokens, COUNTS, tokens_per_block)

    assert formats_of(model) == formats
    assert 0 < (logits - expected).std() < largest_error * expected.std()


# To the same bit

SHAPES: dict[int, dict[str, Any]] = {
    4: {"head_dim": 16},
    16: {"head_dim": 64, "num_kv_heads": 1, "tie_word_embeddings": True},
    32: {"head_dim": 128, "architecture": "LlamaForCausalLM"},
    48: {"head_dim": 64, "architecture": "Qwen2ForCausalLM"},
}
"""By tokens per block."""
LENGTHS = (3, 45, 70, 66, 90)
NUM_SHARED = 48
"""Tokens that the last three sequences have in common; they hold them in the same blocks."""
SEQUENCES = [prompt(length, seed) for seed, length in enumerate(LENGTHS[:2])]
SEQUENCES += [prompt(NUM_SHARED, 9) + prompt(length - NUM_SHARED, length) for length in LENGTHS[2:]]

SCHEDULES = st.lists(
    # Of an iteration: how many tokens of which sequences, in what order.
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=5, unique_by=lambda chunk: chunk[0]),
    max_size=8,
)


@dataclass
class Case:
    models: Mapping[int, NativeModel]
    """By number of threads; all of one kind of weights."""
    tokens_per_block: int
    alone: list[torch.Tensor]
    """Logits of all positions of each sequence, computed alone and at once."""


@pytest.fixture(
    scope="module",
    params=[*((size, "same") for size in SHAPES), (16, "int8"), (48, "int8"), (32, "bfloat16"), (48, "bfloat16")],
    ids=str,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    size, kind = request.param
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **{"intermediate_size": 40} | SHAPES[size])
    models = {count: NativeModel.load(folder, max_seq_len=MAX_SEQ_LEN, num_threads=count, kind=kind) for count in (1, 2, 3)}
    alone = [logits_of(models[1], tokens, [len(tokens)], size) for tokens in SEQUENCES]
    return Case(models, size, alone)


class Replay:
    """All sequences of a case in one pool, advanced together; each row must be what it is alone."""

    def __init__(self, case: Case, num_threads: int = 1) -> None:
        self._case, self._model = case, case.models[num_threads]
        size = case.tokens_per_block
        self._pool = new_pool(self._model, size)
        free = [number * 7 % NUM_BLOCKS for number in range(NUM_BLOCKS)]
        self.num_shared = NUM_SHARED // size * size
        shared = [free.pop() for _ in range(self.num_shared // size)]
        self._stored = []
        for number, tokens in enumerate(SEQUENCES):
            blocks = list(shared) if number >= 2 else []
            blocks += [free.pop() for _ in range(-(-len(tokens) // size) - len(blocks))]
            self._stored.append(Stored(tokens, blocks, self.num_shared if number >= 2 else 0))
        self._stored[2].num_computed = 0  # the one that computes what the last three share

    def run(self, iteration: list[tuple[int, int]]) -> None:
        """Up to so many further tokens of these sequences."""
        chunks = [(self._stored[number], min(count, self._left(number)), number) for number, count in iteration]
        chunks = [chunk for chunk in chunks if chunk[1]]
        starts = [one.num_computed for one, _, _ in chunks]
        if chunks:
            parts = advance(self._model, self._pool, [(one, count) for one, count, _ in chunks])
            for (_, count, number), start, logits in zip(chunks, starts, parts, strict=True):
                assert torch.equal(logits, self._case.alone[number][start : start + count])

    def finish(self) -> None:
        self.run([(number, self._left(number)) for number in range(len(SEQUENCES))])

    def _left(self, number: int) -> int:
        return len(SEQUENCES[number]) - self._stored[number].num_computed


def test_logits_depend_neither_on_chunks_nor_on_companions(case: Case) -> None:
    @settings(max_examples=30)
    @given(cut=st.integers(0, NUM_SHARED), schedule=SCHEDULES)
    def check(cut: int, schedule: list[list[tuple[int, int]]]) -> None:
        replay = Replay(case)
        cut = min(cut, replay.num_shared)
        replay.run([(2, cut)])
        replay.run([(2, replay.num_shared - cut)])
        for iteration in schedule:
            replay.run(iteration)
        replay.finish()

    check()


@pytest.mark.parametrize("num_threads", [2, 3])
def test_logits_do_not_depend_on_threads(num_threads: int, case: Case) -> None:
    """Of one row, of fewer and of more than there are threads, and of more than are computed at once."""
    replay = Replay(case, num_threads)
    replay.run([(2, replay.num_shared)])
    replay.run([(0, 1)])
    replay.run([(0, 1), (3, 1)])
    replay.run([(1, 2), (2, 5), (3, 1), (4, 7)])
    replay.finish()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_logits", [(0, 0, 0), (1, 0, 4), (0, 30, 1), (20, 30, 40)], ids=str)
def test_rows_of_which_no_logits_are_asked_change_none(num_logits: tuple[int, ...], num_threads: int, case: Case) -> None:
    """As with prompts beside each other: of some chunks nothing is asked, of others the last row or a verification's."""
    model, size = case.models[num_threads], case.tokens_per_block
    pool, counts = new_pool(model, size), (20, 30, 40)
    tokens, places = SEQUENCES[4], [list(range(23 * number, 23 * number + 23)) for number in range(3)]

    spans = [Span(0, count, blocks) for count, blocks in zip(counts, places, strict=True)]
    asked = model.forward(pool, [token for count in counts for token in tokens[:count]], spans, list(num_logits))
    spans = [Span(count, 90 - count, blocks) for count, blocks in zip(counts, places, strict=True)]
    rest = model.forward(pool, [token for count in counts for token in tokens[count:]], spans, [1, 4, 50])

    alone = case.alone[4]
    assert torch.equal(
        asked, torch.cat([alone[count - wanted : count] for count, wanted in zip(counts, num_logits, strict=True)])
    )
    assert torch.equal(rest, torch.cat([alone[-1:], alone[-4:], alone[-50:]]))


def test_a_copied_prefix_is_as_good_as_the_original(case: Case) -> None:
    model, size = case.models[1], case.tokens_per_block
    pool = new_pool(model, size)
    whole = Stored(SEQUENCES[4], list(range(30)))
    advance(model, pool, [(whole, 50)])
    last, kept = 50 // size, 50 % size
    assert kept

    model.copy_prefix(pool, whole.blocks[last], NUM_BLOCKS - 1, kept)
    copy = Stored(SEQUENCES[4], [*range(last), NUM_BLOCKS - 1, *range(40, 60)], 50)

    for one in (copy, whole):  # the copy first: what it stores must not reach the original
        assert torch.equal(advance(model, pool, [(one, 40)])[0], case.alone[4][50:])
    # Nothing beyond the prefix was copied, in any layer.
    untouched = NativePool(model.spec, num_blocks=2, tokens_per_block=size)
    untouched._memory[:, 0] = 1.0
    model.copy_prefix(untouched, 0, 1, kept)
    assert untouched._memory[:, 1].sum() == untouched._memory[:, 0].numel() * kept / untouched.struct.num_slots


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_is_not_passed_over(case: Case, bad: float) -> None:
    """Else an answer would go on, with a token that attention does not see."""
    model, size = case.models[1], case.tokens_per_block
    pool = new_pool(model, size)
    whole = Stored(SEQUENCES[4], list(range(30)))
    advance(model, pool, [(whole, 50)])
    keys = pool._memory[0, 0].reshape(model.spec.num_kv_heads, 2, -1)[:, 0]
    keys.reshape(model.spec.num_kv_heads, model.spec.head_dim, -1)[:, :, 1] = bad

    assert not torch.isfinite(advance(model, pool, [(whole, 1)])[0]).any()


def test_cleared_blocks_are_zero_and_others_are_left(case: Case) -> None:
    pool = new_pool(case.models[1], case.tokens_per_block)

    pool.clear([3, 5])
    cleared = [not pool._memory[:, block].any() for block in range(NUM_BLOCKS)]
    left = [bool(pool._memory[:, block].isnan().all()) for block in range(NUM_BLOCKS)]
    assert [block for block in range(NUM_BLOCKS) if cleared[block]] == [3, 5]
    assert [block for block in range(NUM_BLOCKS) if not left[block]] == [3, 5]
    pool.reset()
    assert not pool._memory.any()


# Who computes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("fits"), head_dim=16)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there was no C compiler."""
    monkeypatch.setattr(native_model, "open_library", lambda: "not built when the package was installed")
    for module in (native_model, sampler):
        monkeypatch.setattr(module, "library", lambda: None)


def test_small_models_on_a_cpu_are_computed_in_c(checkpoint: Path) -> None:
    for folder in (DEMO_TARGET, checkpoint):
        assert is_native(EngineConfig(folder))
        assert is_native(EngineConfig(folder, weight_dtype="auto"))
        assert not is_native(EngineConfig(folder, kernels="reference"))


FOR_THE_REFERENCE: list[dict[str, Any]] = [
    {"device": "cuda"},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("setting", FOR_THE_REFERENCE, ids=str)
def test_settings_of_the_reference_alone_are_left_to_it_and_refused_in_c(setting: dict[str, Any], checkpoint: Path) -> None:
    assert not is_native(EngineConfig(checkpoint, **setting))
    with pytest.raises(ConfigError, match="kernels='native': only with device cpu and dtype float32"):
        EngineConfig(checkpoint, kernels="native", **setting)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rounded_weights_are_refused_by_name_where_c_cannot_compute(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    for setting in ({"kernels": "reference"}, {"random_weights": True}, *FOR_THE_REFERENCE):
        with pytest.raises(ConfigError, match=f"weight_dtype='{kind}': only the native kernels hold weights so"):
            EngineConfig(checkpoint, weight_dtype=kind, **setting)
    assert is_native(EngineConfig(checkpoint, weight_dtype=kind))
    with pytest.raises(ConfigError, match=f"weight_dtype='{kind}': only the native kernels hold weights so: .* multiples of 16"):
        tiny_engine(tiny_checkpoint(tmp_path, head_dim=8), weight_dtype=kind)


def test_the_reference_computes_with_weights_as_they_are(checkpoint: Path) -> None:
    engines = [tiny_engine(checkpoint, kernels="reference", weight_dtype=kind) for kind in ("same", "auto")]
    try:
        assert greedy(engines[0], prompt(20), 12) == greedy(engines[1], prompt(20), 12)
    finally:
        for engine in engines:
            engine.close()


def test_auto_takes_what_the_trial_found_fastest(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, formats in (("same", {Format.FLOAT32}), ("bfloat16", {Format.PAIRS}), ("int8", {Format.INT8, Format.FLOAT16})):
        monkeypatch.setattr(backends, "fastest_kind", lambda spec, kind=kind: kind)
        engine = tiny_engine(checkpoint, weight_dtype="auto")
        assert isinstance(engine._runner, NativeRunner)
        assert formats_of(engine._runner._model) == formats
        engine.close()


@pytest.mark.parametrize(
    ("same_s", "half_s", "byte_s", "fastest"),
    [(2.0, 1.0, 1.5, "bfloat16"), (1.0, 2.0, 0.9, "same"), (2.0, 1.0, 0.7, "int8")],
)
def test_the_trial_takes_int8_only_where_that_pays(
    same_s: float, half_s: float, byte_s: float, fastest: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(products: list[NativeProduct], widths: list[int]) -> float:
        assert len(products) == len(widths) == 8
        return {Format.BFLOAT16: same_s, Format.PAIRS: half_s, Format.INT8: byte_s}[Format(products[0]._matrix.format)]

    monkeypatch.setattr(trial, "_seconds", seconds)
    monkeypatch.setattr(trial, "fast_kinds", lambda: ("same", "bfloat16", "int8"))
    assert trial.fastest_kind(read_spec(checkpoint)) == fastest


def test_the_trial_runs_with_the_kinds_that_the_processor_has_instructions_for(checkpoint: Path) -> None:
    with_instructions = {"bfloat16": pairs_are_fast(), "int8": bytes_are_fast()}
    assert set(trial.fast_kinds()) == {"same"} | {kind for kind, fast in with_instructions.items() if fast}
    assert trial.fastest_kind(read_spec(checkpoint)) in trial.fast_kinds()


@pytest.mark.parametrize("changes", [{"head_dim": 8}, {"head_dim": 16, "hidden_size": 40}], ids=str)
def test_sizes_that_are_no_multiple_of_a_vector_are_for_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, **changes)
    hidden_size, head_dim = changes.get("hidden_size", 32), changes["head_dim"]

    assert runner_and_answer(tmp_path, "auto")[0] is ReferenceRunner
    sizes = f"kernels='native': hidden size {hidden_size} and head size {head_dim} must be multiples of 16"
    with pytest.raises(ConfigError, match=sizes):
        tiny_engine(tmp_path, kernels="native")


@pytest.mark.usefixtures("no_library")
def test_without_the_library_native_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="kernels='native': the decoder in C was not built"):
        tiny_engine(checkpoint, kernels="native")


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(native_library.open_library.__wrapped__(), ctypes.CDLL)
    monkeypatch.setattr(native_library, "digest_of", lambda sources: "another")
    assert native_library.open_library.__wrapped__() == "built of other sources than are here"


def test_a_digest_of_sources_changes_with_each_of_their_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "a.c", tmp_path / "b.h"
    one.write_text("int a;")
    other.write_text("int b;")
    digest = native_library.digest_of([one, other])
    assert digest == native_library.digest_of([other, one])
    other.write_text("int c;")
    assert digest != native_library.digest_of([one, other])


def test_without_the_library_the_reference_answers_the_same(
    checkpoint: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    native, answer = runner_and_answer(checkpoint, "auto")
    request.getfixturevalue("no_library")
    fallback, same = runner_and_answer(checkpoint, "auto")

    assert (native, fallback) == (NativeRunner, ReferenceRunner)
    assert answer == same
    assert "several times slower: the decoder in C was not built" in caplog.text


def runner_and_answer(folder: Path, kernels: str) -> tuple[type, tuple[int, ...]]:
    engine = tiny_engine(folder, kernels=kernels)
    try:
        return type(engine._runner), greedy(engine, prompt(20), 12)
    finally:
        engine.close()
