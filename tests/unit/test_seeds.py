"""Which calls share noise, and why no two steps of a committed path may."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.audit.request import audit_draw
from lr_backend.engine import Role
from lr_backend.loop.seeds import Seeds
from lr_backend.request import draw_seed
from lr_backend.testing import run_virtual
from tests.support.examples import answers
from tests.support.world import PROMPT, World, chance, imitator, storyteller

salts = st.integers(0, 10_000)
offsets = st.integers(0, 500)
OTHERS = [(Role.DRAFT, 1), (Role.DRAFT, 2), (Role.JUDGE, 0)]


# Whose are the same ----------------------------------------------------------------------------------------------------


@given(salts, offsets, offsets, offsets, offsets, st.booleans())
def test_with_coupled_noise_target_drafted_step_and_draft_tokens_of_a_step_share_it(
    seed: int, start: int, one: int, other: int, third: int, by_step: bool
) -> None:
    """However many calls write them."""
    seeds = Seeds(seed, coupled=True, by_step=by_step)
    shared = seeds.step(start, one, Role.TARGET)
    assert seeds.step(start, other, Role.DRAFT) == seeds.draft_tokens(start, third) == shared
    assert seeds.step(start, other, Role.TARGET, sibling=1) == shared  # the target's step judges all siblings


@given(salts, st.sets(offsets, min_size=2, max_size=2))
def test_steps_that_a_judge_decides_on_never_share_it(seed: int, starts: set[int]) -> None:
    seeds = Seeds(seed, coupled=True, by_step=True)
    assert len({seeds.step(start, start, Role.TARGET) for start in starts}) == 2
    whole = Seeds(seed, coupled=True, by_step=False)
    assert len({whole.step(start, start, Role.TARGET) for start in starts}) == 1


@pytest.mark.parametrize("by_step", [False, True])
def test_further_siblings_have_noise_of_their_own_whatever_calls_write_them(by_step: bool) -> None:
    seeds = Seeds(7, coupled=True, by_step=by_step)
    for start in range(50):
        siblings = [seeds.step(start, start, Role.DRAFT, sibling) for sibling in range(4)]
        assert len(set(siblings)) == 4
        assert siblings == [seeds.step(start, start + 9, Role.DRAFT, sibling) for sibling in range(4)]


def test_without_coupled_noise_no_two_calls_share_any() -> None:
    """Not even where one step's second call begins where another's first does."""
    seeds = Seeds(3, coupled=False)
    made = [
        seeds.step(start, offset, role, sibling)
        for start in range(12)
        for offset in range(start, 12)
        for role in Role
        for sibling in range(3)
    ]
    made += [seeds.draft_tokens(start, offset) for start in range(12) for offset in range(start, 12)]
    assert len(set(made)) == len(made)


@given(salts, offsets)
def test_seeds_are_63_bits_and_audits_are_drawn_apart(seed: int, start: int) -> None:
    for seeds in (Seeds(seed), Seeds(seed, coupled=True), Seeds(seed, coupled=True, by_step=False)):
        assert 0 <= seeds.step(start, start, Role.TARGET) < 2**63
        assert audit_draw(seed, start) != seeds.step(start, start, Role.TARGET) / 2**63
    assert 0.0 <= audit_draw(seed, start) < 1.0


# In the loop -----------------------------------------------------------------------------------------------------------


def sampled_world(salt: int, order: int, *, coupled: bool, draft_temperature: float | None = None) -> World:
    target = storyteller(salt, sampled=True)
    draft = imitator(target, salt + 1, 0.9, sampled=True)
    settings = {"coupled_noise": coupled, "draft_temperature": draft_temperature}
    return World.of(target, draft, lambda a, b: chance("like", salt, a, b) < 0.5, **settings).shuffled(order)


@answers()
@given(salts, salts, st.sampled_from(["lr", "lr_sd", "auto"]), st.integers(1, 3))
def test_a_judged_step_is_written_with_the_seed_of_where_it_begins(salt: int, order: int, mode: str, width: int) -> None:
    world = sampled_world(salt, order, coupled=True)
    outcome = run_virtual(world.answer(mode=mode, temperature=0.6, seed=salt, width=width, max_depth=3, stream=True, trace=True))

    seeds = Seeds(salt, coupled=True, by_step=True)
    start_of = {seeds.step(start, start, Role.TARGET): start for start in range(len(PROMPT) + 400)}
    path = (*PROMPT, *outcome.completion_ids)
    starts = [len(PROMPT)]
    for record in outcome.ledger.records:
        starts.append(starts[-1] + record.num_tokens)
    on_path = defaultdict(set)
    for recorded in world.target.calls:
        prefix = tuple(recorded.call.input_ids.tolist())
        start = start_of[recorded.call.seed]
        assert start <= len(prefix)
        if prefix == path[: len(prefix)]:
            on_path[recorded.call.seed].add(start)
    assert all(len(one) == 1 for one in on_path.values())
    assert len(on_path) >= len(set(starts[:-1]))
    first = [recorded.call for recorded in world.draft.calls if recorded.call.seed in start_of]
    others = [recorded.call for recorded in world.draft.calls if recorded.call.seed not in start_of]
    assert first
    assert width > 1 or not others


@pytest.mark.parametrize(
    ("mode", "draft_temperature", "shares"),
    [("lr", None, True), ("lr", 0.0, False), ("lr", 0.6, False), ("lossless", None, True), ("lossless", 0.0, True)],
)
def test_a_draft_with_a_temperature_of_its_own_shares_no_noise_where_meaning_counts(
    mode: str, draft_temperature: float | None, shares: bool
) -> None:
    world = sampled_world(5, 0, coupled=True, draft_temperature=draft_temperature)
    run_virtual(world.answer(mode=mode, temperature=0.6, seed=5, max_depth=3))
    by_target, by_draft = (
        {(recorded.call.seed, recorded.call.sampling.temperature) for recorded in engine.calls}
        for engine in (world.target, world.draft)
    )
    assert by_draft
    assert bool(by_target & by_draft) is shares


@answers()
@given(salts, salts, st.sampled_from(["lr", "lr_sd", "sd", "auto"]), st.integers(1, 3))
def test_without_coupled_noise_no_call_repeats_anothers(salt: int, order: int, mode: str, width: int) -> None:
    world = sampled_world(salt, order, coupled=False)
    run_virtual(world.answer(mode=mode, temperature=0.6, seed=salt, width=width, max_depth=3))
    seeds: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for role, engine in (("target", world.target), ("draft", world.draft)):
        for recorded in engine.calls:
            kind = "draft_tokens" if "/draft_tokens/" in recorded.call.request_id else role
            seeds[recorded.call.seed].add((kind, len(recorded.call.input_ids)))
    # The same place under another prefix, or asked for again, may have the same.
    assert all(len(users) == 1 for users in seeds.values())


# Exactly, on a vocabulary of two tokens --------------------------------------------------------------------------------

SIDES = 3
"""Noise at one position is a fair die."""
Noise = Callable[[object], int]
Text = tuple[int, ...]
T = TypeVar("T")


class _Unknown(Exception):
    """A die that has not been thrown."""


def all_throws(program: Callable[[Noise], T]) -> Iterator[tuple[T, Fraction]]:
    """What a program may come to, with probabilities: over all values of the dice that it looks at."""
    open_throws: list[dict[object, int]] = [{}]
    while open_throws:
        thrown = open_throws.pop()

        def noise(key: object, thrown: dict[object, int] = thrown) -> int:
            if key not in thrown:
                raise _Unknown(key)
            return thrown[key]

        try:
            yield program(noise), Fraction(1, SIDES ** len(thrown))
        except _Unknown as unknown:
            (key,) = unknown.args
            open_throws += [{**thrown, key: value} for value in range(SIDES)]


def chance_of_one(role: Role, context: Text) -> int:
    """Of ``SIDES``: the chance of token 1 behind a text; the draft's is another than the target's."""
    return 1 + int(2 * chance("toy", role.value, context))


def has_ended(step: Text) -> bool:
    """A step is token 1, or two tokens."""
    return step[-1] == 1 or len(step) == 2


STEPS: tuple[Text, ...] = ((1,), (0, 0), (0, 1))
PAIRS = [(target, drafted) for target in STEPS for drafted in STEPS if target != drafted]
VERIFIERS = [
    frozenset(pair for pair, kept in zip(PAIRS, keeps, strict=True) if kept) for keeps in product([0, 1], repeat=len(PAIRS))
]
"""All that there are: each is the set of the pairs of (target step, drafted step) that it accepts."""


def two_steps(noise: Noise, seeds: Seeds, accepts: frozenset[tuple[Text, Text]], chunk: int) -> tuple[Text, Text]:
    """The first committed step, and the target's step behind it; each call writes ``chunk`` tokens."""

    def write(prefix: Text, role: Role) -> Text:
        step: Text = ()
        while not step or not has_ended(step):
            offset = len(prefix) + len(step)
            call = len(prefix) + len(step) // chunk * chunk
            # An engine draws by the seed and the position, or else by the seed and the place in the call.
            key = (seeds.step(len(prefix), call, role), offset if seeds.coupled else offset - call)
            step = (*step, int(noise(key) < chance_of_one(role, (*prefix, *step))))
        return step

    target, drafted = write((), Role.TARGET), write((), Role.DRAFT)
    committed = drafted if (target, drafted) in accepts else target
    return committed, write(committed, Role.TARGET)


def law_behind(prefix: Text, step: Text) -> Fraction:
    """The target's own chance of a step."""
    chances = Fraction(1)
    for place, token in enumerate(step):
        one = Fraction(chance_of_one(Role.TARGET, (*prefix, *step[:place])), SIDES)
        chances *= one if token else 1 - one
    return chances


def is_biased(seeds: Seeds, accepts: frozenset[tuple[Text, Text]], chunk: int = 2) -> bool:
    """Whether the target's step behind a committed one is distributed otherwise than the target has it behind that text."""
    found: dict[Text, dict[Text, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
    for (committed, behind), share in all_throws(lambda noise: two_steps(noise, seeds, accepts, chunk)):
        found[committed][behind] += share
    return any(
        shares[step] / sum(shares.values()) != law_behind(committed, step)
        for committed, shares in found.items()
        for step in STEPS
    )


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("chunk", [1, 2])
def test_with_a_seed_a_step_no_verifier_can_bias_what_the_target_writes_next(coupled: bool, chunk: int) -> None:
    seeds = Seeds(0, coupled=coupled, by_step=True)
    assert not any(is_biased(seeds, accepts, chunk) for accepts in VERIFIERS)


def test_one_seed_for_all_steps_would_bias_it_under_half_of_the_verifiers() -> None:
    """A committed step may be shorter than what it was compared with: the next then meets noise that the verdict has depended on.

    Here it is the target's own ``1`` beside a drafted ``0x``, for all verifiers to which it matters what ``x`` is.
    """
    seeds = Seeds(0, coupled=True, by_step=False)
    biased = [accepts for accepts in VERIFIERS if is_biased(seeds, accepts)]
    matters = [accepts for accepts in VERIFIERS if (((1,), (0, 0)) in accepts) != (((1,), (0, 1)) in accepts)]
    assert biased == matters
    # Nothing but equal steps is accepted: then one seed is as good, and makes the text the same however it was speculated.
    assert not is_biased(seeds, frozenset())


def test_a_seed_that_the_server_draws_survives_javascript() -> None:
    """Its numbers are floats, and a request that names the seed is to be the same request again."""
    drawn = [draw_seed() for _ in range(200)]
    assert all(int(float(seed + 8)) == seed + 8 for seed in drawn)
    assert len(set(drawn)) == len(drawn)
