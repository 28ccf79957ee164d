"""Token drafts while a step is written: taken while they pay, left where they do not, tried again later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lr_backend.contract import IntArray
from lr_backend.engine import GREEDY, Role
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.payoff import Payoff, Verifications
from lr_backend.loop.steps import StepRules
from lr_backend.loop.tree import append
from lr_backend.loop.writer import DraftedTally, StepWriter, TokenSpeculation
from lr_backend.propose import by_lookup
from lr_backend.propose.draft_length import DraftCosts
from lr_backend.step import Step, StepEnd
from lr_backend.testing import RecordedCall, ScriptedEngine, run_virtual

END = 999
RULES = StepRules.build("\n\n", {}, [END])
PREFIX: IntArray = np.arange(10, dtype=np.int32)


def counting(context: tuple[int, ...], seed: int) -> int:
    """Goes on counting; ends after 400."""
    return context[-1] + 1 if context[-1] < 400 else END


def written(
    proposes: int, *, cost: float, remember: bool = True, steps: int = 1, lately: Verifications | None = None
) -> tuple[list[RecordedCall], list[int]]:
    """The calls for ``steps`` steps of 300 tokens whose drafts are right for ``proposes`` tokens, and the last step's ids."""

    def proposer(context: IntArray, written: Sequence[int], drafted: Sequence[int] | None, most: int) -> tuple[int, ...]:
        right = range(int(context[-1]) + 1, int(context[-1]) + 1 + proposes)
        return (*right, 777)[:most]

    engine = ScriptedEngine(counting)
    speculation = TokenSpeculation(by_lookup(proposer), 8, DraftCosts(cost), remember=remember, lately=lately)
    writer = StepWriter(engine, Role.TARGET, RULES, GREEDY, 0, "r", Ledger(lambda: 0.0, len(PREFIX)), speculation)

    async def run() -> list[int]:
        ids: Sequence[int] = ()
        for _ in range(steps):
            ids = (await writer.write(PREFIX, 300)).ids
        return list(ids)

    return engine.calls, run_virtual(run())


def verified(calls: list[RecordedCall]) -> list[bool]:
    return [recorded.call.draft_ids is not None for recorded in calls]


def test_drafts_that_pay_are_always_verified() -> None:
    calls, ids = written(3, cost=2.0)
    assert ids == list(range(10, 310))
    assert all(verified(calls)[:-1])


def test_drafts_that_do_not_pay_are_left_and_tried_again() -> None:
    calls, ids = written(0, cost=2.0)
    assert ids == list(range(10, 310))
    assert verified(calls) == [True, True, False, True, False]
    rest = Verifications.LEAST_REST
    assert [r.call.max_new_tokens for r in calls if r.call.draft_ids is None] == [rest, 300 - 2 - rest - 1]


def test_what_one_step_learned_holds_for_the_next() -> None:
    calls, _ = written(0, cost=2.0, steps=2)
    first, _ = written(0, cost=2.0)
    assert verified(calls)[len(first) :][:1] == [False]


def test_without_memory_each_step_begins_anew() -> None:
    calls, _ = written(0, cost=2.0, steps=2, remember=False)
    first, _ = written(0, cost=2.0)
    assert verified(calls) == verified(first) * 2


@pytest.mark.parametrize(
    ("num_before", "brought", "first"),
    [
        (Verifications.LEAST_SEEN, 1.0, False),
        (Verifications.LEAST_SEEN - 1, 1.0, True),
        (Verifications.LEAST_SEEN, 2.0, True),
    ],
)
def test_what_earlier_requests_saw_is_where_a_request_begins(num_before: int, brought: float, first: bool) -> None:
    lately = Verifications()
    for _ in range(num_before):
        lately.verified(brought)
    calls, ids = written(0, cost=2.0, lately=lately)

    assert ids == list(range(10, 310))
    assert verified(calls)[0] is first
    assert any(verified(calls))  # it is tried again all the same, and seen by those to come
    assert lately.count == num_before + sum(verified(calls))


def test_plain_chunks_grow_while_nothing_is_proposed() -> None:
    engine = ScriptedEngine(counting)
    nothing = TokenSpeculation(by_lookup(lambda *_: ()), 8)
    writer = StepWriter(engine, Role.TARGET, RULES, GREEDY, 0, "r", Ledger(lambda: 0.0, len(PREFIX)), nothing)
    run_virtual(writer.write(PREFIX, 100))
    assert [recorded.call.max_new_tokens for recorded in engine.calls] == [4, 8, 16, 32, 40]


def resting(lately: Verifications) -> Payoff:
    """A request whose drafts have not paid."""
    payoff = Payoff(2.0, lately)
    for _ in range(3):
        payoff.verified(1.0)
    assert not payoff.pays
    return payoff


def test_a_chance_that_nobody_uses_is_soon_over() -> None:
    payoff = resting(Verifications())
    for _ in range(2):
        payoff.decoded(payoff.tokens_until_chance)
        for _ in range(Payoff.MAX_IDLE_CALLS):
            assert payoff.pays
            payoff.decoded(4)
        assert not payoff.pays
    payoff.decoded(payoff.tokens_until_chance)
    payoff.verified(9.0)  # this time somebody does, and it pays
    payoff.decoded(4)
    payoff.decoded(4)
    assert payoff.pays


def test_each_chance_that_is_none_makes_the_rest_twice_as_long() -> None:
    payoff = resting(Verifications())
    rests = []
    for _ in range(6):
        rests.append(payoff.tokens_until_chance)
        payoff.decoded(rests[-1])
        payoff.verified(1.0)
    assert rests == [128, 256, 512, 1024, 2048, 2048]
    payoff.decoded(2048)
    payoff.verified(9.0)
    while payoff.pays:
        payoff.verified(1.0)
    assert payoff.tokens_until_chance == 128


def test_requests_rest_together() -> None:
    """One chance for all of them, after what they have decoded together."""
    lately = Verifications()
    first, second = resting(lately), resting(lately)
    first.decoded(40)
    assert second.tokens_until_chance == 88
    first.decoded(60)
    assert second.tokens_until_chance == Verifications.LEAST_CALL  # and not 28: a call more costs more
    second.decoded(28)
    assert (first.pays, second.pays) == (False, True)


def test_a_tally_counts_what_the_target_takes_over_of_the_drafted_step() -> None:
    tally = DraftedTally()
    assert tally.share(4) is None

    tally.verified(None, (1, 2), (1, 2, 3))
    tally.verified((1, 2, 3, 4), (7, 8), (7, 8, 9))
    assert tally.share(4) is None  # neither was of the drafted step

    tally.verified((1, 2, 3, 4), (1, 2), (1, 9))
    assert tally.share(4) == 0.25
    tally.verified((1, 2, 3, 4), (3, 4), (3, 4, 5))
    assert tally.share(4) == 0.75
    tally.verified((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5))
    assert tally.share(4) == 1.0


def test_a_call_that_runs_on_leaves_its_rest_to_the_next_step() -> None:
    """Steps of three tokens, the last of them 9; the answer ends after three steps."""

    def threes(context: tuple[int, ...], seed: int) -> int:
        position = len(context) - len(PREFIX)
        return END if position == 9 else 9 if position % 3 == 2 else 8

    rules = StepRules.build("\n\n", {9: "\n\n"}, [END])
    engine = ScriptedEngine(threes)
    writer = StepWriter(engine, Role.DRAFT, rules, GREEDY, 0, "r", Ledger(lambda: 0.0, len(PREFIX)))

    async def run() -> list[Step]:
        steps = [Step((), StepEnd.DELIMITER)]
        prefix = PREFIX
        for _ in range(4):
            steps.append(await writer.write(prefix, 5, begun=steps[-1].tail, run_tokens=7, scored=True))
            prefix = append(prefix, steps[-1])
        return steps[1:]

    steps = run_virtual(run())
    assert [step.ids for step in steps] == [(8, 8, 9)] * 3 + [(END,)]
    assert [len(step.tail.ids) for step in steps] == [4, 1, 1, 0]
    assert all(step.log_prob is not None and len(step.tail.log_probs) == len(step.tail.ids) for step in steps)
    # Two steps and the first token of the third in one call; the end of the answer stops the other.
    assert [len(recorded.call.input_ids) - len(PREFIX) for recorded in engine.calls] == [0, 7]


def test_a_run_shorter_than_the_step_is_followed_by_a_call_to_its_end() -> None:
    rules = StepRules.build("\n\n", {300: "\n\n"}, [END])
    engine = ScriptedEngine(counting)
    writer = StepWriter(engine, Role.DRAFT, rules, GREEDY, 0, "r", Ledger(lambda: 0.0, len(PREFIX)))

    step = run_virtual(writer.write(PREFIX, 400, run_tokens=20))

    assert step.ids == tuple(range(10, 301))
    assert not step.tail.ids
    assert [recorded.call.max_new_tokens for recorded in engine.calls] == [20, 380]
