"""Many requests share one target: what one asks for slows the others down by little, and less is begun where rows are dear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import count
from statistics import fmean

import numpy as np
import pytest

from lr_backend.build.pace import machine_of, stood_for
from lr_backend.emulated.workload import Workload
from lr_backend.loop.tree import Horizon, Node, Tree
from lr_backend.plan.simulation import MAX_DEPTH, MAX_WIDTH, Policy, Scenario, ms_a_token, side_by_side
from lr_backend.policy.policy import Learned, Measured
from lr_backend.request import LookaheadRequest, Mode, VerifierName
from lr_backend.steps.step import Step, StepEnd
from tests.unit.test_prices import Clock

SLOWER = {1: 1.3, 4: 1.45}
"""By the width of a request that looks far ahead: others take so many times as long beside it as beside one of the target alone,
at most."""
SLOWER_AUTO = 1.8
"""Beside a wide one that must look ahead, where the others choose: fewer of them then find that looking ahead pays."""
NUM_RUNS, NUM_RUNS_AUTO = {Mode.AR: 1, Mode.AUTO: 3}, 6
"""By the others' mode, and beside that wide one: what eight fresh requests happen to try makes runs differ by a third."""
NUM_OTHERS = 8
DRAFT_TOKENS = {"proposer": "draft_model", "num_draft_tokens": 4}
LONG = {"num_steps": 24, "step_tokens": 25, "step_spread": 0.9, "verdict_prefix_tokens": 100, "verdict_tokens": 20}
AGREEMENT = {"token_agreement": 0.75, "word_agreement": 0.5}


# One request and its neighbours ----------------------------------------------------------------------------------------


def beside(long: Policy, others: Mode, context: int, num_runs: int) -> float:
    """Milliseconds a token of the others, which are answered while the long one is written; the mean of some runs."""
    spec = stood_for("qwen3-32b-apart")
    workload = Workload(0.6, prompt_tokens=context, **LONG, **AGREEMENT)
    scenario = Scenario.of(spec.loop_config(), workload, machine_of(spec, "h200_sxm"), prompts_are_cached=True)
    scenario = replace(scenario, max_depth=MAX_DEPTH, max_width=MAX_WIDTH)
    asked = Policy(others, long.max_depth, num_requests=NUM_OTHERS, fields={**DRAFT_TOKENS, "max_tokens": 150})
    return fmean(ms_a_token(side_by_side(scenario, [long, asked], seed)[1].usages) for seed in range(num_runs))


@cache
def beside_one_alone(others: Mode, context: int, num_runs: int) -> float:
    return beside(Policy(Mode.AR), others, context, num_runs)


@pytest.mark.parametrize(
    ("mode", "max_depth", "width"),
    [(Mode.AUTO, 16, 1), (Mode.LR, 16, 1), (Mode.LR_SD, 16, 1), (Mode.AUTO, 8, 4), (Mode.LR, 8, 4)],
)
@pytest.mark.parametrize(("others", "context"), [(Mode.AR, 1_000), (Mode.AR, 16_000), (Mode.AUTO, 1_000)])
def test_one_request_starves_no_other(mode: Mode, max_depth: int, width: int, others: Mode, context: int) -> None:
    long = Policy(mode, max_depth, width, fields=DRAFT_TOKENS)
    others_give_up = width > 1 and others.chooses and not mode.chooses
    runs = others, context, NUM_RUNS_AUTO if others_give_up else NUM_RUNS[others]
    ratio = beside(long, *runs) / beside_one_alone(*runs)
    assert ratio <= (SLOWER_AUTO if others_give_up else SLOWER[width])


# Dear rows -------------------------------------------------------------------------------------------------------------


def begun(share: float, *, width: int = 1, own_branches: bool = False) -> list[Node]:
    """The target steps that one of four requests begins ahead of the one that is being judged, in mode ``auto``.

    Args:
        share: of its time by which a token takes longer for each sequence in flight.
    """
    shared = Learned(Clock())
    for companions in (0, 1, 3, 7) * 30:
        shared.prices.target[False].crowding.add(companions, 1.0 + share * companions)
    shared.prices.num_requests = 4
    policy = Measured(LookaheadRequest.parse({"text_input": "?"}), shared, 8, VerifierName.JUDGE, can_draft=False)
    horizon = Horizon(policy.depth, policy.min_chance, policy.min_draft_chance, 0.6)
    tree = Tree(np.asarray([1], dtype=np.int32), end=1000, width=width, own_branches=own_branches)
    tree.horizon = horizon
    tree.start_targets()
    tree.targeted(tree.root, Step((2,), StepEnd.DELIMITER))
    words = count(3)
    while drafts := tree.start_drafted():
        for node in drafts:
            tree.drafted(node, Step((next(words),), StepEnd.DELIMITER))
        tree.start_verdicts()
        tree.start_targets()
    return [node for node in tree.root.subtree() if node.target_started and node is not tree.root]


def num_own(nodes: list[Node]) -> int:
    return sum(node.drafted is None for node in nodes)


def num_further(nodes: list[Node]) -> int:
    return sum(node.sibling > 0 for node in nodes)


@pytest.mark.parametrize(
    ("begins", "counted", "most"),
    [
        pytest.param(partial(begun), len, 7, id="depth"),
        pytest.param(partial(begun, width=3), num_further, 8, id="width"),
        pytest.param(partial(begun, own_branches=True), num_own, 1, id="own branches"),
    ],
)
def test_depth_width_and_own_branches_fall_with_the_price_of_a_row(
    begins: Callable[[float], list[Node]], counted: Callable[[list[Node]], int], most: int
) -> None:
    found = [counted(begins(share)) for share in (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] >= most
    assert found[-1] == 0
