"""A deployment of the demo's models that is served, dies, and is started anew."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.kit.held import name_of
from bench.kit.serving import START_S, demo_spec, said_when_served
from lr_backend.build.base import Layout

READY_S = 5.0
SHM = Path("/dev/shm")
NGINX = """
daemon off;
pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  upstream lookahead {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://lookahead;
      proxy_next_upstream error timeout http_503 non_idempotent;
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


@dataclass
class Stand:
    """A deployment served by ``lookahead serve``, which a supervisor starts anew when it ends by itself, on the same ports."""

    layout: Layout
    folder: Path
    grpc_port: int = 0
    openai_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    statuses: list[int] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _supervisor: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.openai_port}/v1"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.layout}.out"

    def start(self) -> None:
        self.grpc_port, self.openai_port = free_port(), free_port()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()
        self.wait_served()

    def wait_unready(self) -> None:
        """Until a balancer would be told to ask elsewhere."""
        deadline = time.monotonic() + START_S
        while self._is_ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"still ready after {START_S:g} s")
            time.sleep(0.01)

    def blocks_held(self) -> int:
        """Blocks of the engines' KV caches that sequences in flight hold; counts are up to a second old."""
        page = (self._get("/metrics") or b"").decode()
        return sum(int(float(found)) for found in re.findall(r"^lr_engine_blocks_used\{.*?\} (\S+)$", page, re.MULTILINE))

    def _is_ready(self) -> bool:
        return self._get("/ready") is not None

    def _get(self, path: str) -> bytes | None:
        """The body of a good answer of the front end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.openai_port, timeout=READY_S)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.read() if answer.status == 200 else None
        return None

    def wait_served(self) -> None:
        said_when_served(self.output)

    def stop(self) -> None:
        self._stopping.set()
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
        if self._supervisor is not None:
            self._supervisor.join(START_S)

    def terminate(self) -> None:
        """Tell it to end, as an orchestrator does before it starts the next."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def victim(self, name: str) -> psutil.Process | None:
        """The process of a model, of the front end, or Triton's own, if it runs."""
        for each in self.family()[1:]:
            with suppress(psutil.Error):
                if name_of(each) == name:
                    return each
        return None

    def family(self) -> list[psutil.Process]:
        """The serving process and all below it; none between an end and the next start."""
        with suppress(psutil.NoSuchProcess):
            if self.process is not None:
                parent = psutil.Process(self.process.pid)
                return [parent, *parent.children(recursive=True)]
        return []

    def _supervise(self) -> None:
        command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--spec", str(self._spec())]
        command += ["--http-port", "0", "--metrics-port", "0"]
        command += ["--openai-port", str(self.openai_port), "--grpc-port", str(self.grpc_port)]
        while not self._stopping.is_set():
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
                if self._stopping.is_set():  # since the loop began its turn: whoever said so may not have seen this process
                    self.process.terminate()
                self.statuses.append(self.process.wait())

    def _spec(self) -> Path:
        """The demo's spec in this layout, in a folder of its own."""
        spec = demo_spec()
        text = spec.path.read_text(encoding="utf-8").replace(f'layout = "{spec.server.layout}"', f'layout = "{self.layout}"')
        for role in ("target", "draft", "judge"):
            text = text.replace(f'"demo/checkpoints/{role}"', json.dumps(str(spec.root / "demo" / "checkpoints" / role)))
        path = self.folder / "engines" / f"{self.layout}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace('name = "demo"', f'name = "demo.{self.layout}"'), encoding="utf-8")
        return path


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@contextmanager
def standing(layout: Layout, folder: Path) -> Iterator[tuple[Stand, list[str]]]:
    """A stand, and after it what it has left behind: processes, folders, and names in shared memory.

    It is stopped however the block ends, and where it does not start.
    """
    left: list[str] = []
    before, folders = set(os.listdir(SHM)), set(work_folders())
    stand, family = Stand(layout, folder), list[psutil.Process]()
    try:
        stand.start()
        family += stand.family()
        yield stand, left
    finally:
        family += stand.family()
        stand.stop()
        _, alive = psutil.wait_procs(family, timeout=10.0)
        left += [f"process {process.pid}" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        left += orphaned(set(os.listdir(SHM)) - before)
        left += sorted(set(work_folders()) - folders)


@contextmanager
def proxied(folder: Path, stands: Sequence[Stand]) -> Iterator[str]:
    """The URL of an nginx before the OpenAI APIs of several servers. What one refuses or does not take, it asks of the next."""
    port = free_port()
    servers = "".join(f"server 127.0.0.1:{stand.openai_port} max_fails=0; " for stand in stands)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, servers=servers), encoding="utf-8")
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config), "-e", str(folder / "nginx.err")])
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(START_S)


def words_of_all() -> list[str]:
    """The command lines of all processes on this machine, word by word."""
    return [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()]


def work_folders() -> list[str]:
    """Of servers that run no more; a running one is told its folder."""
    words = words_of_all()
    found = Path(tempfile.gettempdir()).glob("lookahead-triton-*")
    return [path.name for path in found if not any(path.name in word for word in words)]


def orphaned(names: Collection[str]) -> list[str]:
    """Names in shared memory of servers that run no more; they begin with the server's id."""
    running = {word.removeprefix("--id=") for word in words_of_all() if word.startswith("--id=")}
    return [name for name in names if name.startswith("lookahead_") and name.rpartition("_")[0] not in running]
