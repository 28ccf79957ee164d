"""The paper's synchronous procedure: three phases that wait for one another, and what it commits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bench.kit.synchronous import SynchronousAnswer, SynchronousLookahead, Texts, same_text
from lr_backend.engine import GREEDY
from lr_backend.errors import EngineUnavailable
from lr_backend.loop.assemble import Engines
from lr_backend.steps.rules import StepRules
from lr_backend.testing import Script, ScriptedEngine, run_virtual
from tests.support.world import (
    BREAK,
    END,
    FIRST_LETTER,
    MODELS,
    PROMPT,
    TOKENIZER,
    Alike,
    imitator,
    judge_script,
    storyteller,
)

RULES = StepRules.from_tokenizer(TOKENIZER, [END], think_open=None, think_close=None)
TEXTS = Texts(RULES, TOKENIZER, MODELS.judge_prompt, MODELS.judge_tokenizer)
MAX_TOKENS = 200
AFTER_A_STEP = (*PROMPT, BREAK)
"""A prompt after which a step begins: even the first one may be the draft's."""


class Run:
    """One answer over scripted engines; a token takes the target 0.1 s and the draft 0.02 s, a verdict 0.05 s."""

    def __init__(
        self,
        target: Script,
        draft: Script,
        alike: Alike,
        *,
        max_depth: int = 4,
        prompt: tuple[int, ...] = AFTER_A_STEP,
        judge_fails: bool = False,
        max_step_tokens: int = 100,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        def engine(script: Script, seconds: float) -> ScriptedEngine:
            return ScriptedEngine(script, delay=lambda call, num_tokens: seconds * num_tokens)

        self.target, self.draft = engine(target, 0.1), engine(draft, 0.02)
        self.judge = engine(judge_script(alike), 0.05)
        if judge_fails:
            self.judge.fail = lambda call: EngineUnavailable("the judge is down")
        engines = Engines(self.target, self.draft, self.judge)
        procedure = SynchronousLookahead(engines, TEXTS, GREEDY, max_depth, max_tokens, max_step_tokens)
        self.answer: SynchronousAnswer = run_virtual(procedure.answer(np.asarray(prompt, dtype=np.int32), "id", 1))
        assert not any(one.in_flight for one in (self.target, self.draft, self.judge))


def alone(target: Script, prompt: tuple[int, ...] = AFTER_A_STEP) -> tuple[int, ...]:
    """What the target writes by itself, to its end."""
    context = list(prompt)
    while context[-1] != END and len(context) < len(prompt) + MAX_TOKENS:
        context.append(target(tuple(context), 0))
    return tuple(context[len(prompt) :])


@pytest.mark.parametrize("salt", range(6))
@pytest.mark.parametrize("max_depth", [1, 2, 4])
def test_a_judge_that_rejects_leaves_the_targets_own_answer(salt: int, max_depth: int) -> None:
    target = storyteller(salt)

    run = Run(target, imitator(target, salt + 1, 0.7), lambda one, other: False, max_depth=max_depth)

    assert run.answer.token_ids == alone(target)


@pytest.mark.parametrize("salt", range(6))
def test_a_draft_that_is_the_target_saves_cycles_and_asks_no_judge(salt: int) -> None:
    target = storyteller(salt)

    run = Run(target, target, lambda one, other: False)

    assert run.answer.token_ids == alone(target)
    assert run.answer.num_accepted == run.answer.num_compared
    assert run.answer.num_cycles < Run(target, target, lambda one, other: False, max_depth=1).answer.num_cycles
    assert not run.judge.calls


def test_phases_wait_for_one_another_and_the_target_works_as_one_batch() -> None:
    target = storyteller(3)
    run = Run(target, imitator(target, 4, 0.8), lambda one, other: True)

    drafts, targets = ([one.started_s for one in engine.calls] for engine in (run.draft, run.target))
    batches = sorted(set(targets))
    assert len(batches) == run.answer.num_cycles
    assert all(1 <= targets.count(batch) <= 4 for batch in batches)
    assert run.target.max_in_flight > 1
    assert run.draft.max_in_flight == 1
    for began, ended in pairwise(batches):
        between = [started for started in drafts if began <= started < ended]
        judged = [one.started_s for one in run.judge.calls if began <= one.started_s < ended]
        assert not judged or not between or max(judged) < min(between)


def test_a_judge_that_accepts_lets_the_draft_write() -> None:
    target = storyteller(3)
    run = Run(target, imitator(target, 4, 0.8), lambda one, other: True)

    assert run.answer.token_ids != alone(target)
    assert run.answer.num_accepted > 0


def test_the_first_step_after_a_chat_template_is_the_targets() -> None:
    target = storyteller(3)
    run = Run(target, imitator(target, 4, 0.5), lambda one, other: True, prompt=PROMPT, max_depth=2)

    first = next(index for index, token in enumerate(run.answer.token_ids) if "\n\n" in TOKENIZER.words[token])
    assert run.answer.token_ids[: first + 1] == alone(target, PROMPT)[: first + 1]


def test_what_follows_a_step_that_was_cut_is_the_targets() -> None:
    def endless(letter: int) -> Script:
        return lambda context, seed: END if len(context) > len(AFTER_A_STEP) + 20 else letter

    run = Run(endless(FIRST_LETTER), endless(FIRST_LETTER + 1), lambda one, other: True, max_step_tokens=5)

    assert run.answer.num_accepted == 1  # the first step, which begins after a blank line
    assert run.answer.token_ids[:5] == (FIRST_LETTER + 1,) * 5
    assert set(run.answer.token_ids[5:]) == {FIRST_LETTER, END}


def test_a_judge_that_fails_rejects() -> None:
    target = storyteller(3)
    run = Run(target, imitator(target, 4, 0.7), lambda one, other: True, judge_fails=True)

    assert run.answer.token_ids == alone(target)


@pytest.mark.parametrize("salt", range(8))
def test_nothing_stands_or_is_written_below_an_end(salt: int) -> None:
    target = storyteller(salt, num_steps=2)
    run = Run(target, imitator(target, salt + 1, 0.6), lambda one, other: True)

    assert END not in run.answer.token_ids[:-1]
    for engine in (run.target, run.draft):
        assert not any(END in one.call.input_ids.tolist() for one in engine.calls)


def test_an_answer_ends_at_its_limit() -> None:
    run = Run(lambda context, seed: FIRST_LETTER, lambda context, seed: FIRST_LETTER, lambda a, b: True, max_tokens=30)
    assert len(run.answer.token_ids) == 30


def test_white_space_and_case_do_not_matter() -> None:
    assert same_text("So 3 + 4\n\n", " so 3+4")
    assert not same_text("So 3 + 4", "So 3 + 5")
