"""What is handed to the LLM API's classes for speculation are fields that they have, release by release, by the table."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.speculation import CLASSES, speculative_config
from lr_backend.nvidia import TENSORRT_LLM

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("llm_api.toml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = TABLE.pop("renamed")
CASES = [(release, kind) for release, classes in TABLE.items() for kind, names in CLASSES.items() if set(names) & set(classes)]


def config(kind: str) -> LlmApiConfig:
    model = {} if kind == "ngram" else {"speculative_model_dir": Path("/model")}
    return LlmApiConfig.from_parameters(
        {"gpt_model_path": "/target", "speculative": kind, "max_draft_len": "4", **{name: str(it) for name, it in model.items()}}
    )


def given(release: str, kind: str) -> tuple[str, set[str]]:
    """The class that is chosen, and the fields that it gets."""
    seen: list[tuple[str, set[str]]] = []

    def find(name: str) -> Any:
        return (lambda **fields: seen.append((name, set(fields)))) if name in TABLE[release] else None

    speculative_config(config(kind), find)
    (only,) = seen
    return only


def test_the_pinned_release_has_every_kind() -> None:
    assert {kind for release, kind in CASES if release == TENSORRT_LLM} == set(CLASSES)
    assert len(TABLE) == 3 and ("1.4.0rc1", "eagle3") in CASES


@pytest.mark.parametrize(("release", "kind"), CASES)
def test_fields_are_those_of_the_release(release: str, kind: str) -> None:
    name, fields = given(release, kind)
    assert fields <= set(TABLE[release]["base"]) | set(TABLE[release][name])
    assert not fields & set(RENAMED), "the newer name"
    assert "max_draft_len" in fields and ("speculative_model" in fields) == (kind != "ngram")


def test_the_newer_name_of_a_class_is_preferred() -> None:
    assert given("1.2.1", "eagle3")[0] == "EagleDecodingConfig"
    assert given("main, June 2026", "eagle3")[0] == given("1.4.0rc1", "eagle3")[0] == "Eagle3DecodingConfig"


def test_the_table_finds_a_field_that_is_not_upstreams() -> None:
    _, fields = given("1.2.1", "draft_target")
    known = set(TABLE["1.2.1"]["base"]) | set(TABLE["1.2.1"]["DraftTargetDecodingConfig"])
    assert not {*fields, "pytorch_weights_path"} <= known
