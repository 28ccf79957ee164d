"""Settings, environment, and arguments of the LLM API engine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lr_backend.engine import Sampling
from lr_backend.errors import ConfigError, EngineRejected
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.coupled_noise import CoupledNoise
from lr_backend.llmapi.environment import apply, engine_environment, own_packages, visible_devices
from lr_backend.llmapi.sampling import MAX_LOG_PROBS, MAX_STOP_IDS, check_request, engine_stop_ids, sampling_arguments
from lr_backend.llmapi.upstream import llm_arguments, load_upstream, make_llm
from lr_backend.mpi import UNBOUND, UNBOUND_BY_MPIRUN
from tests.support.embedded_engines import request
from tests.support.fake_llmapi import FakeSamplingParams, fake_upstream, scripted

CHOOSE = scripted(lambda context, draw: 0)


def checkpoint(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def test_all_parameters_of_a_config_file_are_read() -> None:
    config = LlmApiConfig.from_parameters(
        {
            "gpt_model_path": "/models/target", "tp_size": "2", "gpu_device_ids": "2,3", "dtype": "bfloat16",
            "kv_cache_dtype": "fp8", "max_batch_size": "32", "max_num_tokens": "4096", "max_queue_size": "7",
            "max_seq_len": "16384", "max_tokens_in_paged_kv_cache": "65536", "kv_cache_free_gpu_mem_fraction": "0.4",
            "tokens_per_block": "64", "enable_kv_cache_reuse": "false", "enable_chunked_context": "0",
            "sampler": "TRTLLMSampler", "coupled_noise": "true", "exclude_input_in_output": "true", "max_draft_len": "0",
        },
    )  # fmt: skip
    assert config == LlmApiConfig(
        Path("/models/target"), tp_size=2, gpu_device_ids=(2, 3), dtype="bfloat16", kv_cache_dtype="fp8",
        max_batch_size=32, max_num_tokens=4096, max_queue_size=7, max_seq_len=16384, max_tokens_in_paged_kv_cache=65536,
        kv_cache_free_gpu_mem_fraction=0.4, tokens_per_block=64, enable_kv_cache_reuse=False, enable_chunked_context=False,
        sampler="TRTLLMSampler", coupled_noise=True, exclude_input_in_output=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("no_such_key", "1"), ("max_draft_len", "8"), ("tp_size", "two"), ("tp_size", "0"),
        ("gpu_device_ids", "0,1"), ("dtype", "int8"), ("kv_cache_free_gpu_mem_fraction", "1.0"), ("enable_kv_cache_reuse", "yes"),
        ("sampler", "greedy"), ("max_tokens_in_paged_kv_cache", "100"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=key):
        LlmApiConfig.from_parameters({"gpt_model_path": "/models/target", key: text})


def test_a_checkpoint_must_be_there(tmp_path: Path) -> None:
    LlmApiConfig(checkpoint(tmp_path)).check_checkpoint()
    with pytest.raises(ConfigError, match="not a Hugging Face checkpoint"):
        LlmApiConfig(tmp_path / "none").check_checkpoint()


def test_a_missing_package_says_what_to_install() -> None:
    def find(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(ConfigError, match=r"26\.07-trtllm.*tensorrt-llm==1\.2\.1"):
        load_upstream(find)
    with pytest.raises(ConfigError, match=r"no LLM API as of 1\.2"):
        load_upstream(lambda name: ModuleType(name))


def test_the_llm_is_made_from_the_settings(tmp_path: Path) -> None:
    config = LlmApiConfig(
        checkpoint(tmp_path),
        tp_size=2,
        gpu_device_ids=(4, 5),
        max_tokens_in_paged_kv_cache=9999,
        kv_cache_free_gpu_mem_fraction=0.3,
        max_batch_size=12,
    )
    arguments = llm_arguments(config, fake_upstream(CHOOSE))
    assert arguments["tensor_parallel_size"] == arguments["gpus_per_node"] == 2
    assert arguments["kv_cache_config"] == SimpleNamespace(
        enable_block_reuse=True, free_gpu_memory_fraction=0.3, tokens_per_block=32, dtype="auto", max_tokens=9999
    )
    assert arguments["cuda_graph_config"].max_batch_size == 12
    assert "disable_overlap_scheduler" not in arguments
    llm = make_llm(config, fake_upstream(CHOOSE))
    assert llm.arguments == arguments
    llm.shutdown()


def test_an_llm_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    def fail(**arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    upstream = fake_upstream(CHOOSE)
    broken = replace(upstream, LLM=fail)
    with pytest.raises(ConfigError, match=r"cannot serve .*out of memory"):
        make_llm(LlmApiConfig(checkpoint(tmp_path)), broken)


def test_gpus_are_chosen_among_those_that_are_visible() -> None:
    assert visible_devices((2, 0), None) == "2,0"
    assert visible_devices((2, 0), "GPU-a, GPU-b,GPU-c") == "GPU-c,GPU-a"
    with pytest.raises(ConfigError, match="shows 2 GPUs"):
        visible_devices((2,), "0,1")


def test_an_engine_forgets_the_mpi_job_of_its_server_and_keeps_the_settings() -> None:
    kept = {"PATH": "/bin", "OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash"}
    job = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_orte_ess_num_procs": "1",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "x",
        "PMI_SIZE": "1",
    }
    job |= {"TRTLLM_ORCHESTRATOR": "1", "SLURM_JOB_ID": "7"}
    environment = {**kept, **job, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    wanted = engine_environment(environment, (1, 3))
    assert wanted == {**kept, **UNBOUND, "CUDA_VISIBLE_DEVICES": "5,7", "TRTLLM_VISIBLE_DEVICES": "5,7"}
    path = ["/usr/lib"]
    apply(environment, wanted, path)
    assert (environment, path) == (wanted, ["/usr/lib"])
    below = engine_environment({**kept, **job, **UNBOUND_BY_MPIRUN}, ())
    assert "PRTE_MCA_rmaps_default_inherit" not in below, "no mpirun stands before it"
    assert {**below, **UNBOUND_BY_MPIRUN} == {**kept, **UNBOUND, **UNBOUND_BY_MPIRUN}


def test_how_ranks_are_bound_is_the_operators_affair_where_he_says_it() -> None:
    said = {"OMPI_MCA_hwloc_base_binding_policy": "numa"}
    assert engine_environment(said, ()) == {**UNBOUND, **said}


def test_a_newer_package_is_found_first_here_and_in_what_is_started_and_nowhere_else(tmp_path: Path) -> None:
    """As upstream starts its workers: with this process's environment, and ``sys.path`` behind their own."""
    for folder, version in (("image", "old"), ("lib-llmapi", "new")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "openai.py").write_text(f"VERSION = {version!r}")
    packages = own_packages(tmp_path / "lib-llmapi")
    assert packages is not None and own_packages(tmp_path / "no-such") is None
    before = {**os.environ, "PYTHONPATH": str(tmp_path / "image")}
    environment, path = dict(before), [str(tmp_path / "image")]
    apply(environment, engine_environment(environment, (), packages), path, packages)

    def found(environment: dict[str, str]) -> str:
        code = "import sys; sys.path.extend(sys.argv[1:]); import openai; print(openai.VERSION)"
        line = [sys.executable, "-c", code, *path]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert path == [str(packages), str(tmp_path / "image")]
    assert (found(environment), found(before)) == ("new", "old")


CONFIG = LlmApiConfig(Path("/models"), max_seq_len=100)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0, 5, 0.5), Sampling(0.7, 1)])
def test_greedy_is_greedy_whatever_else_is_said(sampling: Sampling) -> None:
    params = FakeSamplingParams(**sampling_arguments(request((1, 2), sampling=sampling), CONFIG, 8))
    assert params.greedy


def test_sampling_reaches_upstream_as_it_is() -> None:
    asked = request((1, 2), sampling=Sampling(0.6, 20, 0.95), seed=2**64 - 1, return_perf_metrics=True)
    params = FakeSamplingParams(**sampling_arguments(asked, CONFIG, 8))
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.max_tokens) == (0.6, 20, 0.95, 2**64 - 1, 8)
    assert not params.greedy
    assert not params.ignore_eos and params.include_stop_str_in_output and params.return_perf_metrics
    assert not params.detokenize and params.end_id is not None


def test_coupled_noise_draws_by_a_processor_and_greedily_from_what_it_leaves() -> None:
    coupled = LlmApiConfig(Path("/models"), max_seq_len=100, coupled_noise=True)
    assert llm_arguments(coupled, fake_upstream(CHOOSE))["disable_overlap_scheduler"] is True
    asked = request((1, 2), sampling=Sampling(0.6, 20, 0.95), seed=7, return_log_probs=True)
    params = FakeSamplingParams(**sampling_arguments(replace(asked, return_log_probs=False), coupled, 8))
    assert params.greedy
    assert params.logits_processor == CoupledNoise(asked.sampling, 7)
    assert "logits_processor" not in sampling_arguments(replace(asked, sampling=Sampling()), coupled, 8)
    assert "logits_processor" not in sampling_arguments(asked, CONFIG, 8)
    assert sampling_arguments(asked, coupled, 8)["logprobs"] is None
    assert sampling_arguments(replace(asked, sampling=Sampling()), coupled, 8)["logprobs"] == 1


def test_the_engine_gets_only_stops_that_cannot_come_too_early() -> None:
    words = [(5,), (7,), (8, 9)]
    assert engine_stop_ids(request((1,), 8, words)) == [5, 7]
    assert engine_stop_ids(request((1,), 8, words, end_id=2)) == [2, 5, 7]
    many = [(token,) for token in range(1, MAX_STOP_IDS)]
    assert len(engine_stop_ids(request((1,), 8, many, end_id=99))) == MAX_STOP_IDS
    assert engine_stop_ids(request((1,), 8, [*many, (98,)], end_id=99)) == [], "too many to compare each token with"
    assert engine_stop_ids(request((1,), 8, words, min_tokens=2)) == [5, 7], "a stop word ends a run at any time"


def test_a_drawn_token_is_among_the_candidates_or_none_are_asked_for() -> None:
    def asked(**sampling: Any) -> Any:
        return request((1,), return_log_probs=True, sampling=Sampling(**sampling))

    assert sampling_arguments(asked(), CONFIG, 8)["logprobs"] == 1
    assert sampling_arguments(asked(temperature=0.6, top_k=20), CONFIG, 8)["logprobs"] == 20
    for top_k in (0, MAX_LOG_PROBS + 1):
        assert sampling_arguments(asked(temperature=0.6, top_k=top_k), CONFIG, 8)["logprobs"] is None


def test_limits() -> None:
    assert check_request(request((1,) * 95, 50), CONFIG) == 5
    with pytest.raises(EngineRejected, match="max_seq_len 100"):
        check_request(request((1,) * 100), CONFIG)
    short = LlmApiConfig(Path("/models"), max_num_tokens=10, enable_chunked_context=False)
    with pytest.raises(EngineRejected, match="max_num_tokens 10"):
        check_request(request((1,) * 11), short)
    with pytest.raises(EngineRejected, match="input_ids"):
        check_request(request((1, -1)), CONFIG)
    with pytest.raises(EngineRejected, match="draft_input_ids"):
        check_request(request((1,), draft_ids=(1,)), CONFIG)
