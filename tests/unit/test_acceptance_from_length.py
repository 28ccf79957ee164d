"""How likely a draft token is accepted, from how many of them are accepted in a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.plan.fit_texts import acceptance_from_length


@given(st.floats(0.01, 0.98), st.integers(1, 32))
def test_the_acceptance_is_found_again_from_the_accepted_length(acceptance: float, num_drafts: int) -> None:
    mean = sum(acceptance**k for k in range(1, num_drafts + 1))
    assert acceptance_from_length(mean, num_drafts) == pytest.approx(acceptance, abs=1e-6)


def test_more_accepted_than_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        acceptance_from_length(3.0, 2)
