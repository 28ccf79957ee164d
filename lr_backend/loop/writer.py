"""Writing one step with one engine, in one call or in several.

The engine contract gives no finish reason, so the tokens decide: a step is complete when its rules find an end in what is
written so far; anything shorter means *continue* (draft tokens may be dropped, calls may come back short). A call also
comes back short where its first tokens complete a stop word that begins in the prefix; whether the step ends there, its own text
says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.engine import Engine, EngineCall, Generation, Role, Sampling, one_hot_logits
from lr_backend.errors import EngineUnavailable
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.seeds import Seeds
from lr_backend.propose.growing import GrowingText
from lr_backend.propose.proposal import NOTHING, DraftSource, Proposal
from lr_backend.steps.rules import Ending
from lr_backend.steps.step import Step
from lr_backend.steps.tokens import num_equal

MAX_EMPTY_ANSWERS = 2
"""An engine that returns nothing this often in a row is taken for dead: something else keeps ending the call."""


@dataclass(frozen=True)
class DraftTokens:
    """How a writer speculates by tokens.

    Attributes:
        most: draft tokens in one verification.
        one_hot_vocab: width of one-hot draft logits to send along, 0 for none.
    """

    source: DraftSource
    most: int
    one_hot_vocab: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """What is written where: behind ``prefix``, up to ``ending``; ``sibling`` draws with noise of its own."""

    prefix: IntArray
    ending: Ending
    sibling: int


@dataclass
class StepWriter:
    """Writes steps of one request with one role's engine.

    Attributes:
        request_id: prefix of every call's id; ids in flight are unique.
        draft_tokens: None: there are none.
        num_engine_drafts: tokens that the engine may draft by itself for each of its passes.
    """

    engine: Engine
    role: Role
    sampling: Sampling
    seeds: Seeds
    request_id: str
    ledger: Ledger
    draft_tokens: DraftTokens | None = None
    num_engine_drafts: int = 0
    _calls: count[int] = field(default_factory=count)

    async def write(self, prefix: IntArray, max_tokens: int, ending: Ending, *, sibling: int = 0, drafts: bool = False) -> Step:
        """The step after ``prefix``, at most ``max_tokens`` long, in one call if nothing cuts it short.

        Args:
            drafts: the engine may draft by itself.

        Raises:
            EngineError: the engine failed.
        """
        place = _Place(prefix, ending, sibling)
        written: list[int] = []
        num_empty = 0
        while (step := ending.cut(written, max_tokens)) is None:
            room = max_tokens - len(written)
            generation = await self._call(place, written, room, drafts=drafts)
            num_empty = self._seen(generation, num_empty)
            written.extend(generation.token_ids)
        return step

    async def draft(
        self,
        prefix: IntArray,
        max_tokens: int,
        ending: Ending,
        text: GrowingText,
        *,
        sibling: int,
        sampling: Sampling,
        tokens_a_call: int | None = None,
        scored: bool = False,
    ) -> Step:
        """The step, into a text that others read meanwhile.

        Args:
            tokens_a_call: so many at a time; None: all in one call.
            sampling: instead of the writer's own.
            scored: ask for the step's log-probability.
        """
        place = _Place(prefix, ending, sibling)
        log_probs: list[float] = []
        num_empty = 0
        try:
            while (step := ending.cut(text.ids, max_tokens)) is None:
                room = min(tokens_a_call or max_tokens, max_tokens - len(text.ids))
                generation = await self._call(place, text.ids, room, sampling=sampling, scored=scored)
                num_empty = self._seen(generation, num_empty)
                log_probs.extend(generation.log_probs)
                text.extend(generation.token_ids)
        finally:
            text.end()
        count = len(step.ids)
        return replace(step, log_prob=math.fsum(log_probs[:count]) if scored and len(log_probs) >= count else None)

    async def speculate(
        self, prefix: IntArray, max_tokens: int, ending: Ending, *, sibling: int = 0, drafted: GrowingText | None = None
    ) -> Step:
        """The step, with draft tokens: a call for each verification.

        Args:
            drafted: the drafted step that continues the same prefix, as far as it is written; None: there is none.
        """
        known = self.draft_tokens
        assert known is not None

        def room_after(ids: Sequence[int]) -> int:
            return max_tokens - len(ids) if ending.cut(ids, max_tokens) is None else 0

        place = _Place(prefix, ending, sibling)
        written: list[int] = []
        num_empty = 0
        async with known.source.step(prefix, ending.stop_words, room_after, drafted) as drafts:
            while (step := ending.cut(written, max_tokens)) is None:
                room = max_tokens - len(written)
                most = min(known.most, room - 1)  # one token of the budget is the target's own
                proposal = await drafts.next(written, most) if most > 0 else NOTHING
                proposed = self._until_end(proposal, written, max_tokens, ending)
                budget = len(proposed) + 1 if proposed else min(room, proposal.plain_tokens or room)
                generation = await self._call(place, written, budget, proposed=proposed)
                num_empty = self._seen(generation, num_empty)
                if proposed:
                    num_accepted = num_equal(proposed, generation.token_ids)
                    self.ledger.drafts_verified(len(proposed), num_accepted, begins_step=not written)
                    drafts.verified(proposed, num_accepted)
                written.extend(generation.token_ids)
        return step

    def _seen(self, generation: Generation, num_empty: int) -> int:
        """Empty answers in a row."""
        num_empty = 0 if generation.token_ids else num_empty + 1
        if num_empty >= MAX_EMPTY_ANSWERS:
            raise EngineUnavailable(f"the {self.role.value} engine keeps answering with no tokens")
        return num_empty

    @staticmethod
    def _until_end(proposal: Proposal, written: Sequence[int], max_tokens: int, ending: Ending) -> tuple[int, ...]:
        """Draft tokens at most up to the first end: nothing is proposed past one."""
        proposed = proposal.token_ids
        ended = ending.cut([*written, *proposed], max_tokens) if proposed else None
        return proposed if ended is None else proposed[: len(ended.ids) - len(written)]

    async def _call(
        self,
        place: _Place,
        written: Sequence[int],
        budget: int,
        *,
        proposed: tuple[int, ...] = (),
        sampling: Sampling | None = None,
        scored: bool = False,
        drafts: bool = False,
    ) -> Generation:
        prefix = place.prefix
        context = np.concatenate([prefix, np.asarray(written, dtype=np.int32)]) if written else prefix
        sampling = sampling or self.sampling
        draft_ids = np.asarray(proposed, dtype=np.int32) if proposed else None
        vocab_size = self.draft_tokens.one_hot_vocab if self.draft_tokens is not None and not sampling.greedy else 0
        call = EngineCall(
            request_id=f"{self.request_id}/{self.role.value}/{next(self._calls)}",
            input_ids=context,
            max_new_tokens=budget,
            sampling=sampling,
            seed=self.seeds.step(len(prefix), len(context), self.role, place.sibling),
            stop_words=place.ending.stop_words,
            draft_ids=draft_ids,
            draft_logits=one_hot_logits(draft_ids, vocab_size) if draft_ids is not None and vocab_size else None,
            return_log_probs=scored,
            num_draft_tokens=self.num_engine_drafts if drafts else 0,
        )
        return await self.engine.generate(call)
