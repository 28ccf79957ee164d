"""What engines on GPUs ask of a host beyond its parts: folders to load from, CUDA MPS on shared cards, ranks that MPI starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lr_backend.build.placement import Placement
from lr_backend.engine import Role
from lr_backend.mpi import UNBOUND, UNBOUND_BY_MPIRUN
from lr_backend.nvidia import Gpu
from lr_backend.serve import mps, spawn_probe, startup_check
from lr_backend.serve.launch import ONE_RANK, launch_plan
from lr_backend.serve.mounts import COMPILED_INTO, folders_of, probe_without_exec, without_exec
from lr_backend.serve.mps import CONTROL, LOG_VARIABLE, PIPES_VARIABLE, Mps, probe_mps
from lr_backend.serve.spawn_probe import Spawned, probe_spawn, ranges, read_answer
from lr_backend.serve.startup_check import Finding, Level, Machine, Needs, check, check_spawns, shared_cards, spawn_finding

ALONE = tuple(Placement(role, "llmapi", 1, (index,)) for index, role in enumerate(Role))
SHARED = (Placement(Role.TARGET, "tensorrtllm", 2, (0, 1)), *(Placement(role, "tensorrtllm", 1, (1,)) for role in list(Role)[1:]))
MACHINE = Machine(gpus=tuple(Gpu(index, "NVIDIA H200", "9.0", 143771) for index in range(3)), shm_bytes=2 << 30)

MOUNTS = """\
overlay / overlay rw,relatime 0 0
tmpfs /tmp tmpfs rw,nosuid,nodev,noexec,relatime,size=1048576k 0 0
tmpfs /tmp/cache tmpfs rw,relatime 0 0
/dev/sda /data/with\\040space ext4 rw,noexec 0 0
/dev/sdb /data ext4 rw 0 0
"""


def finding_of(machine: Machine, placements: tuple[Placement, ...], what: str) -> list[Finding]:
    return [each for each in check(machine, Needs(placements)) if each.what.startswith(what)]


# --------------------------------------------------------------------------------------------------------------------- mounts


@pytest.mark.parametrize(
    ("folder", "closed"),
    [
        ("/tmp", True), ("/tmp/torchinductor_me", True), ("/tmp/cache/triton", False), ("/tmpfoo", False), ("/root", False),
        ("/data/with space/x", True), ("/data/other", False),
    ],
)  # fmt: skip
def test_the_deepest_mount_decides(folder: str, closed: bool) -> None:
    assert without_exec(MOUNTS, folder) is closed


def test_of_two_mounts_at_one_place_the_later_counts() -> None:
    again = MOUNTS + "tmpfs /tmp tmpfs rw,exec 0 0\n"
    assert without_exec(MOUNTS, "/tmp/x") and not without_exec(again, "/tmp/x")


@given(st.text(), st.text(alphabet="abc/ ", max_size=12))
def test_whatever_the_kernel_writes_is_no_error(mounts: str, folder: str) -> None:
    assert without_exec(mounts, f"/{folder}") in (True, False)


def test_each_compiler_has_a_folder_that_its_own_variable_moves(tmp_path: Path) -> None:
    assert folders_of({}) == {name: last for name, (_, last) in COMPILED_INTO.items()}
    assert folders_of({"HOME": "/h", "TMPDIR": "/t", "TRITON_CACHE_DIR": "/c"}) == {
        "TRITON_CACHE_DIR": "/c",
        "FLASHINFER_WORKSPACE_BASE": "/h",
        "TORCHINDUCTOR_CACHE_DIR": "/t",
    }
    mounts = tmp_path / "mounts"
    mounts.write_text(f"x / y rw 0 0\nx {tmp_path / 'closed'} tmpfs rw,noexec 0 0\n")
    environment = {"HOME": str(tmp_path / "closed"), "TMPDIR": str(tmp_path)}
    assert set(probe_without_exec(environment, mounts)) == {"TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}
    assert probe_without_exec(environment, tmp_path / "none") == {}


def test_a_folder_that_nothing_can_be_loaded_from_is_said_of_the_llm_api_alone() -> None:
    closed = replace(MACHINE, without_exec={"TORCHINDUCTOR_CACHE_DIR": "/tmp", "TRITON_CACHE_DIR": "/tmp"})
    (finding,) = finding_of(closed, ALONE, "compiled kernels")
    assert (finding.level, finding.found) == (Level.MISSING, "cannot be loaded: /tmp is mounted noexec")
    assert "exec" in finding.remedy and "TRITON_CACHE_DIR=FOLDER" in finding.remedy
    assert [each.level for each in finding_of(MACHINE, ALONE, "compiled kernels")] == [Level.OK]
    assert finding_of(closed, SHARED, "compiled kernels") == []


# ------------------------------------------------------------------------------------------------------------------------ MPS


def fake_control(folder: Path, text: str) -> dict[str, str]:
    program = folder / CONTROL
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", PIPES_VARIABLE: str(folder / "pipes")}


def test_the_daemon_is_asked_and_its_answer_counts(tmp_path: Path) -> None:
    running = fake_control(tmp_path, f'[ "$(cat)" = get_server_list ] && [ "${PIPES_VARIABLE}" = "{tmp_path}/pipes" ]')
    assert probe_mps(running) is Mps.RUNNING
    stopped = fake_control(tmp_path, "echo Cannot find MPS control daemon process; exit 1")
    assert probe_mps(stopped) is Mps.STOPPED


def test_without_its_program_a_pipe_that_is_shared_says_that_one_runs(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), PIPES_VARIABLE: str(tmp_path / "pipes")}
    assert probe_mps(environment) is Mps.ABSENT
    (tmp_path / "pipes").mkdir()
    (tmp_path / "pipes" / "control").touch()
    assert probe_mps(environment) is Mps.RUNNING


DAEMON = """
if [ "$1" = -d ]; then [ -d "$CUDA_MPS_LOG_DIRECTORY" ] && touch "$CUDA_MPS_PIPE_DIRECTORY/control"; exit; fi
case "$(cat)" in quit) rm "$CUDA_MPS_PIPE_DIRECTORY/control";; *) [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ];; esac
"""


def test_a_daemon_sees_all_cards_whatever_its_server_is_shown(tmp_path: Path) -> None:
    """It would number anew those that it is shown, and its clients, told of 6 and 7, would look for two that are not there."""
    shown = tmp_path / "shown"
    environment = fake_control(tmp_path, f'[ "$1" = -d ] && echo "<$CUDA_VISIBLE_DEVICES>" > {shown}')
    for named, seen in (("6,7", "<>\n"), ("MIG-1f2e", "<MIG-1f2e>\n")):
        mps.start(environment | {"CUDA_VISIBLE_DEVICES": named})
        assert shown.read_text() == seen


def test_a_daemon_is_started_in_its_folders_and_ended(tmp_path: Path) -> None:
    environment = fake_control(tmp_path, DAEMON) | {LOG_VARIABLE: str(tmp_path / "log")}
    assert probe_mps(environment) is Mps.STOPPED
    assert mps.start(environment) is Mps.RUNNING is probe_mps(environment)
    mps.stop(environment)
    assert probe_mps(environment) is Mps.STOPPED
    (tmp_path / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    assert mps.start(environment) is Mps.STOPPED, "it would not start"
    (tmp_path / CONTROL).unlink()
    assert mps.start(environment) is Mps.ABSENT
    mps.stop(environment)


def test_shared_cards_are_told_what_they_cost_without_it() -> None:
    assert (shared_cards(ALONE), shared_cards(SHARED)) == ((), (1,))
    assert finding_of(MACHINE, ALONE, "CUDA MPS") == []
    for state, remedy in ((Mps.STOPPED, f"as its user: {CONTROL} -d"), (Mps.ABSENT, "comes with NVIDIA's driver")):
        (finding,) = finding_of(replace(MACHINE, mps=state), SHARED, "CUDA MPS (GPU 1)")
        assert finding.level is Level.WARNING and finding.found.startswith(f"{state}: engines on one card take turns")
        assert remedy in finding.remedy
    (finding,) = finding_of(replace(MACHINE, mps=Mps.RUNNING), SHARED, "CUDA MPS")
    assert (finding.level, finding.found, finding.remedy) == (Level.OK, "running", "")


# ---------------------------------------------------------------------------------------------------------------------- spawn

MPI = """
import os, json, sys
class Above:
    gather = staticmethod(lambda value, root: None)
    Disconnect = staticmethod(lambda: None)
class Below(Above):
    def __init__(self, count):
        self.count = count
    def gather(self, value, root):
        return [[int(core) for core in os.environ["CORES"].split()]] * self.count
class COMM_SELF:
    @staticmethod
    def Spawn(program, arguments, count):
        if "FAILS" in os.environ:
            sys.exit(os.environ["FAILS"])
        return Below(count)
class Comm:
    Get_parent = staticmethod(lambda: COMM_NULL)
COMM_NULL, ROOT = object(), -4
"""


@pytest.fixture
def mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with a stand-in for mpi4py, whose started processes are on the cores ``CORES``."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(MPI)
    monkeypatch.syspath_prepend(tmp_path)
    return {"PYTHONPATH": str(tmp_path), "CORES": "3", "PATH": "/usr/bin:/bin"}


def test_the_program_starts_as_many_and_says_where_they_are(mpi: dict[str, str]) -> None:
    spawned = probe_spawn(("env", "--"), mpi, 4)
    assert (spawned.children, spawned.failure, spawned.left_out) == (((3,),) * 4, "", "")
    assert spawned.parent == tuple(sorted(os.sched_getaffinity(0)))


def test_what_mpi_says_when_it_starts_none_is_passed_on(mpi: dict[str, str]) -> None:
    spawned = probe_spawn((), {**mpi, "FAILS": "-----\nThere are not enough slots\n-----"}, 4)
    assert spawned.failure == "There are not enough slots"
    assert probe_spawn(("/no/such/mpirun",), mpi, 1).left_out == "there is no /no/such/mpirun"
    assert read_answer("", "").failure == "it ended without a word"
    assert read_answer('noise\n{"parent": [0, 1], "children": [[0, 1], [1]]}\n') == Spawned((0, 1), ((0, 1), (1,)))


def test_without_mpi4py_it_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn_probe.importlib.util, "find_spec", lambda name: None)
    spawned = probe_spawn((), {}, 1)
    assert spawned.left_out == "this Python has no mpi4py"
    finding = spawn_finding("ranks", spawned, {})
    assert finding.level is Level.WARNING and finding.found == "not tried: this Python has no mpi4py" and finding.remedy


EIGHT = tuple(range(8))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_cores_are_written_as_linux_does(cores: set[int]) -> None:
    written = ranges(sorted(cores))
    parts = [part.split("-") for part in written.split(",")]
    assert {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)} == cores
    assert all(int(after[0]) > int(before[-1]) + 1 for before, after in pairwise(parts))


def _real_mpi() -> bool:
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


@pytest.mark.skipif(not _real_mpi(), reason="no Open MPI with mpi4py here")
def test_open_mpi_binds_no_rank_that_is_started_as_the_server_starts_it_and_there_may_be_more_than_cores() -> None:
    count = 1 + len(os.sched_getaffinity(0))
    plan = launch_plan(SHARED)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NODELIST": "nowhere", "SLURM_TASKS_PER_NODE": "1"}
    spawned = probe_spawn((*plan.launcher, *ONE_RANK), plan.over({**os.environ, **job}), count)
    assert spawned.failure == spawned.left_out == ""
    assert not spawned.bound and spawned.children == (spawned.parent,) * count
    assert spawned.parent == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("spawned", "level", "says"),
    [
        (Spawned(EIGHT, (EIGHT, EIGHT)), Level.OK, "2 started, on 8 of 8 cores each: ranks 0-1 on 0-7"),
        (Spawned(EIGHT, (EIGHT, (5,))), Level.WARNING, "2 started, on 1 of 8 cores each: rank 0 on 0-7; rank 1 on 5"),
        (Spawned(failure="no slots"), Level.MISSING, "MPI starts none: no slots"),
    ],
)
def test_what_came_of_it_is_a_finding(spawned: Spawned, level: Level, says: str) -> None:
    finding = spawn_finding("ranks", spawned, {"OPAL_PREFIX": "/nowhere"})
    assert (finding.level, finding.found) == (level, says)
    assert bool(finding.remedy) == (level is not Level.OK)
    assert ("OPAL_PREFIX=/nowhere" in finding.remedy) == (level is Level.MISSING)


def test_ranks_are_tried_as_the_server_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[tuple[str, ...], dict[str, str], int]] = []

    def probe(launcher: tuple[str, ...], environment: dict[str, str], count: int) -> Spawned:
        tried.append((launcher, environment, count))
        return Spawned((0, 1), ((0, 1),) * count)

    monkeypatch.setattr(startup_check, "probe_spawn", probe)
    environment = {"SLURM_JOB_ID": "7", "PATH": "/bin", **UNBOUND_BY_MPIRUN}
    judge = Placement(Role.JUDGE, "llmapi", 1, (2,))
    findings = check_spawns((*SHARED[:2], judge), environment)
    assert [each.what for each in findings] == ["ranks by mpirun", "ranks of the LLM API"]
    (launcher, first, ranks), (alone, second, one) = tried
    assert (launcher[0], launcher[-2:], ranks) == ("mpirun", ("-n", "1"), 3)
    assert (alone, one) == ((), 1)
    assert all("SLURM_JOB_ID" not in each and UNBOUND.items() <= each.items() for each in (first, second))
    assert UNBOUND_BY_MPIRUN.items() <= first.items() and "PRTE_MCA_rmaps_default_inherit" not in second
    assert check_spawns(SHARED[:1], environment) == () == check_spawns((), environment), "one engine's ranks are mpirun's own"
    assert len(tried) == 2
