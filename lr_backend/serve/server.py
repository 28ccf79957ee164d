"""Starts a tritonserver, waits until it serves, and stops it with everything that it started.

    with TritonServer(repository) as server:      # free ports, own shared memory, log in a temporary folder
        server.wait_ready(timeout_s=120)
        requests to server.http_url or server.grpc_url

Leaving the block drains and cleans up; so does :mod:`lr_backend.serve.guard` when this process dies without leaving it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from lr_backend.engine.address import LOOP_KEY_VARIABLE
from lr_backend.errors import LookaheadError
from lr_backend.hardware.lateness import Lateness
from lr_backend.notice import NOTICE_VARIABLE, Lessons, Seats
from lr_backend.serve import guard
from lr_backend.serve.backend_dir import PACKAGE, find_tritonserver, prepare_backend_dir, server_environment
from lr_backend.serve.launch import ONE_RANK, PLAIN, LaunchPlan
from lr_backend.serve.restrictions import admin_key, restriction_arguments, unseen_arguments, without_key
from lr_backend.serve.work_dir import WorkDir, remove_leftovers, shared_memory_prefix
from lr_backend.telemetry import FORWARDED

POLL_S = 0.1
"""Between two readiness probes; a server that dies ends the wait at once."""
CLEANUP_MARGIN_S = 10.0
"""For the guard to kill and reap after the drain; beyond it the launcher does that itself."""
PORT_ATTEMPTS = 4
NUM_OLD_LOGS = 5
"""Logs of earlier servers that stay beside the log."""
MAX_LOG_BYTES = 1 << 20
"""Of the end of a log, to look for what went wrong."""
METRICS_INTERVAL_MS = 500
"""How often Triton looks at its machine. A server that ends waits for the next look."""

_REASON = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)")
_PORT_TAKEN = re.compile(r"failed to start (?P<service>\w+) service: .*?(?P<address>'\S+') already in use")
_BY_SSH = re.compile(r"^(?:ssh: |Host key verification failed|\S+: Permission denied \().*", re.MULTILINE)
"""What ssh says before mpirun's own page about why a node may not have started."""
_TABLE = re.compile(r"^\s*[|+]")


class ServerError(LookaheadError):
    """The server did not start, did not get ready in time, or died.

    Attributes:
        log_tail: last useful lines of its log.
    """

    code = "LR_SERVER"

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message if not log_tail else f"{message}\n{log_tail}")
        self.log_tail = log_tail


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a server listens."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How tritonserver is run.

    Attributes:
        host: address to listen on. Triton has no authentication: anything but loopback belongs behind a gateway.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        thread_pool_size: BLS calls that the Python backend has in flight at a time, for each process of the step loop.
        exit_timeout_s: how long a stopping server waits for requests in flight.
        tritonserver: the binary; None looks on PATH, then in the wheel.
        log_file: None keeps the log in the temporary folder, until the server is stopped.
        packages: importable in the models, beside the environment's own.
        environment: set for the server, over the launcher's own variables and the plan's.
        arguments: further ones for tritonserver.
        plan: what a deployment's engines need of the server; by default nothing.
        admin_key: opens what :mod:`~lr_backend.serve.restrictions` closes; empty: each start makes one that nobody is told.
        closes_engines: the Python models of engines answer the step loop of this server and nobody else.
        engine_key: opens inference, on a server whose engines are there for a step loop elsewhere; empty: it is open.
    """

    host: str = "127.0.0.1"
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    thread_pool_size: int = 128
    exit_timeout_s: int = 30
    tritonserver: Path | None = None
    log_file: Path | None = None
    packages: tuple[Path, ...] = (PACKAGE,)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    plan: LaunchPlan = PLAIN
    admin_key: str = field(default="", repr=False)
    engine_key: str = field(default="", repr=False)
    closes_engines: bool = False


def _begin_log(path: Path) -> int:
    """A log that its owner alone may read: ids and errors of everybody's requests stand in it. Returns where this one begins.

    It is empty, and the last ones stay beside it: a supervisor that starts a server again and again does not take away why
    the first one died. What a link leads to, as /dev/stderr, is somebody else's and is added to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_link = path.is_symlink()
    if path.is_file() and not is_link and path.stat().st_size:
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, NUM_OLD_LOGS + 1))]
        with suppress(OSError):  # the folder is somebody else's
            for newer, older in reversed(list(pairwise(names))):
                if newer.exists():
                    newer.replace(older)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (0 if is_link else os.O_TRUNC), 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):  # /dev/stderr has a mode of its own
            return 0
        os.fchmod(descriptor, 0o600)
        return found.st_size
    finally:
        os.close(descriptor)


def plain_path(folder: Path, into: Path) -> Path:
    """A path of ``folder`` that a shell reads as it stands: its own, or that of a link in ``into``.

    Triton's Python backend starts its processes by ``bash -c`` and quotes nothing.

    Raises:
        ServerError: ``into`` has none either.
    """
    if shlex.quote(str(folder)) == str(folder):
        return folder
    link = into / "repository"
    if shlex.quote(str(link)) != str(link):
        raise ServerError(
            f"{folder} and {into} (by TMPDIR) have characters that Triton's shell reads otherwise; set another TMPDIR"
        )
    link.symlink_to(folder)
    return link


def free_ports(options: ServerOptions) -> Ports:
    """The ports asked for, and free ones (different from each other) where none was."""
    held = []
    try:
        numbers = []
        for wanted in (options.http_port, options.grpc_port, options.metrics_port):
            if wanted == 0:
                family, kind, _, _, address = socket.getaddrinfo(options.host, 0, type=socket.SOCK_STREAM)[0]
                held.append(socket.socket(family, kind))
                held[-1].bind(address)
                wanted = held[-1].getsockname()[1]
            numbers.append(wanted)
        return Ports(*numbers)
    except OSError as error:
        raise ServerError(f"no port to be had at {options.host}: {error.strerror}") from error
    finally:
        for each in held:
            each.close()


def useful_lines(log: str) -> str:
    """What a person needs from a server's log: why models failed or nodes were not reached, else its last lines."""
    models: dict[str, list[str]] = {}  # models often fail for one reason, which is said once
    for match in _REASON.finditer(log):
        models.setdefault(_unescape(match["reason"]), []).append(match["model"])
    reasons = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in models.items()]
    reasons += [f"{match['service']}: {match['address']} is already in use" for match in _PORT_TAKEN.finditer(log)]
    reasons += [match[0].strip() for match in _BY_SSH.finditer(log)]
    if reasons:
        return "\n".join(dict.fromkeys(reasons))
    lines = [line for line in log.splitlines() if line.strip() and not _TABLE.match(line)]
    return "\n".join(lines[-12:])


def _unescape(text: str) -> str:
    return text.strip().strip('"').replace("\\n", "\n").rstrip()


def by_label(metrics: str, series: str) -> dict[str, float]:
    """Values of the series that match a pattern, by the label that its group matches."""
    return {match[1]: float(match[2]) for match in re.finditer(rf"^{series} (\S+)$", metrics, re.MULTILINE)}


def by_role(metrics: str, name: str) -> dict[str, float]:
    """The metric ``name`` of every engine, by its label ``role``."""
    return by_label(metrics, rf'{name}{{role="([^"]*)"}}')


class TritonServer:
    """One tritonserver over one model repository. Not thread-safe; :meth:`stop` may be called any number of times."""

    def __init__(self, repository: Path, options: ServerOptions | None = None) -> None:
        self.repository = repository.absolute()
        self._told_repository = self.repository
        self.options = options or ServerOptions()
        self.ports = Ports(0, 0, 0)
        self.shm_prefix = ""
        self.admin_key = ""
        self.loop_key = secrets.token_urlsafe(32) if self.options.closes_engines else ""
        self.pid: int | None = None
        self._seats: Seats | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._work_dir: WorkDir | None = None
        self._last_log = ""
        self._log_begin = 0
        self._attempts = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        """``host:port``, as tritonclient takes it."""
        return f"{self._client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"{self._client_host}:{self.ports.metrics}"

    def counter(self, name: str) -> dict[str, float]:
        """The metric ``name`` of every engine, by its label ``role``.

        Raises:
            ServerError: the server does not answer.
        """
        return by_role(self.metrics(), name)

    def metrics(self) -> str:
        """Triton's metrics, and those of its models.

        Raises:
            ServerError: the server does not answer.
        """
        text = self._get("/metrics", self.ports.metrics)
        if text is None:
            raise ServerError("the server's metrics do not answer")
        return text.decode()

    def lateness(self) -> dict[str, Lateness]:
        """Of every engine that has kept a pace until now; up to a second old.

        Raises:
            ServerError: the server does not answer.
        """
        paced, late = (self.counter(f"lr_engine_{name}_seconds_total") for name in ("paced", "late"))
        return {role: Lateness(paced_s, late.get(role, 0.0)) for role, paced_s in paced.items() if paced_s > 0.0}

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host

    @property
    def notice_file(self) -> Path:
        """Where a running server's step loop looks for :mod:`~lr_backend.notice`."""
        assert self._work_dir is not None, "not started"
        return self._work_dir.path / "notice"

    @property
    def seats(self) -> Seats:
        """What its processes of the step loop are answering; of a stopped server, what they were at last."""
        assert self._seats is not None, "not started"
        return self._seats

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    @property
    def log_file(self) -> Path | None:
        """The log of the running server."""
        return self.options.log_file or (self._work_dir.path / "server.log" if self._work_dir else None)

    def log_text(self) -> str:
        """What the server and its models wrote at last; after :meth:`stop` what they had written until then."""
        path = self.log_file
        if path is not None and path.is_file():
            with path.open("rb") as file:
                size = path.stat().st_size
                begin = self._log_begin if self._log_begin <= size else 0  # somebody has cut it meanwhile
                file.seek(max(begin, size - MAX_LOG_BYTES))
                self._last_log = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
        return self._last_log

    def start(self) -> None:
        """Start the process; returns before it serves.

        Raises:
            ConfigError: no tritonserver, or none for this Python.
            ServerError: it cannot be executed, or this object is already running one.
        """
        if self._guard is not None:
            raise ServerError("this server is already started")
        install = find_tritonserver(self.options.tritonserver)
        remove_leftovers()
        number = uuid.uuid4().hex[:12]
        try:
            self._work_dir = WorkDir.make(number)
        except OSError as error:
            raise ServerError(
                f"no folder for temporary files: {error.strerror}; a container needs /tmp (--tmpfs /tmp)"
            ) from error
        self._attempts += 1
        try:
            self.shm_prefix = shared_memory_prefix(number)
            self._seats = Seats.make(self.notice_file)
            Lessons.make(self.notice_file)
            self._told_repository = plain_path(self.repository, self._work_dir.path)
            self.ports = free_ports(self.options)
            backends = prepare_backend_dir(install, self._work_dir.path, self.options.packages)
            self.admin_key = self.options.admin_key or admin_key({})
            unseen = unseen_arguments(restriction_arguments(self.admin_key, self.options.engine_key), install.binary, os.environ)
            self._spawn(self.command(install.binary, backends, unseen.arguments), install.binary.name, unseen.environment)
        except OSError as error:
            self._clean_up()
            raise ServerError(f"the server cannot be prepared: {error}") from error
        except BaseException:
            self._clean_up()
            raise

    def command(self, binary: Path, backends: Path | None, secrets: tuple[str, ...] = ()) -> list[str]:
        """The whole command line. ``secrets``: arguments for the rank that listens, which nothing logs."""
        plan = self.options.plan
        first, *others = ([str(binary), *self._arguments(backends, rank)] for rank in range(plan.num_ranks))
        # The keys go to the rank that listens, and over no network.
        ranks = [[*first, *secrets], *others]
        if not plan.launcher:
            return ranks[0]
        parts = [[*ONE_RANK, *rank] for rank in ranks]
        return [*plan.launcher, *parts[0], *(word for part in parts[1:] for word in (":", *part))]

    def _arguments(self, backends: Path | None, rank: int) -> list[str]:
        """Options of one rank's tritonserver. Ranks other than 0, maybe on other machines, load the engine alone."""
        options, suffix = self.options, f"rank{rank}_" if rank else ""
        listening = ["--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"] if rank else self._listening(backends)
        return [
            f"--id={(self.shm_prefix + suffix).strip('_')}",
            f"--model-repository={self.repository if rank else self._told_repository}",
            *listening,
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}{suffix}",
            "--model-control-mode=explicit",  # so that a model can be loaded anew
            *(f"--load-model={name}" for name in (options.plan.worker_models if rank else ("*",))),
            "--disable-auto-complete-config",
            "--exit-on-error=true",
            *([] if rank else ["--strict-readiness=true"]),
            f"--exit-timeout-secs={options.exit_timeout_s}",
            *options.plan.arguments,
            *([] if rank else options.arguments),
        ]

    def _listening(self, backends: Path | None) -> list[str]:
        """Where the first rank listens, and what it has to answer there."""
        options, own_backends = self.options, [f"--backend-directory={backends}"] if backends else []
        return [
            *own_backends,
            f"--http-address={options.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={options.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--grpc-header-forward-pattern={FORWARDED}",
            f"--metrics-address={options.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--metrics-interval-ms={METRICS_INTERVAL_MS}",
            f"--backend-config=python,thread-pool-size={options.thread_pool_size}",
        ]

    def wait_ready(self, timeout_s: float, give_up: threading.Event | None = None) -> None:
        """Wait until the server is live and every model of the repository is ready, or ``give_up`` is set.

        A server that lost the race for a free port is started again, on others.

        Raises:
            ServerError: it died, with the reason each model gave or the end of its log; or time is up.
        """
        deadline = time.monotonic() + timeout_s
        while not self._all_ready() and not (give_up and give_up.is_set()):
            if self.wait(POLL_S) is not None or self._lost_a_port():
                self._restart_or_raise()
            elif time.monotonic() > deadline:
                raise ServerError(f"the server was not ready within {timeout_s:g} s", useful_lines(self.log_text()))

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the server to end. Returns its exit status, or None when it still runs after ``timeout_s``."""
        assert self._guard is not None, "not started"
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask a running server to drain and end; returns at once."""
        if self.running:
            assert self._guard is not None
            self._guard.send_signal(signal.SIGTERM)

    def stop(self, drain_s: float | None = None) -> int | None:
        """Drain for at most ``drain_s`` seconds (the server's own exit timeout by default), kill what is left, clean up.

        Returns the exit status: 0 after a full drain, 137 when it had to be killed, None when nothing was running.
        """
        if self._guard is None:
            self._clean_up()
            return None
        limit = self._drain_limit() if drain_s is None else min(drain_s, self._drain_limit())
        self.terminate()
        if self.wait(limit) is None:
            self._guard.send_signal(signal.SIGQUIT)
        status = self.wait(CLEANUP_MARGIN_S)
        self._clean_up()
        return status

    def _drain_limit(self) -> float:
        return self.options.exit_timeout_s + CLEANUP_MARGIN_S / 2

    def _spawn(self, command: list[str], server_name: str, unseen: Mapping[str, str]) -> None:
        path, work_dir = self.log_file, self._work_dir
        assert path is not None and work_dir is not None
        reader, self._lifeline = os.pipe()
        plan = self.options.plan
        # A launcher that is asked to end kills its job within a second, so the guard asks the server behind it.
        drained = server_name if plan.launcher else ""
        held = (str(work_dir.path), str(work_dir.lock))
        arguments = [str(reader), str(self._drain_limit()), self.shm_prefix, drained, *held, "--", *command]
        try:
            self._log_begin = _begin_log(path)
            with path.open("ab") as log:  # the front end adds its lines to it too
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=server_environment(
                        plan.over(without_key(os.environ)),
                        {**self._own_environment(), **self.options.environment, **unseen},
                    ),
                    pass_fds=(reader, work_dir.lock),
                    start_new_session=True,
                )
        except OSError as error:
            raise ServerError(f"the server cannot be started: {error}") from error
        finally:
            os.close(reader)
        with self._stdout() as handshake:
            line = handshake.readline()
        if not line:
            self._guard.wait(CLEANUP_MARGIN_S)
            raise ServerError("the server cannot be started", useful_lines(self.log_text()))
        self.pid = int(line)

    def _own_environment(self) -> dict[str, str]:
        """What this server's models are told: where notices are, and what the loop says to the engines."""
        closed = {LOOP_KEY_VARIABLE: self.loop_key} if self.loop_key else {}
        return {NOTICE_VARIABLE: str(self.notice_file), **closed}

    def _stdout(self) -> IO[bytes]:
        assert self._guard is not None and self._guard.stdout is not None
        return self._guard.stdout

    def _restart_or_raise(self) -> None:
        lost, chosen = self._lost_a_port(), 0 in (self.options.http_port, self.options.grpc_port, self.options.metrics_port)
        status, log = self.stop(0.0), self._last_log
        if lost and chosen and self._attempts < PORT_ATTEMPTS:
            self.start()
            return
        what = "the server cannot listen" if lost else f"the server ended with status {status} before it was ready"
        raise ServerError(what, useful_lines(log))

    def _lost_a_port(self) -> bool:
        """Triton ends when it cannot listen for requests, but goes on without metrics: only its log tells."""
        return _PORT_TAKEN.search(self.log_text()) is not None

    def _all_ready(self) -> bool:
        models = sorted(path.name for path in self.repository.iterdir() if (path / "config.pbtxt").is_file())
        paths = ["/v2/health/live", "/v2/health/ready", *(f"/v2/models/{name}/ready" for name in models)]
        answered = self._is_ours() and all(self._get(path) is not None for path in paths)
        return answered and self._get("/metrics", self.ports.metrics) is not None

    def _is_ours(self) -> bool:
        """Whether the answers come from this server, and not from another that took the port first."""
        try:
            metadata = json.loads(self._get("/v2") or b"null")
        except ValueError:
            return False
        return isinstance(metadata, dict) and metadata.get("name") == self.shm_prefix.strip("_")

    def _get(self, path: str, port: int | None = None) -> bytes | None:
        """The body of a good answer. Each probe closes its connection: an open one would hold up a drain until its limit."""
        connection = http.client.HTTPConnection(self._client_host, port or self.ports.http, timeout=5)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _clean_up(self) -> None:
        """Leave nothing, also when the guard itself was killed or hangs."""
        self.log_text()
        if self._guard is not None and self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()
        if self.pid is not None:
            guard.kill_group(self.pid)
        guard.remove_shared_memory(self.shm_prefix)
        if self._lifeline is not None:
            os.close(self._lifeline)
        if self._work_dir is not None:
            self._work_dir.remove()
        self._guard = self._lifeline = self._work_dir = self.pid = None
