"""The reference on CUDA: greedy tokens of the processor, bfloat16 against transformers, and the same draws.

What the loop relies on is asked by the conformance suite, whose ``reference-cuda`` endpoint runs where these tests do:
``pytest -m gpu`` selects both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.engine import Sampling
from lr_backend.engine.drawing import next_tokens
from lr_backend.engine.noise import gumbel_noise, noise_bits, noise_keys
from tests.support.embedded_engines import MakeEngine, ask, engines, prompt, request, tiny_checkpoint
from tests.support.reference_models import logits_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
PROMPTS = [prompt(length, length) for length in (1, 3, 9, 30, 17)]
ROOMY = {"max_tokens_in_paged_kv_cache": 8192}


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


def test_greedy_tokens_are_those_of_the_processor(make_engine: MakeEngine) -> None:
    """In float32: between kernels that sum in another order, bfloat16 breaks ties either way."""
    assert answers(make_engine(**ROOMY, device=DEVICE)) == answers(make_engine(**ROOMY, kernels="reference"))


def test_bfloat16_logits_are_as_near_to_the_exact_ones_as_transformers(checkpoint: Path) -> None:
    tokens = prompt(120, 5)
    counts = [50, *[1] * 12, 20, 38]
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        exact = reference(ids).logits[0]
        theirs = reference.to(DEVICE, torch.bfloat16)(ids.to(DEVICE)).logits[0].float().cpu()
    model = DecoderModel.load(checkpoint, dtype=torch.bfloat16, device=DEVICE, max_seq_len=512)

    ours = logits_of(model, tokens, counts).cpu()

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
