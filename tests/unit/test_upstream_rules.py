"""What TensorRT-LLM's executor does beside taking time: each rule with its switch on and off."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lr_backend.embedded.sequence import Sequence
from lr_backend.emulated.feed import Feed, Pass
from lr_backend.emulated.model_source import ModelSource
from lr_backend.emulated.texts import Script, Texts
from lr_backend.emulated.timeline import Ended, Sizes, Timeline
from lr_backend.emulated.vocabulary import END, VOCABULARY
from lr_backend.emulated.workload import Workload
from lr_backend.engine import EngineCall, Role
from lr_backend.engine.request import EngineResponse
from lr_backend.engine.upstream_errors import UpstreamFailure, kind_of, prompt_too_long, queue_full, too_many_drafts
from lr_backend.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable, LookaheadError, Overloaded
from lr_backend.hardware.cost import Iteration, Join
from lr_backend.hardware.rules import OWN_RULES, UpstreamRules
from lr_backend.hardware.sharing import IDLE, Demand
from lr_backend.testing import run_virtual
from lr_backend.triton.triton_engine import RETRY_S, CallGate, TritonEngine
from tests.support.embedded_engines import engine_config, greedy, prompt, request, tiny_checkpoint
from tests.support.fake_pb_utils import StubError, StubFamily, StubRequest, stub_module
from tests.support.paced import TARGET, Bench, close

SIZES = Sizes(num_blocks=512, tokens_per_block=32, max_batch_size=8, max_num_tokens=4096)


@dataclass
class Seen:
    """Costs that remember what iterations computed."""

    iterations: list[Iteration] = field(default_factory=list)

    def seconds(self, iteration: Iteration) -> float:
        self.iterations.append(iteration)
        return 1.0

    def demand(self, iteration: Iteration) -> Demand:
        return IDLE


class Driven:
    """A timeline under some of upstream's rules; its iterations pass at once."""

    def __init__(self, sizes: Sizes = SIZES, **rules: Any) -> None:
        self.costs = Seen()
        self.timeline = Timeline(sizes, self.costs, replace(OWN_RULES, **rules))
        self.sizes = sizes
        self.numbers = count()

    def admit(self, tokens: tuple[int, ...], num_new: int = 1, drafts: tuple[int, ...] = ()) -> Sequence:
        feed = Feed()
        feed.add([Pass((500 + index,)) for index in range(num_new)])
        asked = request(tokens, num_new, draft_ids=drafts)
        made = Sequence(next(self.numbers), asked, lambda result: None, drafts, num_new, self.sizes.tokens_per_block)
        self.timeline.admit(made, feed)
        return made

    def iterate(self) -> tuple[Iteration, list[Ended]]:
        self.timeline.begin(1)
        assert self.timeline.seconds == 1.0
        ended = self.timeline.end(2)
        self.timeline.check_integrity()
        return self.costs.iterations[-1], ended

    def finish(self) -> None:
        while not self.timeline.idle:
            self.iterate()

    @property
    def num_running(self) -> int:
        return self.timeline.stats().num_running


# What an admission is charged ---------------------------------------------------------------------------------------------


SHARED = tuple(range(1, 2977))
"""93 blocks; with a tail of its own each prompt has 3,000 tokens, of which it computes 24."""


def tail(number: int, num_tokens: int = 24) -> tuple[int, ...]:
    return (10_000 + number,) * num_tokens


@pytest.mark.parametrize(("charges", "num_joined"), [(True, 2), (False, 3)])
def test_who_joins_takes_its_whole_prompt_of_the_iteration_reused_or_not(charges: bool, num_joined: int) -> None:
    driven = Driven(charges_whole_prefix=charges)
    driven.admit(SHARED)
    driven.finish()
    for number in range(3):
        driven.admit((*SHARED, *tail(number)))
    first, _ = driven.iterate()
    assert first.joins == (Join(24, len(SHARED)),) * num_joined
    driven.finish()
    assert sum(len(one.joins) for one in driven.costs.iterations[1:]) == 3


@pytest.mark.parametrize(("charges", "num_new"), [(True, 1088), (False, 1096)])
def test_where_its_whole_prompt_is_not_left_it_computes_a_whole_number_of_blocks(charges: bool, num_new: int) -> None:
    driven = Driven(charges_whole_prefix=charges)
    driven.admit(tail(0, 3000))
    driven.admit(tail(1, 3000))
    first, _ = driven.iterate()
    assert first.joins == (Join(3000, 0), Join(num_new, 0))
    second, _ = driven.iterate()
    assert second.joins == (Join(3000 - num_new, num_new),)


def test_who_finds_less_than_a_block_left_does_not_join() -> None:
    driven = Driven(charges_whole_prefix=True)
    driven.admit(tail(0, 4096 - 31))
    driven.admit(tail(1, 10))
    driven.admit(tail(2, 100))
    first, _ = driven.iterate()
    assert first.joins == (Join(4065, 0), Join(10, 0))


def test_draft_tokens_are_part_of_what_is_charged() -> None:
    driven = Driven(charges_whole_prefix=True)
    driven.admit((*tail(0, 2040),), drafts=tuple(range(8)))
    driven.admit((*tail(1, 2040),), drafts=tuple(range(8)))
    driven.admit(tail(2, 10))
    first, _ = driven.iterate()
    assert [join.num_new for join in first.joins] == [2048, 2048]


# KV memory ----------------------------------------------------------------------------------------------------------------

TEN_BLOCKS = Sizes(num_blocks=10, tokens_per_block=8, max_batch_size=8, max_num_tokens=64)


@pytest.mark.parametrize(("reserves", "num_together"), [(True, 1), (False, 2)])
def test_who_joins_has_blocks_for_all_that_it_may_write(reserves: bool, num_together: int) -> None:
    """Six blocks each; two of them at once are preempted by one another sooner or later."""
    driven = Driven(TEN_BLOCKS, reserves_kv_in_full=reserves)
    driven.admit(tail(0, 8), 40)
    driven.admit(tail(1, 8), 40)
    driven.iterate()
    assert driven.num_running == num_together
    driven.finish()
    stats = driven.timeline.stats()
    assert (stats.num_requests, stats.num_tokens_decoded) == (2, 80)
    assert (stats.num_preemptions == 0) is reserves


@pytest.mark.parametrize(("reserves", "num_together"), [(True, 1), (False, 2)])
def test_what_could_be_reused_is_reserved_all_the_same(reserves: bool, num_together: int) -> None:
    driven = Driven(TEN_BLOCKS, reserves_kv_in_full=reserves)
    driven.admit(tail(0, 40), 8)
    driven.iterate()
    driven.admit((*tail(0, 40), 7), 7)
    driven.iterate()
    assert driven.num_running == num_together


def test_who_lacks_blocks_holds_those_behind_it_back() -> None:
    driven = Driven(TEN_BLOCKS, reserves_kv_in_full=True)
    for number, num_new in enumerate((40, 40, 1)):
        driven.admit(tail(number, 8), num_new)
    driven.iterate()
    assert driven.num_running == 1


# Draft tokens -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def one(rules: UpstreamRules, **fields: Any) -> Bench:
        made.append(Bench(pace=replace(TARGET, rules=rules), **fields))
        return made[-1]

    yield one
    for bench in made:
        close(bench.engine)


def answer_to(bench: Bench, input_ids: tuple[int, ...], num_new: int, draft_ids: tuple[int, ...]) -> EngineResponse:
    asked = request(input_ids, num_new, request_id="v", draft_ids=draft_ids)
    bench.engine.submit(asked, lambda result: bench._answered("v", result))
    result = bench.answer("v").result
    assert isinstance(result, EngineResponse), result
    return result


def test_scripted_texts_end_behind_their_drafts(make: Callable[..., Bench]) -> None:
    script = Script(Role.TARGET, Workload(0.5, prompt_tokens=20))
    asked = tuple(Texts(script.workload, 0).prompt(0).tolist())
    whole = tuple(Texts(script.workload, 0).target(np.array(asked), request(asked)))[:4]
    bench = make(OWN_RULES, source=script.source(), limits={"max_batch_size": 2})
    answer = answer_to(bench, asked, 12, (*whole[:3], END))
    assert answer.token_ids == whole
    assert (answer.num_draft_tokens, answer.num_accepted_tokens) == (4, 3)


def test_so_do_texts_of_a_model_at_a_pace(make: Callable[..., Bench], checkpoint: Path) -> None:
    source = ModelSource(engine_config(checkpoint), 1e-3)
    whole = greedy(source.engine, prompt(9), 4)
    bench = make(OWN_RULES, source=source, limits={"max_seq_len": 256})
    answer = answer_to(bench, prompt(9), 12, (*whole[:3], (whole[3] + 1) % 61))
    assert answer.token_ids == whole
    assert (answer.num_draft_tokens, answer.num_accepted_tokens) == (4, 3)


# Cancels ------------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_that_waits_computes_its_prompt_first() -> None:
    driven = Driven(cancels_what_has_run=True)
    sequence = driven.admit(tail(0), 40)
    assert not driven.timeline.cancel(sequence)
    assert driven.timeline.sequences == (sequence,)
    _, ended = driven.iterate()
    assert ended == [Ended(sequence, cancelled=True)]
    assert sequence.response().token_ids == (500,)
    assert driven.timeline.stats().num_cancelled == 1
    assert driven.timeline.idle


def test_one_that_has_run_goes_at_once() -> None:
    driven = Driven(cancels_what_has_run=True)
    sequence = driven.admit(tail(0), 40)
    driven.iterate()
    assert driven.timeline.cancel(sequence)
    assert driven.timeline.idle


def test_one_that_ends_in_its_first_iteration_ends_once() -> None:
    driven = Driven(cancels_what_has_run=True)
    sequence = driven.admit(tail(0), 1)
    driven.timeline.cancel(sequence)
    assert driven.iterate()[1] == [Ended(sequence)]
    assert driven.timeline.stats().num_cancelled == 0


def test_a_prompt_that_would_never_get_in_is_refused_with_the_settings() -> None:
    for rules in (UpstreamRules(), replace(OWN_RULES, charges_whole_prefix=True)):
        sizes = {"max_batch_size": 4, "max_num_tokens": 16, "tokens_per_block": 32, "pace": replace(TARGET, rules=rules)}
        with pytest.raises(ConfigError, match="at least tokens_per_block = 32"):
            engine_config(Path(), **sizes)
        engine_config(Path(), **{**sizes, "pace": replace(TARGET, rules=OWN_RULES)})
        engine_config(Path(), **{**sizes, "max_num_tokens": 32})


def test_without_the_rule_one_that_waits_goes_at_once() -> None:
    driven = Driven(cancels_what_has_run=False)
    sequence = driven.admit(tail(0), 40)
    assert driven.timeline.cancel(sequence)
    assert driven.timeline.idle


@pytest.mark.parametrize(("waits_its_turn", "num_tokens"), [(True, 1), (False, 0)])
def test_the_engine_answers_a_cancel_by_the_same_rule(make: Callable[..., Bench], waits_its_turn: bool, num_tokens: int) -> None:
    """There is room for one request at a time."""
    bench = make(replace(OWN_RULES, cancels_what_has_run=waits_its_turn), limits={"max_batch_size": 1})
    bench.time.at(0.0, lambda: (bench.ask("first", 20, 40), bench.ask("second", 20, 40)))
    bench.time.at(0.1, lambda: bench.engine.cancel("second"))
    second, first = bench.answer("second"), bench.answer("first")
    assert len(second.token_ids) == num_tokens
    assert (second.at_s > first.at_s) is waits_its_turn
    assert bench.texts.cancelled == ["second"]


# What refusals say --------------------------------------------------------------------------------------------------------

PROMPT_TOO_LONG = (
    "Executor failed process requestId 0 due to the following error: Encountered an error when fetching new request: "
    "Prompt length (1024) exceeds maximum input length (1023). "
    "Set log level to info and check TRTGptModel logs for how maximum input length is set"
)
TOO_MANY_DRAFTS = (
    "Executor failed process requestId 1 due to the following error: Encountered an error when fetching new request: "
    "Draft tokens length (9) exceeds maximum draft tokens length (8)."
)
QUEUE_FULL = (
    "Executor failed process requestId 6 due to the following error: "
    "Maximum queue size of 1 has been reached, please try again later"
)


def refused(bench: Bench, *arguments: Any, **fields: Any) -> LookaheadError:
    with pytest.raises(LookaheadError) as caught:
        bench.ask(*arguments, **fields)
    return caught.value


def test_refusals_are_in_upstreams_words(make: Callable[..., Bench]) -> None:
    bench = make(UpstreamRules(), limits={"max_batch_size": 1, "max_queue_size": 1})
    bench.texts.hold = True
    found = [refused(bench, "a", 1024), refused(bench, "b", 20, drafts=9)]
    bench.ask("c")
    bench.ask("d")
    found.append(refused(bench, "e"))
    assert [one.public() for one in found] == [PROMPT_TOO_LONG, TOO_MANY_DRAFTS, QUEUE_FULL]
    assert {type(one) for one in found} == {UpstreamFailure}


def test_without_the_rule_they_are_in_ours(make: Callable[..., Bench]) -> None:
    bench = make(replace(UpstreamRules(), fails_as_internal=False), limits={"max_batch_size": 1, "max_queue_size": 1})
    bench.texts.hold = True
    found = [refused(bench, "a", 1024), refused(bench, "b", 20, drafts=9)]
    bench.ask("c")
    bench.ask("d")
    found.append(refused(bench, "e"))
    assert [type(one) for one in found] == [EngineRejected, EngineRejected, Overloaded]
    assert "max_seq_len" in found[0].message


def test_the_longest_prompt_is_taken(make: Callable[..., Bench]) -> None:
    bench = make(UpstreamRules())
    bench.time.at(0.0, lambda: bench.ask("a", 1023, 9))
    assert len(bench.answer("a").token_ids) == 1


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The rim over a stand-in for Triton's module."""
    names = ("engine_model", "bls_model")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub_module())
    for name in names:
        monkeypatch.delitem(sys.modules, f"lr_backend.triton.{name}", raising=False)
    StubFamily.values.clear()
    yield {name: importlib.import_module(f"lr_backend.triton.{name}") for name in names}
    for name in names:
        sys.modules.pop(f"lr_backend.triton.{name}", None)


@pytest.fixture(params=[True, False], ids=["upstream's", "ours"])
def internal(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def model(modules: dict[str, ModuleType], internal: bool, tmp_path: Path) -> Iterator[Any]:
    """An engine of scripted texts behind the contract."""
    pace = replace(TARGET, rules=replace(UpstreamRules(), fails_as_internal=internal))
    parameters = {
        "gpt_model_path": str(tmp_path),
        "max_batch_size": "4",
        "max_seq_len": "1024",
        "max_draft_len": "8",
        "max_tokens_in_paged_kv_cache": "4096",
        "pace": pace.as_json(),
        "script": Script(Role.TARGET, Workload(0.5)).as_json(),
    }
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    made = modules["engine_model"].TritonPythonModel()
    made.initialize({"model_config": json.dumps(config), "model_name": "target", "model_repository": str(tmp_path)})
    yield made
    made.finalize()


def sent(model: Any, length: int, num_drafts: int = 1) -> StubRequest:
    drafts = np.full(num_drafts, 9, np.int32)
    made = StubRequest(EngineCall("a", np.full(length, 9, np.int32), num_drafts + 1, draft_ids=drafts).tensors())
    model.execute([made])
    return made


def test_behind_the_contract_every_refusal_is_internal(model: Any, internal: bool) -> None:
    too_long, too_many = sent(model, 1024), sent(model, 20, 9)
    unsupported = StubRequest({**EngineCall("b", np.full(9, 9, np.int32), 2).tensors(), "lora_task_id": np.array([[1]])})
    model.execute([unsupported])
    errors = [one.error() for one in (too_long, too_many, unsupported)]
    assert {one.code for one in errors} == {StubError.INTERNAL if internal else StubError.INVALID_ARG}
    if internal:
        assert [one.message for one in errors[:2]] == [PROMPT_TOO_LONG, TOO_MANY_DRAFTS]
    good = sent(model, 1023)
    assert good.answer().error is None
    assert good.answer().outputs["output_ids"].size == 1


class Answered:
    """An error as BLS has it."""

    def __init__(self, text: str, code: str) -> None:
        self._text, self._code = text, code

    def message(self) -> str:
        return self._text

    def code(self) -> str:
        return self._code


AROUND = "[TensorRT-LLM][ERROR] {} (/src/tensorrt_llm/cpp/include/llmRequest.h:441)\n1 0x7f1 tensorrt_llm::common::throw"
"""What upstream puts around its texts."""


@pytest.mark.parametrize("around", ["{}", AROUND])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (prompt_too_long(3, 9, 8).message, EngineRejected),
        (too_many_drafts(3, 9, 8).message, EngineRejected),
        (queue_full(3, 8).message, EngineError),
        ("LR_OVERLOADED: the engine's queue is full", EngineError),
        ("LR_ENGINE_REJECTED: lora_task_id: not supported", EngineRejected),
        ("CUDA error: an illegal memory access was encountered", EngineUnavailable),
        ("Encountered an error in forwardAsync function: Can't allocate new blocks for window size 64", EngineError),
        ("Encountered an error in forwardSync function: CUDA runtime error in cudaEventSynchronize", EngineUnavailable),
    ],
)
def test_the_caller_tells_by_the_text_what_an_internal_error_is(
    modules: dict[str, ModuleType], text: str, kind: type[EngineError], around: str
) -> None:
    error = modules["bls_model"]._engine_error("target", Answered(around.format(text), StubError.INTERNAL))
    assert type(error) is kind
    assert error.message == f"target: {around.format(text)}"
    assert kind_of(text) in (kind, None)


@pytest.mark.parametrize(
    ("text", "opens"), [(prompt_too_long(3, 9, 8).message, False), (queue_full(3, 8).message, False), ("it died", True)]
)
def test_a_refused_request_does_not_put_the_engine_out_of_order(modules: dict[str, ModuleType], text: str, opens: bool) -> None:
    answers = [modules["bls_model"]._engine_error("target", Answered(text, StubError.INTERNAL)), None]

    async def infer(*_: object) -> dict[str, Any]:
        error = answers.pop(0)
        if error is not None:
            raise error
        return {"output_ids": np.array([[5]], np.int32), "sequence_length": np.array([1], np.int32)}

    async def body() -> str:
        engine = TritonEngine("target", infer, CallGate(4), tokens_per_block=32)
        with pytest.raises(EngineError):
            await engine.generate(EngineCall("a", np.array([1], np.int32), 1))
        try:
            await engine.generate(EngineCall("b", np.array([1], np.int32), 1))
        except EngineUnavailable as error:
            return error.message
        return ""

    assert run_virtual(body()) == (f"target is out of order; it is tried again within {RETRY_S:g} s" if opens else "")


def test_the_vocabulary_of_a_script_is_known_to_the_engine(model: Any) -> None:
    outside = StubRequest(EngineCall("a", np.array([len(VOCABULARY)], np.int32), 2).tensors())
    model.execute([outside])
    assert "input_ids" in outside.error().message
