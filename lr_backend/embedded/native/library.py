"""The compiled part of the package: ``native/*.c``, built when it is installed, where there is a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

NAME = "lr_backend.embedded.native._decoder"


@cache
def library() -> ctypes.CDLL | None:
    """None where it was not built, or does not open here: then the reference computes. Calls release the interpreter's lock."""
    found = importlib.util.find_spec(NAME)
    if found is None or found.origin is None:
        return None
    try:
        opened = ctypes.CDLL(found.origin)
    except OSError:  # built elsewhere, or OpenMP's own library is missing
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
    opened.draw_tokens.argtypes = (pointer, size, pointer, size, pointer)
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
