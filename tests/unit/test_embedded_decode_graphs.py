"""Recorded decode iterations give what eager ones give: buckets, padding, invalidation, failures. Recorders that need no GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.reference.decode_graphs import Bucket, DecodeGraphs, bucket_for
from lr_backend.embedded.reference.decode_window import DecodeRow, DecodeWindow
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.engine import Sampling
from lr_backend.errors import EngineError
from tests.support.embedded_engines import Gate, MakeEngine, ask, engines, greedy, prompt, request, start, tiny_checkpoint
from tests.support.recorders import BrokenRecorder, TapeRecorder, graphs

PROMPTS = [prompt(length, length) for length in (1, 3, 9, 30, 17)]
ROOMY = {"max_tokens_in_paged_kv_cache": 8192}
"""A pool in which the window may have more rows than are in use."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_engine(checkpoint: Path) -> Iterator[MakeEngine]:
    yield from engines(checkpoint)


def graphs_of(engine: EmbeddedEngine) -> DecodeGraphs:
    assert engine._runner.graphs is not None
    return engine._runner.graphs


def answers(engine: EmbeddedEngine, count: int = 40, **fields: Any) -> list[tuple[int, ...]]:
    gate = Gate(engine)
    pending = [start(engine, request(one, count, **fields)) for one in PROMPTS]
    gate.open()
    return [one.result().token_ids for one in pending]


# Buckets


@given(st.integers(1, 100), st.integers(1, 9000), st.integers(0, 60), st.integers(0, 3000), st.sampled_from([1, 64, 256]))
def test_a_bucket_holds_its_rows_and_lies_in_the_window(rows: int, longest: int, more: int, longer: int, least: int) -> None:
    window = Bucket(rows + more, longest + longer)
    bucket = bucket_for(rows, longest, window, least)
    assert rows <= bucket.batch <= window.batch
    assert longest <= bucket.length <= window.length
    assert bucket.batch == window.batch or bucket.batch < 2 * rows
    assert bucket.length in (window.length, least) or bucket.length < 2 * longest


def test_there_are_few_buckets() -> None:
    window = Bucket(64, 8192)
    buckets = {bucket_for(rows, longest, window, 256) for rows in range(1, 65) for longest in range(1, 8193, 7)}
    assert {bucket.batch for bucket in buckets} == {1, 2, 4, 8, 16, 32, 64}
    assert {bucket.length for bucket in buckets} == {256, 512, 1024, 2048, 4096, 8192}


def test_positions_are_the_same_from_rows_and_from_lengths() -> None:
    store = KvStore(
        num_layers=2,
        num_blocks=8,
        tokens_per_block=4,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    window = DecodeWindow(store, max_tokens=4096)
    rows = [DecodeRow(key, length, range(8)) for key, length in enumerate((0, 5, 17))]
    window.arrange(rows)
    lengths = torch.tensor([row.length for row in rows])
    assert torch.equal(window.positions_at(lengths), window.positions(rows))


# Replays


@pytest.mark.parametrize("changes", [ROOMY, {"tokens_per_block": 32}, {"max_batch_size": 3}])
def test_replayed_greedy_answers_are_the_eager_ones(make_engine: MakeEngine, changes: dict[str, Any]) -> None:
    recorded = make_engine(graphs=graphs(), **changes)
    assert answers(recorded) == answers(make_engine(**changes))
    assert graphs_of(recorded).num_replays > 20


def test_sampled_answers_with_log_probabilities_are_the_eager_ones(make_engine: MakeEngine) -> None:
    wanted = [request(one, 30, sampling=Sampling(0.8, 20, 0.9), seed=7, return_log_probs=True) for one in PROMPTS]
    recorded, eager = make_engine(graphs=graphs()), make_engine()
    for one, other in zip(ask(recorded, *wanted), ask(eager, *wanted), strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert graphs_of(recorded).num_replays > 10


def test_bfloat16_is_recorded_alike(make_engine: MakeEngine) -> None:
    engine = make_engine(graphs=graphs(), dtype="bfloat16")
    assert all(len(one) == 40 for one in answers(engine))
    assert graphs_of(engine).num_replays > 20


def test_a_bucket_is_recorded_only_after_some_use(make_engine: MakeEngine) -> None:
    engine = make_engine(graphs=graphs(record_after=5, min_length=256))
    greedy(engine, prompt(9), 6)  # the prompt's iteration, then 5 decodes
    assert graphs_of(engine).num_recorded == 0
    greedy(engine, prompt(9, 1), 3)
    assert (graphs_of(engine).num_recorded, graphs_of(engine).num_replays) == (1, 2)


def test_recordings_end_with_the_windows_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(graphs=graphs(), **ROOMY)
    full = greedy(engine, prompt(9), 40)
    recorder, generation = graphs_of(engine)._recorder, engine._runner.window.generation
    answers(engine)  # a larger batch: new memory
    assert engine._runner.window.generation > generation
    assert graphs_of(engine)._recorder is not recorder
    assert greedy(engine, prompt(9), 40) == full


def test_recordings_are_bounded_and_a_dropped_one_is_made_anew(make_engine: MakeEngine) -> None:
    engine = make_engine(graphs=graphs(max_recordings=2))
    expected = answers(make_engine())
    for _ in range(2):
        assert answers(engine) == expected
        assert len(graphs_of(engine)._recordings) <= 2
    assert graphs_of(engine).num_recorded > 4


def test_the_padding_block_stays_zero_and_unused_rows_go_to_the_scratch_block(make_engine: MakeEngine) -> None:
    engine = make_engine(graphs=graphs(), **ROOMY)
    answers(engine)
    store = engine._runner.store
    size = store.tokens_per_block
    padding, scratch = (store.rows[:, block * size : (block + 1) * size] for block in (store.padding_block, store.scratch_block))
    assert not padding.any()
    assert scratch.any()  # there were unused rows, and this is where they went
    assert engine.config.num_blocks <= min(store.padding_block, store.scratch_block)


def test_without_settings_a_cpu_engine_records_nothing(make_engine: MakeEngine) -> None:
    assert make_engine()._runner.graphs is None


# Failures


def test_a_failed_recording_is_logged_once_and_all_goes_on(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(graphs=graphs(BrokenRecorder))
    with caplog.at_level(logging.ERROR):
        assert answers(engine) == answers(make_engine())
    assert [record.name for record in caplog.records] == ["lr_backend.embedded.reference.decode_graphs"]
    assert "run eagerly from now on" in caplog.text
    assert graphs_of(engine).num_replays == engine.stats().num_failed == 0


def test_a_recorder_that_cannot_be_made_is_no_failure(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    def no_recorder() -> Any:
        raise RuntimeError("no CUDA driver")

    engine = make_engine(graphs=graphs(no_recorder))
    with caplog.at_level(logging.ERROR):
        assert answers(engine) == answers(make_engine())
    assert len(caplog.records) == 1


def test_a_failing_replay_fails_its_requests_and_the_engine_lives_on(make_engine: MakeEngine) -> None:
    broken = False

    class Fragile(TapeRecorder):
        def __call__(self, step: Any) -> Any:
            replay = super().__call__(step)

            def fragile() -> torch.Tensor:
                if broken:
                    raise RuntimeError("the device is lost")
                return replay()

            return fragile

    engine = make_engine(graphs=graphs(Fragile))
    full = greedy(engine, prompt(9), 20)
    broken = True
    with pytest.raises(EngineError, match="the device is lost"):
        greedy(engine, prompt(8), 20)
    broken = False
    assert greedy(engine, prompt(9), 20) == full


# All together

RUNS = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, 20),  # new tokens
        st.sampled_from([0, 0, 0, 3]),  # drafts, right ones
        st.booleans(),  # wait for it before the next is sent
    ),
    min_size=2,
    max_size=10,
)


@pytest.mark.parametrize("changes", [ROOMY, {"max_tokens_in_paged_kv_cache": 96, "max_seq_len": 96}])
def test_replays_do_not_depend_on_the_schedule(checkpoint: Path, changes: dict[str, Any], make_engine: MakeEngine) -> None:
    plain = make_engine()
    continuations = {one: greedy(plain, one, 24) for one in PROMPTS}
    engine = make_engine(graphs=graphs(), **changes)

    @settings(max_examples=10)
    @given(RUNS)
    def check(runs: list[tuple[tuple[int, ...], int, int, bool]]) -> None:
        gate = Gate(engine)
        sent = []
        for input_ids, count, num_drafts, wait in runs:
            full = continuations[input_ids]
            expected = full[: num_drafts + 1 if num_drafts else count]
            sent.append((start(engine, request(input_ids, count, draft_ids=full[:num_drafts])), expected))
            if wait:
                gate.open()
                sent[-1][0].result()
        gate.open()
        for pending, expected in sent:
            assert pending.result().token_ids == expected
        engine.check_integrity()

    check()
    assert graphs_of(engine).num_replays > 0
