"""Whether engines may be served here: versions, GPUs, files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lr_backend.build.manifest import Platform, mismatches, probe_platform, read_engine_manifest
from lr_backend.errors import ConfigError
from lr_backend.nvidia import Gpu, parse_gpus
from tests.support.fake_trtllm import hopper


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    """One engine over GPUs 0 and 1."""
    (tmp_path / "rank0.engine").touch()
    entry = {
        "engine_dir": str(tmp_path),
        "files": ["rank0.engine"],
        "gpu_device_ids": [0, 1],
        "built_with": hopper().as_json(),
    }
    return {"dry_run": False, "engines": {"target": entry}}


def test_the_same_machine_serves_what_it_built(manifest: dict[str, Any]) -> None:
    assert mismatches(manifest, hopper(), {}) == ()
    assert mismatches(manifest, hopper(8), {}) == (), "more GPUs than it was built on"


@pytest.mark.parametrize(
    ("running", "said"),
    [
        (hopper(tensorrt_llm="1.2.0"), ["target: built with tensorrt_llm 1.2.1, here is 1.2.0"]),
        (
            hopper(tensorrt_llm=None),
            ["target: built with tensorrt_llm 1.2.1, here is none", "target: built with tensorrt 10.14.1.48, here is none"],
        ),
        (
            dataclasses.replace(hopper(), tensorrt="10.13.3.9"),
            ["target: built with tensorrt 10.14.1.48, here is 10.13.3.9"],
        ),
        (hopper(1), ["target: GPU 1 is not here"]),
        (
            hopper(capability="10.0"),
            [f"target: built for compute capability 9.0, GPU {n} (NVIDIA H100 80GB HBM3) has 10.0" for n in (0, 1)],
        ),
    ],
)
def test_what_differs_is_said(manifest: dict[str, Any], running: Platform, said: list[str]) -> None:
    assert list(mismatches(manifest, running, {})) == said


def test_an_engine_may_move_to_cards_like_those_it_was_built_on(manifest: dict[str, Any]) -> None:
    running = hopper(4)
    old = dataclasses.replace(running.gpus[3], compute_capability="8.0")
    mixed = dataclasses.replace(running, gpus=(*running.gpus[:3], old))
    assert mismatches(manifest, mixed, {"target": (1, 2)}) == ()
    assert mismatches(manifest, mixed, {"target": (2, 3)}) == (
        "target: built for compute capability 9.0, GPU 3 (NVIDIA H100 80GB HBM3) has 8.0",
    )
    assert mismatches(manifest, hopper(1), {"target": (0,)}) == (), "the card that it was built on may be gone"


def test_an_engine_that_is_gone_is_said(manifest: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rank0.engine").unlink()
    assert mismatches(manifest, hopper(), {}) == (f"target: {tmp_path} lacks rank0.engine",)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"dry_run": True}, "comes from a dry run"),
        ({"engines": None}, "names no engines"),
        ({"engines": {"target": {}}}, "target: the manifest's entry is damaged"),
        ({"engines": {"target": {"built_with": {"tensorrt_llm": "1.2.1"}}}}, "target: the manifest's entry is damaged"),
    ],
)
def test_a_damaged_manifest_serves_nothing(manifest: dict[str, Any], damage: dict[str, Any], said: str) -> None:
    (found,) = mismatches({**manifest, **damage}, hopper(), {})
    assert said in found


def test_a_platform_survives_json() -> None:
    assert Platform.from_json(hopper().as_json()) == hopper()


def test_the_drivers_list_is_read_and_noise_left_out() -> None:
    text = "0, NVIDIA H200, 9.0, 143771\n1, NVIDIA L4, 8.9, 23034\nNo devices were found\n2, odd, [N/A], [N/A]\n"
    assert parse_gpus(text) == (Gpu(0, "NVIDIA H200", "9.0", 143771), Gpu(1, "NVIDIA L4", "8.9", 23034))
    assert parse_gpus("") == ()


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe_platform().gpus == ()


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = "--query-gpu=index,name,compute_cap,memory.total" ] && echo "0, NVIDIA H200, 9.0, 143771"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert probe_platform().gpus == (Gpu(0, "NVIDIA H200", "9.0", 143771),)


def test_an_engines_own_manifest_must_be_there_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text, said in ((None, "build it first"), ("{", "cannot be read"), ("[]", "not a JSON object")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_engine_manifest(path)
