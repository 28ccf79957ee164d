"""The lookahead tree of one request: pure state, no clock, no engine, no asyncio.

A node is a prefix: the committed text, or that followed by drafted steps. A node's *target step* is what the target writes
after that prefix; the node's children are the *drafted steps* that continue the same prefix, so a node's target step judges its
children. The root is the committed prefix. The window slides: when a child is accepted it becomes the root, and whatever runs
below it goes on.

                       root ── target step t0
                       ├── child 0 (d0) ── target step t1        judged: (t0, d0)
                       │    └── child 0 (d1) ── target step t2   judged: (t1, d1)
                       ├── child 1 (d0')                         judged: (t0, d0')
                       └── own branch (t0) ── target step t1'

While the verdicts on its children are pending, a node goes on from its target step as well: its *own branch*. If all children
are rejected, the own branch becomes the root, and the corrected path is under way already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.request import Origin, VerifierName
from lr_backend.steps.step import Step
from lr_backend.verify.verdict import FAILED, Reason, Verdict, settle

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class Drafting(StrEnum):
    """Where a child's drafted step stands."""

    RUNNING = "running"
    DONE = "done"
    DROPPED = "dropped"


@dataclass(eq=False)
class Node:
    """One prefix. Compared by identity.

    Attributes:
        prefix: token ids up to here, shape [N]. Of a child being drafted: its parent's. Empty behind the window.
        sibling: place among the children of its parent; lower ones win.
        drafted: the drafted step that led here; None for a prefix that ends with the target's own words.
        chance: that the drafted step will be accepted, by what is known of it alone; None: as any other.
        target: the target's step after this prefix, once written.
        target_failed: it has failed while this was not the root, and starts again only as the root's.
        verdict: of the drafted step against the parent's target step.
        own: the branch that goes on from the target's step.
        lost: it cannot become the path any more.
    """

    prefix: IntArray
    parent: Node | None = None
    sibling: int = 0
    drafting: Drafting = Drafting.DONE
    drafted: Step | None = None
    chance: float | None = None
    target_started: bool = False
    target: Step | None = None
    target_failed: bool = False
    verdict: Verdict | None = None
    verdict_started: bool = False
    children: list[Node] = field(default_factory=list)
    own: Node | None = None
    lost: bool = False
    times_s: dict[str, float] = field(default_factory=dict)
    """When its work started and finished, noted by the loop for the trace."""

    @property
    def depth(self) -> int:
        """Steps between the root and here."""
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def closed(self) -> bool:
        """No speculation from here on: the drafted step ends the answer or the reasoning, or holds a tool marker; or the target
        has failed here."""
        return self.target_failed or (self.drafted is not None and self.drafted.closes)

    def chance_now(self, usual: float) -> float:
        """Of a drafted child, with its verdict if that is known. ``usual``: where nothing is."""
        known = usual if self.chance is None else self.chance
        return known if self.verdict is None else float(self.verdict.accepted)

    def chances(self, usual: float) -> Iterator[tuple[Node, float]]:
        """The nodes one step further, each with the chance that the path goes there.

        The lowest accepted sibling wins, and the own branch where there is none.
        """
        left = 1.0
        for child in self.children:
            chance = child.chance_now(usual)
            yield child, left * chance
            left *= 1.0 - chance
        if self.own is not None:
            yield self.own, left

    def subtree(self) -> Iterator[Node]:
        """This node and all below, parents first."""
        yield self
        for node in self.children if self.own is None else (*self.children, self.own):
            yield from node.subtree()


@dataclass(frozen=True, slots=True)
class Decision:
    """How the root moves: onto an accepted child, or past the target's own step.

    Attributes:
        position: the root before the move.
        step: what is committed.
        winner: the accepted child, or None where the target's step stands.
        compared: the drafted child whose fate is recorded (the winner, else the first one drafted), if any was started.
        reason: why.
        depth: how many steps ahead of the root the target was at work.
    """

    position: Node
    step: Step
    winner: Node | None
    compared: Node | None
    reason: Reason
    discarded: tuple[Node, ...]
    depth: int = 0

    @property
    def verdict(self) -> Verdict | None:
        """On the drafted child whose fate is recorded."""
        return self.compared.verdict if self.compared is not None else None

    @property
    def origin(self) -> Origin:
        """Who wrote the step, and whether against a drafted one."""
        if self.winner is not None:
            return Origin.DRAFT
        return Origin.CORRECTION if self.compared is not None else Origin.TARGET

    def first_by(self, verifier: str) -> tuple[bool, float | None] | None:
        """Whether the first drafted step was accepted, and its log-probability. What became of the others depends on it.

        None: there was none, or ``verifier`` has not said: it or the draft failed, or the risk budget was spent meanwhile.
        """
        child = self.position.children[0] if self.position.children else None
        if child is None or child.verdict is None or child.verdict.reason in FAILED:
            return None
        if child.verdict.reason is Reason.RISK_BUDGET and verifier != VerifierName.EXACT:
            return None
        return child.verdict.accepted, child.drafted.log_prob if child.drafted is not None else None


@dataclass
class Horizon:
    """How far to look ahead. It may change while a request runs.

    Attributes:
        max_depth: target steps at a time along one chain from the root, each beside a drafted step. 1 gains nothing; 0: alone.
        min_chance: work starts only where it is of use with this probability at least; of an own branch and below.
        min_draft_chance: the same of work below drafted steps alone.
        acceptance: chance that a drafted step is accepted, where nothing else is known of it.
    """

    max_depth: int = 0
    min_chance: float = 0.0
    min_draft_chance: float = 0.0
    acceptance: float = 1.0


class Tree:
    """The window of one request.

    Args:
        prefix: committed tokens, shape [N].
        end: absolute token count at which the answer is full; nothing starts at or past it.
        width: drafted children of a node at most.
        own_branches: go on from a target step while the verdicts on the drafted ones are pending.
        wait_for_drafted: the root waits for a draft that was started (deterministic) instead of calling it late.

    Attributes:
        horizon: how far to look ahead; the loop sets it whenever the root has moved.
    """

    def __init__(
        self,
        prefix: IntArray,
        *,
        end: int,
        width: int = 1,
        own_branches: bool = False,
        wait_for_drafted: bool = False,
    ) -> None:
        self.root = Node(prefix)
        self.end = end
        self.horizon = Horizon()
        self.width = width
        self.own_branches = own_branches
        self.wait_for_drafted = wait_for_drafted

    # What may start ------------------------------------------------------------------------------------------------

    def start_targets(self) -> list[Node]:
        """Nodes whose target step may start now, the likeliest first; each is handed out once.

        As many run at a time as a chain of drafted steps would have: an own branch takes the place of what is less likely.
        """
        most = max(1, self.horizon.max_depth) * self.width
        num_free = most - sum(node.target_started and node.target is None for node in self.root.subtree() if not node.lost)
        waiting = [
            (chance, node)
            for node, depth, chance in self._open_nodes()
            if depth < max(1, self.horizon.max_depth) and not node.target_started and len(node.prefix) < self.end
        ]
        waiting.sort(key=lambda pair: -pair[0])
        # The root comes first and waits for no row, even where what began ahead of it now holds them all.
        nodes = [node for _, node in waiting[: max(not self.root.target_started, num_free)]]
        for node in nodes:
            node.target_started = True
        return nodes

    def start_drafted(self) -> list[Node]:
        """New children whose drafted step may start now; each is handed out once.

        Only beside target steps that have been started: wide windows would otherwise fill with what nobody comes to judge.
        """
        parents = [
            node
            for node, depth, _ in self._open_nodes()
            if depth < self.horizon.max_depth and node.target_started and not node.children
        ]
        for node in parents:
            node.children = [
                Node(node.prefix, parent=node, sibling=index, drafting=Drafting.RUNNING) for index in range(self.width)
            ]
        return [child for node in parents for child in node.children]

    def start_verdicts(self) -> list[tuple[Step, Node]]:
        """(target step, drafted child) pairs, at any depth, that need a verifier; each is handed out once.

        Pairs that need none (equal ids, different markers, one capped) are settled here.
        """
        open_pairs = []
        for node in self.root.subtree():
            if node.target is None:
                continue
            for child in node.children:
                if child.drafting is not Drafting.DONE or child.verdict_started:
                    continue
                child.verdict_started = True
                assert child.drafted is not None
                child.verdict = settle(node.target, child.drafted)
                if child.verdict is None:
                    open_pairs.append((node.target, child))
        return open_pairs

    def _open_nodes(self) -> Iterator[tuple[Node, int, float]]:
        """Nodes with a known prefix below which work may run, their depth under the root, and the chance that they are used."""
        frontier = [(self.root, 0, 1.0, True)]
        while frontier:
            node, depth, chance, drafted = frontier.pop()
            least = self.horizon.min_draft_chance if drafted else self.horizon.min_chance
            # Unlikely, or lost already: nothing more is spent below it.
            if depth and (node.lost or node.drafting is not Drafting.DONE or node.closed or chance < least):
                continue
            yield node, depth, chance
            parts = node.chances(self.horizon.acceptance)
            below = [(one, depth + 1, chance * part, drafted and one is not node.own) for one, part in parts]
            frontier.extend(reversed(below))

    def prune(self) -> list[Node]:
        """Forget what cannot become the path any more; returns the nodes whose work is of no use."""
        lost: list[Node] = []
        for node in list(self.root.subtree()):
            lost += self._merged(node)
            is_decided = False
            for child in node.children:
                is_rejected = child.verdict is not None and not child.verdict.accepted
                if (is_decided or is_rejected) and not child.lost:
                    lost += child.subtree()
                    child.children, child.own, child.lost = [], None, True
                is_decided = is_decided or (child.verdict is not None and child.verdict.accepted)
            if is_decided and node.own is not None:
                lost += node.own.subtree()
                node.own = None
        forget_prefixes(lost)
        return lost

    @staticmethod
    def _merged(node: Node) -> list[Node]:
        """A drafted step that came after the target's and is the same: the own branch goes on in its place."""
        own, child = node.own, node.children[0] if node.children else None
        if own is None or child is None or child.verdict is None or child.verdict.reason is not Reason.EXACT:
            return []
        if not own.target_started and not own.children:
            return []
        assert not child.target_started and not child.children  # it is settled as soon as it is drafted
        own.drafted, own.verdict, own.verdict_started, own.chance = child.drafted, child.verdict, True, child.chance
        own.times_s = {**child.times_s, **own.times_s}
        node.children[0], node.own = own, None
        return [child]

    # What has happened ---------------------------------------------------------------------------------------------

    def drafted(self, node: Node, step: Step | None) -> None:
        """A drafted step is there, or None: the draft failed. One that was called late meanwhile stays so."""
        assert node.parent is not None
        if node.drafting is Drafting.DROPPED:
            return
        assert node.drafting is Drafting.RUNNING, node.drafting
        # Only of a lower sibling, so that it does not matter which of two equal ones came first.
        lower = node.parent.children[: node.sibling]
        duplicate = step is not None and any(other.drafted is not None and other.drafted.ids == step.ids for other in lower)
        if step is None or duplicate:
            node.drafting = Drafting.DROPPED
            node.verdict = Verdict(False, Reason.DUPLICATE if duplicate else Reason.DRAFT_ERROR)
            return
        node.drafting = Drafting.DONE
        node.drafted = step
        node.prefix = append(node.parent.prefix, step)

    def targeted(self, node: Node, step: Step) -> None:
        """A target step is there."""
        assert node.target_started and node.target is None
        node.target = step
        if self.own_branches and not step.closes:
            node.own = Node(append(node.prefix, step), parent=node)

    def target_failed(self, node: Node, error: Exception) -> None:
        """A target step has failed. One ahead of the root is given back, and the window grows no more until the root moves.

        Raises:
            error: nobody can go on without the root's own.
        """
        assert node.target_started and node.target is None
        if node is self.root:
            raise error
        node.target_started, node.target_failed = False, True
        self.horizon.max_depth = 0

    def judged(self, node: Node, verdict: Verdict) -> None:
        """A verdict is there."""
        assert node.verdict_started and node.verdict is None
        node.verdict = verdict

    # How the root moves --------------------------------------------------------------------------------------------

    def move_root(self, *, only_equal: bool = False) -> Decision | None:
        """Move the root past the next step and say how, or None while something that this depends on is still open.

        The lowest accepted sibling wins, once all lower ones are decided, so the result does not depend on which verdict
        came first. A draft still running when the root's target step is there is late.

        Args:
            only_equal: by now other tokens than the target's are not taken, whatever a verdict said before.
        """
        root = self.root
        if root.target is None:
            return None
        for child in root.children:
            if child.drafting is Drafting.RUNNING and not self.wait_for_drafted:
                child.drafting = Drafting.DROPPED
                child.verdict = Verdict(False, Reason.LATE)
        for child in root.children:
            if child.verdict is None:
                return None
            if only_equal and child.verdict.accepted and child.verdict.reason is not Reason.EXACT:
                # Siblings behind one that was accepted have lost already: the target's own step is what is left.
                child.verdict = Verdict(False, Reason.RISK_BUDGET)
                return self._correct()
            if child.verdict.accepted:
                return self._accept(child)
        return self._correct()

    def _accept(self, child: Node) -> Decision:
        assert child.drafted is not None and child.verdict is not None
        root, kept, depth = self.root, set(child.subtree()), self._depth_at_work()
        discarded = tuple(node for node in root.subtree() if node not in kept)
        self.root, child.parent = child, None
        return Decision(root, child.drafted, child, child, child.verdict.reason, discarded, depth)

    def _correct(self) -> Decision:
        root, depth = self.root, self._depth_at_work()
        assert root.target is not None
        discarded = tuple(root.subtree())
        compared = next((child for child in root.children if child.drafted is not None), None)
        compared = compared or (root.children[0] if root.children else None)
        reason = compared.verdict.reason if compared is not None and compared.verdict is not None else Reason.NONE
        self.root = root.own if root.own is not None else Node(append(root.prefix, root.target))
        self.root.parent = None
        kept = set(self.root.subtree())
        discarded = tuple(node for node in discarded if node not in kept)
        return Decision(root, root.target, None, compared, reason, discarded, depth)

    def _depth_at_work(self) -> int:
        """Steps between the root and the furthest prefix after which the target has written or writes."""
        return max((node.depth for node in self.root.subtree() if node.target_started), default=0)


def append(prefix: IntArray, step: Step) -> IntArray:
    """The prefix that a step leads to."""
    return np.concatenate([prefix, np.asarray(step.ids, dtype=np.int32)])


def forget_prefixes(nodes: Iterable[Node]) -> None:
    """Give back the tokens of nodes that have left the window: a trace keeps them, and each has a copy of the whole text."""
    for node in nodes:
        node.prefix = _NO_TOKENS
