"""Texts that a quantised engine is calibrated with: whether a folder holds some that upstream's ``quantize.py`` will read.

Upstream gives the folder to ``datasets.load_dataset`` and takes the split ``train``: its column ``text``, or of CNN/DailyMail,
which it knows by the path, ``article`` of version 3.0.0. That runs after minutes of loading a model. Here the first
file is looked at, and what ``datasets`` 3.1 wants of a version: a README that names it, and the files of the version named first.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

from lr_backend.build.digests import sha256_file
from lr_backend.errors import ConfigError

FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_KNOWN, _KNOWN_VERSION = "cnn_dailymail", "3.0.0"
_TRAIN = re.compile(r"(^|[^a-z0-9])train(ing)?([^a-z0-9]|$)")
_OTHERS = re.compile(r"(^|[^a-z0-9])(test(ing)?|validation|valid|dev|eval(uation)?)([^a-z0-9]|$)")
_CONFIGS = re.compile(r"^configs:\n(?:[-\s].*\n)*", re.MULTILINE)
_VERSION = re.compile(r"^[- ]*config_name: *[\"']?([^\"'\s]+)", re.MULTILINE)
_FILES = re.compile(r"^[- ]*(?:path|data_files): *[\"']?([^\"'\s]+)", re.MULTILINE)
_PARQUET, _MAX_FOOTER = b"PAR1", 1 << 24


def without_texts(folder: Path) -> str:
    """What is missing where there is no such folder, and how it comes there."""
    told = f"calibration texts: there is no folder {folder}, and the build has no network"
    if _KNOWN in str(folder):
        return f"{told}: hf download abisee/cnn_dailymail --repo-type dataset --local-dir {folder}"
    return f"{told}: put texts there, such as a file train.jsonl with a field text"


def require_texts(folder: Path) -> None:
    """Refuse a folder that calibration would fail on.

    Raises:
        ConfigError: it holds no texts, none for the split ``train``, or not the column or version that upstream takes.
    """
    known = _KNOWN in str(folder)
    root = folder / _KNOWN_VERSION if known and (folder / _KNOWN_VERSION).is_dir() else folder
    column = "article" if known else "text"
    files = [path for path in _kept(root) if _format(path) in FORMATS]
    if not files:
        raise ConfigError(f"calibration texts: {root} holds no file of {', '.join(FORMATS)}")
    train = _of_train(root, files)
    if not train:
        raise ConfigError(f"calibration texts: no file in {root} is of the split train, such as train.jsonl")
    try:
        columns = _columns(train[0], column)
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration texts: {train[0]} cannot be read: {error}") from error
    if column not in columns:
        raise ConfigError(f"calibration texts: {train[0]} has no column {column}: {', '.join(columns) or 'it is empty'}")
    if known and not (folder / f"{folder.name}.py").is_file():  # a loader of the folder's own knows its versions
        _require_version(folder)


def _require_version(folder: Path) -> None:
    readme = folder / "README.md"
    told = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    configs = found[0] if (found := _CONFIGS.search(told)) else ""
    if _KNOWN_VERSION not in _VERSION.findall(configs):
        raise ConfigError(f"calibration texts: there is no {readme} whose configs name the version {_KNOWN_VERSION}")
    first = _FILES.search(configs)
    if first and not any(folder.glob(first[1])):
        raise ConfigError(f"calibration texts: {readme} begins with the files {first[1]}, which must be there too: download all")


def hash_texts(folder: Path | None) -> dict[str, str]:
    """Hashes of the texts, by their place in the folder; none where nothing is quantised."""
    if folder is None:
        return {}
    return {f"calibration/{path.relative_to(folder)}": sha256_file(path) for path in _kept(folder)}


def _kept(folder: Path) -> list[Path]:
    """All files; hidden ones are a downloader's notes."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _of_train(root: Path, files: Sequence[Path]) -> list[Path]:
    """Those of the split ``train``, as their names say it; all where no name says a split."""
    names = {path: str(path.relative_to(root)).lower() for path in files}
    named = [path for path in files if _TRAIN.search(names[path])]
    return named or [path for path in files if not _OTHERS.search(names[path])]


def _format(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _columns(path: Path, wanted: str) -> list[str]:
    """Columns of a file; of a Parquet file the wanted one alone, if it has it. Empty where the file is."""
    kind = _format(path)
    if kind == ".parquet":
        return _parquet_column(path, wanted)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "")
        if not first or kind == ".txt":
            return ["text"] if first else []
        if kind == ".csv":
            return next(csv.reader([first]))
        value = json.loads(first if kind == ".jsonl" or _whole(first) else first + file.read())
    row = value[0] if isinstance(value, list) and value else value
    return list(row) if isinstance(row, dict) else []


def _whole(line: str) -> bool:
    """Whether a line is JSON by itself, as in a file of one row a line."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parquet_column(path: Path, wanted: str) -> list[str]:
    """The footer holds the schema, with each name behind its length in a byte (Thrift's compact protocol)."""
    content_end = 8
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - content_end))
        tail = file.read()
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != _PARQUET or not 0 < length <= min(_MAX_FOOTER, size - content_end):
            raise ValueError("no Parquet file, or cut short")
        file.seek(size - content_end - length)
        footer = file.read(length)
    return [wanted] if bytes([len(wanted)]) + wanted.encode() in footer else []
