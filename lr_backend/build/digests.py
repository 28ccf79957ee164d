"""Hashes of what a build read, so that a manifest can say it and a later build can tell whether it changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lr_backend.nvidia import installed


def digests(paths: Iterable[Path], previous: Any) -> dict[str, dict[str, Any]]:
    """Size, time and hash by file name; a file whose size and time did not change is not read again."""
    found = {}
    for path in paths:
        seen, known = _seen(path), _known(path, previous)
        found[path.name] = seen | {"sha256": sha256_file(path) if known is None else known}
    return found


def num_bytes_to_read(paths: Iterable[Path], previous: Any) -> int:
    """That :func:`digests` would read: of files that are new, or whose size or time has changed."""
    return sum(path.stat().st_size for path in paths if _known(path, previous) is None)


def _seen(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _known(path: Path, previous: Any) -> str | None:
    """The hash of a file that is as it was; None: it has to be read."""
    earlier = previous.get("files", {}) if isinstance(previous, dict) else {}
    before = earlier.get(path.name, {})
    found: str | None = before.get("sha256")
    return found if all(before.get(key) == value for key, value in _seen(path).items()) else None


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    return {package: found for package in packages if (found := installed(package)) is not None}
