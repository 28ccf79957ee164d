"""The name that a server's certificate says."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

from lr_backend.errors import ConfigError

CONNECT_S = 5.0


def certified_name(address: str, certificate: Path) -> str:
    """A name that the server at ``host:port`` shows in its certificate, which has to be this one.

    Triton's certificate is for those who reach it from elsewhere; on this machine its address is another.

    Raises:
        ConfigError: it cannot be reached, or shows another certificate.
    """
    host, _, port = address.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be its own authority
        context.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), CONNECT_S) as plain, context.wrap_socket(plain) as secure:
            shown: Any = secure.getpeercert() or {}
    except OSError as error:
        raise ConfigError(f"the front end cannot reach Triton's gRPC by TLS: {error}") from error
    names = [str(name) for kind, name in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [str(value) for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
    if not names:
        raise ConfigError(f"{certificate}: it names nobody")
    return names[0].replace("*", "any")
