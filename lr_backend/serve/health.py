"""Whether a server says that it is ready. Standard library only: a container's health check runs it every few seconds.

``python -I -S health.py [URL]`` prints nothing and exits with 0 if so; else it prints the reason and exits with 1.
"""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
_PATH = "/v2/health/ready"


def why_not_ready(url: str = DEFAULT_URL, timeout_s: float = TIMEOUT_S) -> str | None:
    """None if the server at ``url`` has every model ready, else why not.

    The connection is closed after the answer: an open one would hold up a drain until its limit. No proxy is asked.
    """
    try:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 8000, timeout=timeout_s)
    except ValueError as error:
        return f"{url}: {error}"
    if parts.scheme != "http" or not parts.hostname:
        return f"{url}: not of the form http://host:port"
    try:
        connection.request("GET", _PATH, headers={"Connection": "close"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if status == 200 else f"{url} is not ready: HTTP {status}"


def main(arguments: list[str]) -> int:
    reason = why_not_ready(arguments[0] if arguments else DEFAULT_URL)
    if reason is not None:
        sys.stdout.write(f"{reason}\n")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
