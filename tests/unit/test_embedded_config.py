"""Engine settings from a Triton parameters map: every refusal names its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lr_backend.embedded.config import EngineConfig
from lr_backend.errors import ConfigError


def test_parameters_are_read_under_upstreams_names() -> None:
    config = EngineConfig.from_parameters(
        {
            "gpt_model_path": "/models/target",
            "gpt_model_type": "inflight_fused_batching",
            "max_tokens_in_paged_kv_cache": "4096",
            "kv_cache_free_gpu_mem_fraction": "0.9",
            "enable_kv_cache_reuse": "FALSE",
            "use_cuda_graphs": "false",
            "exclude_input_in_output": "true",
            "max_beam_width": "1",
            "batch_scheduler_policy": "max_utilization",
            "num_threads": "2",
            "max_batch_size": "4",
            "dtype": "bfloat16",
        },
        max_batch_size=99,
        max_queue_size=7,
    )
    expected = EngineConfig(
        Path("/models/target"),
        dtype="bfloat16",
        num_threads=2,
        max_tokens_in_paged_kv_cache=4096,
        kv_cache_free_mem_fraction=0.9,
        max_batch_size=4,
        max_queue_size=7,
        enable_kv_cache_reuse=False,
        use_cuda_graphs=False,
        exclude_input_in_output=True,
    )
    assert config == expected
    assert config.num_blocks == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_cache_free_gpu_mem_fraction", "most"),
        ("sink_token_length", "4"),
        ("checkpoint_dir", "/models/target"),
        ("max_beam_width", "2"),
        ("gpt_model_type", "V1"),
        ("batch_scheduler_policy", "guaranteed_no_evict"),
        ("max_batch_size", "many"),
        ("max_batch_size", "0"),
        ("max_batch_size", "${triton_max_batch_size}"),
        ("enable_kv_cache_reuse", "yes"),
        ("use_cuda_graphs", "yes"),
        ("dtype", "float16"),
        ("device", "tpu"),
        ("num_threads", "0"),
        ("tokens_per_block", "0"),
        ("max_queue_size", "0"),
        ("max_seq_len", "1"),
        ("max_draft_len", "-1"),
        ("max_num_tokens", "31"),
        ("max_tokens_in_paged_kv_cache", "63"),
        ("gpt_model_path", "${engine_dir}"),
        ("gpt_model_path", ""),
    ],
)
def test_refusals_name_the_key(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        EngineConfig.from_parameters({"gpt_model_path": "/models/target", key: value})


def test_the_checkpoint_is_required() -> None:
    with pytest.raises(ConfigError, match="gpt_model_path is missing"):
        EngineConfig.from_parameters({})


@pytest.mark.parametrize("changes", [{"max_num_tokens": 10, "max_batch_size": 8, "max_draft_len": 3}])
def test_a_verification_must_fit_beside_the_decodes(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size \+ max_draft_len = 11"):
        EngineConfig(Path(), **changes)
