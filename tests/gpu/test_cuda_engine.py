"""The embedded engine on CUDA: graphs against eager launches, bfloat16 against transformers.

What the loop relies on is asked by the conformance suite, whose ``torch-cuda`` endpoint runs where these tests do:
``pytest -m gpu`` selects both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.reference.decode_graphs import CudaGraphRecorder, GraphSettings
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.runner import TorchRunner
from lr_backend.embedded.sampler import next_tokens
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import Sequence
from lr_backend.engine import Sampling
from lr_backend.engine.noise import gumbel_noise, noise_bits, noise_keys
from tests.support.embedded_engines import MakeEngine, ask, engines, prompt, request, tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
PROMPTS = [prompt(length, length) for length in (1, 3, 9, 30, 17)]
ROOMY = {"device": DEVICE, "max_tokens_in_paged_kv_cache": 8192}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as wide as the fast kernels want them."""
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "max_position_embeddings": 1024, "gain": 1.5}
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **shape)


@pytest.fixture
def make_engine(checkpoint: Path) -> Iterator[MakeEngine]:
    yield from engines(checkpoint)


def answers(engine: EmbeddedEngine, count: int = 60) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in ask(engine, *(request(one, count) for one in PROMPTS))]


def logits_of(model: DecoderModel, tokens: tuple[int, ...], counts: list[int], graphs: GraphSettings | None) -> torch.Tensor:
    """Logits of all positions, computed in chunks of these sizes."""
    runner = TorchRunner(model, num_blocks=64, tokens_per_block=8, graphs=graphs)
    sequence = Sequence(0, request(tokens), lambda result: None, (), 1, 8)
    sequence.table.blocks = list(range(63, -1, -1))
    parts = []
    for count in counts:
        logits, _ = runner.run([Chunk(sequence, sequence.num_computed, count, count)])
        sequence.num_computed += count
        parts.append(logits.clone())
    return torch.cat(parts)


def test_graphs_give_the_eager_greedy_tokens(make_engine: MakeEngine) -> None:
    """In float32: between kernels that sum in another order, bfloat16 breaks ties either way."""
    recorded = make_engine(**ROOMY, graphs=GraphSettings(CudaGraphRecorder, record_after=1))
    eager = make_engine(**ROOMY, use_cuda_graphs=False)
    expected = answers(eager)
    for _ in range(2):
        assert answers(recorded) == expected
    assert recorded._runner.graphs is not None
    assert recorded._runner.graphs.num_replays > 50
    assert eager._runner.graphs is None


def test_an_engine_on_cuda_replays_graphs_unless_told_otherwise(make_engine: MakeEngine) -> None:
    engine = make_engine(**ROOMY, dtype="bfloat16")
    answers(engine)
    assert engine._runner.graphs is not None
    assert engine._runner.graphs.num_replays > 20


def test_dropped_recordings_leave_a_recorder_that_works(make_engine: MakeEngine) -> None:
    settings = GraphSettings(CudaGraphRecorder, record_after=1, max_recordings=1, min_length=16)
    engine = make_engine(**ROOMY, graphs=settings)
    expected = answers(make_engine(**ROOMY, use_cuda_graphs=False))
    assert answers(engine) == expected
    engine._on_engine_thread(engine._runner.window.forget).result()
    assert answers(engine) == expected
    assert engine._runner.graphs is not None
    assert engine._runner.graphs.num_recorded > 4


@pytest.mark.parametrize("graphs", [None, GraphSettings(CudaGraphRecorder, record_after=1)], ids=["eager", "graphs"])
def test_bfloat16_logits_are_as_near_to_the_exact_ones_as_transformers(checkpoint: Path, graphs: GraphSettings | None) -> None:
    tokens = prompt(120, 5)
    counts = [50, *[1] * 12, 20, 38]
    settings: dict[str, Any] = {"dtype": torch.float32}
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, **settings).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        exact = reference(ids).logits[0]
        theirs = reference.to(DEVICE, torch.bfloat16)(ids.to(DEVICE)).logits[0].float().cpu()
    model = DecoderModel.load(checkpoint, dtype=torch.bfloat16, device=DEVICE, max_seq_len=512)

    ours = logits_of(model, tokens, counts, graphs).cpu()

    assert exact.std() > 0.5
    assert F.cosine_similarity(ours, exact, dim=-1).min() > 0.99
    assert (ours - exact).norm() < 2.0 * (theirs - exact).norm()


def test_noise_has_the_same_bits_as_on_the_processor() -> None:
    keys, tokens = torch.tensor(noise_keys([7, 2**64 - 1], [0, 40_000]))[:, None], torch.arange(152_064)
    assert torch.equal(noise_bits(keys.cuda(), tokens.cuda()).cpu(), noise_bits(keys, tokens))
    assert torch.allclose(gumbel_noise(keys.cuda(), tokens.cuda()).cpu(), gumbel_noise(keys, tokens), rtol=1e-14, atol=1e-15)


def test_equal_logits_draw_equal_tokens_as_on_the_processor() -> None:
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(3)) * 3.0
    logits[:, ::7] = 1.5  # equals, which only their order tells apart
    samplings = [Sampling(), Sampling(0.8), Sampling(0.6, 20, 0.95), Sampling(1.0, 50_000), Sampling(1.0, 0, 0.9), Sampling(2.0)]
    where = (samplings, [11] * 6, list(range(100, 106)))
    assert next_tokens(logits.cuda(), *where).tolist() == next_tokens(logits, *where).tolist()
