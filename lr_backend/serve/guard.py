"""Runs one server process and leaves nothing of it behind, whatever dies first.

Started by the launcher as ``python -I -S guard.py LIFELINE_FD DRAIN_S SHM_PREFIX DRAINED FOLDER LOCK -- COMMAND...``;
standard library only. It prints the command's process id, which is also its process group, and then waits for one of:

- the server ended, by itself or killed: what it left running is killed (Python backend stubs outlive their server, and ``mpirun``
  waits for them);
- SIGTERM or SIGINT, or the lifeline closed because the launcher's process died: the server gets SIGTERM and ``DRAIN_S``
  seconds, then SIGKILL with all it started. SIGQUIT does that at once.

DRAINED is the name of the program that is asked to end, where the command is not it but starts it: ``mpirun``, asked itself,
would kill its job a second later, and gives each of its processes a group of its own. Empty: the command itself. What is killed
is everything that came from the command, wherever it went: as subreaper this process inherits what its parents leave behind.

Last it removes the shared memory whose name starts with the prefix, and FOLDER where the launcher is no more: else that wants to
read the log in it. Then it exits as the server did. A lifeline instead of
a death signal from the launcher, because that signal fires when the launching *thread* ends; only this process, which
has one thread, asks for one, so that a killed guard takes the server with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHM_DIR = Path("/dev/shm")
KILLED_BY_GUARD = 137
LOOK_S = 0.02
LAUNCHER_GRACE_S = 3.0
"""For what started the server to end once the server has; then it is killed with what it waits for."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def remove_shared_memory(prefix: str, directory: Path = SHM_DIR) -> list[str]:
    """Delete the regions (and semaphores) whose name starts with ``prefix``; returns their names."""
    if not prefix:
        return []
    removed = []
    for path in [*directory.glob(f"{prefix}*"), *directory.glob(f"sem.{prefix}*")]:
        path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed


def kill_group(group: int) -> None:
    """SIGKILL to every process of the group, if there is any."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """From now on this process inherits what its descendants leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children() -> list[int]:
    """Processes whose parent is this one: after the server is gone, its orphans, which a subreaper inherits."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def _kill_orphans() -> None:
    """Kill and reap until no child is left; also reaches those that left the server's process group."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants(pid: int) -> list[int]:
    """Every process below ``pid``, oldest generation first."""
    found, generation = [], [pid]
    while generation:
        files = [path for each in generation for path in Path(f"/proc/{each}/task").glob("*/children")]
        generation = [int(child) for path in files for child in _text(path).split()]
        found += generation
    return found


def _text(path: Path) -> str:
    """Content of a file of /proc; empty where its process has just ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _runs(pid: int, name: str) -> bool:
    """Whether a process is this program, or a script of this name; also when it has ended and nobody has reaped it."""
    words = _text(Path(f"/proc/{pid}/cmdline")).split("\0")[:2]
    # The kernel keeps of an ended process no words, and of a name 15 characters.
    return name in {word.rsplit("/", 1)[-1] for word in words} or _text(Path(f"/proc/{pid}/comm")).strip() == name[:15]


class _Program:
    """The process that is asked to end and whose end is the end: the command itself, or the program behind it once it runs."""

    def __init__(self, command: subprocess.Popen[bytes], name: str) -> None:
        self._name = name
        self.pid, self.fd = command.pid, os.pidfd_open(command.pid)
        self.found = not name

    def look(self) -> None:
        """Find the program, the first of its name: it tells its own others."""
        # By generation and not by number: numbers begin again, and a program's own children may bear its name.
        pids = [] if self.found else [pid for pid in _descendants(os.getpid()) if _runs(pid, self._name)]
        with contextlib.suppress(ProcessLookupError):
            if pids:
                self.fd = os.pidfd_open(pids[0])
                self.pid, self.found = pids[0], True

    def ask_to_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


def _wait(program: _Program, command_fd: int, others: list[int]) -> list[int]:
    """Wait for the program or the command to end, or for one of the others; what of these is ready."""
    while True:
        program.look()
        ready, _, _ = select.select([program.fd, command_fd, *others], [], [], None if program.found else LOOK_S)
        if ready:
            return ready


def _drain(asked: int, signals: int, seconds: float) -> bool:
    """Wait for the process that was asked to end. False: it did not in time, or SIGQUIT asked to stop waiting."""
    deadline = time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([asked, signals], [], [], max(0.0, deadline - time.monotonic()))
        if asked in ready:
            return True
        if not ready or signal.SIGQUIT in os.read(signals, 64):
            return False


def main(arguments: list[str]) -> int:
    lifeline, drain_s, command = int(arguments[0]), float(arguments[1]), arguments[7:]
    prefix, drained, folder, lock = arguments[2:6]
    become_subreaper()
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    try:
        held = (int(lock),)  # so nobody takes its folder away, should it drain when launcher and guard are killed
        server = subprocess.Popen(command, stdout=sys.stderr, process_group=0, preexec_fn=_die_with_guard, pass_fds=held)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return 126
    sys.stdout.write(f"{server.pid}\n")
    sys.stdout.close()
    program, command_fd = _Program(server, drained), os.pidfd_open(server.pid)
    ready = _wait(program, command_fd, [lifeline, signals])
    asked = program.fd not in ready and command_fd not in ready
    ended = True
    if asked:
        program.look()
        program.ask_to_end()
        ended = _drain(program.fd, signals, drain_s)
    # mpirun waits for as long as anything holds its pipes, be it a stub that the server has left behind.
    in_time = ended and bool(select.select([command_fd], [], [], LAUNCHER_GRACE_S)[0])
    kill_group(server.pid)
    code = server.wait()
    _kill_orphans()
    remove_shared_memory(prefix)
    if select.select([lifeline], [], [], 0.0)[0]:
        shutil.rmtree(folder, ignore_errors=True)
    if not in_time:
        return 0 if asked and ended else KILLED_BY_GUARD
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
