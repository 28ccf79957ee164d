"""What of an answer is reasoning, to the character; and what ends it: its own mark, or the budget that a request gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.errors import InvalidRequest
from lr_backend.loop.answer import Answer, Committed, TokenBudget
from lr_backend.loop.ledger import Ledger
from lr_backend.request import Mode, Origin
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE
from lr_backend.steps.step import Step, StepEnd
from lr_backend.steps.text import TextStream
from lr_backend.testing import run_virtual
from lr_backend.verify import Reason
from tests.support.world import BREAK, CLOSE, END, FIRST_LETTER, PROMPT, THINK, TOKENIZER, World, imitator, storyteller

PIECES = {1: "<think>", 2: "</think>", 3: "</", 4: "think>", 5: "\n", 6: "a", 7: "b"}


class Pieces:
    """A tokenizer whose text can quote the marks of the reasoning by other tokens."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(PIECES[token] for token in token_ids)


def test_no_response_tells_of_more_reasoning_than_it_has_text() -> None:
    """A stop string may begin in the mark that closes the reasoning: its text is held back, and the reasoning has ended."""
    tokenizer = cast("Any", Pieces())
    told: list[Committed] = []
    text, rules = TextStream(tokenizer, ["</think>a"]), StepRules.build(BLANK_LINE, {}, [0], 1, 2)
    answer = Answer(np.array([1], np.int32), TokenBudget(9), rules, text, tokenizer, Ledger(lambda: 0.0, 1), told.append)
    for ids in ((6, 2), (7,)):
        answer.commit(Step(ids, StepEnd.CAP), Origin.TARGET, Reason.NONE)
    assert [(one.text, one.num_reasoning_chars) for one in told] == [("a", 1), ("</think>b", len("</think>"))]


@given(
    st.lists(st.sampled_from(list(PIECES)), max_size=12),
    st.sampled_from([(6,), (1,), (1, 5), (1, 2, 5), (1, 0)]),
    st.sampled_from([(), ("a",), ("\nb",), ("think>b",), ("</think>",), ("</think>a", "think>\n")]),
    st.none() | st.integers(1, 6),
    st.data(),
)
def test_what_is_reasoning_is_told_to_the_character(
    ids: list[int], prompt: tuple[int, ...], stop: tuple[str, ...], budget: int | None, data: st.DataObject
) -> None:
    """By tokens, however they are cut into steps: a mark that is quoted ends nothing."""
    rules, tokenizer = StepRules.build(BLANK_LINE, {}, [0], 1, 2), cast("Any", Pieces())
    told: list[Committed] = []
    ledger = Ledger(lambda: 0.0, 1)
    text = TextStream(tokenizer, stop)
    prompt_ids = np.array(prompt, np.int32)
    answer = Answer(prompt_ids, TokenBudget(99, budget), rules, text, tokenizer, ledger, told.append)
    rest = list(ids)
    while rest and answer.finish is None:
        num = data.draw(st.integers(1, min(len(rest), answer.room(len(answer.prefix)))))
        answer.commit(Step(tuple(rest[:num]), StepEnd.CAP), Origin.TARGET, Reason.NONE)
        rest = rest[num:]
    answer.flush()

    ids, turn = list(answer.completion_ids), prompt[prompt.index(0) + 1 :] if 0 in prompt else prompt
    begin = 0 if 1 in turn else ids.index(1) if 1 in ids else len(ids)
    end = ids.index(2, begin) + 1 if 2 in ids[begin:] else len(ids)
    if 2 in turn or tokenizer.decode(ids[:begin]).strip():
        begin = end = 0
    first, last = len(tokenizer.decode(ids[:begin])), len(tokenizer.decode(ids[:end]))
    assert "".join(one.text for one in told) == tokenizer.decode(ids)[: sum(len(one.text) for one in told)]
    assert all(0 <= one.num_reasoning_chars <= len(one.text) for one in told)
    marked = "".join("r" * one.num_reasoning_chars + "." * (len(one.text) - one.num_reasoning_chars) for one in told)
    assert set(marked[first:last]) <= {"r"} and "r" not in marked[last:]  # before the first there are blank lines


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("budget", "num_thoughts"), [(1, 6), (5, 6), (6, 11), (12, 16), (25, 26), (40, None)])
def test_reasoning_that_has_had_its_tokens_ends_its_step_and_the_answer_follows(
    mode: Mode, stream: bool, budget: int, num_thoughts: int | None
) -> None:
    letters = tuple(range(FIRST_LETTER, FIRST_LETTER + 4))
    thought = (THINK, *(*letters, BREAK) * 6, CLOSE)

    def script(context: tuple[int, ...], seed: int) -> int:
        written = context[len(PROMPT) :]
        if CLOSE in written:
            return (BREAK, *letters, END)[len(written) - written.index(CLOSE) - 1]
        return thought[len(written)]

    world = World.of(script, script)
    outcome = run_virtual(world.answer(mode=mode, stream=stream, trace=True, thinking_token_budget=budget))
    reasoning = thought if num_thoughts is None else (*thought[:num_thoughts], CLOSE)
    assert outcome.completion_ids == (*reasoning, BREAK, *letters, END)
    assert outcome.usage.reasoning_tokens == len(reasoning)
    assert world.text == TOKENIZER.decode(outcome.completion_ids, skip_special_tokens=True)
    records = outcome.ledger.records
    assert sum(record.num_tokens for record in records) == len(outcome.completion_ids)
    closing = [record.num_tokens for record in records if record.reason == "thinking_budget"]
    assert closing == ([] if num_thoughts is None else [2])  # the mark and a blank line


def test_a_budget_for_a_model_that_marks_no_end_of_its_reasoning_is_refused() -> None:
    target = storyteller(1)
    world = World.of(target, imitator(target, 2, 0.9))
    world.models = replace(world.models, rules=StepRules.from_tokenizer(TOKENIZER, [END], think_open=None, think_close=None))
    with pytest.raises(InvalidRequest, match=r"^thinking_token_budget=9: the target marks no end"):
        run_virtual(world.answer(thinking_token_budget=9))
