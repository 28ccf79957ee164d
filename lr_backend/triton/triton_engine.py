"""An engine behind Triton: the loop's own, called by BLS, or another machine's, called by gRPC.

What the contract makes us do by hand: a call that was sent cannot be taken back, only asked to stop by a second request of the
same id, which "succeeds" even when nothing of that id runs. So a cancel is repeated until the call has come back, while the
engine hears it, and the call keeps its place among those in flight until then.

A model whose process died answers each call, cancels too, after a second and one at a time; calls would pile up without end.
So an engine that fails, or that does not let go of a cancelled call, is left alone for a while: its :class:`Breaker` is open.
A call by gRPC to an engine that hangs is ended on this side: its place belongs to the engine's replicas too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import structlog

from lr_backend.contract import TensorMap
from lr_backend.engine import EngineCall, Generation, cancel_tensors
from lr_backend.engine.upstream_errors import is_full, kind_of
from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, NotFinite, Overloaded
from lr_backend.notice import Seats

log = structlog.get_logger()

Answer = TypeVar("Answer")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 2.0
"""Between two cancels of a call; each pause is twice the one before. A cancel that has overtaken its call is heard the second
time. After that the engine knows, and ends the call between two iterations, or once it has had its turn. TensorRT-LLM remembers
for ever a cancel that comes in a call's last iteration, and each later iteration pays for it: so few are sent."""
VERIFICATION_S = 0.1
"""How long a verification may go on that nobody wants any more. It is one iteration, its last, so it is cancelled only where it
still waits for its turn."""
SILENCE_S = 10.0
"""An engine that does not let go of a call for so long, beyond what the longest call in flight may take, and answers no other
meanwhile, is out of order. No iteration takes so long."""
SLOW_TOKEN_S, SLOWEST_TOKEN_S = 0.03, 0.3
"""What a token may take: so long at any time, and as long as tokens have lately taken, up to the second. An engine that is full
of long calls answers none before the first of them is over."""
FEWEST_TOKENS, PACE_WEIGHT = 16, 0.2
"""Shorter calls say nothing of the pace. A longer one weighs so much, since it alone may have had to wait."""
STILL_S = 1.0
"""A pause that takes so much longer than it should is one in which this process did not run: as where a container is paused."""
ENOUGH_CANCELS = 3
"""That the engine must have heard before a call is given up for lost, though it has had all the time that calls may take."""
DRAFTS_SHARE, JUDGES_SHARE = 0.5, 0.25
"""Of the places in the gate, which draft and judge may have at most."""
FAILING_S, FEWEST_FAILURES, LONGEST_GAP_S = 30.0, 5, 600.0
"""An engine that has failed every call for so long, and so many of them, is told to who watches it. After such a gap without
one it begins anew."""
CANCEL_TIMEOUT_S, REMOTE_CANCEL_TIMEOUT_S = 0.5, 5.0
"""For a cancel to be answered. Of a server elsewhere others notice whether it lives; a network may be slow now and then."""
MOST_CANCELS, MOST_UNHEARD = 2, 1
"""Cancels of an engine at a time; after one that went unheard they go one by one. Each that is never answered holds one of
Triton's threads, and the reserve has few. How often in a row they may go unheard: this process may have stood still for a moment.
An engine that hears no more hangs."""
RETRY_S, MOST_DOUBLINGS, MOST_DOUBLINGS_OF_ENDED = 5.0, 6, 3
"""How long an engine that is out of order is left alone before one call tries it again; how often that is doubled at most, and
how often by calls that were ended on this side. Those hold no place, and nobody here hears when their server is started anew."""

Infer = Callable[[str, str, TensorMap, tuple[str, ...]], Awaitable[dict[str, npt.NDArray[Any]]]]
"""(model, request id, inputs, wanted outputs) -> outputs. Raises EngineError."""

TOKEN_OUTPUTS = ("output_ids", "sequence_length")
PERF_OUTPUTS = (
    "kv_cache_reused_blocks",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "last_token_time_ns",
)


class CallGate:
    """How many engine calls may be in flight at a time, over all requests and roles.

    Triton holds one thread of its pool for each; past the pool the rest would wait unseen. Cancels do not pass the gate: the
    pool keeps a reserve for them.

    A call to a process that died is never answered, and Triton keeps its thread. Such a lost call takes a place for as long, so
    that no more calls are in flight than there are threads.

    Attributes:
        num_lost: calls that nobody waits for any more, and that Triton has not answered. Those of a part count in the whole.
    """

    def __init__(
        self, max_in_flight_calls: int, on_lost: Callable[[int], None] = lambda num: None, within: CallGate | None = None
    ) -> None:
        """
        Args:
            on_lost: is told each new ``num_lost``.
            within: the gate whose places these are; None: they are its own.
        """
        self._max_calls = max_in_flight_calls
        self._semaphore = asyncio.Semaphore(max_in_flight_calls)
        self._on_lost = on_lost
        self._within = within
        self._owed = 0
        """Places that lost calls take from the next ones that leave."""
        self.num_in_flight = self.num_lost = 0

    def part(self, share: float) -> CallGate:
        """A share of its places. An engine that hangs keeps those of its calls: then others still have the rest."""
        return CallGate(max(1, int(share * self._max_calls)), within=self)

    async def enter(self) -> None:
        await self._semaphore.acquire()
        if self._within is not None:
            try:
                await self._within.enter()
            except BaseException:
                self._semaphore.release()
                raise
        self.num_in_flight += 1

    def leave(self) -> None:
        self.num_in_flight -= 1
        if self._within is not None:
            self._within.leave()
        self._free()

    async def answer(self, asked: asyncio.Future[Answer]) -> Answer:
        """What Triton answers to a call, which is lost where this is cancelled first."""
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            if not asked.done():
                self._lose(asked)
            raise

    def _lose(self, asked: asyncio.Future[Any]) -> None:
        # The threads are the whole gate's. A part would stay short of places that its engine, back again, should have.
        if self._within is not None:
            self._within._lose(asked)
            return
        self._owed += 1
        self._count_lost(1)
        asked.add_done_callback(self._found)

    def _found(self, asked: asyncio.Future[Any]) -> None:
        if not asked.cancelled():
            asked.exception()  # nobody else asks for it
        self._count_lost(-1)
        self._free()

    def _free(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._semaphore.release()

    def _count_lost(self, change: int) -> None:
        self.num_lost += change
        self._on_lost(self.num_lost)


class Watch(Protocol):
    """Somebody who ends what hangs for too long."""

    @property
    def num_answered(self) -> int:
        """Calls that the engine has answered, as far as is known here: of other processes too."""
        ...

    def answered(self) -> None:
        """A call was answered."""
        ...

    def hangs(self, by: int) -> None:
        """The engine does not let go of one call more (1), or of one less (-1)."""
        ...


class Failing:
    """Tells the watch of an engine that lives but has failed every call for a while. To callers it is as one that hangs."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._since = self._last = -math.inf
        self._num_failed = 0
        self._is_told = False

    def failed(self) -> None:
        """By the engine's fault."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._last > LONGEST_GAP_S:
            self._since, self._num_failed = now_s, 0
        self._last, self._num_failed = now_s, self._num_failed + 1
        if now_s - self._since > FAILING_S and self._num_failed >= FEWEST_FAILURES and not self._is_told:
            self._is_told = True
            self._watch.hangs(1)

    def forget(self) -> None:
        """It has answered, or is known to be dead, or to be started anew."""
        self._last = -math.inf
        if self._is_told:
            self._is_told = False
            self._watch.hangs(-1)


class Breaker:
    """Whether an engine is worth calling. Open: calls fail at once. After a while one call may try; its success closes it.

    Attributes:
        num_hung: calls that the engine does not let go of. The next try may become one of them, and keep its place in the gate:
            so with each of them it is twice as long until there is one.
        num_ended: how often it was found to keep calls, and they were ended on this side, since it last answered. They keep no
            place, but the next try may hold up another request as long.
    """

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._first_s = retry_s
        self._tripped_at: float | None = None
        self._is_counted = False
        self.num_hung = self.num_ended = 0

    def require_closed(self, name: str) -> None:
        """Raises :class:`EngineUnavailable` while open."""
        if self.is_open:
            raise EngineUnavailable(f"{name} is out of order; it is tried again within {self._retry_s:g} s")

    def enter(self, name: str) -> bool:
        """As :meth:`require_closed`; lets one call through when the time has come. Returns whether it is this one."""
        self.require_closed(name)
        if self._tripped_at is None:
            return False
        self.trip()
        self._is_counted = False
        return True

    def untried(self) -> None:
        """The call that was let through was not sent, or the engine answered it without computing: the next one may try."""
        if self._tripped_at is not None:
            self._tripped_at = asyncio.get_running_loop().time() - self._retry_s

    def trip(self) -> None:
        self._tripped_at = asyncio.get_running_loop().time()

    def ended(self) -> None:
        """A call that the engine keeps is ended on this side. Of those of one try, or of the first many, one counts."""
        self.num_ended += not self._is_counted
        self._is_counted = True

    def close(self) -> None:
        self._tripped_at = None
        self._is_counted = False
        self.num_ended = 0

    @property
    def is_open(self) -> bool:
        """Whether a call would fail at once."""
        return self._tripped_at is not None and asyncio.get_running_loop().time() < self._tripped_at + self._retry_s

    @property
    def _retry_s(self) -> float:
        num_kept = self.num_hung + min(self.num_ended, MOST_DOUBLINGS_OF_ENDED)
        return float(self._first_s * 2 ** min(num_kept, MOST_DOUBLINGS))


class TritonEngine:
    """One model of a server as an :class:`~lr_backend.engine.Engine`."""

    def __init__(
        self,
        model_name: str,
        infer: Infer,
        gate: CallGate,
        *,
        tokens_per_block: int,
        address: str = "",
        watch: Watch | None = None,
    ) -> None:
        """
        Args:
            address: of the server, where it is not the one that this process belongs to. A call by gRPC can be ended on this
                side; one by BLS cannot.
            watch: is told of calls that are answered, and of those that hang; None: nobody is.
        """
        self._watch: Watch = watch or Seats.alone().seat(0)
        self._model_name = model_name
        self._called = f"{model_name} at {address}" if address else model_name
        self._is_remote = bool(address)
        self._cancel_timeout_s = REMOTE_CANCEL_TIMEOUT_S if address else CANCEL_TIMEOUT_S
        self._infer = infer
        self._gate = gate
        self._tokens_per_block = tokens_per_block
        self._breaker = Breaker()
        self._token_s = SLOW_TOKEN_S
        """What a token takes, in calls of some length, their wait for a turn and all."""
        self._cancels, self._alone = asyncio.Semaphore(MOST_CANCELS), asyncio.Lock()
        self._num_unheard, self._unheard_s = 0, -math.inf
        """How often in a row cancels went unheard, and when that was seen last."""
        self._failing = Failing(self._watch)
        self._why_dead = ""
        self._asked: set[asyncio.Future[Any]] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._lengths: dict[asyncio.Task[Generation], int] = {}
        """Tokens at most, of the calls in flight."""

    @property
    def out_of_order(self) -> bool:
        """Whether a call would fail at once."""
        return bool(self._why_dead) or self._breaker.is_open

    def has_died(self, why: str) -> None:
        """Its process is gone: calls in flight fail now, and all others until it :meth:`is_back`."""
        self._why_dead = why
        self._failing.forget()
        for each in self._asked:
            each.cancel()

    def is_back(self) -> None:
        """It can be called again."""
        self._why_dead = ""
        self._breaker.close()
        self._failing.forget()
        self._num_unheard = 0

    async def generate(self, call: EngineCall) -> Generation:
        # Calls that hang may hold all places for ever: so of those that come later one tries, and the others fail here.
        tries = self._enter()
        try:
            # Cancelled while it waits here, a call was never sent and needs no cancel.
            await self._gate.enter()
        except BaseException:
            if tries and not self._breaker.num_hung:  # else the gate is full of what hangs, and nobody would get in
                self._breaker.untried()
            raise
        try:
            tries = tries or self._enter()
        except EngineUnavailable:
            self._gate.leave()
            raise
        running = asyncio.create_task(self._run(call, tries=tries))
        self._lengths[running] = call.max_new_tokens
        running.add_done_callback(self._is_over)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                self._reap(call.request_id, running, VERIFICATION_S if call.draft_ids is not None else 0.0)
            raise

    def _enter(self) -> bool:
        """Whether this call is to find out if the engine works again. Raises: EngineUnavailable: it is not worth a call."""
        self._require_alive()
        tries = self._breaker.enter(self._called)
        if tries and not self._breaker.num_hung:  # else nothing more is asked of it before it answers
            self._num_unheard = min(self._num_unheard, MOST_UNHEARD)
        return tries

    def _is_over(self, running: asyncio.Task[Generation]) -> None:
        del self._lengths[running]
        self._gate.leave()

    async def close(self) -> None:
        """Wait until every cancelled call has come back."""
        while self._reaping:
            await asyncio.wait(self._reaping)

    async def _run(self, call: EngineCall, *, tries: bool) -> Generation:
        wanted = TOKEN_OUTPUTS + (PERF_OUTPUTS if call.return_perf_metrics else ())
        wanted += ("output_log_probs",) if call.return_log_probs else ()
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        try:
            outputs = await self._ask(call.request_id, call.tensors(), wanted)
        except (EngineRejected, NotFinite):
            self._has_answered(tries=tries)
            raise
        except EngineError as error:
            is_busy = Overloaded.code in error.message or is_full(error.message)  # a full queue passes
            if isinstance(error, EngineUnavailable):
                self._trip(error.message)
            else:
                self._has_answered(tries=tries and not is_busy)
            if not self._why_dead and not is_busy:
                self._failing.failed()
            raise
        self._breaker.close()
        self._failing.forget()
        self._num_unheard = 0
        self._watch.answered()
        generation = Generation.from_tensors(outputs, tokens_per_block=self._tokens_per_block)
        if (num_tokens := len(generation.token_ids)) >= FEWEST_TOKENS:
            self._token_s += PACE_WEIGHT * ((clock() - sent_s) / num_tokens - self._token_s)
        return generation

    def _has_answered(self, *, tries: bool) -> None:
        """The engine has refused a call, or failed in that one alone. ``tries``: it was the try of an engine out of order."""
        self._num_unheard = 0
        if tries:
            self._breaker.untried()

    async def _ask(self, request_id: str, tensors: TensorMap, wanted: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
        """One request and its answer; a failure where the process dies meanwhile, of which Triton may say nothing."""
        self._require_alive()
        asked = asyncio.ensure_future(self._infer(self._model_name, request_id, tensors, wanted))
        self._asked.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            if asked.cancelled():
                self._require_alive()
            raise
        finally:
            self._asked.discard(asked)

    def _require_alive(self) -> None:
        if self._why_dead:
            raise EngineUnavailable(self._why_dead)

    def _trip(self, why: str) -> None:
        if not self._breaker.is_open:
            log.warning("engine_out_of_order", engine=self._called, why=why)
        self._breaker.trip()

    def _reap(self, request_id: str, running: asyncio.Task[Generation], after_s: float) -> None:
        task = asyncio.create_task(self._stop(request_id, running, after_s))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _stop(self, request_id: str, running: asyncio.Task[Generation], after_s: float) -> None:
        """Have the engine let go of a call, asking it less and less often."""
        if after_s:
            await asyncio.wait({running}, timeout=after_s)
        clock, pause_s = asyncio.get_running_loop().time, FIRST_PAUSE_S
        silent_since, num_answered, num_heard = clock(), self._watch.num_answered, 0
        lost_at = clock() + self._most_s
        while not running.done():
            async with self._cancels, self._alone if self._num_unheard else nullcontext():
                is_heard = running.done() or (self._num_unheard <= MOST_UNHEARD and await self._cancel(request_id))
            num_heard += is_heard
            paused_at = clock()
            await asyncio.wait({running}, timeout=pause_s if is_heard else 0.0)
            stood_still = clock() - paused_at > pause_s + STILL_S
            lost_at += clock() - paused_at if stood_still else 0.0
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
            # A call that only waits for its turn is no sign of an engine that hangs, nor is time in which nobody here ran.
            if stood_still or num_answered != self._watch.num_answered:
                silent_since, num_answered = clock(), self._watch.num_answered
            elif not running.done():
                longest_s = SILENCE_S + self._slow_token_s * max(self._lengths.values())
                if self._num_unheard > MOST_UNHEARD or clock() - silent_since >= longest_s:
                    await self._let_hang(running)
                    lost_at = clock() + self._most_s
            if clock() >= lost_at and num_heard >= ENOUGH_CANCELS and not running.done():
                await self._give_up(request_id, running)
        if not running.cancelled():
            running.exception()  # nobody else asks for it any more

    @property
    def _slow_token_s(self) -> float:
        return min(max(SLOW_TOKEN_S, self._token_s), SLOWEST_TOKEN_S)

    @property
    def _most_s(self) -> float:
        """What a call may take: all that were sent before it may have their turns first, one after another at worst."""
        return SILENCE_S + self._slow_token_s * sum(self._lengths.values())

    async def _let_hang(self, running: asyncio.Task[Generation]) -> None:
        """Ask no more: the engine neither lets go of this call nor answers another.

        Where the call cannot be ended, this waits for it, or for the engine to answer again.
        """
        self._trip("it does not let go of a cancelled call, and answers no other")
        if self._is_remote:
            self._breaker.ended()
            running.cancel()
            await asyncio.wait({running})
            return
        self._breaker.num_hung += 1
        self._watch.hangs(1)
        num_answered = self._watch.num_answered
        try:
            while not running.done() and num_answered == self._watch.num_answered:
                await asyncio.wait({running}, timeout=FIRST_PAUSE_S)
        finally:
            self._breaker.num_hung -= 1
            self._watch.hangs(-1)

    async def _give_up(self, request_id: str, running: asyncio.Task[Generation]) -> None:
        """The engine answers others, and has lost this call. By BLS it keeps its place, and the gate counts it."""
        log.error("call_lost", engine=self._called, request_id=request_id)
        running.cancel()
        await asyncio.wait({running})

    async def _cancel(self, request_id: str) -> bool:
        """Ask once; False if not even that is answered. Where the engine is gone so is the call, and its own failure says so."""
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        try:
            async with asyncio.timeout(self._cancel_timeout_s):
                with suppress(EngineError):
                    await self._ask(request_id, cancel_tensors(), TOKEN_OUTPUTS)
        except TimeoutError:
            if sent_s >= self._unheard_s:  # what was sent beside the last says no more than that one
                self._num_unheard, self._unheard_s = self._num_unheard + 1, clock()
            return False
        self._num_unheard = 0
        return True


def unavailable(model_name: str, error: Exception) -> EngineUnavailable:
    """The error of a call that never reached its engine."""
    return EngineUnavailable(f"{model_name} cannot be called: {error}")


def engine_error(called: str, text: str, *, refused: bool, out_of_order: bool = True) -> EngineError:
    """The failure of a call by its text, since upstream calls everything INTERNAL; where the text says nothing, by the code.

    Args:
        called: the model, and where it is.
        refused: the code says that the request is at fault.
        out_of_order: the code leaves room for an engine that is.
    """
    # A full queue passes, and so does an iteration that failed. Numbers that are none are one request's affair. Nothing of this
    # means that the engine is out of order, which would fail the calls of all others.
    by_text: dict[str, type[EngineError]] = {
        Overloaded.code: EngineError,
        EngineError.code: EngineError,
        EngineRejected.code: EngineRejected,
        NotFinite.code: NotFinite,
    }
    kind = next((one for code, one in by_text.items() if code in text), kind_of(text))
    if kind is None:
        kind = EngineRejected if refused else EngineUnavailable if out_of_order else EngineError
    return kind(f"{called}: {text}")
