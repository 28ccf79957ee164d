"""Parts of Triton's protocols that only an administrator may use, and the key that opens them.

Triton takes the key on its command line and nowhere else: no option of 24.10 to 26.07 reads it from a file or from the
environment (``src/command_line_parser.cc``; the variables that it reads belong to cloud front ends and to tracing). So whoever
may read the server's ``/proc/PID/cmdline`` can read it. Where no key is given, each start makes one that is told to nobody: the
restricted parts are then closed to all who have no rights on the machine itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from lr_backend.errors import ConfigError

RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
"""Loading models, mapping a client's memory into the server, and changing what is logged. The rest (health, metadata, inference,
model-config, statistics) is what clients, load balancers and perf_analyzer need."""

HEADER = "lookahead-admin-key"
"""HTTP header; as gRPC metadata ``triton-grpc-protocol-lookahead-admin-key``."""

KEY_VARIABLE, FILE_VARIABLE = "LOOKAHEAD_ADMIN_KEY", "LOOKAHEAD_ADMIN_KEY_FILE"
_KEY = re.compile(r"[A-Za-z0-9_~.+/=-]{16,256}")


def restriction_arguments(key: str) -> tuple[str, ...]:
    """Options of tritonserver; they hold the key, so they belong into no log."""
    value = f"{','.join(RESTRICTED)}:{HEADER}={key}"
    return (f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}")


def admin_key(environment: Mapping[str, str]) -> str:
    """The key that the operator gave by variable or file; else a new one.

    Raises:
        ConfigError: both are given, the file cannot be read, or the key is short or holds something that no header can.
    """
    given, file = environment.get(KEY_VARIABLE, ""), environment.get(FILE_VARIABLE, "")
    if given and file:
        raise ConfigError(f"{KEY_VARIABLE} and {FILE_VARIABLE} are both set; give one")
    if file:
        try:
            given = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{FILE_VARIABLE}={file}: cannot be read: {error}") from error
    elif not given:
        return secrets.token_urlsafe(32)
    if not _KEY.fullmatch(given):
        raise ConfigError(f"{FILE_VARIABLE if file else KEY_VARIABLE}: 16 to 256 letters, digits or any of _ ~ . + / = -")
    return given


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that have no use for the key: models run clients' prompts, and log."""
    return {name: value for name, value in environment.items() if name not in (KEY_VARIABLE, FILE_VARIABLE)}
