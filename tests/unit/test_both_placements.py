"""A deployment as written and placed the other way: where everything goes, and what the table says of it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lr_backend.build.gpu_spec import LlmapiEngineSpec
from lr_backend.build.memory import estimate, require_fit
from lr_backend.build.placements import Where, placed, where
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.cli.build import USES_TEXTS
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.plan.both_placements import both_placements, placements_table
from lr_backend.plan.equal_gpus import LLM_API, uses

TEXTS = replace(USES_TEXTS, num_steps=2)
SYSTEM = "h100_sxm"


def deployment(name: str) -> GpuDeployment:
    spec = DeploymentSpec.load(name)
    assert isinstance(spec, GpuDeployment)
    return spec


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("qwen3-32b", Where.TARGETS_CARDS),
        ("qwen3-32b-2gpu", Where.TARGETS_CARDS),
        ("qwen3-32b-1gpu", Where.TARGETS_CARDS),
        ("qwen3-32b-apart", Where.OWN_CARDS),
        ("r1-distill-32b", Where.OWN_CARDS),
    ],
)
def test_a_spec_says_where_draft_and_judge_are(name: str, here: Where) -> None:
    assert where(deployment(name)) is here


def test_roles_that_share_get_budgets_in_tokens_and_the_others_a_share_of_their_cards() -> None:
    apart = placed(deployment("qwen3-32b"), SYSTEM, 2, Where.OWN_CARDS, 4)
    assert all(apart.engine(role).max_tokens_in_paged_kv_cache is None for role in Role)
    beside = placed(deployment("qwen3-32b-apart"), SYSTEM, 4, Where.TARGETS_CARDS, 4)
    assert all(beside.engine(role).kv_cache_free_gpu_mem_fraction is None for role in Role)
    for spec in (apart, beside):
        require_fit(spec, estimate(spec, find_sources(spec)))


def test_a_target_that_drafts_by_itself_is_shown_with_its_own_drafts_alone() -> None:
    spec = deployment("qwen3-32b-llmapi")
    written, other = both_placements(spec, SYSTEM, TEXTS).found
    assert [[used.mode for used in way.used] for way in (written, other)] == [["lr_sd"], ["lr_sd"]]
    assert written.used[0].ms_a_token < other.used[0].ms_a_token < 20.0
    assert {use.runtime for use in uses(spec, SYSTEM, 4).found} == {LLM_API}
    assert isinstance(spec.target, LlmapiEngineSpec) and spec.target.speculative is not None
    ngrams = spec.target.speculative.model_copy(update={"kind": "ngram"})
    without = spec.model_copy(update={"target": spec.target.model_copy(update={"speculative": ngrams})})
    with pytest.raises(ConfigError, match=r"only of the deployment's own draft a pace is known, not of ngram"):
        both_placements(without, SYSTEM, TEXTS)


def test_four_cards_are_shown_both_ways_and_what_turns_would_cost() -> None:
    found = both_placements(deployment("qwen3-32b"), SYSTEM, TEXTS)
    written, other = found.found
    assert not found.left_out
    assert (written.name, other.name) == ("as written: TP 4, beside the target", "otherwise: TP 2, apart")
    assert written.admitted is not None and written.admitted.calls == 15
    assert [used.mode for used in written.used] == ["lr", "lr_sd"]
    assert other.in_turns is None, "no card is shared"
    assert written.in_turns is not None and written.in_turns.ms_a_token > written.used[0].ms_a_token
    out = io.StringIO()
    Console(file=out, width=150).print(placements_table(found.found, alone_ms=10.0))
    lines = [line for line in out.getvalue().splitlines() if "TP" in line]
    assert len(lines) == 2
    assert f"{written.used[0].ms_a_token:.2f} ({10.0 / written.used[0].ms_a_token:.2f})" in lines[0]
    assert "lr without MPS" in out.getvalue()


def test_the_other_way_may_not_fit_and_one_card_has_none() -> None:
    alone = both_placements(deployment("qwen3-32b-fp8"), SYSTEM, TEXTS)
    assert [way.name for way in alone.found] == ["as written: TP 1, beside the target"] and not alone.left_out
    two = deployment("qwen3-32b-2gpu")
    smaller = two.model_copy(update={"target": two.target.model_copy(update={"max_batch_size": 256})})
    found = both_placements(smaller, SYSTEM, TEXTS)
    assert len(found.found) == 1
    assert list(found.left_out) == ["otherwise: TP 1, apart"] and "target" in found.left_out["otherwise: TP 1, apart"]
