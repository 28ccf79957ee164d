"""The lookahead model without Triton: validation, responses, one end for every request."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import random
import sys
import tracemalloc
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from lr_backend.config import AuditSettings, Limits
from lr_backend.errors import EngineRejected, EngineUnavailable, InvalidRequest, LookaheadError
from lr_backend.fields import LOOKAHEAD_INPUTS, LOOKAHEAD_OUTPUTS
from lr_backend.loop.assemble import Engines
from lr_backend.notice import Seats
from lr_backend.request import Mode, Usage, VerifierName
from lr_backend.steps.text import TextStream
from lr_backend.telemetry import Telemetry
from lr_backend.testing import run_virtual
from lr_backend.trace.schema import Purpose, Trace
from lr_backend.triton.prompts import Prompts, max_text_bytes
from lr_backend.triton.request_metrics import REQUESTS
from lr_backend.triton.service import CANCEL_POLL_S, LookaheadService
from lr_backend.triton.tensors import request_fields
from tests.support.bad_input import INPUTS, LOOP_ROWS, LoopRow
from tests.support.examples import answers, tries
from tests.support.fake_pb_utils import FINAL, StubException, StubResponse, stub_module
from tests.support.world import BREAK, CLOSE, END, FIRST_LETTER, LETTERS, THINK, World, imitator, storyteller


@dataclass
class RecordedReplies:
    """What one client received."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    errors: list[LookaheadError] = field(default_factory=list)
    num_ends: int = 0
    gone: bool = False

    def send(self, tensors: Mapping[str, Any], *, final: bool) -> None:
        assert self.num_ends == 0, "a response after the end"
        assert set(tensors) <= {spec.name for spec in LOOKAHEAD_OUTPUTS}
        values = {name: array[0] for name, array in tensors.items()}
        self.sent.append({name: value.decode() if isinstance(value, bytes) else int(value) for name, value in values.items()})
        self.num_ends += final

    def fail(self, error: LookaheadError) -> None:
        assert self.num_ends == 0, "an error after the end"
        self.errors.append(error)
        self.num_ends += 1

    def is_cancelled(self) -> bool:
        return self.gone

    @property
    def text(self) -> str:
        return "".join(response.get("text_output", "") for response in self.sent)

    @property
    def num_reasoning_chars(self) -> int:
        return sum(response["num_reasoning_chars"] for response in self.sent)


def make_world(salt: int = 5) -> World:
    target = storyteller(salt)
    return World.of(target, imitator(target, salt + 1, 0.9), lambda first, second: True)


def service_of(world: World, **defaults: Any) -> LookaheadService:
    config = world.config.model_copy(update={"defaults": {"raw": True, **defaults}})
    return LookaheadService(config, world.models, Engines(world.target, world.draft, world.judge))


def arrays(**fields: Any) -> dict[str, Any]:
    dtypes = {spec.name: spec.numpy_dtype for spec in LOOKAHEAD_INPUTS}
    fields = {"text_input": LETTERS[:2], "seed": 0, **fields}
    return {
        name: np.array(
            [v.encode() if isinstance(v, str) else v for v in (value if isinstance(value, list) else [value])], dtype=dtypes[name]
        )
        for name, value in fields.items()
        if value is not None
    }


def ask(world: World, **fields: Any) -> RecordedReplies:
    replies = RecordedReplies()
    run_virtual(service_of(world).serve("id", arrays(**fields), replies))
    assert replies.num_ends == 1
    world.assert_idle()
    return replies


def test_a_stream_ends_with_finish_reason_and_usage() -> None:
    replies = ask(make_world(), trace=True, max_tokens=200)

    *steps, last = replies.sent
    assert len(steps) > 2
    assert all(set(response) == {"text_output", "num_reasoning_chars", "step"} for response in steps)
    assert last["finish_reason"] == "stop"
    usage = Usage.model_validate_json(last["usage"])
    assert usage.num_steps == len(steps)
    assert "".join(json.loads(response["step"])["text"] for response in steps) == replies.text


@pytest.mark.parametrize("is_long", [True, False], ids=["long", "short"])
@pytest.mark.parametrize("stream", [True, False])
def test_the_trace_comes_with_the_last_response_and_only_when_asked_for(
    stream: bool, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[str] = []

    class AtOnce(ThreadPoolExecutor):
        """Virtual time knows no other threads."""

        def submit(self, work: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
            handed_over.append(self._thread_name_prefix)  # type: ignore[attr-defined]
            done: Future[Any] = Future()
            done.set_result(work())
            return done

    monkeypatch.setattr("lr_backend.triton.service.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr("lr_backend.triton.service.QUICK_CALLS", 0 if is_long else 500)
    replies = ask(make_world(), trace=True, stream=stream)
    assert handed_over == ["traces"] * is_long, "others are answered while a long one is made"
    *before, last = replies.sent
    trace = Trace.from_json(last["trace"])
    assert trace.usage == Usage.model_validate_json(last["usage"])
    assert len(trace.calls) == trace.usage.num_target_calls + trace.usage.num_draft_calls + trace.usage.num_judge_calls
    assert trace.request.text_input == LETTERS[:2]
    sent = [json.loads(response["step"]) for response in before] if stream else json.loads(last["step"])
    assert [record.model_dump(mode="json") for record in trace.steps] == sent
    assert not any("trace" in response for response in before)

    assert not any("trace" in response for response in ask(make_world(), stream=stream).sent)


@pytest.mark.parametrize("trace", [False, True])
def test_engines_are_asked_for_their_counts_and_times_only_when_traced(trace: bool) -> None:
    world = make_world()

    ask(world, trace=trace)

    assert {recorded.call.return_perf_metrics for engine in world.engines for recorded in engine.calls} == {trace}


@pytest.mark.parametrize("mode", Mode)
def test_without_streaming_there_is_exactly_one_response(mode: Mode) -> None:
    world = make_world()

    whole = ask(world.fresh(), stream=False, mode=mode, verifier="exact")

    assert len(whole.sent) == 1
    streamed = ask(world.fresh(), mode=mode, verifier="exact")
    assert whole.text == streamed.text
    assert 0 < whole.num_reasoning_chars == streamed.num_reasoning_chars


@pytest.mark.parametrize("mode", ["ar", "lr", "lr_sd"])
@pytest.mark.parametrize("stream", [True, False])
def test_of_a_text_that_begins_with_blank_lines_the_reasoning_is_told_whole(mode: str, stream: bool) -> None:
    ids = (BREAK, THINK, FIRST_LETTER, BREAK, FIRST_LETTER + 1, CLOSE, FIRST_LETTER, END)

    def script(context: tuple[int, ...], seed: int) -> int:
        return ids[len(context) - 2]

    replies = ask(World.of(script, script), mode=mode, stream=stream)
    text, marked = replies.text, ""
    for response in replies.sent:
        num = response["num_reasoning_chars"]
        marked += "r" * num + "." * (len(response["text_output"]) - num)
    assert text.startswith("\n\n<think>")
    assert marked[text.index("<think>") : text.index("</think>") + len("</think>")].strip("r") == ""
    assert marked.endswith("." * len(LETTERS[0])) and "r" not in marked[text.index("</think>") + len("</think>") :]


def test_the_same_greedy_answer_in_every_lossless_mode() -> None:
    texts = {ask(make_world(), mode=mode).text for mode in ("ar", "sd", "lossless")}
    texts |= {ask(make_world(), mode=mode, verifier="exact").text for mode in ("auto", "lr", "lr_sd")}

    assert len(texts) == 1


def test_a_seed_is_drawn_where_none_is_given_and_told() -> None:
    seeds = set()
    for _ in range(2):
        last = ask(make_world(), seed=None, trace=True).sent[-1]
        trace = Trace.from_json(last["trace"])
        assert Usage.model_validate_json(last["usage"]).seed == trace.usage.seed == trace.request.seed
        seeds.add(trace.request.seed)
    assert len(seeds) == 2

    assert Usage.model_validate_json(ask(make_world(), seed=7).sent[-1]["usage"]).seed == 7


@pytest.mark.parametrize("mode", ["sd", "lossless"])
def test_the_draft_model_proposes_and_the_answer_stays_the_targets(mode: str) -> None:
    fields = {"proposer": "draft_model", "num_draft_tokens": 12, "trace": True}

    replies = ask(make_world(), mode=mode, **fields)

    trace = Trace.from_json(replies.sent[-1]["trace"])
    assert replies.text == ask(make_world(), mode="ar").text
    assert (trace.request.proposer, trace.request.num_draft_tokens) == ("draft_model", 12)
    assert any(call.purpose is Purpose.DRAFT_TOKENS for call in trace.calls)
    assert trace.usage.num_accepted_tokens > 0
    assert not trace.usage.degraded


@pytest.mark.parametrize("row", LOOP_ROWS, ids=[f"{row.name}={str(row.inputs[row.name])[:20]!r}" for row in LOOP_ROWS])
def test_a_bad_field_gets_one_error_naming_it_and_the_server_carries_on(row: LoopRow) -> None:
    world = make_world()

    replies = ask(world, **({"text_input": None} if "messages" in row.inputs else {}) | dict(row.inputs))

    (error,) = replies.errors
    assert isinstance(error, InvalidRequest)
    assert row.name in error.message
    assert (error.code, error.status) == (row.code, "INVALID_ARG")
    assert not replies.sent
    assert ask(world).text


@answers(300)
@given(INPUTS)
def test_any_inputs_are_answered_or_refused_by_name(inputs: dict[str, Any]) -> None:
    world = make_world()
    sent = {"text_input": None, "raw": True, "max_tokens": 8} | inputs
    replies = ask(world, **sent if "messages" not in sent else sent | {"raw": False})
    assert all(isinstance(error, InvalidRequest) and error.public() for error in replies.errors)
    assert bool(replies.errors) is not bool(replies.sent)


def test_audits_outlive_their_request_and_end_with_the_server() -> None:
    world = make_world()
    world.config = world.config.model_copy(update={"audit": AuditSettings(auditor="judge", timeout_s=1000)})
    world.judge.delay = lambda call, num_tokens: 1e-3 if "/judge/" in call.request_id else 100.0
    service = service_of(world, audit_rate=1.0)

    async def two_requests() -> list[Usage]:
        usages = []
        for pause_s in (150.0, 50.0):
            replies = RecordedReplies()
            await service.serve("id", arrays(mode="lr"), replies)
            usages.append(Usage.model_validate_json(replies.sent[-1]["usage"]))
            assert service.audits.num_running == 1
            await asyncio.sleep(pause_s)
        service.close()
        await service.audits.drain()
        return usages

    first, second = run_virtual(two_requests())

    assert (first.num_audited, first.num_audits_pending, first.false_accept_rate) == (0, 1, None)
    assert (second.num_audited, second.num_audits_pending, second.false_accept_rate) == (0, 1, 0.0)
    book = service.audits.counts_of(VerifierName.JUDGE)
    assert (book.num_right, book.num_dropped) == (1, 1)
    world.assert_idle()


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        request_fields({"text_input": np.array([b"\xff\xfe"], dtype=np.object_)}, 100)


@pytest.mark.parametrize("name", ["text_input", "messages", "mode", "stop"])
def test_what_cannot_fit_is_refused_unread(name: str) -> None:
    """It is no UTF-8 and no JSON, and nobody has noticed."""
    most = max_text_bytes(Limits(max_prompt_tokens=10))
    with pytest.raises(InvalidRequest, match=f"^{name}='641 bytes': .* 640 bytes"):
        request_fields({name: np.array([b"\xff" * (most + 1)], dtype=np.object_)}, most)


def test_a_parameter_says_a_field() -> None:
    """As perf_analyzer's ``--request-parameter`` does."""
    text = {"text_input": np.array([b"x"], dtype=np.object_)}

    fields = request_fields(text, 100, {"max_tokens": 8, "traceparent": "00-0", "mode": "lr"})

    assert fields == {"text_input": "x", "max_tokens": 8, "mode": "lr"}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_token", 8, "no field"),
        ("stop", "a", "no field of this model that a parameter"),
        ("messages", "[]", "no field of this model that a parameter"),
        ("mode", "lr", "said twice"),
        ("text_input", "\ud800" * 34, "maximum context length is 100 bytes"),
        ("a b", 1, "a name that is no field's"),
    ],
)
def test_a_parameter_that_says_no_field_is_refused(name: str, value: object, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rule):
        request_fields({"mode": np.array([b"ar"], dtype=np.object_)}, 100, {name: value})


def test_parameters_alone_ask_a_request() -> None:
    replies = RecordedReplies()
    said = {"text_input": LETTERS[:2], "seed": 0, "stream": False, "max_tokens": 5}

    run_virtual(service_of(make_world()).serve("id", {}, replies, said))

    assert replies.sent[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("said", [{"text_input": "\ud800"}, {"text_input": 5}, {"max_tokens": "many"}, {"max_tokens": True}])
def test_a_parameter_of_another_kind_is_refused(said: dict[str, object]) -> None:
    replies = RecordedReplies()

    run_virtual(service_of(make_world()).serve("id", {}, replies, {"text_input": "x", **said}))

    assert [error.code for error in replies.errors] == ["LR_INVALID_REQUEST"]


def test_without_a_limit_of_bytes_all_of_it_is_read() -> None:
    """The test above sees the limit's work."""
    with pytest.raises(InvalidRequest, match="UTF-8"):
        request_fields({"text_input": np.array([b"\xff" * 641], dtype=np.object_)}, 1 << 40)


def test_both_or_no_prompt_is_refused() -> None:
    replies = ask(make_world(), messages='[{"role": "user", "content": "x"}]')

    assert "exactly one" in replies.errors[0].message


def test_a_prompt_over_the_limit_is_refused_with_its_length() -> None:
    replies = ask(make_world(), text_input=LETTERS[0] * 2000)

    assert replies.errors[0].code == "LR_PROMPT_TOO_LONG" and "2000 tokens" in replies.errors[0].message


def test_the_limit_is_that_of_all_processes_together() -> None:
    world, seats = make_world(), Seats.alone()
    limits = world.config.limits.model_copy(update={"max_in_flight_requests": 3})
    config = world.config.model_copy(update={"limits": limits, "defaults": {"raw": True}})
    engines = Engines(world.target, world.draft, world.judge)
    loops = [LookaheadService(config, world.models, engines, seat=seats.seat(loop)) for loop in range(2)]
    replies = [RecordedReplies() for _ in range(8)]

    async def all_at_once() -> None:
        await asyncio.gather(*(loops[number % 2].serve(f"id{number}", arrays(), one) for number, one in enumerate(replies)))

    run_virtual(all_at_once())
    assert [bool(one.errors) for one in replies] == [False] * 3 + [True] * 5
    assert seats.num_in_flight == 0


def test_whoever_has_heard_the_last_word_may_ask_another_process_at_once() -> None:
    world, seats = make_world(), Seats.alone()
    limits = world.config.limits.model_copy(update={"max_in_flight_requests": 1})
    config = world.config.model_copy(update={"limits": limits, "defaults": {"raw": True}})
    first, second = (
        LookaheadService(config, world.models, Engines(world.target, world.draft, world.judge), seat=seats.seat(loop))
        for loop in range(2)
    )
    counted: list[int] = []

    @dataclass
    class Hasty(RecordedReplies):
        """Looks, as soon as it hears the last word, whether there is a place."""

        def send(self, tensors: Mapping[str, Any], *, final: bool) -> None:
            counted.append(seats.num_in_flight)
            super().send(tensors, final=final)

        def fail(self, error: LookaheadError) -> None:
            counted.append(seats.num_in_flight)
            super().fail(error)

    async def one_after_another() -> None:
        for service, fields in ((first, {"stream": True}), (second, {"stream": False}), (first, {"mode": "nonsense"})):
            await service.serve("id", arrays(**fields), Hasty())

    run_virtual(one_after_another())
    *streamed, last, whole, refused = counted
    assert set(streamed) == {1} and (last, whole, refused) == (0, 0, 0)


def test_a_server_that_is_to_end_refuses_what_comes_and_answers_what_it_has() -> None:
    world, seats = make_world(), Seats.alone()
    config = world.config.model_copy(update={"defaults": {"raw": True}})
    service = LookaheadService(config, world.models, Engines(world.target, world.draft, world.judge), seat=seats.seat(0))
    before, after = RecordedReplies(), RecordedReplies()

    async def told_between() -> None:
        asked = asyncio.create_task(service.serve("before", arrays(), before))
        await asyncio.sleep(0)
        seats.end()
        await service.serve("after", arrays(), after)
        await asked

    run_virtual(told_between())
    assert not before.errors and before.num_ends == 1
    assert [error.status for error in after.errors] == ["UNAVAILABLE"]


def refused_of(num_asked: int, limit: int) -> list[bool]:
    """Which of so many requests at once are refused, in their order."""
    world = make_world()
    limits = world.config.limits.model_copy(update={"max_in_flight_requests": limit})
    world.config = world.config.model_copy(update={"limits": limits})
    service = service_of(world)
    replies = [RecordedReplies() for _ in range(num_asked)]

    async def all_at_once() -> None:
        await asyncio.gather(*(service.serve(f"id{index}", arrays(), one) for index, one in enumerate(replies)))

    run_virtual(all_at_once())
    assert all(error.status == "UNAVAILABLE" for one in replies for error in one.errors)
    assert service.seat.num_in_flight == 0
    return [bool(one.errors) for one in replies]


@pytest.mark.parametrize(("num_asked", "limit"), [(5, 2), (40, 16)])
def test_requests_over_the_admission_limit_are_refused_at_once(num_asked: int, limit: int) -> None:
    assert refused_of(num_asked, limit) == [index >= limit for index in range(num_asked)]
    assert not any(refused_of(num_asked, num_asked)), "it is the limit that refuses"


@pytest.mark.parametrize(
    ("failure", "code"), [(EngineUnavailable("target: gone"), "UNAVAILABLE"), (EngineRejected("target: too long"), "INVALID_ARG")]
)
def test_a_failing_target_is_one_typed_error(failure: LookaheadError, code: str) -> None:
    world = make_world()
    world.target.fail = lambda call: failure

    (error,) = ask(world).errors

    assert error.status == code


class Panic(BaseException):
    """As tokenizers raise it where their Rust panics."""


RAISED = [ZeroDivisionError("secret insides"), Panic("secret insides"), SystemExit("secret insides")]


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("where", ["engine", "prompt", "text"])
def test_a_bug_does_not_leave_the_client_waiting(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world()

    def broken(*args: object, **more: object) -> Any:
        raise error

    match where:
        case "engine":
            world.target.script = broken
        case "prompt":
            monkeypatch.setattr(Prompts, "_make", broken)
        case "text":
            monkeypatch.setattr(TextStream, "push", broken)

    (told,) = ask(world).errors

    assert "secret" not in told.public()
    assert told.status == "INTERNAL"
    world.assert_idle()
    logged = capsys.readouterr().out
    assert "request_crashed" in logged and "in broken" in logged, "where it came from"


def test_a_request_whose_span_cannot_begin_has_its_end_all_the_same() -> None:
    class Broken(Telemetry):
        def __init__(self) -> None: ...

        def begin(self, *about: Any, **more: Any) -> Any:
            raise RuntimeError("no room for a span")

    replies, service = RecordedReplies(), service_of(make_world())
    service.telemetry = Broken()
    run_virtual(service.serve("id", arrays(), replies))
    assert [error.status for error in replies.errors] == ["INTERNAL"]
    assert (service.seat.num_in_flight, service.metrics.num_in_flight) == (0, 0)


@dataclass
class Sender:
    """Triton's, which is closed by the final flag, whatever becomes of the response beside it. It has room for short answers."""

    sent: list[StubResponse] = field(default_factory=list)
    is_full: bool = False
    is_closed: bool = False

    def send(self, response: StubResponse | None = None, flags: int = 0) -> None:
        assert not self.is_closed and (response is not None or flags == FINAL)
        self.is_closed = flags == FINAL
        if response is not None and (self.is_full or (response.error is None and "usage" in response.outputs)):
            raise StubException("Failed to increase the shared memory pool size")
        self.sent += [response] if response is not None else []

    def is_cancelled(self) -> bool:
        return False


@pytest.fixture
def make_replies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sender], Any]]:
    """The way back to a client, over a stand-in for Triton's module."""
    name = "lr_backend.triton.bls_model"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub_module())
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).TritonReplies
    sys.modules.pop(name, None)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_cannot_be_sent_ends_in_an_error(make_replies: Callable[[Sender], Any], stream: bool) -> None:
    world, sender = make_world(), Sender()
    run_virtual(service_of(world).serve("id", arrays(stream=stream), make_replies(sender)))
    error = sender.sent[-1].error
    assert sender.is_closed and error is not None
    assert (error.code, "internal error" in error.message) == ("INTERNAL", True)
    world.assert_idle()


def test_where_not_even_an_error_can_be_sent_the_log_tells(make_replies: Callable[[Sender], Any]) -> None:
    world, sender = make_world(), Sender(is_full=True)
    with capture_logs([merge_contextvars]) as lines:
        run_virtual(service_of(world).serve("id", arrays(stream=False), make_replies(sender)))
    (line,) = (line for line in lines if line["event"] == "request_unanswered")
    assert sender.is_closed and (line["request_id"], line["log_level"]) == ("id", "error")
    world.assert_idle()


@types.coroutine
def cancelled_at(coroutine: Coroutine[Any, Any, None], num_waits: int) -> Generator[Any, Any, None]:
    """Run it in a task that is cancelled once it has waited ``num_waits`` times and begins to wait again."""
    task = asyncio.current_task()
    assert task is not None
    go_on: Callable[[], Any] = partial(coroutine.send, None)
    for number in count():
        try:
            awaited = go_on()
        except StopIteration:
            return
        if number == num_waits:
            task.cancel()
        try:
            yield awaited
            go_on = partial(coroutine.send, None)
        except BaseException as error:
            go_on = partial(coroutine.throw, error)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_cancelled_wherever_it_waits_has_its_one_end(mode: Mode, stream: bool) -> None:
    """By the server, as when it shuts down."""

    async def attempt(num_waits: int) -> bool:
        world, replies = make_world(), RecordedReplies()
        service = service_of(world)

        async def serve() -> None:
            await cancelled_at(service.serve("id", arrays(mode=mode, stream=stream), replies), num_waits)

        task = asyncio.create_task(serve())
        await asyncio.wait({task})
        ended = dict(service.metrics.values())
        assert replies.num_ends == 1
        assert (service.seat.num_in_flight, service.metrics.num_in_flight) == (0, 0)
        assert sum(number for (name, _), number in ended.items() if name == REQUESTS) == 1
        assert [error.status for error in replies.errors] == ["CANCELLED"] * task.cancelled()
        world.assert_idle()
        return task.cancelled()

    num_waits = 0
    while run_virtual(attempt(num_waits)):
        num_waits += 1
    assert num_waits > 3


NUM_CANCELLED, NUM_ASKED = 100, 200


def longest_end_s() -> float:
    """Of 200 requests at once 100 leave at random and 100 run to their end; how long work for one that left went on, at most."""
    world, chance = make_world(), random.Random(7)
    limits = world.config.limits.model_copy(update={"max_in_flight_requests": NUM_ASKED})
    world.config = world.config.model_copy(update={"limits": limits})
    service, leavers = service_of(world, mode="lossless"), set(chance.sample(range(NUM_ASKED), NUM_CANCELLED))
    replies = [RecordedReplies() for _ in range(NUM_ASKED)]
    lasted: list[float] = []

    async def one(number: int) -> None:
        clock = asyncio.get_running_loop().time
        task = asyncio.create_task(service.serve(f"id{number}", arrays(), replies[number]))
        if number in leavers:
            await asyncio.sleep(chance.random() * 0.3)
            replies[number].gone, left_s = True, clock()
            await task
            lasted.append(clock() - left_s)
            calls = [call for engine in world.engines for call in engine.in_flight]
            assert not any(call.startswith(f"id{number}/") for call in calls)
        await task

    async def all_at_once() -> None:
        await asyncio.gather(*map(one, range(NUM_ASKED)))

    run_virtual(all_at_once())
    assert all(one.num_ends == 1 for one in replies)
    expected = ask(make_world(), mode="lossless").text
    assert {replies[number].text for number in range(NUM_ASKED) if number not in leavers} == {expected}
    assert len(lasted) == NUM_CANCELLED
    assert service.seat.num_in_flight == 0
    world.assert_idle()
    return max(lasted)


ITERATION_S = 0.01
"""A token of the scripted engines, on the virtual clock."""


def test_work_for_who_left_ends_soon_and_who_stays_has_the_same_answer() -> None:
    assert longest_end_s() <= CANCEL_POLL_S + ITERATION_S


def test_work_for_who_left_goes_on_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it."""
    monkeypatch.setattr("lr_backend.triton.service.CANCEL_POLL_S", 1e6)
    assert longest_end_s() > CANCEL_POLL_S + ITERATION_S


def bytes_a_request(num_requests: int, after_each: Callable[[RecordedReplies], None] = lambda replies: None) -> float:
    """What a service keeps of a request in the long run, of every mode in turn, answered and refused and cancelled."""
    world = make_world()
    service = service_of(world, max_tokens=16)
    counts, sizes = [], []

    async def one(number: int) -> None:
        replies = RecordedReplies(gone=number % 7 == 0)
        asked = {"mode": list(Mode)[number % len(Mode)], "width": 99 if number % 5 == 0 else 1}
        await service.serve(f"id{number}", arrays(**asked), replies)
        after_each(replies)
        list(service.metrics.measured())  # waits there for Triton's page
        for engine in world.engines:
            engine.calls.clear()
            engine.cancelled.clear()

    async def many() -> None:
        for number in range(num_requests):
            await one(number)
            if number >= num_requests // 2 and number % 20 == 0:
                gc.collect()
                counts.append(number)
                sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        run_virtual(many())
    finally:
        tracemalloc.stop()
    return float(np.polyfit(counts, sizes, 1)[0])


MAX_KEPT_BYTES = 64


def test_a_service_keeps_nothing_of_a_request() -> None:
    assert bytes_a_request(tries(800, 4000)) <= MAX_KEPT_BYTES


def test_a_service_that_keeps_its_replies_is_found() -> None:
    """The test above would see it."""
    kept: list[RecordedReplies] = []
    assert bytes_a_request(300, kept.append) > MAX_KEPT_BYTES
