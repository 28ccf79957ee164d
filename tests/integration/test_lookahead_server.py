"""The demo models behind a real Triton, asked over every transport."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from lr_client import Client, FinishEvent, InvalidRequest, Options, StepEvent, TextEvent

from bench.kit.serving import demo_spec, serving
from demo.problems import Problem, problems
from lr_backend.build.base import Layout
from lr_backend.request import Mode, Usage
from lr_backend.serve.server import TritonServer
from lr_backend.serve.warmup import ANSWER, QUESTION
from lr_backend.trace.analysis import analyse
from lr_backend.trace.html import page
from lr_backend.trace.schema import Purpose, Trace
from tests.support.observed import reached_within, settled

pytestmark = pytest.mark.integration
WAIT_S = 120.0


@pytest.fixture(scope="module", params=list(Layout))
def layout(request: pytest.FixtureRequest) -> Layout:
    """All of it holds whichever process computes."""
    return Layout(request.param)


@pytest.fixture(scope="module")
def server(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serving(demo_spec(layout), tmp_path_factory.mktemp("served") / "repository") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(server.grpc_url, timeout_s=WAIT_S) as one:
        yield one


@pytest.fixture(scope="module")
def questions() -> list[Problem]:
    return list(islice(problems(99, "test"), 4))


def post(server: TritonServer, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/lookahead/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def metrics(server: TritonServer) -> list[str]:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=WAIT_S) as response:
        lines: list[str] = response.read().decode().splitlines()
    return lines


def counters(server: TritonServer, layout: Layout, role: str) -> dict[str, float]:
    """``lr_engine_*`` of the engine that one role's calls go to."""
    role = role if layout is Layout.PROCESS_A_ROLE else f"lookahead/{role}"
    lines = metrics(server)
    mine = [line for line in lines if line.startswith("lr_engine_") and f'role="{role}"' in line]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in mine}


@pytest.mark.parametrize("mode", Mode)
def test_a_stream_of_steps_ends_with_the_usage(client: Client, questions: list[Problem], mode: Mode) -> None:
    # Deterministic: else draft tokens may rest because of what earlier requests' came to.
    options = Options(mode=mode, trace=True, max_tokens=400, seed=3, deterministic=True)
    with client.stream(questions[0].question, options) as stream:
        events = list(stream)

    steps = [event for event in events if isinstance(event, StepEvent)]
    text = "".join(event.text for event in events if isinstance(event, TextEvent))
    (finish,) = [event for event in events if isinstance(event, FinishEvent)]
    assert events[-1] is finish
    assert "".join(step.record.text for step in steps) == text
    assert text.startswith("<think>")
    assert finish.usage.num_steps == len(steps)
    assert (finish.usage.mode, finish.usage.seed) == (mode, 3)
    # In ``sd`` the target's engine drafts tokens by itself.
    assert (finish.usage.num_draft_calls > 0) == mode.speculates_steps
    assert (finish.usage.num_draft_tokens > 0) == mode.speculates_tokens
    assert not finish.usage.degraded


@pytest.mark.parametrize("layout", [demo_spec().server.layout], indirect=True)
@pytest.mark.parametrize("mode", Mode)
def test_the_printed_question_is_answered_right(client: Client, mode: Mode) -> None:
    def is_right(seed: int) -> bool:
        return f"\\boxed{{{ANSWER}}}" in client.ask(QUESTION, Options(mode=mode, seed=seed)).text

    num_asked = 20 if mode is Mode.AUTO else 5
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(is_right, range(num_asked))) >= num_asked - 1


def test_one_response_holds_all_steps(client: Client, questions: list[Problem]) -> None:
    result = client.ask(questions[0].question, Options(mode="lr", trace=True, stream=False, max_tokens=200, seed=3))
    assert "".join(step.text for step in result.steps) == result.text
    assert len(result.steps) == result.usage.num_steps > 0


@pytest.mark.parametrize("stream", [True, False])
def test_the_trace_accounts_for_every_call_and_token(client: Client, questions: list[Problem], stream: bool) -> None:
    result = client.ask(questions[0].question, Options(trace=True, stream=stream, max_tokens=200, seed=3))

    assert result.trace is not None
    trace, usage = Trace.from_json(result.trace), result.usage
    assert [record.text for record in trace.steps] == [step.text for step in result.steps]
    assert len(trace.calls) == usage.num_target_calls + usage.num_draft_calls + usage.num_judge_calls
    assert sum(call.num_wasted_tokens for call in trace.calls) == usage.num_wasted_tokens
    assert sum(call.num_reused_tokens or 0 for call in trace.calls) == usage.num_reused_tokens > 0
    page(trace, analyse(trace))
    assert client.ask(questions[0].question, Options(max_tokens=20, stream=stream)).trace is None


def test_with_equal_tokens_alone_every_mode_says_what_the_target_says(client: Client, questions: list[Problem]) -> None:
    different = []
    for problem in questions:
        answers = {
            mode: client.ask(
                problem.question, Options(mode=mode, temperature=0.0, verifier="exact", stream=False, max_tokens=400)
            ).text
            for mode in Mode
        }
        different += [(problem.question, mode) for mode in Mode if answers[mode] != answers[Mode.AR]]

    assert different == []


@pytest.mark.parametrize("mode", [Mode.SD, Mode.LOSSLESS])
def test_the_draft_model_drafts_tokens_for_the_target(client: Client, questions: list[Problem], mode: Mode) -> None:
    """The text is the target's own. Of all answers together: what earlier requests brought decides how many draft tokens one
    answer is worth."""
    num_calls = 0
    usages, alone = [], []
    for problem in questions:
        plain = client.ask(problem.question, Options(mode="ar", temperature=0.0, stream=False, max_tokens=400))
        options = Options(mode=mode, proposer="draft_model", temperature=0.0)
        drafted = client.ask(problem.question, replace(options, stream=False, max_tokens=400, trace=True))
        assert drafted.text == plain.text

        assert drafted.trace is not None
        calls = [call for call in Trace.from_json(drafted.trace).calls if call.purpose is Purpose.DRAFT_TOKENS]
        assert len(calls) <= drafted.usage.num_draft_calls
        assert not drafted.usage.degraded
        num_calls += len(calls)
        usages.append(drafted.usage)
        alone.append(plain.usage)

    assert num_calls > 0
    assert 0 < sum(usage.num_accepted_tokens for usage in usages) <= sum(usage.num_draft_tokens for usage in usages)
    assert mode is Mode.LOSSLESS or sum(one.num_target_passes for one in usages) < sum(one.num_target_passes for one in alone)


def test_a_target_that_drafts_itself_says_what_it_says_anyway(client: Client, questions: list[Problem]) -> None:
    """Token for token at any temperature, streamed or whole, in fewer passes."""
    for index, problem in enumerate(questions):
        options = Options(max_tokens=400, temperature=0.6, seed=index, proposer="engine")
        texts = set()
        for stream in (True, False):
            plain, drafted = (client.ask(problem.question, replace(options, mode=mode, stream=stream)) for mode in ("ar", "sd"))
            texts |= {plain.text, drafted.text}
            usage = drafted.usage
            assert usage.completion_tokens == plain.usage.completion_tokens == plain.usage.num_target_passes
            assert usage.num_target_passes == usage.completion_tokens - usage.num_accepted_tokens < 0.5 * usage.completion_tokens
            assert 0.5 < usage.token_acceptance_rate <= 1.0
            assert (usage.num_draft_calls, plain.usage.num_draft_tokens) == (0, 0)
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("mode", "proposer"),
    [("sd", "draft_model"), ("sd", "ngram"), ("lossless", "draft_model"), ("lossless", "ngram"), ("lossless", "engine")],
)
def test_where_noise_is_shared_every_source_of_drafts_leaves_the_text_as_it_is(
    client: Client, questions: list[Problem], mode: str, proposer: str
) -> None:
    """Token for token at a temperature, streamed or whole."""
    for index, problem in enumerate(questions[:2]):
        options = Options(max_tokens=400, temperature=0.6, seed=50 + index, stream=bool(index))
        plain = client.ask(problem.question, replace(options, mode="ar"))
        drafted = client.ask(problem.question, replace(options, mode=mode, proposer=proposer))
        assert drafted.text == plain.text
        assert drafted.usage.num_draft_tokens + drafted.usage.num_steps_drafted > 0
        assert not drafted.usage.degraded


def test_generate_sends_one_response_and_generate_stream_many(server: TritonServer, questions: list[Problem]) -> None:
    body = {"text_input": questions[0].question, "max_tokens": 300, "temperature": 0.0, "mode": "lossless"}

    status, whole = post(server, "generate", {**body, "stream": False})
    stream_status, events = post(server, "generate_stream", body)

    assert status == stream_status == 200
    answer = json.loads(whole)
    parts = [json.loads(line.removeprefix("data: ")) for line in events.decode().split("\n\n") if line]
    assert len(parts) > 2
    assert "".join(part["text_output"] for part in parts) == answer["text_output"]
    assert parts[-1]["finish_reason"] == answer["finish_reason"]
    assert Usage.model_validate_json(answer["usage"]).completion_tokens > 0


def test_messages_are_rendered_with_the_targets_template(server: TritonServer, questions: list[Problem]) -> None:
    options = {"stream": False, "temperature": 0.0, "max_tokens": 60, "mode": "ar"}
    messages = json.dumps([{"role": "user", "content": questions[0].question}])

    _, by_messages = post(server, "generate", {"messages": messages, **options})
    _, by_text = post(server, "generate", {"text_input": questions[0].question, **options})

    assert json.loads(by_messages)["text_output"] == json.loads(by_text)["text_output"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "fast"), ("max_tokens", 0), ("temperature", -1.0), ("width", 99), ("verifier", "?"), ("top_p", 2.0)],
)
def test_a_bad_field_is_one_error_naming_it_and_the_server_carries_on(
    server: TritonServer, client: Client, questions: list[Problem], field: str, value: object
) -> None:
    status, body = post(server, "generate", {"text_input": "x", "stream": False, field: value})

    assert status == 400
    assert field in json.loads(body)["error"]
    with pytest.raises(InvalidRequest, match=field):
        client.ask("x", Options(**{field: value}))
    assert client.ask(questions[0].question, Options(max_tokens=8, stream=False)).finish_reason == "length"


@pytest.mark.parametrize("field", ["temprature", "draft_ids", "lookahead_loop_key", "sequence_id"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_field_that_nobody_knows_is_refused_by_name(server: TritonServer, field: str, nested: bool) -> None:
    unknown = {"parameters": {field: 1}} if nested else {field: 1}

    status, body = post(server, "generate", {"text_input": "x", "stream": False, **unknown})

    assert (status, json.loads(body)["error"].partition("=")[0]) == (400, f"LR_INVALID_REQUEST: {field}")


def test_an_unknown_field_has_a_bounded_name(server: TritonServer) -> None:
    status, body = post(server, "generate", {"text_input": "x", "stream": False, "Zanzibar " * 1000: 1})

    assert status == 400
    assert json.loads(body)["error"].startswith("LR_INVALID_REQUEST: parameters='Zanzibar ")
    assert len(body) < 400
    assert "Zanzibar" not in server.log_text()


@pytest.mark.parametrize("field", [b'"user": "J\xfcrgen"', b'"J\xfcrgen": "x"', b'"parameters": {"user": "\xff"}'])
def test_text_in_another_encoding_is_refused_and_not_left_waiting(server: TritonServer, field: bytes) -> None:
    """Triton's HTTP port lets it pass, and its Python backend raises where it is read."""
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    connection.request("POST", "/v2/models/lookahead/generate", b'{"text_input": "x", "stream": false, ' + field + b"}")
    answer = connection.getresponse()
    assert (answer.status, b"LR_INVALID_REQUEST" in answer.read()) == (400, True)
    connection.close()


def test_what_triton_and_its_clients_add_is_no_unknown_field(server: TritonServer, client: Client) -> None:
    inputs = [grpcclient.InferInput("text_input", [1], "BYTES"), grpcclient.InferInput("max_tokens", [1], "INT32")]
    inputs[0].set_data_from_numpy(np.array([b"x"], dtype=np.object_))
    inputs[1].set_data_from_numpy(np.array([4], dtype=np.int32))
    answers: Queue[tuple[Any, Any]] = Queue()
    context = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "a=b", "x-other": "c"}
    with grpcclient.InferenceServerClient(server.grpc_url) as triton:
        triton.start_stream(lambda result, error: answers.put((result, error)), headers=context)
        told = {"request_id": "q" * 5000, "priority": 1, "timeout": 60_000_000, "enable_empty_final_response": True}
        triton.async_stream_infer("lookahead", inputs, **told)
        while True:
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            if result.as_numpy("finish_reason") is not None:
                break
    reached_within(WAIT_S, lambda: "q" * 80 in server.log_text())  # the line comes after the answer
    assert "q" * 81 not in server.log_text()


@pytest.mark.parametrize(("name", "code"), [("max_tokens", None), ("text_input", "LR_INVALID_REQUEST: text_input")])
def test_a_parameter_says_a_field_that_no_input_says(server: TritonServer, name: str, code: str | None) -> None:
    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
    answers: Queue[tuple[Any, Any]] = Queue()
    said = {"mode": "ar", name: 4} if code is None else {name: "y"}
    with grpcclient.InferenceServerClient(server.grpc_url) as triton:
        triton.start_stream(lambda result, error: answers.put((result, error)))
        triton.async_stream_infer("lookahead", [text], parameters=said)
        result, error = answers.get(timeout=WAIT_S)
        while error is None and result.as_numpy("finish_reason") is None:
            result, error = answers.get(timeout=WAIT_S)
    if code is not None:
        assert code in str(error)
        return
    usage = json.loads(result.as_numpy("usage")[0])
    assert (usage["completion_tokens"], usage["num_draft_calls"]) == (4, 0)


def test_what_tritons_own_door_cannot_do_is_as_documented(server: TritonServer, client: Client) -> None:
    _, wrapped = post(server, "generate", {"text_input": "x", "stream": False, "max_tokens": 4294967301})
    assert json.loads(json.loads(wrapped)["usage"])["completion_tokens"] <= 5
    status, body = post(server, "generate", {"text_input": "x", "max_tokens": 40})
    assert status == 200
    assert "error" in json.loads(body)
    status, body = post(server, "generate", {"text_input": "x", "stream": False, "max_tokens": "many"})
    assert status == 500
    assert "LR_" not in json.loads(body)["error"]


def test_stop_strings_and_limits(client: Client, questions: list[Problem]) -> None:
    question = questions[0].question
    whole = client.ask(question, Options(mode="lossless", temperature=0.0, max_tokens=400)).text
    stop = whole[40:48]

    cut = client.ask(question, Options(mode="lossless", temperature=0.0, max_tokens=400, stop=[stop]))

    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_branches_share_the_targets_iterations(
    server: TritonServer, layout: Layout, client: Client, questions: list[Problem]
) -> None:
    """Mean target batch above one in ``lr``, by the engine's own counters, with one request at a time."""

    def rows_and_iterations() -> tuple[float, float]:
        now = counters(server, layout, "target")
        return now["lr_engine_batch_rows_total"], now["lr_engine_iterations_total"]

    rows, iterations = settled(rows_and_iterations)
    for index, problem in enumerate(questions):
        client.ask(problem.question, Options(mode="lr", stream=False, max_tokens=400, seed=index))
    more_rows, more_iterations = settled(rows_and_iterations)

    assert (more_rows - rows) / (more_iterations - iterations) > 1.2


def test_accepted_steps_are_audited_behind_the_answer(server: TritonServer, client: Client, questions: list[Problem]) -> None:
    num_taken = 0
    for index, problem in enumerate(questions):
        options = Options(mode="lr", audit_rate=1.0, risk_budget=0.9, stream=False, temperature=0.6, seed=index)
        usage = client.ask(problem.question, options).usage
        num_taken += usage.num_audited + usage.num_audits_pending
        assert not usage.risk_budget_spent
    assert num_taken > 0

    def audited() -> float:
        mine = [line for line in metrics(server) if line.startswith("lr_audits_total") and "right" in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in mine)

    tick = threading.Event()
    waits = iter(range(60))
    while audited() == 0.0 and next(waits, None) is not None:
        tick.wait(0.5)
    assert 0.0 < audited() <= num_taken
    assert any(line.startswith("lr_false_accept_rate_high") for line in metrics(server))


def test_many_at_once_each_get_their_own_answer(client: Client, questions: list[Problem]) -> None:
    def ask(index: int) -> tuple[int, str]:
        problem = questions[index % len(questions)]
        options = Options(mode="ar" if index % 2 else "lossless", temperature=0.0, stream=False, max_tokens=120)
        return index % len(questions), client.ask(problem.question, options).text

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))

    assert len(set(answers)) == len(questions)


def test_the_log_holds_no_question_and_no_answer(server: TritonServer, client: Client) -> None:
    canary = "Zanzibar quokka"

    client.ask(f"{canary} has 3 apples.", Options(max_tokens=20))
    with pytest.raises(InvalidRequest):
        client.ask(canary, Options(mode="nonsense"))

    assert canary not in server.log_text()
    assert Path(server.repository).exists()


def test_the_step_loop_runs_on_uvloop(server: TritonServer, client: Client) -> None:
    """Triton's backend makes the loop; it must make it by the policy that the model has set."""
    client.ask("Tom has 3 apples.", Options(max_tokens=4))

    (line,) = (line for line in server.log_text().splitlines() if "event_loop_runs" in line)
    assert '"implementation": "uvloop"' in line
