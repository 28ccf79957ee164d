"""``lookahead serve`` with its OpenAI API, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

from lr_backend.serve.warmup import ANSWER, QUESTION

pytestmark = pytest.mark.integration

BOUND_S = 180.0
ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0.0}
ALIKE = {"lookahead": {"deterministic": True}}
RIGHT = f"\\boxed{{{ANSWER}}}"


@dataclass(frozen=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=BOUND_S)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    printed = folder / "printed"
    ports = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--repository", str(folder / "demo"), "--spec", "demo"]
    with printed.open("wb") as output:
        process = subprocess.Popen([*command, *ports], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + BOUND_S
        while "ask it something" not in (said := printed.read_text(encoding="utf-8")):
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
        found = re.search(r"http://\S+/v1\b", said)
        assert found is not None, said
        yield Served(found[0], process)
    finally:
        process.terminate()
        assert process.wait(BOUND_S) == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def test_openais_client_is_answered(served: Served) -> None:
    with served.client as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        first, again = (
            client.chat.completions.create(**ASKED | {"temperature": 0.6, "seed": 7}, n=2, extra_body=ALIKE) for _ in range(2)
        )
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again)]
    assert texts[0] == texts[1] and all(RIGHT in str(text) for text in texts[0])
    assert first.usage is not None and first.usage.completion_tokens_details is not None
    assert 0 < (first.usage.completion_tokens_details.reasoning_tokens or 0) < first.usage.completion_tokens


def test_a_stream_is_the_whole_answer_in_pieces(served: Served) -> None:
    lookahead = {"lookahead": {"mode": "lr_sd", "deterministic": True}}
    with served.client as client:
        whole = client.chat.completions.create(**ASKED, extra_body=lookahead)
        pieces = list(
            client.chat.completions.create(**ASKED, extra_body=lookahead, stream=True, stream_options={"include_usage": True})
        )
    said = {name: "" for name in ("content", "reasoning_content")}
    for piece in pieces:
        for choice in piece.choices:
            for name in said:
                said[name] += getattr(choice.delta, name, None) or ""
    message = whole.choices[0].message
    assert said["content"] == message.content and said["reasoning_content"] == message.reasoning_content
    assert len(pieces) > 5 and RIGHT in said["content"]
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_what_is_wrong_is_refused_by_name(served: Served) -> None:
    with served.client as client, pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(**ASKED, extra_body={"lookahead": {"depht": 3}})
    assert refused.value.code == "unknown_field" and "depht" in str(refused.value)


def test_a_server_that_is_to_end_finishes_its_streams(tmp_path: Path) -> None:
    async def run(served: Served) -> tuple[str, list[int]]:
        async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=BOUND_S) as client:
            stream = await client.chat.completions.create(**ASKED, stream=True)
            text, statuses = "", list[int]()
            served.process.send_signal(signal.SIGTERM)
            async for piece in stream:
                text += piece.choices[0].delta.content or ""
            try:
                await client.chat.completions.create(**ASKED)
            except APIStatusError as error:
                statuses.append(error.status_code)
            except Exception:  # nobody listens any more
                statuses.append(503)
            return text, statuses

    with serving(tmp_path) as ending:
        text, statuses = asyncio.run(run(ending))
        assert ending.process.wait(BOUND_S) == 0
    assert RIGHT in text and statuses == [503]
