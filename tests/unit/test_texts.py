"""Scripted texts follow their workload, and go on the same way whoever asks."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.emulated.texts import DRAFT_TEMPERATURE, Script, ScriptedSource, Texts
from lr_backend.emulated.vocabulary import (
    ALIGNED,
    ASSISTANT,
    BREAK,
    CLOSE,
    END,
    FIRST_WORD,
    LIKE,
    NUM_WORDS,
    THINK,
    UNALIGNED,
    UNLIKE,
    USER,
    VOCABULARY,
)
from lr_backend.emulated.workload import Workload
from lr_backend.engine import GREEDY, EngineCall, Role, Sampling
from lr_backend.engine.request import EngineRequest
from lr_backend.errors import ConfigError
from lr_backend.steps.tokens import num_equal
from lr_backend.verify.judge_prompt import JudgePrompt
from tests.support.embedded_engines import request
from tests.support.texts import ASKED, grown, share_looked_up, whole_text

SAMPLED = Sampling(temperature=1.0)
WORKLOAD = Workload(0.6, exact_rate=0.2, token_agreement=0.9, word_agreement=0.5, step_tokens=12, step_spread=0.4, num_steps=40)

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


def test_so_it_is_after_the_reasoning() -> None:
    """Where the target writes alone, and only tokens are drafted."""
    texts, hits, trials = Texts(replace(WORKLOAD, answer_tokens=4000), 0), 0, 0
    whole = whole_text(texts)
    start = len(whole) - 4001
    for place in range(start, len(whole) - 1, 40):
        drafted = texts.draft(whole[:place], ASKED)
        same = num_equal(drafted, whole[place:].tolist())
        hits, trials = hits + same, trials + same + 1
        again = texts.draft(grown(whole[:place], drafted[:7]), ASKED)
        assert tuple(again[: len(drafted) - 7]) == tuple(drafted[7:])
    assert hits / trials == pytest.approx(WORKLOAD.token_agreement, abs=0.03)


def test_candidates_that_are_drawn_differ_by_their_seed() -> None:
    texts = Texts(WORKLOAD, 3)
    first, second = (drafted(texts, request((1,), 1, sampling=SAMPLED, seed=seed)) for seed in (1, 2))
    assert first == drafted(texts, request((1,), 1, sampling=SAMPLED, seed=1))
    assert first != second
    assert drafted(texts, request((1,), 1, sampling=GREEDY, seed=1)) == drafted(texts, request((1,), 1, sampling=GREEDY, seed=2))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(DRAFT_TEMPERATURE), Sampling(1.0, top_k=1)], ids=repr)
def test_first_candidates_are_the_same_whoever_asks(sampling: Sampling) -> None:
    """In process, and by Triton, where a greedy call says no temperature."""
    texts = Texts(WORKLOAD, 0)
    call = EngineCall("a", texts.prompt(0), 4, sampling=sampling, seed=7)
    for asked in (EngineRequest.from_call(call), EngineRequest.from_tensors("a", call.tensors())):
        assert drafted(texts, asked) == drafted(texts)


def test_questions_differ_and_so_do_their_answers() -> None:
    texts = Texts(WORKLOAD, 0)
    first, second = texts.prompt(0), texts.prompt(1)
    assert first[1] != second[1]
    assert whole_text(texts, 0)[len(first) :].tolist() != whole_text(texts, 1)[len(second) :].tolist()


@given(workloads, st.integers(0, 9))
def test_a_question_stands_in_its_template_and_reads_as_what_a_user_writes(workload: Workload, number: int) -> None:
    texts = Texts(workload, 1)
    prompt = texts.prompt(number).tolist()
    assert (prompt[0], prompt[-1]) == (USER, ASSISTANT)
    assert len(prompt) == workload.prompt_tokens
    turn = [{"role": "user", "content": texts.question(number)}]
    assert VOCABULARY.encode(VOCABULARY.apply_chat_template(turn, add_generation_prompt=True)) == prompt


@given(st.lists(st.integers(FIRST_WORD, FIRST_WORD + NUM_WORDS - 1), max_size=20), st.integers(1, 9))
def test_any_question_has_an_answer(words: list[int], number: int) -> None:
    """Of the workload's steps, whatever stands in it: markers too, which are a user's own."""
    texts, prompt = Texts(WORKLOAD, number), np.array([USER, THINK, *words, CLOSE, BREAK, ASSISTANT], np.int32)
    context = prompt
    while context[-1] != END:
        context = grown(context, texts.target(context, ASKED))
    assert context[len(prompt)] == THINK
    assert (context[len(prompt) :] == BREAK).sum() == WORKLOAD.num_steps - 1


def test_a_judge_sees_a_word_that_means_something_else() -> None:
    texts = Texts(WORKLOAD, 0)
    assert texts.judge(np.array([FIRST_WORD, LIKE, UNLIKE - 1, UNLIKE + NUM_WORDS]), ASKED) == (ALIGNED,)
    assert texts.judge(np.array([FIRST_WORD, LIKE, UNLIKE]), ASKED) == (UNALIGNED,)
    assert texts.judge(np.array([UNLIKE + NUM_WORDS - 1, LIKE]), ASKED) == (UNALIGNED,)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize(
    "shape",
    [
        {"step_tokens": 24},
        {"step_tokens": 30, "step_spread": 0.9},
        {"step_tokens": 8, "num_steps": 250},
        {"step_tokens": 24, "num_steps": 40, "answer_tokens": 900},
    ],
)
def test_as_many_tokens_are_found_by_looking_up_as_are_to(rate: float, shape: dict[str, float]) -> None:
    workload = replace(WORKLOAD, ngram_hit_rate=rate, prompt_tokens=50, **{"num_steps": 80, "step_spread": 0.2, **shape})
    assert share_looked_up(workload, range(6)) == pytest.approx(rate, abs=0.025 + 0.08 * rate if rate else 0.01)


@given(workloads, st.floats(0.1, 0.8), st.data())
def test_texts_that_repeat_themselves_go_on_the_same_way_too(workload: Workload, rate: float, data: st.DataObject) -> None:
    texts = Texts(replace(workload, ngram_hit_rate=rate), 1)
    whole, start = whole_text(texts), workload.prompt_tokens
    cut = data.draw(st.integers(start, len(whole) - 1))
    rest = Texts(replace(workload, ngram_hit_rate=rate), 1).target(whole[:cut], ASKED)
    assert tuple(rest) == tuple(whole[cut : cut + len(rest)].tolist())


@given(st.integers(0, NUM_WORDS - 1), st.integers(0, NUM_WORDS - 1), st.sampled_from([FIRST_WORD, LIKE, UNLIKE]), st.booleans())
def test_a_judge_sees_it_in_its_own_prompt_too(first: int, second: int, kind: int, begins: bool) -> None:
    """There a step has lost the space before it. The target is asked for audits."""
    texts, markers = Texts(WORKLOAD, 0), ("<think>", "</think>")
    judge = JudgePrompt.from_tokenizer(VOCABULARY)
    audit = JudgePrompt.for_audits(VOCABULARY, *markers)
    target, drafted = (FIRST_WORD + first, FIRST_WORD + second), (FIRST_WORD + first, kind + second)
    drafted = drafted[::-1] if begins else drafted
    steps, differs = (VOCABULARY.decode(target), VOCABULARY.decode(drafted)), kind == UNLIKE
    judged = VOCABULARY.decode(texts.judge(np.array(judge.ids(*steps)), ASKED))
    audited = VOCABULARY.decode(texts.target(np.array(audit.ids(*steps)), ASKED))
    assert [judged, audited] == ["unaligned" if differs else "aligned"] * 2


# The source that gives them out ---------------------------------------------------------------------------------------


def passes_of(source: ScriptedSource, asked: EngineRequest) -> list[tuple[int, ...]]:
    """As far as an engine reads it: up to a stop word."""
    feed, found = source.begin(asked), []
    while feed.num_ready:
        found.append(feed.take().token_ids)
        if found[-1][-1] in asked.stop_words.last_tokens:
            break
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
    assert passes_of(source, request(prompt, 5, draft_ids=wrong))[0] == tuple(right[:3])


@given(st.integers(1, 8), st.integers(1, 40))
def test_an_engine_that_drafts_by_itself_writes_the_same_text_in_fewer_passes(num_drafts: int, num_new: int) -> None:
    texts = Texts(WORKLOAD, 0)
    prompt = texts.prompt(0).tolist()
    plain = passes_of(ScriptedSource(texts.target, texts.draft), request(prompt, num_new))
    drafting = passes_of(ScriptedSource(texts.target, texts.draft), request(prompt, num_new, num_draft_tokens=num_drafts))
    assert [token for one in drafting for token in one] == [token for (token,) in plain]
    assert max(map(len, drafting)) <= num_drafts + 1
    assert len(drafting) <= len(plain)


@given(st.integers(0, 6), st.integers(1, 20))
def test_what_goes_on_behind_its_drafts_writes_the_same_text(num_right: int, num_new: int) -> None:
    texts = Texts(WORKLOAD, 0)
    prompt = texts.prompt(0).tolist()
    plain = [token for (token,) in passes_of(ScriptedSource(texts.target), request(prompt, 40))]
    asked = request(prompt, num_new, draft_ids=(*plain[:num_right], END))
    passes = passes_of(ScriptedSource(texts.target), asked)
    assert passes[0] == tuple(plain[: num_right + 1])
    assert all(len(one) == 1 for one in passes[1:])
    assert [token for one in passes for token in one] == plain[: max(num_right + 1, num_new)]


# The script of an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_a_script_survives_the_way_through_a_config_file(role: Role) -> None:
    script = Script(role, WORKLOAD, 3)
    again = Script.from_json(script.as_json())
    assert again == script
    prompt = Texts(WORKLOAD, 3).prompt(0).tolist()
    assert passes_of(again.source(), request(prompt, 9)) == passes_of(script.source(), request(prompt, 9))


def test_each_role_writes_its_own_text() -> None:
    workload = Workload(0.0, step_tokens=9, prompt_tokens=20)
    texts = Texts(workload, 0)
    prompt = texts.prompt(0)
    asked = request(prompt.tolist(), 9)
    written = {role: [token for one in passes_of(Script(role, workload).source(), asked) for token in one] for role in Role}
    assert written[Role.TARGET] == list(texts.target(prompt, asked))
    assert written[Role.DRAFT] == list(texts.draft(prompt, asked)) != written[Role.TARGET]
    assert set(written[Role.JUDGE]) == {ALIGNED}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "script: "),
        ('{"role": "critic", "workload": {"acceptance_rate": 0.5}}', "script: role: "),
        ('{"role": "target", "workload": {"acceptance_rate": 2}}', "script: workload: acceptance_rate=2.0 is out of range"),
        ('{"role": "target", "workload": {"acceptance_rate": 1, "style": 1}}', "script: workload.style: "),
    ],
)
def test_a_script_that_is_none_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Script.from_json(text)
    assert refused.value.message.startswith(said)
    assert "\n" not in refused.value.message


def test_behind_its_end_a_text_has_nothing_but_the_end() -> None:
    """An engine may read on: a stop word of two tokens ends with one that stands alone as well."""
    workload = Workload(0.6, num_steps=1, step_tokens=4)
    passes = passes_of(ScriptedSource(Texts(workload, 0).target), request(Texts(workload, 0).prompt(0).tolist(), 40))
    assert len(passes) == 40
    assert passes[passes.index((END,)) :] == [(END,)] * (40 - passes.index((END,)))
