"""The real step loop over engines that only take time: what lookahead would gain, before anything is deployed.

Nothing of the loop is modelled: it runs as it is, on a virtual clock. Modelled are the engines: iterations of in-flight batches
whose time grows with the batch, on cores that the roles share; and the texts: steps of given lengths, of which a given share is
accepted. Units are free: only ratios of times matter.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean

import numpy as np

from lr_backend.config import Limits, LoopConfig, Timeouts
from lr_backend.contract import IntArray, decode_stop_words
from lr_backend.engine import EngineCall, EngineTiming, Generation
from lr_backend.loop.loop import Engines, LookaheadLoop, Models, Outcome
from lr_backend.loop.pace import Pace
from lr_backend.loop.steps import StepRules
from lr_backend.loop.tracing import build_trace
from lr_backend.request import DepthPolicy, LookaheadRequest, Mode, Usage
from lr_backend.testing import WordTokenizer, run_virtual
from lr_backend.tokens import num_equal
from lr_backend.trace.schema import Trace
from lr_backend.verify.judge_prompt import ALIGNED, UNALIGNED, JudgePrompt

END, THINK, CLOSE, BREAK, OWN, LIKE, UNLIKE = range(7)
TOKENIZER = WordTokenizer(["<end>", "<think>", "</think>", "\n\n", "①", "②", "③"])
"""The target's steps are of ``OWN``, and so are the draft's where they are the same; others of ``LIKE`` where they mean the same,
and of ``UNLIKE`` where not."""
JUDGE_TOKENIZER = WordTokenizer([UNALIGNED, ALIGNED, "①", "②", "③"])
JUDGE_UNLIKE = 4
PROMPT = (OWN, OWN)
MAX_DEPTH, MAX_WIDTH = 16, 8
FOREVER_S = 1e12


@dataclass(frozen=True)
class Scenario:
    """What is to be predicted for. Times are in any one unit.

    Attributes:
        acceptance_rate: alpha, share of drafted steps whose meaning is the target's, in [0, 1].
        sibling_acceptance_rate: the same of a further candidate for a position, where those before it are not accepted. None: as
            if candidates had nothing in common.
        exact_rate: share of drafted steps that are the target's own word for word, and need no verdict; part of acceptance_rate.
        length_bias: by how much less than acceptance_rate a step of twice the mean length is accepted; long steps hold more that
            may differ.
        target_token_s, draft_token_s: a decode iteration with one sequence.
        verdict_s: a verdict of the judge.
        crowding: how much longer an iteration takes for each further sequence, as a share of its time with one. 0: parallel
            sequences are free.
        call_s: what one engine call takes beside its tokens: its hand-over.
        loop_s: what the step loop takes before it makes a call. It is one thread for all requests, so this goes in turns.
        target_prompt_s, draft_prompt_s: a token of a prompt that the role has not computed yet.
        num_cores: how many compute at the same time at full speed, of the roles and of calls beside their tokens; more share.
            1.5: two take a third longer than one alone. None: each role has its own device, and a call holds nobody up.
        step_tokens: mean length of a step.
        step_spread: steps are as long as that, give or take this share, uniformly.
        num_steps: steps of an answer.
        answer_tokens: tokens after the reasoning, which the target writes alone.
    """

    acceptance_rate: float
    sibling_acceptance_rate: float | None = None
    exact_rate: float = 0.0
    length_bias: float = 0.0
    target_token_s: float = 1.0
    draft_token_s: float = 0.1
    verdict_s: float = 0.0
    crowding: float = 0.0
    call_s: float = 0.0
    loop_s: float = 0.0
    target_prompt_s: float = 0.0
    draft_prompt_s: float = 0.0
    num_cores: float | None = None
    step_tokens: int = 24
    step_spread: float = 0.0
    num_steps: int = 60
    answer_tokens: int = 0

    def __post_init__(self) -> None:
        rules = {
            "acceptance_rate": 0.0 <= self.acceptance_rate <= 1.0,
            "sibling_acceptance_rate": self.sibling_acceptance_rate is None or 0.0 <= self.sibling_acceptance_rate <= 1.0,
            "exact_rate": 0.0 <= self.exact_rate <= 1.0,
            "length_bias": -1.0 <= self.length_bias <= 1.0,
            "target_token_s": self.target_token_s > 0.0,
            "draft_token_s": self.draft_token_s > 0.0,
            "verdict_s": self.verdict_s >= 0.0,
            "crowding": self.crowding >= 0.0,
            "call_s": self.call_s >= 0.0,
            "loop_s": self.loop_s >= 0.0,
            "target_prompt_s": self.target_prompt_s >= 0.0,
            "draft_prompt_s": self.draft_prompt_s >= 0.0,
            "num_cores": self.num_cores is None or self.num_cores >= 1,
            "step_tokens": self.step_tokens >= 2,
            "step_spread": 0.0 <= self.step_spread < 1.0,
            "num_steps": self.num_steps >= 1,
            "answer_tokens": self.answer_tokens >= 0,
        }
        if bad := [name for name, valid in rules.items() if not valid]:
            raise ValueError(", ".join(f"{name}={getattr(self, name)} is out of range" for name in bad))


@dataclass(frozen=True)
class Policy:
    """How requests are answered, and how many at a time."""

    mode: Mode = Mode.LR
    max_depth: int = 4
    width: int = 1
    depth: DepthPolicy = DepthPolicy.FIXED
    num_requests: int = 1


@dataclass(frozen=True)
class Prediction:
    """What a policy takes.

    Attributes:
        latency_s: mean over the requests.
        target_batch: mean number of sequences in a target iteration.
        traces: of each request, where traces were asked for.
    """

    latency_s: float
    usages: tuple[Usage, ...]
    target_batch: float
    traces: tuple[Trace, ...] = ()

    @property
    def step_acceptance_rate(self) -> float | None:
        """Over all requests, as :class:`Usage` has it."""
        rates = [usage.step_acceptance_rate for usage in self.usages if usage.step_acceptance_rate is not None]
        return fmean(rates) if rates else None


class Cores:
    """What roles compute on and calls are handed over by: with more busy than there are, each slows down alike."""

    SLICES = 4
    """Of a call's time, after each of which it is seen how many are busy by then."""

    def __init__(self, num_cores: float | None) -> None:
        self._num_cores = num_cores
        self._num_busy = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One more computes."""
        self._num_busy += 1
        try:
            yield
        finally:
            self._num_busy -= 1

    def slowdown(self) -> float:
        return 1.0 if self._num_cores is None else max(1.0, self._num_busy / self._num_cores)

    async def work(self, seconds: float) -> None:
        """Take so long, or longer where others are busy."""
        with self.busy():
            for _ in range(self.SLICES):
                await asyncio.sleep(seconds / self.SLICES * self.slowdown())


@dataclass(eq=False)
class _Sequence:
    """What is left of one call, in iterations, and since when it has taken part in any."""

    num_passes: int
    begun_s: float = 0.0
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


Writer = Callable[[IntArray, EngineCall], Sequence[int]]
"""(token ids so far, the call) -> the tokens that come next, at least one; a function of its arguments alone."""


class LoopThread:
    """What makes all engine calls, one after another; each takes it so long."""

    def __init__(self, cores: Cores, seconds: float) -> None:
        self._cores = cores
        self._seconds = seconds
        self._turn = asyncio.Lock()

    async def make_call(self) -> None:
        if self._seconds:
            async with self._turn:
                await self._cores.work(self._seconds)


class _Computed:
    """What an engine has computed: the longest beginning of a context that it need not compute again."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []  # in order, so that contexts that begin alike are neighbours

    def add(self, context: IntArray) -> None:
        insort(self._known, context.tolist())

    def num_reused(self, context: IntArray) -> int:
        wanted = context.tolist()
        place = bisect_left(self._known, wanted)
        return max((num_equal(known, wanted) for known in self._known[max(0, place - 1) : place + 1]), default=0)


class BatchingEngine:
    """An engine that runs iterations for all calls in flight; calls join and leave between two. Prompts are computed beside
    them, one after another."""

    def __init__(
        self,
        writer: Writer,
        iteration_s: Callable[[int], float],
        cores: Cores,
        loop: LoopThread,
        call_s: float = 0.0,
        prompt_s: float = 0.0,
    ) -> None:
        self._writer = writer
        self._loop = loop
        self._iteration_s = iteration_s
        self._cores = cores
        self._call_s = call_s
        self._prompt_s = prompt_s
        self._computed = _Computed()
        self._prompts = asyncio.Lock()
        self._batch: list[_Sequence] = []
        self._runner: asyncio.Task[None] | None = None
        self.num_iterations = 0
        self.num_rows = 0

    async def generate(self, call: EngineCall) -> Generation:
        generation = self._write(call)
        await self._loop.make_call()
        if self._call_s:
            await self._cores.work(self._call_s)
        waited_s, num_reused = await self._prefill(call.input_ids) if self._prompt_s else (0.0, 0)
        sequence = _Sequence(1 if call.draft_ids is not None else len(generation.token_ids))
        clock = asyncio.get_running_loop().time
        joined_s = clock()
        self._batch.append(sequence)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._iterate())
        try:
            await sequence.done
        finally:
            if sequence in self._batch:
                self._batch.remove(sequence)
        if self._prompt_s:
            self._computed.add(np.concatenate([call.input_ids, np.asarray(generation.token_ids[:-1], dtype=np.int32)]))
        return replace(generation, num_reused_tokens=num_reused, timing=EngineTiming(waited_s + sequence.begun_s - joined_s))

    async def _prefill(self, context: IntArray) -> tuple[float, int]:
        """Have what is new of a prompt computed; how long that had to wait, and how much was not new."""
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        await self._prompts.acquire()
        waited_s, num_reused = clock() - asked_s, min(self._computed.num_reused(context), len(context) - 1)
        # Once begun it is computed to its end, whether anybody still wants it or not.
        await asyncio.shield(asyncio.create_task(self._compute_prompt(context, len(context) - num_reused)))
        return waited_s, num_reused

    async def _compute_prompt(self, context: IntArray, num_new: int) -> None:
        await self._cores.work(self._prompt_s * num_new)
        self._computed.add(context)
        self._prompts.release()

    async def close(self) -> None:
        """Wait until the last iteration is over."""
        if self._runner is not None:
            await self._runner

    def _write(self, call: EngineCall) -> Generation:
        """All that the call brings: up to a stop word, a draft that is wrong, or its budget."""
        stops = {word[-1] for word in decode_stop_words(call.stop_words)} if call.stop_words is not None else set()
        drafts = [] if call.draft_ids is None else call.draft_ids.tolist()
        written: list[int] = []
        while True:
            context = np.concatenate([call.input_ids, np.asarray(written, dtype=np.int32)]) if written else call.input_ids
            for token in self._writer(context, call):
                written.append(token)
                wrong = drafts and (len(written) > len(drafts) or token != drafts[len(written) - 1])
                if wrong or token in stops or len(written) == call.max_new_tokens:
                    return Generation(tuple(written), len(drafts), max(0, len(written) - 1) if drafts else 0)

    async def _iterate(self) -> None:
        now_s = asyncio.get_running_loop().time
        with self._cores.busy():
            while self._batch:
                running = list(self._batch)
                for sequence in running:
                    sequence.begun_s = sequence.begun_s or now_s()
                self.num_iterations += 1
                self.num_rows += len(running)
                await asyncio.sleep(self._iteration_s(len(running)) * self._cores.slowdown())
                for sequence in running:
                    sequence.num_passes -= 1
                    if sequence.num_passes <= 0 and not sequence.done.done():
                        sequence.done.set_result(None)
                        if sequence in self._batch:
                            self._batch.remove(sequence)
                await asyncio.sleep(0)  # whoever was answered may join the next iteration


def simulate(scenario: Scenario, policy: Policy, seed: int = 0, *, trace: bool = False) -> Prediction:
    """Answer ``policy.num_requests`` requests at once, each with texts of its own; ``trace`` keeps their traces.

    Raises:
        ValueError: a policy that the loop would refuse.
    """
    if not 0 <= policy.max_depth <= MAX_DEPTH or not 1 <= policy.width <= MAX_WIDTH or policy.num_requests < 1:
        raise ValueError(f"{policy} is out of range")
    return run_virtual(_answer_all(scenario, policy, seed, trace))


def speedup(scenario: Scenario, policy: Policy, seed: int = 0) -> float:
    """Latency of the target alone over that of ``policy``, with the same texts and as many requests."""
    alone = Policy(Mode.AR, num_requests=policy.num_requests)
    return simulate(scenario, alone, seed).latency_s / simulate(scenario, policy, seed).latency_s


async def _answer_all(scenario: Scenario, policy: Policy, seed: int, trace: bool) -> Prediction:
    cores = Cores(scenario.num_cores)
    thread = LoopThread(cores, scenario.loop_s)

    def engine(writer: Writer, one_s: float, prompt_s: float = 0.0) -> BatchingEngine:
        def iteration_s(num: int) -> float:
            return one_s * (1.0 + scenario.crowding * (num - 1))

        return BatchingEngine(writer, iteration_s, cores, thread, scenario.call_s, prompt_s)

    story = _Story(scenario, seed)
    engines = Engines(
        engine(story.target, scenario.target_token_s, scenario.target_prompt_s),
        engine(story.draft, scenario.draft_token_s, scenario.draft_prompt_s),
        engine(story.judge, scenario.verdict_s),
    )
    longest = int(scenario.step_tokens * (1.0 + scenario.step_spread)) + 2
    max_tokens = longest * (scenario.num_steps + 2) + scenario.answer_tokens
    config = _config(longest, max_tokens)
    pace = Pace(asyncio.get_running_loop().time)
    fields = {"text_input": "?", "max_tokens": max_tokens, "stream": False, "temperature": 0.6, "seed": seed, "trace": trace}
    request = LookaheadRequest.parse(
        {**fields, "mode": policy.mode, "max_depth": policy.max_depth, "width": policy.width, "depth": policy.depth}
    )

    async def answer(number: int) -> Outcome:
        prompt = np.asarray([*PROMPT, *[OWN] * number, BREAK], dtype=np.int32)  # prompts differ, and so do the texts
        loop = LookaheadLoop(request, prompt, f"{number}", engines, MODELS, config, lambda committed: None, pace)
        return await loop.run()

    outcomes = await asyncio.gather(*(answer(number) for number in range(policy.num_requests)))
    for one in (engines.target, engines.draft, engines.judge):
        await one.close()
    target = engines.target
    assert isinstance(target, BatchingEngine)
    batch = target.num_rows / max(1, target.num_iterations)
    usages = tuple(outcome.usage for outcome in outcomes)
    traces = tuple(
        build_trace(request, f"{number}", outcome.finish_reason, outcome.usage, outcome.ledger)
        for number, outcome in enumerate(outcomes if trace else ())
    )
    return Prediction(fmean(usage.latency_s for usage in usages), usages, batch, traces)


class _Story:
    """Who writes what: functions of the text so far, so that they do not depend on who asks when."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed

    def target(self, context: IntArray, call: EngineCall) -> Sequence[int]:
        closed = np.flatnonzero(context == CLOSE)
        if not len(closed):
            return self._step(context, OWN)
        num_written = len(context) - 1 - int(closed[0])
        return (*[OWN] * (self._scenario.answer_tokens - num_written), END)

    def draft(self, context: IntArray, call: EngineCall) -> Sequence[int]:
        if context[-1] in (LIKE, UNLIKE):
            return self._step(context, int(context[-1]))
        scenario, chance = self._scenario, _chance(self._seed, "like", call.seed)
        # The first candidate is the draft's best guess, the others are drawn.
        further = scenario.sibling_acceptance_rate
        rate = scenario.acceptance_rate if call.sampling.greedy or further is None else further
        longer = len(self._step(context, OWN)) / scenario.step_tokens - 1.0
        like = chance < rate - scenario.length_bias * longer
        return self._step(context, OWN if like and chance < scenario.exact_rate else LIKE if like else UNLIKE)

    def judge(self, context: IntArray, call: EngineCall) -> Sequence[int]:
        return (int(JUDGE_UNLIKE not in context),)

    def _step(self, context: IntArray, word: int) -> Sequence[int]:
        """The rest of the step that ``context`` is in; the last one closes the reasoning."""
        breaks = np.flatnonzero(context == BREAK)
        end = BREAK if len(breaks) < self._scenario.num_steps else CLOSE
        start = int(breaks[-1]) + 1
        spread, mean = self._scenario.step_spread, self._scenario.step_tokens
        length = round(mean * (1.0 + spread * (2.0 * _chance(self._seed, "length", start) - 1.0)))
        opening = [THINK] if len(breaks) == 1 else []
        step = [*opening, *[word] * (length - 1 - len(opening)), end]
        return step[len(context) - start :] or (end,)


def _chance(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "big") / 2**56


def _config(longest_step: int, max_tokens: int) -> LoopConfig:
    limits = Limits(
        max_prompt_tokens=1 << 16,
        max_tokens=max_tokens,
        max_depth=MAX_DEPTH,
        max_width=MAX_WIDTH,
        max_step_tokens=max(4, longest_step),
        max_in_flight_requests=1 << 16,
    )
    timeouts = Timeouts(target_s=FOREVER_S, draft_s=FOREVER_S, judge_s=FOREVER_S, request_s=FOREVER_S)
    return LoopConfig(
        tokenizer_dir=Path(), judge_tokenizer_dir=Path(), markers=(), limits=limits, timeouts=timeouts, draft_temperature=0.0
    )


MODELS = Models(
    StepRules.from_tokenizer(TOKENIZER, [END]), TOKENIZER, JudgePrompt.from_tokenizer(JUDGE_TOKENIZER), JUDGE_TOKENIZER
)
