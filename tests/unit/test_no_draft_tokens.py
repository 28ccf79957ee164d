"""Over a target that takes no draft tokens (``limits.max_draft_len = 0``) every mode still answers, and sends none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from lr_backend.engine import Engine
from lr_backend.loop.assemble import Engines, Server, assemble
from lr_backend.request import LookaheadRequest, Mode, ProposerName
from lr_backend.testing import run_virtual
from tests.support.fake_llmapi import scripted
from tests.support.llmapi_engines import in_process, llmapi_engine
from tests.support.world import CONFIG, MODELS, PROMPT, World, imitator, judge_script, storyteller

LIMITS = CONFIG.limits.model_copy(update={"max_draft_len": 0})
TARGET = storyteller(3)
DRAFT = imitator(TARGET, 5, 0.9)


def alike(first: str, second: str) -> bool:
    return len(first) == len(second)


@pytest.mark.parametrize("proposer", ProposerName)
@pytest.mark.parametrize("mode", Mode)
def test_no_mode_and_no_proposer_sends_a_draft(mode: Mode, proposer: ProposerName) -> None:
    world = World.of(TARGET, DRAFT, alike, limits=LIMITS)
    outcome = run_virtual(world.answer(mode=mode, proposer=proposer, verifier="exact", temperature=0.0))
    plain = World.of(TARGET, DRAFT, alike)
    run_virtual(plain.answer(mode="ar", temperature=0.0))
    assert world.text == plain.text
    assert not any(recorded.call.draft_ids is not None for engine in world.engines for recorded in engine.calls)
    assert outcome.usage.num_draft_tokens == 0
    assert bool(world.draft.calls) == mode.speculates_steps


@pytest.mark.parametrize(
    ("draft_logits", "vocab_size", "drawn", "sent"),
    [
        ("one_hot", 151_936, {"temperature": 0.6}, False),
        ("one_hot", 151_936, {"temperature": 0.6, "top_p": 0.999}, False),
        ("one_hot", 151_936, {"temperature": 0.6, "top_k": 20}, True),
        ("one_hot", 151_936, {"temperature": 0.6, "top_p": 0.95}, True),
        ("one_hot", 151_936, {"temperature": 0.0}, True),
        ("one_hot", 152_064, {"temperature": 0.6}, True),
        ("off", 152_064, {"temperature": 0.6}, False),
        ("none", 151_936, {"temperature": 0.6}, True),
    ],
)
def test_none_are_sent_where_the_engine_would_spoil_another_request(
    draft_logits: str, vocab_size: int, drawn: dict[str, float], sent: bool
) -> None:
    """TensorRT-LLM writes behind the list of all tokens, whose length is the padded vocabulary (Qwen3's: 151,936)."""
    world = World.of(TARGET, DRAFT, alike, draft_logits=draft_logits, vocab_size=vocab_size)
    outcome = run_virtual(world.answer(mode="sd", **drawn))
    assert outcome.usage.completion_tokens > 20 and bool(outcome.usage.num_draft_tokens) is sent


@pytest.mark.parametrize("mode", ["ar", "sd", "lr", "lr_sd"])
def test_the_loop_over_llm_api_engines_writes_what_it_writes_over_any(mode: str, tmp_path: Path) -> None:
    world = World.of(TARGET, DRAFT, alike, limits=LIMITS)
    run_virtual(world.answer(mode=mode, temperature=0.0, deterministic=True))
    texts: list[str] = []

    async def main() -> None:
        scripts = (TARGET, DRAFT, judge_script(alike))
        engines: list[Engine] = []
        for index, script in enumerate(scripts):
            engines.append(in_process(llmapi_engine(tmp_path / str(index), scripted(script), max_seq_len=2048)))
        request = LookaheadRequest.parse(
            {"text_input": "?", "max_tokens": 200, "mode": mode, "temperature": 0.0, "deterministic": True}
        )
        prompt = np.asarray(PROMPT, dtype=np.int32)
        server = Server(Engines(*engines), MODELS, world.config)
        loop = assemble(request, prompt, "r", server, lambda committed: texts.append(committed.text))
        try:
            outcome = await loop.run()
            assert not outcome.usage.degraded
        finally:
            for engine in engines:
                await engine.close()

    asyncio.run(main())
    assert "".join(texts) == world.text
