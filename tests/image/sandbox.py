"""Runs an image's command as a container runtime would: its user, environment and entry point, on a read-only root.

Made of bubblewrap, which needs neither a daemon nor cgroups: own process, IPC and host names, no capability, no new privileges,
/tmp and /dev/shm of a given size as the only writable places. The network is the host's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TMP_BYTES = 64 << 20
SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says of how it is run, as ``buildah inspect`` gives it."""

    user: str
    environment: dict[str, str]
    working_dir: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    health: tuple[str, ...]
    ports: tuple[int, ...]
    stop_signal: str
    labels: dict[str, str]

    @classmethod
    def parse(cls, inspected: str) -> Self:
        config: dict[str, Any] = json.loads(inspected)["Docker"]["config"]
        health = (config.get("Healthcheck") or {}).get("Test") or [""]
        return cls(
            user=config.get("User") or "",
            environment=dict(line.split("=", 1) for line in config.get("Env") or ()),
            working_dir=config.get("WorkingDir") or "/",
            entrypoint=tuple(config.get("Entrypoint") or ()),
            command=tuple(config.get("Cmd") or ()),
            health=tuple(health[1:]) if health[0] == "CMD" else (),
            ports=tuple(sorted(int(port.split("/")[0]) for port in config.get("ExposedPorts") or ())),
            stop_signal=config.get("StopSignal") or "SIGTERM",
            labels=config.get("Labels") or {},
        )


@dataclass(frozen=True, slots=True)
class Sandbox:
    """An image's root folder and how it is run."""

    root: Path
    config: ImageConfig

    def command(self, arguments: Sequence[str], *extra: str) -> list[str]:
        """The bubblewrap command line that runs ``arguments`` as process 1; ``extra`` are further options of bubblewrap."""
        user, group = self.config.user.split(":")
        return [
            *("bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent", "--new-session"),
            *("--ro-bind", str(self.root), "/", "--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"),
            *("--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"),
            *("--clearenv", "--chdir", self.config.working_dir),
            *(part for item in self.config.environment.items() for part in ("--setenv", *item)),
            # Only to give them up: bubblewrap leaves the change of user to setpriv.
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
            *extra,
            *("--", "/usr/bin/setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--inh-caps=-all"),
            *("--bounding-set=-all", "--no-new-privs", *arguments),
        ]

    def run(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(self.command(arguments), capture_output=True, text=True, timeout=timeout_s, check=False)


class Container:
    """The image's own entry point, running. Its output is kept in ``log``."""

    def __init__(self, sandbox: Sandbox, log: Path, *arguments: str) -> None:
        user, group = (int(part) for part in sandbox.config.user.split(":"))
        reader, writer = os.pipe()
        os.fchown(writer, user, group)  # as container runtimes do, so that /dev/stderr can be opened
        info_reader, info_writer = os.pipe()
        line = sandbox.command([*sandbox.config.entrypoint, *arguments], "--info-fd", str(info_writer))
        self._process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, pass_fds=(info_writer,))
        os.close(writer)
        os.close(info_writer)
        self._log = log
        self._copier = threading.Thread(target=self._copy, args=(reader,), daemon=True)
        self._copier.start()
        with os.fdopen(info_reader) as info:
            self.pid: int = json.load(info)["child-pid"]

    def _copy(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as source, self._log.open("wb", buffering=0) as sink:
            while data := source.read(65536):
                sink.write(data)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[Path]:
        """``/proc`` folders of everything that runs in it."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns" / "pid") == own:
                    found.append(folder)
            except OSError:
                continue  # it has just ended
        return found

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        status = self._process.wait(timeout_s)
        self._copier.join(timeout_s)
        return status

    def kill(self) -> None:
        """End it at once: with process 1 of a namespace ends all that is in it."""
        if self.running:
            self.signal(signal.SIGKILL)
            self._process.wait()
