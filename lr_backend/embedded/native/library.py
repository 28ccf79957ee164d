"""The compiled part of the package: ``native/*.c``, built when it is installed, where there is a C compiler."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

NAME = "lr_backend.embedded.native._decoder"
DOES_NOT_OPEN = "does not open"


def digest_of(sources: Iterable[Path]) -> str:
    """Of the names and contents of C files; ``setup.py`` compiles it in."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def open_library() -> ctypes.CDLL | str:
    """The library, or why there is none. Structures are described twice, so one of other sources would read wild memory."""
    found = importlib.util.find_spec(NAME)
    if found is None or found.origin is None:
        return "not built when the package was installed"
    try:
        opened = ctypes.CDLL(found.origin)
    except OSError as error:  # built elsewhere, or OpenMP's own library is missing
        return f"{DOES_NOT_OPEN}: {error}"
    sources = [*Path(__file__).parent.glob("*.[ch]")]
    built_of = getattr(opened, "decoder_sources", None)
    if built_of is not None:
        built_of.restype = ctypes.c_char_p
    if built_of is None or (sources and built_of().decode() != digest_of(sources)):
        return "built of other sources than are here"
    return opened


@cache
def library() -> ctypes.CDLL | None:
    """None where there is none (:func:`open_library`): then the reference computes. Calls release the interpreter's lock."""
    opened = open_library()
    if isinstance(opened, str):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    opened.decoder_scratch.restype = size
    opened.decoder_scratch.argtypes = (pointer, size)
    opened.decoder_forward.restype = None
    opened.decoder_forward.argtypes = (pointer, pointer, pointer, size)
    opened.decoder_product.restype = None
    opened.decoder_product.argtypes = (pointer, pointer, pointer, size, pointer)
    opened.bytes_are_fast.restype = ctypes.c_int
    opened.bytes_are_fast.argtypes = ()
    opened.pairs_are_fast.restype = ctypes.c_int
    opened.pairs_are_fast.argtypes = ()
    opened.decoder_run.restype = size
    opened.decoder_run.argtypes = (pointer, pointer, pointer, size)
    opened.draw_tokens.restype = None
    opened.draw_tokens.argtypes = (pointer, size, size, pointer, size, pointer)
    opened.noise_at.restype = None
    opened.noise_at.argtypes = (ctypes.c_uint64, size, pointer, size, pointer, pointer)
    return opened


@cache
def locked_library() -> ctypes.PyDLL:
    """The same :func:`library`, for calls that are over before the interpreter's lock, once given up, could be had again."""
    found = library()
    assert found is not None
    opened = ctypes.PyDLL(found._name)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    opened.decoder_copy_prefix.restype = None
    opened.decoder_copy_prefix.argtypes = (pointer, pointer, size, size, size)
    return opened
