"""Whether libraries can be loaded from where they are compiled while a server runs: what lies on a mount without ``exec``.

The LLM API's engines compile kernels as they need them. Docker mounts a ``tmpfs`` without ``exec`` unless told otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

PROC_MOUNTS = Path("/proc/mounts")
COMPILED_INTO: Mapping[str, tuple[str, str]] = {
    "TRITON_CACHE_DIR": ("HOME", "/root"),
    "FLASHINFER_WORKSPACE_BASE": ("HOME", "/root"),
    "TORCHINDUCTOR_CACHE_DIR": ("TMPDIR", "/tmp"),
}
"""Variable that names the folder of one compiler (Triton's, FlashInfer's, torch's): what says it else, and where it is else."""


def folders_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Where each of :data:`COMPILED_INTO` leaves its libraries, by its variable."""
    return {name: environment.get(name) or environment.get(other) or last for name, (other, last) in COMPILED_INTO.items()}


def without_exec(mounts: str, folder: str) -> bool:
    """Whether nothing can be executed under ``folder``, by the text of ``/proc/mounts``. The deepest mount above it decides, and
    of two at one place the later."""
    found, depth = False, -1
    for fields in map(str.split, mounts.splitlines()):
        if len(fields) < 4:
            continue
        point, options = fields[1], fields[3]
        where = PurePosixPath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
        if PurePosixPath(folder).is_relative_to(where) and len(where.parts) >= depth:
            found, depth = "noexec" in options.split(","), len(where.parts)
    return found


def probe_without_exec(environment: Mapping[str, str], mounts: Path = PROC_MOUNTS) -> dict[str, str]:
    """The folders of :func:`folders_of` from which nothing can be loaded, by variable; none where the machine does not say."""
    try:
        text = mounts.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: folder for name, folder in folders_of(environment).items() if without_exec(text, os.path.realpath(folder))}
