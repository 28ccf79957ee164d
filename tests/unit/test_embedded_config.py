"""Engine settings from a Triton parameters map: every refusal names its key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lr_backend.build.spec import EmbeddedEngineSpec
from lr_backend.embedded.config import EngineConfig
from lr_backend.engine.settings import EmbeddedSettings
from lr_backend.errors import ConfigError


def test_parameters_are_read_under_upstreams_names() -> None:
    config = EngineConfig.from_parameters(
        {
            "gpt_model_path": "/models/target",
            "max_tokens_in_paged_kv_cache": "4096",
            "kv_cache_free_gpu_mem_fraction": "0.9",
            "enable_kv_cache_reuse": "FALSE",
            "exclude_input_in_output": "true",
            "num_threads": "2",
            "max_batch_size": "4",
            "dtype": "bfloat16",
        }
    )
    expected = EngineConfig(
        Path("/models/target"),
        dtype="bfloat16",
        num_threads=2,
        max_tokens_in_paged_kv_cache=4096,
        kv_cache_free_mem_fraction=0.9,
        max_batch_size=4,
        enable_kv_cache_reuse=False,
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
        ("max_batch_size", "many"),
        ("max_batch_size", "0"),
        ("enable_kv_cache_reuse", "yes"),
        ("use_cuda_graphs", "true"),
        ("weight_dtype", "float16"),
        ("kernels", "torch"),
        ("dtype", "float16"),
        ("device", "tpu"),
        ("num_threads", "0"),
        ("tokens_per_block", "0"),
        ("max_queue_size", "0"),
        ("max_seq_len", "1"),
        ("max_draft_len", "-1"),
        ("max_num_tokens", "31"),
        ("max_tokens_in_paged_kv_cache", "63"),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_threads": 0}, "num_threads=0: .* greater than or equal to 1"),
        ({"speculative_min_chance": 1.5}, r"speculative_min_chance=1\.5: .* less than or equal to 1"),
        ({"kernels": "torch"}, "kernels='torch': .* 'auto', 'native' or 'reference'"),
        ({"max_beam_width": 1}, "max_beam_width=1: .* not permitted"),
    ],
)
def test_refusals_name_the_setting_its_value_and_the_rule(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(Path("any"), **changes)


def test_an_engine_reads_what_a_deployment_says() -> None:
    """Each setting arrives with its own value, the ones at their defaults too."""
    changes: dict[str, Any] = {
        "weight_dtype": "int8",
        "kernels": "native",
        "num_threads": 3,
        "tokens_per_block": 16,
        "max_tokens_in_paged_kv_cache": 4096,
        "kv_cache_free_mem_fraction": 0.25,
        "max_batch_size": 5,
        "max_num_tokens": 300,
        "max_queue_size": 9,
        "max_seq_len": 1000,
        "max_draft_len": 7,
        "speculative_min_chance": 0.125,
        "enable_kv_cache_reuse": False,
        "overlap_prefill": False,
    }
    by_the_reference = {"dtype": "bfloat16", "device": "cuda", "random_weights": True}
    for said in (changes, by_the_reference, {}):
        spec = EmbeddedEngineSpec(checkpoint=Path("any"), **{"max_seq_len": 1000, **said})
        config = EngineConfig.from_parameters(spec.parameters(Path("/models/target")))
        assert config.checkpoint_dir == Path("/models/target")
        for name in EmbeddedSettings.model_fields:
            assert getattr(config, name) == getattr(spec, name), name
    assert {*changes, *by_the_reference} == EmbeddedSettings.model_fields.keys()


def test_settings_are_read_without_torch() -> None:
    code = "import sys, lr_backend.embedded.config, lr_backend.llmapi.config; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
