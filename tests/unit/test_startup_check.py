"""What a machine lacks for a deployment: all at once, each with what to do; and the commands that say so."""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lr_backend.build.placement import Placement
from lr_backend.build.spec import DeploymentSpec, HardwareSpec
from lr_backend.cli import ports
from lr_backend.cli.app import app
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.nvidia import Gpu, parse_gpus
from lr_backend.serve import startup_check
from lr_backend.serve.mps import Mps
from lr_backend.serve.startup_check import (
    Finding,
    Level,
    Machine,
    Needs,
    Use,
    check,
    check_files,
    missing,
    probe,
    probe_cores,
    require_ready,
)
from tests.support.tiny_models import make_tiny_models, write_spec

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
    return [finding.what for finding in missing(check(machine, Needs(tuple(placements))))]


@pytest.mark.parametrize("placements", [COMPILED, LLM_API, []])
def test_a_machine_that_has_all_is_ready(placements: list[Placement]) -> None:
    findings = check(GOOD, Needs(tuple(placements)))
    assert all(finding.level is Level.OK and not finding.remedy for finding in findings)
    require_ready(findings)


def test_a_bare_machine_hears_of_everything_at_once_with_what_to_do() -> None:
    findings = check(Machine(stack_bytes=8 << 20, memlock_bytes=8 << 20), Needs(tuple(COMPILED)))
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


def test_the_llm_api_needs_neither_backend_nor_mpirun_and_the_embedded_engine_nothing_but_triton() -> None:
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
    hardware = HardwareSpec(gpu="H200", num_gpus=4, gpu_memory_gib=139.8, compute_capability="9.0")
    (finding,) = missing(check(replace(GOOD, **change), Needs(tuple(COMPILED), hardware=hardware)))
    assert (finding.what, finding.found) == (what, says)
    assert finding.remedy


@pytest.mark.parametrize(
    ("spec", "card", "says"),
    [
        ("qwen3-32b-1gpu", H200, ""),
        ("qwen3-32b-llmapi", Gpu(0, "NVIDIA H100 80GB HBM3", "9.0", 81559), ""),
        ("qwen3-32b-1gpu", Gpu(0, "NVIDIA H100 80GB HBM3", "9.0", 81559), "the spec is for cards of 139.8 GiB"),
        ("qwen3-32b-llmapi", Gpu(0, "NVIDIA RTX 6000 Ada", "8.9", 49140), "compute capability 9.0.*for cards of 79.1 GiB"),
    ],
)
def test_cards_that_the_spec_is_not_for_are_named(spec: str, card: Gpu, says: str) -> None:
    """Of one architecture there are cards of 80 and of 141 GB: engines come up on neither by their capability alone."""
    machine = replace(GOOD, gpus=tuple(replace(card, index=index) for index in range(4)))
    wrong = missing(check(machine, Needs.of(DeploymentSpec.load(spec))))
    assert bool(wrong) == bool(says)
    assert all(each.what.startswith("GPU ") and re.search(says, each.remedy) for each in wrong)


def test_hidden_gpus_are_told_from_absent_ones() -> None:
    hidden = replace(GOOD, cuda_visible_devices="0,1")
    (finding,) = missing(check(hidden, Needs(tuple(COMPILED))))
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
    machine = probe(binary, Needs(tuple(COMPILED)), environment)
    assert (machine.tritonserver, machine.triton_release, machine.tensorrt_llm) == (binary, "26.07", "1.2.1")
    assert machine.backend_library and machine.executor_worker
    assert machine.mpirun == str(tmp_path / "bin" / "mpirun")
    assert machine.gpus == (Gpu(0, "A", "9.0", 7),)
    assert machine.shm_bytes is not None and machine.shm_bytes > 0


def test_the_probe_of_a_plain_machine_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = probe(tmp_path / "no-such-server", Needs(tuple(COMPILED)), {})
    assert (machine.tritonserver, machine.triton_release, machine.mpirun, machine.gpus) == (None, None, None, ())
    assert not machine.backend_library


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's spec, placed on GPUs, whose ranks come up."""
    monkeypatch.setattr(DeploymentSpec, "placements", property(lambda self: tuple(COMPILED)))
    monkeypatch.setattr("lr_backend.cli.doctor.check_spawns", lambda placements: (Finding("ranks", "come up", Level.OK),))


def test_doctor_prints_a_table_and_fails_where_something_is_missing(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.cli.doctor.probe", lambda binary, needs: replace(GOOD, mpirun=None))
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "install Open MPI" in result.output
    monkeypatch.setattr("lr_backend.cli.doctor.probe", lambda binary, needs: GOOD)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "NVIDIA H200, 140 GiB" in result.output and "come up" in result.output


def test_serve_refuses_a_machine_before_it_builds_anything(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lr_backend.cli.serve.probe", lambda binary, needs: replace(GOOD, gpus=(), mpirun=None))
    result = CliRunner().invoke(
        app, ["serve", "--openai-port", "0", "--repository", str(tmp_path / "out")], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 1
    assert "GPUs: 0 visible, 4 needed" in result.output and "mpirun: not found" in result.output
    assert not (tmp_path / "out").exists()


def test_serve_says_what_it_serves_worse_for(four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tuple(replace(each, gpu_device_ids=(0,), tp_size=1) for each in COMPILED)
    monkeypatch.setattr(DeploymentSpec, "placements", property(lambda self: shared))
    monkeypatch.setattr("lr_backend.cli.serve.probe", lambda binary, needs: replace(GOOD, mps=Mps.STOPPED))
    monkeypatch.setattr("lr_backend.cli.serve._run", lambda *given: 0)
    result = CliRunner().invoke(app, ["serve", "--openai-port", "0", "--repository", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "CUDA MPS (GPU 0) not running: engines on one card take turns" in result.output
    assert "serve --start-mps" in result.output


@pytest.mark.parametrize(
    ("found", "cards", "calls"),
    [
        (Mps.STOPPED, (0,), ["start", "run", "stop"]),
        (Mps.STOPPED, (), ["run"]),
        (Mps.RUNNING, (0,), ["run"]),
        (Mps.ABSENT, (0,), ["run"]),
    ],
)
def test_serve_starts_mps_where_it_is_told_to_and_cards_are_shared(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Mps, cards: tuple[int, ...], calls: list[str]
) -> None:
    seen: list[str] = []
    if cards:
        shared = tuple(replace(each, gpu_device_ids=cards, tp_size=1) for each in COMPILED)
        monkeypatch.setattr(DeploymentSpec, "placements", property(lambda self: shared))
    monkeypatch.setattr("lr_backend.cli.serve.probe", lambda binary, needs: replace(GOOD, mps=found))
    monkeypatch.setattr("lr_backend.serve.mps.start", lambda environment: seen.append("start") or Mps.RUNNING)
    monkeypatch.setattr("lr_backend.serve.mps.stop", lambda environment: seen.append("stop"))
    monkeypatch.setattr("lr_backend.cli.serve._run", lambda *given: seen.append("run") or 0)
    result = CliRunner().invoke(app, ["serve", "--start-mps", "--openai-port", "0", "--repository", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert seen == calls
    assert ("CUDA MPS started" in result.output) == ("start" in calls)
    assert ("take turns" in result.output) == (found is Mps.ABSENT)


def test_serve_starts_the_server_by_the_plan(four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "lr_backend.cli.serve.probe", lambda binary, needs: replace(GOOD, gpus=(*GOOD.gpus, replace(H200, index=4)))
    )
    seen: list[Any] = []
    monkeypatch.setattr("lr_backend.cli.serve._run", lambda console, server, *others: seen.append(server) or 0)
    result = CliRunner().invoke(
        app,
        ["serve", "--openai-port", "0", "--repository", str(tmp_path / "out")],
        env={"LOOKAHEAD_ADMIN_KEY": "0123456789abcdef"},
    )
    assert result.exit_code == 0, result.output
    options = seen[0].options
    assert options.plan.mode == "orchestrator"
    assert "--cuda-memory-pool-byte-size=4:0" in options.plan.arguments, "all that the server sees, not only those in use"
    assert options.admin_key == "0123456789abcdef"


# ------------------------------------------------------------------------------------------------- decoder, ports, files, stubs


def decoder_finding(machine: Machine, use: Use) -> startup_check.Finding:
    (finding,) = startup_check.check_decoder(machine, use)
    return finding


def test_a_decoder_that_was_not_built_names_the_compiler_and_the_command() -> None:
    machine = Machine(no_decoder="not built when the package was installed", checkout=Path("/src"))
    finding = decoder_finding(machine, Use.ALWAYS)
    assert finding.level is Level.MISSING
    assert "install gcc" in finding.remedy and "pip install" in finding.remedy and finding.remedy.endswith("-e /src")
    finding = decoder_finding(replace(machine, compiler="/usr/bin/cc"), Use.ALWAYS)
    assert "gcc" not in finding.remedy and "pip install" in finding.remedy


def test_a_compiler_that_cannot_build_the_decoder_is_none(tmp_path: Path) -> None:
    for name in ("clang", "gcc"):
        assert startup_check.find_compiler({"PATH": str(tmp_path)}) is None
        (tmp_path / name).touch(mode=0o755)
    assert startup_check.find_compiler({"PATH": str(tmp_path)}) == str(tmp_path / "gcc")


def test_a_decoder_that_does_not_open_names_the_library() -> None:
    finding = decoder_finding(Machine(no_decoder="does not open: libgomp.so.1: cannot open"), Use.ALWAYS)
    assert "libgomp1" in finding.remedy


def test_torch_computes_where_the_decoder_is_wanted_and_not_needed() -> None:
    finding = decoder_finding(Machine(no_decoder="not built when the package was installed"), Use.WHERE_BUILT)
    assert finding.level is Level.WARNING and "several times slower" in finding.found
    assert startup_check.check_decoder(Machine(no_decoder="x"), Use.NONE) == ()
    assert decoder_finding(Machine(), Use.ALWAYS).level is Level.OK


def test_the_demo_needs_the_decoder_and_engines_on_gpus_do_not() -> None:
    assert Needs.of(DeploymentSpec.load("demo")).decoder is Use.ALWAYS, "its target holds the draft model"
    assert Needs.of(DeploymentSpec.load("qwen3-32b")).decoder is Use.NONE


def test_a_taken_port_is_named_with_the_option_that_says_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        needs = Needs(addresses={"--openai-port": ("127.0.0.1", port), "--grpc-port": ("127.0.0.1", 0)})
        findings = check(probe(None, needs), needs)
    (finding,) = [each for each in findings if each.what == f"port {port}"]
    assert finding.level is Level.MISSING
    assert "already in use" in finding.found and "--openai-port" in finding.remedy
    assert not [each for each in findings if each.what == "port 0"]


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    needs = Needs(addresses={"--http-port": ("192.0.2.1", 8000)})
    (finding,) = [each for each in missing(check(probe(None, needs), needs)) if each.what == "port 8000"]
    assert "192.0.2.1 cannot be listened on" in finding.found


def test_a_server_without_a_stub_for_this_python_says_so_once() -> None:
    (finding,) = missing(
        check(Machine(tritonserver=Path("/t"), no_stub="this tritonserver has no stub for Python 3.14"), Needs())
    )
    assert (finding.what, finding.found) == ("tritonserver", "this tritonserver has no stub for Python 3.14")


def test_a_missing_checkpoint_is_found_with_its_folder_and_the_spec(tmp_path: Path) -> None:
    checkpoints = make_tiny_models(tmp_path / "models")
    spec = DeploymentSpec.load(write_spec(tmp_path / "tiny.toml", checkpoints))
    assert missing(check_files(spec)) == ()
    (checkpoints["draft"] / "model.safetensors").unlink()
    (finding,) = missing(check_files(spec))
    assert "draft: " in finding.found and "neither model.safetensors" in finding.found and str(spec.path) in finding.remedy


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "why_no_decoder", lambda: "not built when the package was installed")
    monkeypatch.setattr(startup_check, "find_compiler", lambda environment: None)


@pytest.mark.usefixtures("no_decoder")
@pytest.mark.parametrize(
    "command", [["serve", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "0"], ["build"]]
)
def test_a_missing_decoder_is_said_once_and_before_anything_is_started(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lr_backend.cli.serve.TritonServer", lambda *given: pytest.fail("a server was made"))
    option = "--repository" if command[0] == "serve" else "--output"
    result = CliRunner().invoke(app, [*command, option, str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output.count("not built when the package was installed") == 1 and "install gcc" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("127.0.0.2", "127.0.0.2")])
def test_a_host_is_given_to_triton_in_numbers(host: str, address: str) -> None:
    """It takes a name for 255.255.255.255, and nobody reaches it there."""
    assert ports._numbers(host) == address


@pytest.mark.parametrize("host", ["::1", "::", ""])
@pytest.mark.parametrize("command", ["doctor", "serve"])
def test_a_host_that_triton_cannot_listen_on_is_refused(host: str, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--host", host], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "is no IPv4 address" in result.output


@pytest.mark.usefixtures("no_decoder")
def test_doctor_names_the_decoder_and_a_dry_run_warns(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--http-port", "0"], env={"COLUMNS": "300"})
    assert result.exit_code == 1 and "decoder in C" in result.output
    result = CliRunner().invoke(app, ["build", "--dry-run", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "decoder in C" in result.output


@pytest.mark.parametrize(
    ("num_loops", "num_cores", "level", "says"),
    [
        (4, 8.0, Level.OK, "8 for 4 step loops"),
        (4, 3.5, Level.WARNING, "3.5 for 4 step loops; 8 is better"),
        (2, 1.0, Level.WARNING, "1 for 2 step loops; 4 is better"),
    ],
)
def test_step_loops_want_cores_of_their_own(num_loops: int, num_cores: float, level: Level, says: str) -> None:
    (found,) = (each for each in check(replace(GOOD, num_cores=num_cores), Needs(num_loops=num_loops)) if each.what == "cores")
    assert (found.level, found.found) == (level, says)
    assert (f"num_loops = {max(1, int(num_cores) // 2)}" in found.remedy) is (level is Level.WARNING)


def test_a_server_with_one_step_loop_or_none_is_asked_for_no_cores(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "engines" / "tiny.toml", make_tiny_models(tmp_path / "models"), num_loops=4)
    path.write_text(path.read_text().replace("[target]\n", '[target]\nurl = "grpc://target:8001"\n'))
    spec = DeploymentSpec.load(path)
    elsewhere = Needs.of(spec.only([Role.TARGET]))
    assert (Needs.of(spec).num_loops, elsewhere.num_loops) == (4, 0)
    for needs in (elsewhere, Needs(num_loops=1)):
        assert "cores" not in {each.what for each in check(replace(GOOD, num_cores=0.5), needs)}


@pytest.mark.parametrize(
    ("own", "quotas", "most"),
    [
        ("0::/", {"": "50000 100000"}, 0.5),
        ("1:cpu:/v1\n0::/pod/box", {"pod/box": "max 100000", "pod": "25000 100000", "": "50000 100000"}, 0.25),
        ("0::/pod/box", {"pod/box": "50000 100000", "pod": "max 100000"}, 0.5),
        ("0::/pod", {"pod/other": "1000 100000"}, math.inf),
        ("0::/../above", {"": "max 100000"}, math.inf),
        (None, {"": "50000 100000"}, 0.5),
        ("0::/", {"": ""}, math.inf),
        ("0::/", {}, math.inf),
    ],
)
def test_the_least_quota_from_this_group_upwards_bounds_the_cores(
    tmp_path: Path, own: str | None, quotas: dict[str, str], most: float
) -> None:
    if own is not None:
        (tmp_path / "own").write_text(own)
    for group, quota in quotas.items():
        (folder := tmp_path / "mounted" / group).mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(quota)
    assert probe_cores(tmp_path / "mounted", tmp_path / "own") == min(most, len(os.sched_getaffinity(0)))
