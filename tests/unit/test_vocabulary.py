"""The tokenizer of scripted texts: the same in plain Python as the server's ``transformers`` reads from its files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lr_backend.emulated.vocabulary import (
    ALIGNED,
    BREAK,
    CLOSE,
    END,
    FIRST_WORD,
    LIKE,
    NAMED,
    NUM_WORDS,
    SPECIAL,
    THINK,
    TOKENIZER_DIR,
    UNALIGNED,
    UNLIKE,
    VOCABULARY,
    tokenizer_files,
)
from lr_backend.steps.plain import PlainText
from lr_backend.steps.rules import StepRules
from lr_backend.verify.judge_prompt import JudgePrompt, parse_verdict

THEIRS: Any = AutoTokenizer.from_pretrained(TOKENIZER_DIR)

pieces = st.one_of(
    st.sampled_from([*NAMED, *VOCABULARY.words[FIRST_WORD:3100], "<thinking>", " kito~?", "\n\n\n", "user>", "<0x41>"]),
    st.text(max_size=6),
)
texts = st.lists(pieces, max_size=8).map("".join)


@given(texts)
def test_a_text_has_the_token_ids_that_transformers_finds(text: str) -> None:
    assert VOCABULARY.encode(text, add_special_tokens=False) == THEIRS.encode(text, add_special_tokens=False)
    plain = PlainText.of(VOCABULARY).ids(text)
    assert plain == PlainText.of(THEIRS).ids(text)
    assert not set(plain) & set(SPECIAL)


@given(st.lists(st.integers(0, len(VOCABULARY) - 257), max_size=20), st.booleans())
def test_token_ids_are_the_text_that_transformers_says(ids: list[int], skip: bool) -> None:
    """Those of bytes apart, which are no text one by one."""
    assert VOCABULARY.decode(ids, skip_special_tokens=skip) == THEIRS.decode(ids, skip_special_tokens=skip)
    assert VOCABULARY.batch_decode([ids, ids[:1]], skip_special_tokens=skip)[0] == VOCABULARY.decode(
        ids, skip_special_tokens=skip
    )


@given(st.lists(st.integers(FIRST_WORD, FIRST_WORD + 3 * NUM_WORDS - 1), max_size=20))
def test_words_survive_the_way_through_text(ids: list[int]) -> None:
    assert VOCABULARY.encode(VOCABULARY.decode(ids)) == ids


def test_the_files_beside_it_are_those_that_it_writes() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in TOKENIZER_DIR.iterdir()} == tokenizer_files()


def test_it_is_as_long_as_theirs_and_knows_the_same_special_tokens() -> None:
    assert len(VOCABULARY) == len(THEIRS) == len(set(VOCABULARY.words))
    assert sorted(THEIRS.all_special_ids) == sorted(VOCABULARY.all_special_ids)
    assert THEIRS.eos_token_id == VOCABULARY.eos_token_id == END


@pytest.mark.parametrize("prompted", [True, False])
def test_the_template_is_theirs(prompted: bool) -> None:
    turns = [{"role": "system", "content": "short"}, {"role": "user", "content": "why <user>?\n"}]
    options = {"tokenize": False, "add_generation_prompt": prompted}
    assert VOCABULARY.apply_chat_template(turns, **options) == THEIRS.apply_chat_template(turns, **options)


@pytest.mark.parametrize("tokenizer", [VOCABULARY, THEIRS], ids=["ours", "theirs"])
def test_the_loop_finds_its_markers(tokenizer: Any) -> None:
    rules = StepRules.from_tokenizer(tokenizer, [END])
    assert (rules.think_open_id, rules.think_close_id) == (THINK, CLOSE)
    assert rules.closing_ids == {END, CLOSE}
    assert [token for token, text in rules.pieces.items() if "\n\n" in text] == [BREAK]


@pytest.mark.parametrize("tokenizer", [VOCABULARY, THEIRS], ids=["ours", "theirs"])
def test_the_judge_reads_steps_as_they_were_written_and_its_verdict_is_one_token(tokenizer: Any) -> None:
    prompt = JudgePrompt.from_tokenizer(tokenizer)
    target, drafted = [FIRST_WORD + 3, FIRST_WORD + 5], [FIRST_WORD + 3, LIKE + 5, UNLIKE + 8]
    ids = prompt.ids(VOCABULARY.decode(target), VOCABULARY.decode(drafted))
    assert LIKE + 5 in ids and UNLIKE + 8 in ids and FIRST_WORD + 5 in ids
    assert parse_verdict(VOCABULARY.words[ALIGNED]) is True
    assert parse_verdict(VOCABULARY.words[UNALIGNED]) is False
    assert len(prompt.head_ids) + len(prompt.middle_ids) + len(prompt.tail_ids) < 150
