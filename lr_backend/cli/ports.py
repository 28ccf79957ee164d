"""Where a server listens: the options of the commands that start one or look whether one could start."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from lr_backend.serve.server import Ports

PORTS = Ports(http=8000, grpc=8001, metrics=8002)
"""Triton's own."""


def _numbers(host: str) -> str:
    """The IPv4 address of a host. Triton takes no names, and without a word listens where nobody reaches it."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise typer.BadParameter(f"{host!r} is no IPv4 address, nor the name of one; Triton listens on no other") from error


HostOption = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="IPv4 address to listen on. Triton has no authentication.", callback=_numbers),
]
PortOption = Annotated[int, typer.Option(metavar="PORT", help="0 takes a free one.", min=0, max=65535)]


OPENAI_PORT = 9000
OpenaiHostOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address of the OpenAI API. Beyond loopback it wants API keys.")
]
OpenaiKeysOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="API keys, one a line. Without, everybody on this machine is answered.")
]
OpenaiSettingsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Limits of the OpenAI API (.toml); docs/api.md has them.")
]


def by_option(host: str, triton: Ports, openai: tuple[str, int] | None) -> Mapping[str, tuple[str, int]]:
    """Addresses by the options that say their ports. ``openai``: None where the server has no step loop, and no such API."""
    ports = {"--http-port": triton.http, "--grpc-port": triton.grpc, "--metrics-port": triton.metrics}
    return {option: (host, port) for option, port in ports.items()} | ({"--openai-port": openai} if openai is not None else {})
