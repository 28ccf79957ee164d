"""Starts the front end as a process of its own, watches it, and ends it. What it serves with may be missing until then."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.frontend.settings import Deployed, Launch, Settings
from lr_backend.serve.restrictions import without_key

READY = b"ready\n"
MARGIN_S = 5.0
"""For the process to end once its drain is over; then it is killed."""
_PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "prometheus_client": "prometheus-client",
    "lr_client": "./client",
}
"""What it serves with, and what pip calls it."""
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that are all of a machine's, by one that reaches it."""


class FrontendError(LookaheadError):
    """The front end did not start, or died."""

    code = "LR_SERVER"


class FrontendProcess:
    """One front end. It takes its port and looks at its keys at once: what is wrong there is told before models are loaded. Not
    thread-safe.

    Raises:
        ConfigError: it cannot listen there, what it serves with is not installed, or its file of keys is of no use.
    """

    def __init__(self, settings: Settings, certificate: Path | None = None) -> None:
        """``certificate``: of Triton's gRPC port, where it has one."""
        if missing := [package for name, package in _PACKAGES.items() if find_spec(name) is None]:
            raise ConfigError(f"the front end lacks packages: pip install {' '.join(missing)}")
        from lr_backend.frontend.limits import Keys  # which wants those packages

        Keys.read(settings.keys_file)
        self.settings, self._certificate = settings, certificate
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = _bound(settings.host, settings.port)
        self._fd = -1
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(0.0)

    @property
    def url(self) -> str:
        """What clients of OpenAI's API call the base URL."""
        host = _ANY.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    def start(self, log_file: Path | None = None) -> None:
        """Start the process, which loads what it serves with and does not listen yet; returns at once.

        Args:
            log_file: its lines are added to it; None: they go where this process's own errors go.
        """
        fd = self._fd = self._socket.fileno()
        log = None if log_file is None else log_file.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lr_backend.frontend"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=without_key(os.environ),
                pass_fds=(fd,),
                start_new_session=True,  # Ctrl-C is for this process alone, which ends that one in its time
            )
        finally:
            self._socket.close()
            if log is not None:
                log.close()

    def open(
        self,
        deployed: Deployed,
        grpc_url: str,
        metrics_url: str,
        *,
        drain_s: float,
        timeout_s: float,
        notice_file: Path | None = None,
    ) -> None:
        """Have it listen, and wait until it does. To be called once the models have answered: whoever reaches it may ask.

        Args:
            grpc_url, metrics_url: ``host:port`` of Triton.
            drain_s: for answers in flight once it is asked to end.
            notice_file: as in :class:`~lr_backend.frontend.settings.Launch`.

        Raises:
            FrontendError: it ended, or time is up.
        """
        told = Launch(
            settings=self.settings,
            deployed=deployed,
            grpc_url=grpc_url,
            metrics_url=metrics_url,
            certificate=self._certificate,
            socket_fd=self._fd,
            drain_s=drain_s,
            notice_file=notice_file,
        )
        assert self._process is not None and self._process.stdout is not None
        # The pipe stays open: its end is what tells the process to end, also when this one dies without a word.
        with suppress(BrokenPipeError):  # it has ended; the check says so
            self._stdin.write(told.model_dump_json().encode() + b"\n")
            self._stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            raise FrontendError(f"the front end was not ready within {timeout_s:g} s")
        if self._process.stdout.readline() != READY:
            self._process.wait(MARGIN_S)
            self.check()

    def check(self) -> None:
        """Raises: FrontendError: it has ended, which nobody asked for."""
        if self._process is not None and (status := self._process.poll()) is not None:
            raise FrontendError(f"the front end ended with status {status}; the server's log says why")

    def terminate(self) -> None:
        """Ask it to take no more requests and to end once those in flight are answered; returns at once."""
        if self._process is not None and not self._stdin.closed:
            with suppress(BrokenPipeError):  # it has ended, with a line on its way to it
                self._stdin.close()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None while it runs after so many seconds."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, drain_s: float) -> int | None:
        """End it, by force after so many seconds; None where nothing ran. May be called again."""
        self._socket.close()
        if self._process is None:
            return None
        self.terminate()
        status = self.wait(drain_s)
        if status is None:
            self._process.kill()
            status = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        why = f"the front end cannot listen on {host}:{port}: {error.strerror}; give another by --openai-port"
        raise ConfigError(why) from error
    return made
