"""The LLM API engine over a stand-in for TensorRT-LLM: cut exactly, answered once, nothing left running."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lr_backend.embedded.sampler import Draw, drawn_tokens
from lr_backend.engine import Generation, Sampling
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, LookaheadError, Overloaded
from lr_backend.llmapi.engine import LlmApiEngine
from lr_backend.llmapi.health import POOL
from lr_backend.llmapi.outputs import log_probs_of
from lr_backend.llmapi.sampling import MAX_LOG_PROBS
from tests.support.embedded_engines import Pending, request
from tests.support.fake_llmapi import Choose, Completion, FakeLLM, Logprob, RequestError, by_logits, scripted
from tests.support.llmapi_engines import llmapi_engine, really_close
from tests.support.observed import WAIT_S
from tests.support.waiting import until

PROMPT = (50, 60)
COUNTING = scripted(lambda context, draw: len(context) - len(PROMPT))
"""After ``PROMPT`` the tokens are 0, 1, 2, 3 ..."""

Make = Callable[..., LlmApiEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[LlmApiEngine] = []

    def new(choose: Choose = COUNTING, **settings: Any) -> LlmApiEngine:
        made.append(llmapi_engine(tmp_path / "checkpoint", choose, **settings))
        return made[-1]

    yield new
    for engine in made:
        engine.close()
        assert not engine._thread.is_alive()
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


def start(engine: LlmApiEngine, asked: EngineRequest) -> Pending:
    pending = Pending()
    engine.submit(asked, pending)
    return pending


def ask(engine: LlmApiEngine, *words: tuple[int, ...], count: int = 20, **fields: Any) -> EngineResponse:
    return start(engine, request(PROMPT, count, words, **fields)).result()


def fake(engine: LlmApiEngine) -> FakeLLM:
    llm: FakeLLM = engine._llm
    return llm


def test_a_run_ends_at_its_length(make: Make) -> None:
    answer = ask(make(), count=5)
    assert answer.token_ids == (0, 1, 2, 3, 4)
    assert 0 < answer.arrival_ns < answer.first_token_ns <= answer.last_token_ns


def test_a_single_stop_token_ends_the_run_at_the_engine_and_is_kept(make: Make) -> None:
    engine = make()
    assert ask(engine, (3,), (9,)).token_ids == (0, 1, 2, 3)
    assert fake(engine).seen[-1].stop_token_ids == [3, 9]
    assert not fake(engine).aborted, "it stopped by itself"


def test_a_stop_word_of_several_tokens_is_found_on_the_stream(make: Make) -> None:
    engine = make()
    assert ask(engine, (3, 4, 5), (12,)).token_ids == (0, 1, 2, 3, 4, 5)
    until(lambda: bool(fake(engine).aborted))


def test_a_stop_word_may_begin_in_the_prompt(make: Make) -> None:
    engine = make()
    assert ask(engine, (PROMPT[-1], 0)).token_ids == (0,)
    assert ask(engine, (*PROMPT[-2:], 0, 1, 2)).token_ids == (0, 1, 2)


def test_many_stop_tokens_are_matched_here(make: Make) -> None:
    engine = make()
    assert ask(engine, *((token,) for token in range(6, 300))).token_ids == (0, 1, 2, 3, 4, 5, 6)
    assert fake(engine).seen[-1].stop_token_ids is None


def test_a_token_that_came_together_with_a_stop_is_dropped(make: Make) -> None:
    """Responses can pile up before the loop looks: nothing past the stop gets out."""
    engine = make(scripted(lambda context, draw: 7))
    hold = threading.Event()
    engine._loop.call_soon_threadsafe(hold.wait, 30)
    pending = start(engine, request(PROMPT, 20, [(7, 7)]))
    hold.set()
    assert pending.result().token_ids == (7, 7)


def test_the_end_token_is_swallowed_and_ends_the_run(make: Make) -> None:
    engine = make()
    assert ask(engine, end_id=4).token_ids == (0, 1, 2, 3)
    assert fake(engine).seen[-1].stop_token_ids == [4]


def test_min_tokens_hold_no_stop_word_back_and_are_refused_beside_an_end_token(make: Make) -> None:
    engine = make()
    assert ask(engine, (3,), min_tokens=8).token_ids == (0, 1, 2, 3)
    with pytest.raises(EngineRejected, match="min_tokens"):
        ask(engine, end_id=4, min_tokens=1)


def test_a_cancel_of_the_same_id_ends_the_run_with_what_it_has(make: Make) -> None:
    engine = make()
    fake(engine).hold_at = 6  # a slow thread here would find the run at its end
    running = start(engine, request(PROMPT, 240, request_id="x"))
    until(lambda: not fake(engine).gate.is_set())
    cancel = start(engine, request((), 0, request_id="x", stop=True))
    unknown = start(engine, request((), 0, request_id="unknown", stop=True))
    assert cancel.result().token_ids == unknown.result().token_ids == ()
    until(lambda: bool(fake(engine).aborted))
    fake(engine).gate.set()
    tokens = running.result().token_ids
    assert tokens == tuple(range(len(tokens)))
    assert len(tokens) < 240
    assert engine.stats().num_cancelled == 1
    assert ask(engine, count=2, request_id="x").token_ids == (0, 1), "the id is free again"


def test_a_cancel_that_upstream_does_not_hear_is_answered_after_the_grace(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.llmapi.engine.CANCELLATION_GRACE_S", 0.02)
    engine = make()
    fake(engine).deaf = True
    fake(engine).gate.clear()
    running = start(engine, request(PROMPT, 240, request_id="x"))
    engine.cancel("x")
    assert running.result().token_ids == ()
    fake(engine).gate.set()


def test_requests_in_flight_share_iterations_and_ids_are_unique(make: Make) -> None:
    engine = make(max_batch_size=3, max_queue_size=2)
    fake(engine).gate.clear()
    pending = [start(engine, request(PROMPT, 4, request_id=str(number))) for number in range(5)]
    until(lambda: len(fake(engine)._new) + fake(engine)._num_requests >= 5)
    assert (engine.stats().num_running, engine.stats().num_waiting) == (3, 2)
    with pytest.raises(Overloaded):
        engine.submit(request(PROMPT, request_id="more"), Pending())
    fake(engine).gate.set()
    assert all(one.result().token_ids == (0, 1, 2, 3) for one in pending)
    assert max(fake(engine).batch_sizes) == 3
    fake(engine).gate.clear()
    running = start(engine, request(PROMPT, 4, request_id="twin"))
    with pytest.raises(EngineRejected, match="'twin' is in flight"):
        engine.submit(request(PROMPT, request_id="twin"), Pending())
    fake(engine).gate.set()
    assert running.result().token_ids


def logits_after(context: tuple[int, ...]) -> torch.Tensor:
    """What a model of 50 tokens could compute."""
    logits: torch.Tensor = torch.randn(50, generator=torch.Generator().manual_seed(hash(context) % 2**32)) * 2.0
    return logits


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(0.6, 20, 0.95), Sampling(1.3, 0, 0.9)], ids=str)
def test_with_coupled_noise_it_draws_what_the_embedded_engine_draws(make: Make, sampling: Sampling) -> None:
    engine = make(by_logits(logits_after), coupled_noise=True)
    text = list(PROMPT)
    for _ in range(30):
        text += drawn_tokens(logits_after(tuple(text))[None], [Draw(0, len(text), sampling, 2**64 - 5)])[0]

    whole = ask(engine, count=30, sampling=sampling, seed=2**64 - 5)
    rest = start(engine, request(text[:15], 17, sampling=sampling, seed=2**64 - 5)).result()

    assert whole.token_ids == tuple(text[2:])
    assert rest.token_ids == tuple(text[15:]), "whoever begins within a text under its seed goes on as it does"
    assert ask(engine, count=30, sampling=sampling, seed=1).token_ids != whole.token_ids
    greedy = ask(engine, count=5).token_ids
    assert greedy[0] == int(logits_after(PROMPT).argmax())


def test_log_probabilities_stand_beside_the_tokens(make: Make) -> None:
    answer = ask(make(), (3, 4), return_log_probs=True)
    assert answer.log_probs == (-0.25,) * 5
    assert answer.tensors()["cum_log_probs"].tolist() == [[-1.25]]


@pytest.mark.parametrize("sampling", [Sampling(0.5, 0), Sampling(0.5, MAX_LOG_PROBS + 1)], ids=["all tokens", "too many"])
def test_where_no_log_probabilities_can_be_had_the_answer_comes_without(make: Make, sampling: Sampling) -> None:
    answer = ask(make(), (3, 4), return_log_probs=True, sampling=sampling)
    assert len(answer.token_ids) == 5 and answer.log_probs == ()
    assert answer.generation().log_probs == ()


def test_where_a_log_probability_is_not_there_the_answer_comes_without(make: Make) -> None:
    """The step loop must not lose its draft over it."""
    engine = make(lambda asks: [(1, {2: -0.1, 3: -2.0}) for _ in asks])
    answer = ask(engine, return_log_probs=True, sampling=Sampling(0.5, 2))
    assert len(answer.token_ids) > 0 and answer.log_probs == ()


def test_log_probabilities_are_read_from_each_shape_that_upstream_has() -> None:
    by_token = Completion(logprobs=[{4: Logprob(-1.0), 5: Logprob(-2.0)}, {7: Logprob(1e-9)}, {8: Logprob(-3.0)}])
    assert log_probs_of(by_token, (5, 7, 9)) == (-2.0, 0.0)
    assert log_probs_of(Completion(logprobs=[-1.0, -2.0]), (5, 7)) == (-1.0, -2.0)  # type: ignore[list-item]
    assert log_probs_of(Completion(logprobs=[]), (5, 7)) == ()


def test_upstreams_measurements_are_passed_on(make: Make) -> None:
    answer = ask(make(tokens_per_block=4), count=3, return_perf_metrics=True)
    tensors = answer.tensors()
    assert tensors["kv_cache_reused_blocks"].tolist() == [[3]]
    assert tensors["kv_cache_alloc_new_blocks"].tolist() == [[2]]
    assert answer.num_reused_tokens == 12
    assert answer.first_scheduled_ns - answer.arrival_ns == 2_000_000
    assert tensors["total_draft_tokens"].tolist() == [[0]]


def test_of_a_call_that_was_cut_on_the_stream_nothing_is_said_that_upstream_did_not_say(make: Make) -> None:
    """It has measured that call, and tells it with the last response, for which nobody waits."""
    answer = ask(make(), (1, 2), return_perf_metrics=True)
    tensors = answer.tensors()
    assert answer.token_ids == (0, 1, 2) and answer.num_reused_tokens is None
    assert not {"kv_cache_reused_blocks", "kv_cache_alloc_new_blocks", "first_scheduled_time_ns"} & tensors.keys()
    found = Generation.from_tensors(tensors)
    assert (found.num_reused_tokens, found.queue_s) == (None, 0.0) and found.total_s > 0.0


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("no such setting"), EngineRejected),
        (RequestError("Prompt length (9) exceeds maximum input length (8)"), EngineRejected),
        (RequestError("CUDA error: an illegal memory access was encountered"), EngineUnavailable),
        (RequestError("list index out of range"), EngineError),
        (RuntimeError("a queue is gone"), EngineError),
    ],
    ids=["value", "request", "card", "iteration", "engine"],
)
def test_what_upstream_raises_is_answered(make: Make, raised: Exception, kind: type[LookaheadError]) -> None:
    engine = make()
    fake(engine).fails = raised
    with pytest.raises(kind, match=re.escape(str(raised))) as caught:
        ask(engine)
    assert type(caught.value) is kind
    fake(engine).fails = None
    assert ask(engine, count=2).token_ids == (0, 1)
    assert engine.stats().num_failed == 1


def test_an_llm_that_shut_down_is_unavailable(make: Make) -> None:
    engine = make()
    fake(engine).shutdown()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        ask(engine)


def test_close_answers_what_is_in_flight_and_refuses_the_rest(make: Make) -> None:
    engine = make()
    fake(engine).gate.clear()
    pending = [start(engine, request(PROMPT, 240, request_id=str(number))) for number in range(3)]
    engine.close()
    for one in pending:
        with pytest.raises(EngineUnavailable):
            one.result()
    with pytest.raises(EngineUnavailable):
        engine.submit(request(PROMPT), Pending())
    assert start(engine, request((), 0, request_id="1", stop=True)).result().token_ids == ()
    engine.close()


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_a_dead_llm_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Upstream's calls may block the loop by then, and its shutdown waits for the dead."""
    monkeypatch.setattr("lr_backend.llmapi.engine.LOOK_S", 0.01)
    with subprocess.Popen([sys.executable, "-c", "input()", POOL], stdin=subprocess.PIPE) as worker:
        engine = llmapi_engine(tmp_path / "checkpoint", COUNTING)
        fake(engine).gate.clear()
        pending = [start(engine, request(PROMPT, 240, request_id=str(number))) for number in range(3)]
        until(lambda: fake(engine)._num_requests == 3)
        blocked = threading.Event()
        engine._loop.call_soon_threadsafe(blocked.wait, WAIT_S)
        waiting = threading.Thread(target=engine.wait, daemon=True)
        waiting.start()
        if how == "killed":
            worker.kill()
        else:
            fake(engine).shutdown()
        waiting.join(WAIT_S)
        worker.kill()
    assert not waiting.is_alive()
    assert all(one.done for one in pending) and not blocked.is_set()
    for one in pending:
        with pytest.raises(EngineUnavailable, match="died"):
            one.result()
    with pytest.raises(EngineUnavailable, match="died"):
        engine.submit(request(PROMPT), Pending())
    assert (engine.stats().num_failed, engine.stats().num_running) == (3, 0)
    with monkeypatch.context() as patched:
        patched.setattr(fake(engine), "shutdown", lambda: pytest.fail("it would not return"))
        engine.close()
    blocked.set()
    really_close(engine)
    assert engine.stats().num_failed == 3, "what comes late is no second answer"


def test_a_watched_engine_that_is_closed_has_not_died(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.llmapi.engine.LOOK_S", 0.01)
    engine = make()
    waiting = threading.Thread(target=engine.wait, daemon=True)
    waiting.start()
    assert ask(engine, count=2).token_ids == (0, 1)
    engine.close()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.submit(request(PROMPT), Pending())


def test_counters_add_up(make: Make) -> None:
    engine = make()
    for count in (2, 3):
        ask(engine, count=count)
    stats = engine.stats()
    assert (stats.num_requests, stats.num_tokens_decoded, stats.num_failed, stats.num_cancelled) == (2, 5, 0, 0)
