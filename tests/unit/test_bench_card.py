"""The model whose iterations are timed on cards computes what the reference does."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import card
from bench.kit.card import FusedModel, like, shard_of
from bench.kit.card_engines import ModelOnCard, workers
from bench.kit.output import PAGES
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.random_checkpoint import random_weights
from lr_backend.embedded.reference.attention import ChunkAttention
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.runner import Span
from lr_backend.engine import Role
from lr_backend.hardware.cost import Iteration, Join
from lr_backend.hardware.profile import ProfileKey, find
from lr_backend.hardware.sharing import CardSharing
from lr_backend.plan.simulation import Policy
from lr_backend.request import Mode


def tiny(architecture: str) -> ModelSpec:
    rope = {"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 512}
    return ModelSpec(architecture, 64, 3, 4, 2, 16, 96, 300, 1e-6, 512, architecture == "Qwen3ForCausalLM", rope)


def expected(spec: ModelSpec, weights: dict[str, torch.Tensor], iteration: Iteration) -> torch.Tensor:
    """Logits by the reference, of a memory that holds zeros but for the new tokens."""
    model = DecoderModel(spec, weights, max_seq_len=512)
    store = KvStore(spec, num_blocks=512, tokens_per_block=1, dtype=model.dtype, device=model.device)
    spans, positions, wanted, slot = [], [], [], 0
    parts = [(1, join.num_new, join.num_cached + join.num_new, join.num_drafts) for join in iteration.joins]
    if iteration.num_decodes:
        parts.append((iteration.num_decodes, 1, iteration.kv_tokens // iteration.num_decodes, 0))
    for num_sequences, num_new, length, num_drafts in parts:
        for _ in range(num_sequences):
            spans.append(Span(length - num_new, num_new, range(slot, slot + length)))
            positions += range(length - num_new, length)
            wanted += range(len(positions) - 1 - num_drafts, len(positions))
            slot += length
    ids = torch.tensor([(7 * row + 3) % spec.vocab_size for row in range(len(positions))])
    return model.forward(ids, torch.tensor(positions), ChunkAttention(store, spans), torch.tensor(wanted))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize(
    "iteration",
    [
        Iteration((), 3, 60),
        Iteration((Join(5, 0),)),
        Iteration((Join(4, 17, 3), Join(1, 9))),
        Iteration((Join(6, 11, 2), Join(3, 0)), 2, 26),
    ],
)
def test_it_computes_what_the_reference_does(architecture: str, iteration: Iteration) -> None:
    spec = tiny(architecture)
    weights = random_weights(spec, dtype=torch.float32, device="cpu")
    reference = expected(spec, dict(weights), iteration)

    model = FusedModel(spec, weights, max_kv_tokens=128, max_positions=512)

    assert not weights
    torch.testing.assert_close(model.prepared(iteration)(), reference, rtol=1e-4, atol=1e-4)


@given(
    joins=st.lists(st.builds(Join, st.integers(1, 300), st.integers(0, 3000)), max_size=12),
    num_decodes=st.integers(0, 40),
    length=st.integers(1, 3000),
)
def test_what_stands_for_an_iteration_is_no_less_and_fits(joins: list[Join], num_decodes: int, length: int) -> None:
    iteration = Iteration(tuple(joins), num_decodes, num_decodes * length)

    found = like(iteration, 1 << 18)

    assert found.num_decodes >= num_decodes
    assert len(found.joins) >= len(joins)
    assert found.num_tokens >= iteration.num_tokens
    assert found.kv_tokens >= iteration.kv_tokens
    assert found.kv_tokens + sum(join.num_new + join.num_cached for join in found.joins) <= 1 << 18
    assert like(found, 1 << 18) == found


def test_lengths_are_cut_where_memory_ends() -> None:
    assert like(Iteration((Join(8, 92),), 3, 1000), 600) == Iteration((Join(8, 128),), 3, 3 * 150)
    model = FusedModel.random(tiny("Qwen3ForCausalLM"), device="cpu", max_kv_tokens=512, max_positions=512)
    with pytest.raises(ValueError, match="there is memory for 512"):
        model.prepared(Iteration((), 2, 600))


def test_what_was_published_can_be_shown() -> None:
    console, published = Console(record=True, width=160), json.loads((PAGES / "card.json").read_text())
    for name, found in published.items():
        if "num_kernels" in found:
            card.show_iterations(console, name, found)
        elif name.startswith("sharing"):
            card.show_sharing(console, name, found["rows"])
        elif name.startswith("modes"):
            card.show_modes(console, name, found["more_ms"], found["rows"])
    card.show_constants(console, published["constants"])

    shown = console.export_text()
    assert all(heading in shown for heading in ("measured / table", "by the law", "LAUNCH_US", "predicted as slow as here"))


def test_an_iteration_in_words() -> None:
    mixed = Iteration((Join(9, 1000, 8), Join(9, 1000, 8)), 8, 8000)
    assert card.in_words(mixed) == "2 x 9 new behind 1,000 + 8 decodes of 1,000"


def test_a_model_is_timed_beside_its_profile() -> None:
    model = FusedModel.random(tiny("Qwen3ForCausalLM"), device="cpu", max_kv_tokens=512, max_positions=512)
    found = card.timed(model, Iteration((), 2, 200), find(ProfileKey("h200_sxm", "Qwen3-1.7B", 1, "bfloat16")))
    assert found.graph_ms > 0.0 and found.eager_ms > 0.0 and found.table_ms == pytest.approx(1.9, rel=0.1)


def test_a_shard_has_its_share_of_what_tensor_parallelism_splits() -> None:
    whole, half = shard_of("Qwen/Qwen3-32B"), shard_of("Qwen/Qwen3-32B", 2)

    assert (whole.num_heads, whole.num_kv_heads, whole.intermediate_size) == (64, 8, 25600)
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size, half.hidden_size) == (32, 4, 12800, whole.hidden_size)


class _InAThread(Thread):
    """In place of a process, with an end of the pipe of its own: for a tiny model none need be started."""

    def __init__(self, target: Any, args: tuple[Any, Connection, Any], daemon: bool) -> None:
        model, theirs, environment = args
        super().__init__(target=target, args=(model, Connection(os.dup(theirs.fileno())), environment), daemon=daemon)

    def kill(self) -> None:
        pass


def test_the_loop_runs_over_iterations_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_InAThread)
    monkeypatch.setattr("bench.kit.card_engines.multiprocessing.get_context", lambda method: here)
    small = ModelOnCard("", device="cpu", spec=tiny("Qwen3ForCausalLM"), max_kv_tokens=4096, max_positions=512)
    # The draft is ahead of its target however busy this machine is.
    large = replace(small, spec=replace(tiny("Qwen3ForCausalLM"), num_layers=60))
    what = card.scenario("h200_sxm", CardSharing.MPS)
    short = replace(what, workload=replace(what.workload, prompt_tokens=20, step_tokens=4, num_steps=6))

    with workers({Role.TARGET: large, Role.DRAFT: small, Role.JUDGE: small}) as those:
        found = card.on_card(those, short, Policy(Mode.LR, 2), 1)

        card.on_card(those, short, Policy(Mode.AR), 1)  # has every graph recorded
        all_known = card.on_card(those, short, Policy(Mode.AR), 1)

    assert found["ms_a_token"] > 0.0
    assert found["recording_s"] > 0.0 == all_known["recording_s"]
    assert all(found["num_iterations"][role] > 0 for role in ("target", "draft", "judge"))


def test_what_an_iteration_takes_longer_here_is_part_of_its_kernels() -> None:
    what = card.scenario("h200_sxm", CardSharing.MPS)
    more = card.slower(what, {Role.DRAFT: 0.8})
    iteration = Iteration((), 1, 1000)

    before, after = what.machine.places[Role.DRAFT].costs, more.machine.places[Role.DRAFT].costs

    assert after.seconds(iteration) == pytest.approx(before.seconds(iteration) + 0.8e-3)
    assert after.demand(iteration).kernel_s > before.demand(iteration).kernel_s
    assert more.machine.places[Role.TARGET] == what.machine.places[Role.TARGET]
