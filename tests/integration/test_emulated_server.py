"""A real tritonserver without a model: scripted texts at the pace of H200s, behind the real loop, contract and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from lr_client import Client, Options, Result
from tritonclient.utils import InferenceServerException

from bench.kit.serving import serving
from lr_backend.build.emulated_spec import EmulatedDeployment, emulated
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.vocabulary import VOCABULARY
from lr_backend.emulated.workload import Workload
from lr_backend.engine import EngineCall, Role
from lr_backend.serve.server import TritonServer
from lr_backend.triton.remote_engine import grpc_inputs
from tests.support.frontend import frontend
from tests.support.observed import settled
from tests.support.texts import whole_text

pytestmark = pytest.mark.integration

SYSTEM = "h200_sxm"
WAIT_S = 30.0
WORKLOAD = Workload(
    0.7,
    exact_rate=0.1,
    token_agreement=0.8,
    word_agreement=0.5,
    prompt_tokens=40,
    step_tokens=10,
    step_spread=0.4,
    num_steps=8,
    answer_tokens=8,
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDeployment:
    path = tmp_path_factory.mktemp("workload") / "short.toml"
    path.write_text(WORKLOAD.as_toml("short answers"))
    return emulated("qwen3-32b-apart", SYSTEM, str(path))


@pytest.fixture(scope="module")
def server(spec: EmulatedDeployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serving(spec, tmp_path_factory.mktemp("emulated") / "repository") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, timeout_s=WAIT_S) as connected:
        yield connected


@pytest.fixture(scope="module")
def triton(server: TritonServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc_url) as connected:
        yield connected


def ask(client: Client, number: int, **fields: Any) -> Result:
    """An answer to one of the script's questions, as a user writes it."""
    fixed = {"stream": False, "trace": True, "seed": number, "max_depth": 3}
    return client.ask(Texts(WORKLOAD, 0).question(number), Options(**{**fixed, **fields}))


def text_of_target(number: int) -> str:
    whole = whole_text(Texts(WORKLOAD, 0), number)[WORKLOAD.prompt_tokens :]
    return VOCABULARY.decode(whole.tolist(), skip_special_tokens=True)


def becomes(value: Callable[[], float], wanted: Callable[[float], bool]) -> float:
    """A metric as soon as it is as it is to be: the server refreshes it now and then."""
    deadline = time.monotonic() + WAIT_S
    while not wanted(found := value()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_the_target_alone_writes_its_script(client: Client) -> None:
    result = ask(client, 0, mode="ar")
    assert result.text == text_of_target(0)
    assert result.text.startswith("<think>")
    assert (result.finish_reason, result.usage.prompt_tokens) == ("stop", WORKLOAD.prompt_tokens)


@pytest.mark.parametrize("mode", ["sd", "lr", "lr_sd"])
def test_every_mode_says_the_same_where_nothing_else_is_accepted(client: Client, mode: str) -> None:
    result = ask(client, 1, mode=mode, verifier="exact")
    assert result.text == text_of_target(1)
    usage = result.usage
    assert (usage.num_draft_tokens > 0) == (mode in ("sd", "lr_sd"))
    assert (usage.num_steps_drafted > 0) == (mode in ("lr", "lr_sd"))
    assert not usage.degraded


@pytest.mark.parametrize(("mode", "verifier"), [("lr", "judge"), ("lr_sd", "judge"), ("lr", "cascade")])
def test_steps_of_the_same_meaning_are_accepted_and_others_are_not(client: Client, mode: str, verifier: str) -> None:
    result = ask(client, 2, mode=mode, verifier=verifier, audit_rate=1.0)
    usage = result.usage
    assert usage.num_steps_accepted_by.get("judge", 0) > 0
    assert set(usage.num_steps_rejected) <= {"judge"}
    assert usage.num_false_accepts == 0
    assert "~" in result.text
    assert "?" not in result.text
    words, own = (text.replace("~", "").split() for text in (result.text, text_of_target(2)))
    assert words == own
    assert result.trace is not None
    assert f"not a run on {SYSTEM}" in result.trace
    assert not usage.degraded


def test_what_is_cached_is_reused_and_the_metrics_move(server: TritonServer, client: Client) -> None:
    def total(name: str) -> dict[str, float]:
        return server.counter(f"lr_engine_{name}_total")

    before = settled(lambda: total("iterations"))
    ask(client, 3, mode="lr", verifier="judge")
    for role in Role:
        becomes(lambda role=role: total("iterations")[role], lambda now, role=role: now > before[role])
    assert all(total("iterations")[role] > before[role] for role in Role)
    assert total("tokens_reused")["target"] > 0
    assert server.counter("lr_engine_blocks_cached")["target"] > 0
    assert becomes(lambda: sum(server.counter("lr_engine_blocks_used").values()), lambda used: used == 0.0) == 0.0
    assert total("integrity_failures") == {role.value: 0.0 for role in Role}


def test_a_refusal_is_internal_in_upstreams_words_and_the_next_request_is_served(
    spec: EmulatedDeployment, client: Client, triton: grpcclient.InferenceServerClient
) -> None:
    longest = spec.engine(Role.TARGET).max_seq_len
    with pytest.raises(InferenceServerException) as refused:
        triton.infer("target", grpc_inputs(EngineCall("", np.full(longest, 9, np.int32), 4).tensors()))
    assert refused.value.status() == "StatusCode.INTERNAL"
    said = f"Prompt length ({longest}) exceeds maximum input length ({longest - 1}). Set log level to info and check"
    assert said in refused.value.message()

    prompt = Texts(WORKLOAD, 0).prompt(4)
    answer = triton.infer("target", grpc_inputs(EngineCall("", prompt, 3).tensors())).as_numpy("output_ids")
    assert answer.ravel().tolist() == whole_text(Texts(WORKLOAD, 0), 4)[len(prompt) : len(prompt) + 3].tolist()
    again = ask(client, 4, mode="lr", verifier="exact")
    assert again.text == text_of_target(4)
    assert not again.usage.degraded


def test_a_refused_request_leaves_the_eight_in_flight_untouched(
    server: TritonServer, spec: EmulatedDeployment, client: Client, triton: grpcclient.InferenceServerClient
) -> None:
    """A refusal is INTERNAL; taken for a dead engine it would fail or degrade all of them."""
    numbers, longest = range(10, 18), spec.engine(Role.TARGET).max_seq_len
    refusals: list[str] = []
    with ThreadPoolExecutor(len(numbers)) as pool:
        asked = [pool.submit(ask, client, number, mode="lr_sd", verifier="exact") for number in numbers]
        while len(refusals) < 2 or not all(one.done() for one in asked):
            for role in (Role.TARGET, Role.DRAFT):
                with pytest.raises(InferenceServerException) as refused:
                    triton.infer(role.value, grpc_inputs(EngineCall("", np.full(longest, 9, np.int32), 4).tensors()))
                refusals.append(str(refused.value.status()))
        answers = [one.result() for one in asked]
    assert len(refusals) >= 2 and set(refusals) == {"StatusCode.INTERNAL"}
    assert [one.text for one in answers] == [text_of_target(number) for number in numbers]
    assert not any(one.usage.degraded for one in answers)


def test_a_client_that_goes_away_frees_what_it_held(server: TritonServer, triton: grpcclient.InferenceServerClient) -> None:
    """The whole run would take minutes."""

    def running() -> float:
        return server.counter("lr_engine_running").get("target", 0.0)

    assert becomes(running, lambda now: now == 0.0) == 0.0
    cancelled = settled(lambda: server.counter("lr_engine_cancelled_total")["target"])
    failures: Queue[Exception | None] = Queue()
    call = triton.async_infer(
        "target",
        grpc_inputs(EngineCall("", Texts(WORKLOAD, 0).prompt(5), 16_000).tensors()),
        callback=lambda result, error: failures.put(error),
    )
    assert becomes(running, lambda now: now == 1.0) == 1.0
    call.cancel()
    assert becomes(running, lambda now: now == 0.0) == 0.0
    assert "CANCELLED" in f"{failures.get(timeout=WAIT_S)}"
    assert becomes(lambda: server.counter("lr_engine_cancelled_total")["target"], lambda now: now > cancelled) == cancelled + 1
    assert becomes(lambda: server.counter("lr_engine_blocks_used")["target"], lambda used: used == 0.0) == 0.0


def test_a_deadline_cuts_the_answer_and_ends_its_work(server: TritonServer, client: Client) -> None:
    """The whole answer would take over a second at this pace. OpenAI's API has no word of its own for it."""
    deadline_s, whole = 0.3, text_of_target(6)

    def running() -> float:
        return sum(server.counter("lr_engine_running").values())

    result = ask(client, 6, mode="ar", stream=True, deadline_s=deadline_s)
    assert result.finish_reason == "deadline"
    assert whole.startswith(result.text) and len(result.text) < len(whole)
    assert becomes(running, lambda now: now == 0.0) == 0.0

    with frontend(server.grpc_url) as door:
        asked = {"mode": "ar", "deadline_s": deadline_s}
        answer = door.chat(Texts(WORKLOAD, 0).question(6), max_tokens=100, seed=6, lookahead=asked)
    (choice,) = answer.document["choices"]
    assert (choice["finish_reason"], choice["lookahead"]["finish_reason"]) == ("length", "deadline")
    reasoning = choice["message"].get("reasoning_content") or ""
    assert whole.removeprefix("<think>").startswith(reasoning + choice["message"]["content"]) and len(reasoning) < len(whole)
    assert becomes(running, lambda now: now == 0.0) == 0.0
