"""A server whose costs and whose draft change while it serves, on the virtual clock: what a policy must keep up with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lr_backend.engine import EngineCall
from lr_backend.loop.answer import Outcome
from lr_backend.policy.policy import Learned
from lr_backend.testing import Script, run_virtual
from tests.support.world import CONFIG, FIRST_LETTER, LETTERS, NEWLINE, World, chance, storyteller

TOKEN_S = 0.01
NUM_LETTERS = len(LETTERS)
Result = TypeVar("Result")


@dataclass
class Conditions:
    """What may change from one request to the next. Times are in those of one token of the target alone.

    Attributes:
        liked: share of the drafted steps that the judge likes where their words differ.
        agreement: chance that the draft's next token is the target's.
        drafted: a token of the draft.
        verdict: a verdict.
        verification: a pass of the target that verifies draft tokens.
        companion: by which share of a token each further sequence in flight slows the target down.
    """

    liked: float = 0.8
    agreement: float = 0.9
    drafted: float = 0.1
    verdict: float = 0.5
    verification: float = 1.2
    companion: float = 0.0


@dataclass
class Server:
    """Answers questions and learns from each; ``salt`` says which server, hence which texts."""

    salt: int = 0
    conditions: Conditions = field(default_factory=Conditions)
    num_steps: int = 30
    world: World = field(init=False)
    num_asked: int = 0

    def __post_init__(self) -> None:
        target = storyteller(self.salt, num_steps=self.num_steps, break_rate=0.12)
        self.world = World.of(target, self._draft(target), lambda first, second: self._likes(first, second))
        limits = CONFIG.limits.model_copy(update={"max_step_tokens": 40, "max_tokens": 2000})
        self.world.config = self.world.config.model_copy(update={"limits": limits})
        self.world.target.delay, self.world.draft.delay = self._target_s, self._draft_s
        self.world.judge.delay = lambda call, num_tokens: TOKEN_S * self.conditions.verdict

    def _draft(self, target: Script) -> Script:
        """Writes some letters of the target's differently, and nothing else."""

        def next_token(context: tuple[int, ...], seed: int) -> int:
            token = target(context, seed)
            letter = token - FIRST_LETTER
            if not 0 <= letter < NUM_LETTERS or chance("agree", self.salt, context) < self.conditions.agreement:
                return token
            return FIRST_LETTER + (letter + 1 + int((NUM_LETTERS - 1) * chance("other", context))) % NUM_LETTERS

        return next_token

    def _likes(self, first: str, second: str) -> bool:
        return chance("like", self.salt, first, second) < self.conditions.liked

    def _target_s(self, call: EngineCall, num_passes: int) -> float:
        crowd = 1.0 + self.conditions.companion * (len(self.world.target.in_flight) - 1)
        return TOKEN_S * num_passes * crowd * (self.conditions.verification if call.draft_ids is not None else 1.0)

    def _draft_s(self, call: EngineCall, num_tokens: int) -> float:
        return TOKEN_S * num_tokens * self.conditions.drafted

    async def answer(self, num_clients: int = 1, num_questions: int = 1, **fields: Any) -> float:
        """Seconds a token of one request: so many clients ask so many questions each, one after another."""
        if self.world.learned is None:
            self.world.learned = Learned(asyncio.get_running_loop().time)
        first, self.num_asked = self.num_asked, self.num_asked + num_clients * num_questions
        outcomes: list[Outcome] = []

        async def client(number: int) -> None:
            for index in range(num_questions):
                outcomes.append(await self._one(first + number * num_questions + index, fields))

        await asyncio.gather(*map(client, range(num_clients)))
        return sum(one.usage.latency_s for one in outcomes) / sum(one.usage.completion_tokens for one in outcomes)

    async def _one(self, number: int, fields: dict[str, Any]) -> Outcome:
        prompt = (FIRST_LETTER + number // NUM_LETTERS % NUM_LETTERS, FIRST_LETTER + number % NUM_LETTERS, NEWLINE)
        asked = {"mode": "auto", "max_depth": 6, "max_tokens": 2000, "stream": False, **fields}
        return await self.world.answer(prompt, f"{number}", **asked)


def served(server: Server, work: Callable[[Server], Coroutine[Any, Any, Result]]) -> Result:
    """What a server's clients see."""
    return run_virtual(work(server))
