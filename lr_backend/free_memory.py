"""How much memory this machine, or the container that this process runs in, has left."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Memory to be had now, within the limit of a version 2 control group."""
    return min(int(psutil.virtual_memory().available), _free_in(cgroup))


def _free_in(folder: Path) -> int:
    """What the limit leaves; more than any machine has where there is none.

    Files that were read count as used, and are let go when memory is short.
    """
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit reads "max"
        return 1 << 62
    cached = sum(int(row[1]) for row in rows if row and row[0] == "inactive_file")
    return max(0, limit - used + cached)
