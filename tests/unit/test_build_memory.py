"""The memory estimate, against sums worked out by hand and the parameter counts that the models' pages state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lr_backend.build.memory import (
    FIXED_BYTES,
    GIB,
    MPS_SERVER_BYTES,
    SERVER_CONTEXT_BYTES,
    engine_memory,
    estimate,
    padded_vocab,
    require_fit,
)
from lr_backend.build.shapes import Source, count_stored_weights, count_weights, find_source, known_models, shape_from_config
from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, GpuDeployment, TrtllmEngineSpec
from lr_backend.engine import Role
from lr_backend.errors import CheckpointError, ConfigError
from tests.support.fake_trtllm import write_gpu_spec
from tests.support.tiny_models import make_checkpoint

SHIPPED = sorted(path.stem for path in (PACKAGE_ROOT / "engines").glob("*.toml") if path.stem != "demo")


def known(hub: str) -> Source:
    shape = known_models()[hub]
    return Source(shape, count_weights(shape), hub, exact=False)


def deployment(name: str) -> GpuDeployment:
    spec = DeploymentSpec.load(name)
    assert isinstance(spec, GpuDeployment)
    return spec


def sources(spec: GpuDeployment) -> dict[Role, Source]:
    return {role: known(spec.engine(role).hub) for role in Role}


@pytest.mark.parametrize(
    ("hub", "num_parameters"),
    [
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32_763_876_352),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(hub: str, num_parameters: int) -> None:
    shape = known_models()[hub]
    counts = count_weights(shape)
    head = 0 if shape.tied_embeddings else counts.head
    assert counts.linear + counts.embedding + head + counts.replicated == num_parameters


def test_every_model_of_a_deployment_is_known() -> None:
    hubs = {deployment(name).engine(role).hub for name in SHIPPED for role in Role}
    assert hubs <= set(known_models())


def test_a_rank_of_the_32b_target_by_hand() -> None:
    spec = deployment("qwen3-32b-apart")
    memory = engine_memory(Role.TARGET, spec.target, known("Qwen/Qwen3-32B"), int(78.1 * GIB))
    matrices = 64 * (5120 * (64 + 16) * 128 + 64 * 128 * 5120 + 3 * 5120 * 25600)
    table = 151936 * 5120
    assert memory.weights == (matrices + table) // 2 * 2 + (table + 64 * (2 * 5120 + 256) + 5120) * 2 == 33_540_712_448
    row, slots = 151936 * 2, 64 * 11
    assert memory.speculation == 2 * slots * row == 427_851_776
    assert memory.draft_logits == slots * row == 213_925_888
    assert memory.logits == slots * row + 3 * 64 * 151936 * 4 == 330_612_736
    assert memory.workspace == FIXED_BYTES + 40_960 * (4 * 5120 + (10240 + 3 * 25600) // 2) * 2
    per_token = 64 * 2 * (8 // 2) * 128 * 2
    free = int(78.1 * GIB) - (memory.total - memory.kv_cache)
    assert memory.kv_tokens == int(free * 0.9) // per_token
    assert memory.kv_cache == memory.kv_tokens * per_token


def test_an_absolute_budget_is_taken_as_it_is() -> None:
    spec = deployment("qwen3-32b-1gpu")
    memory = engine_memory(Role.TARGET, spec.target, known("Qwen/Qwen3-32B"), 0)
    assert (memory.kv_tokens, memory.kv_cache) == (114_688, 28 * GIB)
    draft = engine_memory(Role.DRAFT, spec.draft, known("Qwen/Qwen3-1.7B"), 0)
    assert (draft.kv_cache, draft.speculation, draft.draft_logits) == (114_688 * 112 * 1024, 0, 0)


def test_fp8_halves_matrices_and_kv_but_no_tables() -> None:
    spec = deployment("qwen3-8b-24gb")
    assert spec.target.kv_cache_dtype == "auto", "upstream has issues open about FP8 KV caches"
    halved = spec.target.model_copy(update={"kv_cache_dtype": "fp8"})
    assert engine_memory(Role.TARGET, halved, known("Qwen/Qwen3-8B"), 0).kv_cache == 18_432 * 36 * 2 * 8 * 128
    memory = engine_memory(Role.TARGET, spec.target, known("Qwen/Qwen3-8B"), 0)
    matrices = 36 * (4096 * (32 + 16) * 128 + 4096 * 4096 + 3 * 4096 * 12288)
    table = 151936 * 4096
    assert memory.weights == matrices + 2 * table * 2 + (36 * (2 * 4096 + 256) + 4096) * 2
    assert memory.kv_cache == 18_432 * 36 * 2 * 8 * 128 * 2


def test_heads_fewer_than_ranks_are_copied_and_vocabularies_filled_up() -> None:
    assert [padded_vocab(151936, tp) for tp in (1, 2, 8)] == [151936] * 3
    assert padded_vocab(101, 2) == 102
    target = deployment("qwen3-32b").target
    assert isinstance(target, TrtllmEngineSpec)
    wide = target.model_copy(update={"tp_size": 16, "gpu_device_ids": tuple(range(16)), "max_tokens_in_paged_kv_cache": 1000})
    assert engine_memory(Role.TARGET, wide, known("Qwen/Qwen3-32B"), 0).kv_cache == 1000 * 64 * 2 * 1 * 128 * 2


@pytest.mark.parametrize("name", SHIPPED)
def test_the_deployments_fit_their_gpus(name: str) -> None:
    spec = deployment(name)
    gpus = estimate(spec, sources(spec))
    require_fit(spec, gpus)
    assert [gpu.gpu for gpu in gpus] == list(range(spec.hardware.num_gpus))
    assert all(engine.kv_tokens >= spec.engine(engine.role).max_seq_len for gpu in gpus for engine in gpu.engines)


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    spec = deployment("qwen3-32b-1gpu")
    small = spec.model_copy(update={"hardware": spec.hardware.model_copy(update={"gpu_memory_gib": 79.1})})
    gpus = estimate(small, sources(spec))
    with pytest.raises(
        ConfigError, match=r"does not fit\. GPU 0: target 97\.\d+ GiB \+ draft 19\.\d+ GiB .* of 79\.10 GiB"
    ) as caught:
        require_fit(small, gpus)
    assert "Triton 0.50 GiB + CUDA MPS 0.06 GiB + reserve 2.00 GiB = 136." in caught.value.message


def test_the_servers_own_memory_is_on_every_card_and_that_of_mps_where_cards_are_shared() -> None:
    beside, apart = (estimate(spec, sources(spec)) for spec in map(deployment, ("qwen3-32b", "qwen3-32b-apart")))
    assert {gpu.server for gpu in (*beside, *apart)} == {SERVER_CONTEXT_BYTES}
    assert {gpu.mps for gpu in beside} == {MPS_SERVER_BYTES} and {gpu.mps for gpu in apart} == {0}
    for gpu in (*beside, *apart):
        assert gpu.total == sum(engine.total for engine in gpu.engines) + gpu.server + gpu.mps + gpu.reserve
    spec = deployment("qwen3-32b-apart")
    free = apart[0].capacity - apart[0].reserve - SERVER_CONTEXT_BYTES
    assert apart[0].engines[0] == engine_memory(Role.TARGET, spec.target, known("Qwen/Qwen3-32B"), free)


def test_a_fraction_that_leaves_no_room_for_one_sequence_is_refused() -> None:
    spec = deployment("qwen3-32b-apart")
    small = spec.model_copy(update={"hardware": spec.hardware.model_copy(update={"gpu_memory_gib": 40.0})})
    with pytest.raises(
        ConfigError, match=r"target has memory for \d+ tokens of KV, less than one sequence of max_seq_len = 24576"
    ):
        require_fit(small, estimate(small, sources(spec)))


def test_a_checkpoints_own_files_come_first(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "ck")
    found = find_source(directory, "Qwen/Qwen3-32B")
    assert found.exact and found.shape.num_layers == 2 and found.origin == f"files of {directory}"
    assert found.weights == count_stored_weights(directory) == count_weights(found.shape)

    (directory / "model.safetensors").unlink()
    planned = find_source(directory, "Qwen/Qwen3-32B")
    assert not planned.exact and planned.origin.startswith("config.json of") and planned.weights == found.weights

    (directory / "config.json").unlink()
    assert find_source(directory, "Qwen/Qwen3-32B").origin == "known shape of Qwen/Qwen3-32B"
    with pytest.raises(CheckpointError, match=r"no config\.json, and Qwen/Qwen4 is not a known model"):
        find_source(directory, "Qwen/Qwen4")


@pytest.mark.parametrize(("key", "said"), [("hidden_size", "hidden_size"), ("architectures", "architecture None is not one of")])
def test_a_config_that_lacks_a_size_is_refused(tmp_path: Path, key: str, said: str) -> None:
    path = make_checkpoint(tmp_path / "ck") / "config.json"
    config = json.loads(path.read_text())
    del config[key]
    with pytest.raises(CheckpointError, match=said):
        shape_from_config(config, path)


def test_all_gpus_are_in_the_table_whoever_is_built(tmp_path: Path) -> None:
    spec = deployment(str(write_gpu_spec(tmp_path)))
    found = {role: find_source(spec.checkpoint_dir(role), "") for role in Role}
    gpus = estimate(spec, found)
    assert [[engine.role for engine in gpu.engines] for gpu in gpus] == [[Role.TARGET], list(Role)]
