"""Two machines on one: Linux namespaces with a name, a network and users of their own, joined by a cable.

What runs in them has no powers but to read files, as user 20777, who is in no group. That one power is for checkouts and
interpreters in folders that are root's alone. The machines' root is read-only, but for the folder that they are made in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 20777
NAMES = ("lr-target-0", "lr-target-0-1")
DOMAIN = "lr-target.prod"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_POWERLESS = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search", "--bounding-set=-all,+dac_read_search"),
)
_ENTER = 'hostname "$1" && ip link set lo up && mount --bind "$2/passwd" /etc/passwd && mount --bind "$2/hosts" /etc/hosts && '
_ENTER += 'mount --bind "$2" "$2" && mount -o remount,bind,ro / && '
_ENTER += 'shift 2 && touch "$1" && shift && exec "$@"'
_PACKAGES = {
    "mpirun": "openmpi-bin",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
BOUND_S = 60.0


def missing() -> str:
    """Why there can be no such machines here; empty: there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lack = sorted({package for command, package in _PACKAGES.items() if shutil.which(command, path=path) is None})
    if lack:
        return f"not installed: Debian's {', '.join(lack)}"
    tried = subprocess.run(["unshare", "-m", "-u", "-n", *_POWERLESS, "true"], capture_output=True, text=True, timeout=BOUND_S)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Pods:
    """Both machines, each for as long as its first process lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        users = Path("/etc/passwd").read_text(encoding="utf-8")
        (folder / "passwd").write_text(f"{users}pod:x:{USER}:{USER}::/tmp:/bin/sh\n", encoding="utf-8")
        hosts = "".join(f"{address} {name}.{DOMAIN} {name}\n" for address, name in zip(_ADDRESSES, NAMES, strict=True))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}", encoding="utf-8")
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], log: Path) -> None:
        """A command on each machine, which writes to ``log`` with its machine's name behind it; then plug the cable in."""
        for name, command, environment in zip(NAMES, commands, environments, strict=True):
            entered = self._folder / f"{name}.entered"
            inside = ["unshare", "-m", "-u", "-n", "sh", "-c", _ENTER, "sh", name, str(self._folder), str(entered)]
            with log.with_suffix(f".{name}").open("wb") as output:
                self._running.append(
                    subprocess.Popen(
                        [*inside, *_POWERLESS, *command],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **environment},
                    )
                )
            deadline = time.monotonic() + BOUND_S
            while not entered.exists():
                assert time.monotonic() < deadline, f"{name} never came up"
                time.sleep(0.01)
        first, second = (str(each.pid) for each in self._running)
        _run("ip", "link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for pid, address in zip((first, second), _ADDRESSES, strict=True):
            for words in (("addr", "add", f"{address}/24", "dev", "cable"), ("link", "set", "cable", "up")):
                _run("nsenter", "-n", "-t", pid, "ip", *words)

    @property
    def leader(self) -> subprocess.Popen[bytes]:
        return self._running[0]

    @property
    def node(self) -> subprocess.Popen[bytes]:
        return self._running[1]

    def end(self) -> None:
        for each in self._running:
            if each.poll() is None:
                each.terminate()
        for each in self._running:
            assert each.stdin is not None
            each.stdin.close()
            try:
                each.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=BOUND_S)
