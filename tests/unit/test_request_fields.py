"""A field of a request is said in one place, and all that shows it follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine.request import MAX_SEED
from lr_backend.errors import InvalidRequest
from lr_backend.fields import LOOKAHEAD_INPUTS, REQUEST_FIELDS, RequestField
from lr_backend.request import LookaheadRequest, Mode
from tools.request_fields import OPTIONS, PROMPT, ROOT, options, table, written

BY_NAME = {field.name: field for field in REQUEST_FIELDS}


def parse(**fields: object) -> LookaheadRequest:
    return LookaheadRequest.parse({"text_input": "?", **fields})


@pytest.mark.parametrize("path", written(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_client_and_the_documentation_show_the_fields_as_they_are(path: Any) -> None:
    assert path.read_text(encoding="utf-8") == written()[path], "run `make fields`"


def test_the_types_of_the_tensors_are_those_of_the_fields() -> None:
    assert {spec.name: (spec.dtype, spec.dims) for spec in LOOKAHEAD_INPUTS} == {
        "text_input": ("STRING", (1,)),
        "messages": ("STRING", (1,)),
        "tools": ("STRING", (1,)),
        "chat_template_kwargs": ("STRING", (1,)),
        "raw": ("BOOL", (1,)),
        "max_tokens": ("INT32", (1,)),
        "thinking_token_budget": ("INT32", (1,)),
        "temperature": ("FP32", (1,)),
        "top_p": ("FP32", (1,)),
        "top_k": ("INT32", (1,)),
        "seed": ("UINT64", (1,)),
        "stop": ("STRING", (-1,)),
        "stream": ("BOOL", (1,)),
        "mode": ("STRING", (1,)),
        "max_depth": ("INT32", (1,)),
        "width": ("INT32", (1,)),
        "num_draft_tokens": ("INT32", (1,)),
        "proposer": ("STRING", (1,)),
        "verifier": ("STRING", (1,)),
        "audit_rate": ("FP32", (1,)),
        "risk_budget": ("FP32", (1,)),
        "deterministic": ("BOOL", (1,)),
        "deadline_s": ("FP32", (1,)),
        "trace": ("BOOL", (1,)),
    }
    assert all(spec.optional for spec in LOOKAHEAD_INPUTS)


@pytest.mark.parametrize("field", REQUEST_FIELDS, ids=lambda field: field.name)
def test_every_field_says_what_it_means(field: RequestField) -> None:
    assert field.meaning
    assert not field.meaning.endswith(".")
    assert not set('|\n[]"') & set(field.meaning), "it stands in a table, a string and a terminal"


def test_bounds_and_defaults_are_written_as_one_reads_them() -> None:
    shown = {name: (field.rule, field.default) for name, field in BY_NAME.items()}
    assert shown["max_tokens"] == ("1 to 2^20", "")
    assert shown["temperature"] == ("0 to 5", "0")
    assert shown["top_p"] == ("above 0, to 1", "1")
    assert shown["seed"] == ("0 to 2^64 - 1", "")
    assert shown["stop"] == ("at most 16", "")
    assert shown["stream"] == ("", "true")
    assert shown["mode"] == ("", "auto")
    assert shown["deadline_s"] == ("0 to 86400", "0")
    assert BY_NAME["mode"].choices == tuple(mode.value for mode in Mode)


def test_options_are_python_that_fits_its_lines() -> None:
    compile("from __future__ import annotations\nclass Options:\n" + options(OPTIONS), "options", "exec")
    assert all(len(line) <= 110 for line in options(OPTIONS).splitlines())
    assert [field.name for field in REQUEST_FIELDS if field not in OPTIONS] == list(PROMPT)


def test_a_table_has_a_row_a_field() -> None:
    head, rule, row = table([BY_NAME["width"]], "field", "type", "values", "default", "meaning").splitlines()
    assert (head, rule) == ("| field | type | values | default | meaning |", "| --- | --- | --- | --- | --- |")
    assert row.startswith("| `width` | INT32 | 1 to 8 | `1` | candidate steps")


@pytest.mark.parametrize(
    "name",
    [
        "depth",
        "min_chance",
        "draft_run_tokens",
        "draft_length",
        "await_draft",
        "segmenter",
        "ngram_max",
        "lossless",
        "verifier_threshold",
    ],
)
def test_what_is_no_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}=1: "):
        parse(**{name: 1})


def test_what_is_no_choice_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^mode='LR': Input should be '"):
        parse(mode="LR")


@pytest.mark.parametrize("name", ["proposer", "verifier"])
def test_a_name_is_short_and_the_server_says_whether_it_has_it(name: str) -> None:
    assert getattr(parse(**{name: "theirs"}), name) == "theirs"
    for value in ("", "x" * 65):
        with pytest.raises(InvalidRequest, match=f"^{name}="):
            parse(**{name: value})


def test_modes_say_what_they_speculate() -> None:
    assert {mode.value for mode in Mode if mode.speculates_steps} == {"auto", "lr", "lr_sd", "lossless"}
    assert {mode.value for mode in Mode if mode.speculates_tokens} == {"auto", "sd", "lr_sd", "lossless"}
    assert [mode.value for mode in Mode if mode.chooses] == ["auto"]


@given(st.none() | st.integers(0, MAX_SEED))
def test_a_request_has_a_seed_which_travels_with_it(seed: int | None) -> None:
    asked = parse(**({} if seed is None else {"seed": seed}))

    assert seed in (None, asked.seed)
    assert 0 <= asked.seed <= MAX_SEED
    assert LookaheadRequest.model_validate_json(asked.model_dump_json()) == asked


def test_no_two_seeds_are_drawn_alike() -> None:
    assert len({parse().seed for _ in range(100)}) == 100
