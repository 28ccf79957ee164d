"""A deployment's own verifiers, proposers and segmenter: how they are found, refused, and used by the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend import plugins
from lr_backend.config import LoopConfig
from lr_backend.contract import IntArray
from lr_backend.errors import ConfigError, InvalidRequest
from lr_backend.plugins import PROPOSERS, VERIFIERS, PlugIn, parts_of
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import Delimiter
from lr_backend.testing import run_virtual
from lr_backend.verify import Reason, Verdict
from tests.support.examples import answers
from tests.support.plug_in_docs import PACKAGE, write_package
from tests.support.world import CONFIG, LETTERS, MODELS, TOKENIZER, World, imitator, storyteller


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The package of the documentation's examples, beside a spec."""
    write_package(tmp_path)
    monkeypatch.setattr(plugins, "resource_root", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield PACKAGE
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def made(group: str, factory: str, **options: Any) -> Any:
    (part,) = parts_of(group, {"own": PlugIn(factory=factory, **options)}).values()
    return part


# How they are found ----------------------------------------------------------------------------------------------------


def test_a_class_is_made_with_what_its_section_says(package: str) -> None:
    assert made(VERIFIERS, f"{package}.verify:SameNumbers", least=2).least == 2
    assert made(PROPOSERS, f"{package}.propose:Repeat").window == 512


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        ("nowhere.at_all:Name", {}, r"verifiers\.own: 'nowhere\.at_all:Name' cannot be imported: ModuleNotFoundError"),
        (f"{PACKAGE}.verify:Nobody", {}, "cannot be imported: AttributeError"),
        (f"{PACKAGE}.verify:SameNumbers", {"lest": 2}, r"verifiers\.own: TypeError: .*lest"),
        ("same_numbers", {}, 'is no "module:Name", and no entry point of lookahead.verifiers: no installed package offers one'),
    ],
)
def test_what_cannot_be_made_is_named(package: str, factory: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(VERIFIERS, factory, **options)


@pytest.mark.parametrize(
    ("section", "named", "said"),
    [
        ("verifiers", {"judge": {"factory": "a:B"}}, "judge is a name of the server's own"),
        ("proposers", {"ngram": {"factory": "a:B"}}, "ngram is a name of the server's own"),
        ("verifiers", {"No Name": {"factory": "a:B"}}, "pattern"),
        ("verifiers", {"own": {"least": 2}}, "factory"),
    ],
)
def test_a_section_that_cannot_be_is_refused(section: str, named: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoopConfig.model_validate({"tokenizer_dir": "a", "judge_tokenizer_dir": "b", section: named})


def test_a_segmenter_without_a_delimiter_is_refused(package: str) -> None:
    config = CONFIG.model_copy(update={"segmenter": PlugIn(factory=f"{package}.segment:Lines", delimiters=[])})
    with pytest.raises(ConfigError, match="segmenter: it names no delimiter"):
        config.make_parts()
    assert CONFIG.make_parts().segmenter == Delimiter("\n\n")


def test_modules_beside_a_spec_of_ones_own_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_spec.py").write_text("from lr_backend.steps.segment import Delimiter\n", encoding="utf-8")
    settings = {"segmenter": PlugIn(factory="beside_the_spec:Delimiter", text="."), "root": tmp_path}
    assert CONFIG.model_copy(update=settings).make_parts().segmenter == Delimiter(".")


# In the loop -----------------------------------------------------------------------------------------------------------


def make_world(salt: int, agreement: float = 0.9) -> World:
    target = storyteller(salt)
    return World.of(target, imitator(target, salt + 1, agreement), lambda first, second: True)


def with_own(world: World, **parts: dict[str, Any]) -> World:
    """The world with plug-ins: ``verifiers`` and ``proposers`` by name."""
    named = {kind: dict.fromkeys(some, PlugIn(factory="its:own")) for kind, some in parts.items()}
    world.config = world.config.model_copy(update=named)
    world.models = replace(world.models, **parts)
    return world


@dataclass(frozen=True)
class LowLetters:
    """Accepts a step that begins with one of the first five."""

    def for_request(self, request: Any, parts: Any) -> LowLetters:
        return self

    async def verify(self, pair: Any) -> Verdict:
        return Verdict(self.accepts(pair.drafted_text), Reason.PLUG_IN)

    @staticmethod
    def accepts(text: str) -> bool:
        return text.strip()[:1] in tuple(LETTERS[:5])


def test_the_loop_takes_the_word_of_a_plug_in() -> None:
    told: set[bool] = set()

    @answers()
    @given(st.integers(0, 200), st.integers(0, 200))
    def takes_it(salt: int, order: int) -> None:
        world = with_own(make_world(salt, 0.7).shuffled(order), verifiers={"low": LowLetters()})
        outcome = run_virtual(world.answer(mode="lr", verifier="low", trace=True))

        for record in outcome.ledger.records:
            if record.reason == "plug_in":
                assert record.verifier == "low" and record.drafted_text is not None
                accepts = LowLetters.accepts(record.drafted_text.removeprefix("<think>"))
                assert (record.origin == "draft") == accepts
                told.add(accepts)
        world.assert_idle()

    takes_it()
    assert told == {True, False}


@dataclass(frozen=True)
class Scores(LowLetters):
    """Accepts with a score of its own kind."""

    score: Any

    async def verify(self, pair: Any) -> Verdict:
        return Verdict(True, Reason.PLUG_IN, self.score)


@pytest.mark.parametrize("score", ["high", object(), inf])
def test_a_score_that_is_no_number_loses_no_traced_answer(score: Any) -> None:
    world = with_own(make_world(3), verifiers={"scores": Scores(score)})

    outcome = run_virtual(world.answer(mode="lr", verifier="scores", trace=True))

    assert outcome.completion_ids == run_virtual(make_world(3).answer(mode="ar", stream=False)).completion_ids
    assert outcome.usage.num_steps_rejected["garbage"] > 0
    assert {record.score for record in outcome.ledger.records} == {None}


@dataclass
class Oracle:
    """Knows what the target will write, and says something else now and then; or fails."""

    script: Any
    fails: bool = False
    num_asked: int = 0

    async def propose(self, ids: IntArray, max_tokens: int) -> Sequence[int]:
        self.num_asked += 1
        if self.fails:
            raise RuntimeError("broken")
        context, found = tuple(ids.tolist()), []
        for _ in range(max_tokens + 3):  # more than was asked for
            found.append(self.script((*context, *found), 0))
        return found


@pytest.mark.parametrize("mode", ["sd", "lr_sd"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_proposers_draft_tokens_change_no_word(mode: str, fails: bool) -> None:
    plain = run_virtual(make_world(3).answer(mode="ar", stream=False)).completion_ids
    oracle = Oracle(storyteller(3), fails)
    world = with_own(make_world(3), proposers={"oracle": oracle})

    outcome = run_virtual(world.answer(mode=mode, verifier="exact", proposer="oracle", num_draft_tokens=4, stream=False))

    assert outcome.completion_ids == plain
    assert oracle.num_asked > 0
    usage = outcome.usage
    assert (usage.num_draft_tokens == 0) if fails else (usage.num_accepted_tokens == usage.num_draft_tokens > 10)


@pytest.mark.parametrize(("field", "name"), [("verifier", "nobody"), ("proposer", "nobody")])
def test_a_name_that_the_server_does_not_have_is_refused_with_those_that_it_has(field: str, name: str) -> None:
    world = with_own(make_world(3), verifiers={"mine": None}, proposers={"mine": None})

    with pytest.raises(InvalidRequest, match=rf"{field}='nobody': this server has .*, mine"):
        run_virtual(world.answer(mode="lr", **{field: name}))

    assert not any(engine.calls for engine in world.engines)


# Segmenters ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counting:
    """A step ends with every second of the delimiters."""

    delimiters: Sequence[str] = ("\n", ".")
    every: int = 2

    def ends(self, text: str) -> bool:
        return sum(text.count(one) for one in self.delimiters) >= self.every


RULES = StepRules.from_tokenizer(TOKENIZER, MODELS.rules.end_ids, segmenter=Counting(), markers=["<tool>"])


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60), st.integers(1, 40))
def test_steps_end_where_the_segmenter_says(ids: list[int], most: int) -> None:
    step = RULES.cut(ids, most)

    text, expected = "", None
    for count, token in enumerate(ids[:most], start=1):
        before, text = text, text + RULES.pieces[token]
        delimited = any(one in RULES.pieces[token] or one in (before + RULES.pieces[token])[-1:] for one in (".", "\n"))
        if token in RULES.end_ids or token == RULES.think_close_id or (delimited and Counting().ends(text)):
            expected = count
            break
    if expected is None and len(ids) >= most:
        expected = most
    assert (None if step is None else len(step.ids)) == expected


@answers()
@given(st.integers(0, 200), st.integers(0, 200))
def test_an_answer_in_other_steps_is_the_targets_own(salt: int, order: int) -> None:
    world = make_world(salt).shuffled(order)
    world.models = replace(world.models, rules=RULES)
    plain = run_virtual(make_world(salt).answer(mode="ar", stream=False)).completion_ids

    outcome = run_virtual(world.answer(mode="lr", verifier="exact", trace=True))

    assert outcome.completion_ids == plain
    assert sum(record.num_tokens for record in outcome.ledger.records) == len(plain)
    world.assert_idle()
