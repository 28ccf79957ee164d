"""What a machine lacks for a deployment: all at once, each with what to do; and the commands that say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lr_backend.build.nvidia import Gpu, parse_gpus
from lr_backend.build.placement import Placement
from lr_backend.build.spec import DeploymentSpec
from lr_backend.cli.app import app
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.serve import startup_check
from lr_backend.serve.startup_check import Level, Machine, check, missing, probe, require_ready

H200 = Gpu(0, "NVIDIA H200", "9.0", 143771)
GOOD = Machine(
    tritonserver=Path("/opt/tritonserver/bin/tritonserver"), triton_release="26.07", tensorrt_llm="1.2.1", backend_library=True,
    executor_worker=True, mpirun="/usr/local/mpi/bin/mpirun", gpus=tuple(replace(H200, index=index) for index in range(4)),
    shm_bytes=2 << 30,
)  # fmt: skip
COMPILED = [
    Placement(Role.TARGET, "tensorrtllm", 2, (0, 1)), Placement(Role.DRAFT, "tensorrtllm", 1, (2,)),
    Placement(Role.JUDGE, "tensorrtllm", 1, (3,)),
]  # fmt: skip
LLM_API = [replace(each, runtime="llmapi") for each in COMPILED]


def names(machine: Machine, placements: list[Placement]) -> list[str]:
    return [finding.what for finding in missing(check(machine, placements))]


@pytest.mark.parametrize("placements", [COMPILED, LLM_API, []])
def test_a_machine_that_has_all_is_ready(placements: list[Placement]) -> None:
    findings = check(GOOD, placements)
    assert all(finding.level is Level.OK and not finding.remedy for finding in findings)
    require_ready(findings)


def test_a_bare_machine_hears_of_everything_at_once_with_what_to_do() -> None:
    findings = check(Machine(stack_bytes=8 << 20, memlock_bytes=8 << 20), COMPILED)
    assert [each.what for each in missing(findings)] == [
        "tritonserver", "Triton release", "TensorRT-LLM", "tensorrtllm backend", "trtllmExecutorWorker", "mpirun", "GPUs",
        "/dev/shm",
    ]  # fmt: skip
    assert [each.what for each in findings if each.level is Level.WARNING] == ["ulimit memlock", "ulimit stack"]
    assert all(each.remedy for each in findings if each.level is not Level.OK)
    with pytest.raises(ConfigError) as caught:
        require_ready(findings)
    assert len(caught.value.message.splitlines()) == 9
    assert "--shm-size=2g" in caught.value.message
    assert "stack" not in caught.value.message, "a warning stops nobody"


def test_the_llm_api_needs_neither_backend_nor_mpirun_and_the_torch_engine_nothing_but_triton() -> None:
    without = replace(GOOD, backend_library=False, executor_worker=False, mpirun=None)
    assert names(without, LLM_API) == []
    assert names(without, COMPILED) == ["tensorrtllm backend", "trtllmExecutorWorker", "mpirun"]
    assert names(Machine(tritonserver=Path("/t")), []) == []
    assert names(Machine(), []) == ["tritonserver"]


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ({"triton_release": "26.08"}, "Triton release", "26.08; 26.07 is needed"),
        ({"tensorrt_llm": "1.1.0"}, "TensorRT-LLM", "1.1.0; 1.2.1 is needed"),
        ({"gpus": GOOD.gpus[:2]}, "GPUs", "2 visible, 4 needed"),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "64 MiB; 2048 MiB is needed"),
        ({"shm_bytes": None}, "/dev/shm", "0 MiB; 2048 MiB is needed"),
        (
            {"gpus": (*GOOD.gpus[:3], Gpu(3, "Tesla T4", "7.5", 15360))},
            "GPU 3 (judge)",
            "Tesla T4, 15 GiB, compute capability 7.5",
        ),
    ],
)
def test_each_shortfall_is_named_with_what_was_found(change: dict[str, Any], what: str, says: str) -> None:
    (finding,) = missing(check(replace(GOOD, **change), COMPILED))
    assert (finding.what, finding.found) == (what, says)
    assert finding.remedy


def test_hidden_gpus_are_told_from_absent_ones() -> None:
    hidden = replace(GOOD, cuda_visible_devices="0,1")
    (finding,) = missing(check(hidden, COMPILED))
    assert "CUDA_VISIBLE_DEVICES=0,1 hides some of 4" in finding.remedy
    assert [gpu.index for gpu in replace(GOOD, cuda_visible_devices="3,1").visible_gpus] == [3, 1]
    assert len(replace(GOOD, cuda_visible_devices="GPU-a,GPU-b").visible_gpus) == 2
    assert replace(GOOD, cuda_visible_devices="").visible_gpus == ()


def test_nvidia_smis_lines_are_read() -> None:
    text = "0, NVIDIA H200, 9.0, 143771\n1, NVIDIA L4, 8.9, 23034\nNo devices were found\n2, broken, [N/A], [N/A]\n"
    assert parse_gpus(text) == (H200, Gpu(1, "NVIDIA L4", "8.9", 23034))


def test_the_probe_finds_what_an_image_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def executable(path: Path, text: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    binary = executable(tmp_path / "tritonserver" / "bin" / "tritonserver")
    for name in ("libtriton_tensorrtllm.so", "trtllmExecutorWorker"):
        executable(tmp_path / "tritonserver" / "backends" / "tensorrtllm" / name)
    executable(tmp_path / "bin" / "mpirun")
    executable(
        tmp_path / "bin" / "nvidia-smi",
        '#!/bin/sh\n[ "$1" = --query-gpu=index,name,compute_cap,memory.total ] && echo 0, A, 9.0, 7\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(startup_check, "installed", {"tensorrt-llm": "1.2.1"}.get)
    environment = {"PATH": str(tmp_path / "bin"), "NVIDIA_TRITON_SERVER_VERSION": "26.07", "CUDA_VISIBLE_DEVICES": "0"}
    machine = probe(binary, environment)
    assert (machine.tritonserver, machine.triton_release, machine.tensorrt_llm) == (binary, "26.07", "1.2.1")
    assert machine.backend_library and machine.executor_worker
    assert machine.mpirun == str(tmp_path / "bin" / "mpirun")
    assert machine.gpus == (Gpu(0, "A", "9.0", 7),)
    assert machine.shm_bytes is not None and machine.shm_bytes > 0


def test_the_probe_of_a_plain_machine_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = probe(tmp_path / "no-such-server", {})
    assert (machine.tritonserver, machine.triton_release, machine.mpirun, machine.gpus) == (None, None, None, ())
    assert not machine.backend_library


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's spec, placed on GPUs."""
    monkeypatch.setattr(DeploymentSpec, "placements", property(lambda self: tuple(COMPILED)))


def test_doctor_prints_a_table_and_fails_where_something_is_missing(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.cli.app.probe", lambda binary: replace(GOOD, mpirun=None))
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "install Open MPI" in result.output
    monkeypatch.setattr("lr_backend.cli.app.probe", lambda binary: GOOD)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "NVIDIA H200, 140 GiB" in result.output


def test_serve_refuses_a_machine_before_it_builds_anything(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lr_backend.cli.app.probe", lambda binary: replace(GOOD, gpus=(), mpirun=None))
    result = CliRunner().invoke(app, ["serve", "--repository", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "GPUs: 0 visible, 4 needed" in result.output and "mpirun: not found" in result.output
    assert not (tmp_path / "out").exists()


def test_serve_starts_the_server_by_the_plan(four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lr_backend.cli.app.probe", lambda binary: replace(GOOD, gpus=(*GOOD.gpus, replace(H200, index=4))))
    seen: list[Any] = []
    monkeypatch.setattr("lr_backend.cli.app._run", lambda console, server, deployment: seen.append(server) or 0)
    result = CliRunner().invoke(
        app, ["serve", "--repository", str(tmp_path / "out")], env={"LOOKAHEAD_ADMIN_KEY": "0123456789abcdef"}
    )
    assert result.exit_code == 0, result.output
    options = seen[0].options
    assert options.plan.mode == "orchestrator"
    assert "--cuda-memory-pool-byte-size=4:0" in options.plan.arguments, "all that the server sees, not only those in use"
    assert options.admin_key == "0123456789abcdef"
