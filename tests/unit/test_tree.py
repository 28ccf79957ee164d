"""The window by itself: what may start, what is lost, how the root moves, over any order of completions."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, fields, replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.contract import IntArray
from lr_backend.errors import EngineError
from lr_backend.loop.tree import Decision, Drafting, Horizon, Node, Tree
from lr_backend.steps.step import Step, StepEnd
from lr_backend.verify import Reason, Verdict
from tests.support.world import chance

PROMPT = np.asarray([1, 2], dtype=np.int32)
ACCEPTED, REJECTED = Verdict(True, Reason.JUDGE), Verdict(False, Reason.JUDGE)


def step(*ids: int, closes: bool = False) -> Step:
    return Step(ids, StepEnd.DELIMITER, closes=closes)


def window(**options: object) -> Tree:
    far = {"max_depth": 4, "acceptance": 0.6, **options}
    horizon = Horizon(**{field.name: far.pop(field.name) for field in fields(Horizon) if field.name in far})  # type: ignore[arg-type]
    tree = Tree(PROMPT, **{"end": 1000, "own_branches": True, **far})  # type: ignore[arg-type]
    tree.horizon = horizon
    return tree


def begin(tree: Tree) -> list[Node]:
    """Start what may start; the drafted ones of it."""
    tree.start_targets()
    return tree.start_drafted()


def draft(tree: Tree, one: Step, chance: float | None = None) -> Node:
    """The one drafted step that may start now, drafted."""
    (node,) = begin(tree)
    if chance is not None:
        node.chance = chance
    tree.drafted(node, one)
    return node


def write(tree: Tree, one: Step) -> None:
    """Start what may start; the root's target step is written."""
    tree.start_targets()
    tree.targeted(tree.root, one)


# Own branches ----------------------------------------------------------------------------------------------------------


def pending() -> tuple[Tree, Node, Node]:
    """A window whose root waits for a verdict; its drafted child and its own branch."""
    tree = window()
    child = draft(tree, step(8))
    write(tree, step(9))
    ((target, judged),) = tree.start_verdicts()
    assert (target, judged) == (step(9), child)
    assert tree.root.own is not None
    return tree, child, tree.root.own


def test_every_node_goes_on_from_its_target_step_while_its_verdict_is_pending() -> None:
    tree, child, own = pending()
    assert own.prefix.tolist() == [1, 2, 9]

    assert child.target_started
    assert tree.start_targets() == [own]
    tree.targeted(child, step(7))
    assert child.own is not None and child.own.prefix.tolist() == [1, 2, 8, 7]
    assert {node.parent for node in begin(tree)} == {child, own, child.own}
    assert child.own.target_started


def test_on_a_correction_the_own_branch_is_the_root_and_keeps_its_work() -> None:
    tree, child, own = pending()
    assert own in tree.start_targets()
    drafts = begin(tree)
    tree.judged(child, REJECTED)

    lost = tree.prune()
    decision = tree.move_root()

    assert decision is not None
    assert (decision.step, decision.winner, decision.compared, decision.reason) == (step(9), None, child, Reason.JUDGE)
    assert tree.root is own and own.parent is None and own.depth == 0
    assert own.target_started and own.children[0] in drafts
    assert not {own, *own.children} & {*lost, *decision.discarded}
    assert child in lost


def test_when_the_drafted_step_is_accepted_the_own_branch_is_cut() -> None:
    tree, child, own = pending()
    tree.start_targets()
    drafts = [node for node in begin(tree) if node.parent is own]
    tree.judged(child, ACCEPTED)

    assert {own, *drafts} <= set(tree.prune())
    assert tree.root.own is None
    assert not tree.prune()
    decision = tree.move_root()
    assert decision is not None and decision.winner is child is tree.root


def test_a_late_drafted_step_that_is_the_targets_own_takes_over_the_own_branch() -> None:
    tree = window(wait_for_drafted=True)
    (child,) = begin(tree)
    child.times_s["drafted_started_s"] = 0.5
    write(tree, step(9))
    own = tree.root.own
    assert own is not None and own in tree.start_targets()
    (below,) = begin(tree)
    assert tree.move_root() is None

    tree.drafted(child, step(9))
    assert not tree.start_verdicts()
    assert tree.prune() == [child]
    decision = tree.move_root()

    assert decision is not None
    assert (decision.winner, decision.step, decision.reason) == (own, step(9), Reason.EXACT)
    assert tree.root is own and own.drafted == step(9) and own.times_s["drafted_started_s"] == 0.5
    assert own.target_started and own.children == [below] and below.parent is own
    assert not {own, below} & set(decision.discarded)


def test_an_own_branch_that_nobody_works_on_gives_way_to_an_equal_drafted_step() -> None:
    tree = window(wait_for_drafted=True)
    (child,) = begin(tree)
    write(tree, step(9))
    own = tree.root.own
    tree.drafted(child, step(9))
    tree.start_verdicts()

    assert tree.prune() == [own]
    decision = tree.move_root()
    assert decision is not None and decision.winner is child


@pytest.mark.parametrize("options", [{"own_branches": False}, {}])
def test_there_is_no_own_branch_behind_a_step_that_closes_or_where_they_are_off(options: dict[str, object]) -> None:
    tree = window(**options)
    child = draft(tree, step(8))
    write(tree, step(9, closes=bool(not options)))
    assert child.target_started
    assert tree.root.own is None
    assert not tree.start_targets()


# What is likely --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_work_goes_down_as_far_as_the_whole_chain_is_likely(chances: list[float], least: float) -> None:
    tree = window(max_depth=8, min_draft_chance=least)
    nodes = []
    for number, likely in enumerate(chances):
        if not (started := begin(tree)):
            break
        started[0].chance = likely
        tree.drafted(started[0], step(number))
        nodes.append(started[0])
    likely = sum(math.prod(chances[: depth + 1]) >= least for depth in range(len(chances)))
    assert len(nodes) == min(len(chances), likely + 1)
    tree.start_targets()
    assert sum(node.target_started for node in [tree.root, *nodes]) == 1 + min(likely, len(nodes))


def test_a_verdict_says_more_than_a_chance() -> None:
    tree = window(min_draft_chance=0.5)
    node = draft(tree, step(8), chance=0.1)
    write(tree, step(9))
    tree.start_verdicts()
    assert node not in tree.start_targets()
    tree.judged(node, ACCEPTED)
    assert tree.start_targets() == [node]


@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_a_usual_step_stays_a_usual_one_when_the_rate_changes(rate: float) -> None:
    """It was drafted before the last verdict, and looking ahead follows a usual step whatever a row costs."""
    tree = window(acceptance=0.6, min_draft_chance=0.6)
    draft(tree, step(8))
    second = draft(tree, step(9))
    assert second not in tree.start_targets()
    write(tree, step(8))
    tree.start_verdicts()
    assert tree.move_root() is not None
    tree.horizon = replace(tree.horizon, acceptance=rate, min_draft_chance=rate)
    assert tree.start_targets() == [second]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4))
def test_the_path_goes_on_somewhere(chances: list[float]) -> None:
    """The lowest accepted sibling wins, and the own branch where there is none."""
    tree = window(width=len(chances))
    for number, (child, one) in enumerate(zip(begin(tree), chances, strict=True)):
        child.chance = one
        tree.drafted(child, step(number))
    write(tree, step(9))

    parts = [part for _, part in tree.root.chances(0.5)]

    assert len(parts) == len(chances) + 1
    assert sum(parts) == pytest.approx(1.0)
    assert parts[0] == chances[0]


def test_rows_are_for_the_likeliest() -> None:
    tree = window(max_depth=2)
    first = draft(tree, step(8), chance=0.3)
    write(tree, step(9))
    own = tree.root.own
    assert own is not None and first.target_started
    assert tree.start_targets() == [own]  # the second of two rows

    tree = window(max_depth=2, width=2, own_branches=True)
    for child, likely in zip(begin(tree), (0.2, 0.6), strict=True):
        child.chance = likely
        tree.drafted(child, step(child.sibling))
    tree.targeted(tree.root, step(9))
    first, second = tree.root.children
    assert tree.root.own is not None
    # 0.2; 0.8 * 0.6; 0.8 * 0.4.
    assert tree.start_targets() == [second, tree.root.own, first]


@pytest.mark.parametrize("min_chance", [0.0, 0.5])
@pytest.mark.parametrize("min_draft_chance", [0.0, 0.5])
def test_own_branches_and_drafted_steps_have_a_price_each(min_chance: float, min_draft_chance: float) -> None:
    tree = window(min_chance=min_chance, min_draft_chance=min_draft_chance, width=2)
    for child, likely in zip(begin(tree), (0.4, 0.3), strict=True):
        tree.drafted(child, step(child.sibling))
        child.chance = likely
    write(tree, step(9))
    tree.start_targets()
    (first, second), own = tree.root.children, tree.root.own
    assert own is not None  # of 0.6 * 0.7
    assert first.target_started == second.target_started == (min_draft_chance == 0.0)
    assert own.target_started == (min_chance == 0.0)

    if own.target_started:  # below an own branch it is its price that counts
        tree.start_drafted()
        below, _ = own.children
        tree.drafted(below, step(5))
        tree.horizon.min_chance, tree.horizon.min_draft_chance, below.chance = 0.3, 0.5, 0.9
        assert below in tree.start_targets()
        tree.horizon.min_chance, below.target_started = 0.4, False
        assert below not in tree.start_targets()


def test_a_sibling_that_is_late_is_so_for_good_though_a_lower_one_is_still_judged() -> None:
    tree = window(width=2, own_branches=False)
    first, second = begin(tree)
    tree.drafted(first, step(8))
    write(tree, step(9))
    assert [node for _, node in tree.start_verdicts()] == [first]
    assert tree.move_root() is None
    assert second in tree.prune()

    tree.drafted(second, step(7))
    assert not tree.start_verdicts()
    tree.judged(first, REJECTED)
    decision = tree.move_root()

    assert decision is not None
    assert (decision.step, decision.winner, second.verdict) == (step(9), None, Verdict(False, Reason.LATE))


@pytest.mark.parametrize(("same", "winner"), [(True, True), (False, False)])
def test_where_only_equal_steps_are_taken_by_now_an_earlier_verdict_does_not_count(same: bool, winner: bool) -> None:
    tree = window(own_branches=False)
    child = draft(tree, step(8))
    write(tree, step(8 if same else 9))
    if not same:
        tree.start_verdicts()
        tree.judged(child, ACCEPTED)
    tree.start_verdicts()
    tree.prune()

    decision = tree.move_root(only_equal=True)

    assert decision is not None and (decision.winner is child) == winner
    assert decision.reason is (Reason.EXACT if same else Reason.RISK_BUDGET)
    assert decision.first_by("exact") == (same, None)


@pytest.mark.parametrize("same", [True, False])
def test_where_only_equal_steps_are_taken_by_now_siblings_that_had_lost_are_not_waited_for(same: bool) -> None:
    """Their verdicts and what was begun below them were given up when the lower one was accepted."""
    tree = window(width=2)
    first, second = begin(tree)
    tree.drafted(first, step(8))
    tree.drafted(second, step(9 if same else 7))
    tree.start_targets()
    write(tree, step(9))
    tree.start_verdicts()
    tree.judged(first, ACCEPTED)
    tree.prune()

    decision = tree.move_root(only_equal=True)

    assert decision is not None and decision.winner is None
    assert (decision.step, decision.reason) == (step(9), Reason.RISK_BUDGET)
    assert tree.start_targets() == [tree.root], "the target goes on from there"


def test_what_became_of_the_first_drafted_step_is_told_whoever_won() -> None:
    tree = window(width=2, own_branches=False)
    first, second = begin(tree)
    for node, word, log_prob in ((first, 8, -0.5), (second, 7, -2.0)):
        tree.drafted(node, replace(step(word), log_prob=log_prob))
    write(tree, step(9))
    tree.start_verdicts()
    tree.judged(first, REJECTED)
    tree.judged(second, ACCEPTED)

    decision = tree.move_root()

    assert decision is not None and decision.winner is second
    assert decision.first_by("judge") == (False, -0.5)


def test_a_fixed_mode_looks_ahead_though_nothing_is_ever_accepted() -> None:
    tree = window(max_depth=4, acceptance=0.0)
    for depth in range(1, 4):
        (child,) = begin(tree)
        tree.drafted(child, step(8))
        assert child.depth == depth
    assert len(tree.start_targets()) == 1


def test_a_verdict_of_a_spent_budget_is_not_the_judges() -> None:
    tree = window()
    (child,) = begin(tree)
    tree.drafted(child, step(8))
    write(tree, step(9))
    tree.start_verdicts()
    tree.judged(child, Verdict(False, Reason.RISK_BUDGET, verifier="exact"))

    decision = tree.move_root()

    assert decision is not None
    assert decision.first_by("exact") == (False, None)
    assert decision.first_by("judge") is None


def test_a_draft_that_failed_says_nothing_of_what_is_accepted() -> None:
    tree = window()
    (child,) = begin(tree)
    tree.drafted(child, None)
    write(tree, step(9))

    decision = tree.move_root()

    assert decision is not None and decision.compared is child
    assert decision.first_by("judge") is None


@pytest.mark.parametrize("reason", [Reason.JUDGE_ERROR, Reason.VERIFIER_ERROR, Reason.TIMEOUT, Reason.GARBAGE])
def test_a_verifier_that_failed_says_nothing_of_what_is_accepted(reason: Reason) -> None:
    tree = window()
    (child,) = begin(tree)
    tree.drafted(child, step(8))
    write(tree, step(9))
    tree.start_verdicts()
    tree.judged(child, Verdict(False, reason))

    decision = tree.move_root()

    assert decision is not None and decision.compared is child
    assert decision.first_by("judge") is None


@pytest.mark.parametrize("lower_is_first", [True, False])
def test_a_drafted_step_that_a_lower_sibling_has_written_already_is_dropped(lower_is_first: bool) -> None:
    """Where the lower one comes later, both stay: the root moves alike whichever came first."""
    tree = window(width=3, own_branches=False)
    lower, running, higher = begin(tree)
    for node in (lower, higher) if lower_is_first else (higher, lower):
        tree.drafted(node, step(8))

    assert running.drafting is Drafting.RUNNING
    assert lower.drafting is Drafting.DONE
    assert higher.drafting is (Drafting.DROPPED if lower_is_first else Drafting.DONE)
    assert higher.verdict == (Verdict(False, Reason.DUPLICATE) if lower_is_first else None)


def test_nothing_more_is_spent_below_a_sibling_that_has_lost() -> None:
    """A lower one is accepted while the verdicts above are still pending."""
    tree = window(max_depth=4, width=2, own_branches=False)
    first, second = begin(tree)
    tree.drafted(first, step(8))
    tree.drafted(second, step(7))
    tree.start_targets()
    pair = [node for node in begin(tree) if node.parent is first]
    for node, word in zip(pair, (5, 6), strict=True):
        tree.drafted(node, step(word))
    tree.targeted(first, step(4))
    tree.start_verdicts()
    tree.start_targets()
    tree.judged(pair[0], ACCEPTED)

    assert pair[1] in tree.prune()
    assert pair[1].lost
    for _ in range(2):
        assert not tree.prune()
        assert all(node.parent is not pair[1] for node in begin(tree))
        assert pair[1] not in tree.start_targets()


def test_a_row_that_was_given_up_is_free() -> None:
    """A rejected step's target step is stopped, so another may run in its place, verdicts above pending or not."""
    tree = window(max_depth=3, own_branches=True)
    first = draft(tree, step(8))
    second = draft(tree, step(7))
    assert tree.start_targets() == [second]  # the third of three rows
    tree.targeted(first, step(5))
    assert first.own is not None
    ((_, judged),) = tree.start_verdicts()
    assert judged is second
    tree.judged(second, REJECTED)
    assert second in tree.prune()

    assert tree.start_targets() == [first.own]
    assert len([node for node in tree.root.subtree() if node.target_started and node.target is None and not node.lost]) == 2


# Any order of completions ----------------------------------------------------------------------------------------------


def test_a_target_step_that_failed_waits_to_be_the_root_and_then_for_nobody() -> None:
    tree = window(own_branches=False)
    first = draft(tree, step(8))
    second = draft(tree, step(7))
    assert tree.start_targets() == [second]
    tree.target_failed(first, EngineError("full"))
    assert not begin(tree)

    tree.horizon.max_depth = 4
    assert not begin(tree)
    write(tree, step(8))
    assert not tree.start_verdicts()
    move = tree.move_root()
    assert move is not None and move.winner is first is tree.root

    tree.horizon.max_depth = 0  # it pays no more, and a row is under way
    assert tree.start_targets() == [first]
    with pytest.raises(EngineError, match="full"):
        tree.target_failed(first, EngineError("full"))


@dataclass
class Run:
    """A window driven to the end of a text of its own, its verdicts much slower than its steps."""

    salt: int
    order: int
    tree: Tree
    verdict_s: float = 100.0
    committed: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    running: dict[Node, set[int]] = field(default_factory=dict)
    queue: list[tuple[float, int, Node, str, Step | None]] = field(default_factory=list)
    now_s: float = 0.0
    most_rows: int = 0
    numbers: count[int] = field(default_factory=count)

    def text(self, prefix: IntArray, who: object) -> Step:
        """What is written after a prefix: one to three tokens, sometimes closing; the draft often writes the target's."""
        place = tuple(prefix.tolist())
        if who != "target" and chance("same", self.salt, place, who) < 0.4:
            who = "target"
        num = 1 + int(3 * chance("length", self.salt, place, who))
        ids = tuple(3 + int(4 * chance("token", self.salt, place, who, index)) for index in range(num))
        return step(*ids, closes=chance("closes", self.salt, place, ids) < 0.05)

    def alike(self, target: Step, drafted: Step) -> bool:
        return chance("alike", self.salt, target.ids, drafted.ids) < 0.5

    def start(self, node: Node, kind: str, target: Step | None = None) -> None:
        number = next(self.numbers)
        place = (*node.prefix.tolist(), node.sibling)
        seconds = chance("takes", self.order, kind, place) * (self.verdict_s if kind == "verdict" else 1.0)
        heapq.heappush(self.queue, (self.now_s + seconds, number, node, kind, target))
        self.running.setdefault(node, set()).add(number)

    def cancel(self, nodes: object) -> None:
        for node in nodes:  # type: ignore[attr-defined]
            self.running.pop(node, None)

    def turn(self) -> None:
        """What the loop does between two completions."""
        tree = self.tree
        for node in tree.start_targets():
            assert node.depth < max(1, tree.horizon.max_depth) and not node.closed
            self.start(node, "target")
        for node in tree.start_drafted():
            assert node.depth <= tree.horizon.max_depth and node.parent is not None and node.parent.target_started
            self.start(node, "draft")
        rows = [one for one in self.queue if one[3] == "target" and one[1] in self.running.get(one[2], ())]
        self.most_rows = max(self.most_rows, len(rows))
        assert len(rows) <= max(1, tree.horizon.max_depth) * tree.width
        assert len(rows) == sum(n.target_started and n.target is None and not n.lost for n in tree.root.subtree())

    def complete(self) -> None:
        while True:
            assert self.queue, "nothing runs, and the window has not come to its end"
            self.now_s, number, node, kind, target = heapq.heappop(self.queue)
            if number in self.running.get(node, ()):
                self.running[node].discard(number)
                break
        tree = self.tree
        if kind == "draft":
            tree.drafted(node, self.text(node.prefix, node.sibling))
        elif kind == "target":
            tree.targeted(node, self.text(node.prefix, "target"))
        else:
            assert target is not None and node.drafted is not None
            tree.judged(node, ACCEPTED if self.alike(target, node.drafted) else REJECTED)

    def play(self, num_tokens: int) -> None:
        while len(self.committed) < num_tokens:
            self.turn()
            self.complete()
            for target, node in self.tree.start_verdicts():
                self.start(node, "verdict", target)
            self.cancel(self.tree.prune())
            while len(self.committed) < num_tokens and (decision := self.tree.move_root()) is not None:
                self.cancel(decision.discarded)
                self.committed += decision.step.ids
                self.decisions.append(decision)
                if decision.step.closes:
                    return

    def reference(self, num_tokens: int, width: int) -> list[int]:
        """One step at a time."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            prefix = np.asarray([*PROMPT, *ids], dtype=np.int32)
            target = self.text(prefix, "target")
            drafts = [self.text(prefix, sibling) for sibling in range(width)]
            winner = next((one for one in drafts if one.ids == target.ids or self.alike(target, one)), target)
            ids += winner.ids
            if winner.closes:
                break
        return ids


@given(
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 100.0]),
)
def test_any_order_of_completions_commits_the_same_within_the_rows_there_are(
    salt: int, order: int, max_depth: int, width: int, own_branches: bool, verdict_s: float
) -> None:
    tree = window(max_depth=max_depth, width=width, own_branches=own_branches, wait_for_drafted=True, acceptance=0.6)
    run = Run(salt, order, tree, verdict_s)

    run.play(30)

    assert run.committed == run.reference(30, width)
    assert run.tree.root.prefix.tolist() == [*PROMPT, *run.committed]
    for decision in run.decisions:
        assert run.tree.root not in decision.discarded
        assert decision.winner is None or decision.winner.drafting is Drafting.DONE


def test_under_slow_verdicts_own_branches_use_the_rows_that_stand_still_without() -> None:
    seconds = dict.fromkeys((False, True), 0.0)
    for own_branches in seconds:
        for salt in range(20):
            run = Run(salt, 1, window(max_depth=4, own_branches=own_branches, acceptance=0.6))
            run.play(40)
            seconds[own_branches] += run.now_s
    assert seconds[True] < 0.9 * seconds[False]
