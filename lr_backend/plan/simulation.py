"""The real step loop over engines that only take time: what lookahead would gain, before anything is deployed.

Nothing of the loop is modelled: it runs as it is, on a virtual clock. Texts follow a workload, engines a machine: timelines of
iterations, as in the paced engine. Units of time are free where the machine is a linear one: only ratios matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TypeVar

from lr_backend.clock import run_virtual
from lr_backend.config import Limits, LoopConfig, Timeouts
from lr_backend.contract import IntArray
from lr_backend.emulated.texts import DRAFT_TEMPERATURE, ScriptedSource, Texts
from lr_backend.emulated.virtual import LoopThread, SharedCards, VirtualEngine
from lr_backend.emulated.vocabulary import ALIGNED, END, VOCABULARY
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.machine import LinearTimes, Machine, Place
from lr_backend.loop.answer import Outcome
from lr_backend.loop.assemble import Engines, Models, Server, assemble
from lr_backend.loop.tracing import build_trace
from lr_backend.policy.policy import Learned
from lr_backend.request import LookaheadRequest, Mode, Usage
from lr_backend.steps.rules import StepRules
from lr_backend.trace.schema import Trace
from lr_backend.verify.judge_prompt import JudgePrompt, readable_step_tokens

MAX_DEPTH, MAX_WIDTH, MAX_DRAFT_LEN = 16, 8, 64
FOREVER_S = 1e12
CALL_CPU_S, CALL_CPU_S_OF_LR = 0.75e-3, 1.7e-3
"""Processor time of the step loop's process for an engine call through Triton: 41.5 ms for the 55 calls of a step in ``lr_sd``,
and 10.3 for 6 in ``lr``, whose calls bring whole steps (``python -m bench loop_limit``, on an EPYC, Zen 3). A faster core takes
less."""
Result = TypeVar("Result")
EngineOf = Callable[[Role, Place, ScriptedSource, SharedCards, LoopThread], VirtualEngine]
RULES = StepRules.from_tokenizer(VOCABULARY, [END])


@dataclass(frozen=True)
class Scenario:
    """What is to be predicted for: how texts behave, and what runs them.

    Attributes:
        max_step_tokens: that a call for a step may bring; None: as many as the longest step has.
        max_depth, max_width: the server's limits, to which it cuts what a policy asks for.
        prompts_are_cached: a prompt is in the KV memory of target and draft when its request comes, if there is room: what is
            predicted is the reasoning behind it.
        own_branches, engine_always_drafts: as in :class:`~lr_backend.config.LoopConfig`.
    """

    workload: Workload
    machine: Machine = field(default_factory=LinearTimes().machine)
    max_step_tokens: int | None = None
    max_depth: int = MAX_DEPTH
    max_width: int = MAX_WIDTH
    prompts_are_cached: bool = False
    own_branches: bool = True
    engine_always_drafts: bool = False

    @classmethod
    def of(cls, config: LoopConfig, workload: Workload, machine: Machine, *, prompts_are_cached: bool = False) -> Self:
        """What a deployment with this configuration of the loop does on a machine."""
        limits = config.limits
        shape = (limits.max_step_tokens, limits.max_depth, limits.max_width)
        return cls(workload, machine, *shape, prompts_are_cached=prompts_are_cached, own_branches=config.own_branches)


@dataclass(frozen=True)
class Policy:
    """How requests are answered, and how many at a time.

    Attributes:
        fields: of the request, beside these; the rest are the server's own defaults.
    """

    mode: Mode = Mode.LR
    max_depth: int = 4
    width: int = 1
    num_requests: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """What a policy takes.

    Attributes:
        latency_s: mean over the requests.
        target_batch: mean number of sequences in a target iteration.
        traces: of each request, where traces were asked for.
        before: of requests that were asked before these, and have been answered.
    """

    latency_s: float
    usages: tuple[Usage, ...]
    target_batch: float
    traces: tuple[Trace, ...] = ()
    before: tuple[Usage, ...] = ()

    @property
    def step_acceptance_rate(self) -> float | None:
        """Over all requests, as :class:`Usage` has it."""
        rates = [usage.step_acceptance_rate for usage in self.usages if usage.step_acceptance_rate is not None]
        return fmean(rates) if rates else None


def simulate(
    scenario: Scenario, policy: Policy, seed: int = 0, *, first: int = 0, num_sets: int = 1, trace: bool = False
) -> Prediction:
    """Answer ``policy.num_requests`` requests at once, each with texts of its own; ``trace`` keeps their traces.

    Args:
        first: number of the first question.
        num_sets: so many sets of requests, one after another: the server learns from each for the next.

    Raises:
        ConfigError: an answer does not fit the KV memory.
        ValueError: a policy that the loop would refuse.
    """
    return side_by_side(scenario, [policy], seed, first=first, num_sets=num_sets, trace=trace)[0]


def side_by_side(
    scenario: Scenario, policies: Sequence[Policy], seed: int = 0, *, first: int = 0, num_sets: int = 1, trace: bool = False
) -> list[Prediction]:
    """The same for requests that one server answers in different ways at the same time; what each policy comes to.

    Raises:
        ConfigError, ValueError: as :func:`simulate`.
    """
    for policy in policies:
        _require_range(policy)
    return run_virtual(_answer_all(scenario, policies, seed, first, num_sets, trace))


def simulate_steady(
    scenario: Scenario, policy: Policy, seed: int = 0, *, learns_from: int = 0, num_answers: int = 1
) -> Prediction:
    """Keep ``policy.num_requests`` in flight: as soon as one is answered the next is asked.

    As many come before those that are predicted, so that requests are at different places of their answers.

    Args:
        learns_from: so many questions at least come before, the same for every policy. Only a mode that learns is asked them all.
        num_answers: so many are predicted.

    Raises:
        ConfigError, ValueError: as :func:`simulate`.
    """
    return run_virtual(keep_in_flight(scenario, policy, seed, learns_from=learns_from, num_answers=num_answers))


def ms_a_token(usages: Iterable[Usage]) -> float:
    """Milliseconds a token, of all requests together."""
    counted = list(usages)
    return 1e3 * sum(usage.latency_s for usage in counted) / sum(usage.completion_tokens for usage in counted)


def speedup(scenario: Scenario, policy: Policy, seed: int = 0) -> float:
    """Latency of the target alone over that of ``policy``, with the same texts and as many requests."""
    alone = Policy(Mode.AR, num_requests=policy.num_requests)
    return simulate(scenario, alone, seed).latency_s / simulate(scenario, policy, seed).latency_s


def run_on_engines(scenario: Scenario, seed: int, work: Callable[[Engines, Texts], Awaitable[Result]]) -> tuple[Result, float]:
    """Do other work than the step loop's on a scenario's engines; its result, and the seconds that it took."""

    async def run() -> tuple[Result, float]:
        texts = Texts(scenario.workload, seed)
        engines = virtual_engines(scenario.machine, texts)
        if scenario.prompts_are_cached:
            _remember(engines, [texts.prompt(0)])
        started_s = asyncio.get_running_loop().time()
        result = await work(engines, texts)
        seconds = asyncio.get_running_loop().time() - started_s
        for one in (engines.target, engines.draft, engines.judge):
            await one.close()
        return result, seconds

    return run_virtual(run())


@dataclass
class _Run:
    """One server on the virtual clock, and what it has answered by number of the question."""

    scenario: Scenario
    policies: Sequence[Policy]
    seed: int
    trace: bool
    engine_of: EngineOf | None = None
    outcomes: dict[int, tuple[int, Outcome]] = field(default_factory=dict)
    """Which policy's each is, and how it ended."""
    requests: list[LookaheadRequest] = field(init=False)
    asked: list[int] = field(init=False)
    """Of the requests of a set, which policy's each is."""

    def __post_init__(self) -> None:
        workload, policies = self.scenario.workload, self.policies
        _require_memory(self.scenario)
        self._texts = Texts(workload, self.seed)
        self._engines = virtual_engines(self.scenario.machine, self._texts, engine_of=self.engine_of)
        # Whether noise is shared shows in the workload: in how many drafted steps are the target's word for word.
        coupled = all(policy.mode is Mode.LOSSLESS for policy in policies)
        config = _config(self.scenario).model_copy(update={"coupled_noise": coupled})
        models = Models(RULES, VOCABULARY, judge_prompt(workload), VOCABULARY)
        learned = Learned(asyncio.get_running_loop().time)
        self._server = Server(self._engines, models, config, learned)
        self.requests = [_request(workload, policy, self.seed, self.trace) for policy in policies]
        self.asked = [index for index, policy in enumerate(policies) for _ in range(policy.num_requests)]

    def come(self, numbers: range) -> None:
        """These questions are about to be asked."""
        if self.scenario.prompts_are_cached:
            _remember(self._engines, map(self._texts.prompt, numbers))

    async def answer(self, number: int, index: int) -> None:
        loop = assemble(self.requests[index], self._texts.prompt(number), f"{number}", self._server, lambda committed: None)
        self.outcomes[number] = index, await loop.run()

    async def end(self, numbers: range) -> list[Prediction]:
        """What each policy came to over these questions."""
        for one in (self._engines.target, self._engines.draft, self._engines.judge):
            await one.close()
        target = self._engines.target
        assert isinstance(target, VirtualEngine)
        batch = target.timeline.stats().mean_batch_size
        found: list[list[Outcome]] = [[] for _ in self.policies]
        for index, outcome in (self.outcomes[number] for number in numbers):
            found[index].append(outcome)
        return [_prediction(outcomes, batch, self.trace) for outcomes in found]


async def _answer_all(
    scenario: Scenario, policies: Sequence[Policy], seed: int, first: int, num_sets: int, trace: bool
) -> list[Prediction]:
    run = _Run(scenario, policies, seed, trace)
    size = len(run.asked)
    for start in range(first, first + num_sets * size, size):
        numbers = range(start, start + size)
        run.come(numbers)
        await asyncio.gather(*map(run.answer, numbers, run.asked))
    return await run.end(range(first, first + num_sets * size))


async def keep_in_flight(
    scenario: Scenario,
    policy: Policy,
    seed: int = 0,
    *,
    learns_from: int = 0,
    num_answers: int = 1,
    engine_of: EngineOf | None = None,
) -> Prediction:
    """What :func:`simulate_steady` runs, on the clock of the running event loop.

    Args:
        engine_of: as in :func:`virtual_engines`.
    """
    _require_range(policy)
    fewest = policy.num_requests if policy.num_requests > 1 else 0
    first = max(learns_from, fewest)
    asked_from = 0 if policy.mode.chooses else first - fewest
    measured = range(first, first + num_answers)
    run = _Run(scenario, [policy], seed, trace=False, engine_of=engine_of)
    numbers, left = count(asked_from), set(measured)
    done = asyncio.Event()

    async def ask_on() -> None:
        for number in numbers:
            run.come(range(number, number + 1))
            await run.answer(number, 0)
            left.discard(number)
            if not left:
                done.set()

    try:
        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(ask_on()) for _ in range(policy.num_requests)]
            await done.wait()
            for asker in askers:
                asker.cancel()
    except ExceptionGroup as failed:  # the first one ended all others
        raise failed.exceptions[0] from None
    before = tuple(run.outcomes[number][1].usage for number in range(asked_from, measured.start) if number in run.outcomes)
    return replace((await run.end(measured))[0], before=before)


def with_loop(machine: Machine, num_loops: int, load: int, mode: Mode) -> Machine:
    """The machine behind so many processes of the step loop, with so many requests in flight in this mode.

    The processes at work count as one thread, as many times as fast. A request stays with one process, so more processes than
    requests bring nothing. The time of a call on its way there was measured with one call at a time: it holds the loop's.
    """
    # Among several requests it is mostly whole steps that ``auto`` speculates, if anything.
    whole_steps = mode is Mode.LR or (mode.chooses and load > 1)
    loop_s = (CALL_CPU_S_OF_LR if whole_steps else CALL_CPU_S) / min(num_loops, load)
    places = {
        role: replace(place, hops=replace(place.hops, there_s=max(0.0, place.hops.there_s - loop_s)))
        for role, place in machine.places.items()
    }
    return replace(machine, places=places, loop_s=loop_s)


def _request(workload: Workload, policy: Policy, seed: int, trace: bool) -> LookaheadRequest:
    fields = {"text_input": "?", "max_tokens": workload.max_tokens, "stream": False, "temperature": 0.6, "seed": seed}
    shape = {"mode": policy.mode, "max_depth": policy.max_depth, "width": policy.width, "trace": trace}
    return LookaheadRequest.parse({**fields, **shape, **policy.fields})


def _prediction(outcomes: Sequence[Outcome], target_batch: float, trace: bool) -> Prediction:
    usages = tuple(outcome.usage for outcome in outcomes)
    traces = tuple(build_trace(outcome, f"{number}") for number, outcome in enumerate(outcomes if trace else ()))
    return Prediction(fmean(usage.latency_s for usage in usages), usages, target_batch, traces)


def _remember(engines: Engines, prompts: Iterable[IntArray]) -> None:
    for prompt in prompts:
        for engine in (engines.target, engines.draft):
            assert isinstance(engine, VirtualEngine)
            engine.remember(prompt)


def virtual_engines(
    machine: Machine,
    texts: Texts,
    loop_thread: LoopThread | None = None,
    engine_of: EngineOf | None = None,
) -> Engines:
    """The engines of a machine on the running event loop's clock.

    Args:
        loop_thread: that makes the calls of other machines too; None: one for this machine alone.
        engine_of: makes one; by default it only takes time.
    """
    shared = SharedCards(machine.law)
    thread = loop_thread or LoopThread(machine.loop_s, shared, machine.call_demand)
    writers = {Role.TARGET: texts.target, Role.DRAFT: texts.draft, Role.JUDGE: texts.judge}

    def engine(role: Role, place: Place) -> VirtualEngine:
        drafted = texts.draft if role is Role.TARGET else None
        source = ScriptedSource(writers[role], texts.looked_up if place.looks_up else drafted)
        if engine_of is not None:
            return engine_of(role, place, source, shared, thread)
        return VirtualEngine(place, source, shared, thread, machine.call_demand)

    engines = {role: engine(role, place) for role, place in machine.places.items()}
    return Engines(engines[Role.TARGET], engines[Role.DRAFT], engines[Role.JUDGE])


def _require_range(policy: Policy) -> None:
    if not 0 <= policy.max_depth <= MAX_DEPTH or not 1 <= policy.width <= MAX_WIDTH or policy.num_requests < 1:
        raise ValueError(f"{policy} is out of range")


def _require_memory(scenario: Scenario) -> None:
    """Raises: ConfigError: not even one answer fits the KV memory of target or draft."""
    longest = scenario.workload.prompt_tokens + scenario.workload.max_tokens
    for role in (Role.TARGET, Role.DRAFT):
        place = scenario.machine.places[role]
        kept = place.kv_tokens // place.tokens_per_block * place.tokens_per_block
        if longest > kept:
            raise ConfigError(f"a question and its answer may have {longest} tokens, and the {role} has memory for {kept}")


def judge_prompt(workload: Workload) -> JudgePrompt:
    """A prompt of the workload's lengths; what its fixed parts say, the scripted judge does not read."""
    head, tail = (ALIGNED,) * workload.verdict_prefix_tokens, (ALIGNED,) * workload.verdict_tokens
    whole = JudgePrompt.from_tokenizer(VOCABULARY, max_step_tokens=readable_step_tokens(workload.longest_step))
    return replace(whole, head_ids=head, middle_ids=(), tail_ids=tail)


def _config(scenario: Scenario) -> LoopConfig:
    workload = scenario.workload
    limits = Limits(
        max_prompt_tokens=1 << 16,
        max_tokens=workload.max_tokens,
        max_depth=scenario.max_depth,
        max_width=scenario.max_width,
        max_step_tokens=scenario.max_step_tokens or max(4, workload.longest_step),
        max_draft_len=MAX_DRAFT_LEN,
        max_in_flight_requests=1 << 16,
    )
    timeouts = Timeouts(target_s=FOREVER_S, draft_s=FOREVER_S, judge_s=FOREVER_S, request_s=FOREVER_S)
    return LoopConfig(
        tokenizer_dir=Path(),
        judge_tokenizer_dir=Path(),
        markers=(),
        limits=limits,
        timeouts=timeouts,
        draft_temperature=DRAFT_TEMPERATURE,
        engine_drafts=True,
        engine_always_drafts=scenario.engine_always_drafts,
        own_branches=scenario.own_branches,
    )
