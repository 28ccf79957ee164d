"""The lookahead tree of one request: pure state, no clock, no engine, no asyncio.

A node is a prefix: the committed text, or that followed by drafted steps. A node's *target step* is what the target writes
after that prefix; the node's children are the *drafted steps* that continue the same prefix, so a node's target step judges its
children. The root is the committed prefix. The window slides: when a child is accepted it becomes the root, and whatever runs
below it goes on.

                       root ── target step t0
                       ├── child 0 (d0) ── target step t1        judged: (t0, d0)
                       │    └── child 0 (d1) ── target step t2   judged: (t1, d1)
                       └── child 1 (d0')                         judged: (t0, d0')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.step import NO_TAIL, Step, Tail
from lr_backend.verify.verdict import Reason, Verdict, settle


class Drafting(StrEnum):
    """Where a child's drafted step stands."""

    RUNNING = "running"
    DONE = "done"
    DROPPED = "dropped"


@dataclass(eq=False)
class Node:
    """One prefix. Compared by identity.

    Attributes:
        prefix: token ids up to here, shape [N]. Of a child being drafted: its parent's.
        sibling: place among the children of its parent; lower ones win.
        drafted: the drafted step that led here; None for a root that the target wrote.
        target: the target's step after this prefix, once written.
        verdict: of the drafted step against the parent's target step.
        chance: that it will be accepted, as far as is known once it is drafted.
    """

    prefix: IntArray
    parent: Node | None = None
    sibling: int = 0
    drafting: Drafting = Drafting.DONE
    drafted: Step | None = None
    chance: float = 1.0
    target_started: bool = False
    target: Step | None = None
    verdict: Verdict | None = None
    verdict_started: bool = False
    token_share: float | None = None
    """Part of the first child's drafted step that the target accepted as token drafts for its own; None: it verified none."""
    children: list[Node] = field(default_factory=list)
    times_s: dict[str, float] = field(default_factory=dict)
    """When its work started and finished, noted by the loop for the trace."""

    @property
    def depth(self) -> int:
        """Drafted steps between the root and here."""
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def closed(self) -> bool:
        """No speculation below: the drafted step ends the answer or the reasoning, or opens a tool call."""
        return self.drafted is not None and self.drafted.closes

    @property
    def begun(self) -> Tail:
        """What of this node's drafted step the draft wrote with the one before it; that goes on with its first child."""
        before = self.parent.drafted if self.parent is not None and self.sibling == 0 else None
        return before.tail if before is not None else NO_TAIL

    def subtree(self) -> Iterator[Node]:
        """This node and all below, parents first."""
        yield self
        for child in self.children:
            yield from child.subtree()


@dataclass(frozen=True, slots=True)
class Decision:
    """How the root moves: onto an accepted child, or past the target's own step.

    Attributes:
        position: the root before the move.
        step: what is committed.
        winner: the accepted child, or None where the target's step stands.
        compared: the drafted child whose fate is recorded (the winner, or the first sibling), if any was started.
        reason: why.
    """

    position: Node
    step: Step
    winner: Node | None
    compared: Node | None
    reason: Reason
    discarded: tuple[Node, ...]


class Tree:
    """The window of one request.

    Args:
        prefix: committed tokens, shape [N].
        end: absolute token count at which the answer is full; nothing starts at or past it.
        max_depth: target steps that run at most along one chain from the root; drafting runs one step past them. 0: no drafts.
        width: drafted children of a node at most.
        min_chance: below a drafted step work starts only while it and all above it are accepted with this probability at least.
        wait_for_drafts: the root waits for a draft that was started (deterministic) instead of calling it late.
    """

    def __init__(
        self,
        prefix: IntArray,
        *,
        end: int,
        max_depth: int,
        width: int,
        min_chance: float = 0.0,
        wait_for_drafts: bool = False,
    ) -> None:
        self.root = Node(prefix)
        self.end = end
        self.max_depth = max_depth
        self.width = width
        self.min_chance = min_chance
        self.wait_for_drafts = wait_for_drafts

    # What may start ------------------------------------------------------------------------------------------------

    def start_targets(self) -> list[Node]:
        """Nodes whose target step may start now; each is handed out once."""
        nodes = [
            node
            for node, depth in self._open_nodes()
            if depth < max(1, self.max_depth) and not node.target_started and len(node.prefix) < self.end
        ]
        for node in nodes:
            node.target_started = True
        return nodes

    def start_drafts(self) -> list[Node]:
        """New children whose drafted step may start now; each is handed out once."""
        parents = [
            node
            for node, depth in self._open_nodes()
            if depth < self.max_depth and not node.children and len(node.prefix) < self.end
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

    def _open_nodes(self) -> Iterator[tuple[Node, int]]:
        """Nodes with a known prefix below which work may run, with their depth under the root."""
        frontier = [(self.root, 0, 1.0)]
        while frontier:
            node, depth, chance = frontier.pop()
            if depth and (node.drafting is not Drafting.DONE or node.closed):
                continue
            if depth and node.verdict is None:
                chance *= node.chance
            if depth and (chance < self.min_chance or (node.verdict is not None and not node.verdict.accepted)):
                continue  # unlikely, or rejected already: nothing more is spent below it
            yield node, depth
            frontier.extend((child, depth + 1, chance) for child in reversed(node.children))

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

    def judged(self, node: Node, verdict: Verdict) -> None:
        """A verdict is there."""
        assert node.verdict_started and node.verdict is None
        node.verdict = verdict

    def drafted_after(self, node: Node) -> tuple[int, ...] | None:
        """The first sibling that continues ``node``'s prefix, as token drafts for its target step; None while there is none."""
        first = node.children[0].drafted if node.children else None
        return first.ids if first is not None else None

    # How the root moves --------------------------------------------------------------------------------------------

    def decide(self) -> Decision | None:
        """The next move of the root, or None while something that it depends on is still open. Moves the root.

        The lowest accepted sibling wins, once all lower ones are decided, so the result does not depend on which verdict
        came first. A draft still running when the root's target step is there is late.
        """
        root = self.root
        if root.target is None:
            return None
        for child in root.children:
            if child.drafting is Drafting.RUNNING and not self.wait_for_drafts:
                child.drafting = Drafting.DROPPED
                child.verdict = Verdict(False, Reason.LATE)
            if child.verdict is None:
                return None
            if child.verdict.accepted:
                return self._accept(child)
        return self._correct()

    def _accept(self, child: Node) -> Decision:
        assert child.drafted is not None and child.verdict is not None
        root, kept = self.root, set(child.subtree())
        discarded = tuple(node for node in root.subtree() if node not in kept)
        self.root, child.parent = child, None
        return Decision(root, child.drafted, child, child, child.verdict.reason, discarded)

    def _correct(self) -> Decision:
        root = self.root
        assert root.target is not None
        discarded = tuple(root.subtree())
        compared = next((child for child in root.children if child.drafted is not None), None)
        compared = compared or (root.children[0] if root.children else None)
        reason = compared.verdict.reason if compared is not None and compared.verdict is not None else Reason.NONE
        self.root = Node(append(root.prefix, root.target))
        return Decision(root, root.target, None, compared, reason, discarded)


def append(prefix: IntArray, step: Step) -> IntArray:
    """The prefix that a step leads to."""
    return np.concatenate([prefix, np.asarray(step.ids, dtype=np.int32)])
