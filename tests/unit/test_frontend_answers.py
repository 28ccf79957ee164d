"""The reasoning split at the deployment's markers, and the documents of OpenAI's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lr_client import FinishEvent, ReasoningSplitter, StepEvent, StepRecord, TextEvent, Usage
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lr_backend.frontend.answers import Choice, Head, Verbatim, counts_document, to_json
from lr_backend.frontend.asked import Asked
from tests.support.frontend import DEPLOYED


def splitter() -> ReasoningSplitter:
    return ReasoningSplitter(DEPLOYED.marks)


def test_without_markers_everything_is_content() -> None:
    one = ReasoningSplitter(DEPLOYED.model_copy(update={"think_close": None}).marks)
    assert one.feed("<think>a</think>b", 0) == ("", "<think>a</think>b")
    assert one.flush() == ("", "")


def test_a_marker_may_be_one_alone() -> None:
    """The prompt opens the reasoning."""
    one = ReasoningSplitter(DEPLOYED.model_copy(update={"think_open": None, "think_close": "</end>"}).marks)
    assert (one.feed("a</e", 4), one.feed("nd>b", 3), one.flush()) == (("a", ""), ("", "b"), ("", ""))


# ------------------------------------------------------------------------------------------------------------------- documents

USAGE = Usage(
    prompt_tokens=5,
    completion_tokens=9,
    reasoning_tokens=4,
    num_steps=3,
    num_steps_accepted_by={"judge": 1, "exact": 1},
    step_acceptance_rate=0.5,
    seed=7,
    mode="lr",
    degraded=("draft",),
)
EVENTS = [
    StepEvent(StepRecord(index=0, origin="draft", text="<think>one. ")),
    TextEvent("<think>one. ", 12),
    TextEvent("two</th", 7),
    TextEvent("ink>\n\n42", 4),
    FinishEvent("deadline", USAGE, '{"spans": []}'),
]


def asked(**fields: Any) -> Asked:
    return Asked.chat_of({"model": "demo", "messages": [{"role": "user", "content": "q"}], **fields}, DEPLOYED)


def head(*, chat: bool = True) -> Head:
    return Head("id", 1, "demo", chat, "0.2.0")


def test_a_whole_chat() -> None:
    choice = Choice(0, splitter())
    for event in EVENTS:
        choice.add(event)
    document = head().document(chunk=False) | {"choices": [choice.whole()]} | counts_document(asked(), [choice])

    answer = ChatCompletion.model_validate_json(to_json(document), strict=True)
    (found,) = answer.choices
    assert (answer.id, answer.object, answer.system_fingerprint) == ("chatcmpl-id", "chat.completion", "lookahead-0.2.0")
    assert (found.message.content, found.message.model_extra) == ("\n\n42", {"reasoning_content": "one. two"})
    assert found.finish_reason == "length", "it was cut"
    assert found.model_extra is not None
    told = found.model_extra["lookahead"]
    assert (told["finish_reason"], told["seed"], told["mode"], told["degraded"]) == ("deadline", 7, "lr", ["draft"])
    assert to_json({"one": Verbatim("[1, 2]"), "two": [Verbatim("{}"), "three"]}) == b'{"one":[1, 2],"two":[{},"three"]}'
    assert (told["trace"], [step["text"] for step in told["steps"]]) == ({"spans": []}, ["<think>one. "])
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.completion_tokens_details.reasoning_tokens) == (14, 4)
    assert answer.usage.model_extra == {} and answer.model_extra is not None
    assert answer.model_extra["lookahead"]["num_steps_accepted_by"] == {"exact": 1, "judge": 1}
    assert not {"step_acceptance_rate", "seed", "latency_s"} & set(answer.model_extra["lookahead"])


def test_a_streamed_chat() -> None:
    choice = Choice(1, splitter())
    chunks = [
        ChatCompletionChunk.model_validate_json(to_json(head().document(chunk=True) | {"choices": [one]}), strict=True)
        for one in (choice.opening(), *(one for event in EVENTS for one in choice.chunks(event)))
    ]
    found = [chunk.choices[0] for chunk in chunks]

    assert [one.delta.role for one in found] == ["assistant", *[None] * (len(found) - 1)]
    assert "".join(one.delta.content or "" for one in found) == "\n\n42"
    assert "".join((one.delta.model_extra or {}).get("reasoning_content", "") for one in found) == "one. two"
    assert [one.finish_reason for one in found] == [*[None] * (len(found) - 1), "length"]
    told = [one.model_extra["lookahead"] for one in found if one.model_extra]
    assert found[0].delta.content == ""
    assert (told[0]["step"]["origin"], told[-1]["seed"]) == ("draft", 7)
    assert {one.index for one in found} == {1}


@pytest.mark.parametrize("streamed", [True, False])
def test_a_completion_is_the_text_as_it_is(streamed: bool) -> None:
    choice = Choice(0, None)
    documents = []
    for event in EVENTS:
        if streamed:
            documents += choice.chunks(event)
        else:
            choice.add(event)
    documents = documents or [choice.whole()]
    about = head(chat=False).document(chunk=streamed)
    last = Completion.model_validate(about | {"choices": [documents[-1]]})
    assert (last.object, last.choices[0].finish_reason) == ("text_completion", "length")
    assert "".join(one["text"] for one in documents) == "<think>one. two</think>\n\n42"


@given(st.integers(1, 4), st.integers(1, 2))
def test_usage_adds_the_choices_up_and_counts_a_prompt_once(num_choices: int, num_prompts: int) -> None:
    document = {"model": "demo", "prompt": ["q"] * num_prompts, "n": num_choices}
    request = Asked.completion_of(document, DEPLOYED)
    choices = [Choice(number, None, FinishEvent("stop", USAGE)) for number in range(len(request.jobs))]
    document, total = counts_document(request, choices), num_choices * num_prompts
    usage, counts = document["usage"], document["lookahead"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5 * num_prompts, 9 * total)
    assert counts["num_steps"] == 3 * total
    assert counts["num_steps_accepted_by"] == {"judge": total, "exact": total}
    assert counts["num_reused_tokens"] is None  # nobody has counted them
    assert set(usage) == {*CompletionUsage.model_fields} - {"prompt_tokens_details"}, "and nothing that OpenAI's has not"


@pytest.mark.parametrize(("counted", "total"), [([None, 7, None, 5], 12), ([0, None], 0), ([None, None], None)])
def test_what_only_some_choices_have_counted_is_added_up_of_those(counted: list[int | None], total: int | None) -> None:
    request = Asked.completion_of({"model": "demo", "prompt": "q", "n": len(counted)}, DEPLOYED)
    usages = [replace(USAGE, num_reused_tokens=number) for number in counted]
    choices = [Choice(number, None, FinishEvent("stop", usage)) for number, usage in enumerate(usages)]
    assert counts_document(request, choices)["lookahead"]["num_reused_tokens"] == total
