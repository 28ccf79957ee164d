"""The one part of the package that is compiled; everything else stands in ``pyproject.toml``."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Opened with ctypes, not imported: it knows nothing of Python. Without a compiler torch computes alone, hence optional.
        Extension(
            "lr_backend.torch_engine._native",
            ["lr_backend/torch_engine/native/decoder.c", "lr_backend/torch_engine/native/draw.c"],
            depends=["lr_backend/torch_engine/native/native.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,
        )
    ]
)
