"""Programs written by a model, run where they can do little harm, and for a bounded time.

Each runs in an interpreter of its own (``-I -S``: no site-packages, no environment), in an empty folder, under kernel limits for
memory, CPU time, file sizes, open files and processes (none). Where the system permits (Linux namespaces), it has no network,
sees no other process, and can write nowhere but in 16 MB of memory; what was root becomes ``nobody``. It is killed with all that
it left when its time is over. It can still read what its user can read. Which protections held is part of each result.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from bench.evaluation.scoring import Outcome, Score

CHILD = Path(__file__).with_name("sandbox_child.py")
Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    ``max_seconds`` are of CPU time, so that a busy machine fails no program; one that waits is killed ``max_idle_seconds`` later.
    """

    max_seconds: float = 5.0
    max_idle_seconds: float = 20.0
    max_memory_bytes: int = 1 << 30
    max_file_bytes: int = 1 << 20
    max_files: int = 32


@dataclass(frozen=True, slots=True)
class RunResult:
    """What became of a program.

    Attributes:
        held: protections beside the limits: ``network``, ``processes``, ``files`` (read-only), ``user``. None: it did not run.
    """

    passed: bool
    reason: str = ""
    held: tuple[str, ...] | None = None


def run_program(program: str, limits: Limits = Limits()) -> RunResult:
    """Run ``program``; it passes if it ends by itself without an exception."""
    nonce = secrets.token_hex(16)
    order = {
        "program": program,
        "nonce": nonce,
        "max_memory_bytes": limits.max_memory_bytes,
        "max_cpu_s": math.ceil(limits.max_seconds),
        "max_file_bytes": limits.max_file_bytes,
        "max_files": limits.max_files,
    }
    folder = tempfile.mkdtemp(prefix="lookahead-program-")
    os.chmod(folder, 0o777)  # the program may run as another user
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LANG": "C.UTF-8", "HOME": folder},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps(order).encode(), timeout=limits.max_seconds + limits.max_idle_seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        if late:
            said, _ = process.communicate()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _read(said, nonce, late, limits)


def _read(said: bytes, nonce: str, late: bool, limits: Limits) -> RunResult:
    lines = []
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    held = next((tuple(line["held"]) for line in lines if isinstance(line, dict) and "held" in line), None)
    if held is None:
        return RunResult(False, "the sandbox did not start")
    if any(isinstance(line, dict) and line.get("passed") == nonce for line in lines):
        return RunResult(True, "", held)
    failed = next((str(line["failed"]) for line in lines if isinstance(line, dict) and "failed" in line), None)
    if failed is not None:
        return RunResult(False, failed, held)
    if late:
        return RunResult(False, f"it had not ended after {limits.max_seconds + limits.max_idle_seconds:g} s and was killed", held)
    return RunResult(False, f"it ended before its tests did, or used up its {math.ceil(limits.max_seconds)} s of CPU", held)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all its descendants, whatever session they moved to."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def score_all(jobs: Iterable[tuple[Job, str]], *, num_workers: int = 2, limits: Limits = Limits()) -> Iterator[tuple[Job, Score]]:
    """The score of every (job, program with its tests), in the order given."""
    with ThreadPoolExecutor(num_workers) as pool:
        waiting = [(job, pool.submit(run_program, program, limits)) for job, program in jobs]
        for job, future in waiting:
            yield job, _score(future.result())


def _score(result: RunResult) -> Score:
    if result.held is None:
        return Score(Outcome.UNSCORED, note=result.reason)
    return Score(Outcome.RIGHT if result.passed else Outcome.WRONG, note=result.reason, held=result.held)
