"""Hashes of what a build read, so that a manifest can say it and a later build can tell whether it changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def digests(paths: Iterable[Path], previous: Any) -> dict[str, dict[str, Any]]:
    """Size, time and hash by file name; a file whose size and time did not change is not read again."""
    earlier = previous.get("files", {}) if isinstance(previous, dict) else {}
    found = {}
    for path in paths:
        status = path.stat()
        seen: dict[str, Any] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        before = earlier.get(path.name, {})
        same = all(before.get(key) == value for key, value in seen.items()) and "sha256" in before
        found[path.name] = seen | {"sha256": before["sha256"] if same else sha256_file(path)}
    return found


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def installed_versions(packages: Iterable[str], of: Callable[[str], str] = version) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = of(package)
        except PackageNotFoundError:
            continue
    return found
