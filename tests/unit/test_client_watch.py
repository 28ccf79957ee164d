"""Clients that go away: whom the watch asks about and when, and what becomes of their requests."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lr_backend.emulated.texts import Script
from lr_backend.emulated.workload import Workload
from lr_backend.engine import EngineCall, Role, cancel_tensors
from lr_backend.hardware.rules import UpstreamRules
from lr_backend.triton import client_watch
from lr_backend.triton.client_watch import MAX_ASKED_A_SECOND, MIN_AGE_S, ClientWatch
from tests.support.fake_pb_utils import StubFamily, StubRequest, stub_module
from tests.support.paced import TARGET

NEVER_S = 1e6
PERIOD_S = 0.1


class Watched:
    """A watch that looks when it is told to, and its time."""

    def __init__(self, period_s: float = NEVER_S) -> None:
        self.now_s = 0.0
        self.cancelled: list[str] = []
        self.watch = ClientWatch(period_s, self.cancelled.append, lambda: self.now_s)
        self.watch._stopped.set()  # its thread does not look
        self.watch._most = round(MAX_ASKED_A_SECOND * PERIOD_S)

    def enter(self, *names: str) -> list[StubRequest]:
        made = [StubRequest({}, name) for name in names]
        self.clients = [self.watch.enter(one.id, one) for one in made]
        return made

    def look(self, after_s: float) -> None:
        self.now_s += after_s
        self.watch.look()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.close()


def test_whoever_is_gone_is_cancelled_once(watched: Watched) -> None:
    first, second = watched.enter("first", "second")
    watched.look(MIN_AGE_S)
    assert watched.cancelled == []
    second.is_gone = True
    watched.look(0.0)
    watched.look(0.0)
    assert watched.cancelled == ["second"]
    assert (first.num_asked, second.num_asked) == (3, 2)


def test_young_requests_are_left_alone(watched: Watched) -> None:
    (old,) = watched.enter("old")
    watched.now_s = MIN_AGE_S / 2
    (young,) = watched.enter("young")
    watched.look(MIN_AGE_S / 2)
    assert (old.num_asked, young.num_asked) == (1, 0)
    watched.look(MIN_AGE_S / 2)
    assert (old.num_asked, young.num_asked) == (2, 1)


def test_many_are_asked_about_in_turns(watched: Watched) -> None:
    most = round(MAX_ASKED_A_SECOND * PERIOD_S)
    made = watched.enter(*(f"{number}" for number in range(2 * most + 1)))
    watched.look(MIN_AGE_S)
    assert [one.num_asked for one in made] == [1] * most + [0] * (most + 1)
    watched.look(0.0)
    watched.look(0.0)
    assert sorted(one.num_asked for one in made) == [1] * (most + 2) + [2] * (most - 1)


def test_nobody_is_asked_about_what_is_answered(watched: Watched) -> None:
    """Triton has forgotten it by then."""
    (one,) = watched.enter("one")
    watched.watch.leave(watched.clients[0])
    one.send(object(), 1)  # type: ignore[arg-type]
    watched.look(MIN_AGE_S)
    assert not watched.clients[0].is_gone()
    assert one.num_asked == 0


def test_an_answer_waits_for_the_question(watched: Watched) -> None:
    (one,) = watched.enter("one")
    asked, go_on, left = threading.Event(), threading.Event(), threading.Event()

    def slow() -> bool:
        asked.set()
        go_on.wait(10)
        return False

    one.is_cancelled = slow  # type: ignore[method-assign]
    looking = threading.Thread(target=watched.look, args=(MIN_AGE_S,))
    looking.start()
    assert asked.wait(10)
    leaving = threading.Thread(target=lambda: (watched.watch.leave(watched.clients[0]), left.set()))
    leaving.start()
    assert not left.is_set()
    go_on.set()
    assert left.wait(10)
    looking.join()
    leaving.join()


# In the model -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Engines of scripted texts behind the contract, with some of upstream's rules."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub_module())
    monkeypatch.delitem(sys.modules, "lr_backend.triton.engine_model", raising=False)
    monkeypatch.setattr(client_watch, "MIN_AGE_S", 0.0)
    StubFamily.values.clear()
    module, made = importlib.import_module("lr_backend.triton.engine_model"), []

    def model(**rules: Any) -> Any:
        parameters = {
            "gpt_model_path": str(tmp_path),
            "max_batch_size": "4",
            "max_seq_len": "8192",
            "max_tokens_in_paged_kv_cache": "16384",
            "pace": replace(TARGET, rules=replace(UpstreamRules(), **rules)).as_json(),
            "script": Script(Role.TARGET, Workload(0.5)).as_json(),
        }
        config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        made.append(module.TritonPythonModel())
        arguments = {"model_config": json.dumps(config), "model_name": "target", "model_repository": str(tmp_path)}
        made[-1].initialize(arguments)
        return made[-1]

    yield model
    for one in made:
        one.finalize()
    sys.modules.pop("lr_backend.triton.engine_model", None)


def call(name: str, num_new: int) -> StubRequest:
    return StubRequest(EngineCall(name, np.full(9, 12, np.int32), num_new).tensors(), name)


def test_a_client_that_goes_away_ends_its_request_and_no_other(make: Callable[..., Any]) -> None:
    """The long ones would take minutes."""
    model = make(cancellation_check_period_ms=1)
    gone, nameless, stays = call("gone", 8000), call("", 8000), call("stays", 8000)
    model.execute([gone, nameless, stays])
    gone.is_gone = nameless.is_gone = True
    assert 0 < gone.answer().outputs["sequence_length"].item() < 8000
    assert 0 < nameless.answer().outputs["sequence_length"].item() < 8000
    assert not stays.answers
    model.execute([StubRequest(cancel_tensors(), "stays")])
    assert stays.answer().error is None
    stats = model._engine.stats()
    assert (stats.num_cancelled, stats.num_running, stats.num_blocks_used) == (3, 0, 0)


def test_an_engine_whose_loop_is_elsewhere_looks_without_the_rule(make: Callable[..., Any]) -> None:
    model = make(cancellation_check_period_ms=None)
    gone = call("gone", 8000)
    model.execute([gone])
    gone.is_gone = True
    assert 0 < gone.answer().outputs["sequence_length"].item() < 8000


def test_without_the_rule_nobody_looks_beside_the_loop(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lr_backend.triton.engine_model"], "LOOP_KEY", "the loop's, which cancels by itself")
    model = make(cancellation_check_period_ms=None)
    gone = call("gone", 20)
    gone.is_gone = True
    model.execute([gone])
    assert gone.answer().outputs["sequence_length"].item() == 20
    assert gone.num_asked == 0
    assert not [one for one in threading.enumerate() if one.name == "client-watch"]


def test_what_is_answered_is_watched_no_more(make: Callable[..., Any]) -> None:
    model = make(cancellation_check_period_ms=1)
    requests, long, twin = [call(f"{number}", 3) for number in range(8)], call("long", 8000), call("long", 3)
    model.execute([*requests, long, twin])
    assert all(one.answer().error is None for one in requests)
    assert "in flight already" in twin.error().message
    with model._watch._lock:
        assert [one.request_id for one in model._watch._clients] == ["long"]
    model.execute([StubRequest(cancel_tensors(), "long")])
    assert long.answer().error is None
    assert model._watch._clients == {}


def test_the_thread_ends_with_the_model(make: Callable[..., Any]) -> None:
    model = make()
    model.execute([call("a", 8000)])
    thread = model._watch._thread
    assert thread.is_alive()
    model.finalize()
    assert not thread.is_alive()
