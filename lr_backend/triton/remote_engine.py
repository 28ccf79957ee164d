"""An engine behind another machine's Triton, called by gRPC; and several of one kind as one.

Calls, cancels and the breaker are those of :class:`~lr_backend.triton.triton_engine.TritonEngine`. What is added is the way there
(TLS, a key, an end for calls whose server has gone silent) and, among replicas, the choice.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from lr_backend.contract import IntArray, TensorMap
from lr_backend.engine import Engine, EngineCall, Generation
from lr_backend.engine.address import ENGINE_HEADER, ENGINE_KEY_VARIABLE, GRPC_PREFIX, Address, key_from
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, NotFinite
from lr_backend.telemetry import current
from lr_backend.triton.triton_engine import RETRY_S, CallGate, TritonEngine, engine_error

Answer = TypeVar("Answer")

LOOK_S, ANSWER_S, MAX_MISSES = 1.0, 2.0, 3
"""While calls are in flight, their server is asked so often whether it lives, and has so long to answer; one that misses so many
in a row is taken for dead. A connection that breaks says so by itself; a machine that loses power does not."""
MAX_IMBALANCE = 8
"""Calls that a replica may have in flight beyond the least busy one and still be chosen for the prefix that it holds."""
FIRST_PREFIX = 32
"""Tokens. Prefixes are remembered at this length and at its doubles; shorter ones are not worth a wait."""
MAX_PREFIXES = 65536
"""The latest are remembered."""

_CONNECTION = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's own limit is two minutes: a server that was away for some would be left out for as long once it is back.
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_REFUSED = ("StatusCode.INVALID_ARGUMENT", "StatusCode.UNIMPLEMENTED")
_OUT_OF_ORDER = ("StatusCode.UNAVAILABLE", "StatusCode.INTERNAL", "StatusCode.NOT_FOUND")
"""Triton knows no model of that name while it ends."""
_CUT_OFF = "Stream removed"
"""What gRPC says of a connection that broke, by the status UNKNOWN (grpc/grpc#34076)."""


def grpc_inputs(arrays: Mapping[str, npt.NDArray[Any]]) -> list[grpcclient.InferInput]:
    """Named arrays as a client sends them."""
    tensors = []
    for name, array in arrays.items():
        tensors.append(grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


class RemoteEngine:
    """One model of a server elsewhere. To be made where the event loop runs.

    Args:
        url: ``grpc://host:port``, or ``grpcs`` for TLS. Certificates are checked against those that the variable
            ``GRPC_DEFAULT_SSL_ROOTS_FILE_PATH`` names, or else against gRPC's own.
        key: what that server wants to hear before it computes; empty: nothing.
        gate: how many calls may be in flight; None: 64 of its own.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(
        self, url: str, model_name: str, *, key: str = "", tokens_per_block: int = 32, gate: CallGate | None = None
    ) -> None:
        address = Address.parse(url)
        self._called = f"{model_name} at {address.host_and_port}"
        self._client = grpcclient.InferenceServerClient(address.host_and_port, ssl=address.secure, channel_args=_CONNECTION)
        self._headers = {f"{GRPC_PREFIX}{ENGINE_HEADER}": key} if key else {}
        self._pulse = Pulse(self._client.is_server_live)
        self._engine = TritonEngine(
            model_name, self._infer, gate or CallGate(64), tokens_per_block=tokens_per_block, address=address.host_and_port
        )

    @property
    def out_of_order(self) -> bool:
        """Whether a call would fail at once."""
        return self._engine.out_of_order

    async def generate(self, call: EngineCall) -> Generation:
        return await self._engine.generate(call)

    async def close(self) -> None:
        await self._engine.close()
        await self._client.close()

    async def _infer(
        self, model_name: str, request_id: str, inputs: TensorMap, wanted: tuple[str, ...]
    ) -> dict[str, npt.NDArray[Any]]:
        outputs = [grpcclient.InferRequestedOutput(name) for name in wanted]
        answer = self._client.infer(
            model_name, grpc_inputs(inputs), outputs=outputs, request_id=request_id, headers={**self._headers, **current()}
        )
        try:
            response = await self._pulse.while_it_beats(answer)
        except InferenceServerException as error:
            status, text = str(error.status()), str(error.message())
            away = status in _OUT_OF_ORDER or _CUT_OFF in text
            raise engine_error(self._called, text, refused=status in _REFUSED, out_of_order=away) from error
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._called} has gone silent") from error
        arrays = {name: response.as_numpy(name) for name in wanted}
        return {name: array for name, array in arrays.items() if array is not None}


def remote_engine(
    urls: Sequence[str], model_name: str, gate: CallGate, tokens_per_block: int, environment: Mapping[str, str]
) -> Engine:
    """A role that lives elsewhere, on one server or several, with the key that ``environment`` has for them.

    Raises:
        ConfigError: a url or the key is none.
    """
    key = key_from(environment, ENGINE_KEY_VARIABLE)
    replicas = [RemoteEngine(url, model_name, key=key, tokens_per_block=tokens_per_block, gate=gate) for url in urls]
    return replicas[0] if len(replicas) == 1 else Replicas(replicas)


class Pulse:
    """Notices a server that has gone without a word. It is asked only while somebody waits for an answer of it.

    A server that refuses to answer is there: one that is told to end takes nothing new, and finishes what it has. A connection
    that breaks ends its calls by itself.

    Args:
        ask: asks it once; it does not matter what.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._waited_for: set[asyncio.Future[Any]] = set()
        self._given_up: set[asyncio.Future[Any]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def while_it_beats(self, answer: Awaitable[Answer]) -> Answer:
        """Await ``answer``.

        Raises:
            TimeoutError: the server is taken for dead.
        """
        running = asyncio.ensure_future(answer)
        self._waited_for.add(running)
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            return await running
        except asyncio.CancelledError:
            if running in self._given_up:
                raise TimeoutError from None
            raise
        finally:
            self._waited_for.discard(running)
            self._given_up.discard(running)
            if not self._waited_for and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _look(self) -> None:
        num_missed = 0
        while True:
            await asyncio.sleep(LOOK_S)
            num_missed = 0 if await self._answers() else num_missed + 1
            if num_missed >= MAX_MISSES:
                num_missed = 0
                self._given_up |= self._waited_for
                for each in self._waited_for:
                    each.cancel()

    async def _answers(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                with suppress(InferenceServerException):
                    await self._ask()
            return True
        return False


class ReplicaEngine(Protocol):
    """One of several that are alike: an :class:`~lr_backend.engine.Engine` that says when it is not worth a call."""

    @property
    def out_of_order(self) -> bool: ...

    async def generate(self, call: EngineCall) -> Generation: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _Replica:
    """``failed_s``: when its last call failed by its own fault."""

    engine: ReplicaEngine
    num_in_flight: int = 0
    failed_s: float = -math.inf

    def works(self, now_s: float) -> bool:
        """One that fails at once would always be the least busy."""
        return not self.engine.out_of_order and now_s - self.failed_s > RETRY_S


class Replicas:
    """Several engines of the same model as one :class:`~lr_backend.engine.Engine`.

    A call goes where the longest part of its prefix was last computed, unless that replica is much busier than another; else to
    the least busy. Where a replica is away, full, or fails, the call is made anew at another: it carries its whole prefix and its
    seed, so nothing of it is lost.
    """

    def __init__(self, engines: Sequence[ReplicaEngine]) -> None:
        self._replicas = [_Replica(engine) for engine in engines]
        self._holders: OrderedDict[bytes, _Replica] = OrderedDict()

    async def generate(self, call: EngineCall) -> Generation:
        left = list(self._replicas)
        while True:
            chosen = self._choose(call.input_ids, left)
            chosen.num_in_flight += 1
            try:
                return await chosen.engine.generate(call)
            except (EngineRejected, NotFinite):
                raise
            except EngineError:
                chosen.failed_s = asyncio.get_running_loop().time()
                left.remove(chosen)
                if not left:
                    raise
            finally:
                chosen.num_in_flight -= 1

    async def close(self) -> None:
        await asyncio.gather(*(each.engine.close() for each in self._replicas))

    def _choose(self, prefix: IntArray, among: Sequence[_Replica]) -> _Replica:
        """One of ``among``: of those that work, if any does."""
        now_s = asyncio.get_running_loop().time()
        working = [each for each in among if each.works(now_s)] or among
        least = min(working, key=lambda each: each.num_in_flight)
        keys = prefix_keys(prefix)
        # One that holds less than a quarter of the prefix is not worth a wait.
        holder = next((held for key in reversed(keys[-2:]) if (held := self._holders.get(key)) is not None), least)
        chosen = holder if holder in working and holder.num_in_flight - least.num_in_flight <= MAX_IMBALANCE else least
        for key in keys:
            self._holders[key] = chosen
            self._holders.move_to_end(key)
        while len(self._holders) > MAX_PREFIXES:
            self._holders.popitem(last=False)
        return chosen


def prefix_keys(tokens: IntArray) -> list[bytes]:
    """Of the first :data:`FIRST_PREFIX` tokens, of twice as many, and so on, as far as there are any."""
    data, keys, hashed = tokens.tobytes(), [], hashlib.blake2b(digest_size=16)
    start, end = 0, FIRST_PREFIX
    while end <= len(tokens):
        hashed.update(data[start * tokens.itemsize : end * tokens.itemsize])
        keys.append(hashed.digest())
        start, end = end, 2 * end
    return keys
