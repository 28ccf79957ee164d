"""Bad input, random requests and clients that go away, before a real Triton: the next good request has the same answer as ever.

Embedded engines in both layouts, and emulated ones. ``--hypothesis-profile=thorough`` tries far more.
"""

from __future__ import annotations

import asyncio
import queue
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from hypothesis import given, settings
from lr_client import AsyncClient, Cancelled, Client, Options
from tritonclient.utils import np_to_triton_dtype

from bench.kit.serving import serving
from lr_backend.build.base import Layout
from lr_backend.build.emulated_spec import emulated
from lr_backend.build.spec import DeploymentSpec
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.workload import Workload
from lr_backend.fields import LOOKAHEAD_INPUTS
from lr_backend.frontend.errors import CODES
from lr_backend.serve.server import TritonServer
from tests.support.bad_input import DOCUMENTS, DOOR_ROWS, INPUTS, JSON_VALUES, LOOP_ROWS
from tests.support.examples import tries
from tests.support.frontend import CHAT, COMPLETIONS, Served, frontend
from tests.support.tiny_models import make_tiny_models, write_spec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WAIT_S = 300.0
"""Bound of every wait; reached only by a bug."""
WORKLOAD = Workload(0.7, exact_rate=0.1, token_agreement=0.8, word_agreement=0.5, prompt_tokens=40, step_tokens=10, num_steps=90)
KINDS = (*map(str, Layout), "emulated")
SHORT = Options(mode="lossless", temperature=0.0, seed=1, max_tokens=24, deterministic=True)
LONG = replace(SHORT, max_tokens=600, deterministic=False)
NUM_QUESTIONS = 8


def deployment(kind: str, folder: Any) -> DeploymentSpec:
    """Room for 256 requests."""
    if kind == "emulated":
        workload = folder / "long.toml"
        workload.write_text(WORKLOAD.as_toml("long answers"))
        made: DeploymentSpec = emulated("qwen3-32b-apart", "b200_sxm", str(workload))
        limits = {**made.lookahead.get("limits", {}), "max_in_flight_requests": 256}
        return made.model_copy(update={"lookahead": {**made.lookahead, "limits": limits}})
    path = write_spec(folder / "tiny.toml", make_tiny_models(folder / "models"))
    said = path.read_text().replace("max_queue_size = 64", "max_queue_size = 4096")
    said = said.replace(
        "[lookahead.limits]\nmax_tokens = 256\n", "[lookahead.limits]\nmax_tokens = 1000\nmax_in_flight_requests = 256\n"
    )
    path.write_text(said.replace("[server]\n", f'[server]\nlayout = "{kind}"\n'))
    return DeploymentSpec.load(path)


@dataclass(frozen=True)
class Place:
    """A server under attack."""

    server: TritonServer
    question: Callable[[int], str]

    def total(self, name: str) -> float:
        """Of all engines together."""
        return sum(self.server.counter(f"lr_engine_{name}").values())

    def decoded(self) -> float:
        """Tokens that the target has written."""
        found = self.server.counter("lr_engine_tokens_decoded_total")
        return next(value for role, value in found.items() if role.endswith("target"))

    def become_idle(self) -> float:
        """Wait until no engine holds anything; how many blocks they have then."""
        self.wait(lambda: not any(self.total(name) for name in ("running", "waiting", "blocks_used")))
        return self.total("blocks_free") + self.total("blocks_cached")

    @staticmethod
    def wait(reached: Callable[[], bool]) -> None:
        """Until it is reached twice: the page is written anew twice a second."""
        deadline = time.monotonic() + WAIT_S
        seen = 0
        while seen < 2:
            assert time.monotonic() < deadline
            seen = seen + 1 if reached() else 0
            time.sleep(0.7)


def long_ones(server: TritonServer, question: Callable[[int], str]) -> Callable[[int], str]:
    """Questions whose answers go on until they are cut: who leaves one of them leaves work undone."""
    found: list[str] = []

    with Client(server.grpc_url, timeout_s=WAIT_S) as client, ThreadPoolExecutor(NUM_QUESTIONS) as pool:

        def is_long(text: str) -> bool:
            return client.ask(text, replace(LONG, mode="ar", max_tokens=200, stream=False)).finish_reason == "length"

        # Some at a time: an emulated answer keeps its pace, which is a wait and no work.
        for first in range(0, 200, NUM_QUESTIONS):
            texts = list(map(question, range(first, first + NUM_QUESTIONS)))
            found += [text for text, long in zip(texts, pool.map(is_long, texts), strict=True) if long]
            if len(found) >= NUM_QUESTIONS:
                return found.__getitem__
    raise AssertionError("too few questions have long answers")


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hostile")
    texts = Texts(WORKLOAD, 0)
    question = texts.question if request.param == "emulated" else "What follows {}?".format
    with serving(deployment(request.param, folder), folder / "repository") as server:
        yield Place(server, long_ones(server, question))


@pytest.fixture(scope="module")
def good(place: Place) -> Iterator[Callable[[], str]]:
    """Asks the good request, whose answer never changes."""
    with Client(place.server.grpc_url, timeout_s=WAIT_S) as client:
        yield lambda: client.ask(place.question(0), SHORT).text


@pytest.fixture(scope="module")
def door(place: Place) -> Iterator[Served]:
    with frontend(place.server.grpc_url) as served:
        yield served


@dataclass
class Wire:
    """Sends what no client of ours would."""

    client: grpcclient.InferenceServerClient
    heard: queue.Queue[tuple[Any, Any]]

    def send(self, fields: Mapping[str, Any]) -> str:
        """The error; empty where there is an answer."""
        self.client.async_stream_infer("lookahead", tensors(fields), enable_empty_final_response=True)
        while True:
            result, error = self.heard.get(timeout=WAIT_S)
            if error is not None:
                return str(error)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return ""


@pytest.fixture(scope="module")
def wire(place: Place) -> Iterator[Wire]:
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(place.server.grpc_url) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        yield Wire(client, heard)
        client.stop_stream()


def tensors(fields: Mapping[str, Any]) -> list[grpcclient.InferInput]:
    dtypes = {spec.name: spec.numpy_dtype for spec in LOOKAHEAD_INPUTS}
    made = []
    for name, value in fields.items():
        values = [one.encode() if isinstance(one, str) else one for one in (value if isinstance(value, list) else [value])]
        array = np.array(values, dtype=dtypes[name])
        made.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def is_typed(error: str, name: str = "") -> bool:
    """The loop's word, or Triton's of a shape that the model's configuration rules out."""
    return f"LR_INVALID_REQUEST: {name}" in error or f"unexpected shape for input '{name}" in error


# -------------------------------------------------------------------------------------------------------------------- bad input


def test_every_bad_row_is_refused_by_its_name_and_changes_nothing(wire: Wire, good: Callable[[], str]) -> None:
    expected = good()
    asked_for = {"seed": 0, "stream": True}
    for row in LOOP_ROWS:
        prompt = {} if "text_input" in row.inputs or "messages" in row.inputs else {"text_input": "x"}
        given = {name: value for name, value in row.inputs.items() if value is not None}
        error = wire.send({**asked_for, **prompt, **given})
        assert is_typed(error, row.name), (row, error)
    assert good() == expected


def test_every_bad_row_at_the_door_changes_nothing(door: Served, good: Callable[[], str]) -> None:
    expected = good()
    for row in DOOR_ROWS:
        answer = door.ask(row.method, row.path, row.body, row.headers)
        assert (answer.status, answer.error["code"]) == (CODES[row.code][0], row.code)
    assert good() == expected


def test_random_inputs_are_answered_or_refused_and_change_nothing(wire: Wire, good: Callable[[], str]) -> None:
    expected = good()
    ends = {"answered": 0, "refused": 0}

    @settings(max_examples=tries(50, 1000))
    @given(INPUTS)
    def attack(inputs: dict[str, Any]) -> None:
        error = wire.send({"seed": 0, "max_tokens": 4, **inputs})
        assert not error or is_typed(error), error
        ends["refused" if error else "answered"] += 1
        assert good() == expected

    attack()
    assert all(ends.values()), "both kinds are among them"


def test_random_bodies_are_answered_or_refused_and_change_nothing(door: Served, good: Callable[[], str]) -> None:
    expected = good()
    seen: set[int] = set()

    @settings(max_examples=tries(50, 1000))
    @given(DOCUMENTS | JSON_VALUES)
    def attack(document: Any) -> None:
        limited = {"max_tokens": 4, **document} if isinstance(document, dict) else document
        for path in (CHAT, COMPLETIONS):
            answer = door.post(path, limited)
            assert answer.status in (200, 400, 404), answer.raw
            seen.add(answer.status)
        assert good() == expected

    attack()
    assert {200, 400} <= seen


# ---------------------------------------------------------------------------------------------------- clients that leave


async def storm(place: Place, num_clients: int, leave: Callable[[int], bool]) -> tuple[dict[int, str], int]:
    """(texts of those who stayed, by number; how many were cancelled)."""
    texts: dict[int, str] = {}
    num_cancelled = 0
    chance = random.Random(num_clients)
    stays_s = [0.1 * chance.random() for _ in range(num_clients)]

    async with AsyncClient(place.server.grpc_url, timeout_s=WAIT_S) as client:

        async def one(number: int) -> None:
            nonlocal num_cancelled
            question = place.question(number % NUM_QUESTIONS)
            if not leave(number):
                texts[number] = (await client.ask(question, SHORT)).text
                return
            stream = client.stream(question, LONG)
            await asyncio.sleep(stays_s[number])
            stream.cancel()
            try:
                async for _ in stream:
                    pass
            except Cancelled:
                num_cancelled += 1

        await asyncio.gather(*map(one, range(num_clients)))
    return texts, num_cancelled


def test_who_stays_in_a_storm_of_cancels_has_the_same_answer_and_nothing_is_left(place: Place) -> None:
    with Client(place.server.grpc_url, timeout_s=WAIT_S) as client:
        expected = [client.ask(place.question(number), SHORT).text for number in range(NUM_QUESTIONS)]
    num_blocks = place.become_idle()

    texts, num_cancelled = asyncio.run(storm(place, 200, lambda number: number % 2 == 0))

    assert num_cancelled == 100
    assert {number: expected[number % NUM_QUESTIONS] for number in texts} == texts
    assert len(texts) == 100
    assert place.become_idle() == num_blocks
    assert place.total("integrity_failures_total") == 0


def test_what_is_cancelled_is_not_written(place: Place) -> None:
    """In the tokens that the target writes: a fraction of what the same requests bring when nobody leaves."""
    num_blocks = place.become_idle()
    before = place.decoded()
    with Client(place.server.grpc_url, timeout_s=WAIT_S) as client:
        length = client.ask(place.question(1), LONG).usage.completion_tokens
    place.become_idle()
    whole = place.decoded() - before
    assert whole > 0.3 * length, "the count that is held against it is of written tokens"

    num_clients = tries(100, 200)
    for _ in range(tries(1, 5)):
        before = place.decoded()
        _, num_cancelled = asyncio.run(storm(place, num_clients, lambda number: True))
        assert num_cancelled == num_clients
        assert place.become_idle() == num_blocks
        assert place.decoded() - before < 0.3 * num_clients * whole
