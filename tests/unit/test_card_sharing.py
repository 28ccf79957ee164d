"""The laws by which engines on one card slow one another down, beside what an H200 did."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.card import MODELS, WORK
from bench.kit.output import PAGES
from lr_backend.engine import Role
from lr_backend.hardware.cost import ProfileCosts
from lr_backend.hardware.overheads import Overheads
from lr_backend.hardware.profile import ProfileKey, find
from lr_backend.hardware.sharing import IDLE, LAWS, CardSharing, Demand, adding_up, taking_turns, waiting_for_kernels

demands = st.builds(Demand, st.floats(0.01, 1.0), st.floats(1e-5, 1e-2))


@pytest.mark.parametrize("law", [*LAWS.values(), adding_up])
@given(own=demands)
def test_who_is_alone_is_not_slowed(law: object, own: Demand) -> None:
    assert callable(law)
    assert law(own, []) == 1.0


@pytest.mark.parametrize("law", [*LAWS.values(), adding_up])
@given(own=demands, others=st.lists(demands, min_size=1, max_size=4))
def test_more_company_never_makes_it_faster(law: object, own: Demand, others: list[Demand]) -> None:
    assert callable(law)
    slower = [law(own, others[:count]) for count in range(len(others) + 1)]
    assert all(fewer <= more for fewer, more in pairwise(slower))


def test_who_asks_for_nothing_is_never_slowed_by_kernels() -> None:
    assert waiting_for_kernels(IDLE, [Demand(1.0, 1e-3)]) == 1.0
    assert taking_turns(IDLE, [Demand(1.0, 1e-3)]) == 1.0


def test_short_kernels_wait_longer_than_long_ones() -> None:
    short, long = Demand(1.0, 1e-4), Demand(1.0, 4e-4)
    assert waiting_for_kernels(short, [long]) > 2.0 > waiting_for_kernels(long, [short]) > 1.0


@pytest.mark.parametrize("sharing", CardSharing)
def test_the_laws_are_within_an_eighth_of_what_was_measured(sharing: CardSharing) -> None:
    rows = json.loads((PAGES / "card.json").read_text(encoding="utf-8"))[f"sharing, {sharing}"]["rows"]
    assert len(rows) > 4
    for row in rows[1:]:
        asked = {role: replace(costs_of(Role(role)).demand(WORK[Role(role)]), share=1.0) for role in row["together"]}
        for role, measured in row["slowdown"].items():
            slower = LAWS[sharing](asked[role], [demand for one, demand in asked.items() if one != role])
            assert slower == pytest.approx(measured, rel=0.125), (row["together"], role)
            assert slower == pytest.approx(row["law"][role]), (row["together"], role)


def costs_of(role: Role) -> ProfileCosts:
    """On the card that was measured."""
    profile = find(ProfileKey.of("h200_sxm", MODELS[role], 1, "bfloat16"))
    return ProfileCosts(profile, Overheads.compiled(profile, 1.0))
