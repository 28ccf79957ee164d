"""Parts of Triton's protocols that only an administrator may use, and the key that opens them.

Triton takes the key on its command line and nowhere else: no option of 24.10 to 26.07 reads it from a file or from the
environment (``src/command_line_parser.cc``; the variables that it reads belong to cloud front ends and to tracing). Whoever is on
the machine may read a process's command line. So ``arguments.c`` stands before tritonserver's ``main`` and adds these arguments
there, where no list shows them. Where no key is given, each start makes one that is told to nobody.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from lr_backend.engine.address import ENGINE_HEADER, key_from
from lr_backend.errors import ConfigError

RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
"""Loading models, mapping a client's memory into the server, and changing what is logged. The rest (health, metadata, inference,
model-config, statistics) is what clients, load balancers and perf_analyzer need."""

HEADER = "lookahead-admin-key"
"""HTTP header; as gRPC metadata ``triton-grpc-protocol-lookahead-admin-key``."""

KEY_VARIABLE = "LOOKAHEAD_ADMIN_KEY"


def restriction_arguments(key: str, engine_key: str = "") -> tuple[str, ...]:
    """Options of tritonserver; they hold the keys, so they belong into no log.

    Args:
        engine_key: what opens inference, on a server whose engines are there for a step loop elsewhere; empty: it is open.
    """
    closed = [f"{','.join(RESTRICTED)}:{HEADER}={key}"]
    closed += [f"inference:{ENGINE_HEADER}={engine_key}"] if engine_key else []
    return tuple(f"--{option}={value}" for value in closed for option in ("http-restricted-api", "grpc-restricted-protocol"))


PRELOADED = "lr_backend.serve._arguments"
"""Built from ``arguments.c`` when the package is installed, where there is a C compiler."""
_ENDS_A_PATH = frozenset(" :")
"""In ``LD_PRELOAD``, which has no way to quote them: what lies at such a path is not loaded, and nobody is told."""
_PROGRAM, _VARIABLE, _PRELOAD = "tritonserver", "LOOKAHEAD_SERVER_ARGUMENTS", "LD_PRELOAD"


@dataclass(frozen=True, slots=True)
class Unseen:
    """How arguments reach tritonserver: by its environment, where only its own user can read them, or by its command line."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]


def unseen_arguments(arguments: tuple[str, ...], binary: Path, environment: Mapping[str, str]) -> Unseen:
    """The way by which ``arguments`` are shown in no process list, where this machine has it."""
    found = importlib.util.find_spec(PRELOADED)
    if found is None or found.origin is None or binary.name != _PROGRAM or not _is_program(binary):
        return Unseen({}, arguments)
    if set(found.origin) & _ENDS_A_PATH:
        return Unseen({}, arguments)
    preloaded = ":".join(part for part in (found.origin, environment.get(_PRELOAD, "")) if part)
    return Unseen({_VARIABLE: "\n".join(arguments), _PRELOAD: preloaded}, ())


def _is_program(path: Path) -> bool:
    """Whether it is compiled, hence has a ``main``: a script is run by a program of another name."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def tls_arguments(certificate: Path | None, key: Path | None) -> tuple[str, ...]:
    """Options of tritonserver for gRPC by TLS; none without a certificate.

    Raises:
        ConfigError: a file is not there.
    """
    if certificate is None or key is None:
        return ()
    for path in (certificate, key):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
    return ("--grpc-use-ssl=true", f"--grpc-server-cert={certificate.absolute()}", f"--grpc-server-key={key.absolute()}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that a server listens on; a name is taken for another's."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def admin_key(environment: Mapping[str, str]) -> str:
    """The key that the operator gave by variable or file; else a new one.

    Raises:
        ConfigError: it cannot be used.
    """
    return key_from(environment, KEY_VARIABLE) or secrets.token_urlsafe(32)


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that have no use for the key: models run clients' prompts, and log."""
    return {name: value for name, value in environment.items() if name not in (KEY_VARIABLE, f"{KEY_VARIABLE}_FILE")}
