"""A draft model inside the engine: whatever it drafts, the tokens are those of a plain run, and the block accounting adds up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.native import drafter as drafter_module
from lr_backend.embedded.native import run as native_run
from lr_backend.embedded.native.drafter import Drafter
from lr_backend.embedded.native.model import NativeModel
from lr_backend.embedded.prefill_thread import PrefillThread
from lr_backend.embedded.runner import Output
from lr_backend.emulated.feed import Pass
from lr_backend.emulated.model_source import ModelSource
from lr_backend.engine import Sampling
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import ConfigError, EngineRejected
from tests.support.embedded_engines import (
    NEEDS_LIBRARY,
    VOCAB,
    Gate,
    MakeEngine,
    Pause,
    ask,
    cancel,
    check_accounting,
    engines,
    padded_checkpoint,
    prompt,
    request,
    start,
    tiny_checkpoint,
    tiny_engine,
)

pytestmark = NEEDS_LIBRARY
SAMPLINGS = (Sampling(), Sampling(0.7), Sampling(0.9, 12, 0.9))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), head_dim=16)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of another shape that the target hardly ever follows."""
    return tiny_checkpoint(tmp_path_factory.mktemp("stranger"), head_dim=16, num_layers=1, num_heads=2, seed=5)


@pytest.fixture
def make_engine(target: Path) -> Iterator[MakeEngine]:
    """Engines that hold the target a second time as their draft, and draft without end."""
    settings: dict[str, Any] = {"speculative_model_dir": target, "speculative_weight_dtype": "same"}
    yield from engines(target, **settings, speculative_min_chance=0.0, max_tokens_in_paged_kv_cache=2048)


def words(answers: list[EngineResponse]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(answer.token_ids, answer.log_probs) for answer in answers]


def questions(sampling: Sampling, count: int = 5) -> list[EngineRequest]:
    """Some that begin alike, of different lengths, one of which asks for log-probabilities."""
    shared = prompt(21, 1)
    asked = [
        request((*shared[: 7 * number], *prompt(3, number)), 20 + 11 * number, sampling=sampling, seed=number)
        for number in range(count)
    ]
    return [replace(asked[0], return_log_probs=True), *asked[1:]]


def drafted(asked: list[EngineRequest], *counts: int) -> list[EngineRequest]:
    """The same requests, each with as many drafts a pass as its turn in ``counts`` says."""
    return [replace(one, num_draft_tokens=counts[index % len(counts)]) for index, one in enumerate(asked)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("counts", [(1,), (4,), (8,), (0, 3, 8)], ids=str)
@pytest.mark.parametrize("agrees", [True, False])
def test_drafts_change_no_token(
    make_engine: MakeEngine, stranger: Path, sampling: Sampling, counts: tuple[int, ...], agrees: bool
) -> None:
    engine = make_engine() if agrees else make_engine(speculative_model_dir=stranger)
    asked = questions(sampling)
    plain = ask(make_engine(), *asked)
    assert words(ask(engine, *drafted(asked, *counts))) == words(plain)
    assert words([ask(engine, one)[0] for one in drafted(asked, *counts)]) == words(plain)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("enable_kv_cache_reuse", [True, False])
def test_a_draft_that_is_the_target_is_always_right(
    make_engine: MakeEngine, enable_kv_cache_reuse: bool, sampling: Sampling
) -> None:
    """Greedy or not, as both draw with the same noise; and whatever was reused, copied or computed late: keys and values of
    another text would draft wrong."""
    engine = make_engine(enable_kv_cache_reuse=enable_kv_cache_reuse)
    asked = questions(sampling)
    for counts in ((0,), (5,), (0, 5), (3, 8)):
        ask(engine, *drafted(asked, *counts))
        for answer in ask(engine, *drafted([replace(one, max_new_tokens=40) for one in asked], *counts)):
            assert answer.num_accepted_tokens == answer.num_draft_tokens
    continued = [
        replace(one, input_ids=one.input_ids + answer.token_ids[:9])
        for one, answer in zip(asked, ask(engine, *asked), strict=True)
    ]
    for answer in ask(engine, *drafted(continued, 6)):
        assert answer.num_accepted_tokens == answer.num_draft_tokens > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(5.0)])
@pytest.mark.parametrize("min_chance", [0.0, 0.05])
def test_drafts_have_no_id_beyond_the_tokenizers(tmp_path: Path, sampling: Sampling, min_chance: float) -> None:
    folder = padded_checkpoint(tmp_path, 24, head_dim=16)
    itself = {"speculative_model_dir": folder, "speculative_weight_dtype": "same"}
    engine = tiny_engine(folder, **itself, speculative_min_chance=min_chance)
    asked = questions(sampling)
    plain = ask(engine, *asked)
    answers = ask(engine, *drafted(asked, 4))
    assert words(answers) == words(plain)
    assert max(token for answer in answers for token in answer.token_ids) < 24
    assert all(answer.num_accepted_tokens == answer.num_draft_tokens for answer in answers), "both leave out the same"
    engine.close()


@pytest.mark.parametrize(("most", "rows"), [(0, 3), (7, 5), (64, 256)])
def test_it_reads_what_it_has_not_seen_in_pieces(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, most: int, rows: int
) -> None:
    """Prompts along with the engine, by both of its threads; and what others have computed without it before it first drafts."""
    monkeypatch.setattr(native_run, "MAX_UNSEEN", most)
    monkeypatch.setattr(drafter_module, "MAX_ROWS", rows)
    engine = make_engine(max_num_tokens=24)
    asked = questions(Sampling())
    ask(engine, *asked)
    for answer in ask(engine, *drafted(asked, 4)):
        assert answer.num_accepted_tokens == answer.num_draft_tokens > 0
    unknown = [request(prompt(90, 30 + seed), 60, num_draft_tokens=5) for seed in range(4)]
    for answer in ask(engine, *unknown):
        assert answer.num_accepted_tokens == answer.num_draft_tokens > 0


def test_a_pass_brings_as_many_tokens_as_were_drafted_and_one(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = engine.stats()
    answer = ask(engine, request(prompt(9), 45, num_draft_tokens=8))[0]
    after = engine.stats()
    num_passes = 45 - answer.num_accepted_tokens
    assert num_passes == 6  # the first has no more room than the prompt's last block
    assert answer.num_draft_tokens == answer.num_accepted_tokens == after.num_accepted_tokens - before.num_accepted_tokens
    assert after.num_draft_tokens - before.num_draft_tokens == answer.num_draft_tokens
    assert after.num_iterations - before.num_iterations == num_passes
    assert after.num_tokens_decoded - before.num_tokens_decoded == 45


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_what_is_unlikely_to_stand_is_not_drafted(make_engine: MakeEngine, stranger: Path, sampling: Sampling) -> None:
    asked = request(prompt(9), 30, num_draft_tokens=6, sampling=sampling)
    numbers = []
    for chance in (0.0, 0.2, 1.0):
        engine = make_engine(speculative_model_dir=stranger, speculative_min_chance=chance)
        numbers.append(ask(engine, asked)[0].num_draft_tokens)
    assert numbers[0] > numbers[1] > numbers[2] == 0


def test_a_run_ends_where_a_plain_one_does(make_engine: MakeEngine) -> None:
    """At a stop word of one token or two, among accepted drafts or behind them; and what it brought is reused all the same."""
    engine = make_engine()
    full = ask(engine, request(prompt(9), 30))[0].token_ids
    for last in range(3, 14):
        for stop in ((full[last],), full[last - 1 : last + 1]):
            asked = request(prompt(9), 30, stop_words=(stop,))
            expected = ask(engine, asked)[0].token_ids
            answer = ask(engine, replace(asked, num_draft_tokens=5))[0]
            assert answer.token_ids == expected
            assert answer.num_accepted_tokens <= min(answer.num_draft_tokens, len(expected))
    end_id = full[7]
    ended = [ask(engine, request(prompt(9), 30, end_id=end_id, num_draft_tokens=count))[0].token_ids for count in (0, 6)]
    assert ended[0] == ended[1] == full[: full.index(end_id)]


def test_drafts_never_take_the_blocks_of_others(make_engine: MakeEngine) -> None:
    """With a pool that is too small sequences are preempted as without drafts, and nobody's answer changes."""
    asked = [request(prompt(12, seed), 40, num_draft_tokens=7) for seed in range(6)]
    plain = ask(make_engine(), *[replace(one, num_draft_tokens=0) for one in asked])
    engine = make_engine(max_tokens_in_paged_kv_cache=96, max_seq_len=64)
    assert words(ask(engine, *asked)) == words(plain)
    assert engine.stats().num_preemptions > 0
    again = ask(engine, asked[0])[0]
    assert (again.token_ids, again.num_accepted_tokens) == (plain[0].token_ids, again.num_draft_tokens)


def test_a_cancelled_run_keeps_what_it_has(make_engine: MakeEngine) -> None:
    engine = make_engine()
    full = ask(engine, request(prompt(9), 200, num_draft_tokens=4))[0].token_ids
    other = make_engine()
    pause = Pause(other, after=20)
    pending = start(other, request(prompt(9), 200, num_draft_tokens=4, request_id="long"))
    assert pause.begun.wait(10)
    cancel(other, "long")
    pause.end()
    partial = pending.result().token_ids
    assert 20 <= len(partial) < 200
    assert partial == full[: len(partial)]


def test_requests_beside_prompts_and_verifications_are_what_they_are_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = drafted(questions(Sampling(0.7), 3), 4)
    beside = [request(prompt(50, 8), 5), request(prompt(14, 3), 4, draft_ids=(1, 2, 3))]
    alone = [ask(make_engine(), one)[0] for one in (*asked, *beside)]
    gate = Gate(engine)
    pending = [start(engine, one) for one in (*asked, *beside)]
    gate.open()
    assert words([one.result() for one in pending]) == words(alone)


def test_a_draft_that_computes_nonsense_drafts_nothing(target: Path, tmp_path: Path) -> None:
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.finfo(torch.float32).max)
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    engine = tiny_engine(target, speculative_model_dir=tmp_path)
    try:
        plain, answer = (ask(engine, request(prompt(9), 20, num_draft_tokens=count))[0] for count in (0, 4))
        assert answer.token_ids == plain.token_ids
        assert answer.num_draft_tokens == 0
        check_accounting(engine)
    finally:
        engine.close()


# What is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_draft_tokens": 9}, "num_draft_tokens: 9 exceeds max_draft_len 8"),
        ({"num_draft_tokens": 2, "draft_ids": (1, 2)}, "num_draft_tokens: not beside draft_input_ids"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_by_name(make_engine: MakeEngine, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineRejected, match=said):
        start(make_engine(), request(prompt(9), 8, **fields))


def test_an_engine_without_a_draft_model_says_so(target: Path) -> None:
    engine: EmbeddedEngine = tiny_engine(target)
    try:
        with pytest.raises(EngineRejected, match="num_draft_tokens: 3 wanted, and this engine holds no draft model"):
            start(engine, request(prompt(9), 8, num_draft_tokens=3))
    finally:
        engine.close()


def test_a_draft_model_must_fit_the_engine(target: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "vocabulary", head_dim=16, vocab_size=VOCAB + 3)
    with pytest.raises(ConfigError, match=rf"speculative_model_dir=.* of {VOCAB + 3} and {VOCAB} tokens"):
        tiny_engine(target, speculative_model_dir=other)
    narrow = tiny_checkpoint(tmp_path / "narrow")
    with pytest.raises(ConfigError, match=r"speculative_model_dir=.* must be multiples of 16"):
        tiny_engine(target, speculative_model_dir=narrow)
    with pytest.raises(ConfigError, match="only the native kernels draft"):
        tiny_engine(target, speculative_model_dir=target, kernels="reference")


@pytest.mark.parametrize(
    ("name", "value"), [("speculative_weight_dtype", "float8"), ("speculative_min_chance", -0.1), ("speculative_min_chance", 1.5)]
)
def test_settings_out_of_range_are_refused_by_name(target: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(target, **{name: value})


# Which tokens the draft has seen

SIZE, NUM_BLOCKS = 4, 6


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("saw"), st.integers(0, SIZE * 3), st.integers(0, SIZE * 3)),
            st.tuples(st.just("anew"), st.integers(0, NUM_BLOCKS - 1), st.just(0)),
            st.tuples(st.just("copy"), st.integers(0, NUM_BLOCKS - 1), st.integers(1, SIZE)),
        ),
        max_size=12,
    )
)
@settings(max_examples=60)
def test_it_never_claims_to_have_seen_more_than_it_has(target: Path, changes: list[tuple[str, int, int]]) -> None:
    drafter = Drafter(NativeModel.load(target, max_seq_len=32), num_blocks=NUM_BLOCKS, tokens_per_block=SIZE, min_chance=0.0)
    blocks, stored = [0, 1, 2], [0] * NUM_BLOCKS
    for kind, first, second in changes:
        if kind == "saw":
            before = drafter.num_seen(blocks, SIZE * 3)
            if first < before:  # what comes after is drafted again, from where it differs
                first, before = before, first
            drafter.has_seen(blocks, before, second)
            for place, block in enumerate(blocks):
                known = stored[block] if place < min(before, second) // SIZE else SIZE
                stored[block] = max(0, min(known, second - place * SIZE))
        elif kind == "anew":
            drafter.allocated([first])
            stored[first] = 0
        else:
            drafter.copy_prefix(first, NUM_BLOCKS - 1, second)
            stored[NUM_BLOCKS - 1] = min(stored[first], second)
        seen = 0
        for block in blocks:
            seen += stored[block]
            if stored[block] < SIZE:
                break
        assert drafter.num_seen(blocks, SIZE * 3) == seen
        assert drafter.num_seen(blocks, 2) == min(2, seen)


def test_texts_for_a_paced_engine_are_drafted_from_the_second_pass_on(make_engine: MakeEngine) -> None:
    """TensorRT-LLM drafts nothing in the iteration that computes a prompt."""
    config = make_engine().config
    source = ModelSource(config, 1e-3)
    feed = source.begin(request(prompt(9), 12, num_draft_tokens=3))
    passes: list[Pass] = []
    while sum(len(one.token_ids) for one in passes) < 12:
        assert feed.wait(30.0)
        passes.append(feed.take())
    source.close()
    assert (len(passes[0].token_ids), passes[0].num_proposed) == (1, 0)
    assert (len(passes[1].token_ids), passes[1].num_proposed) == (4, 3), "its draft is the target itself"


def test_the_second_thread_gives_way_as_the_first_does() -> None:
    def niceness(chunks: object) -> tuple[torch.Tensor, list[Output]]:
        return torch.tensor(os.getpriority(os.PRIO_PROCESS, 0)), []

    thread = PrefillThread(niceness, lambda: None, 2)
    thread.start([])
    _, result = thread.take()
    assert result()[0].item() == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 2)
    thread.close()
