"""A small world of scripted models in which every property of the loop can be stated.

The target is a next-token function of the prefix (and of the seed, where sampled). The draft is the target with changes; the
judge is a rule over the two texts. Steps, end of reasoning and end of the answer occur where hashes say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from lr_backend.audit.desk import AuditDesk
from lr_backend.clock import running_clock
from lr_backend.config import Limits, LoopConfig, Timeouts
from lr_backend.engine import EngineCall, Generation
from lr_backend.loop.answer import Committed, Outcome
from lr_backend.loop.assemble import Engines, Models, Server, assemble
from lr_backend.policy.policy import Learned
from lr_backend.request import LookaheadRequest
from lr_backend.steps.rules import StepRules
from lr_backend.testing import Script, ScriptedEngine
from lr_backend.verify.judge_prompt import (
    ALIGNED,
    STEP_1_CLOSE,
    STEP_1_OPEN,
    STEP_2_CLOSE,
    STEP_2_OPEN,
    UNALIGNED,
    VERDICT_PREFILL,
    JudgePrompt,
)
from tests.support.word_tokenizer import WordTokenizer

END, THINK, CLOSE, BREAK, DOT_BREAK, NEWLINE, TOOL = range(7)
LETTERS = "①②③④⑤⑥⑦⑧⑨⑩"
TOKENIZER = WordTokenizer(
    ["<end>", "<think>", "</think>", "\n\n", ".\n\n", "\n", "<tool>", *LETTERS, ".\n"], special=frozenset({"<end>"})
)
FIRST_LETTER = 7
DOT_NEWLINE = FIRST_LETTER + len(LETTERS)
JUDGE_TOKENIZER = WordTokenizer(
    [
        UNALIGNED,
        ALIGNED,
        STEP_1_OPEN,
        STEP_1_CLOSE,
        STEP_2_OPEN,
        STEP_2_CLOSE,
        VERDICT_PREFILL,
        "?",
        "<end>",
        *TOKENIZER.words[1:DOT_NEWLINE],  # that one would be taken from the prompt's own words
    ],
    special=frozenset({"<end>"}),
)
PROMPT = (FIRST_LETTER, FIRST_LETTER + 1, NEWLINE)
RULES = StepRules.from_tokenizer(TOKENIZER, [END], markers=["<tool>"])
MODELS = Models(RULES, TOKENIZER, JudgePrompt.from_tokenizer(JUDGE_TOKENIZER), JUDGE_TOKENIZER)
BREAKS = {token: num for token, piece in RULES.pieces.items() if (num := piece.count("\n\n"))}
CONFIG = LoopConfig(
    tokenizer_dir="unused",
    judge_tokenizer_dir="unused",
    markers=("<tool>",),
    engine_drafts=True,
    limits=Limits(max_step_tokens=12, max_tokens=400, max_depth=16, max_width=8, max_draft_len=16),
    timeouts=Timeouts(target_s=1000, draft_s=1000, judge_s=1000, request_s=10000),
)

Alike = Callable[[str, str], bool]


def chance(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone, of which there are two or more."""
    told = ", ".join(map(_shown, parts))
    return int.from_bytes(blake2b(f"({told})".encode(), digest_size=7).digest(), "big") / 2**56


_CONTEXTS: dict[tuple[Any, ...], str] = {}
_MAX_CONTEXTS = 256


def _shown(part: object) -> str:
    """Its ``repr``. Contexts are long, a token has several chances, and the next one's context is one token longer."""
    if not isinstance(part, tuple):
        return repr(part)
    told = _CONTEXTS.get(part)
    if told is None:
        before = _CONTEXTS.get(part[:-1]) if len(part) > 2 else None
        told = repr(part) if before is None else f"{before[:-1]}, {part[-1]!r})"
        if len(_CONTEXTS) >= _MAX_CONTEXTS:
            _CONTEXTS.clear()
        _CONTEXTS[part] = told
    return told


def storyteller(
    salt: int, *, num_steps: int = 6, break_rate: float = 0.2, tool_rate: float = 0.0, sampled: bool = False
) -> Script:
    """A target that thinks in ``num_steps`` steps or so, closes the reasoning, answers and ends.

    Where ``sampled``, a token follows from the context and from the noise that the seed gives its position.
    """

    def word(draw: float) -> int:
        return FIRST_LETTER + int(draw * len(LETTERS))

    def next_token(context: tuple[int, ...], seed: int) -> int:
        written = context[len(PROMPT) :]
        noise = (seed, len(context)) if sampled else ()
        draw = chance(salt, context, noise)
        if not written:
            return THINK
        if CLOSE in written:
            return END if chance("end", salt, context) < 0.3 else word(draw)
        breaks = sum(num * written.count(token) for token, num in BREAKS.items())
        if chance("break", salt, context, noise) < break_rate:
            if breaks >= num_steps:
                return CLOSE
            if chance("tool", salt, context) < tool_rate:
                return TOOL
            return (BREAK, DOT_BREAK, NEWLINE)[int(draw * 3)]
        return word(draw)

    return next_token


def imitator(target: Script, salt: int, agreement: float, *, sampled: bool = False) -> Script:
    """A draft that writes the target's token with probability ``agreement`` and another one otherwise."""

    def next_token(context: tuple[int, ...], seed: int) -> int:
        token = target(context, seed)
        noise = (seed, len(context)) if sampled else ()
        if chance("agree", salt, context, noise) < agreement:
            return token
        return (BREAK, DOT_BREAK, CLOSE, END, TOOL, *range(FIRST_LETTER, FIRST_LETTER + len(LETTERS)))[
            int(chance("other", salt, context, noise) * (5 + len(LETTERS)))
        ]

    return next_token


def steps_of_judge_prompt(context: tuple[int, ...]) -> tuple[str, str]:
    """The two step texts in a judge prompt."""
    text = JUDGE_TOKENIZER.decode(context)
    first = text.split(STEP_1_OPEN)[1].split(STEP_1_CLOSE)[0]
    second = text.split(STEP_2_OPEN)[1].split(STEP_2_CLOSE)[0]
    return first, second


def judge_script(alike: Alike) -> Script:
    return lambda context, seed: int(alike(*steps_of_judge_prompt(context)))


@dataclass
class FickleEngine(ScriptedEngine):
    """Answers with fewer tokens than were asked for and verifies fewer draft tokens than were sent, as engines may.

    How many follows from the call's own fields.
    """

    salt: int = 0

    def _write(self, call: EngineCall) -> Generation:
        draw = chance("fickle", self.salt, len(call.input_ids), call.seed, call.max_new_tokens)
        if call.draft_ids is not None:
            kept = int(draw * (len(call.draft_ids) + 1))
            drafts = call.draft_ids[:kept] if kept else None
            return super()._write(replace(call, draft_ids=drafts, max_new_tokens=kept + 1))
        whole = super()._write(call)
        kept = 1 + int(draw * len(whole.token_ids)) if draw < 0.5 else len(whole.token_ids)
        return replace(whole, token_ids=whole.token_ids[:kept], log_probs=whole.log_probs[:kept])


@dataclass
class World:
    """Three scripted engines and what a client received from a loop over them."""

    target: ScriptedEngine
    draft: ScriptedEngine
    judge: ScriptedEngine
    config: LoopConfig = CONFIG
    models: Models = MODELS
    received: list[Committed] = field(default_factory=list)
    learned: Learned | None = None
    audits: AuditDesk | None = None

    @classmethod
    def of(cls, target: Script, draft: Script, alike: Alike = lambda a, b: False, **config: Any) -> World:
        engines = [ScriptedEngine(target, draft_script=draft), ScriptedEngine(draft), ScriptedEngine(judge_script(alike))]
        return cls(*engines, config=CONFIG.model_copy(update=config))

    @property
    def engines(self) -> list[ScriptedEngine]:
        return [self.target, self.draft, self.judge]

    def fresh(self) -> World:
        """The same models with nothing recorded."""
        engines = [
            replace(engine, calls=[], cancelled=[], in_flight=set(), max_in_flight=0, total_tokens=0) for engine in self.engines
        ]
        return World(*engines, config=self.config, models=self.models)

    def shuffled(self, salt: int, spread: float = 10.0) -> World:
        """The same models, each call taking its own random time."""
        world = self.fresh()
        for engine in world.engines:

            def delay(call: EngineCall, num_tokens: int) -> float:
                return 0.001 + spread * chance("delay", salt, call.request_id) ** 3

            engine.delay = delay
        return world

    def fickle(self, salt: int) -> World:
        """The same models behind engines that do not do all that they are asked to."""
        world = self.fresh()
        for name in ("target", "draft"):
            engine = getattr(world, name)
            setattr(
                world, name, FickleEngine(engine.script, engine.delay, engine.fail, draft_script=engine.draft_script, salt=salt)
            )
        return world

    async def answer(self, prompt: tuple[int, ...] = PROMPT, request_id: str = "request", **fields: Any) -> Outcome:
        request = LookaheadRequest.parse({"text_input": "?", "max_tokens": 200, "seed": 0, **fields})
        learned = self.learned or Learned(running_clock())
        server = Server(Engines(self.target, self.draft, self.judge), self.models, self.config, learned, self.audits)
        loop = assemble(request, np.asarray(prompt, dtype=np.int32), request_id, server, self.received.append)
        return await loop.run()

    @property
    def text(self) -> str:
        return "".join(committed.text for committed in self.received)

    def assert_idle(self) -> None:
        assert not any(engine.in_flight for engine in self.engines)
