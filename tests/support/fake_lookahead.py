"""The client's fake server (``client/tests/fake_server.py``), for tests of what stands on the client."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _loaded() -> ModuleType:
    name = "fake_server"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "client" / "tests" / "fake_server.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


FakeServer, Reply, Fail, Abort, Gate = (getattr(_loaded(), name) for name in ("FakeServer", "Reply", "Fail", "Abort", "Gate"))
