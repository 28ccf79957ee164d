"""Where steps end, and how committed tokens become text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lr_backend.contract import decode_stop_words
from lr_backend.errors import ConfigError
from lr_backend.propose import Lookup, NGram, Proposal
from lr_backend.propose.ngram import lookup_ngram
from lr_backend.steps import rules
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE, Delimiter
from lr_backend.steps.step import StepEnd
from lr_backend.steps.text import TextStream, text_of
from lr_backend.testing import run_virtual
from lr_backend.verify import Reason, StepPair, Verdict, settle
from lr_backend.verify.guarded import GuardedVerifier
from tests.support.checkpoints import QWEN_LIKE
from tests.support.word_tokenizer import WordTokenizer
from tests.support.world import BREAK, CLOSE, DOT_BREAK, DOT_NEWLINE, END, NEWLINE, RULES, THINK, TOKENIZER, TOOL

tokens = st.lists(st.integers(0, len(TOKENIZER.words) - 1), max_size=30)


@dataclass(frozen=True)
class Several:
    """Delimiters, with which no step ends."""

    delimiters: tuple[str, ...]
    asked: list[str] = field(default_factory=list)

    def ends(self, text: str) -> bool:
        self.asked.append(text)
        return False


@given(tokens, st.integers(1, 40))
def test_a_step_is_the_shortest_prefix_that_holds_an_end(ids: list[int], max_tokens: int) -> None:
    step = RULES.cut(ids, max_tokens)

    def ended(part: list[int]) -> bool:
        return bool({END, CLOSE} & set(part)) or "\n\n" in TOKENIZER.decode(part)

    complete = [n for n in range(1, min(len(ids), max_tokens) + 1) if ended(ids[:n])]
    if complete:
        assert step is not None
        assert len(step.ids) == complete[0]
        assert step.end is not StepEnd.CAP
    elif len(ids) >= max_tokens:
        assert step is not None
        assert step.end is StepEnd.CAP
    else:
        assert step is None


def test_a_token_beyond_the_vocabulary_is_a_marker_below_which_nothing_is_speculated() -> None:
    """It has no text, so a judge would not see it; and the target may refuse it."""
    beyond = len(TOKENIZER) + 5
    drafted, target = RULES.cut([7, beyond, BREAK], 9), RULES.cut([7, BREAK], 9)
    assert drafted is not None and target is not None
    assert drafted.closes and not target.closes
    assert settle(target, drafted) == Verdict(False, Reason.MARKER)


@pytest.mark.parametrize(
    ("ids", "end", "closes"),
    [
        ([7, BREAK], StepEnd.DELIMITER, False),
        ([7, DOT_BREAK, 8], StepEnd.DELIMITER, False),
        ([NEWLINE, NEWLINE], StepEnd.DELIMITER, False),
        ([THINK, 7, BREAK], StepEnd.DELIMITER, False),
        ([7, CLOSE], StepEnd.THINK_CLOSE, True),
        ([7, END], StepEnd.END, True),
        ([TOOL, BREAK], StepEnd.DELIMITER, True),
    ],
)
def test_what_ended_a_step(ids: list[int], end: StepEnd, closes: bool) -> None:
    step = RULES.cut(ids, 10)

    assert step is not None
    assert (step.end, step.closes) == (end, closes)


def test_the_stop_list_holds_delimiters_inside_tokens_pairs_and_every_end() -> None:
    words = decode_stop_words(RULES.stop_words)

    assert {(END,), (CLOSE,), (BREAK,), (DOT_BREAK,), (NEWLINE, NEWLINE), (DOT_NEWLINE, NEWLINE)} == set(words)
    assert decode_stop_words(RULES.end_words) == ((END,),)


def test_of_delimiters_split_over_two_tokens_the_shortest_pairs_are_stop_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_PAIRS", 7)
    delimiters = (". ", ".\n", "a.\n")
    words = [*(f"{'x' * n}." for n in range(5)), *(f" {'y' * n}" for n in range(5)), "\n", "\nz", "a", ".\nz", "end"]
    pieces = dict(enumerate(words))
    built = StepRules.build(Several(delimiters), pieces, [len(pieces) - 1])

    def holds(text: str) -> bool:
        return any(one in text for one in delimiters)

    split = [
        (len(left + right), first, second)
        for (first, left), (second, right) in product(pieces.items(), repeat=2)
        if holds(left + right) and not holds(left) and not holds(right)
    ]
    shortest = {(first, second) for _, first, second in sorted(split)[:7]}
    assert {word for word in decode_stop_words(built.stop_words) if len(word) == 2} == shortest


def test_a_vocabulary_of_a_hundred_thousand_words_has_its_pairs_in_no_time() -> None:
    """Each word that ends with a full stop goes with each that begins with a blank: some billions."""
    pieces = {number: f"{number}." if number % 2 else f" {number}" for number in range(100_000)} | {100_000: ""}
    built = StepRules.build(Delimiter(". "), pieces, [100_000])
    assert len(decode_stop_words(built.stop_words)) == 1 + rules.MAX_PAIRS


def test_a_delimiter_that_was_refused_is_not_asked_about_again() -> None:
    """Its end must be where it was just written, however long another delimiter is."""

    segmenter = Several(("\n\n", "\n```\n"))
    pieces = dict(enumerate(["a", "\n", "\n\n", "b", "```", "end"]))
    StepRules.build(segmenter, pieces, [5]).cut([0, 2, 3, 3, 1, 4, 1, 3], 20)
    assert segmenter.asked == ["a\n\n", "a\n\nbb\n```\n"]


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="end token"):
        StepRules.build(BLANK_LINE, {}, [])


@given(st.text(alphabet="ab\n", max_size=40), st.data())
def test_text_is_streamed_without_loss(text: str, data: st.DataObject) -> None:
    tokenizer = WordTokenizer(["a", "b", "\n"])
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    out = ""
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        out += stream.push(ids[:size])
        ids = ids[size:]

    assert out + stream.flush() == text


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_cuts_the_text_wherever_it_is_split(text: str, stop: list[str], data: st.DataObject) -> None:
    tokenizer = WordTokenizer(["a", "b", "aba", "bb"])
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stop)
    out, num_tokens, left = "", 0, ids
    while left and not stream.stopped:
        size = data.draw(st.integers(1, len(left)))
        out += stream.push(left[:size])
        num_tokens, left = num_tokens + stream.num_last, left[size:]
    out += stream.flush()

    begun = (tokenizer.decode(ids[:number]) for number in range(len(ids) + 1))
    number, said = next(((n, one) for n, one in enumerate(begun) if any(word in one for word in stop)), (len(ids), text))
    found = [said.find(word) for word in stop if word in said]
    assert (out, num_tokens) == (said[: min(found)] if found else text, number)
    assert stream.stopped == bool(found)


@given(st.text(alphabet="aSTOP€😀", max_size=20), st.data())
def test_a_stop_string_is_seen_before_the_pieces_of_a_character(text: str, data: st.DataObject) -> None:
    """What ends an answer is settled with its last token, and not once the rest of the text is sent."""

    class Utf8:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            return bytes(token_ids).decode("utf-8", errors="replace")

    whole = text.encode()
    left = list(whole[: data.draw(st.integers(0, len(whole)))])
    stream, out, seen = TextStream(Utf8(), ["STOP", "a"]), "", False
    while left:
        size = data.draw(st.integers(1, len(left)))
        out += stream.push(left[:size])
        left, seen = left[size:], stream.stopped
    out += stream.flush()
    assert stream.stopped == seen
    assert not seen or (out + "STOP" in text or out + "a" in text)


@given(st.lists(st.sampled_from(["a", " b", " c d", ".", " "]), min_size=1, max_size=30), st.data())
def test_a_tokenizer_that_drops_a_first_blank_drops_none_in_the_middle(words: list[str], data: st.DataObject) -> None:
    """As SentencePiece's: each text that it decodes loses a blank at its beginning, and only the answer's own may."""

    class Strips(WordTokenizer):
        def decode(self, token_ids: Any, **kwargs: Any) -> str:
            return super().decode(token_ids, **kwargs).removeprefix(" ")

    tokenizer = Strips(["a", " b", " c d", ".", " "])
    ids = [tokenizer.words.index(word) for word in words]
    stream, out, left = TextStream(tokenizer), "", ids
    while left:
        size = data.draw(st.integers(1, len(left)))
        out += stream.push(left[:size])
        left = left[size:]
    assert out + stream.flush() == tokenizer.decode(ids)
    goes_on = TextStream(tokenizer, goes_on=[0, 1, 3])
    assert goes_on.push(ids) + goes_on.flush() == "".join(words), "as the text of a prompt"


@given(st.text(alphabet="a€é😀\n ", min_size=1, max_size=20), st.data())
def test_a_run_of_bytes_is_read_whole_or_not_at_all(text: str, data: st.DataObject) -> None:
    """As byte fallback does it: where a run of byte tokens is no text, each of them is a replacement character."""

    class Bytes:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            try:
                return bytes(token_ids).decode("utf-8").removeprefix(" ")
            except UnicodeDecodeError:
                return "\ufffd" * len(token_ids)

    stream, out, left = TextStream(Bytes()), "", list(text.encode())  # type: ignore[arg-type]
    while left:
        size = data.draw(st.integers(1, len(left)))
        out += stream.push(left[:size])
        left = left[size:]
    assert out + stream.flush() == text.removeprefix(" ")


def test_bytes_of_a_character_wait_for_each_other() -> None:
    class Bytes:
        all_special_ids = ()

        def __len__(self) -> int:
            return 256

        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    stream = TextStream(Bytes())  # type: ignore[arg-type]
    first, second, third = "€".encode()

    assert [stream.push([part]) for part in (first, second, third)] == ["", "", "€"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 8), st.integers(1, 3))
def test_ngram_lookup_continues_the_longest_suffix_seen_before(
    context: list[int], ngram_max: int, max_tokens: int, ngram_min: int
) -> None:
    found = lookup_ngram(np.asarray(context, dtype=np.int32), ngram_max, max_tokens, ngram_min)

    expected: list[int] = []
    for size in range(min(ngram_max, len(context) - 1), ngram_min - 1, -1):
        starts = [i for i in range(len(context) - size) if context[i : i + size] == context[-size:]]
        if starts:
            expected = context[starts[-1] + size :][:max_tokens]
            break
    assert list(found) == (expected if max_tokens else [])


def test_a_lookup_goes_by_more_than_a_word_or_two() -> None:
    async def proposed(*context: int) -> Proposal:
        async with Lookup(NGram()).step(
            np.asarray(context[:-1], dtype=np.int32), RULES.stop_words, lambda ids: 9, None
        ) as drafts:
            return await drafts.next(context[-1:], 2)

    assert run_virtual(proposed(1, 2, 3, 4, 5, 1, 2, 3)) == Proposal((4, 5))
    assert not run_virtual(proposed(1, 2, 3, 4, 5, 9, 2, 3)).token_ids


def test_rules_of_a_real_tokenizer_cut_where_the_text_does() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QWEN_LIKE)
    rules = StepRules.from_tokenizer(tokenizer, [tokenizer.eos_token_id])
    text = (
        "<think>\nMia has 12 apples.\n\nSo Tom has 3 (see above):\n\n7 + 5 = 12 apples.\n</think>\n\nThe answer is \\boxed{12}."
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    steps = []
    while (step := rules.cut(ids, 100)) is not None:
        steps.append(tokenizer.decode(step.ids))
        ids = ids[len(step.ids) :]

    assert steps == ["<think>\nMia has 12 apples.\n\n", "So Tom has 3 (see above):\n\n", "7 + 5 = 12 apples.\n</think>", "\n\n"]


@pytest.mark.parametrize(("proposed", "taken"), [((3, -1, 4), (3,)), ((3, 10), (3,)), ((1 << 40,), ()), ((3, 9, 0), (3, 9, 0))])
def test_what_is_no_token_ends_a_proposal(proposed: tuple[int, ...], taken: tuple[int, ...]) -> None:
    class Pads:
        async def propose(self, ids: Any, max_tokens: int) -> tuple[int, ...]:
            return proposed

    async def first() -> Proposal:
        source = Lookup(Pads(), num_ids=10)
        async with source.step(np.array([1], np.int32), np.zeros((2, 0), np.int32), lambda ids: 9, None) as step:
            return await step.next((), 4)

    assert run_virtual(first()).token_ids == taken


@pytest.mark.parametrize("are_special", ["", "additional_special_tokens", "add_tokens"])
def test_marks_of_the_reasoning_are_told_even_if_they_are_special_tokens(are_special: str) -> None:
    """A fine-tune may have added them so. Without them nobody could tell the reasoning from the answer."""
    marks = ["<think>", "</think>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<end>": 0, "why": 1, "so": 2, "<think>": 3, "</think>": 4}, unk_token="<end>")),
        eos_token="<end>",
        additional_special_tokens=marks if are_special == "additional_special_tokens" else [],
    )
    if are_special == "add_tokens":
        tokenizer.add_tokens([*marks, "<other>"], special_tokens=True)
    rules = StepRules.from_tokenizer(tokenizer, [0])
    stream = TextStream(tokenizer, hidden_ids=rules.hidden_ids)
    text = stream.push([3, 1, 4, 2, 0]) + stream.flush()
    assert text.split() == ["<think>", "why", "</think>", "so"]
    if are_special == "add_tokens":
        (other,) = tokenizer.convert_tokens_to_ids(["<other>"])
        assert text_of(tokenizer, [1, other], rules.hidden_ids).split() == ["why"] and other in rules.marker_ids


def test_to_an_answer_leads_the_mark_and_a_blank_line_where_the_tokenizer_says_them_so() -> None:
    tokenizer = WordTokenizer(["a", "<think>", "</think>", "\n\n", "<end>"], special=frozenset({"<end>"}))
    assert StepRules.from_tokenizer(tokenizer, [4]).answer_ids == (2, 3)
    assert StepRules.from_tokenizer(tokenizer, [4], think_open=None, think_close=None).answer_ids == ()
    assert StepRules.build(BLANK_LINE, {}, [4], 1, 2).answer_ids == (2,)


def test_marks_of_a_call_are_told_even_if_they_are_special_tokens() -> None:
    tokenizer = WordTokenizer(["a", "<tool_call>", "<end>"], special=frozenset({"<tool_call>", "<end>"}))
    rules = StepRules.from_tokenizer(tokenizer, [2], markers=["<tool_call>"])
    assert text_of(tokenizer, [1, 0, 2], rules.hidden_ids) == "<tool_call>a"


@pytest.mark.parametrize("eos", ["<end>", None], ids=["special", "none special"])
def test_a_vocabulary_may_have_gaps(eos: str | None) -> None:
    words = {"<end>": 0, "why": 1, ".\n\n": 9}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<end>")), eos_token=eos)
    rules = StepRules.from_tokenizer(tokenizer, [0])
    assert len(tokenizer) == 3 and rules.num_ids == 10
    step = rules.cut([1, 9, 1], 9)
    assert step is not None and step.ids == (1, 9) and not step.markers


def test_an_end_token_is_no_text_even_if_it_is_not_special() -> None:
    tokenizer = WordTokenizer(["a", "<|im_end|>", "<end>"], special=frozenset({"<end>"}))
    assert text_of(tokenizer, [0, 1], StepRules.from_tokenizer(tokenizer, [1]).hidden_ids) == "a"
    assert StepRules.from_tokenizer(tokenizer, [2]).hidden_ids is None


@pytest.mark.parametrize("swallows", [False, True], ids=["turns", "swallows"])
@pytest.mark.parametrize("proposes", [False, True], ids=["verifier", "proposer"])
def test_a_plug_in_that_hides_a_cancel_keeps_nobody(swallows: bool, proposes: bool) -> None:
    class Hides:
        async def propose(self, ids: Any, max_tokens: int) -> tuple[int, ...]:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                if not swallows:
                    raise ValueError("another error") from None
            return (1,)

        async def verify(self, pair: StepPair) -> Verdict:
            return Verdict(bool(await self.propose(None, 1)), Reason.PLUG_IN)

    async def ask() -> None:
        async with asyncio.timeout(5.0):
            if not proposes:
                await GuardedVerifier("hides", Hides(), 9.0).verify(cast(StepPair, None))
            async with Lookup(Hides()).step(np.array([1], np.int32), np.zeros((2, 0), np.int32), lambda ids: 9, None) as step:
                await step.next((), 4)
            raise AssertionError("it went on")

    with pytest.raises(TimeoutError):
        run_virtual(ask())


@pytest.mark.parametrize("hides", [False, True], ids=["waits", "hides that its time is up"])
def test_a_proposer_that_never_answers_proposes_nothing(hides: bool) -> None:
    class Waits:
        async def propose(self, ids: Any, max_tokens: int) -> tuple[int, ...]:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                if not hides:
                    raise
            return (1,)

    async def first() -> Proposal:
        source, clock = Lookup(Waits(), timeout_s=5.0), asyncio.get_running_loop().time
        async with source.step(np.array([1], np.int32), np.zeros((2, 0), np.int32), lambda ids: 9, None) as step:
            await step.next((), 4)
            assert clock() == 5.0 and not source.is_available
            found = await step.next((), 4)
        assert clock() == 5.0, "it is asked no more"
        return found

    assert not run_virtual(first()).token_ids


@dataclass
class Quotes:
    """Fails at all but every ``well``-th call, with words of the text in its error."""

    raises: type[BaseException]
    well: int = 10**9
    num_asked: int = 0

    async def propose(self, ids: Any, max_tokens: int) -> tuple[int, ...]:
        self.num_asked += 1
        if self.num_asked % self.well == 0:
            return (7,)
        raise self.raises("cannot read 'Zanzibar quokka'")


@pytest.mark.parametrize("raises", [ValueError, SystemExit])
@pytest.mark.parametrize(("well", "num_asked"), [(10**9, 3), (3, 9)])
def test_a_proposer_that_fails_is_logged_once_and_asked_no_more_after_a_few_times(
    raises: type[BaseException], well: int, num_asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = Quotes(raises, well)

    told: list[bool] = []

    async def nine() -> None:
        source = Lookup(proposer, gone=lambda: told.append(True))
        async with source.step(np.array([1], np.int32), np.zeros((2, 0), np.int32), lambda ids: 9, None) as step:
            for _ in range(9):
                await step.next((), 4)

    run_virtual(nine())
    assert proposer.num_asked == num_asked
    assert told == [True] * (num_asked < 9)
    (line,) = caplog.records
    assert "quokka" not in line.getMessage() and line.exc_info is not None and line.exc_info[0] is raises


def test_a_proposer_that_waits_for_a_task_that_was_cancelled_proposes_nothing() -> None:
    class Shares:
        async def propose(self, ids: Any, max_tokens: int) -> tuple[int, ...]:
            shared = asyncio.create_task(asyncio.sleep(1.0))
            shared.cancel()
            await shared
            raise AssertionError

    async def first() -> Proposal:
        async with Lookup(Shares()).step(np.array([1], np.int32), np.zeros((2, 0), np.int32), lambda ids: 9, None) as step:
            return await step.next((), 4)

    assert not run_virtual(first()).token_ids
