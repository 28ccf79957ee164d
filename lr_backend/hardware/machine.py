"""A whole machine: what each role's engine costs, what is on the way to it, and who shares cards or cores with whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from lr_backend.engine import Role
from lr_backend.hardware.cost import CostModel, Iteration, LinearCosts
from lr_backend.hardware.overheads import BLS_MS, at
from lr_backend.hardware.pace import EnginePace
from lr_backend.hardware.rules import OWN_RULES, UpstreamRules
from lr_backend.hardware.sharing import IDLE, LAWS, Demand, Law, adding_up, waiting_for_kernels


class Sizes(Protocol):
    """What bounds the iterations of an engine, as its section of a spec has it."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Hops:
    """A call's way to an engine and back, in seconds.

    Attributes:
        draft_token_s: of each draft token that brings logits, on the way there.
    """

    there_s: float = 0.0
    back_s: float = 0.0
    draft_token_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """One role's engine: its costs, the hops to it, and the cards that it runs on.

    Attributes:
        one_hot: sampled draft tokens of a call are charged for logits.
        kv_tokens: KV memory of all sequences together.
        rules: of the engine, beside taking time.
        num_draft_tokens: that the engine puts forward by itself in each call, whatever the call asks for.
        looks_up: these stood behind the same words earlier in the text; otherwise a draft model writes them.
        max_num_tokens: of one iteration.
    """

    costs: CostModel
    hops: Hops = field(default_factory=Hops)
    cards: tuple[int, ...] = ()
    one_hot: bool = False
    rules: UpstreamRules = OWN_RULES
    num_draft_tokens: int = 0
    looks_up: bool = False
    kv_tokens: int = 1 << 20
    max_batch_size: int = 1024
    max_num_tokens: int = 1 << 16
    tokens_per_block: int = 32


@dataclass(frozen=True)
class Machine:
    """Where target, draft and judge run.

    Attributes:
        places: of each role.
        law: how roles that use the same card slow one another down.
        loop_s: what the step loop takes before it makes a call. It is one thread for all requests, so this goes in turns.
        call_demand: of what all roles share, what a call takes while it is on its way.
    """

    places: Mapping[Role, Place]
    law: Law = waiting_for_kernels
    loop_s: float = 0.0
    call_demand: Demand = IDLE

    @classmethod
    def paced(
        cls, paces: Mapping[Role, EnginePace], sizes: Mapping[Role, Sizes], kv_tokens: Mapping[Role, int] | None = None
    ) -> Self:
        """The machine that engines with these paces stand for, with Triton's own hop to each of them.

        Args:
            kv_tokens: KV memory of each role; None: there is enough.

        Raises:
            ConfigError: there is no such profile.
        """
        places = {}
        for role, pace in paces.items():
            overheads = pace.overheads()
            one_way_s = (at(BLS_MS, pace.bound) / 2.0 + overheads.hop_ms) / 1e3
            draft_token_s = overheads.draft_logits_ms(1) / 1e3 if pace.one_hot else 0.0
            cards = pace.cards.get(pace.role, ())
            hops, size = Hops(one_way_s, one_way_s, draft_token_s), sizes[role]
            places[role] = Place(
                pace.costs(),
                hops,
                cards,
                pace.one_hot,
                pace.rules,
                kv_tokens=kv_tokens[role] if kv_tokens else Place.kv_tokens,
                max_batch_size=size.max_batch_size,
                max_num_tokens=size.max_num_tokens,
                tokens_per_block=size.tokens_per_block,
            )
        return cls(places, LAWS[next(iter(paces.values())).sharing])

    def with_longer_hops(self, seconds: Mapping[Role, float]) -> Self:
        """The machine with so many seconds more on each way of a call, there and back; below 0: with fewer."""
        places = dict(self.places)
        for role, more_s in seconds.items():
            hops = places[role].hops
            longer = replace(hops, there_s=hops.there_s + more_s, back_s=hops.back_s + more_s)
            places[role] = replace(places[role], hops=longer)
        return replace(self, places=places)

    def cost_ratio(self, kv_tokens: int) -> float:
        """c: time of a drafted token over that of a target's, each model alone with so many tokens behind it."""
        alone = Iteration((), 1, kv_tokens)
        return self.places[Role.DRAFT].costs.seconds(alone) / self.places[Role.TARGET].costs.seconds(alone)


@dataclass(frozen=True)
class LinearTimes:
    """A machine of which only recorded requests are known. Units are free.

    Attributes:
        target_token_s, draft_token_s: an iteration that decodes one sequence.
        verdict_s: a verdict of the judge.
        verification_s: what an iteration of the target that verifies draft tokens takes beyond one that decodes.
        crowding: how much longer an iteration takes for each further sequence, as a share of its time with one. 0: parallel
            sequences are free.
        call_s: what one engine call takes beside its tokens.
        loop_s: what the step loop takes before it makes a call.
        target_prompt_s, draft_prompt_s: a token of a prompt that the role has not computed yet.
        num_cores: how many compute at the same time at full speed, of the roles and of calls on their way; more share. 1.5: two
            take a third longer than one alone. None: each role has its own device, and a call holds nobody up.
    """

    target_token_s: float = 1.0
    draft_token_s: float = 0.1
    verdict_s: float = 0.0
    verification_s: float = 0.0
    crowding: float = 0.0
    call_s: float = 0.0
    loop_s: float = 0.0
    target_prompt_s: float = 0.0
    draft_prompt_s: float = 0.0
    num_cores: float | None = None

    def __post_init__(self) -> None:
        rules = {name: getattr(self, name) > 0.0 for name in ("target_token_s", "draft_token_s")}
        at_least_0 = ("verdict_s", "verification_s", "crowding", "call_s", "loop_s", "target_prompt_s", "draft_prompt_s")
        rules |= {name: getattr(self, name) >= 0.0 for name in at_least_0}
        rules["num_cores"] = self.num_cores is None or self.num_cores >= 1
        if bad := [name for name, valid in rules.items() if not valid]:
            raise ValueError(", ".join(f"{name}={getattr(self, name)} is out of range" for name in bad))

    def machine(self) -> Machine:
        demand = 1.0 / self.num_cores if self.num_cores else 0.0
        cards = (0,) if self.num_cores else ()

        def place(token_s: float, prompt_s: float, verification_s: float = 0.0) -> Place:
            return Place(LinearCosts(token_s, self.crowding, prompt_s, verification_s, demand), Hops(there_s=self.call_s), cards)

        places = {
            Role.TARGET: place(self.target_token_s, self.target_prompt_s, self.verification_s),
            Role.DRAFT: place(self.draft_token_s, self.draft_prompt_s),
            Role.JUDGE: place(self.verdict_s, 0.0),
        }
        return Machine(places, adding_up, self.loop_s, Demand(demand))
