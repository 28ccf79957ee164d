"""How many draft tokens are verified at once, and how many where a step begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.policy.draft_length import LEAST_SEEN, MEMORY, DraftLength, expected_tokens
from lr_backend.policy.policy import Learned


def learned(
    accepted: float,
    *,
    base_s: float = 20.0,
    token_s: float = 0.9,
    call_s: float = 0.0,
    drafted_token_s: float = 0.0,
    number: int = 64,
) -> DraftLength:
    """After verifications of 1 to 10 draft tokens, each accepted with that chance, and as many calls of the draft; times follow
    lines."""
    found, owed = DraftLength(), 0.0
    for index in range(number):
        proposed = 1 + index % 10
        owed += expected_tokens(accepted, proposed) - 1.0
        taken = min(proposed, round(owed))
        owed -= taken
        found.verified(proposed, taken, base_s + token_s * proposed)
        if drafted_token_s:
            found.drafted(proposed, call_s + drafted_token_s * proposed)
    return found


@given(st.floats(0.0, 1.0), st.integers(0, 40))
def test_a_verification_brings_one_to_all_and_one_more(acceptance: float, number: int) -> None:
    assert 1.0 <= expected_tokens(acceptance, number) <= number + 1.0 + 1e-9


def test_little_seen_takes_the_most() -> None:
    assert DraftLength().best(8) == 8
    assert learned(0.0, number=LEAST_SEEN - 1).best(8) == 8


@pytest.mark.parametrize("drafted_token_s", [0.0, 2.5])
def test_more_are_verified_where_more_are_accepted(drafted_token_s: float) -> None:
    lengths = [learned(chance, drafted_token_s=drafted_token_s).best(10) for chance in (0.0, 0.5, 0.8, 0.97)]

    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] >= 6


def test_a_slow_draft_is_asked_for_fewer() -> None:
    lengths = [learned(0.75, drafted_token_s=token_s).best(10) for token_s in (10.0, 2.5, 0.0)]

    assert lengths[0] < lengths[1] <= lengths[2]


def test_calls_that_take_long_whatever_they_write_are_few() -> None:
    """A crowded draft, or one behind a long prefix: a token takes the same seconds in both, and a call does not."""
    by_token, by_call = learned(0.75, drafted_token_s=50.0), learned(0.75, call_s=250.0, drafted_token_s=1.0)

    assert by_token.best(10) < by_call.best(10)


def test_of_a_long_answer_the_end_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would hold up the other requests of a process."""
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(DraftLength, "verified", lambda self, num, *rest: seen.append(("verified", num)))
    monkeypatch.setattr(DraftLength, "drafted", lambda self, num, *rest: seen.append(("drafted", num)))
    numbers = range(10_000)
    calls = iter([(number, 0, 1.0) for number in numbers]), iter([(number, 1.0) for number in numbers])
    Learned(lambda: 0.0).learn_draft_length("draft_model", *calls, ())
    last = numbers[-4 * MEMORY :]
    assert seen == [*(("verified", number) for number in last), *(("drafted", number) for number in last)]


@given(st.lists(st.tuples(st.integers(1, 10), st.floats(0.0, 1.0), *[st.floats(1e-3, 10.0)] * 2), max_size=60))
def test_it_is_always_one_of_those_that_are_allowed(seen: list[tuple[int, float, float, float]]) -> None:
    found = DraftLength()
    for proposed, share, seconds, drafting_s in seen:
        found.verified(proposed, int(share * proposed), seconds)
        found.drafted(proposed, drafting_s)

    assert 1 <= found.best(7) <= 7


def begun(chance: float, *, number: int = 64) -> DraftLength:
    """As :func:`learned` at 0.95, where the draft tokens that steps begin with are each accepted with that chance."""
    found, owed = learned(0.95, base_s=15.0, token_s=0.5, call_s=2.0, drafted_token_s=2.5), 0.0
    for index in range(number):
        proposed = 1 + index % 8
        owed += expected_tokens(chance, proposed) - 1.0
        taken = min(proposed, int(owed))
        owed -= taken
        found.verified_first(proposed, taken)
    return found


def test_a_step_begins_with_fewer_where_fewer_are_accepted() -> None:
    firsts = [begun(chance).first(8) for chance in (0.3, 0.7, 0.95)]
    assert firsts == sorted(firsts) and firsts[0] < 3 < firsts[2]
    assert begun(0.3).best(8) == begun(0.95).best(8) > firsts[0], "further on as many as ever"


def test_while_little_is_known_of_beginnings_they_are_like_the_rest() -> None:
    assert DraftLength().first(8) == begun(0.3, number=LEAST_SEEN - 1).first(8) == 8
    untimed = DraftLength()
    for _ in range(LEAST_SEEN):
        untimed.verified_first(8, 1)
    assert untimed.first(8) == 8
