"""Cancelling, bounds and failures of the embedded engine: everybody is answered, and it lives on."""

from __future__ import annotations

import ctypes
import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.embedded.native.model import _Layer
from lr_backend.embedded.native.runner import NativeRunner
from lr_backend.embedded.reference.runner import ReferenceRunner
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, NotFinite, Overloaded
from tests.support.embedded_engines import (
    KERNELS,
    NEEDS_LIBRARY,
    VOCAB,
    Gate,
    MakeEngine,
    Pause,
    ask,
    cancel,
    engines,
    greedy,
    poison,
    prompt,
    request,
    start,
    tiny_checkpoint,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture
def kernels() -> str:
    """Who computes; a test of what depends on it is run with either."""
    return "reference"


@pytest.fixture
def make_engine(checkpoint: Path, kernels: str) -> Iterator[MakeEngine]:
    yield from engines(checkpoint, kernels=kernels)


@pytest.fixture
def engine(make_engine: MakeEngine) -> EmbeddedEngine:
    return make_engine()


@pytest.mark.parametrize("kernels", KERNELS)
def test_cancelling_a_running_request_answers_with_what_it_has(engine: EmbeddedEngine) -> None:
    full = greedy(engine, prompt(9), 60)
    pause = Pause(engine, after=65)
    running = start(engine, request(prompt(9), 200, request_id="a"))
    pause.begun.wait(10)
    cancelled = cancel(engine, "a")
    pause.end()
    assert cancelled.result().token_ids == ()
    token_ids = running.result().token_ids
    assert 0 < len(token_ids) < 200
    assert token_ids[:60] == full[: len(token_ids)]
    assert engine.stats().num_cancelled == 1


def test_cancelling_a_queued_request_answers_with_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_size=1)
    gate = Gate(engine)
    first = start(engine, request(prompt(9), 4, request_id="a"))
    second = start(engine, request(prompt(9), 4, request_id="b"))
    cancel(engine, "b")
    gate.open()
    assert second.result().token_ids == ()
    assert len(first.result().token_ids) == 4


def test_cancelling_an_unknown_id_succeeds(engine: EmbeddedEngine) -> None:
    assert cancel(engine, "never seen").result().token_ids == ()
    assert cancel(engine, "").result().token_ids == ()
    assert len(greedy(engine, prompt(5), 3)) == 3


def test_an_id_is_free_again_after_its_answer(engine: EmbeddedEngine) -> None:
    for _ in range(3):
        assert len(ask(engine, request(prompt(5), 3, request_id="a"))[0].token_ids) == 3
    cancel(engine, "a")
    assert len(ask(engine, request(prompt(5), 3, request_id="a"))[0].token_ids) == 3


def test_a_full_queue_refuses_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_queue_size=2)
    gate = Gate(engine)
    pending = [start(engine, request(prompt(5), 3)) for _ in range(2)]
    with pytest.raises(Overloaded, match="queue is full: 2"):
        start(engine, request(prompt(5), 3))
    gate.open()
    for one in pending:
        assert len(one.result().token_ids) == 3
    assert len(greedy(engine, prompt(5), 3)) == 3


def test_an_id_in_flight_is_refused(engine: EmbeddedEngine) -> None:
    gate = Gate(engine)
    first = start(engine, request(prompt(5), 3, request_id="a"))
    with pytest.raises(EngineRejected, match="'a' is in flight"):
        start(engine, request(prompt(5), 3, request_id="a"))
    gate.open()
    assert len(first.result().token_ids) == 3


REJECTED = {
    "length 9 exceeds max_draft_len 8": {"draft_ids": (1,) * 9},
    "input_ids: length 256": {"input_ids": (1,) * 256},
    "input_ids: empty": {"input_ids": ()},
    "request_output_len=0": {"max_new_tokens": 0},
    "input_ids: token ids": {"input_ids": (1, VOCAB)},
    "draft_input_ids: token ids": {"draft_ids": (-1,)},
    "end_id": {"end_id": VOCAB},
    "draft_logits: width 3": {"draft_ids": (1,), "draft_logits": torch.zeros(1, 3).numpy()},
}


@pytest.mark.parametrize("message", REJECTED)
def test_what_can_never_run_is_rejected_by_name(message: str, engine: EmbeddedEngine) -> None:
    fields: dict[str, Any] = {"input_ids": prompt(5), **REJECTED[message]}
    with pytest.raises(EngineRejected, match=message):
        start(engine, request(**fields))
    assert len(greedy(engine, prompt(5), 3)) == 3


def test_draft_logits_are_not_kept_while_their_request_waits(engine: EmbeddedEngine) -> None:
    logits = torch.zeros(1, VOCAB).numpy()
    kept = weakref.ref(logits)
    gate = Gate(engine)
    pending = start(engine, request(prompt(5), 3, draft_ids=(1,), draft_logits=logits))
    del logits
    assert kept() is None
    gate.open()
    assert pending.result().token_ids


def test_what_exceeds_the_kv_cache_is_rejected(make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens_in_paged_kv_cache=40)
    with pytest.raises(EngineRejected, match="KV cache of 40"):
        start(engine, request(prompt(30), 11))
    assert len(greedy(engine, prompt(30), 10)) == 10


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("broken", ["run", "schedule"])
def test_a_failing_iteration_fails_its_requests_and_the_engine_lives_on(
    broken: str, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = greedy(engine, prompt(9), 12)

    def fail(*args: Any) -> Any:
        raise RuntimeError("the machine is on fire")

    gate = Gate(engine)
    if broken == "schedule":
        monkeypatch.setattr(engine._scheduler, broken, fail)
    else:
        monkeypatch.setattr(engine._runner, "run", fail)
        monkeypatch.setattr(engine._runner, "run_ahead", fail)
    pending = [start(engine, request((*prompt(9), token), 12, request_id=str(token))) for token in range(3)]
    gate.open()
    for one in pending:
        with pytest.raises(EngineError, match="on fire"):
            one.result()
    monkeypatch.undo()
    assert greedy(engine, prompt(9), 12) == full
    assert engine.stats().num_failed == 3


@NEEDS_LIBRARY
@pytest.mark.parametrize("kernels", ["native"])
def test_a_prefill_that_cannot_be_started_fails_its_requests(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine._prefill is not None
    gate = Gate(engine)

    def fail(*args: Any) -> Any:
        raise RuntimeError("no thread")

    monkeypatch.setattr(engine._prefill._executor, "submit", fail)
    pending = [start(engine, request(prompt(length), 4)) for length in (5, 40)]
    gate.open()
    for one in pending:
        with pytest.raises(EngineError, match="no thread"):
            one.result()
    monkeypatch.undo()
    assert [len(one.token_ids) for one in ask(engine, request(prompt(5), 4), request(prompt(40), 4))] == [4, 4]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_tokens", [50, 150], ids=["one iteration", "several, of which the first yield no logits"])
def test_logits_that_are_not_finite_fail_the_request_and_poison_nothing(make_engine: MakeEngine, num_tokens: int) -> None:
    expected, engine = greedy(make_engine(), prompt(num_tokens, 7), 12), make_engine()
    full = greedy(engine, prompt(9), 12)
    other = greedy(engine, prompt(30, 5), 12)
    weight = a_weight_of_all_rows(engine)
    kept = weight.clone()
    gate = Gate(engine)
    weight.fill_(float("nan"))
    failing = start(engine, request(prompt(num_tokens, 7), 12))
    gate.open()
    with pytest.raises(EngineError, match="not finite"):
        failing.result()
    gate = Gate(engine)
    weight.copy_(kept)
    gate.open()
    assert greedy(engine, prompt(9), 12) == full
    answers = ask(engine, request(prompt(30, 5), 12), request(prompt(9), 12), request(prompt(num_tokens, 7), 12))
    assert [answer.token_ids for answer in answers] == [other, full, expected]


POISON = VOCAB - 1
"""Whoever has read this token computes nothing but NaN."""


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 40, 150], ids=["a decode", "a prompt", "a prompt of several iterations"])
def test_logits_that_are_not_finite_fail_their_request_alone(make_poisoned: MakeEngine, num_tokens: int) -> None:
    engine = make_poisoned()
    neighbours = [request(clean(20, seed), 40, return_log_probs=True, request_id=str(seed)) for seed in range(3)]
    alone = [ask(engine, replace(one, request_id=""))[0] for one in neighbours]
    poisoned_prompt = (*clean(num_tokens - 1, 9), POISON)
    gate = Gate(engine)
    healthy = [start(engine, one) for one in neighbours]
    failing = [start(engine, request(poisoned_prompt, 40, request_id=f"p{number}")) for number in range(2)]
    failing.append(start(engine, request(poisoned_prompt, 40, draft_ids=(1, 2), request_id="verified")))
    gate.open()
    for one in failing:
        with pytest.raises(NotFinite, match="not finite"):
            one.result()
    for one, before in zip(healthy, alone, strict=True):
        assert POISON not in before.token_ids
        assert (one.result().token_ids, one.result().log_probs) == (before.token_ids, pytest.approx(before.log_probs, rel=1e-5))
    assert engine.stats().num_failed == 3
    # Nothing that the failed ones left behind is found by whoever begins as they did.
    after = ask(engine, request(poisoned_prompt[:-1] or clean(5, 9), 8))[0]
    assert len(after.token_ids) == 8


@NEEDS_LIBRARY
@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("num_agreed", [0, 2])
def test_a_draft_token_without_finite_logits_is_rejected_as_any_other(num_agreed: int, make_poisoned: MakeEngine) -> None:
    """Its row lies in a block with earlier ones of its request, whose heads read keys and values together."""
    engine = make_poisoned()
    plain = greedy(engine, clean(21, 1), 12)
    drafts = (*plain[:num_agreed], POISON, 1, 2)

    verified = ask(engine, request(clean(21, 1), 12, draft_ids=drafts))[0]
    assert (verified.token_ids, verified.num_accepted_tokens) == (plain[: num_agreed + 1], num_agreed)
    assert greedy(engine, clean(21, 1), 12) == plain


@NEEDS_LIBRARY
@pytest.mark.parametrize("kernels", ["native"])
def test_a_draft_model_that_proposes_what_has_no_finite_logits_changes_no_text(
    make_poisoned: MakeEngine, checkpoint: Path, tmp_path: Path
) -> None:
    proposing_poison(shutil.copytree(checkpoint, tmp_path / "draft"))
    engine = make_poisoned(speculative_model_dir=tmp_path / "draft")
    plain = greedy(engine, clean(21, 1), 12)

    drafted = ask(engine, request(clean(21, 1), 12, num_draft_tokens=3))[0]
    assert (drafted.token_ids, drafted.num_accepted_tokens) == (plain, 0)
    assert drafted.num_draft_tokens > 3


def proposing_poison(folder: Path) -> None:
    """Change a checkpoint so that it takes ``POISON`` for certain after any token."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"][POISON, 0] = 10.0
    save_file(tensors, file, metadata={"format": "pt"})


def clean(length: int, seed: int) -> tuple[int, ...]:
    return tuple(token % POISON for token in prompt(length, seed))


@pytest.fixture(scope="module")
def poisoned(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    poison(folder, POISON)
    return folder


@pytest.fixture
def make_poisoned(poisoned: Path, kernels: str) -> Iterator[MakeEngine]:
    yield from engines(poisoned, kernels=kernels)


def a_weight_of_all_rows(engine: EmbeddedEngine) -> torch.Tensor:
    """What it is set to reaches every row's logits; in C every row's keys and values too."""
    runner = engine._runner
    if isinstance(runner, ReferenceRunner):
        return runner.model.weights["model.norm.weight"]
    assert isinstance(runner, NativeRunner)
    layers = ctypes.cast(runner._model._model.layers, ctypes.POINTER(_Layer))
    row = (ctypes.c_float * engine.spec.hidden_size).from_address(layers[0].input_norm)
    return torch.frombuffer(row, dtype=torch.float32)


def test_a_failing_callback_is_not_the_engines_failure(engine: EmbeddedEngine) -> None:
    def fail(result: Any) -> None:
        raise RuntimeError("caller's fault")

    engine.submit(request(prompt(5), 3), fail)
    assert len(greedy(engine, prompt(5), 3)) == 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_closing_fails_what_is_in_flight_and_what_comes_later(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_size=1)
    pause = Pause(engine, after=3)
    pending = [start(engine, request(prompt(5), 200)) for _ in range(3)]
    assert pause.begun.wait(10)
    engine.close()
    engine.close()
    assert all(one.done for one in pending)
    assert all(isinstance(outcome, EngineUnavailable) for one in pending for outcome in one.results)
    with pytest.raises(EngineUnavailable):
        start(engine, request(prompt(5), 3))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_dying_thread_leaves_nobody_waiting(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    gate = Gate(engine)
    monkeypatch.setattr(engine, "_iterate", lambda: 1 / 0)
    pending = start(engine, request(prompt(5), 3))
    gate.open()
    with pytest.raises(EngineUnavailable, match="died: division by zero"):
        pending.result()
    with pytest.raises(EngineUnavailable, match="died: division by zero"):
        start(engine, request(prompt(5), 3))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_preempted_request_finds_its_own_output_in_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens_in_paged_kv_cache=96, max_seq_len=96)
    gate = Gate(engine)
    both = [start(engine, request(prompt(8, seed), 60)) for seed in range(2)]
    gate.open()
    for pending in both:
        pending.result()
    stats = engine.stats()
    assert stats.num_preemptions > 0
    # Each token is computed once, but for the few of a block cut short: nothing near a second time.
    assert stats.num_iterations < 60 + 60 + 20


@pytest.mark.parametrize("kernels", KERNELS)
def test_accounting_that_does_not_add_up_is_found_when_idle(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.embedded.engine.IDLE_CHECK_S", 0.02)
    engine = make_engine()
    full = greedy(engine, prompt(9), 12)
    checked = threading.Event()
    original = engine._reset_cache

    def reset() -> None:
        original()
        checked.set()

    monkeypatch.setattr(engine, "_reset_cache", reset)
    gate = Gate(engine)
    engine._scheduler.cache._free.pop()
    gate.open()
    greedy(engine, prompt(5), 1)
    assert checked.wait(10)
    assert engine.stats().num_integrity_failures == 1
    assert greedy(engine, prompt(9), 12) == full
