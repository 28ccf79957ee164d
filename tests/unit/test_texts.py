"""Scripted texts follow their workload, and go on the same way whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.contract import IntArray
from lr_backend.emulated.texts import BREAK, CLOSE, END, LIKE, THINK, UNLIKE, ScriptedSource, Texts
from lr_backend.emulated.workload import Workload
from lr_backend.engine import GREEDY, Sampling
from lr_backend.tokens import num_equal
from lr_backend.torch_engine.request import EngineRequest
from tests.support.torch_engines import request

SAMPLED = Sampling(temperature=1.0)
WORKLOAD = Workload(0.6, exact_rate=0.2, token_agreement=0.9, word_agreement=0.5, step_tokens=12, step_spread=0.4, num_steps=40)
ASKED = request((1,), 1)

workloads = st.builds(
    Workload,
    acceptance_rate=st.floats(0.0, 1.0),
    token_agreement=st.floats(0.0, 1.0),
    word_agreement=st.floats(0.0, 1.0),
    step_tokens=st.integers(2, 30),
    step_spread=st.floats(0.0, 0.9),
    num_steps=st.integers(1, 6),
    answer_tokens=st.integers(0, 9),
)


def grown(context: IntArray, tokens: Sequence[int]) -> IntArray:
    return np.concatenate([context, np.asarray(tokens, dtype=np.int32)])


def whole_text(texts: Texts, number: int = 0) -> IntArray:
    """The target's answer behind its question."""
    context = texts.prompt(number)
    while context[-1] != END:
        context = grown(context, texts.target(context, ASKED))
    return context


@given(workloads, st.integers(0, 5), st.data())
def test_a_text_goes_on_the_same_way_from_wherever_it_is_asked_for(workload: Workload, seed: int, data: st.DataObject) -> None:
    texts = Texts(workload, seed)
    whole, start = whole_text(texts), len(texts.prompt(0))
    cut = data.draw(st.integers(start, len(whole) - 1))
    rest = texts.target(whole[:cut], ASKED)
    assert tuple(rest) == tuple(whole[cut : cut + len(rest)].tolist())


@given(workloads, st.integers(0, 5), st.data())
def test_a_drafted_step_goes_on_the_same_way_too(workload: Workload, seed: int, data: st.DataObject) -> None:
    texts = Texts(workload, seed)
    context = texts.prompt(0)
    step = texts.draft(context, ASKED)
    cut = data.draw(st.integers(0, len(step) - 1))
    assert tuple(texts.draft(grown(context, step[:cut]), ASKED)) == tuple(step[cut:])


@given(workloads)
def test_an_answer_has_the_steps_and_the_lengths_of_its_workload(workload: Workload) -> None:
    texts = Texts(workload, 1)
    prompt = texts.prompt(0)
    answer = whole_text(texts)[len(prompt) :].tolist()
    assert len(prompt) == workload.prompt_tokens
    assert answer[0] == THINK
    reasoning, after = answer[: answer.index(CLOSE)], answer[answer.index(CLOSE) + 1 :]
    assert reasoning.count(BREAK) == workload.num_steps - 1
    assert len(after) == workload.answer_tokens + 1
    assert len(answer) <= workload.max_tokens


def drafted(texts: Texts, asked: EngineRequest = ASKED) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each step of the target, and what the draft would have written for it."""
    context, found = texts.prompt(0), []
    for _ in range(WORKLOAD.num_steps):
        own = tuple(texts.target(context, ASKED))
        found.append((own, tuple(texts.draft(context, asked))))
        context = grown(context, own)
    return found


def test_as_many_drafted_steps_mean_the_same_as_are_to() -> None:
    pairs = [pair for seed in range(12) for pair in drafted(Texts(WORKLOAD, seed))]
    exact = fmean(own == step for own, step in pairs)
    like = fmean(not any(token >= UNLIKE for token in step) for _, step in pairs)
    assert exact == pytest.approx(WORKLOAD.exact_rate, abs=0.05)
    assert like == pytest.approx(WORKLOAD.acceptance_rate, abs=0.06)
    assert not any(LIKE <= token < UNLIKE for _, step in pairs for token in step if any(one >= UNLIKE for one in step))


def test_the_drafts_next_token_is_the_targets_as_often_as_it_is_to_be() -> None:
    """Behind the target's own text: each step up to where the draft leaves it."""
    hits = trials = 0
    for own, step in (pair for seed in range(12) for pair in drafted(Texts(WORKLOAD, seed))):
        same = num_equal(own, step)
        hits, trials = hits + same, trials + min(same + 1, len(own))
    assert hits / trials == pytest.approx(WORKLOAD.token_agreement, abs=0.03)


def test_candidates_that_are_drawn_differ_by_their_seed() -> None:
    texts = Texts(WORKLOAD, 3)
    first, second = (drafted(texts, request((1,), 1, sampling=SAMPLED, seed=seed)) for seed in (1, 2))
    assert first == drafted(texts, request((1,), 1, sampling=SAMPLED, seed=1))
    assert first != second
    assert drafted(texts, request((1,), 1, sampling=GREEDY, seed=1)) == drafted(texts, request((1,), 1, sampling=GREEDY, seed=2))


def test_questions_differ_and_so_do_their_answers() -> None:
    texts = Texts(WORKLOAD, 0)
    assert texts.prompt(0)[0] != texts.prompt(1)[0]
    assert whole_text(texts, 0).tolist() != whole_text(texts, 1).tolist()


def test_a_judge_sees_a_word_that_means_something_else() -> None:
    texts = Texts(WORKLOAD, 0)
    assert texts.judge(np.array([1, 2, 3]), ASKED) == (1,)
    assert texts.judge(np.array([1, 4, 3]), ASKED) == (0,)


# The source that gives them out ---------------------------------------------------------------------------------------


def passes_of(source: ScriptedSource, asked: EngineRequest) -> list[tuple[int, ...]]:
    feed, found = source.begin(asked), []
    while feed.num_ready:
        found.append(feed.take().token_ids)
    return found


def test_a_run_ends_with_its_stop_word_or_its_budget() -> None:
    source = ScriptedSource(Texts(WORKLOAD, 0).target)
    prompt = Texts(WORKLOAD, 0).prompt(0).tolist()
    step = passes_of(source, request(prompt, 99, [(BREAK,)]))
    assert step[-1] == (BREAK,)
    assert all(len(one) == 1 for one in step)
    assert passes_of(source, request(prompt, 5, [(BREAK,)])) == step[:5]


def test_a_verification_takes_the_drafts_that_are_right_and_one_token_more() -> None:
    source = ScriptedSource(Texts(WORKLOAD, 0).target)
    prompt = Texts(WORKLOAD, 0).prompt(0).tolist()
    right = [token for (token,) in passes_of(source, request(prompt, 5))]
    wrong = (right[0], right[1], 3, right[3])
    assert passes_of(source, request(prompt, 5, draft_ids=tuple(right[:4]))) == [tuple(right)]
    assert passes_of(source, request(prompt, 5, draft_ids=wrong)) == [tuple(right[:3])]


@given(st.integers(1, 8), st.integers(1, 40))
def test_an_engine_that_drafts_by_itself_writes_the_same_text_in_fewer_passes(num_drafts: int, num_new: int) -> None:
    texts = Texts(WORKLOAD, 0)
    prompt = texts.prompt(0).tolist()
    plain = passes_of(ScriptedSource(texts.target, texts.draft), request(prompt, num_new))
    drafting = passes_of(ScriptedSource(texts.target, texts.draft), request(prompt, num_new, num_draft_tokens=num_drafts))
    assert [token for one in drafting for token in one] == [token for (token,) in plain]
    assert max(map(len, drafting)) <= num_drafts + 1
    assert len(drafting) <= len(plain)
