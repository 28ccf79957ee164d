"""However requests meet (batched, chunked, reused, preempted, verified), what comes out is what each alone would give."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.runner import ReferenceRunner
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import Sequence
from lr_backend.engine import Sampling
from tests.support.embedded_engines import (
    KERNELS,
    VOCAB,
    Gate,
    ask,
    check_accounting,
    prompt,
    request,
    start,
    tiny_checkpoint,
    tiny_engine,
)

STEMS = [prompt(length, seed) for seed, length in enumerate((3, 17, 55, 30))]
MAX_NEW = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, kernels: str) -> Iterator[EmbeddedEngine]:
    """No reuse, no chunks, used for one request at a time."""
    engine = tiny_engine(checkpoint, kernels=kernels, enable_kv_cache_reuse=False, max_num_tokens=256)
    yield engine
    engine.close()


ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_tokens": 16, "max_batch_size": 5},
    "cramped": {"max_tokens_in_paged_kv_cache": 96, "max_seq_len": 96},
    "large blocks": {"tokens_per_block": 32, "max_num_tokens": 24},
    "no reuse": {"enable_kv_cache_reuse": False, "max_num_tokens": 24},
}

RUNS = st.lists(
    st.tuples(
        st.integers(0, len(STEMS) - 1),  # which stem
        st.integers(0, 6),  # how many tokens of its continuation are in the prompt
        st.integers(1, MAX_NEW - 6),  # new tokens
        st.sampled_from([0, 0, 0, 0, 1, 3, 5, 8]),  # drafts
        st.integers(0, 8),  # index of the wrong draft, if there are so many
        st.integers(0, 4).map(lambda number: number == 4),  # wait for it before the next is sent
        st.integers(0, 6).map(lambda number: number == 6),  # cancel it
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9), Sampling(1.2, 12, 0.9)], ids=["greedy", "all", "top"])
@pytest.mark.parametrize("kind", ENGINES)
def test_answers_do_not_depend_on_the_schedule(
    kind: str, sampling: Sampling, kernels: str, checkpoint: Path, plain: EmbeddedEngine
) -> None:
    """A call that begins within another's text under the same seed goes on as that one did, with and without draft tokens."""
    engine = tiny_engine(checkpoint, kernels=kernels, **ENGINES[kind])
    drawn: dict[str, Any] = {"sampling": sampling, "seed": 2**63 + 11}
    continuations = [ask(plain, request(stem, MAX_NEW + 9, **drawn))[0].token_ids for stem in STEMS]

    @settings(max_examples=25 if sampling.greedy else 10)
    @given(RUNS)
    def check(runs: list[tuple[int, int, int, int, int, bool, bool]]) -> None:
        sent = []
        gate = Gate(engine)  # so that requests meet, however fast the machine
        for number, (stem, known, num_new, num_drafts, wrong_at, wait, cancelled) in enumerate(runs):
            full = continuations[stem]
            drafts = [
                (token + 1) % VOCAB if index == wrong_at else token
                for index, token in enumerate(full[known : known + num_drafts])
            ]
            input_ids = STEMS[stem] + full[:known]
            pending = start(engine, request(input_ids, num_new, draft_ids=tuple(drafts), request_id=str(number), **drawn))
            expected = full[known : known + (min(wrong_at, num_drafts) + 1 if num_drafts else num_new)]
            sent.append((pending, expected, cancelled))
            if cancelled:
                engine.cancel(str(number))
            if wait:
                gate.open()
                pending.result()
        gate.open()
        for pending, expected, cancelled in sent:
            token_ids = pending.result().token_ids
            assert token_ids == (expected[: len(token_ids)] if cancelled else expected)
        check_accounting(engine)
        assert engine.stats().num_blocks_used == 0

    check()
    if kind == "cramped":
        assert engine.stats().num_preemptions > 0
    engine.close()


def exact_probs(checkpoint: Path, prefixes: list[tuple[int, ...]], temperature: float) -> torch.Tensor:
    """The target's distribution after each prefix."""
    model = DecoderModel.load(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    rows = []
    for prefix in prefixes:
        runner = ReferenceRunner(model, num_blocks=8, tokens_per_block=8)
        sequence = Sequence(0, request(prefix), lambda result: None, (), 1, 8)
        sequence.table.blocks = list(range(8))
        rows.append(runner.run([Chunk(sequence, 0, len(prefix), 1)])[0])
    return torch.softmax(torch.cat(rows) / temperature, dim=-1)


SMALL_VOCAB = 4
NUM_SAMPLES = 2000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("small"), head_dim=16, vocab_size=SMALL_VOCAB, num_layers=1, gain=1.0)


def test_two_tokens_follow_the_exact_joint_distribution_whoever_drafts(kernels: str, small: Path) -> None:
    sampling, start_ids = Sampling(temperature=1.3), (1, 2, 3)
    first = exact_probs(small, [start_ids], sampling.temperature)[0]
    second = exact_probs(small, [(*start_ids, token) for token in range(SMALL_VOCAB)], sampling.temperature)
    engine = tiny_engine(small, kernels=kernels, max_queue_size=NUM_SAMPLES, max_seq_len=64)

    plain = sample_pairs(engine, "no drafts", sampling, start_ids)
    assert sample_pairs(engine, "draft tokens", sampling, start_ids) == plain
    assert sample_pairs(engine, "draft logits", sampling, start_ids) == plain
    engine.close()

    counts = np.zeros((SMALL_VOCAB, SMALL_VOCAB))
    np.add.at(counts, tuple(np.array(plain).T), 1)
    expected = (first[:, None] * second).double().numpy()
    assert stats.chisquare(counts.ravel(), expected.ravel() / expected.sum() * counts.sum()).pvalue > 1e-3


def sample_pairs(engine: EmbeddedEngine, kind: str, sampling: Sampling, input_ids: tuple[int, ...]) -> list[list[int]]:
    """First two tokens of a run of each seed; those that a rejection left with one get their second from another of that seed."""
    if kind == "no drafts":
        asked = [request(input_ids, 2, sampling=sampling, seed=seed) for seed in range(NUM_SAMPLES)]
        return [list(answer.token_ids) for answer in ask(engine, *asked)]
    fields: dict[str, Any] = {"sampling": sampling}
    if kind == "draft logits":
        logits = np.array([[0.0, 1.0, 0.5, -1.0]] * 2, dtype=np.float32)
        fields["draft_logits"] = logits
        weights = np.exp(logits[0] / sampling.temperature)
        drafts = np.random.default_rng(0).choice(SMALL_VOCAB, (NUM_SAMPLES, 2), p=weights / weights.sum())
    else:
        drafts = np.tile([2, 1], (NUM_SAMPLES, 1))
    asked = [request(input_ids, 3, draft_ids=tuple(row.tolist()), seed=seed, **fields) for seed, row in enumerate(drafts)]
    firsts = [list(answer.token_ids[:2]) for answer in ask(engine, *asked)]
    short = [index for index, tokens in enumerate(firsts) if len(tokens) == 1]
    rest = [request((*input_ids, *firsts[index]), 1, sampling=sampling, seed=index) for index in short]
    for index, answer in zip(short, ask(engine, *rest), strict=True):
        firsts[index] += answer.token_ids
    return firsts


def test_many_threads_may_submit_and_cancel(checkpoint: Path, kernels: str) -> None:
    engine = tiny_engine(checkpoint, kernels=kernels, max_tokens_in_paged_kv_cache=200, max_seq_len=100)
    expected = {seed: ask(engine, request(prompt(10, seed), 20))[0].token_ids for seed in range(4)}
    failures: list[str] = []

    def work(seed: int) -> None:
        for round_number in range(6):
            pending = start(engine, request(prompt(10, seed), 20, request_id=f"{seed} {round_number}"))
            cancelled = (seed + round_number) % 3 == 0
            if cancelled:
                engine.cancel(f"{seed} {round_number}")
            token_ids = pending.result().token_ids
            if token_ids != (expected[seed][: len(token_ids)] if cancelled else expected[seed]):
                failures.append(f"{seed} {round_number}: {token_ids}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_accounting(engine)
    engine.close()
    assert failures == []
