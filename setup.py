"""What ``pyproject.toml`` cannot say: the part that is compiled, and the files of the checkout's root that a wheel carries."""

import runpy
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE = ROOT / "lr_backend" / "embedded" / "native"
RESOURCES = (
    "engines/*.toml",
    "model_repository/**/*",
    "demo/checkpoints/**/*",
    # The demo's spec names a checker in them.
    "demo/__init__.py",
    "demo/problems.py",
    "demo/sentences.py",
)


class BuildWithResources(build_py):
    """Puts :data:`RESOURCES` into the package of a wheel, where ``lr_backend/resources.py`` looks for them."""

    def run(self):
        super().run()
        if not self.editable_mode:  # there the checkout's own are used
            for source, target in self._resources():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / source, target)

    def get_outputs(self, include_bytecode=True):
        copies = [] if self.editable_mode else [target for _, target in self._resources()]
        return [*super().get_outputs(include_bytecode), *copies]

    def _resources(self):
        for pattern in RESOURCES:
            found = [path for path in sorted(ROOT.glob(pattern)) if path.is_file() and path.suffix != ".pyc"]
            if not found:
                raise FileNotFoundError(f"{pattern}: nothing there; the sources are incomplete")
            for path in found:
                source = path.relative_to(ROOT)
                yield source.as_posix(), str(Path(self.build_lib) / "lr_backend" / "_data" / source)


library = runpy.run_path(str(NATIVE / "library.py"))

setup(
    cmdclass={"build_py": BuildWithResources},
    ext_modules=[
        # Opened with ctypes, not imported: it knows nothing of Python. Without a compiler torch computes alone, hence optional.
        Extension(
            "lr_backend.embedded.native._decoder",
            [f"lr_backend/embedded/native/{name}.c" for name in ("attention", "bytes", "decoder", "draw", "pairs", "run")],
            depends=[f"lr_backend/embedded/native/{name}.h" for name in ("decoder", "native", "vectors")],
            define_macros=[("SOURCES", '"' + library["digest_of"](NATIVE.glob("*.[ch]")) + '"')],
            extra_compile_args=["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,
        ),
        # Stands before tritonserver (LD_PRELOAD). Without it the keys of its restricted parts are on its command line.
        Extension("lr_backend.serve._arguments", ["lr_backend/serve/arguments.c"], extra_link_args=["-ldl"], optional=True),
    ],
)
