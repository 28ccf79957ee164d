"""Where the files are that come with the package: specs, templates of model repositories, the demo's models and its checker.

In a checkout they lie at its root. A wheel has copies of them inside the package (``setup.py`` puts them there), so that an
installed package is complete and adds no other top-level name.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_COPIES = _PACKAGE / "_data"
"""In a wheel alone."""


def resource_root() -> Path:
    """The folder with ``engines/``, ``model_repository/`` and ``demo/``: the checkout, or a wheel's own copy of them."""
    return _PACKAGE.parent if is_checkout() else _COPIES


def is_checkout() -> bool:
    """Whether the package runs from a checkout, which has ``bench/`` as well; else it was installed from a wheel."""
    return not _COPIES.is_dir()
