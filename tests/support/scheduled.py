"""Scripted engines behind the real scheduler: prompts in chunks, sequences that share iterations, a KV memory that fills up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from lr_backend.contract import IntArray
from lr_backend.emulated.texts import ScriptedSource
from lr_backend.emulated.virtual import LoopThread, SharedCards, VirtualEngine
from lr_backend.engine import EngineCall, Generation, Sampling
from lr_backend.engine.drawing import next_tokens
from lr_backend.engine.request import EngineRequest
from lr_backend.hardware.cost import LinearCosts
from lr_backend.hardware.machine import Place
from lr_backend.hardware.sharing import IDLE, waiting_for_kernels
from lr_backend.testing import RecordedCall, Script, ScriptedEngine
from tests.support.world import TOKENIZER, World, storyteller


def drawing(salt: int, sampling: Sampling, num_candidates: int = 4) -> Script:
    """A target that draws each token from logits, as engines do: several storytellers have a say, the first one most."""
    tellers = [storyteller(salt + number, tool_rate=0.1) for number in range(num_candidates)]

    @cache  # many runs of one example come by the same contexts
    def next_token(context: tuple[int, ...], seed: int) -> int:
        logits = torch.zeros(1, len(TOKENIZER))
        for number, teller in enumerate(tellers):
            logits[0, teller(context, 0)] += 4.0 - 0.8 * number
        return int(next_tokens(logits, [sampling], [seed], [len(context)]))

    return next_token


@dataclass(frozen=True)
class Sizes:
    """What bounds the iterations of an engine, in tokens; ``block_tokens`` of a block."""

    kv_tokens: int
    max_num_tokens: int
    block_tokens: int = 4
    max_batch_size: int = 6


@dataclass
class ScheduledEngine(ScriptedEngine):
    """Tokens by script, time by iterations: scheduler, blocks, chunks and preemption are the embedded engine's.

    Attributes:
        delay: on the way to the engine.
    """

    sizes: Sizes = Sizes(1 << 12, 1 << 10)
    _engine: VirtualEngine | None = field(default=None, init=False)

    @property
    def num_preemptions(self) -> int:
        return self._engine.timeline.stats().num_preemptions if self._engine is not None else 0

    async def generate(self, call: EngineCall) -> Generation:
        if self._engine is None:
            self._engine = self._made()
        assert call.request_id not in self.in_flight, f"{call.request_id} is in flight already"
        self.calls.append(RecordedCall(call, asyncio.get_running_loop().time()))
        self.in_flight.add(call.request_id)
        try:
            await asyncio.sleep(self.delay(call, 1))
            return await self._engine.generate(call)
        finally:
            self.in_flight.discard(call.request_id)

    async def close(self) -> None:
        """Wait until its last iteration is over; nothing is left in its memory but what may be used again."""
        if self._engine is not None:
            await self._engine.close()
            self._engine.timeline.check_integrity()
            assert self._engine.timeline.idle
            assert not self._engine.timeline.stats().num_blocks_used

    def _made(self) -> VirtualEngine:
        sizes, shared = self.sizes, SharedCards(waiting_for_kernels)
        place = Place(
            LinearCosts(0.05, crowding=0.1, prompt_token_s=0.001),
            kv_tokens=sizes.kv_tokens,
            max_batch_size=sizes.max_batch_size,
            max_num_tokens=sizes.max_num_tokens,
            tokens_per_block=sizes.block_tokens,
        )
        return VirtualEngine(place, _Source(self.script, self.draft_script), shared, LoopThread(0.0, shared, IDLE))


class _Source(ScriptedSource):
    def __init__(self, script: Script, draft_script: Script | None) -> None:
        self._script = script

        def drafts(text: IntArray, request: EngineRequest) -> list[int]:
            assert draft_script is not None
            return [draft_script(tuple(text.tolist()), request.seed)]

        super().__init__(lambda text, request: [], drafts if draft_script is not None else None)

    def _written(self, text: IntArray, request: EngineRequest) -> Iterator[int]:
        context = tuple(np.asarray(text).tolist())
        while True:
            token = self._script(context, request.seed)
            yield token
            context = (*context, token)


def scheduled(world: World, sizes: Sizes) -> World:
    """The same models with target and draft behind schedulers of these sizes; calls take as long on their way as theirs do."""
    world = world.fresh()
    for name in ("target", "draft"):
        engine = getattr(world, name)
        behind = ScheduledEngine(engine.script, engine.delay, draft_script=engine.draft_script, sizes=sizes)
        setattr(world, name, behind)
    return world
