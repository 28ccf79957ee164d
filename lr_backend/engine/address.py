"""Where an engine lives that another server runs, and the key by which that server knows the step loop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lr_backend.errors import ConfigError

ENGINE_HEADER = "lookahead-engine-key"
"""HTTP header; as gRPC metadata with :data:`GRPC_PREFIX`."""
GRPC_PREFIX = "triton-grpc-protocol-"
"""Triton's own, before the names of headers that open its protocols."""
ENGINE_KEY_VARIABLE = "LOOKAHEAD_ENGINE_KEY"
"""The key, or with ``_FILE`` where it lies; the same for the loop's server and for those of its engines."""

LOOP_KEY_VARIABLE = "LOOKAHEAD_LOOP_KEY"
"""What the step loop says to the engines of its own server, made anew by each start; where it is set they answer nobody else."""
LOOP_PARAMETER = "lookahead_loop_key"
"""The request parameter that carries it."""

_URL = re.compile(r"(?P<scheme>grpcs?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})/?")
_KEY = re.compile(r"[A-Za-z0-9_~.+/=-]{16,256}")


@dataclass(frozen=True, slots=True)
class Address:
    """A Triton's gRPC end. ``secure``: by TLS."""

    host: str
    port: int
    secure: bool = False

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read ``grpc://host:port`` or ``grpcs://host:port``.

        Raises:
            ConfigError: it is none.
        """
        found = _URL.fullmatch(url)
        if found is None or not 0 < int(found["port"]) < 65536:
            raise ConfigError(f"{url!r} is not of the form grpc://host:port, or grpcs://host:port for TLS")
        return cls(found["host"], int(found["port"]), found["scheme"] == "grpcs")

    @property
    def host_and_port(self) -> str:
        return f"{self.host}:{self.port}"


def key_from(environment: Mapping[str, str], variable: str) -> str:
    """A secret that the operator gives by a variable, or better by a file that ``variable`` with ``_FILE`` names; or none.

    Raises:
        ConfigError: both are given, the file cannot be read, or the key is short or holds something that no header can.
    """
    file_variable = f"{variable}_FILE"
    given, file = environment.get(variable, ""), environment.get(file_variable, "")
    if given and file:
        raise ConfigError(f"{variable} and {file_variable} are both set; give one")
    if file:
        try:
            given = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file_variable}={file}: cannot be read: {error}") from error
    if (given or file) and not _KEY.fullmatch(given):
        raise ConfigError(f"{file_variable if file else variable}: 16 to 256 letters, digits or any of _ ~ . + / = -")
    return given
