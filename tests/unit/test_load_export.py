"""What a profile export of perf_analyzer says about one point of load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.load.export import Limits, MalformedExport, Quantiles, RequestTimes, crossover, figures, parse_export, read_export

DATA = Path(__file__).parents[1] / "data" / "perf_analyzer"
LIMITS = Limits(first_step_s=0.5, latency_s=2.0)


def times(
    sent_s: float, text_s: Sequence[float], end_s: float, num_tokens: int = 100, finish_reason: str = "stop"
) -> RequestTimes:
    return RequestTimes(sent_s, tuple(text_s), end_s, num_tokens, finish_reason)


# What an export says -----------------------------------------------------------------------------------------------


def test_a_streamed_export_gives_first_step_gaps_and_end() -> None:
    requests = read_export(DATA / "lr_streamed.json")

    document = json.loads((DATA / "lr_streamed.json").read_text())
    entry = document["experiments"][0]["requests"][0]
    first, stamps, outputs = requests[0], entry["response_timestamps"], entry["response_outputs"]
    assert len(requests) == 3
    assert first.latency_s == pytest.approx((stamps[-1] - entry["timestamp"]) / 1e9)
    assert first.first_step_s == pytest.approx((stamps[0] - entry["timestamp"]) / 1e9)
    assert len(first.text_s) == sum(bool(output["text_output"]) for output in outputs) == len(outputs) - 1
    assert first.gaps_s == pytest.approx([(b - a) / 1e9 for a, b in pairwise(stamps[:-1])])
    assert first.num_tokens == json.loads(outputs[-1]["usage"])["completion_tokens"]
    assert 0 < first.first_step_s < first.latency_s
    assert first.finish_reason == "stop"


def test_an_answer_in_one_piece_has_no_gaps_and_its_first_step_at_the_end() -> None:
    for request in read_export(DATA / "ar_whole.json"):
        assert request.gaps_s == ()
        assert request.first_step_s == request.latency_s


@pytest.mark.parametrize("name", ["lr_streamed.json", "ar_whole.json"])
def test_the_final_flag_behind_an_answer_is_no_part_of_it(name: str) -> None:
    document = json.loads((DATA / name).read_text())
    expected = parse_export(document)
    for entry in document["experiments"][0]["requests"]:
        entry["response_timestamps"].append(entry["response_timestamps"][-1] + 10**9)
        entry["response_outputs"].append(dict.fromkeys(entry["response_outputs"][-1], ""))

    assert parse_export(document) == expected


def test_requests_are_sorted_by_when_they_were_sent() -> None:
    document = json.loads((DATA / "lr_streamed.json").read_text())
    expected = parse_export(document)
    document["experiments"][0]["requests"].reverse()

    assert parse_export(document) == expected
    assert [request.sent_s for request in expected] == sorted(request.sent_s for request in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.pop("experiments"), "experiments"),
        (lambda document: document["experiments"].clear(), "not the export of one point"),
        (lambda document: document["experiments"][0]["requests"].clear(), "no request completed"),
        (lambda document: document["experiments"][0]["requests"][0]["response_outputs"].pop(), "arrivals"),
        (lambda document: document["experiments"][0]["requests"][0]["response_outputs"][-1].update(usage=""), "usage"),
    ],
)
def test_what_is_no_export_is_refused_with_a_reason(change: Callable[[Any], None], message: str) -> None:
    document = json.loads((DATA / "lr_streamed.json").read_text())
    change(document)

    with pytest.raises(MalformedExport, match=message):
        parse_export(document)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(MalformedExport, match=r"profile\.json cannot be read"):
        read_export(path)
    path.write_text('{"experiments": [')
    with pytest.raises(MalformedExport, match=r"profile\.json is no JSON"):
        read_export(path)


# Figures -----------------------------------------------------------------------------------------------------------


def test_figures_of_a_point() -> None:
    requests = [
        times(0.0, [0.2, 0.5, 1.0], 1.0, 100),  # good
        times(0.5, [1.2, 1.5], 1.5, 50),  # first step after 0.7 s
        times(1.0, [1.4], 4.0, 150),  # takes 3 s
        times(2.0, [2.1], 3.0, 0, "deadline"),  # in time, but cut
    ]

    one = figures(requests, LIMITS)

    assert (one.num_requests, one.num_cut) == (4, 1)
    assert one.duration_s == 4.0
    assert (one.requests_per_s, one.tokens_per_s, one.mean_tokens) == (1.0, 75.0, 75.0)
    assert one.tokens_per_s_per_user == pytest.approx((100 + 50 + 50 + 0) / 4)
    assert one.arrivals_per_s == pytest.approx(3 / 2.0)
    assert (one.goodput_rps, one.good_share) == (0.25, 0.25)
    assert one.latency_s.p50 == pytest.approx(1.0)
    assert one.latency_s.mean == pytest.approx(1.5)
    assert one.first_step_s.p50 == pytest.approx((0.2 + 0.4) / 2)
    assert one.gap_s.p50 == pytest.approx(0.3)
    assert one.token_s == pytest.approx(6.0 / 300)


def test_quantiles_interpolate_between_order_statistics() -> None:
    assert Quantiles.of([3.0, 1.0, 2.0]) == Quantiles(2.0, pytest.approx(2.8), pytest.approx(2.98), 2.0)
    assert Quantiles.of([]) == Quantiles(None, None, None, None)


def test_a_limit_is_kept_up_to_and_with_its_value() -> None:
    assert LIMITS.kept_by(times(0.0, [0.5], 2.0))
    assert not LIMITS.kept_by(times(0.0, [0.51], 2.0))
    assert not LIMITS.kept_by(times(0.0, [0.5], 2.01))
    assert not LIMITS.kept_by(times(0.0, [], 1.0))  # no text before the end, which is past the first limit


@pytest.mark.parametrize(
    ("ratios", "load"),
    [([1.4, 1.2, 0.8], 3.0), ([1.4, 1.2, 1.0], None), ([0.9, 0.8, 0.7], None), ([1.0, 0.5, 0.4], 1.0), ([0.9, 1.1, 0.9], 3.0)],
)
def test_the_crossover_is_where_the_speedup_falls_below_one(ratios: list[float], load: float | None) -> None:
    assert crossover([1.0, 2.0, 4.0], ratios) == (None if load is None else pytest.approx(load))


def test_slow_motion_is_taken_off_all_times() -> None:
    slow = times(4.0, [5.0, 7.0], 8.0, 100)

    fast = slow.sped_up(4.0)

    assert (fast.sent_s, fast.first_step_s, fast.gaps_s, fast.latency_s) == (1.0, 0.25, (0.5,), 1.0)
    assert (fast.num_tokens, fast.finish_reason) == (100, "stop")
