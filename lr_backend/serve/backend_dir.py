"""Where tritonserver is, and the backend folder and environment that it needs.

The wheel's server cannot be used as it lies: the Python backend wants the stub of the running Python beside its library, and
the stub wants ``libpython``. Both are given from a folder of links; site-packages is never touched.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lr_backend.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARY = "libtriton_python.so"
_UTILS = "triton_python_backend_utils.py"
_STUB = "triton_python_backend_stub"

QUIET_ENVIRONMENT: Mapping[str, str] = {
    # An engine sets its own thread count; everything else in a stub needs one thread.
    "OMP_NUM_THREADS": "1",
    # Threads that wait must not spin: four processes share the cores, and a spinning one starves the engine that works.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # A server never downloads.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver.

    Attributes:
        stubs: folder of Python stubs by version, which only the wheel has; None where the server is complete as it lies.
    """

    binary: Path
    stubs: Path | None = None

    @property
    def python_backend(self) -> Path:
        return self.binary.parent.parent / "backends" / "python"


def find_tritonserver(explicit: Path | None = None) -> TritonInstall:
    """The server to run: ``explicit``, else the one on PATH, else the one in the ``nvidia-pytriton`` wheel.

    Raises:
        ConfigError: ``explicit`` is no executable file, or there is none anywhere.
    """
    if explicit is not None:
        if not explicit.is_file() or not os.access(explicit, os.X_OK):
            raise ConfigError(f"{explicit} is not an executable tritonserver")
        return _install(explicit)
    on_path = shutil.which("tritonserver")
    if on_path:
        return _install(Path(on_path))
    wheel = importlib.util.find_spec("pytriton")
    for location in wheel.submodule_search_locations or () if wheel else ():
        binary = Path(location) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return _install(binary)
    raise ConfigError("no tritonserver: give its path, put it on PATH, or install the 'cpu' extra (nvidia-pytriton)")


def _install(binary: Path) -> TritonInstall:
    stubs = binary.resolve().parent.parent / "python_backend_stubs"
    return TritonInstall(binary.resolve(), stubs) if stubs.is_dir() else TritonInstall(binary.absolute())


def find_stub(install: TritonInstall) -> Path | None:
    """The wheel's process that runs models in the running Python; None where the server brings its own.

    Raises:
        ConfigError: the wheel has none for the running Python.
    """
    if install.stubs is None:
        return None
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = install.stubs / python / _STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in install.stubs.iterdir()))
        raise ConfigError(f"this tritonserver has no stub for Python {python}; it has {known}")
    return stub


def prepare_backend_dir(install: TritonInstall, into: Path, packages: Iterable[Path] = (PACKAGE,)) -> Path | None:
    """Make a backend folder of links under ``into`` for a server from the wheel; None where the server needs none.

    ``packages`` become importable in the stubs: they run an isolated Python that ignores PYTHONPATH, but the folder of the
    Python backend is on their ``sys.path``.

    Raises:
        ConfigError: the wheel has no stub for the running Python.
    """
    stub = find_stub(install)
    if stub is None:
        return None
    folder = into / "backends" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    for source in (install.python_backend / _LIBRARY, install.python_backend / _UTILS, stub, *packages):
        (folder / source.name).symlink_to(source)
    return folder.parent


def server_environment(base: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment in which the stubs are the running Python with the running environment's packages.

    The embedded interpreter looks for ``python3`` on PATH and takes its ``pyvenv.cfg`` from there, so this environment's
    scripts come first. Python's libraries come last: beside a system's Python lies the driver's ``libcuda``, and an image may
    name a newer one. What ``base`` says of the thread settings stands; ``extra`` wins over everything.
    """
    libraries = [base.get("LD_LIBRARY_PATH", ""), str(sysconfig.get_config_var("LIBDIR") or "")]
    return {
        **QUIET_ENVIRONMENT,
        **{name: value for name, value in base.items() if name != "PYTHONHOME"},
        "PATH": os.pathsep.join(part for part in (str(Path(sys.executable).parent), base.get("PATH", "")) if part),
        "LD_LIBRARY_PATH": os.pathsep.join(part for part in libraries if part),
        **(extra or {}),
    }
