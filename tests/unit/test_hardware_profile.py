"""Hardware profiles: every one that is committed, and what is said where one is not there or not right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, GpuDeployment
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware.profile import PROFILES, Profile, ProfileKey, available, find

H200_TARGET = ProfileKey("h200_sxm", "Qwen3-32B", 2, "bfloat16")
DATA_CENTRE = ("h100_sxm", "h200_sxm", "b200_sxm")


@pytest.mark.parametrize("key", list(available()), ids=lambda key: key.file_name)
def test_every_committed_profile_is_what_its_name_says(key: ProfileKey) -> None:
    profile = find(key)
    assert profile.key == key
    source = profile.source
    assert source["license"] == "Apache-2.0"
    assert (source["package"], source["deployed"]) == ("aiconfigurator-core", "TensorRT-LLM 1.2.1")
    assert source["database"] == "TensorRT-LLM 1.3.0rc20"
    for shares in source["share_of_time_by_source"].values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert source["package_version"] in profile.label and "not a run on" in profile.label


def test_every_role_of_every_spec_on_gpus_has_one() -> None:
    there = set(available())
    for path in sorted((PACKAGE_ROOT / "engines").glob("*.toml")):
        spec = DeploymentSpec.load(path)
        if not isinstance(spec, GpuDeployment):
            continue
        systems = DATA_CENTRE if spec.hardware.compute_capability == "9.0" else ("l40s",)
        for role in Role:
            engine = spec.engine(role)
            assert {ProfileKey.of(system, engine.hub, engine.tp_size, engine.weight_dtype) for system in systems} <= there


def test_the_large_targets_are_there_at_one_two_and_four_cards() -> None:
    there = set(available())
    for model in ("Qwen3-32B", "DeepSeek-R1-Distill-Qwen-32B"):
        assert {ProfileKey(system, model, size, "bfloat16") for system in DATA_CENTRE for size in (1, 2, 4)} <= there


def test_profiles_stay_small() -> None:
    assert sum(path.stat().st_size for path in PROFILES.glob("*.json")) < 400_000


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (ProfileKey("h300", "Qwen3-32B", 2, "bfloat16"), r"no hardware profile of the system 'h300'; known: b200_sxm, h100_sxm"),
        (ProfileKey("h200_sxm", "Qwen3-32B", 8, "bfloat16"), r"no hardware profile of Qwen3-32B at TP 8 in bfloat16 on h200_sxm"),
        (ProfileKey("h200_sxm", "Llama-9", 1, "bfloat16"), r"of that system: .*Qwen3-1.7B TP 1 bfloat16"),
    ],
)
def test_what_has_no_profile_is_named_in_one_line(key: ProfileKey, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        find(key)
    assert "\n" not in raised.value.message


def _changed(folder: Path, **changes: object) -> Path:
    document = json.loads((PROFILES / H200_TARGET.file_name).read_text(encoding="utf-8"))
    path = folder / H200_TARGET.file_name
    path.write_text(json.dumps({name: value for name, value in {**document, **changes}.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "is of version 2, and version 1 is read: make profiles"),
        ({"schema": "lookahead-trace"}, "is no hardware profile: schema is 'lookahead-trace'"),
        ({"dense": None}, "is damaged: KeyError"),
        ({"dense": {"tokens": [1, 2], "ms": [1.0]}}, "is damaged: .*1 values for 2 places"),
    ],
)
def test_a_profile_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Profile.load(_changed(tmp_path, **changes))
    with pytest.raises(ConfigError, match=said):
        find(H200_TARGET, tmp_path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / H200_TARGET.file_name
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Profile.load(path)
