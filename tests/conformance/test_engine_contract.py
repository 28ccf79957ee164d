"""What the loop relies on, asked of every kind of engine: the same requests, the same shape of answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.kit.serving import demo_spec, serving
from lr_backend.build.base import Layout
from lr_backend.contract import encode_stop_words
from lr_backend.engine import Engine, EngineCall, Generation, Role, Sampling, one_hot_logits
from lr_backend.engine.checkpoint import json_object
from lr_backend.errors import EngineRejected
from tests.conformance.endpoints import (
    ADDRESS,
    NUM_LOGITS,
    Endpoint,
    embedded_engine,
    llmapi,
    num_cancelled,
    paced_engine,
    remote,
    scripted,
)
from tests.support.embedded_engines import NEEDS_LIBRARY, tiny_checkpoint

SAMPLED = Sampling(temperature=1.0)
PROMPT = (7, 3, 11, 5, 2, 13, 4, 9, 6)

NATIVE = pytest.param("native", marks=NEEDS_LIBRARY)
CUDA = pytest.param(
    "reference-cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)
TRITON = pytest.param("embedded-triton", marks=pytest.mark.integration)
GIVEN = pytest.param("given", marks=pytest.mark.skipif(not ADDRESS, reason="LOOKAHEAD_ENGINE names no engine"))


@pytest.fixture(scope="module", params=["scripted", "reference", NATIVE, CUDA, "paced", "llmapi", TRITON, GIVEN])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder: Path = tmp_path_factory.mktemp("engine")
    match request.param:
        case "scripted":
            yield scripted()
        case "reference":
            yield embedded_engine(tiny_checkpoint(folder), "cpu", "reference")
        case "native":
            yield embedded_engine(tiny_checkpoint(folder, head_dim=16), "cpu", "native")
        case "reference-cuda":
            yield embedded_engine(tiny_checkpoint(folder), "cuda", "reference")
        case "paced":
            yield paced_engine(tiny_checkpoint(folder))
        case "llmapi":
            yield llmapi(tiny_checkpoint(folder))
        case "embedded-triton":
            spec = demo_spec(Layout.PROCESS_A_ROLE)
            num_logits = json_object(spec.checkpoint_dir(Role.TARGET) / "config.json")["vocab_size"]
            with serving(spec, folder / "repository", only=("target",)) as server:
                yield remote(f"{server.grpc_url}/target", num_logits)
        case _:
            yield remote(ADDRESS, NUM_LOGITS)


def call(request_id: str, max_new_tokens: int = 8, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> EngineCall:
    drafts = fields.pop("drafts", None)
    if drafts is not None:
        fields["draft_ids"], max_new_tokens = np.array(drafts, np.int32), len(drafts) + 1
    return EngineCall(request_id, np.array(prompt, np.int32), max_new_tokens, **fields)


async def plain(engine: Engine, count: int) -> tuple[int, ...]:
    """The greedy continuation of ``PROMPT``."""
    return (await engine.generate(call("plain", count))).token_ids


def test_a_greedy_run_has_its_length_and_repeats(endpoint: Endpoint) -> None:
    async def body(engine: Engine) -> None:
        first, second = [await engine.generate(call(name, 8)) for name in ("a", "b")]
        assert first.token_ids == second.token_ids
        assert len(first.token_ids) == 8
        assert all(type(token) is int and token >= 0 for token in first.token_ids)
        assert (first.num_draft_tokens, first.num_accepted_tokens) == (0, 0)

    endpoint.run(body)


def test_a_stop_word_ends_the_run_and_is_kept(endpoint: Endpoint) -> None:
    async def body(engine: Engine) -> None:
        full = await plain(engine, 8)
        place = next(at for at in range(2, 7) if full[at : at + 2] not in list(pairwise(full))[:at])
        stopped = await engine.generate(call("a", 8, stop_words=encode_stop_words([full[place : place + 2]])))
        assert stopped.token_ids == full[: place + 2]

    endpoint.run(body)


def test_a_stop_word_may_begin_in_the_prompt(endpoint: Endpoint) -> None:
    async def body(engine: Engine) -> None:
        full = await plain(engine, 8)
        stopped = await engine.generate(call("a", 8, stop_words=encode_stop_words([[*PROMPT[-2:], *full[:2]]])))
        assert stopped.token_ids == full[:2]

    endpoint.run(body)


def needs_drafts(endpoint: Endpoint) -> None:
    if not endpoint.drafts:
        pytest.skip("this engine takes no draft tokens")


def test_drafts_that_are_not_taken_are_refused_by_name(endpoint: Endpoint) -> None:
    if endpoint.drafts:
        pytest.skip("this engine takes draft tokens")

    async def body(engine: Engine) -> None:
        with pytest.raises(EngineRejected, match="draft_input_ids"):
            await engine.generate(call("a", drafts=(1, 2)))
        assert len(await plain(engine, 4)) == 4

    endpoint.run(body)


def test_right_drafts_bring_themselves_and_one_token_more(endpoint: Endpoint) -> None:
    needs_drafts(endpoint)

    async def body(engine: Engine) -> None:
        full = await plain(engine, 8)
        verified = await engine.generate(call("a", drafts=full[:7], return_perf_metrics=True))
        assert verified.token_ids == full
        assert (verified.num_draft_tokens, verified.num_accepted_tokens) == (7, 7)

    endpoint.run(body)


@pytest.mark.parametrize("wrong_at", [0, 3, 6])
def test_a_wrong_draft_ends_a_verification_with_the_models_own_token(endpoint: Endpoint, wrong_at: int) -> None:
    needs_drafts(endpoint)

    async def body(engine: Engine) -> None:
        full = await plain(engine, 8)
        drafts = list(full[:7])
        drafts[wrong_at] = full[wrong_at] + 1 if full[wrong_at] + 1 not in full else 0
        verified = await engine.generate(call("a", drafts=drafts, return_perf_metrics=True))
        assert verified.token_ids == full[: wrong_at + 1]
        assert verified.num_accepted_tokens == wrong_at

    endpoint.run(body)


def test_a_stop_word_among_drafts_ends_the_verification(endpoint: Endpoint) -> None:
    needs_drafts(endpoint)

    async def body(engine: Engine) -> None:
        full = await plain(engine, 8)
        place = full.index(full[4])
        verified = await engine.generate(call("a", drafts=full[:7], stop_words=encode_stop_words([full[4:5]])))
        assert verified.token_ids == full[: place + 1]

    endpoint.run(body)


def test_calls_in_flight_together_get_what_they_get_alone(endpoint: Endpoint) -> None:
    async def body(engine: Engine) -> None:
        calls = [call(f"{length}", 8, PROMPT[:length]) for length in range(2, 9)]
        alone = [(await engine.generate(one)).token_ids for one in calls]
        together = await asyncio.gather(*(engine.generate(one) for one in calls))
        assert [one.token_ids for one in together] == alone

    endpoint.run(body)


def test_a_cancelled_call_leaves_the_engine_and_its_id_free(endpoint: Endpoint) -> None:
    async def cancel_one(engine: Engine) -> None:
        expected = await plain(engine, 8)
        running = asyncio.create_task(engine.generate(call("a", 200)))
        await asyncio.sleep(0)  # the call is on its way; its answer, however fast, can only be heard of in a later turn
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(30):
            while True:
                try:
                    again = await engine.generate(call("a", 8))
                    break
                except EngineRejected:  # the id is in flight until the engine has heard of the cancel
                    await asyncio.sleep(0.01)
        assert again.token_ids == expected

    async def body(engine: Engine) -> None:
        await cancel_one(engine)
        for _ in range(5):  # an engine may be done with a call before it hears of the cancel
            if num_cancelled(engine) == 0:
                await cancel_one(engine)
        assert num_cancelled(engine) != 0

    endpoint.run(body)


def test_a_seed_reproduces_its_sample(endpoint: Endpoint) -> None:
    if not endpoint.seeded:
        pytest.skip("one generator draws for all requests of this engine")

    async def body(engine: Engine) -> None:
        async def sample(seed: int) -> Generation:
            return await engine.generate(call(f"{seed}", 12, sampling=SAMPLED, seed=seed))

        first = [(await sample(seed)).token_ids for seed in range(6)]
        again = [one.token_ids for one in await asyncio.gather(*(sample(seed) for seed in range(6)))]
        assert first == again
        if endpoint.samples:
            assert len(set(first)) > 1

    endpoint.run(body)


def test_a_token_is_drawn_as_often_whether_it_was_drafted_or_not(endpoint: Endpoint) -> None:
    needs_drafts(endpoint)
    if not (endpoint.samples and endpoint.num_logits):
        pytest.skip("nothing is drawn, or the width of the logits is not known")
    num_samples = 400

    async def body(engine: Engine) -> None:
        async def first_tokens(seeds: range, temperature: float, **drafts: Any) -> Counter[int]:
            found: Counter[int] = Counter()
            for some in (seeds[start : start + 50] for start in range(0, len(seeds), 50)):  # a queue is not endless
                calls = [call(f"{seed}", 1, sampling=Sampling(temperature), seed=seed, **drafts) for seed in some]
                found.update(answer.token_ids[0] for answer in await asyncio.gather(*map(engine.generate, calls)))
            return found

        async def spread() -> tuple[float, Counter[int]]:
            """A temperature at which the likeliest token is neither certain nor rare: else both rules look alike."""
            for temperature in (1.0, 0.7, 0.5, 0.3, 0.2, 1.5, 2.0, 3.0):
                found = await first_tokens(range(num_samples), temperature)
                if 0.25 < found.most_common(1)[0][1] / num_samples < 0.75:
                    return temperature, found
            pytest.fail("the likeliest token is certain or rare at all temperatures")

        temperature, plain = await spread()
        (drafted, _), (other, _) = plain.most_common(2)
        logits = one_hot_logits(np.array([drafted], np.int32), endpoint.num_logits)
        # Other seeds: where noise is shared, the same ones draw the same tokens.
        seeds = range(num_samples, 2 * num_samples)
        verified = await first_tokens(seeds, temperature, drafts=(drafted,), draft_logits=logits)
        for token in (drafted, other):  # a rule that draws again where a draft is rejected favours the drafted token
            share = (plain[token] + verified[token]) / (2 * num_samples)
            deviation = sqrt(2 * share * (1 - share) / num_samples)
            assert abs(plain[token] - verified[token]) < 4 * deviation * num_samples

    endpoint.run(body)


def test_log_probabilities_stand_beside_the_tokens(endpoint: Endpoint) -> None:
    async def body(engine: Engine) -> None:
        answer = await engine.generate(call("a", 8, return_log_probs=True))
        assert len(answer.log_probs) == len(answer.token_ids) == 8
        assert all(value <= 0.0 for value in answer.log_probs)

    endpoint.run(body)


def test_a_prompt_that_is_too_long_is_refused_and_the_next_is_served(endpoint: Endpoint) -> None:
    if not endpoint.limits_length:
        pytest.skip("a script has no longest context")

    async def body(engine: Engine) -> None:
        with pytest.raises(EngineRejected):
            await engine.generate(call("a", 8, PROMPT * 10_000))
        assert len(await plain(engine, 4)) == 4

    endpoint.run(body)
