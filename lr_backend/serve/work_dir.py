"""The folder of a running server, and those that others have left behind.

Launcher and guard may be killed together, as where a container has no memory left. What they leave, the folder and the server's
shared memory, outlives a container of Kubernetes in its pod. So whoever starts clears away what nobody holds any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lr_backend.serve.guard import remove_shared_memory

_NAME = re.compile(r"lookahead-triton-([0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class WorkDir:
    """Held by its lock for as long as a process has it open: the launcher, and guard and server, which inherit it.

    Attributes:
        lock: descriptor of the folder.
    """

    path: Path
    lock: int

    @classmethod
    def make(cls, number: str) -> WorkDir:
        """An empty folder of the server of this number, which has 12 hexadecimal digits.

        Raises:
            OSError: there is no room for one.
        """
        new = Path(tempfile.mkdtemp(prefix="lookahead-new-"))
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks, where nothing is cleared away either
            fcntl.flock(lock, fcntl.LOCK_EX)
        # It has its name once it is held, so nobody finds it before.
        return cls(new.rename(new.with_name(f"lookahead-triton-{number}")), lock)

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def shared_memory_prefix(number: str) -> str:
    """How the names of a server's regions of shared memory begin."""
    return f"lookahead_{number}_"


def remove_leftovers() -> list[str]:
    """Clear away folders that nobody holds, and the shared memory of their servers; the folders' names."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob("lookahead-triton-*"):
        found = _NAME.fullmatch(path.name)
        if found is None:
            continue
        with suppress(OSError):  # it is held, another user's, or gone
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                remove_shared_memory(shared_memory_prefix(found[1]))
                removed.append(path.name)
            finally:
                os.close(lock)
    return removed
