"""Speculation inside an engine of the LLM API: settings as upstream's classes, no token changed, what was drafted counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.engine import Engine, Sampling
from lr_backend.engine.request import EngineResponse
from lr_backend.errors import ConfigError, EngineRejected, InvalidRequest
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.engine import LlmApiEngine
from lr_backend.llmapi.sampling import check_request, num_log_probs
from lr_backend.llmapi.speculation import draft_counts
from lr_backend.llmapi.upstream import llm_arguments
from lr_backend.loop.assemble import Engines, Server, assemble
from lr_backend.policy.policy import Learned, Measured
from lr_backend.request import LookaheadRequest, Mode, ProposerName, Usage
from lr_backend.testing import run_virtual
from tests.support.embedded_engines import Pending, request
from tests.support.fake_llmapi import Guess, fake_upstream, scripted
from tests.support.llmapi_engines import in_process, llmapi_engine
from tests.support.world import CONFIG, MODELS, PROMPT, World, imitator, judge_script, storyteller

NGRAM: dict[str, Any] = {"speculative": "ngram", "max_draft_len": 4}
HEAD: dict[str, Any] = {"speculative": "eagle3", "max_draft_len": 3, "speculative_model_dir": Path("/head")}
DRAFT: dict[str, Any] = {"speculative": "draft_target", "max_draft_len": 5, "speculative_model_dir": Path("/draft")}
START = (50, 60)
COUNTING = scripted(lambda context, draw: len(context) - len(START))


def counting(context: tuple[int, ...]) -> int:
    return len(context) - len(START)


# ------------------------------------------------------------------------------------------------------------------- settings


def test_settings_become_upstreams_own_classes() -> None:
    def made(**settings: Any) -> tuple[dict[str, Any], bool]:
        arguments = llm_arguments(LlmApiConfig(Path("/target"), **settings), fake_upstream(COUNTING))
        return vars(arguments["speculative_config"]), arguments.get("disable_overlap_scheduler", False)

    assert made(**NGRAM, max_matching_ngram_size=3) == (
        {"kind": "NGramDecodingConfig", "max_draft_len": 4, "max_matching_ngram_size": 3, "is_public_pool": False},
        True,
    )
    assert made(**DRAFT) == ({"kind": "DraftTargetDecodingConfig", "max_draft_len": 5, "speculative_model": "/draft"}, True)
    head = {"kind": "EagleDecodingConfig", "max_draft_len": 3, "speculative_model": "/head", "allow_advanced_sampling": True}
    assert made(**HEAD) == (head, False)
    assert "speculative_config" not in llm_arguments(LlmApiConfig(Path("/target")), fake_upstream(COUNTING))


def test_a_release_without_such_a_class_is_named() -> None:
    upstream = replace(fake_upstream(COUNTING), find=lambda name: None)
    with pytest.raises(ConfigError, match="no Eagle3DecodingConfig and no EagleDecodingConfig"):
        llm_arguments(LlmApiConfig(Path("/target"), **HEAD), upstream)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative": "ngram"}, "max_draft_len=0"),
        ({"max_draft_len": 4}, "max_draft_len=4"),
        ({"speculative": "eagle3", "max_draft_len": 4}, "speculative_model_dir"),
        ({**NGRAM, "speculative_model_dir": "/head"}, "speculative_model_dir"),
        ({**NGRAM, "coupled_noise": True}, "coupled_noise"),
        ({**NGRAM, "sampler": "TRTLLMSampler"}, "TRTLLMSampler"),
        ({"speculative": "medusa", "max_draft_len": 4}, "speculative="),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlmApiConfig(Path("/target"), **settings)


def test_a_head_that_is_not_there_is_found_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = LlmApiConfig(tmp_path, **{**HEAD, "speculative_model_dir": tmp_path / "head"})
    with pytest.raises(ConfigError, match=r"speculative_model_dir=.*not a Hugging Face checkpoint"):
        config.check_checkpoint()


# --------------------------------------------------------------------------------------------------------------------- engine


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LlmApiEngine]]:
    made: list[LlmApiEngine] = []

    def new(guess: Guess = counting, **settings: Any) -> LlmApiEngine:
        made.append(llmapi_engine(tmp_path / "checkpoint", COUNTING, guess, **settings))
        return made[-1]

    yield new
    for engine in made:
        engine.close()


def ask(engine: LlmApiEngine, count: int, *words: tuple[int, ...], **fields: Any) -> EngineResponse:
    pending = Pending()
    engine.submit(request(START, count, words, **fields), pending)
    return pending.result()


Make = Callable[..., LlmApiEngine]


def test_a_pass_brings_as_many_tokens_as_were_drafted_and_one(make: Make) -> None:
    engine = make(**NGRAM)
    answer = ask(engine, 11, num_draft_tokens=4)
    assert answer.token_ids == tuple(range(11))
    # The prompt's pass brings one, two more bring five each.
    assert (answer.num_draft_tokens, answer.num_accepted_tokens) == (8, 8)
    stats = engine.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_tokens_decoded) == (8, 8, 11)


def test_wrong_drafts_change_no_token_and_are_counted(make: Make) -> None:
    answer = ask(make(lambda context: -1, **NGRAM), 6, num_draft_tokens=4)
    assert answer.token_ids == tuple(range(6))
    assert (answer.num_draft_tokens, answer.num_accepted_tokens) == (20, 0)
    every_second = ask(make(lambda context: counting(context) if counting(context) % 2 else -1, **NGRAM), 7)
    assert (every_second.token_ids, every_second.num_accepted_tokens) == (tuple(range(7)), 3)


def test_a_stop_within_a_pass_cuts_it_there(make: Make) -> None:
    """Whether upstream knows the stop or only the stream shows it."""
    for words in (((3,),), ((2, 3),)):
        answer = ask(make(**NGRAM), 40, *words)
        assert answer.token_ids == (0, 1, 2, 3)
        assert answer.num_accepted_tokens == 2, "two passes gave the four tokens"


def test_upstreams_own_count_of_draft_tokens_stands_where_it_has_one(make: Make) -> None:
    engine = make(**NGRAM)
    engine._llm.reported.total_draft_tokens = 9
    answer = ask(engine, 11, num_draft_tokens=4, return_perf_metrics=True)
    assert (answer.num_draft_tokens, answer.num_accepted_tokens) == (9, 8)


def test_calls_that_ask_for_nothing_are_served_with_it_and_too_many_are_refused(make: Make) -> None:
    config = make(**NGRAM).config
    assert check_request(request(START, 8), config) == check_request(request(START, 8, num_draft_tokens=2), config) == 8
    with pytest.raises(EngineRejected, match="num_draft_tokens: 5 wanted, and this engine drafts 4 a pass"):
        check_request(request(START, 8, num_draft_tokens=5), config)
    with pytest.raises(EngineRejected, match="drafts nothing by itself"):
        check_request(request(START, 8, num_draft_tokens=1), LlmApiConfig(Path("/target")))
    with pytest.raises(EngineRejected, match="draft_input_ids"):
        check_request(request(START, 2, draft_ids=(1,)), config)
    assert num_log_probs(request(START, 2, return_log_probs=True), LlmApiConfig(Path("/target"), **HEAD)) == 0


@given(st.integers(0, 200), st.integers(0, 100), st.integers(0, 500), st.integers(1, 8))
def test_counts_hold_together_whatever_upstream_says(num_tokens: int, num_passes: int, reported: int, length: int) -> None:
    config = LlmApiConfig(Path("/target"), speculative="ngram", max_draft_len=length)
    verified, accepted = draft_counts(config, num_tokens, num_passes, reported)
    assert 0 <= accepted <= min(verified, num_tokens)
    assert num_passes == 0 or num_tokens < num_passes or num_tokens - accepted == num_passes
    assert draft_counts(LlmApiConfig(Path("/target")), num_tokens, num_passes, reported) == (0, 0)


# ----------------------------------------------------------------------------------------------------------------------- loop

TARGET = storyteller(3)
SMALL = imitator(TARGET, 5, 0.9)
ALWAYS: dict[str, Any] = {"engine_drafts": True, "engine_always_drafts": True}


def alike(first: str, second: str) -> bool:
    return len(first) == len(second)


@pytest.mark.parametrize(
    ("mode", "temperature"), [*((mode, 0.0) for mode in Mode), (Mode.AR, 0.7), (Mode.LR, 0.7), (Mode.SD, 0.7)]
)
def test_the_target_alone_is_refused_by_name(mode: Mode, temperature: float) -> None:
    world = World.of(TARGET, SMALL, alike, **ALWAYS)
    fields: dict[str, Any] = {"mode": mode, "proposer": "engine", "temperature": temperature}
    if mode.speculates_tokens:
        run_virtual(world.answer(**fields))
        assert {recorded.call.num_draft_tokens for recorded in world.target.calls} == {8}
        return
    other = "lr_sd" if mode.speculates_steps else "sd"
    with pytest.raises(InvalidRequest, match=rf"mode='?{mode.value}.*target\.speculative.*{other} or auto"):
        run_virtual(world.answer(**fields))
    assert not world.target.calls


@pytest.mark.parametrize("proposer", [ProposerName.NGRAM, ProposerName.DRAFT_MODEL])
def test_draft_tokens_from_elsewhere_are_refused_by_name(proposer: ProposerName) -> None:
    with pytest.raises(InvalidRequest, match=r"proposer.*target\.speculative"):
        run_virtual(World.of(TARGET, SMALL, alike, **ALWAYS).answer(mode="sd", proposer=proposer))


def test_auto_chooses_the_depth_and_never_goes_without_drafts() -> None:
    asked = LookaheadRequest.parse({"text_input": "?", "mode": "auto", "proposer": "engine"})
    policy = Measured(asked, Learned(lambda: 0.0), 3, "judge", can_draft=True, must_draft=True)
    assert policy.uses_draft_tokens
    assert {way.draft_tokens for way in policy._ways} == {True} and {way.ahead for way in policy._ways} == {True, False}


@pytest.mark.parametrize("mode", ["sd", "lr_sd", "auto"])
def test_the_loop_over_an_engine_that_drafts_writes_what_it_writes_over_any(mode: str, tmp_path: Path) -> None:
    plain = World.of(TARGET, SMALL, alike)
    run_virtual(plain.answer(mode="ar" if mode == "sd" else "lr", temperature=0.0, deterministic=True))
    texts, usage = over_llm_api(tmp_path, mode)
    assert texts == plain.text
    assert 0 < usage.num_accepted_tokens <= usage.num_draft_tokens
    if mode == "sd":
        assert usage.num_target_passes == usage.completion_tokens - usage.num_accepted_tokens
    assert not usage.degraded


def over_llm_api(folder: Path, mode: str) -> tuple[str, Usage]:
    """The text of one answer over three engines of the LLM API, the target's with a drafter that is mostly right."""
    texts: list[str] = []

    async def main() -> Usage:
        drafts: dict[str, Any] = {**NGRAM, "guess": lambda context: SMALL(context, 0)}
        scripts = ((TARGET, drafts), (SMALL, {}), (judge_script(alike), {}))
        engines: list[Engine] = [
            in_process(llmapi_engine(folder / str(index), scripted(script), max_seq_len=2048, **settings))
            for index, (script, settings) in enumerate(scripts)
        ]
        limits = CONFIG.limits.model_copy(update={"max_draft_len": 4})
        config = CONFIG.model_copy(update={**ALWAYS, "limits": limits})
        fields = {"text_input": "?", "max_tokens": 200, "mode": mode, "temperature": 0.0, "deterministic": True}
        asked = LookaheadRequest.parse({**fields, "proposer": "engine"})
        server = Server(Engines(*engines), MODELS, config)
        loop = assemble(asked, np.asarray(PROMPT, np.int32), "r", server, lambda committed: texts.append(committed.text))
        try:
            return (await loop.run()).usage
        finally:
            for engine in engines:
                await engine.close()

    usage = asyncio.run(main())
    return "".join(texts), usage


def test_sampling_goes_through_as_it_is() -> None:
    config = LlmApiConfig(Path("/target"), **HEAD)
    assert check_request(request(START, 4, sampling=Sampling(0.6, 20, 0.95), num_draft_tokens=3), config) == 4
