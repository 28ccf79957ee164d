"""Audits: the rate and its interval, the desk that nobody waits for, and what a spent risk budget allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from threading import Event, Semaphore, Thread, current_thread
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.contextvars import bound_contextvars, get_contextvars

from lr_backend.audit.auditor import MAX_CHECKS, CheckerAuditor, ModelAuditor, make_auditor
from lr_backend.audit.desk import AuditCase, AuditCounts, AuditDesk
from lr_backend.audit.interval import LEAST_AUDITS, Z_95, Estimate, FalseAccepts, corrected
from lr_backend.audit.request import TRICKLE, RequestAudit, audit_draw
from lr_backend.clock import running_clock
from lr_backend.config import AuditSettings
from lr_backend.errors import EngineUnavailable, InvalidRequest
from lr_backend.policy.acceptance import Acceptance
from lr_backend.policy.policy import Learned, Measured
from lr_backend.policy.trial import Way
from lr_backend.request import FinishReason, LookaheadRequest, Origin, StepRecord, VerifierName
from lr_backend.steps.step import Step, StepEnd
from lr_backend.testing import ScriptedEngine, run_virtual
from lr_backend.verify import Reason, StepPair, Verdict, Verifier, VerifierParts
from lr_backend.verify.judge_prompt import AUDIT_TASK_TEXT
from tests.support.examples import answers
from tests.support.observed import WAIT_S
from tests.support.world import CONFIG, MODELS, World, chance, imitator, judge_script, storyteller

JUDGE = VerifierName.JUDGE
PREFIX = np.asarray([1, 2, 3], dtype=np.int32)


def make_pair(number: int = 0, target: str = "①", drafted: str = "②") -> StepPair:
    step = Step((number,), StepEnd.DELIMITER)
    return StepPair(step, step, target, drafted, f"call/{number}", PREFIX)


@dataclass
class ScriptedAuditor:
    """Answers by a rule over the pair, after a time; an exception is raised."""

    rule: Callable[[StepPair], bool | Reason | BaseException] = lambda pair: True
    takes_s: float = 1.0
    asked: list[StepPair] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def audit(self, pair: StepPair) -> bool | Reason:
        self.asked.append(pair)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.num_running -= 1
        answer = self.rule(pair)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def desk_of(auditor: ScriptedAuditor, **settings: object) -> AuditDesk:
    desk = AuditDesk(lambda: auditor, AuditSettings.model_validate({"timeout_s": 1000.0, "max_waiting": 10_000, **settings}))
    desk.open()
    return desk


def counts(book: AuditCounts) -> tuple[int, int, int, int, int]:
    return book.num_right, book.num_false_accepts, book.num_failed, book.num_dropped, book.num_cleared


# The rate ----------------------------------------------------------------------------------------------------------


trials = st.integers(1, 5000).flatmap(lambda num: st.tuples(st.integers(0, num), st.just(num)))


@given(trials)
def test_with_an_auditor_that_makes_no_errors_the_interval_is_agresti_and_coulls(seen: tuple[int, int]) -> None:
    hits, num = seen
    found = corrected(hits / num, num)

    more = num + Z_95**2
    centre = (hits + Z_95**2 / 2) / more
    half = Z_95 * sqrt(centre * (1 - centre) / more)
    assert found.rate == pytest.approx(hits / num)
    assert (found.low, found.high) == pytest.approx((max(0.0, centre - half), min(1.0, centre + half)))


def test_the_interval_is_lang_and_reiczigels() -> None:
    # 40 of 400 called wrong; sensitivity 45 of 50, specificity 190 of 200. Worked out by hand from their formulas.
    found = corrected(0.1, 400, (45, 50), (190, 200))

    assert (found.rate, found.low, found.high) == pytest.approx((0.05 / 0.85, 0.00771, 0.10929), abs=1e-5)


@given(trials, st.sampled_from([None, (90, 100), (900, 1000)]), st.sampled_from([None, (95, 100), (950, 1000)]))
def test_the_rate_lies_in_its_interval_and_doubt_about_the_auditor_widens_it(
    seen: tuple[int, int], sensitivity: tuple[int, int] | None, specificity: tuple[int, int] | None
) -> None:
    called = seen[0] / seen[1]
    found = corrected(called, seen[1], sensitivity, specificity)

    assert found.rate is not None and 0.0 <= found.low <= found.rate <= found.high <= 1.0
    if sensitivity and specificity and 0.1 < called < 0.9:
        few = corrected(called, seen[1], (9, 10), (19, 20))
        assert few.high - few.low >= found.high - found.low


@pytest.mark.parametrize(("wrong", "num", "tried"), [(0.02, 200, 300), (0.05, 400, 60), (0.2, 100, 60), (0.0, 200, 100)])
def test_the_interval_covers_the_true_rate_of_an_auditor_that_errs(wrong: float, num: int, tried: int) -> None:
    rng = np.random.default_rng(3)
    sensitivity, specificity, runs = 0.85, 0.95, 1500
    called = rng.binomial(num, wrong * sensitivity + (1 - wrong) * (1 - specificity), runs)
    right = zip(rng.binomial(tried, sensitivity, runs), rng.binomial(tried, specificity, runs), strict=True)
    found = [corrected(one / num, num, (se, tried), (sp, tried)) for one, (se, sp) in zip(called, right, strict=True)]

    assert np.mean([one.low <= wrong <= one.high for one in found]) >= 0.94
    if wrong < 0.1:  # taken at its word, such an auditor is far off
        plain = [corrected(one / num, num) for one in called]
        assert np.mean([one.low <= wrong <= one.high for one in plain]) < 0.9


@pytest.mark.parametrize(
    "settings",
    [{"sensitivity": (3, 2)}, {"sensitivity": (0, 5)}, {"specificity": (0, 0)}, {"sensitivity": (5, 10), "specificity": (9, 20)}],
)
def test_an_auditor_that_tells_nothing_is_refused(settings: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ValidationError):
        AuditSettings.model_validate(settings)


def test_the_desk_allows_for_its_auditors_errors() -> None:
    desk = desk_of(ScriptedAuditor(), sensitivity=[90, 100], specificity=[180, 200])
    for number in range(100):
        desk.counts_of(JUDGE).false_accepts.add(number % 10 == 0)

    assert desk.estimate(JUDGE).rate == pytest.approx(0.0, abs=0.01) and desk.estimate(JUDGE).low == 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_young_rate_is_the_plain_share(found: list[bool]) -> None:
    rate = FalseAccepts(memory=10**6)
    for false in found:
        rate.add(false)

    assert rate.estimate.rate == pytest.approx(sum(found) / len(found), abs=1e-3)
    assert rate.estimate.num == pytest.approx(len(found), rel=1e-3)


def test_an_audit_stands_for_the_steps_of_its_request_that_were_not_drawn() -> None:
    """Most steps are of requests of which few are audited; one of twenty is of a request that audits all of its own."""
    rate, num = FalseAccepts(memory=10**9), 20_000
    for index in range(num):
        rate.add(index % 100 == 0, share=0.1)  # of 200,000 steps 1 % are wrong
    for index in range(num):
        rate.add(index % 5 == 0, share=1.0)
    assert rate.estimate.rate == pytest.approx((0.01 * 200_000 + 0.2 * num) / (200_000 + num), rel=1e-3)
    assert num < rate.estimate.num < 2 * num, "unequal weights tell less than equal ones"


def test_no_single_audit_outweighs_all_others() -> None:
    rate = FalseAccepts(memory=200)
    for index in range(1000):
        rate.add(index % 3 == 0)
    before = rate.estimate
    assert before.rate is not None and before.exceeds(0.2)
    rate.add(False, share=1e-9)
    assert rate.estimate.rate == pytest.approx(before.rate, abs=0.02)
    assert rate.estimate.exceeds(0.2), "and a spent budget stays so"


@given(st.lists(st.booleans(), max_size=300), st.integers(20, 100), st.booleans())
def test_old_evidence_fades(found: list[bool], memory: int, now: bool) -> None:
    rate = FalseAccepts(memory)
    assert rate.estimate == Estimate()
    for false in found:
        rate.add(false)
        assert rate.estimate.rate is not None
        assert 0.0 <= rate.estimate.low <= rate.estimate.rate <= rate.estimate.high <= 1.0
        assert rate.estimate.num <= 2 * memory
    for _ in range(20 * memory):
        rate.add(now)

    assert rate.estimate.rate == pytest.approx(float(now), abs=1e-6)
    assert rate.estimate.num == pytest.approx(2 * memory - 1, rel=1e-3)


def test_nothing_is_beyond_doubt_before_there_is_evidence() -> None:
    rate = FalseAccepts(200)
    exceeded = []
    for _ in range(25):
        rate.add(True)
        exceeded.append(rate.estimate.exceeds(0.05))

    assert exceeded.index(True) == pytest.approx(LEAST_AUDITS, abs=1)
    assert not Estimate().exceeds(0.0)
    assert not rate.estimate.exceeds(1.0)


Floats = npt.NDArray[np.float64]


def stopped(
    rates: list[float], *, num_chains: int, num_audits: int, memory: int = 200, budget: float = 0.05
) -> npt.NDArray[np.bool_]:
    """Whether the budget is spent, by audit, true rate and chain: audits are independent, and the auditor makes no errors."""
    rng = np.random.default_rng(0)
    running, falses = FalseAccepts(memory), np.zeros((len(rates), num_chains))
    spent = np.zeros((num_audits, *falses.shape), dtype=bool)
    least = 1.0
    for number in range(num_audits):
        running.add(False)
        num = running.estimate.num
        weight = (1 - (1 - 1 / memory) ** (number + 1)) * memory
        falses = falses * (1 - 1 / memory) + (rng.random(falses.shape) < np.asarray(rates)[:, None])
        if number < 10 * memory:  # the least share called wrong that is too much; later it no longer moves
            low, least = 0.0, 1.0
            while least - low > 1e-6:
                middle = (low + least) / 2
                low, least = (
                    (low, middle) if Estimate(0.0, corrected(middle, num).low, 1.0, num).exceeds(budget) else (middle, least)
                )
        spent[number] = falses / weight >= least
    return spent


def test_the_risk_budget_stops_as_often_as_the_table_in_the_docs_says() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, text in enumerate(lines) if text.startswith("| truly wrong |")) + 2
    table = [[float(cell.strip(" %")) / 100 for cell in text.strip("|").split("|")] for text in lines[start : start + 8]]
    rates = [row[0] for row in table]

    spent = stopped(rates, num_chains=500, num_audits=1600)

    ever = [spent[:num].any(axis=0).mean(axis=1) for num in (50, 200, 1000)]
    often = spent[600:].mean(axis=(0, 2))
    found = np.array([*ever, often, np.array(rates) * (1 - often)]).T
    assert found[:, :3] == pytest.approx(np.array(table)[:, 1:4], abs=0.06)
    assert found[:, 3] == pytest.approx(np.array(table)[:, 4], abs=0.03)
    assert found[:, 4] == pytest.approx(np.array(table)[:, 5], abs=0.004)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_what_is_audited_is_a_function_of_seed_and_position(seed: int, offset: int) -> None:
    assert audit_draw(seed, offset) == audit_draw(seed, offset)
    assert 0.0 <= audit_draw(seed, offset) < 1.0


def test_draws_are_spread_evenly() -> None:
    draws = [audit_draw(seed, offset) for seed in range(40) for offset in range(50)]

    assert len(set(draws)) == len(draws)
    assert 0.26 < sum(draw < 0.3 for draw in draws) / len(draws) < 0.34


# The desk ----------------------------------------------------------------------------------------------------------


@answers()
@given(
    moments_s=st.lists(st.floats(0.0, 20.0), max_size=40),
    max_in_flight=st.integers(1, 4),
    max_waiting=st.integers(1, 8),
    salt=st.integers(0, 1000),
)
def test_every_case_ends_in_one_count_and_never_too_many_run(
    moments_s: list[float], max_in_flight: int, max_waiting: int, salt: int
) -> None:
    answers: list[bool | Reason | BaseException] = [True, False, Reason.GARBAGE, SystemExit("broken")]
    auditor = ScriptedAuditor(lambda pair: answers[int(4 * chance(salt, pair.call_id))])
    desk = desk_of(auditor, max_in_flight=max_in_flight, max_waiting=max_waiting)
    told: list[bool | None] = []

    async def offer(number: int, moment_s: float) -> bool:
        await asyncio.sleep(moment_s)
        taken = desk.offer(AuditCase(make_pair(number), JUDGE, done=told.append))
        assert desk.num_running <= max_in_flight and desk.num_waiting <= max_waiting
        return taken

    async def all_of_them() -> int:
        taken = await asyncio.gather(*(offer(number, moment_s) for number, moment_s in enumerate(moments_s)))
        await desk.drain()
        return sum(taken)

    num_taken = run_virtual(all_of_them())

    assert auditor.most_running <= max_in_flight
    assert len(told) == num_taken == len(auditor.asked)
    book = desk.counts_of(JUDGE)
    assert counts(book) == (told.count(True), told.count(False), told.count(None), len(moments_s) - num_taken, 0)
    assert book.false_accepts.estimate.num == pytest.approx(told.count(True) + told.count(False), rel=0.01)
    assert all(counts(other) == (0, 0, 0, 0, 0) for name, other in desk.counts.items() if name != JUDGE)


def test_a_late_audit_has_failed_and_the_next_one_comes() -> None:
    desk = desk_of(ScriptedAuditor(takes_s=50.0), timeout_s=5.0)

    async def three() -> float:
        for number in range(3):
            desk.offer(AuditCase(make_pair(number), JUDGE))
        await desk.drain()
        return asyncio.get_running_loop().time()

    assert run_virtual(three()) == pytest.approx(15.0)
    assert counts(desk.counts_of(JUDGE)) == (0, 0, 3, 0, 0)


@pytest.mark.parametrize("moment_s", [0.0, 0.5, 1.5])
def test_a_server_that_goes_down_drops_what_is_left(moment_s: float) -> None:
    auditor = ScriptedAuditor()
    desk = desk_of(auditor)

    async def go_down() -> None:
        for number in range(4):
            desk.offer(AuditCase(make_pair(number), JUDGE))
        if moment_s:
            await asyncio.sleep(moment_s)
        desk.cancel()
        assert not desk.offer(AuditCase(make_pair(9), JUDGE))
        await desk.drain()

    run_virtual(go_down())

    right = int(moment_s)
    assert counts(desk.counts_of(JUDGE)) == (right, 0, 0, 5 - right, 0)
    assert not auditor.num_running


@pytest.mark.parametrize(
    ("asked", "counted"),
    [([0] * 100, [True]), ([*range(20), 0], [True, *[False] * 19]), ([*range(21), 0], [True, *[False] * 20, True])],
)
def test_a_pair_that_is_asked_again_and_again_is_evidence_once(asked: list[int], counted: list[bool]) -> None:
    """The desk remembers ``memory`` pairs; pair 0 is wrong."""
    desk = desk_of(ScriptedAuditor(lambda pair: pair.call_id != "call/0"), memory=20)

    async def ask() -> None:
        for number in asked:
            desk.offer(AuditCase(make_pair(number), JUDGE))
        await desk.drain()

    run_virtual(ask())
    expected = FalseAccepts(20)
    for false in counted:
        expected.add(false)
    book = desk.counts_of(JUDGE)
    assert book.false_accepts.estimate == expected.estimate
    assert (book.num_right + book.num_false_accepts, book.num_false_accepts) == (len(asked), asked.count(0))


def test_an_audit_belongs_to_the_request_of_its_step_whoever_made_room_for_it() -> None:
    told = []

    def rule(pair: StepPair) -> bool:
        told.append((pair.call_id, get_contextvars()["request_id"]))
        return True

    desk = desk_of(ScriptedAuditor(rule))

    async def three() -> None:
        for number in range(3):
            with bound_contextvars(request_id=f"call/{number}"):
                desk.offer(AuditCase(make_pair(number), JUDGE))
        await desk.drain()

    run_virtual(three())
    assert told == [(f"call/{number}", f"call/{number}") for number in range(3)]


def test_the_desk_says_when_its_counts_have_changed() -> None:
    desk = desk_of(ScriptedAuditor())
    seen = []
    desk.on_change = lambda: seen.append((desk.num_running, counts(desk.counts_of(JUDGE))[0]))

    async def one() -> None:
        desk.offer(AuditCase(make_pair(), JUDGE))
        await desk.drain()

    run_virtual(one())
    assert seen == [(1, 0), (0, 1)]


# Auditors ----------------------------------------------------------------------------------------------------------


def parts_of(engine: ScriptedEngine) -> VerifierParts:
    return VerifierParts(engine, engine, MODELS.tokenizer, MODELS.judge_prompt, MODELS.judge_tokenizer)


def with_auditor(**settings: object) -> object:
    return CONFIG.model_copy(update={"audit": AuditSettings.model_validate(settings)})


@pytest.mark.parametrize("same", [True, False])
def test_the_judge_is_asked_in_the_other_order(same: bool) -> None:
    seen = []

    def alike(first: str, second: str) -> bool:
        seen.append((first, second))
        return same

    auditor = make_auditor(with_auditor(auditor="judge"), parts_of(ScriptedEngine(judge_script(alike))), None)  # type: ignore[arg-type]

    assert run_virtual(auditor.audit(make_pair(target="①\n\n", drafted="②"))) is same
    assert set(seen) == {("②", "①")}


class Letters:
    """A tokenizer of characters with a chat template that opens the reasoning, and one that may refuse."""

    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: Mapping[int, str] = MappingProxyType({})
    refuses = False

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: object) -> str:
        if self.refuses:
            raise ValueError("no system turns")
        return "".join(turn["content"] for turn in conversation) + "<A><think>\n"

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def make_target_auditor(engine: ScriptedEngine, tokenizer: Letters) -> ModelAuditor:
    parts = VerifierParts(engine, engine, tokenizer, MODELS.judge_prompt, MODELS.judge_tokenizer)  # type: ignore[arg-type]
    auditor = make_auditor(CONFIG, parts, None)
    assert isinstance(auditor, ModelAuditor)
    return auditor


@pytest.mark.parametrize(("letter", "answer"), [("a", True), ("u", False), ("?", Reason.GARBAGE)])
def test_the_target_is_sent_to_search_for_a_difference(letter: str, answer: bool | Reason) -> None:
    engine = ScriptedEngine(lambda context, seed: ord(letter))

    assert run_virtual(make_target_auditor(engine, Letters()).audit(make_pair(target=" one\n", drafted="two"))) is answer

    (recorded,) = engine.calls
    text = "".join(map(chr, recorded.call.input_ids))
    assert AUDIT_TASK_TEXT in text and text.endswith("<A><think>\n\n</think>\n\n[")
    assert text.index("one") < text.index("two")
    assert recorded.call.max_new_tokens == 1 and recorded.call.sampling.greedy


def test_a_model_that_is_down_is_a_failed_audit() -> None:
    engine = ScriptedEngine(lambda context, seed: 0, fail=lambda call: EngineUnavailable("down"))

    assert run_virtual(make_target_auditor(engine, Letters()).audit(make_pair())) is Reason.VERIFIER_ERROR


def test_a_template_that_refuses_the_auditors_prompt_refuses_the_request_that_asks_for_audits() -> None:
    tokenizer = Letters()
    tokenizer.refuses = True
    world = make_world()
    world.audits = AuditDesk(lambda: make_target_auditor(world.target, tokenizer), AuditSettings())

    with pytest.raises(InvalidRequest, match="audit_rate='target': the target's chat template refuses"):
        run_virtual(world.answer(mode="lr", audit_rate=0.1))

    assert not any(engine.calls for engine in world.engines)
    assert run_virtual(world.answer(mode="lr")).completion_ids


def test_a_checker_gets_the_drafted_text_first_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def checker(drafted: str, target: str) -> bool:
        if target == "numpy's":
            return np.bool_(True)  # type: ignore[return-value]
        if target == "broken":
            raise ZeroDivisionError
        return "yes" if target == "no bool" else drafted == target.upper()  # type: ignore[return-value]

    auditor = CheckerAuditor(checker)
    texts = [("one\n\n", " ONE"), ("ONE", "one"), ("broken", ""), ("no bool", ""), ("numpy's", "")]

    async def all_of_them() -> list[bool | Reason]:
        return [await auditor.audit(make_pair(target=target, drafted=drafted)) for target, drafted in texts]

    # On the real clock: a virtual one does not wait for threads.
    assert asyncio.run(all_of_them()) == [True, False, Reason.VERIFIER_ERROR, Reason.GARBAGE, True]
    assert [line.message for line in caplog.records] == ["the checker failed"], "once"


class Stuck:
    """A checker that does not come to an end while it is held."""

    def __init__(self) -> None:
        self.entered, self.released = Semaphore(0), Event()
        self.threads: list[Thread] = []

    def __call__(self, drafted: str, target: str) -> bool:
        self.threads.append(current_thread())
        self.entered.release()
        return drafted != "hang" or self.released.wait(WAIT_S)


def test_a_checker_that_hangs_fails_its_own_audit_alone_until_many_do() -> None:
    stuck = Stuck()
    auditor = CheckerAuditor(stuck)

    async def hang() -> None:
        task = asyncio.create_task(auditor.audit(make_pair(drafted="hang")))
        await asyncio.to_thread(stuck.entered.acquire, timeout=WAIT_S)
        task.cancel()
        await asyncio.wait({task})

    async def body() -> None:
        async with asyncio.timeout(WAIT_S / 2):
            for _ in range(MAX_CHECKS - 1):
                await hang()
                assert await auditor.audit(make_pair()) is stuck.entered.acquire(blocking=False) is True
            await hang()
            assert await auditor.audit(make_pair()) is Reason.VERIFIER_ERROR
            assert len(stuck.threads) == 2 * MAX_CHECKS - 1
            stuck.released.set()
            for thread in stuck.threads:
                await asyncio.to_thread(thread.join)
            assert await auditor.audit(make_pair()) is True

    asyncio.run(body())
    assert all(thread.daemon for thread in stuck.threads), "the interpreter ends without them"


def test_who_waits_for_the_checker_is_not_late() -> None:
    auditor = ScriptedAuditor()
    settings = AuditSettings(auditor="checker", checker="its:own", max_in_flight=16)
    desk = AuditDesk(lambda: auditor, settings)
    desk.open()

    async def all_of_them() -> None:
        for number in range(30):
            desk.offer(AuditCase(make_pair(number), JUDGE))
        await desk.drain()

    run_virtual(all_of_them())
    assert (auditor.most_running, counts(desk.counts_of(JUDGE))) == (1, (30, 0, 0, 0, 0))


# In the loop -------------------------------------------------------------------------------------------------------


def make_world(salt: int = 10, like: Callable[[str, str], bool] = lambda first, second: True) -> World:
    target = storyteller(salt, num_steps=12)
    return World.of(target, imitator(target, salt + 1, 0.9), like)


def answer(world: World, **fields: object):  # type: ignore[no-untyped-def]
    """An answer, and then the end of its audits."""

    async def both():  # type: ignore[no-untyped-def]
        outcome = await world.answer(**fields)
        if world.audits is not None:
            await world.audits.drain()
        return outcome

    return run_virtual(both())


AUDIT_FIELDS = {
    "num_audited",
    "num_audits_pending",
    "num_false_accepts",
    "false_accept_rate",
    "false_accept_rate_low",
    "false_accept_rate_high",
}


@answers()
@given(st.integers(0, 300), st.sampled_from(["lr", "lr_sd"]), st.floats(0.01, 1.0), st.integers(0, 1000), st.floats(0.0, 100.0))
def test_audits_neither_change_nor_delay_an_answer(salt: int, mode: str, rate: float, order: int, takes_s: float) -> None:
    plain, audited = (make_world(salt).shuffled(order) for _ in range(2))
    audited.audits = desk_of(ScriptedAuditor(lambda pair: False, takes_s))
    fields = {"mode": mode, "trace": True, "seed": order}

    one, other = answer(plain, **fields), answer(audited, **fields, audit_rate=rate)

    assert one.completion_ids == other.completion_ids
    assert one.usage.model_dump(exclude=AUDIT_FIELDS) == other.usage.model_dump(exclude=AUDIT_FIELDS)
    assert one.ledger.records == other.ledger.records
    audited.assert_idle()


@answers()
@given(st.integers(0, 300), st.integers(0, 1000))
def test_all_accepted_steps_but_those_of_equal_tokens_are_cases(salt: int, order: int) -> None:
    world = make_world(salt).shuffled(order)
    auditor = ScriptedAuditor(lambda pair: chance(pair.call_id) < 0.5, takes_s=0.0)
    world.audits = desk_of(auditor)

    usage = answer(world, mode="lr", audit_rate=1.0, trace=True).usage

    accepted = usage.num_steps_accepted - usage.num_steps_accepted_by.get("exact", 0)
    book = world.audits.counts_of(JUDGE)
    assert len(auditor.asked) == accepted == book.num_right + book.num_false_accepts
    assert all(pair.target.ids != pair.drafted.ids for pair in auditor.asked)
    assert len({pair.call_id for pair in auditor.asked}) == accepted
    assert usage.num_audited + usage.num_audits_pending == accepted
    assert usage.num_false_accepts <= min(usage.num_audited, book.num_false_accepts)
    assert (usage.false_accept_rate is None) == (usage.num_audited == 0)


@pytest.mark.parametrize(
    ("reason", "is_case"), [(Reason.EXACT, False), (Reason.SAME_TEXT, False), (Reason.JUDGE, True), (Reason.PLUG_IN, True)]
)
def test_steps_of_the_same_words_are_no_cases(reason: Reason, is_case: bool) -> None:
    """They cannot be wrong. Nor can those that a verifier accepts so while a budget is spent."""
    auditor = ScriptedAuditor()
    desk = desk_of(auditor)
    request = LookaheadRequest.parse({"text_input": "a", "mode": "lr", "audit_rate": 1.0})
    audits = RequestAudit(request, desk, lambda: Says(Verdict(True, reason)))

    async def both() -> None:
        audits.decided(Verdict(True, reason), 0, make_pair)
        desk.offer(AuditCase(make_pair(1), JUDGE, first=Says(Verdict(True, reason))))
        await desk.drain()

    run_virtual(both())
    assert len(auditor.asked) == 2 * is_case
    assert counts(desk.counts_of(JUDGE)) == ((2, 0, 0, 0, 0) if is_case else (0, 0, 0, 0, 1))


def test_a_budget_that_was_spent_behind_a_verdict_is_noted() -> None:
    """The verifier was asked while there was some left, and what it accepted is not taken any more."""
    desk = desk_of(ScriptedAuditor())
    request = LookaheadRequest.parse({"text_input": "a", "mode": "lr", "audit_rate": 1.0, "risk_budget": 0.1})
    audits = RequestAudit(request, desk, lambda: Says(Verdict(True, Reason.JUDGE)))

    async def told() -> dict[str, object]:
        audits.decided(Verdict(False, Reason.RISK_BUDGET), 0, make_pair)
        usage = audits.usage()
        await desk.drain()
        return usage

    usage = run_virtual(told())
    assert usage["risk_budget_spent"] and desk.counts_of(JUDGE).num_requests_spent == 1
    # Nobody knows yet how often it is wrong, neither at least nor at most.
    assert [usage[name] for name in usage if name.startswith("false_accept_rate")] == [None, None, None]


@answers()
@given(st.integers(0, 300), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_the_sample_does_not_depend_on_who_was_faster(salt: int, seed: int, one: int, other: int) -> None:
    sampled = []
    for order in (one, other):
        world = make_world(salt).shuffled(order)
        auditor = ScriptedAuditor()
        world.audits = desk_of(auditor)
        answer(world, mode="lr", audit_rate=0.5, seed=seed, deterministic=True)
        sampled.append(sorted(pair.call_id for pair in auditor.asked))

    assert sampled[0] == sampled[1]


@pytest.mark.parametrize(
    "fields",
    [{}, {"mode": "sd"}, {"mode": "ar"}, {"mode": "lossless"}, {"verifier": "exact"}, {"audit_rate": 0.0}],
    ids=["nobody to ask", "sd", "ar", "lossless", "exact", "not asked for"],
)
def test_where_nothing_is_judged_nothing_is_audited(fields: dict[str, object]) -> None:
    world = make_world()
    auditor = ScriptedAuditor()
    world.audits = desk_of(auditor) if fields else None
    fields = {"mode": "lr", "audit_rate": 1.0, **fields}

    usage = answer(world, **fields).usage

    assert not auditor.asked
    assert (usage.num_audited, usage.num_audits_pending, usage.false_accept_rate) == (0, 0, None)


# The budget --------------------------------------------------------------------------------------------------------


def evidence(desk: AuditDesk, num_right: int, num_false: int) -> AuditDesk:
    for number in range(num_right + num_false):
        desk.counts_of(JUDGE).false_accepts.add(number < num_false)
    return desk


@answers()
@given(st.integers(0, 300), st.sampled_from(["lr", "lr_sd"]), st.integers(0, 1000), st.booleans())
def test_with_a_spent_budget_the_answer_is_the_targets_own(salt: int, mode: str, order: int, deterministic: bool) -> None:
    plain = run_virtual(make_world(salt).answer(mode="ar", stream=False)).completion_ids
    world = make_world(salt).shuffled(order)
    world.audits = evidence(desk_of(ScriptedAuditor(lambda pair: False)), num_right=50, num_false=50)

    usage = (outcome := answer(world, mode=mode, risk_budget=0.1, deterministic=deterministic)).usage

    assert outcome.completion_ids == plain
    assert set(usage.num_steps_accepted_by) <= {"exact"}
    assert usage.risk_budget_spent >= bool(usage.num_steps_rejected.get("risk_budget"))
    assert usage.num_audited == usage.num_false_accepts == usage.num_audits_pending == 0
    assert usage.false_accept_rate_low is not None and usage.false_accept_rate_low > 0.1
    world.assert_idle()


def test_what_is_decided_by_a_spent_budget_is_not_taken_for_the_verifiers_word() -> None:
    world = make_world()
    world.learned = Learned(lambda: 0.0)
    world.audits = evidence(desk_of(ScriptedAuditor(lambda pair: False)), num_right=50, num_false=50)

    usage = answer(world, mode="lr", risk_budget=0.1).usage

    assert usage.num_steps_rejected["risk_budget"] > 0
    judge, exact = (world.learned.acceptance[name] for name in (JUDGE, VerifierName.EXACT))
    assert (judge.rate, world.learned.prices.verdict_s[JUDGE].value) == (Acceptance().rate, None)
    assert exact.rate != Acceptance().rate


@pytest.mark.parametrize("fields", [{}, {"audit_rate": 0.5}, {"risk_budget": 0.9}, {"risk_budget": 0.4}])
def test_a_rate_within_doubt_or_without_a_budget_changes_nothing(fields: dict[str, object]) -> None:
    world = make_world()
    world.audits = evidence(desk_of(ScriptedAuditor()), num_right=50, num_false=50)

    usage = answer(world, mode="lr", **fields).usage

    assert not usage.risk_budget_spent
    assert usage.num_steps_accepted_by["judge"] > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_budget_that_is_spent_midway_counts_at_once_but_for_what_must_not_depend_on_time(deterministic: bool) -> None:
    world = make_world()
    world.audits = evidence(desk_of(ScriptedAuditor(lambda pair: False, takes_s=0.0)), num_right=0, num_false=20)
    assert world.audits.estimate(JUDGE).num < LEAST_AUDITS, "one more is needed"
    fields = {"mode": "lr", "risk_budget": 0.1, "audit_rate": 1.0, "max_depth": 1, "deterministic": deterministic}

    first, second = (answer(world, request_id=name, **fields).usage for name in ("first", "second"))

    assert first.num_steps_accepted_by["judge"] >= 1
    assert bool(first.num_steps_rejected.get("risk_budget")) == first.risk_budget_spent != deterministic
    assert second.risk_budget_spent and "judge" not in second.num_steps_accepted_by


@answers()
@given(st.integers(0, 10_000), st.integers(1, 2))
def test_once_a_budget_is_spent_what_was_judged_before_is_not_taken_either(order: int, width: int) -> None:
    """Steps further down may have been accepted while the root still waited for its own."""
    world = make_world().shuffled(order, spread=1.0)
    world.audits = evidence(desk_of(ScriptedAuditor(lambda pair: False, takes_s=1.0)), num_right=0, num_false=20)
    when_spent: list[float] = []

    async def ask() -> list[StepRecord]:
        fields = {"mode": "lr", "risk_budget": 0.1, "audit_rate": 1.0, "max_depth": 8, "width": width, "trace": True}
        asked = asyncio.create_task(world.answer(**fields))
        while not asked.done() and not when_spent:
            await asyncio.sleep(0.01)
            if world.audits is not None and world.audits.estimate(JUDGE).exceeds(0.1):
                when_spent.append(running_clock()())
        outcome = await asked
        assert outcome.finish_reason is not FinishReason.DEADLINE
        await world.audits.drain()
        return outcome.ledger.records

    records = run_virtual(ask())

    late = [record for record in records if when_spent and record.committed_s > when_spent[0]]
    assert not [record for record in late if record.origin is Origin.DRAFT and record.reason == "judge"]


def test_evidence_of_one_verifier_says_nothing_of_another() -> None:
    world = make_world()
    world.audits = evidence(desk_of(ScriptedAuditor()), num_right=0, num_false=100)

    usage = answer(world, mode="lr", verifier="cascade", risk_budget=0.1, audit_rate=1.0).usage

    assert not usage.risk_budget_spent
    assert world.audits.counts_of(VerifierName.CASCADE).num_right > 0


def test_a_budget_is_spent_while_false_accepts_come_and_wins_back_when_they_no_longer_do() -> None:
    """A server that turns bad and then well again; while the budget is spent no answer differs from the target's own."""
    bad = True
    desk = desk_of(ScriptedAuditor(lambda pair: not bad), memory=20)

    async def ask_many(num: int) -> list[bool]:
        spent = []
        for seed in range(num):
            world = make_world(seed + num * bad)  # one world would bring the same pairs again and again
            world.audits = desk
            outcome = await world.answer(mode="lr", risk_budget=0.2, audit_rate=0.5, seed=seed, deterministic=True)
            await desk.drain()
            spent.append(outcome.usage.risk_budget_spent)
            if spent[-1]:
                assert outcome.completion_ids == (await world.fresh().answer(mode="ar", stream=False)).completion_ids
                assert "judge" not in outcome.usage.num_steps_accepted_by
        return spent

    before = run_virtual(ask_many(25))
    first = before.index(True)
    assert all(before[first:])
    assert desk.counts_of(JUDGE).num_requests_spent == 25 - first
    bad = False
    after = run_virtual(ask_many(25))
    assert after[0] and not after[-1]
    assert not any(after[after.index(False) :])


def test_while_it_is_spent_only_a_share_is_tried_and_only_what_the_verifier_would_accept_is_audited() -> None:
    world = make_world(like=lambda first, second: chance("like", first, second) < 0.5)
    auditor = ScriptedAuditor(lambda pair: False)
    world.audits = evidence(desk_of(auditor), num_right=0, num_false=100)

    async def ask_many() -> int:
        num_rejected = 0
        for seed in range(60):
            outcome = await world.answer(mode="lr", risk_budget=0.1, seed=seed, request_id=f"{seed}", max_tokens=100)
            num_rejected += outcome.usage.num_steps_rejected.get("risk_budget", 0)
        await world.audits.drain()
        return num_rejected

    num_rejected = run_virtual(ask_many())

    book = world.audits.counts_of(JUDGE)
    num_tried = book.num_false_accepts + book.num_cleared
    assert book.num_false_accepts > 0 and book.num_cleared > 0
    assert num_tried == pytest.approx(TRICKLE * num_rejected, rel=0.5)
    assert len(world.judge.calls) == num_tried
    assert len(auditor.asked) == book.num_false_accepts


def test_where_looking_ahead_does_not_pay_a_spent_budget_is_won_back_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing is drafted any more, and nobody sees that the verifier is well again."""
    monkeypatch.setattr(Measured, "_chosen", property(lambda self: Way(False, self._ways[-1].draft_tokens)))
    desk = evidence(desk_of(ScriptedAuditor(), memory=40), num_right=0, num_false=40)

    async def ask_until_won_back() -> int:
        for seed in range(100):
            if not desk.estimate(JUDGE).exceeds(0.4):
                return seed
            world = make_world(seed)
            world.audits = desk
            outcome = await world.answer(mode="auto", risk_budget=0.4, seed=seed, request_id=f"{seed}")
            await desk.drain()
            assert outcome.completion_ids == (await world.fresh().answer(mode="ar", stream=False)).completion_ids
        raise AssertionError("it stays spent")

    assert run_virtual(ask_until_won_back()) > 1


def test_a_budget_that_is_won_back_gives_steps_written_alone_to_the_verifier_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request's audits may win it back while this one writes alone."""
    asked: list[str] = []
    committed = Measured.committed

    def watched(self: Measured, *given: Any, **also: Any) -> None:
        committed(self, *given, **also)
        asked.append(self.verifier)
        if len(asked) == 1:
            evidence(desk, num_right=200, num_false=0)

    monkeypatch.setattr(Measured, "_chosen", property(lambda self: Way(False, False)))
    monkeypatch.setattr(Measured, "committed", watched)
    desk = evidence(desk_of(ScriptedAuditor(), memory=40), num_right=0, num_false=40)
    world = make_world(0)
    world.audits = desk
    run_virtual(world.answer(mode="auto", risk_budget=0.4, stream=False))
    assert asked[0] == VerifierName.EXACT and asked[-1] == JUDGE


@dataclass(frozen=True)
class Slow:
    """A verifier that takes its time."""

    async def verify(self, pair: StepPair) -> Verdict:
        await asyncio.sleep(1e6)
        return Verdict(True, Reason.JUDGE)


@dataclass(frozen=True)
class Says:
    """A verifier that has one verdict on every pair."""

    verdict: Verdict

    async def verify(self, pair: StepPair) -> Verdict:
        return self.verdict


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (Reason.JUDGE, (0, 0, 0, 0, 1)),
        (Reason.NUMBERS, (0, 0, 0, 0, 1)),
        (Reason.JUDGE_ERROR, (0, 0, 1, 0, 0)),
        (Reason.VERIFIER_ERROR, (0, 0, 1, 0, 0)),
        (Reason.TIMEOUT, (0, 0, 1, 0, 0)),
        (Reason.GARBAGE, (0, 0, 1, 0, 0)),
    ],
)
def test_a_verifier_that_fails_while_a_budget_is_spent_has_cleared_nothing(
    reason: Reason, expected: tuple[int, int, int, int, int]
) -> None:
    auditor = ScriptedAuditor()
    desk = desk_of(auditor)

    async def one() -> None:
        desk.offer(AuditCase(make_pair(), JUDGE, first=Says(Verdict(False, reason))))
        await desk.drain()

    run_virtual(one())
    assert counts(desk.counts_of(JUDGE)) == expected
    assert not auditor.asked


def test_a_verifier_that_never_answers_off_the_critical_path_is_a_failed_audit() -> None:
    desk = desk_of(ScriptedAuditor())
    slow: Verifier = Slow()

    async def one() -> None:
        desk.offer(AuditCase(make_pair(), JUDGE, first=slow))
        await desk.drain()

    run_virtual(one())
    assert counts(desk.counts_of(JUDGE)) == (0, 0, 1, 0, 0)
