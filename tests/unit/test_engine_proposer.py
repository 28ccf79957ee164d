"""The proposer ``engine``: the target's engine drafts by itself, and the loop only says how far, in the modes that want it."""

from __future__ import annotations

import pytest

from lr_backend.errors import InvalidRequest
from lr_backend.request import Mode
from lr_backend.testing import run_virtual
from tests.support.world import CONFIG, World, imitator, storyteller

TARGET = storyteller(3, sampled=True)
DRAFT = imitator(TARGET, 5, 0.9)


def alike(first: str, second: str) -> bool:
    return len(first) == len(second)


def world(**config: object) -> World:
    return World.of(TARGET, DRAFT, alike, **config)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("stream", [True, False])
def test_tokens_are_those_of_the_target_alone_in_fewer_passes(temperature: float, stream: bool) -> None:
    plain, drafted = world(), world()
    fields = {"temperature": temperature, "stream": stream, "seed": 4, "proposer": "engine"}
    alone = run_virtual(plain.answer(mode="ar", **fields)).usage
    usage = run_virtual(drafted.answer(mode="sd", **fields)).usage
    assert drafted.text == plain.text
    assert len(drafted.target.calls) == len(plain.target.calls)
    assert usage.num_target_passes == usage.completion_tokens - usage.num_accepted_tokens < alone.num_target_passes
    assert 0 < usage.num_accepted_tokens <= usage.num_draft_tokens
    assert usage.latency_s < alone.latency_s
    assert (alone.num_draft_tokens, usage.num_wasted_tokens, drafted.draft.calls) == (0, 0, [])


@pytest.mark.parametrize("mode", Mode)
def test_only_the_target_drafts_and_only_in_modes_that_speculate_tokens(mode: Mode) -> None:
    made = world()
    run_virtual(made.answer(mode=mode, proposer="engine", num_draft_tokens=5))
    found = {recorded.call.num_draft_tokens for recorded in made.target.calls}
    # What chooses has to know what steps take without draft tokens too.
    assert found == ({5, 0} if mode.chooses else {5} if mode.speculates_tokens else {0})
    assert not any(recorded.call.num_draft_tokens for engine in (made.draft, made.judge) for recorded in engine.calls)
    assert not any(recorded.call.draft_ids is not None for engine in made.engines for recorded in engine.calls)


def test_draft_tokens_change_no_step_and_no_verdict() -> None:
    texts = []
    for mode in ("lr", "lr_sd"):
        made = world()
        usage = run_virtual(made.answer(mode=mode, proposer="engine", deterministic=True, temperature=0.7)).usage
        texts.append((made.text, usage.num_steps, usage.num_steps_accepted, usage.num_steps_rejected))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("asked", "most", "wanted"), [(8, 16, 8), (16, 6, 6), (0, 16, 0), (8, 0, 0)])
def test_the_server_bounds_their_number(asked: int, most: int, wanted: int) -> None:
    made = world(limits=CONFIG.limits.model_copy(update={"max_draft_len": most}))
    run_virtual(made.answer(mode="sd", proposer="engine", num_draft_tokens=asked))
    assert {recorded.call.num_draft_tokens for recorded in made.target.calls} == {wanted}


@pytest.mark.parametrize("mode", Mode)
def test_a_server_whose_target_holds_no_draft_model_says_so(mode: Mode) -> None:
    with pytest.raises(InvalidRequest, match=r"proposer.*engine.*target\.holds_draft_model"):
        run_virtual(world(engine_drafts=False).answer(mode=mode, proposer="engine"))


def test_a_trace_has_the_draft_tokens_with_the_call_that_verified_them() -> None:
    made = world()
    outcome = run_virtual(made.answer(mode="lr_sd", proposer="engine", trace=True))
    finished = [span for span in outcome.ledger.spans if span.num_proposed]
    assert {span.role.value for span in finished} == {"target"}
    assert sum(span.num_accepted for span in finished) == outcome.usage.num_accepted_tokens > 0
    assert all(recorded.call.return_perf_metrics for recorded in made.target.calls)
