"""How the threads of a model's process share its interpreter."""

from __future__ import annotations

import sys

SWITCH_INTERVAL_S = 0.0002
"""Until a thread that waits for the interpreter is let in. Python's 5 ms are several decode iterations."""


def share_interpreter() -> None:
    """Once in a model's process: an engine's thread, back from an iteration, must not wait for whoever reads a request."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
