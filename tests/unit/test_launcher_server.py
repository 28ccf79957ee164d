"""The launcher against a stand-in for tritonserver: start, readiness, every way to end. Waits are for events, with a bound."""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lr_backend.errors import ConfigError
from lr_backend.serve import server as launcher
from lr_backend.serve.guard import remove_shared_memory
from lr_backend.serve.launch import LaunchPlan
from lr_backend.serve.server import PORT_ATTEMPTS, Ports, ServerError, ServerOptions, TritonServer, free_ports, useful_lines
from tests.support import fake_mpirun, fake_triton
from tests.support.waiting import all_ended

BOUND_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for model in ("target", "lookahead"):
        (tmp_path / "repository" / model).mkdir(parents=True)
        (tmp_path / "repository" / model / "config.pbtxt").touch()
    return tmp_path / "repository"


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    script = tmp_path / "tritonserver"
    script.write_text(f"#!{sys.executable}\n" + Path(fake_triton.__file__).read_text())
    script.chmod(0o755)
    return script


class Started:
    """A server over the stand-in, and the processes it is made of."""

    def __init__(self, repository: Path, fake: Path, mode: str, **options: Any) -> None:
        self.pid_file = repository.parent / "pids"
        environment = {
            "FAKE_MODE": mode, "FAKE_PIDS": str(self.pid_file), "FAKE_MARKER": str(repository.parent / "marker"),
        }  # fmt: skip
        self.server = TritonServer(repository, ServerOptions(tritonserver=fake, environment=environment, **options))

    def processes(self) -> list[int]:
        return [os.pidfd_open(int(pid)) for pid in until_written(self.pid_file).split()]

    @property
    def shared_memory(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if self.server.shm_prefix in name]


def until_written(path: Path) -> str:
    """Text of a file that another process makes by renaming."""
    deadline = time.monotonic() + BOUND_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        select.select([], [], [], 0.01)
    return path.read_text()


@pytest.fixture
def start(repository: Path, fake: Path) -> Iterator[type[Started]]:
    made: list[Started] = []

    def make(mode: str = "ok", **options: Any) -> Started:
        made.append(Started(repository, fake, mode, **options))
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.server.stop(0.0)


def test_a_ready_server_is_stopped_without_a_trace(start: type[Started]) -> None:
    started = start("ok")
    with started.server as server:
        server.wait_ready(BOUND_S)
        processes = started.processes()
        assert server.running
        assert len(started.shared_memory) == 2
        log = server.log_file
        assert log is not None
    assert all_ended(processes)
    assert not started.shared_memory
    assert not log.parent.exists()
    assert "Signal (15) received." in server.log_text(), "the log can still be read"
    assert server.stop() is None, "stopping again is fine"


def test_stop_returns_zero_after_a_full_drain(start: type[Started]) -> None:
    started = start("ok")
    started.server.start()
    started.server.wait_ready(BOUND_S)
    assert started.server.stop() == 0


def test_a_server_that_ignores_sigterm_is_killed_with_all_it_started(start: type[Started]) -> None:
    started = start("stubborn")
    started.server.start()
    started.server.wait_ready(BOUND_S)
    processes = started.processes()
    assert started.server.stop(drain_s=0.0) == 137
    assert all_ended(processes)
    assert not started.shared_memory


def test_a_killed_server_leaves_nothing_and_stop_still_works(start: type[Started]) -> None:
    started = start("ok")
    started.server.start()
    started.server.wait_ready(BOUND_S)
    processes = started.processes()
    assert started.server.pid is not None
    os.kill(started.server.pid, signal.SIGKILL)
    assert started.server.wait(BOUND_S) == 128 + signal.SIGKILL
    assert all_ended(processes), "its children were ended without anybody calling stop"
    assert not started.shared_memory
    assert started.server.stop() == 137


def test_a_killed_guard_takes_the_server_along(start: type[Started]) -> None:
    started = start("ok")
    started.server.start()
    started.server.wait_ready(BOUND_S)
    processes = started.processes()
    assert started.server._guard is not None
    started.server._guard.kill()
    assert all_ended(processes[:1])
    started.server.stop()
    assert all_ended(processes[1:2]), "the group is ended by stop"
    assert not started.shared_memory
    os.kill(int(until_written(started.pid_file).split()[2]), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_server_outlives_its_launcher(repository: Path, fake: Path, tmp_path: Path, number: int) -> None:
    code = (
        "import sys, pathlib; from lr_backend.serve.server import *\n"
        "server = TritonServer(pathlib.Path(sys.argv[1]), ServerOptions(tritonserver=pathlib.Path(sys.argv[2])))\n"
        "server.start(); server.wait_ready(30); print(server.shm_prefix, server.log_file.parent, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "FAKE_PIDS": str(tmp_path / "pids"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(repository), str(fake)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        prefix, folder = parent.stdout.readline().split()
        processes = [os.pidfd_open(int(pid)) for pid in until_written(tmp_path / "pids").split()]
        parent.send_signal(number)
        assert all_ended(processes)
    gone = time.monotonic() + BOUND_S
    while (Path(folder).exists() or any(prefix in name for name in os.listdir("/dev/shm"))) and time.monotonic() < gone:
        select.select([], [], [], 0.01)
    assert prefix
    assert not any(prefix in name for name in os.listdir("/dev/shm"))
    assert folder
    assert not Path(folder).exists()


def test_guard_and_server_hold_the_servers_folder(start: type[Started]) -> None:
    """So that nobody takes it for a leftover where the launcher is killed and the server drains."""
    server = start("ok").server
    server.start()
    assert server.log_file is not None and server._guard is not None and server.pid is not None
    folder = server.log_file.parent
    for pid in (server._guard.pid, server.pid):  # they may still start, and close descriptors meanwhile
        assert any(descriptor.exists() and descriptor.samefile(folder) for descriptor in Path(f"/proc/{pid}/fd").iterdir())


def test_only_its_owner_may_read_the_log(start: type[Started], tmp_path: Path) -> None:
    old = tmp_path / "old.log"
    old.write_text("of another server")
    old.chmod(0o644)
    for options in ({}, {"log_file": tmp_path / "new" / "server.log"}, {"log_file": old}):
        server = start("ok", **options).server
        server.start()
        assert server.log_file is not None
        assert server.log_file.stat().st_mode & 0o777 == 0o600
        server.stop(0.0)
        assert "of another server" not in server.log_text()
    assert old.with_name("old.log.1").read_text() == "of another server"  # why a server died, once it is started anew


def test_a_log_behind_a_link_stays_where_it_is(start: type[Started], tmp_path: Path) -> None:
    """/dev/stderr is one, and may lead to a file."""
    there, link = tmp_path / "there.log", tmp_path / "link.log"
    there.write_text("of another server")
    link.symlink_to(there)
    server = start("ok", log_file=link).server
    server.start()
    server.stop(0.0)
    assert link.is_symlink() and sorted(path.name for path in tmp_path.glob("*.log*")) == ["link.log", "there.log"]
    written = there.read_text()
    assert written.startswith("of another server") and written.removeprefix("of another server") == server.log_text()


def test_what_stood_in_a_log_that_is_added_to_is_not_this_servers(start: type[Started], tmp_path: Path) -> None:
    """Else a port that was taken once would be taken for ever."""
    there, link = tmp_path / "there.log", tmp_path / "link.log"
    there.write_text("failed to start HTTP service: Unavailable - Socket '127.0.0.1:8000' already in use\n")
    link.symlink_to(there)
    server = start("ok", log_file=link).server
    server.start()
    server.wait_ready(BOUND_S)
    assert "already in use" not in server.log_text()
    with there.open("r+b") as file:
        file.truncate(0)  # as logrotate does
    with there.open("ab") as file:
        file.write(b"new")
    assert server.log_text() == "new"
    server.stop(0.0)


def test_the_logs_of_the_last_servers_stay(start: type[Started], tmp_path: Path) -> None:
    """In a crash loop the first one says why."""
    path = tmp_path / "server.log"
    for number in range(launcher.NUM_OLD_LOGS + 2):
        server = start("ok", log_file=path).server
        server.start()
        server.stop(0.0)
        path.write_text(f"{number}")
    texts = [(tmp_path / f"server.log.{number}").read_text() for number in range(1, launcher.NUM_OLD_LOGS + 1)]
    assert path.read_text() == "6" and texts == ["5", "4", "3", "2", "1"]
    assert len(list(tmp_path.glob("server.log*"))) == 6


def test_of_a_long_log_the_end_is_looked_at(start: type[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.serve.server.MAX_LOG_BYTES", 8)
    server = start("ok", log_file=tmp_path / "log").server
    server.start()
    (tmp_path / "log").write_text("0123456789")
    assert server.log_text() == "23456789"
    server.stop(0.0)


@pytest.fixture
def mpi(tmp_path: Path) -> LaunchPlan:
    script = tmp_path / "mpirun"
    script.write_text(f"#!{sys.executable}\n" + Path(fake_mpirun.__file__).read_text())
    script.chmod(0o755)
    return LaunchPlan(launcher=(str(script), "--bind-to", "none"), environment={"FROM_PLAN": "1"})


def test_behind_mpirun_the_server_is_asked_to_drain_not_mpirun(start: type[Started], mpi: LaunchPlan) -> None:
    started = start("ok", plan=mpi)
    started.server.start()
    started.server.wait_ready(BOUND_S)
    pids = [int(pid) for pid in until_written(started.pid_file).split()]
    processes = started.processes()
    assert os.getpgid(pids[0]) == pids[0] != started.server.pid, "the server is in a group of its own"
    assert "FROM_PLAN=1" in Path(f"/proc/{pids[0]}/environ").read_text().split("\0")
    assert started.server.stop() == 0
    assert all_ended(processes), "with the children that hold mpirun's pipes"
    assert "Signal (15) received." in started.server.log_text(), "it was asked, not killed"
    assert not started.shared_memory


def test_a_server_that_dies_behind_mpirun_is_seen_although_mpirun_lives_on(start: type[Started], mpi: LaunchPlan) -> None:
    started = start("ok", plan=mpi)
    started.server.start()
    started.server.wait_ready(BOUND_S)
    processes = started.processes()
    os.kill(int(until_written(started.pid_file).split()[0]), signal.SIGKILL)
    assert started.server.wait(BOUND_S) == 128 + signal.SIGKILL
    assert all_ended(processes)
    assert not started.shared_memory


def test_a_stubborn_server_behind_mpirun_is_killed_with_mpirun(start: type[Started], mpi: LaunchPlan) -> None:
    started = start("stubborn", plan=mpi)
    started.server.start()
    started.server.wait_ready(BOUND_S)
    processes = started.processes()
    assert started.server.stop(drain_s=0.0) == 137
    assert all_ended(processes)


def test_an_early_death_behind_mpirun_shows_the_reason(start: type[Started], mpi: LaunchPlan) -> None:
    started = start("dies", plan=mpi)
    started.server.start()
    with pytest.raises(ServerError, match="status 1 before it was ready") as caught:
        started.server.wait_ready(BOUND_S)
    assert caught.value.log_tail == "target: Internal: no\nsuch file"


def test_the_admin_key_reaches_the_server_and_its_variable_does_not(
    start: type[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKAHEAD_ADMIN_KEY", "0123456789abcdef")
    started = start("ok", admin_key="0123456789abcdef")
    started.server.start()
    started.server.wait_ready(BOUND_S)
    pid = until_written(started.pid_file).split()[0]
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert sum(word.endswith(":lookahead-admin-key=0123456789abcdef") for word in words) == 2
    assert "LOOKAHEAD_ADMIN_KEY" not in Path(f"/proc/{pid}/environ").read_text()


def test_metrics_are_read_by_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = TritonServer(tmp_path)
    lines = ("# TYPE lr_engine_running gauge", 'lr_engine_running{role="judge"} 2', 'lr_engine_waiting{role="judge"} 1e+06')
    monkeypatch.setattr(server, "_get", lambda path, port: "\n".join(lines).encode())
    assert server.counter("lr_engine_running") == {"judge": 2.0}
    assert server.counter("lr_engine_waiting") == {"judge": 1e6}
    monkeypatch.setattr(server, "_get", lambda path, port: None)
    with pytest.raises(ServerError, match="do not answer"):
        server.metrics()


def test_an_early_death_shows_why_the_model_did_not_load(start: type[Started]) -> None:
    started = start("dies")
    started.server.start()
    with pytest.raises(ServerError, match="before it was ready") as caught:
        started.server.wait_ready(BOUND_S)
    assert caught.value.log_tail == "target: Internal: no\nsuch file"
    assert not started.server.running


def test_an_early_death_without_a_reason_shows_the_end_of_the_log(start: type[Started]) -> None:
    started = start("exits")
    started.server.start()
    with pytest.raises(ServerError, match="status 3") as caught:
        started.server.wait_ready(BOUND_S)
    assert caught.value.log_tail.splitlines()[-1] == "line 39"
    assert len(caught.value.log_tail.splitlines()) == 12


def test_a_server_that_never_answers_runs_out_of_time(start: type[Started]) -> None:
    started = start("silent")
    started.server.start()
    with pytest.raises(ServerError, match="not ready within"):
        started.server.wait_ready(0.2)


def test_waiting_can_be_given_up(start: type[Started]) -> None:
    started = start("silent")
    started.server.start()
    give_up = threading.Event()
    give_up.set()
    started.server.wait_ready(BOUND_S, give_up)
    assert started.server.running


def test_a_lost_race_for_a_port_is_run_again(start: type[Started]) -> None:
    started = start("port")
    started.server.start()
    started.server.wait_ready(BOUND_S)
    assert 2 <= started.server._attempts <= PORT_ATTEMPTS  # another test's server may lose it a port too


def test_a_port_that_was_asked_for_is_not_replaced(start: type[Started], repository: Path) -> None:
    ports = free_ports(ServerOptions())
    started = start("port", http_port=ports.http, grpc_port=ports.grpc, metrics_port=ports.metrics)
    started.server.start()
    with pytest.raises(ServerError, match="already in use"):
        started.server.wait_ready(BOUND_S)


def test_an_answer_from_another_server_on_the_port_does_not_count(
    start: type[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = start("ok")
    first.server.start()
    first.server.wait_ready(BOUND_S)
    taken, real = first.server.ports.http, free_ports
    numbers = iter([Ports(taken, 1, first.server.ports.metrics)])
    monkeypatch.setattr(launcher, "free_ports", lambda options: next(numbers, None) or real(options))
    second = start("ok")
    (tmp_path / "pids").unlink()
    second.server.start()
    second.server.wait_ready(BOUND_S)
    assert second.server.ports.http != taken


@pytest.mark.parametrize("host", ["192.0.2.1", "no such name"])
def test_an_address_that_is_not_this_machines_is_one_sentence(host: str) -> None:
    with pytest.raises(ServerError, match=f"no port to be had at {host}"):
        free_ports(ServerOptions(host=host))


def test_ports_of_an_ipv6_address_are_found() -> None:
    assert free_ports(ServerOptions(host="::1")).http > 0


def test_free_ports_differ_and_keep_what_was_asked_for() -> None:
    ports = free_ports(ServerOptions(grpc_port=4321))
    assert ports.grpc == 4321
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports.http))


def test_only_own_shared_memory_is_removed(tmp_path: Path) -> None:
    for name in ("mine_1", "sem.mine_2", "mines", "other_mine_", "sem.other"):
        (tmp_path / name).touch()
    assert sorted(remove_shared_memory("mine_", tmp_path)) == ["mine_1", "sem.mine_2"]
    assert remove_shared_memory("", tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mines", "other_mine_", "sem.other"]


def test_the_command_line_is_the_hardened_one(repository: Path) -> None:
    server = TritonServer(repository, ServerOptions(thread_pool_size=99, exit_timeout_s=7, arguments=("--log-verbose=1",)))
    command = server.command(Path("/bin/tritonserver"), Path("/links"))
    assert {
        "--model-control-mode=explicit", "--load-model=*",
        "--disable-auto-complete-config", "--exit-on-error=true", "--strict-readiness=true",
        "--exit-timeout-secs=7", "--backend-config=python,thread-pool-size=99", "--backend-directory=/links",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1",
    } <= set(command)  # fmt: skip
    assert command[-1] == "--log-verbose=1"


@pytest.mark.parametrize("name", ["two words", "$(touch made)", "a&b", "it's (new)"])
def test_a_repository_at_a_path_that_a_shell_misreads_is_told_by_a_link(
    start: type[Started], repository: Path, name: str
) -> None:
    started = start("ok")
    started.server = TritonServer(repository.rename(repository.parent / name), started.server.options)
    started.server.start()
    pid = until_written(started.pid_file).split()[0]
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    (told,) = (Path(word.partition("=")[2]) for word in words if word.startswith("--model-repository="))
    assert shlex.quote(str(told)) == str(told)
    assert told.samefile(repository.parent / name)
    started.server.stop(0.0)
    assert not told.exists() and (repository.parent / name / "target" / "config.pbtxt").exists()


def test_a_binary_that_cannot_run_is_an_error(repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(ServerError, match="cannot be started"):
        TritonServer(repository, ServerOptions(tritonserver=broken)).start()
    with pytest.raises(ConfigError, match="not an executable"):
        TritonServer(repository, ServerOptions(tritonserver=repository)).start()


@pytest.mark.parametrize(
    "reason",
    [
        "Host key verification failed.",
        "pod@lr-target-0-1.lr-target.prod: Permission denied (publickey).",
        "ssh: connect to host lr-target-0-1.lr-target.prod port 2222: Connection refused",
    ],
)
def test_why_a_node_was_not_reached_is_said_and_not_mpiruns_page(reason: str) -> None:
    page = "\n".join(f"* it may be reason {number}" for number in range(20))
    assert useful_lines(f"{reason}\r\n----\nORTE was unable to reliably start one or more daemons.\n{page}\n") == reason


def test_useful_lines_of_an_empty_log() -> None:
    assert useful_lines("") == ""
