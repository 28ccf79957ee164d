"""Token speculation under vLLM's names: what is counted, and that it is sent once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lr_backend.request import Usage
from lr_backend.testing import run_virtual
from lr_backend.triton.metrics import MetricSheet
from lr_backend.triton.speculation_metrics import (
    ACCEPTED_PER_POSITION,
    ACCEPTED_TOKENS,
    COUNTERS,
    DRAFT_TOKENS,
    DRAFTS,
    DraftCounts,
    speculation_metrics,
)
from tests.unit.test_service import RecordedReplies, arrays, make_world, service_of


@dataclass
class Metrics:
    """Stands in for ``pb_utils.MetricFamily``."""

    COUNTER: str = "counter"
    values: dict[tuple[str, ...], float] = field(default_factory=dict)
    num_calls: int = 0

    def __call__(self, name: str, description: str, kind: str) -> Any:
        assert description and kind == self.COUNTER
        return Family(self, name)


@dataclass
class Family:
    metrics: Metrics
    name: str
    key: tuple[str, ...] = ()

    def Metric(self, labels: dict[str, str]) -> Family:
        assert (labels["model_name"], labels["engine"]) == ("lookahead", "0")
        key = (self.name, *([labels["position"]] if "position" in labels else []))
        assert key not in self.metrics.values, "made twice"
        self.metrics.values[key] = 0.0
        return Family(self.metrics, self.name, key)

    def increment(self, value: float) -> None:
        assert value > 0
        self.metrics.values[self.key] += value
        self.metrics.num_calls += 1


def test_what_an_engine_drafts_itself_has_no_positions() -> None:
    counts = DraftCounts()
    counts.verified(3, 2)
    counts.drafted_by_engine(5, 20, 14)
    assert dict(counts.values()) == {
        (DRAFTS, ()): 6.0,
        (DRAFT_TOKENS, ()): 23.0,
        (ACCEPTED_TOKENS, ()): 16.0,
        **{(ACCEPTED_PER_POSITION, (("position", str(position)),)): 1.0 for position in range(2)},
    }


@pytest.fixture
def shown() -> Iterator[tuple[Metrics, MetricSheet, DraftCounts]]:
    family = Metrics()
    counts = DraftCounts()
    metrics = speculation_metrics(family, "lookahead", counts)
    yield family, metrics, counts
    metrics.close()


def test_the_names_are_vllms() -> None:
    assert set(COUNTERS) == {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }


def test_drafts_are_counted_by_position() -> None:
    counts = DraftCounts()
    for num_proposed, num_accepted in ((4, 2), (4, 0), (3, 3)):
        counts.verified(num_proposed, num_accepted)

    assert {name: value for (name, labels), value in counts.values() if not labels} == {
        DRAFTS: 3.0,
        DRAFT_TOKENS: 11.0,
        ACCEPTED_TOKENS: 5.0,
    }
    assert [value for (name, labels), value in counts.values() if labels] == [2.0, 2.0, 1.0]


def test_counters_are_there_from_the_start_and_grow_by_what_is_new(shown: tuple[Metrics, MetricSheet, DraftCounts]) -> None:
    family, metrics, counts = shown
    metrics.refresh()
    assert family.values == {(DRAFTS,): 0.0, (DRAFT_TOKENS,): 0.0, (ACCEPTED_TOKENS,): 0.0}

    counts.verified(4, 1)
    metrics.refresh()
    num_calls = family.num_calls
    metrics.refresh()
    assert family.num_calls == num_calls

    counts.verified(4, 2)
    metrics.refresh()
    assert family.values == {
        (DRAFTS,): 2.0,
        (DRAFT_TOKENS,): 8.0,
        (ACCEPTED_TOKENS,): 3.0,
        (ACCEPTED_PER_POSITION, "0"): 2.0,
        (ACCEPTED_PER_POSITION, "1"): 1.0,
    }


@pytest.mark.parametrize(("mode", "speculates"), [("sd", True), ("lr_sd", True), ("lr", False), ("ar", False)])
def test_a_service_counts_what_its_answers_usage_says(mode: str, speculates: bool) -> None:
    service, replies, told = service_of(make_world()), RecordedReplies(), []
    service.on_drafts = lambda: told.append(True)

    fields = arrays(mode=mode, stream=False, proposer="draft_model")

    run_virtual(service.serve("id", fields, replies))

    usage = Usage.model_validate_json(replies.sent[-1]["usage"])
    values = {name: value for (name, labels), value in service.drafts.values() if not labels}
    assert values[DRAFT_TOKENS] == usage.num_draft_tokens
    assert values[ACCEPTED_TOKENS] == usage.num_accepted_tokens
    assert (values[DRAFTS] > 0) is speculates
    assert bool(told) is speculates
