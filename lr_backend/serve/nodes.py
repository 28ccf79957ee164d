"""The machines of a role whose engine spans several: who they are, and how ``mpirun`` reaches them.

A group of pods is LeaderWorkerSet's: it tells each pod the leader's address, how many they are, and which of them it is. The
leader serves. Its ``mpirun`` starts the ranks of the others by ssh, at the port that :mod:`lr_backend.serve.sshd` opens there.

One key pair, of which a Secret holds the private half, is all that the group shares. By it a node knows the leader, and the
leader a node: nobody takes the place of either, and no host key is taken on trust.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lr_backend.build.placement import Placement
from lr_backend.errors import ConfigError
from lr_backend.mpi import by_ssh

LEADER_ADDRESS, GROUP_SIZE, WORKER_INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
KEY_VARIABLE = "LOOKAHEAD_NODE_KEY_FILE"
"""Where the private half of the group's key pair is."""
SSH_PORT = 2222
ALIAS = "lookahead-node"
"""Every node has the same host key, so the leader knows them by one name."""
LOOK_S = 1.0
"""Between two looks whether the nodes answer."""
_BANNER_S = 5.0
_NO_SHELLS = ("nologin", "false")


@dataclass(frozen=True, slots=True)
class Group:
    """What LeaderWorkerSet says to a pod.

    Attributes:
        leader: name of the leader's pod, with its domain.
        size: pods, the leader among them.
        index: of this pod; the leader's is 0.
    """

    leader: str
    size: int
    index: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """None: this process is in no group.

        Raises:
            ConfigError: it is, and the variables are not LeaderWorkerSet's.
        """
        if LEADER_ADDRESS not in environment:
            return None
        try:
            size, index = int(environment[GROUP_SIZE]), int(environment[WORKER_INDEX])
        except (KeyError, ValueError):
            raise ConfigError(f"{LEADER_ADDRESS} is set, {GROUP_SIZE} and {WORKER_INDEX} are not numbers") from None
        return cls(environment[LEADER_ADDRESS], size, index)

    @property
    def others(self) -> tuple[str, ...]:
        """Addresses of the pods beside the leader: its own name with their number, in its domain."""
        name, dot, domain = self.leader.partition(".")
        return tuple(f"{name}-{number}{dot}{domain}" for number in range(1, self.size))


def group_of(placements: Sequence[Placement], environment: Mapping[str, str]) -> Group | None:
    """The group that a server of these engines leads; None: they are on this machine alone.

    Raises:
        ConfigError: spec and group do not go together, or this is not the leader.
    """
    group, nodes = Group.of(environment), max((each.num_nodes for each in placements), default=1)
    if nodes == 1:
        if group is not None and group.size > 1:
            raise ConfigError(f"{GROUP_SIZE}={group.size}, and no role here has num_nodes above 1: the other pods would idle")
        return None
    if len(placements) > 1:
        raise ConfigError(f"a role over num_nodes = {nodes} machines has a server of its own; name one --role")
    if group is None:
        raise ConfigError(
            f"{placements[0].role} is over num_nodes = {nodes} machines, and this server leads no group: {LEADER_ADDRESS} is not"
            " set. LeaderWorkerSet sets it (docs/kubernetes.md)"
        )
    if group.size != nodes:
        raise ConfigError(f"{placements[0].role} is over num_nodes = {nodes} machines, and {GROUP_SIZE} is {group.size}")
    if group.index:
        raise ConfigError(f"{WORKER_INDEX} is {group.index}: the leader serves, and its other nodes run `lookahead node`")
    return group


def private_key(environment: Mapping[str, str]) -> Path:
    """The file of the group's key.

    Raises:
        ConfigError: none is named, or it is not there.
    """
    name = environment.get(KEY_VARIABLE)
    if not name:
        raise ConfigError(f"give {KEY_VARIABLE}: the private half of the key pair that the nodes of a group share")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{KEY_VARIABLE}={name}: there is no such file")
    return path


def public_key(private: Path) -> str:
    """The public half, a line.

    Raises:
        ConfigError: it is no private key, has a passphrase, or nothing here can read it.
    """
    command = ["ssh-keygen", "-y", "-P", "", "-f", str(private)]
    try:
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"ssh-keygen cannot be run: {error}") from error
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"{private} is no private key without a passphrase: {reason}")
    return " ".join(made.stdout.split()[:2])


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines behind one ``mpirun``, the one that it runs on first.

    Attributes:
        others: where the further ones are.
        slots: ranks on each.
        hostfile: names all of them to ``mpirun``.
        environment: what ``mpirun`` needs to reach them.
    """

    others: tuple[str, ...]
    slots: int
    hostfile: Path
    environment: Mapping[str, str]

    @classmethod
    def prepare(cls, others: Sequence[str], slots: int, key: Path, folder: Path, port: int = SSH_PORT) -> Self:
        """Write what ``mpirun`` and ssh read into ``folder``.

        Raises:
            ConfigError: the key is none, or ssh cannot be run as this user.
        """
        if shutil.which("ssh") is None:
            raise ConfigError("ssh is not found: mpirun reaches the other nodes by it (apt-get install openssh-client)")
        known, config, hostfile = folder / "known_hosts", folder / "ssh_config", folder / "hosts"
        known.write_text(f"{ALIAS} {public_key(key)}\n", encoding="utf-8")
        settings = {
            "Port": port,
            "User": login_name(),
            "IdentityFile": f'"{key}"',
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "HostKeyAlias": ALIAS,
            "UserKnownHostsFile": f'"{known}"',
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
            "PreferredAuthentications": "publickey",
            "BatchMode": "yes",
            "ConnectTimeout": 10,
            "ServerAliveInterval": 15,
            "ServerAliveCountMax": 4,
            "LogLevel": "ERROR",
        }
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()), encoding="utf-8")
        # Open MPI takes its own machine's name for itself, whatever the group's domain says.
        hosts = (socket.gethostname(), *others)
        hostfile.write_text("".join(f"{host} slots={slots}\n" for host in hosts), encoding="utf-8")
        return cls(tuple(others), slots, hostfile, by_ssh(f"ssh -F {shlex.quote(str(config))}"))

    def wait(self, timeout_s: float, give_up: threading.Event, port: int = SSH_PORT) -> None:
        """Until all answer, or ``give_up`` is set.

        Raises:
            ConfigError: time is up; it names those that do not answer, and why.
        """
        deadline = time.monotonic() + timeout_s
        silent = {host: "" for host in self.others}
        while not give_up.is_set():
            silent = {host: why for host in silent if (why := why_silent(host, port))}
            if not silent:
                return
            if time.monotonic() > deadline:
                listed = "; ".join(f"{host} ({why})" for host, why in silent.items())
                raise ConfigError(f"not all nodes answered on port {port} within {timeout_s:g} s: {listed}")
            give_up.wait(LOOK_S)


def why_silent(host: str, port: int) -> str:
    """Why no ssh server answers there; empty: one does. Nobody is logged in."""
    try:
        with socket.create_connection((host, port), timeout=_BANNER_S) as connection:
            said = connection.recv(64)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return "" if said.startswith(b"SSH-") else "what answers there is no ssh server"


def login_name() -> str:
    """Who this process is by the list of users, which ssh looks into on both sides.

    Raises:
        ConfigError: the list has no such user, or no shell of its own.
    """
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        raise ConfigError(f"user {os.getuid()} is not in /etc/passwd, and ssh knows no other") from None
    if Path(user.pw_shell).name in _NO_SHELLS:
        raise ConfigError(f"user {user.pw_name} has the shell {user.pw_shell}, by which ssh can start nothing")
    return user.pw_name
