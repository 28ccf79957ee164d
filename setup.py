"""The one part of the package that is compiled; everything else stands in ``pyproject.toml``."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Opened with ctypes, not imported: it knows nothing of Python. Without a compiler torch computes alone, hence optional.
        Extension(
            "lr_backend.embedded.native._decoder",
            [f"lr_backend/embedded/native/{name}.c" for name in ("attention", "bytes", "decoder", "draw", "pairs", "run")],
            depends=[f"lr_backend/embedded/native/{name}.h" for name in ("decoder", "native", "vectors")],
            extra_compile_args=["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,
        )
    ]
)
