"""LLM API engines over the stand-in, by a script or a tiny torch model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lr_backend.engine import Sampling
from lr_backend.engine.inprocess import InProcessEngine
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.engine import LlmApiEngine
from lr_backend.llmapi.upstream import make_llm
from tests.support.embedded_engines import ask, request, tiny_engine
from tests.support.fake_llmapi import Ask, Choice, Choose, FakeSamplingParams, Guess, fake_upstream


def llmapi_engine(folder: Path, choose: Choose, guess: Guess = lambda context: -1, **settings: Any) -> LlmApiEngine:
    """An engine as the Triton model makes it, with the stand-in for upstream. ``folder`` gets an empty checkpoint.

    Args:
        guess: what its drafter says, where the settings have it speculate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text("{}")
    config = LlmApiConfig(folder, **{"max_seq_len": 256, "max_batch_size": 8, "max_queue_size": 64} | settings)
    upstream = fake_upstream(choose, guess)
    return LlmApiEngine(config, make_llm(config, upstream), upstream.SamplingParams)


def really_close(engine: LlmApiEngine) -> None:
    """Of one whose LLM has died: a stand-in's can be shut down."""
    engine._why_closed = ""
    engine.close()


def by_torch(checkpoint: Path) -> Choose:
    """Tokens of a tiny model: a run of one token for each ask, its seed the place in the one generator's sequence."""
    engine = tiny_engine(checkpoint)

    def choose(asks: list[Ask]) -> list[Choice]:
        runs = [request(one.context, 1, sampling=_sampling(one.params), seed=one.draw, return_log_probs=True) for one in asks]
        answers = ask(engine, *runs)
        return [(answer.token_ids[0], {answer.token_ids[0]: answer.log_probs[0]}) for answer in answers]

    return choose


def _sampling(params: FakeSamplingParams) -> Sampling:
    if params.greedy:
        return Sampling()
    return Sampling(params.temperature or 1.0, params.top_k or 0, params.top_p or 1.0)


def in_process(engine: LlmApiEngine) -> InProcessEngine:
    """The engine protocol over it: the adapter knows an engine by ``submit``, ``cancel`` and ``close`` alone."""
    return InProcessEngine(engine)
