"""Folders of calibration texts, as upstream's ``quantize.py`` would read them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lr_backend.build.calibration import hash_texts, require_texts
from lr_backend.errors import ConfigError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def parquet(*columns: str) -> bytes:
    """What frames a Parquet file, and names in its footer."""
    footer = b"\x15\x04" + b"".join(b"\x18" + bytes([len(name)]) + name.encode() + b"\x00" for name in columns)
    return b"PAR1rows" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    "files",
    [
        {"train.jsonl": b'{"text": "a"}\n{"text": "b"}\n', "test.jsonl": b'{"other": 1}\n'},
        {"train.jsonl.gz": gzip.compress(b'\n{"text": "a"}\n')},
        {"data/train-00000-of-00002.parquet": parquet("id", "text")},
        {"words.txt": b"some words\n"},
        {"rows.csv": b"id,text\n1,a\n"},
        {"rows.json": b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n'},
        {"rows.json": b'{"text": "a"}\n{"text": "b"}\n'},
    ],
)
def test_what_upstream_reads_passes(tmp_path: Path, files: dict[str, bytes]) -> None:
    require_texts(write(tmp_path / "texts", files | {"README.md": b"# Texts", ".cache/x.jsonl": b"{}"}))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no file of"),
        ({"README.md": b"# Texts", ".cache/train.jsonl": b'{"text": "a"}'}, "holds no file of"),
        ({"test.jsonl": b'{"text": "a"}', "validation/0.jsonl": b'{"text": "a"}'}, "split train"),
        ({"train.jsonl": b""}, "has no column text: it is empty"),
        ({"train.jsonl": b'{"prompt": "a", "answer": "b"}'}, "has no column text: prompt, answer"),
        ({"train.jsonl": b"not JSON"}, "cannot be read"),
        ({"train.jsonl.gz": b"not zipped"}, "cannot be read"),
        ({"train.jsonl": b"\xff\xfe"}, "cannot be read"),
        ({"train.csv": b"id,words\n1,a\n"}, "has no column text: id, words"),
        ({"train.parquet": parquet("id", "context")}, "has no column text"),
        ({"train.parquet": parquet("text")[:-6]}, "cannot be read: no Parquet file, or cut short"),
        ({"train.parquet": b"PAR1"}, "cannot be read"),
    ],
)
def test_what_calibration_would_fail_on_is_refused(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        require_texts(write(tmp_path / "texts", files))


def readme(*versions: str) -> bytes:
    """What the hub holds: each version, and where its files are."""
    of = "".join(f"- config_name: {one}\n  data_files:\n  - split: train\n    path: {one}/train-*\n" for one in versions)
    about = "".join(f"- config_name: {one}\n  features:\n  - name: article\n" for one in ("1.0.0", "2.0.0", "3.0.0"))
    return f"---\nlicense: apache-2.0\ndataset_info:\n{about}configs:\n{of}tags:\n- news\n---\n# Texts\n".encode()


def test_the_known_texts_have_another_column_and_a_version(tmp_path: Path) -> None:
    texts = {"3.0.0/train-0.parquet": parquet("article", "highlights"), "1.0.0/train-0.parquet": b""}
    folder = write(tmp_path / "cnn_dailymail", texts | {"README.md": readme("1.0.0", "2.0.0", "3.0.0")})
    require_texts(folder)
    (folder / "3.0.0" / "train-0.parquet").write_bytes(parquet("text"))
    with pytest.raises(ConfigError, match="has no column article"):
        require_texts(folder)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no .*README.md whose configs name the version 3.0.0"),
        ({"README.md": b"# Texts"}, "no .*README.md whose configs name the version 3.0.0"),
        ({"README.md": readme("1.0.0"), "1.0.0/train-0.parquet": b""}, "no .*README.md whose configs name the version 3.0.0"),
        ({"README.md": readme("1.0.0", "3.0.0")}, "begins with the files 1.0.0/train-., which must be there too: download all"),
        ({"README.md": readme("1.0.0", "3.0.0"), "1.0.0/test-0.parquet": b""}, "which must be there too"),
        ({"README.md": readme("1.0.0", "3.0.0"), "1.0.0/train-0.parquet": b""}, ""),
        ({"prepare.py": b""}, "no .*README.md"),
        ({"README.md": readme("3.0.0", "1.0.0")}, ""),
        ({"README.md": b"---\nconfigs:\n- config_name: '3.0.0'\n  data_files: \"3.0.0/train-*\"\n---\n"}, ""),
        ({"cnn_dailymail.py": b""}, ""),
    ],
)
def test_a_part_of_the_known_texts_is_refused_where_upstream_could_not_read_it(
    tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    """As ``datasets`` 3.1.0 does: it looks for the files of the first version, whichever is asked for."""
    folder = write(tmp_path / "cnn_dailymail", files | {"3.0.0/train-0.parquet": parquet("article")})
    if not said:
        return require_texts(folder)
    with pytest.raises(ConfigError, match=said):
        require_texts(folder)


def test_hashes_leave_a_downloaders_notes_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", {"train.jsonl": b"x", ".cache/note": b"y"})
    assert list(hash_texts(folder)) == ["calibration/train.jsonl"] and hash_texts(None) == {}
