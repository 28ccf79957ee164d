"""Runs the steps of a build: one at a time, each with its log, and so that a failed build goes on where it failed.

A step is done when its command ended well and its products are there. What was done is written down with a key made of the
command, of what went in, and of the step before; a step whose key changed is done anew, and all after it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lr_backend.build.trtllm_commands import EngineDirs, Step
from lr_backend.errors import BuildError
from lr_backend.mpi import without_job
from lr_backend.nvidia import VISIBLE, visible_devices

LOG_TAIL_LINES = 20
_POLL_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was done."""

    name: str
    key: str
    command: str
    duration_s: float
    log: str


def step_keys(steps: Iterable[Step], inputs: Mapping[str, str]) -> tuple[str, ...]:
    """A key for each step. ``inputs``: what goes in besides the commands, by name: hashes of files, versions."""
    keys: list[str] = []
    for step in steps:
        material = [list(step.command.argv), list(step.command.environment), sorted(inputs.items()), keys]
        keys.append(hashlib.sha256(json.dumps(material).encode()).hexdigest())
    return tuple(keys)


def run_steps(
    steps: tuple[Step, ...], dirs: EngineDirs, inputs: Mapping[str, str], console: Console, *, resume: bool = False
) -> tuple[StepRecord, ...]:
    """Run one role's steps in order.

    Args:
        inputs: what goes in besides the commands, by name: hashes of files, versions.
        resume: leave out what was done already with the same command and inputs.

    Raises:
        BuildError: a command could not be started, failed, or left out a product; names its log and shows its end. Or another
            build is at work there.
    """
    dirs.logs.mkdir(parents=True, exist_ok=True)
    with _alone(dirs.root) as lock, ended_by_signals():
        return _run_all(steps, dirs, inputs, console, resume, lock)


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Hold the folder by a file descriptor. Commands inherit it: the system lets go of it once the last of them has ended."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(f"another build is at work in {folder}") from None
        yield file.fileno()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal, or a terminal that is closed, ends this process as an exception does, and with it the command that runs."""
    # One that is ignored stays so, as under nohup. Python hears of signals in its first thread alone.
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {each: handler for each in numbers if (handler := signal.getsignal(each)) not in (signal.SIG_IGN, None)}

    def end(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # another one would cut the end of the command short
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_all(
    steps: tuple[Step, ...], dirs: EngineDirs, inputs: Mapping[str, str], console: Console, resume: bool, lock: int
) -> tuple[StepRecord, ...]:
    earlier = _read_state(dirs.state) if resume else {}
    done: list[StepRecord] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("[dim]{task.fields[line]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        for step, key in zip(steps, step_keys(steps, inputs), strict=True):
            title = f"{step.role}: {step.name}"
            record = earlier.get(step.name)
            if record is not None and record.key == key and not _missing(step):
                console.print(f"[green]done before[/] {title}", highlight=False)
            else:
                earlier = {}  # what came after is out of date as well
                _write_state(dirs.state, done)
                record = _run(step, key, dirs, progress, title, lock)
                console.print(f"[green]done[/] {title} in {record.duration_s:.0f} s", highlight=False)
            done.append(record)
            _write_state(dirs.state, done)
    return tuple(done)


def _run(step: Step, key: str, dirs: EngineDirs, progress: Progress, title: str, lock: int) -> StepRecord:
    log = dirs.logs / f"{step.name}.log"
    shutil.rmtree(step.output, ignore_errors=True)
    step.output.mkdir(parents=True)
    task = progress.add_task(escape(title), total=None, line="")
    started = time.monotonic()
    try:
        status = _execute(step, log, dirs.root, lock, lambda line: progress.update(task, line=escape(line)))
    except OSError as error:
        raise BuildError(f"{title} cannot be started: {step.command.argv[0]}: {error.strerror}") from error
    finally:
        progress.remove_task(task)
    duration_s = time.monotonic() - started
    wrong = f"ended with status {status}" if status else ", ".join(f"wrote no {name}" for name in _missing(step))
    if wrong:
        raise BuildError(
            f"{title} {wrong} after {duration_s:.0f} s; its log is {log}. Once that is mended, --resume goes on here. "
            f"The end of the log:\n{_tail(log, LOG_TAIL_LINES)}"
        )
    return StepRecord(step.name, key, step.command.shell(), round(duration_s, 1), str(log))


def _execute(step: Step, log: Path, folder: Path, lock: int, show: Any) -> int:
    """Run the command in a group of its own, so that nothing of it outlives this process; its exit status."""
    with log.open("w", encoding="utf-8") as file:
        file.write(step.command.shell() + "\n")
        file.flush()
        process = subprocess.Popen(
            step.command.argv,
            cwd=folder,  # not a checkout of TensorRT-LLM: its package would be imported instead of the installed one
            env={**without_job(os.environ), **_shown(dict(step.command.environment))},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
        try:
            while True:
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    show(_tail(log, 1)[:100])
        finally:
            if process.poll() is None:
                _end(process)


def _shown(environment: dict[str, str]) -> dict[str, str]:
    """Cards by the names that they have outside: a spec counts those that this process sees."""
    devices = environment.get(VISIBLE)
    if devices is None:
        return environment
    return environment | {VISIBLE: visible_devices([int(one) for one in devices.split(",")], os.environ.get(VISIBLE))}


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return


def _missing(step: Step) -> list[str]:
    return [name for name in step.products if not (step.output / name).is_file()]


def _tail(log: Path, num_lines: int) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 400 * num_lines))
        lines = file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    return "\n".join(lines[-num_lines:])


def _read_state(path: Path) -> dict[str, StepRecord]:
    """Records by step; empty where there is no state or it is damaged, so that all is done anew."""
    try:
        return {entry["name"]: StepRecord(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _write_state(path: Path, records: Iterable[StepRecord]) -> None:
    staging = path.with_suffix(".new")
    staging.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n", encoding="utf-8")
    staging.replace(path)
