"""What the bench of faults makes of a process's memory and handles."""

from __future__ import annotations

import pytest

from bench.kit.held import ENOUGH_REQUESTS, TRITON, Held, Kept


def samples(num_requests: int, bytes_a_request: float, *, descriptors_at_last: int = 8) -> list[tuple[int, dict[int, Held]]]:
    """Thirty looks at a front end and at Triton, which both fill their caches over the first third."""
    found = []
    for index in range(1, 31):
        count = num_requests * index // 30
        filled = 1_000_000 * min(index, 10)
        descriptors = descriptors_at_last if index > 20 else 8
        ours = Held("frontend", filled + int(bytes_a_request * count), descriptors, 4)
        found.append((count, {1: ours, 2: Held(TRITON, filled + 600 * count, 30, 20)}))
    return found


def test_what_a_request_leaves_is_told_of_this_projects_processes_alone() -> None:
    kept = Kept.of(samples(ENOUGH_REQUESTS, 40.0), 0)
    assert kept.bytes_a_request == pytest.approx(40.0, rel=0.05)
    assert kept.bytes_by_process[TRITON] == pytest.approx(600.0, rel=0.05)
    assert kept.missed == ()


def test_a_leak_is_a_missed_promise() -> None:
    (told,) = Kept.of(samples(ENOUGH_REQUESTS, 100.0), 0).missed
    assert told.startswith("bytes a request: ")


def test_few_requests_prove_no_leak() -> None:
    kept = Kept.of(samples(ENOUGH_REQUESTS - 1, 100.0), 0)
    assert kept.bytes_a_request == pytest.approx(100.0, rel=0.05)
    assert kept.missed == ()


def test_handles_and_blocks_that_stay_are_missed_promises() -> None:
    kept = Kept.of(samples(300, 0.0, descriptors_at_last=9), 3)
    assert kept.missed == ("blocks held: 3", "more frontend descriptors: 1")


@pytest.mark.parametrize("leaks", [1, 2])
def test_processes_of_one_name_do_not_hide_each_other_s_leak(leaks: int) -> None:
    """Step loops are several processes of the same model."""
    quiet, leaking = samples(ENOUGH_REQUESTS, 0.0), samples(ENOUGH_REQUESTS, 100.0, descriptors_at_last=9)
    both = [
        (count, {leaks: held[1], 3 - leaks: other[1], 3: other[2]})
        for (count, held), (_, other) in zip(leaking, quiet, strict=True)
    ]

    kept = Kept.of(both, 0)

    assert kept.bytes_a_request == pytest.approx(100.0, rel=0.05)
    assert kept.more == {"frontend descriptors": 1}
