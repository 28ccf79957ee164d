"""What an iteration admits: the sums by hand, as properties, and against the scheduler of the emulated engines."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lr_backend.build.admission import (
    PREFIXES,
    USUAL_PREFIX,
    Admission,
    admission,
    admissions,
    branches_of,
    require_admission,
    shortfalls,
)
from lr_backend.build.memory import GIB, EngineMemory, GpuMemory, estimate
from lr_backend.build.report import admission_table
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, GpuDeployment, TrtllmEngineSpec
from lr_backend.config import Limits
from lr_backend.embedded.kv_cache import KvCache
from lr_backend.embedded.sequence import Sequence
from lr_backend.emulated.scheduler import UpstreamScheduler
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.rules import UpstreamRules
from tests.support.embedded_engines import request
from tests.support.fake_trtllm import write_gpu_spec

LIMITS = Limits(max_prompt_tokens=8192, max_tokens=16368, max_depth=8, max_step_tokens=256, max_draft_len=10)
SHIPPED = sorted(
    path.stem for path in (PACKAGE_ROOT / "engines").glob("*.toml") if DeploymentSpec.load(path).runtime == "tensorrtllm"
)


def engine(**sizes: Any) -> TrtllmEngineSpec:
    given = {"max_batch_size": 64, "max_num_tokens": 40_960, "max_seq_len": 24_576, "max_draft_len": 10, **sizes}
    return TrtllmEngineSpec.model_validate(
        {"checkpoint": "ck", "gpu_device_ids": (0,), "kv_cache_free_gpu_mem_fraction": 0.9, **given}
    )


def target(prefix: int, kv_tokens: int = 1 << 18, limits: Limits = LIMITS, **sizes: Any) -> Admission:
    return admission(Role.TARGET, engine(**sizes), prefix, kv_tokens, limits)


def planned(spec: GpuDeployment) -> tuple[GpuMemory, ...]:
    return estimate(spec, find_sources(spec))


def deployment(name: str, **target_sizes: Any) -> GpuDeployment:
    spec = DeploymentSpec.load(name)
    assert isinstance(spec, GpuDeployment)
    return spec.model_copy(update={"target": spec.target.model_copy(update=target_sizes)})


def test_a_call_is_charged_its_whole_prefix_and_its_drafts() -> None:
    one = target(4096)
    assert (one.tokens, one.by_tokens, one.blocks, one.by_blocks) == (4106, 9, 136, 60)
    assert (one.calls, one.binds, one.branches, one.requests) == (9, "tokens", 9, 1.0)
    assert target(4096, max_num_tokens=4096).calls == 0
    assert target(4096, max_draft_len=0, max_num_tokens=4096).calls == 1


@pytest.mark.parametrize(
    ("sizes", "binds"),
    [({}, "tokens"), ({"kv_tokens": 8 * 136 * 32}, "KV blocks"), ({"max_batch_size": 4}, "sequences")],
)
def test_the_limit_that_is_reached_first_is_named(sizes: dict[str, Any], binds: str) -> None:
    assert target(4096, **sizes).binds == binds


def test_without_eviction_a_call_reserves_all_that_it_may_write() -> None:
    kept = target(4096, batch_scheduler_policy="guaranteed_no_evict")
    packed = target(4096, batch_scheduler_policy="max_utilization")
    assert (kept.blocks, packed.blocks) == ((4096 + 256) // 32, -(-(4096 + 11) // 32))


SIZES = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 32),
        "max_num_tokens": st.integers(352, 4096),
        "max_draft_len": st.integers(0, 10),
        "kv_tokens": st.integers(640, 8192),
    }
)


@given(SIZES, st.integers(1, 2048))
def test_what_is_admitted_is_within_every_limit_and_one_more_is_not(sizes: dict[str, Any], prefix: int) -> None:
    one = target(prefix, **sizes)
    blocks = sizes["kv_tokens"] // 32
    fits = [
        num * one.tokens <= sizes["max_num_tokens"] and num * one.blocks <= blocks and num <= sizes["max_batch_size"]
        for num in (one.calls, one.calls + 1)
    ]
    assert fits == [True, False]


@given(SIZES, st.integers(1, 2048), st.sampled_from(["max_batch_size", "max_num_tokens", "kv_tokens"]))
def test_more_room_admits_no_fewer_and_a_longer_prefix_no_more(sizes: dict[str, Any], prefix: int, name: str) -> None:
    one = target(prefix, **sizes)
    assert target(prefix, **{**sizes, name: 2 * sizes[name]}).calls >= one.calls
    assert target(prefix + 32, **sizes).calls <= one.calls


@settings(max_examples=40)
@given(SIZES, st.integers(16, 700))
def test_the_emulated_engine_admits_as_many_in_its_first_iteration(sizes: dict[str, Any], prefix: int) -> None:
    limits = LIMITS.model_copy(update={"max_step_tokens": 24})
    one = target(prefix, limits=limits, **sizes)
    size, drafts = 32, sizes["max_draft_len"]
    numbers = count()
    scheduler = UpstreamScheduler(
        KvCache(sizes["kv_tokens"] // size, size, reuse=True),
        UpstreamRules(),
        max_batch_size=sizes["max_batch_size"],
        max_num_tokens=sizes["max_num_tokens"],
    )
    for number in range(one.calls + 2):
        draft_ids = tuple(range(drafts))
        asked = request((1_000 + number,) * prefix, 24, draft_ids=draft_ids)
        scheduler.add(Sequence(next(numbers), asked, lambda result: None, draft_ids, 24, size))
    whole = [chunk for chunk in scheduler.schedule() if chunk.count == prefix + drafts]
    assert len(whole) == one.calls


@pytest.mark.parametrize("name", SHIPPED)
def test_every_deployment_admits_a_call_behind_its_longest_prefix(name: str) -> None:
    spec = deployment(name)
    found = admissions(spec, planned(spec))
    require_admission(spec, found)
    limits = spec.loop_config().limits
    assert {one.role for one in found} == {Role.TARGET, Role.DRAFT}
    assert max(one.prefix for one in found) == limits.max_prompt_tokens + limits.max_tokens
    assert all(one.prefix in PREFIXES for one in found[:2])
    small_card = name == "qwen3-8b-24gb"
    assert bool(shortfalls(spec, found)) == small_card, "elsewhere all branches of a request join at once behind the usual prefix"


def test_a_budget_below_the_longest_prefix_is_refused_with_the_sum() -> None:
    spec = deployment("qwen3-32b", max_num_tokens=24_569)
    with pytest.raises(ConfigError, match=r"target: a call behind 24560 tokens takes 24570 of max_num_tokens = 24569\. "):
        require_admission(spec, admissions(spec, planned(spec)))
    spec = deployment("qwen3-32b", max_num_tokens=24_570)
    require_admission(spec, admissions(spec, planned(spec)))


def test_kv_memory_below_the_longest_prefix_is_refused() -> None:
    spec = deployment("qwen3-32b", max_tokens_in_paged_kv_cache=24_576)
    with pytest.raises(ConfigError, match=r"target: a call behind 24560 tokens reserves 776 KV blocks, more than there are"):
        require_admission(spec, admissions(spec, planned(spec)))


def test_a_request_that_would_wait_for_itself_is_warned_of_with_the_sum() -> None:
    spec = deployment("qwen3-32b", max_num_tokens=32_768)
    branches = branches_of(spec.loop_config().limits)
    (told,) = shortfalls(spec, admissions(spec, planned(spec)))
    assert f"behind {USUAL_PREFIX} tokens an iteration admits 7 calls, and a request has {branches} branches" in told
    assert f"{branches * (USUAL_PREFIX + 10)} tokens, max_num_tokens is 32768" in told


def test_only_compiled_engines_are_counted(tmp_path: Path) -> None:
    text = write_gpu_spec(tmp_path, checkpoints=False).read_text()
    path = tmp_path / "engines" / "mixed.toml"
    path.write_text(text.replace("[draft]\n", '[draft]\nruntime = "llmapi"\n'))
    spec = deployment(str(path))
    memory = (GpuMemory(0, GIB, 0, tuple(EngineMemory(role, 0, 0, 4096, 0, 0, 0, 0) for role in Role)),)
    assert {one.role for one in admissions(spec, memory)} == {Role.TARGET}


def test_the_table_has_a_row_an_engine_and_prefix() -> None:
    spec = deployment("qwen3-32b")
    found = admissions(spec, planned(spec))
    out = io.StringIO()
    Console(file=out, width=150).print(admission_table(found))
    lines = out.getvalue().splitlines()
    assert sum(line.startswith(("│ target", "│ draft")) for line in lines) == len(found) == 8
    assert "requests of 9 branches" in out.getvalue()
    assert replace(found[0], by_tokens=3).requests == 3 / 9
