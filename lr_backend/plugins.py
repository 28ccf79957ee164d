"""Parts that a deployment brings along: verifiers, proposers of draft tokens, a segmenter, an auditor's checker.

A spec names one as ``module:Name``, or by the name that an installed package gives it as an entry point::

    [lookahead.verifiers.same_numbers]
    factory = "my_package.verify:SameNumbers"
    least = 2                                   # whatever else stands here is passed to the factory

    # pyproject.toml of an installed package: the verifier can be asked for without a line in the spec
    [project.entry-points."lookahead.verifiers"]
    same_numbers = "my_package.verify:SameNumbers"

Modules are looked for among the installed packages, and under the root of the deployment: the folder that holds ``engines/``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lr_backend.errors import ConfigError
from lr_backend.resources import resource_root

NAME = r"^[a-z][a-z0-9_]{0,63}$"
REFERENCE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""``module:Name``."""
VERIFIERS, PROPOSERS, SEGMENTERS = "lookahead.verifiers", "lookahead.proposers", "lookahead.segmenters"
"""Groups of entry points."""


class PlugIn(BaseModel):
    """A section of a spec that names a part.

    Attributes:
        factory: ``module:Name``, or the name of an entry point. It is called once, when the server starts, with whatever else
            the section holds as keyword arguments.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    factory: str = Field(min_length=1)

    def make(self, group: str, where: str, root: Path | None = None) -> Any:
        """The part.

        Args:
            group: of entry points, for a factory that is no ``module:Name``.
            where: the section, for messages.
            root: of the deployment; its modules can be named as well.

        Raises:
            ConfigError: there is no such factory, or it refuses its options.
        """
        factory = load(self.factory, where, root) if ":" in self.factory else _registered(self.factory, group, where)
        return _made(factory, self.model_extra or {}, where)


def parts_of(group: str, named: Mapping[str, PlugIn], root: Path | None = None) -> dict[str, Any]:
    """The parts that a spec names and those that installed packages offer, by name. The spec's come first.

    Raises:
        ConfigError: as :meth:`PlugIn.make`.
    """
    kind = group.removeprefix("lookahead.")
    found = {name: plug_in.make(group, f"{kind}.{name}", root) for name, plug_in in named.items()}
    for point in entry_points(group=group):
        if point.name not in found:
            found[point.name] = _made(load(point.value, f"entry point {point.name}"), {}, f"entry point {point.name}")
    return found


@cache
def offered(group: str) -> frozenset[str]:
    """Names of the parts that installed packages offer. Every request asks; to look takes milliseconds and reads many files."""
    return frozenset(point.name for point in entry_points(group=group))


def load(reference: str, where: str, root: Path | None = None) -> Any:
    """Import ``module:Name``, of an installed package or of a module under ``root`` or the project's own root.

    Raises:
        ConfigError: it cannot be imported here.
    """
    for folder in (root, resource_root()):
        if folder is not None and str(folder) not in sys.path:
            sys.path.append(str(folder))
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(f"{where}: {reference!r} cannot be imported: {type(error).__name__}: {error}") from error


def _registered(name: str, group: str, where: str) -> Any:
    found = {point.name: point.value for point in entry_points(group=group)}
    if name not in found:
        offers = f"installed packages offer {', '.join(sorted(found))}" if found else "no installed package offers one"
        raise ConfigError(f'{where}: factory={name!r} is no "module:Name", and no entry point of {group}: {offers}')
    return load(found[name], where)


def _made(factory: Any, options: Mapping[str, Any], where: str) -> Any:
    try:
        return factory(**options)
    except Exception as error:  # a deployment's own code may raise anything
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
