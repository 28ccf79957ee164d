"""Clients that ask all the while, here or in a process of their own, and how each request ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial

from lr_client import AsyncClient, ClientError, Options, RequestTimeout, ServerError
from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, omit

from lr_backend.serve.warmup import QUESTION

HUNG_S = 60.0
"""A request without an end for so long has hung."""
CANCELLED = "cancelled by the client"
NUM_CLIENTS = 8
PAUSE_S = 0.5
"""Before a client that was refused or failed asks again."""


@dataclass(frozen=True)
class Ended:
    """One request.

    Attributes:
        kind: ``served``, :data:`CANCELLED`, a typed error's name or code, ``untyped`` or ``hung``.
        whole: draft and judge took part in the answer, and nothing was missing. Known at Triton's port alone.
        text: the answer; of what is ``untyped``, the error.
    """

    start_s: float
    end_s: float
    kind: str
    whole: bool = False
    text: str = ""


@dataclass(frozen=True)
class Crowd:
    """Clients in a process of their own, so that their work holds up nobody else's. The process is told this as its argument.

    Attributes:
        url: of Triton's gRPC port, or of the OpenAI API if it begins with ``http``.
        large_megabytes: the size of their prompts; 0: a question of the demo.
    """

    url: str
    num_clients: int
    seconds: float
    large_megabytes: int = 0

    async def ended(self) -> list[Ended]:
        """Let them ask, and say how their requests ended. The process ends with this call.

        Raises:
            RuntimeError: the process failed; its own output says why.
        """
        command = (sys.executable, "-m", __spec__.name, json.dumps(asdict(self)))
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"the process of {self.num_clients} clients of {self.url} ended with status {process.returncode}")
        return [Ended(**one) for one in json.loads(output)]

    async def _ask(self) -> list[Ended]:
        found: list[Ended] = []
        question = QUESTION
        if self.large_megabytes:
            question = "a" * (self.large_megabytes << 20)
            os.nice(19)  # to write and send so much is the work of other machines: here it gives way to the server's
        async with crowd(self.url, found, self.num_clients, question):
            await asyncio.sleep(self.seconds)
        return found


Asking = Callable[[Options, str], Awaitable[Ended]]


async def ask(client: AsyncClient, options: Options, question: str = QUESTION) -> Ended:
    """One request at Triton's gRPC port, however it ends."""
    start_s, kind, text, whole = time.monotonic(), "served", "", False
    try:
        result = await client.ask(question, options, timeout_s=HUNG_S)
        text, usage = result.text, result.usage
        whole = bool(usage.num_draft_calls and usage.num_judge_calls and not usage.degraded)
    except RequestTimeout:
        kind = "hung"
    except ServerError as error:
        kind, text = (type(error).__name__, "") if error.code else ("untyped", str(error))
    except ClientError as error:
        kind = type(error).__name__
    except asyncio.CancelledError:
        kind = CANCELLED
    return Ended(start_s, time.monotonic(), kind, whole, text)


async def ask_openai(client: AsyncOpenAI, model: str, options: Options, question: str = QUESTION) -> Ended:
    """One request at the OpenAI API, however it ends."""
    start_s, kind, text = time.monotonic(), "served", ""
    try:
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_completion_tokens=options.max_tokens,
            seed=options.seed,
            temperature=omit if options.temperature is None else options.temperature,
            extra_body={"lookahead": {"mode": str(options.mode)}},
        )
        text = answer.choices[0].message.content or ""
    except APITimeoutError:
        kind = "hung"
    except APIStatusError as error:
        kind, text = (error.code, "") if error.code else ("untyped", str(error))
    except APIConnectionError:
        kind = "no connection"
    except asyncio.CancelledError:
        kind = CANCELLED
    return Ended(start_s, time.monotonic(), kind, text=text)


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[Asking]:
    """A client for a URL. Neither kind asks twice."""
    if url.startswith("http"):
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=HUNG_S) as openai:
            yield partial(ask_openai, openai, (await openai.models.list()).data[0].id)
    else:
        async with AsyncClient(url) as client:
            yield partial(ask, client)


@asynccontextmanager
async def crowd(url: str, ended: list[Ended], num_clients: int = NUM_CLIENTS, question: str = QUESTION) -> AsyncIterator[None]:
    """Clients that ask one question after another; when the block ends, their last ones are awaited."""
    stop = asyncio.Event()
    numbers = iter(range(10**9))

    async def one(ask_it: Asking) -> None:
        while not stop.is_set():
            ended.append(await ask_it(Options(mode="lr", stream=False, max_tokens=96, seed=next(numbers)), question))
            if ended[-1].kind != "served":
                await asyncio.sleep(PAUSE_S)

    async with AsyncExitStack() as held:
        clients = [await held.enter_async_context(asking(url)) for _ in range(min(num_clients, NUM_CLIENTS))]
        tasks = [asyncio.create_task(one(clients[index % NUM_CLIENTS])) for index in range(num_clients)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


if __name__ == "__main__":
    told = asyncio.run(Crowd(**json.loads(sys.argv[1]))._ask())
    sys.stdout.write(json.dumps([asdict(one) for one in told]))
