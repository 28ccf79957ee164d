"""One node of a role whose engine spans several: waits for the ranks that the leader starts here, and ends with them.

An ssh server of this process' own user, on a port that needs no power, in front of nothing but the key of the group. What the
leader's ``mpirun`` starts gets the environment that this process has: containers say there where libraries are, and ssh itself
forgets it.

A node serves one run of its leader. So whoever supervises it starts it anew for the next, with nothing left of the last one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from lr_backend.errors import ConfigError, LookaheadError
from lr_backend.mpi import belongs_to_job
from lr_backend.serve.guard import become_subreaper
from lr_backend.serve.launch import COMPILED_ENVIRONMENT
from lr_backend.serve.nodes import SSH_PORT, login_name, private_key, public_key

LOOK_S = 0.5
"""Between two looks at what runs here."""
IMPATIENT = 2
END_S = 5.0
"""For what is told to end; then it is killed."""
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")
_OF_THE_SESSION = {"_", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER"}
_OF_THE_POD = ("LWS_", "SSH_")


class NodeError(LookaheadError):
    """The ssh server of a node ended by itself."""

    code = "LR_NODE"


def find_sshd(environment: Mapping[str, str]) -> Path:
    """The ssh server, by its whole path, without which it does not start.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which("sshd", path=os.pathsep.join((environment.get("PATH", ""), *_SBIN)))
    if found is None:
        raise ConfigError("sshd is not found: a node is reached by ssh (apt-get install openssh-server)")
    return Path(found).resolve()


def given_to_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a node's environment what its ranks get: all but what a session or a pod has of its own, and what ranks always get."""
    return COMPILED_ENVIRONMENT | {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_SESSION and not name.startswith(_OF_THE_POD) and not belongs_to_job(name)
        if "\n" not in value
    }


def sshd_config(key: Path, authorized: Path, user: str, environment: Mapping[str, str], port: int = SSH_PORT) -> str:
    """The server's whole configuration: this user alone, by that key alone, and nothing but commands."""
    settings = {
        "Port": port,
        "HostKey": f'"{key}"',
        "PidFile": "none",
        "AllowUsers": user,
        "AuthorizedKeysFile": f'"{authorized}"',
        "AuthenticationMethods": "publickey",
        "StrictModes": "no",  # the file is this process' own, in a folder of its own, under a /tmp that all may write to
        "UsePAM": "no",
        "PermitTTY": "no",
        "PermitUserRC": "no",
        "DisableForwarding": "yes",
        "PrintMotd": "no",
        "ClientAliveInterval": 15,
        "ClientAliveCountMax": 4,
    }
    lines = [f"{name} {value}" for name, value in settings.items()]
    # All in one directive: of several the first counts.
    if given := given_to_ranks(environment):
        lines.append("SetEnv " + " ".join(f"{name}={_quoted(value)}" for name, value in given.items()))
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def run_node(
    environment: Mapping[str, str],
    asked: Callable[[], int],
    say: Callable[[str], None],
    port: int = SSH_PORT,
) -> None:
    """Open this node to its leader; return once the leader's ranks have come and gone.

    Args:
        asked: how often this node was told to end. Once: it ends when no ranks are here, since a leader that drains needs them
            until it is done. More often: at once.

    Raises:
        ConfigError: a key, a user or the ssh server is missing.
        NodeError: the ssh server ended.
    """
    key = private_key(environment)
    public = public_key(key)
    binary, user = find_sshd(environment), login_name()
    become_subreaper()  # Open MPI's daemon may leave its session, and is this process' to wait for
    with tempfile.TemporaryDirectory(prefix="lookahead-node-") as folder:
        authorized, config = Path(folder, "authorized_keys"), Path(folder, "sshd_config")
        authorized.write_text(f"restrict {public}\n", encoding="utf-8")
        config.touch(0o600)
        config.write_text(sshd_config(key, authorized, user, environment, port), encoding="utf-8")
        server = subprocess.Popen([str(binary), "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL)
        try:
            say(f"waits for its leader on port {port}, as {user}")
            came = False
            while asked() < IMPATIENT:
                if server.poll() is not None:
                    raise NodeError(f"sshd ended with status {server.returncode}")
                here = ranks_of(server.pid)
                if here and not came:
                    came = True
                    say("the leader's ranks are here")
                if not here and came:
                    say("the leader's ranks have ended")
                    return
                if not here and asked():
                    return
                time.sleep(LOOK_S)
        finally:
            _end(server)


def ranks_of(server_pid: int) -> list[psutil.Process]:
    """What the leader started here: all that came from this process, but the ssh server and its sessions."""
    found = []
    for process in _all():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                _reap(process.pid, server_pid)
            elif process.pid != server_pid and not process.name().startswith("sshd"):
                found.append(process)
    return found


def _all() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def _reap(pid: int, server_pid: int) -> None:
    """The server's own end is for :class:`subprocess.Popen` to see; children of others are not ours to wait for."""
    if pid != server_pid:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Nothing that came from this process stays."""
    server.terminate()
    left = _all()
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=END_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
