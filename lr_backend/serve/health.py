"""Whether a server says that it is ready. Standard library only: a container's health check runs it every few seconds.

``python -I -S health.py [--end-after N] [URL]`` prints nothing and exits with 0 if so; else it prints the reason and exits
with 1.

Docker restarts a container that has ended, and leaves one that is unhealthy alone. So with ``--end-after N`` process 1 is asked
to end (SIGTERM) once a server that was ready has failed N checks in a row, and again after N more: then it no longer drains. A
server that still loads is left to its own limit.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:9000/ready"
"""The front end's. It knows what Triton does not: that the server drains, and that it answers without draft or judge."""
TIMEOUT_S = 5.0
MEMORY = Path("/tmp/lookahead-health")
"""Which process 1 was ready, and how many checks have failed since; it outlives a restart where /tmp does."""
WAITS_FOR = "x-lookahead-waits-for"
"""Header of an answer that says not ready: for want of whom, where that is another server, or is being loaded anew."""
_TRITONS = "/v2/health/ready"
"""Of an address without a path: of a server of single roles, which has no front end."""


def why_not_ready(url: str = DEFAULT_URL, timeout_s: float = TIMEOUT_S) -> str | None:
    """None if the server at ``url`` says that it is ready, else why not."""
    return look(url, timeout_s)[0]


def look(url: str, timeout_s: float = TIMEOUT_S) -> tuple[str | None, bool]:
    """(why the server at ``url`` is not ready, None if it is; whether it only waits for what a new start would not bring).

    The connection is closed after the answer: an open one would hold up a drain until its limit. No proxy is asked.
    """
    try:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 8000, timeout=timeout_s)
    except (ValueError, http.client.HTTPException) as error:
        return f"{url}: {error}", False
    if parts.scheme != "http" or not parts.hostname:
        return f"{url}: not of the form http://host:port or http://host:port/path", False
    try:
        connection.request("GET", parts.path.rstrip("/") or _TRITONS, headers={"Connection": "close"})
        answer = connection.getresponse()
        status, waits_for = answer.status, answer.getheader(WAITS_FOR, "")
    except (OSError, ValueError, http.client.HTTPException) as error:  # a name that is none is a ValueError
        return f"{url} does not answer: {error or type(error).__name__}", False
    finally:
        connection.close()
    if status == 200:
        return None, False
    return f"{url} is not ready: HTTP {status}{f', it waits for the {waits_for}' if waits_for else ''}", bool(waits_for)


def num_failures(ready: bool, process: str, memory: Path) -> int:
    """Checks in a row, this one counted, that ``process`` has failed since it was ready; 0 while it has never been."""
    known, _, before = memory.read_text(encoding="ascii", errors="replace").partition(" ") if memory.exists() else ("", "", "")
    failures = 0 if ready or known != process or not before.isdecimal() else int(before) + 1
    if ready or known == process:
        # A full /tmp is no reason to call a server that is ready unhealthy.
        with suppress(OSError):
            memory.write_text(f"{process} {failures}", encoding="ascii")
    return failures


def _process_1() -> str:
    """What tells it from the process 1 of an earlier start: when it began, in clock ticks of the machine."""
    return Path("/proc/1/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="health.py")
    parser.add_argument("--end-after", type=int, metavar="N", default=0)
    parser.add_argument("url", nargs="?", default=DEFAULT_URL)
    options = parser.parse_args(arguments)
    reason, is_well = look(options.url)
    if options.end_after > 0:
        # A new start of this server would bring no other one back.
        failures = num_failures(reason is None or is_well, _process_1(), MEMORY)
        if failures and failures % options.end_after == 0:
            os.kill(1, signal.SIGTERM)
            reason = f"{reason}; process 1 is asked to end after {failures} failures"
    if reason is not None:
        sys.stdout.write(f"{reason}\n")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
