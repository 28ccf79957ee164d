"""What a request means: where it ends, what a verification gives, what is shared. After every test the accounting adds up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.embedded.checkpoint import num_token_ids, read_spec
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.engine import Sampling
from lr_backend.engine.stopping import cut_at_end
from lr_backend.errors import CheckpointError
from tests.support.embedded_engines import (
    KERNELS,
    VOCAB,
    Gate,
    MakeEngine,
    ask,
    engines,
    greedy,
    padded_checkpoint,
    prompt,
    request,
    start,
    tiny_checkpoint,
    tiny_engine,
)

SAMPLED = Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture(params=KERNELS)
def make_engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[MakeEngine]:
    yield from engines(checkpoint, kernels=request.param)


@pytest.fixture
def engine(make_engine: MakeEngine) -> EmbeddedEngine:
    return make_engine()


# How a run ends


def test_a_run_ends_at_its_length(engine: EmbeddedEngine) -> None:
    answer = ask(engine, request(prompt(9), 12))[0]
    assert len(answer.token_ids) == 12
    assert (answer.num_draft_tokens, answer.num_reused_tokens) == (0, 0)
    assert answer.arrival_ns <= answer.first_scheduled_ns <= answer.first_token_ns <= answer.last_token_ns


def test_the_end_token_ends_and_is_not_emitted(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 12)
    end_id = full[5]
    answer = ask(engine, request(prompt(9), 12, end_id=end_id))[0]
    assert answer.token_ids == full[: full.index(end_id)]


def test_a_stop_word_ends_and_is_kept(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 12)
    answer = ask(engine, request(prompt(9), 12, stop_words=(full[3:6], (VOCAB - 1,) * 3)))[0]
    assert answer.token_ids == full[:6]


def test_a_stop_word_may_begin_in_the_prompt(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 6)
    for count in (1, 2):
        word = (*prompt(9)[count - 3 :], *full[:count])
        assert ask(engine, request(prompt(9), 6, stop_words=(word,)))[0].token_ids == full[:count]
        verified = ask(engine, request(prompt(9), 6, draft_ids=full[:5], stop_words=(word,)))[0]
        assert (verified.token_ids, verified.num_accepted_tokens) == (full[:count], count)


def test_no_end_token_before_min_tokens(engine: EmbeddedEngine) -> None:
    end_id = greedy(engine, prompt(9), 1)[0]
    answer = ask(engine, request(prompt(9), 12, end_id=end_id, min_tokens=4))[0]
    assert len(answer.token_ids) >= 4
    assert end_id not in answer.token_ids
    word = answer.token_ids[1:2]
    stopped = ask(engine, request(prompt(9), 12, end_id=end_id, min_tokens=4, stop_words=(word,)))[0]
    assert stopped.token_ids == answer.token_ids[: answer.token_ids.index(*word) + 1], "stop words do not wait, as upstream's"


def test_log_probs_before_min_tokens_are_the_models_too(engine: EmbeddedEngine) -> None:
    """An end token that may not be drawn yet makes no other token likelier."""
    free = request(prompt(9), 6, sampling=Sampling(5.0), seed=5, return_log_probs=True)
    plain = ask(engine, free)[0]
    likely = greedy(engine, prompt(9), 1)[0]
    assert likely not in plain.token_ids
    held = ask(engine, replace(free, end_id=likely, min_tokens=6))[0]
    assert held.token_ids == plain.token_ids
    assert held.log_probs == pytest.approx(plain.log_probs, abs=1e-5)


def test_output_is_silently_reduced_to_max_seq_len(make_engine: MakeEngine) -> None:
    engine = make_engine(max_seq_len=40)
    assert len(ask(engine, request(prompt(36), 100))[0].token_ids) == 4
    assert len(ask(engine, request(prompt(39), 100))[0].token_ids) == 1


class CountedWord(tuple[int, ...]):
    """A word that counts how often any is compared with something else or hashed."""

    num_looked_at = 0

    def __eq__(self, other: object) -> bool:
        CountedWord.num_looked_at += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        CountedWord.num_looked_at += 1
        return super().__hash__()


def by_the_rule(words: Any, end_id: int | None, before: list[int], new: list[int], room: int) -> tuple[list[int], bool]:
    """What is emitted of ``new``, word by word and token by token."""
    emitted: list[int] = []
    for token in new:
        if token == end_id:
            return emitted, True
        emitted.append(token)
        written = [*before, *emitted]
        if any(written[-len(word) :] == list(word) for word in words) or len(emitted) >= room:
            return emitted, True
    return emitted, False


TOKENS = st.lists(st.integers(0, 3), max_size=5)


@given(
    asked=TOKENS,
    output=TOKENS,
    new=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    end_id=st.none() | st.integers(0, 3),
    room=st.integers(1, 8),
)
def test_a_run_is_cut_where_the_rule_says(
    asked: list[int], output: list[int], new: list[int], words: Any, end_id: int | None, room: int
) -> None:
    """Whether tokens stand in the prompt or in the output."""
    before, run = [*asked, *output], request(asked, stop_words=words, end_id=end_id)
    expected = by_the_rule(words, end_id, before, new, room)
    assert cut_at_end(run, len(output), before, new, len(output) + room) == expected
    assert cut_at_end(run, len(output), before[len(before) - min(4, len(before)) :], new, len(output) + room) == expected


def test_a_token_costs_the_same_whatever_the_number_of_stop_words() -> None:
    words = [CountedWord((1000 + number,)) for number in range(5000)] + [CountedWord((1, 1000 + number)) for number in range(256)]
    asked = request((1,), stop_words=words)
    CountedWord.num_looked_at = 0
    emitted, ended = cut_at_end(asked, 0, [], [token % 7 for token in range(500)] + [6000 - 1], 1000)
    assert (len(emitted), ended) == (501, True)
    assert CountedWord.num_looked_at < 50, "words are looked up, not gone through"


# Verification


def test_all_drafts_right_gives_one_token_more(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 6)
    answer = ask(engine, request(prompt(9), 1, draft_ids=full[:5]))[0]
    assert answer.token_ids == full
    assert (answer.num_draft_tokens, answer.num_accepted_tokens) == (5, 5)


@pytest.mark.parametrize("wrong_at", range(5))
def test_a_verification_ends_at_the_first_wrong_draft(wrong_at: int, engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 6)
    drafts = [*full[:wrong_at], (full[wrong_at] + 1) % VOCAB, *full[wrong_at + 1 : 5]]
    answer = ask(engine, request(prompt(9), 100, draft_ids=tuple(drafts)))[0]
    assert answer.token_ids == full[: wrong_at + 1]
    assert answer.num_accepted_tokens == wrong_at


def test_rejected_drafts_leave_no_trace_in_the_cache(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 24)
    known = prompt(9)
    while len(known) < 9 + 20:
        right = full[len(known) - 9 : len(known) - 9 + 2]
        answer = ask(engine, request(known, 6, draft_ids=(*right, (full[len(known) - 7] + 1) % VOCAB, 3, 4)))[0]
        assert answer.token_ids == full[len(known) - 9 : len(known) - 6]
        known += answer.token_ids
    assert engine.stats().num_tokens_reused > 20


def test_a_stop_word_across_drafts_cuts_the_output_right_after_it(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 8)
    answer = ask(engine, request(prompt(9), 8, draft_ids=full[:7], stop_words=(full[2:4],)))[0]
    assert answer.token_ids == full[:4]
    across_the_end = ask(engine, request(prompt(9), 8, draft_ids=full[:3], stop_words=(full[2:4],)))[0]
    assert across_the_end.token_ids == full[:4]


def test_an_end_token_inside_drafts_is_not_emitted(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 8)
    end_id = full[4]
    answer = ask(engine, request(prompt(9), 8, draft_ids=full[:7], end_id=end_id))[0]
    assert answer.token_ids == full[: full.index(end_id)]


def test_drafts_are_silently_shortened_to_max_seq_len(make_engine: MakeEngine) -> None:
    engine = make_engine(max_seq_len=40)
    full = greedy(engine, prompt(36), 4)
    answer = ask(engine, request(prompt(36), 8, draft_ids=(*full[:3], 1, 2, 3)))[0]
    assert answer.token_ids == full
    assert answer.num_draft_tokens == 3
    last = ask(engine, request(prompt(36) + full[:3], 8, draft_ids=(1, 2)))[0]
    assert (last.token_ids, last.num_draft_tokens) == (full[3:], 0)


def test_a_long_prompt_is_chunked_and_its_drafts_stay_together(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_tokens=16, max_batch_size=4)
    full = greedy(make_engine(), prompt(100), 8)
    answer = ask(engine, request(prompt(100), 8, draft_ids=full[:7]))[0]
    assert answer.token_ids == full


# A tokenizer of fewer ids than the logits are wide

NUM_IDS = 24


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded_checkpoint(tmp_path_factory.mktemp("padded"), NUM_IDS, head_dim=16)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(5.0), Sampling(2.0, 50, 0.95)])
def test_no_id_beyond_the_tokenizers_is_drawn(make_engine: MakeEngine, padded: Path, sampling: Sampling) -> None:
    whole = make_engine()
    engine = tiny_engine(padded, kernels=whole.config.kernels)
    firsts = [request(prompt(9, seed), 1, sampling=sampling, seed=seed) for seed in range(60)]
    of_whole, drawn = ([answer.token_ids[0] for answer in ask(one, *firsts)] for one in (whole, engine))
    assert max(drawn) < NUM_IDS <= max(of_whole)
    if not sampling.top_k:  # what is left out changes no draw that it has not won
        assert all(one == other for one, other in zip(drawn, of_whole, strict=True) if other < NUM_IDS)
    run = request(prompt(9), 40, sampling=sampling, seed=3)
    full = ask(engine, run)[0].token_ids
    assert (len(full), max(full) < NUM_IDS) == (40, True)
    for drafts in (full[:5], (*full[:3], VOCAB - 1, 0)):
        right = min(5, drafts.index(VOCAB - 1) if VOCAB - 1 in drafts else 5)
        assert ask(engine, replace(run, draft_ids=drafts))[0].token_ids == full[: right + 1]
    assert ask(engine, replace(run, end_id=VOCAB - 1, min_tokens=4))[0].token_ids == full
    engine.close()


def test_log_probabilities_are_of_the_ids_that_there_are(make_engine: MakeEngine, padded: Path) -> None:
    """In a verification, which is drawn apart from the decoding, as well."""
    engine = tiny_engine(padded, kernels=make_engine().config.kernels)
    asked = request(prompt(9), 6, sampling=Sampling(5.0), return_log_probs=True)
    plain = ask(engine, asked)[0]
    verified = ask(engine, replace(asked, draft_ids=plain.token_ids[:5]))[0]
    assert verified.log_probs == pytest.approx(plain.log_probs, abs=1e-4)
    ways = [ask(engine, replace(asked, max_new_tokens=1, seed=seed))[0] for seed in range(600)]
    found = {answer.token_ids[0]: answer.log_probs[0] for answer in ways}
    assert sum(map(math.exp, found.values())) == pytest.approx(1.0, abs=0.1)
    engine.close()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json holds no vocabulary"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"end": {}}}', r"added_tokens_decoder is malformed"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused_by_name(tmp_path: Path, file: str, text: str, said: str) -> None:
    folder = padded_checkpoint(tmp_path, NUM_IDS)
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        tiny_engine(folder)


def test_tokens_that_only_the_tokenizers_settings_add_are_drawn(tmp_path: Path) -> None:
    """The end of the answer may be one: without it no answer ends before it is full."""
    folder = padded_checkpoint(tmp_path, NUM_IDS)
    added = {str(NUM_IDS): {"content": "<end>"}, str(NUM_IDS + 2): {"content": "<think>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert num_token_ids(folder, read_spec(folder)) == NUM_IDS + 3


# Prefix reuse and the batch


def test_a_shared_prefix_is_computed_once(engine: EmbeddedEngine) -> None:
    ask(engine, request(prompt(40), 1))
    before = engine.stats().num_tokens_prefilled
    answers = ask(engine, *(request((*prompt(40), token), 4) for token in range(4)))
    assert [answer.num_reused_tokens for answer in answers] == [40] * 4
    assert engine.stats().num_tokens_prefilled - before == 4


def test_requests_that_arrive_together_share_what_one_of_them_computes(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_tokens=256)
    gate = Gate(engine)
    pending = [start(engine, request((*prompt(80), token), 4)) for token in range(4)]
    gate.open()
    answers = [one.result() for one in pending]
    assert [answer.num_reused_tokens for answer in answers] == [0, 80, 80, 80]
    alone = make_engine(enable_kv_cache_reuse=False)
    for token, answer in enumerate(answers):
        assert answer.token_ids == greedy(alone, (*prompt(80), token), 4)


def test_who_waits_for_a_prefix_joins_as_soon_as_it_is_computed(make_engine: MakeEngine) -> None:
    """And not when the other has filled its block."""
    engine = make_engine(max_num_tokens=256, tokens_per_block=32)
    gate = Gate(engine)
    pending = [start(engine, request((*prompt(40), token), 20)) for token in range(2)]
    gate.open()
    assert [one.result().num_reused_tokens for one in pending] == [0, 40]
    assert engine.stats().mean_batch_size > 1.8


def test_a_decoding_sequence_is_reused_before_it_ends(engine: EmbeddedEngine) -> None:
    long = start(engine, request(prompt(20), 200))
    while engine.stats().num_tokens_decoded < 2:
        pass
    answer = ask(engine, request((*prompt(20), 5), 1))[0]
    assert answer.num_reused_tokens == 20
    long.result()


def test_requests_are_batched_in_flight(engine: EmbeddedEngine) -> None:
    gate = Gate(engine)
    pending = [start(engine, request(prompt(5, seed), 30)) for seed in range(8)]
    gate.open()
    for one in pending:
        one.result()
    assert engine.stats().mean_batch_size > 7


def test_preemption_changes_nothing_but_time(make_engine: MakeEngine) -> None:
    small = make_engine(max_tokens_in_paged_kv_cache=96, max_seq_len=64)
    plain = make_engine()
    prompts = [prompt(10, seed) for seed in range(6)]
    answers = ask(small, *(request(one, 40) for one in prompts))
    assert small.stats().num_preemptions > 0
    assert [answer.token_ids for answer in answers] == [greedy(plain, one, 40) for one in prompts]


def test_seeds_reproduce_and_do_not_depend_on_the_batch(make_engine: MakeEngine) -> None:
    engine, small = make_engine(), make_engine(max_tokens_in_paged_kv_cache=96, max_seq_len=64)
    asked = [request(prompt(10, seed), 30, sampling=SAMPLED, seed=seed) for seed in range(6)]
    together = [answer.token_ids for answer in ask(engine, *asked)]
    alone = [ask(engine, one)[0].token_ids for one in asked]
    preempted = [answer.token_ids for answer in ask(small, *asked)]
    assert together == alone == preempted
    other = ask(engine, request(prompt(10, 0), 30, sampling=SAMPLED, seed=99))[0]
    assert other.token_ids != together[0]


def test_log_probs_equal_the_models(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 6)
    plain = ask(engine, request(prompt(9), 6, return_log_probs=True))[0]
    verified = ask(engine, request(prompt(9), 6, draft_ids=full[:5], return_log_probs=True))[0]
    sampled = ask(engine, request(prompt(9), 6, sampling=Sampling(0.5, 1), return_log_probs=True))[0]
    assert len(plain.log_probs) == 6
    assert all(value < 0 for value in plain.log_probs)
    assert verified.log_probs == pytest.approx(plain.log_probs, abs=1e-4)
    assert sampled.log_probs == pytest.approx(plain.log_probs, abs=1e-4)
