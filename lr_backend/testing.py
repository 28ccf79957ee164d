"""Scripted engines and a virtual clock: how the loop is tested, and how yours can be.

    engine = ScriptedEngine(script=lambda context, seed: context[-1] + 1)
    generation = run_virtual(engine.generate(call))

A script is a next-token function; a :class:`ScriptedEngine` serves it behind the engine protocol with the
contract's semantics (stop words kept, drafts verified, one answer a call) and takes scripted time for it. Under
:func:`run_virtual` that time is virtual: a run of minutes takes milliseconds, and the order of completions is exactly what the
script says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lr_backend.clock import run_virtual
from lr_backend.contract import decode_stop_words
from lr_backend.engine import EngineCall, Generation
from lr_backend.errors import EngineError, EngineRejected

__all__ = ["Delay", "RecordedCall", "Script", "ScriptedEngine", "run_virtual"]

Script = Callable[[tuple[int, ...], int], int]
"""(token ids so far, seed of the call) -> next token id. Must be a function of its arguments alone."""

Delay = Callable[[EngineCall, int], float]
"""(call, number of tokens written) -> seconds until the answer."""


@dataclass(frozen=True)
class RecordedCall:
    """A call as an engine saw it; times in seconds of the event loop's clock."""

    call: EngineCall
    started_s: float


@dataclass
class ScriptedEngine:
    """An engine that writes what a script says, after the time that a script says.

    Attributes:
        delay: 10 ms a token where not given.
        fail: asked before every call; an error to raise, or None.
        drop_drafts: verify no drafts, silently, as upstream may.
        draft_script: what a draft model that the engine holds would write, for calls that ask for it (``num_draft_tokens``).
        log_prob: of a token after its context, where a call asks; a script leaves nothing to chance, so 0 where not given.
    """

    script: Script
    delay: Delay = lambda call, num_tokens: 0.01 * num_tokens
    fail: Callable[[EngineCall], EngineError | None] = lambda call: None
    drop_drafts: bool = False
    draft_script: Script | None = None
    log_prob: Callable[[tuple[int, ...]], float] = lambda context: 0.0
    calls: list[RecordedCall] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    max_in_flight: int = 0
    total_tokens: int = 0

    async def generate(self, call: EngineCall) -> Generation:
        loop = asyncio.get_running_loop()
        assert call.request_id not in self.in_flight, f"{call.request_id} is in flight already"
        self.calls.append(RecordedCall(call, loop.time()))
        if (error := self.fail(call)) is not None:
            raise error
        self.in_flight.add(call.request_id)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        try:
            generation = self._write(call)
            num_passes = 1 if call.draft_ids is not None else len(generation.token_ids)
            if call.num_draft_tokens:
                generation, num_passes = self._with_draft_tokens(call, generation)
            await asyncio.sleep(self.delay(call, num_passes))
        except asyncio.CancelledError:
            self.cancelled.append(call.request_id)
            raise
        finally:
            self.in_flight.discard(call.request_id)
        self.total_tokens += len(generation.token_ids)
        return generation

    async def close(self) -> None:
        assert not self.in_flight, self.in_flight

    def _with_draft_tokens(self, call: EngineCall, generation: Generation) -> tuple[Generation, int]:
        """The same tokens with the counts that draft tokens would have had, and in how many passes."""
        if self.draft_script is None:
            raise EngineRejected("num_draft_tokens: this engine holds no draft model")
        text = (*call.input_ids.tolist(), *generation.token_ids)
        num_passes = num_proposed = 0
        at = len(call.input_ids)
        while at < len(text):
            wanted = min(call.num_draft_tokens, len(call.input_ids) + call.max_new_tokens - at - 1)
            num_passes, num_proposed = num_passes + 1, num_proposed + wanted
            behind = at + wanted
            while at < min(behind, len(text)) and self.draft_script(text[:at], call.seed) == text[at]:
                at += 1
            at += 1
        num_accepted = len(generation.token_ids) - num_passes
        return replace(generation, num_draft_tokens=num_proposed, num_accepted_tokens=num_accepted), num_passes

    def _write(self, call: EngineCall) -> Generation:
        context = call.input_ids.tolist()
        stops = [list(stop) for stop in decode_stop_words(call.stop_words)] if call.stop_words is not None else []
        drafts = [] if call.draft_ids is None else call.draft_ids.tolist()
        limit = call.max_new_tokens
        if drafts and self.drop_drafts:
            drafts, limit = [], 1
        written: list[int] = []
        log_probs: list[float] = []
        accepted = 0
        while len(written) < limit:
            before = tuple(context)
            token = self.script(before, call.seed)
            log_probs.append(self.log_prob(before))
            written.append(token)
            context.append(token)
            if any(context[-len(stop) :] == stop for stop in stops):
                break
            if drafts:
                if len(written) > len(drafts) or token != drafts[len(written) - 1]:
                    break
                accepted += 1
        return Generation(tuple(written), len(drafts), accepted, log_probs=tuple(log_probs) if call.return_log_probs else ())
