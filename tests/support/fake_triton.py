"""A program that behaves like tritonserver from the outside, and misbehaves on demand.

Told to listen nowhere, it is a rank that follows another: it writes its process id and its machine to ``FAKE_PIDS`` with its own
name behind it, and waits.

``FAKE_MODE``: ``ok``; ``stubborn`` ignores SIGTERM; ``dies`` fails to load a model; ``exits`` ends without a reason;
``silent`` never opens its ports; ``port`` finds its port taken unless ``FAKE_MARKER`` exists, and makes it.
Like the real one it leaves children behind when it is killed: one in its process group, one that left the group. Their
process ids and its own go to ``FAKE_PIDS`` once all run, so that a test can wait for their end.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

MODE = os.environ.get("FAKE_MODE", "ok")


def option(name: str) -> str:
    return next(argument.split("=", 1)[1] for argument in sys.argv if argument.startswith(f"--{name}="))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"name": option("id")}).encode())

    def log_message(self, *_: object) -> None:
        pass


def leave_traces() -> None:
    prefix = next(part.split("=")[-1] for part in sys.argv if "shm-region-prefix-name" in part)
    for name in (f"{prefix}region", f"sem.{prefix}lock"):
        Path("/dev/shm", name).touch()
    idle = [sys.executable, "-c", "import signal; signal.pause()"]
    children = [subprocess.Popen(idle), subprocess.Popen(idle, start_new_session=True)]
    target = Path(os.environ["FAKE_PIDS"])
    partial = target.with_suffix(".partial")
    partial.write_text(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
    partial.rename(target)


def serve() -> None:
    addresses = [("127.0.0.1", int(option(name))) for name in ("metrics-port", "http-port")]
    try:
        servers = [http.server.ThreadingHTTPServer(address, Handler) for address in addresses]
    except OSError:
        print(f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{option('http-port')}' already in use")
        sys.exit(1)
    threading.Thread(target=servers[0].serve_forever, daemon=True).start()
    servers[1].serve_forever()


def follow() -> None:
    rank = option("id").rpartition("_")[2]
    target = Path(f"{os.environ['FAKE_PIDS']}.{rank}")
    partial = target.with_suffix(f".partial-{rank}")
    partial.write_text(f"{os.getpid()} {socket.gethostname()}")
    partial.rename(target)
    signal.pause()


def end(*_: object) -> None:
    print("Signal (15) received.", flush=True)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if MODE == "stubborn" else end)
    if "--allow-http=false" in sys.argv:
        follow()
    if MODE == "dies":
        print('I0101 model_lifecycle.cc:472] "loading: target:1"')
        print("+----+\n| ab |\n+----+")
        print("E0101 model_lifecycle.cc:642] \"failed to load 'target' version 1: Internal: no\\nsuch file\"")
        sys.exit(1)
    if MODE == "exits":
        print("\n".join(f"line {number}" for number in range(40)))
        sys.exit(3)
    marker = Path(os.environ.get("FAKE_MARKER", "/"))
    if MODE == "port" and not marker.exists():
        marker.touch()
        print(f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{option('http-port')}' already in use")
        sys.exit(1)
    leave_traces()
    if MODE == "silent":
        signal.pause()
    serve()


if __name__ == "__main__":
    main()
