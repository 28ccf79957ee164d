"""What a server learns where a model must first read a long text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lr_backend.engine import Role
from lr_backend.loop.ledger import READING_STEPS, Ledger
from lr_backend.policy.acceptance import Acceptance
from lr_backend.policy.policy import Learned, Measured, RequestPolicy
from lr_backend.policy.prices import LONG_PROMPT, MOST_EXCUSED, Prices
from lr_backend.policy.trial import Trial
from lr_backend.request import Usage, VerifierName
from lr_backend.testing import run_virtual
from tests.support.world import CLOSE, END, FIRST_LETTER, PROMPT, THINK, World, imitator, storyteller

ALL = 1 << 20
"""No text is as long."""


@pytest.fixture(params=[len(PROMPT), ALL], ids=["long", "short"])
def is_long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the prompt of three tokens counts as a long one."""
    for module in ("loop.ledger", "policy.prices"):
        monkeypatch.setattr(f"lr_backend.{module}.LONG_PROMPT", request.param)
    return bool(request.param == len(PROMPT))


def answered(world: World, *, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> tuple[Usage, Learned]:
    async def run() -> Usage:
        world.learned = Learned(asyncio.get_running_loop().time)
        return (await world.answer(prompt, **fields)).usage

    usage = run_virtual(run())
    assert world.learned is not None
    return usage, world.learned


def rate_of(accepted: int, rejected: int) -> float:
    acceptance = Acceptance()
    for index in range(accepted + rejected):
        acceptance.decided(index < accepted, None)
    return acceptance.rate


def test_a_draft_that_reads_was_not_rejected_and_one_that_never_comes_was(is_long: bool) -> None:
    world = World.of(target := storyteller(3, num_steps=30), imitator(target, 4, 1.0))
    world.draft.delay = lambda call, num_tokens: 1e6
    usage, learned = answered(world, mode="lr", max_depth=4)
    assert usage.num_steps_late > 2 * READING_STEPS
    unheeded = READING_STEPS if is_long else 0
    assert learned.acceptance[VerifierName.JUDGE].rate == rate_of(0, usage.num_steps_late - unheeded)


def test_what_was_written_before_a_model_is_first_asked_is_read_as_well() -> None:
    """In the mode auto the draft may come in late."""
    now_s = [0.0]
    ledger = Ledger(lambda: now_s[0], prompt_tokens=3)
    ledger.called(Role.TARGET)
    assert not ledger.reads(Role.DRAFT)
    ledger.step_committed(LONG_PROMPT, num_reasoning=LONG_PROMPT)
    assert ledger.reads(Role.DRAFT) and not ledger.reads(Role.TARGET)
    assert ledger.num_read(Role.TARGET, Role.DRAFT) == 3 + LONG_PROMPT
    now_s[0] = 9.0
    assert not ledger.has_waited()
    ledger.called(Role.DRAFT)
    assert not ledger.reads(Role.DRAFT) and ledger.has_waited()
    ledger.step_committed(1, num_reasoning=1)
    assert not ledger.has_waited()
    ledger.called(Role.JUDGE)
    assert not ledger.has_waited(), "a judge reads two steps"


def test_steps_ahead_of_the_root_wait_for_its_reading_too() -> None:
    now_s = [1.0]
    ledger = Ledger(lambda: now_s[0], prompt_tokens=LONG_PROMPT)
    now_s[0] = 3.0
    ledger.called(Role.TARGET)
    ledger.step_committed(1, num_reasoning=1)
    assert not ledger.has_waited() and not ledger.has_waited(began_s=2.5)
    assert ledger.has_waited(began_s=1.0)


def test_steps_for_which_the_draft_still_reads_say_nothing_of_looking_ahead(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(
        Trial, "committed", lambda self, way, seconds, num_tokens, num_steps, *rest, **more: told.append(num_steps)
    )
    world = World.of(target := storyteller(3, num_steps=30), imitator(target, 4, 1.0))
    world.draft.delay = lambda call, num_tokens: 1e6
    usage, _ = answered(world, mode="auto", max_depth=4, num_draft_tokens=0)
    # The first step reads the prompt itself.
    assert told and sum(told) <= usage.num_steps - (READING_STEPS if is_long else 0)


@pytest.mark.parametrize("mode", ["auto", "sd"])
def test_a_short_answer_behind_a_long_prompt_has_a_price(is_long: bool, mode: str) -> None:
    """In one call it would have none: that call reads the prompt."""

    def letters(context: tuple[int, ...], seed: int) -> int:
        return END if len(context) > len(PROMPT) + 40 else FIRST_LETTER

    world = World.of(letters, letters)
    _, learned = answered(world, prompt=(*PROMPT, THINK, CLOSE), mode=mode, num_draft_tokens=0, stream=False)
    assert len(world.target.calls) == (2 if is_long and mode == "auto" else 1)
    priced = learned.prices.target[False].token_s.value is not None
    assert priced == (mode == "auto" or not is_long)


def test_a_short_answer_whose_draft_must_first_read_has_a_price(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens come in where the target has read the prompt, and the draft has not."""

    def letters(context: tuple[int, ...], seed: int) -> int:
        return END if len(context) > len(PROMPT) + 70 else FIRST_LETTER

    world = World.of(letters, letters)
    monkeypatch.setattr(Measured, "uses_draft_tokens", property(lambda self: len(world.target.calls) > 0))
    _, learned = answered(world, prompt=(*PROMPT, THINK, CLOSE), mode="auto", num_draft_tokens=4, stream=False)
    assert learned.prices.target[True].token_s.value is not None


def test_a_step_that_waits_for_a_draft_that_reads_has_no_price(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens come in with the second step here, and with the draft, which reads the first one too."""
    world = World.of(target := storyteller(3, num_steps=30), imitator(target, 4, 1.0))
    monkeypatch.setattr(RequestPolicy, "uses_draft_tokens", property(lambda self: len(world.target.calls) > 0))
    world.draft.delay = lambda call, num_tokens: 0.01 if len(world.draft.calls) > 1 else 1e2
    usage, learned = answered(world, mode="sd", num_draft_tokens=4)
    assert usage.num_steps > 2
    price = learned.prices.target[True].token_s.value
    assert price is not None and (price < 0.1) == is_long


def test_drafts_that_never_come_are_excused_for_a_while() -> None:
    prices = Prices(lambda: 0.0)
    for _ in range(2):
        assert [prices.excuses_draft() for _ in range(MOST_EXCUSED + 2)] == [True] * MOST_EXCUSED + [False] * 2
        with prices.drafting(LONG_PROMPT) as work:
            work.num_tokens = 1
    for num_read, num_tokens in ((LONG_PROMPT, 0), (LONG_PROMPT - 1, 1)):  # one came to nothing, the other read little
        with prices.drafting(num_read) as work:
            prices.excuses_draft()
            work.num_tokens = num_tokens
    assert sum(prices.excuses_draft() for _ in range(MOST_EXCUSED)) == MOST_EXCUSED - 2
