"""Where steps end with each segmenter: in text, in tokens, in engine calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.contract import IntArray, decode_stop_words
from lr_backend.engine import GREEDY, Role
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.prose import Prose, Span, ends_sentence, may_end_sentence
from lr_backend.loop.segments import Lengths, Segmenter, make_segmenter
from lr_backend.loop.steps import StepRules
from lr_backend.loop.writer import StepWriter, TokenSpeculation
from lr_backend.propose import by_lookup
from lr_backend.request import SegmenterName, StepRecord
from lr_backend.step import Step, StepEnd
from lr_backend.testing import ScriptedEngine, run_virtual
from tests.support.checkpoints import QWEN_LIKE
from tests.support.world import FIRST_LETTER, PROMPT, THINK, World, imitator, storyteller

END = 0
CAP = 10_000
ADAPTIVE = Lengths(min_tokens=4, soft_tokens=12)
names = st.sampled_from(list(SegmenterName))
prose_names = st.sampled_from([SegmenterName.SENTENCE, SegmenterName.ADAPTIVE])


# Text that is made of parts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """A text as tokens of a vocabulary of its own; id 0 is the end token."""

    pieces: tuple[str, ...]

    @property
    def rules(self) -> StepRules:
        return StepRules.build("\n\n", {0: "<end>", **{index: text for index, text in enumerate(self.vocabulary, 1)}}, [END])

    @property
    def vocabulary(self) -> list[str]:
        return sorted(set(self.pieces))

    @property
    def ids(self) -> list[int]:
        places = {text: index for index, text in enumerate(self.vocabulary, 1)}
        return [places[piece] for piece in self.pieces]

    def segmenter(self, name: SegmenterName) -> Segmenter:
        return make_segmenter(name, self.rules, ADAPTIVE, 0)

    def steps(self, name: SegmenterName, max_tokens: int = CAP) -> list[Step]:
        """The whole text as steps; what is left at the end is not one."""
        segmenter, ids, steps = self.segmenter(name), self.ids, list[Step]()
        prefix = array([])
        while (step := segmenter.begin(prefix).cut(ids, max_tokens)) is not None:
            steps.append(step)
            ids, prefix = ids[len(step.ids) :], array([*prefix, *step.ids])
        return steps

    def texts(self, name: SegmenterName) -> list[str]:
        """The whole text as texts of steps, the rest included."""
        steps = self.steps(name)
        ends = list(accumulate(len(step.ids) for step in steps))
        starts = [0, *ends]
        return [text for i, j in zip(starts, [*ends, None], strict=True) if (text := "".join(self.pieces[i:j]))]


def array(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, dtype=np.int32)


def like_bpe(text: str) -> Tokens:
    """Words with the space before them, single digits, runs of other signs with the line ends after them."""
    return Tokens(tuple(re.findall(r"\s*\n+| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+\n*|\s", text)))


words = st.sampled_from(["so", "Tom", "has", "apples", "then", "e.g.", "x", "which"])
numbers = st.sampled_from(["3.14", "12", "0.5", "1,000.25", "7", "2.5.1"])
formulas = st.sampled_from(
    [
        r"$a. b$",
        "$x = 3.5$",
        "$$a = 1.5. b$$",
        "$$\na. \nb\n$$",
        r"\(x. y\)",
        r"\[ y = 2. \]",
        r"\[\n1. 2\\\\[2pt] 3? \]",
    ]
)
fences = st.sampled_from(
    ["```\na = 1. \n\nb = 2. c\n```", "```python\nx. y\n\n\n# Is it? No. \n```", "`a. b`", "```\ncost = $5. \\(\n```"]
)
PROTECTED = {"number", "formula", "fence"}
parts = st.one_of(
    st.tuples(st.just("word"), words),
    st.tuples(st.just("number"), numbers),
    st.tuples(st.just("formula"), formulas),
    st.tuples(st.just("fence"), fences),
)
gaps = st.sampled_from([" ", " ", " ", ". ", ". ", "? ", "!\n", ".\n", "\n\n", ".\n\n", ", ", ' ("', '.") ', "\n1. ", "\n- "])


@st.composite
def documents(draw: st.DrawFn) -> tuple[Tokens, list[tuple[int, int]]]:
    """A text split anywhere (but no token goes on past a line end), and where nothing may be cut: (start, end) of characters."""
    text, protected = "", []
    for kind, part in draw(st.lists(parts, min_size=1, max_size=14)):
        if kind in PROTECTED:
            protected.append((len(text), len(text) + len(part)))
        text += part + draw(gaps)
    forced = {i for i in range(1, len(text)) if text[i - 1] == "\n" and text[i] != "\n"}
    cuts = sorted(forced | draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=len(text))))
    pieces = tuple(text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True) if text[i:j])
    return Tokens(pieces), protected


# Text ----------------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab1.? \n$`\\()[]", max_size=40), st.data())
def test_how_a_text_is_split_does_not_matter(text: str, data: st.DataObject) -> None:
    whole, state = Prose().after(text), Prose()
    while text:
        size = data.draw(st.integers(1, len(text)))
        state, text = state.after(text[:size]), text[size:]

    assert state == whole


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("It costs $5", Span.DOLLAR),
        ("It costs $5.\n", Span.TEXT),
        ("It costs 5 $ now", Span.TEXT),
        (r"It costs \$5", Span.TEXT),
        ("$x$$y$ ", Span.TEXT),
        ("$x$ and $$y", Span.DOLLARS),
        ("$$y\n", Span.DOLLARS),
        ("$$y\n\n", Span.TEXT),
        (r"\(x", Span.ROUND),
        (r"\(x\) ", Span.TEXT),
        (r"\\(x", Span.TEXT),
        (r"\[ a \\[2pt] b", Span.SQUARE),
        (r"\[ a \] ", Span.TEXT),
        ("use `a", Span.CODE),
        ("use `a\n", Span.TEXT),
        ("```\na `b` $c\n\n", Span.FENCE),
        ("```\na\n``` ", Span.TEXT),
    ],
)
def test_what_the_text_stands_inside(text: str, span: Span) -> None:
    assert Prose().after(text).span is span


@pytest.mark.parametrize(
    ("tail", "ends", "may_end"),
    [
        ("\nSo it is.", True, False),
        ("\nIs it?", True, False),
        ("\nIt is!", True, False),
        ("\nIt is (so).", True, False),
        ('\n"It is."', True, False),
        ("\nIt is **so.**", True, False),
        ("\nhalf of $x$.", True, False),
        ("\nIt is 12.", False, True),
        ("\nIt is 12. ", True, False),
        ("\nIt is 12.\n", True, False),
        ("\n(It is 12.)", True, False),
        ("\nIs it 12?", True, False),
        ("\n12.", False, False),
        ("\n  12. ", False, False),
        ("\n- 12.\n", False, False),
        ("\nIt is 5!", False, False),
        ("\nIt is .", False, False),
        ("\nWait...", False, False),
        ("\nWait...\n", True, False),
        ("\nSee e.g.", False, False),
        ("\nMr.", False, False),
        ("\nSee it, so", False, False),
    ],
)
def test_where_sentences_end(tail: str, ends: bool, may_end: bool) -> None:
    assert (ends_sentence(tail), may_end_sentence(tail)) == (ends, may_end)


# Steps ---------------------------------------------------------------------------------------------------------------

TEXT = (
    "Tom has 12 apples. He buys 3.5 kg more. Is that enough? It costs 12. So it is.\n\n"
    "1. The code is `a. b`:\n```\nx. y\n\nz = 2. \n```\n\nHence $x. y$ holds.\nOk\n\nThe end"
)


def test_each_segmenter_on_one_text() -> None:
    tokens = like_bpe(TEXT)

    assert tokens.texts(SegmenterName.BLANK_LINE) == [
        "Tom has 12 apples. He buys 3.5 kg more. Is that enough? It costs 12. So it is.\n\n",
        "1. The code is `a. b`:\n```\nx. y\n\n",
        "z = 2. \n```\n\n",
        "Hence $x. y$ holds.\nOk\n\n",
        "The end",
    ]
    assert tokens.texts(SegmenterName.SENTENCE) == [
        "Tom has 12 apples.",
        " He buys 3.5 kg more.",
        " Is that enough?",
        " It costs 12. So",  # only that token says that the number is over, so it belongs to the step
        " it is.\n\n",
        "1. The code is `a. b`:\n```\nx. y\n\nz = 2. \n```\n\n",
        "Hence $x. y$ holds.\n",
        "Ok\n\n",
        "The end",
    ]
    assert tokens.texts(SegmenterName.ADAPTIVE) == [
        "Tom has 12 apples. He buys 3.5 kg more.",
        " Is that enough? It costs 12. So it is.\n\n",
        "1. The code is `a. b`:\n```\nx. y\n\nz = 2. \n```\n\n",
        "Hence $x. y$ holds.\nOk\n\n",
        "The end",
    ]


def test_short_steps_are_merged_with_the_next() -> None:
    tokens = like_bpe("Ok.\n\nWell\n\nTom has all of the apples\n\n")

    assert tokens.texts(SegmenterName.ADAPTIVE) == ["Ok.\n\nWell\n\n", "Tom has all of the apples\n\n"]
    assert tokens.texts(SegmenterName.SENTENCE) == ["Ok.\n\n", "Well\n\n", "Tom has all of the apples\n\n"]


@given(documents(), names)
def test_steps_are_the_text_in_parts(document: tuple[Tokens, list[tuple[int, int]]], name: SegmenterName) -> None:
    tokens, _ = document

    capped = [token for step in tokens.steps(name, 5) for token in step.ids]

    assert "".join(tokens.texts(name)) == "".join(tokens.pieces)
    assert capped == tokens.ids[: len(capped)]
    assert len(tokens.ids) - len(capped) < 5


@given(documents(), prose_names)
def test_no_step_ends_inside_a_number_code_or_a_formula(
    document: tuple[Tokens, list[tuple[int, int]]], name: SegmenterName
) -> None:
    tokens, protected = document
    text, place = "".join(tokens.pieces), 0

    for step in tokens.texts(name)[:-1]:
        place += len(step)
        assert not any(start < place < end for start, end in protected), (text[:place], text[place:])
        assert step.strip()


@given(documents(), names, st.integers(1, 30), st.data())
def test_a_step_follows_from_its_own_tokens(
    document: tuple[Tokens, list[tuple[int, int]]], name: SegmenterName, max_tokens: int, data: st.DataObject
) -> None:
    tokens, _ = document
    ids = tokens.ids
    fresh = tokens.segmenter(name).begin(array([])).cut(ids, max_tokens)
    segment = tokens.segmenter(name).begin(array([]))

    # Asked again and again, about more and about less, and about tokens that were only proposed.
    for size in data.draw(st.lists(st.integers(0, len(ids)), max_size=6)):
        segment.cut([*ids[:size], *ids[:3]], max_tokens)
        step = segment.cut(ids[:size], max_tokens)
        assert step == (fresh if fresh is not None and len(fresh.ids) <= size else None)
        segment.call_rules(ids[:size] if step is None else ())


@given(documents(), prose_names)
def test_what_is_remembered_of_a_prefix_is_what_it_says(
    document: tuple[Tokens, list[tuple[int, int]]], name: SegmenterName
) -> None:
    tokens, _ = document
    place = 0
    for step in tokens.steps(name, 5):
        ids = tokens.ids[place:]
        assert step == tokens.segmenter(name).begin(array(tokens.ids[:place])).cut(ids, 5)
        place += len(step.ids)


def test_the_reasonings_open_code_does_not_reach_into_the_answer() -> None:
    pieces = {0: "<end>", 1: "</think>", 2: "```", 3: "\n", 4: "Yes", 5: "."}
    rules = StepRules.build("\n\n", pieces, [0], think_close_id=1)

    def step(prefix: list[int]) -> Step | None:
        return make_segmenter(SegmenterName.SENTENCE, rules, ADAPTIVE, 0).begin(array(prefix)).cut([4, 5, 4], CAP)

    assert step([2, 3]) is None
    closed = step([2, 3, 1])
    assert closed is not None
    assert (closed.ids, closed.end) == ((4, 5), StepEnd.SENTENCE)


def test_sentences_of_a_real_tokenizer() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QWEN_LIKE)
    rules = StepRules.from_tokenizer(tokenizer, [tokenizer.eos_token_id])
    text = (
        "<think>\nMia has 12 apples. Is that 3.5 kg? So Tom has 3. Mia has 12.\n\n7 + 5 = 12 apples.\n</think>"
        "\n\nIt is \\boxed{12}."
    )
    ids, steps = tokenizer.encode(text, add_special_tokens=False), list[str]()
    segment = make_segmenter(SegmenterName.SENTENCE, rules, ADAPTIVE, 0).begin(array([]))
    while (step := segment.cut(ids, 100)) is not None:
        steps.append(tokenizer.decode(step.ids))
        ids = ids[len(step.ids) :]
        segment = make_segmenter(SegmenterName.SENTENCE, rules, ADAPTIVE, 0).begin(array([]))

    assert steps == [
        "<think>\nMia has 12 apples.",
        " Is that 3.5 kg?",
        " So Tom has 3. Mia",
        " has 12.\n\n",
        "7 + 5 = 12 apples.\n",
        "</think>",
        "\n\nIt is \\boxed{12}.",
    ]


# Engine calls --------------------------------------------------------------------------------------------------------


def write_all(
    tokens: Tokens, name: SegmenterName, max_tokens: int, speculation: TokenSpeculation | None
) -> tuple[list[Step], ScriptedEngine]:
    """The whole text, written a step at a time by an engine that knows it."""
    ids, rules = tokens.ids, tokens.rules
    engine = ScriptedEngine(lambda context, seed: [*ids, END][len(context) - 1])
    segmenter = make_segmenter(name, rules, ADAPTIVE, 1)
    writer = StepWriter(engine, Role.TARGET, rules, GREEDY, 0, "r", Ledger(lambda: 0.0, 1), speculation, segmenter)

    async def run() -> list[Step]:
        steps, prefix = list[Step](), array([END])
        while not steps or steps[-1].end is not StepEnd.END:
            steps.append(await writer.write(prefix, max_tokens))
            prefix = array([*prefix, *steps[-1].ids])
        return steps

    return run_virtual(run()), engine


@given(documents(), names, st.sampled_from([5, 17, CAP]), st.integers(0, 6), st.integers(1, 5))
def test_steps_do_not_depend_on_how_calls_cut_them(
    document: tuple[Tokens, list[tuple[int, int]]], name: SegmenterName, max_tokens: int, num_right: int, plain_chunk: int
) -> None:
    tokens, _ = document
    ids = tokens.ids

    def proposer(context: IntArray, written: Sequence[int], drafted: Sequence[int] | None, most: int) -> tuple[int, ...]:
        return (*ids[len(context) - 1 :][:num_right], 1)[:most] if num_right else ()

    plain, _ = write_all(tokens, name, max_tokens, None)
    chunked, _ = write_all(tokens, name, max_tokens, TokenSpeculation(by_lookup(proposer), 8, plain_chunk=plain_chunk))

    assert chunked == plain
    whole = tokens.steps(name, max_tokens)
    assert plain[: len(whole)] == whole


def num_calls(text: str, name: SegmenterName) -> tuple[int, int]:
    """Steps, and calls beyond one a step, of a text."""
    steps, engine = write_all(like_bpe(text), name, CAP, None)
    return len(steps), len(engine.calls) - len(steps)


def test_what_false_stops_cost() -> None:
    last = 1  # the step that holds the end token alone
    sentence = SegmenterName.SENTENCE
    assert num_calls("Tom has apples. He eats them. Is it so?", sentence) == (3 + last, 0)
    assert num_calls("It is 12. So it is.", sentence) == (2 + last, 1)
    assert num_calls("It is 3.14 kg.", sentence) == (1 + last, 2)
    code = "Look:\n```\n" + "a. b. c? d! e.\n\n" * 20 + "```\n\nThat is all."
    assert num_calls(code, sentence) == (2 + last, 1)
    assert num_calls(code, SegmenterName.ADAPTIVE) == (1 + last, 1)
    formula = "So\n$$\n" + "a. 2.5. c? d!\n" * 20 + "$$\n\nThat is all."
    assert num_calls(formula, sentence) == (2 + last, 1)


def test_adaptive_asks_for_sentences_only_in_long_steps() -> None:
    short = "Tom has. He eats it.\n\n" * 3
    long = "Tom has all of them. " * 6 + "\n\n"

    assert num_calls(short, SegmenterName.ADAPTIVE) == (3 + 1, 0)
    steps, engine = write_all(like_bpe(long), SegmenterName.ADAPTIVE, CAP, None)
    assert [step.end for step in steps] == [StepEnd.SENTENCE, StepEnd.SENTENCE, StepEnd.END]
    assert [recorded.call.max_new_tokens for recorded in engine.calls[:2]] == [ADAPTIVE.soft_tokens, CAP - ADAPTIVE.soft_tokens]


def test_sentences_are_in_the_stop_list_only_where_they_count() -> None:
    tokens = like_bpe("It. is 3. so.\n``` x\n\n")
    rules, ids = tokens.rules, dict(zip(tokens.pieces, tokens.ids, strict=True))
    segment = make_segmenter(SegmenterName.SENTENCE, rules, ADAPTIVE, 0).begin(array([]))

    def stops(*pieces: str) -> set[str]:
        ended = {token for word in decode_stop_words(segment.call_rules([ids[p] for p in pieces]).stop_words) for token in word}
        return {piece for piece, token in ids.items() if token in ended}

    assert stops(" is") == {".", ".\n", "\n\n"}
    assert stops("```", " x") == {"```"}
    assert segment.call_rules([ids[" is"], ids[" "], ids["3"], ids["."]]).max_tokens == 1


# Requests ------------------------------------------------------------------------------------------------------------


def test_a_request_says_where_its_steps_end() -> None:
    target = storyteller(1, prose=0.5)
    world = World.of(target, imitator(target, 2, 0.95), lambda a, b: True)

    def records(name: SegmenterName) -> list[StepRecord]:
        return run_virtual(world.fresh().answer(mode="lr", segmenter=name, deterministic=True, trace=True)).ledger.records

    steps = {name: records(name) for name in SegmenterName}
    assert len(steps[SegmenterName.SENTENCE]) > len(steps[SegmenterName.BLANK_LINE])
    assert any(record.origin == "draft" and record.text.endswith((".", "?")) for record in steps[SegmenterName.SENTENCE])
    assert all(record.num_tokens >= 4 for record in steps[SegmenterName.ADAPTIVE][:-1])


# Capped steps --------------------------------------------------------------------------------------------------------


def endless(letter: int) -> ScriptedEngine:
    """Thinks without any boundary and ends after 40 tokens."""

    def next_token(context: tuple[int, ...], seed: int) -> int:
        num_written = len(context) - len(PROMPT)
        if num_written == 0:
            return THINK
        return END if num_written == 40 else letter if num_written % 7 else FIRST_LETTER

    return ScriptedEngine(next_token)


@pytest.mark.parametrize("name", list(SegmenterName))
@pytest.mark.parametrize("mode", ["lr", "lr_sd"])
@pytest.mark.parametrize("same", [True, False])
def test_a_capped_step_is_compared_with_one_capped_at_the_same_place(name: SegmenterName, mode: str, same: bool) -> None:
    """And what follows it, in the middle of a paragraph, is drafted and judged like anything else."""
    world = World.of(endless(FIRST_LETTER + 1).script, endless(FIRST_LETTER + (1 if same else 2)).script, lambda a, b: True)

    outcome = run_virtual(world.answer(mode=mode, segmenter=name, deterministic=True, trace=True))

    cap = world.config.limits.max_step_tokens
    records = outcome.ledger.records
    assert [record.num_tokens for record in records] == [cap, cap, cap, 41 - 3 * cap]
    assert all(record.origin == "draft" for record in records)
    assert [record.reason for record in records] == ["exact"] * 4 if same else ["judge"] * 3 + [records[-1].reason]
    assert not outcome.usage.num_steps_rejected
    assert world.judge.calls if not same else not world.judge.calls


@pytest.mark.parametrize("name", list(SegmenterName))
def test_one_capped_step_beside_one_that_ended_is_rejected(name: SegmenterName) -> None:
    target = endless(FIRST_LETTER + 1).script
    draft = World.of(target, target).target.script

    def ends_early(context: tuple[int, ...], seed: int) -> int:
        return 4 if len(context) - len(PROMPT) == 6 else draft(context, seed)

    world = World.of(target, ends_early, lambda a, b: True)
    outcome = run_virtual(world.answer(mode="lr", segmenter=name, deterministic=True))

    assert outcome.usage.num_steps_rejected == {"capped": 1}
    assert outcome.completion_ids[:2] == (THINK, FIRST_LETTER + 1)
