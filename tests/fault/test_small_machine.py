"""``lookahead serve`` where a machine has little: a log on a disk that fills up, 64 MB of shared memory. And its secrets."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployed import BOUND_S, said_when_ready
from tests.support.tiny_models import make_tiny_models, write_spec

ROOT = Path(__file__).parents[2]
OWN_MOUNTS = ("unshare", "--mount", "--propagation", "private")


def may_mount() -> bool:
    try:
        return subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, timeout=BOUND_S).returncode == 0
    except OSError:
        return False


pytestmark = [pytest.mark.integration, pytest.mark.skipif(not may_mount(), reason="this user may not mount a disk of its own")]

ADMIN_KEY, API_KEY, PROMPT = "canary-administrator-7d1e", "canary-api-key-93b0", "canary quokka of Zanzibar"
SECRETS = (ADMIN_KEY, API_KEY, PROMPT)
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "lookahead": {"mode": "lossless", "deterministic": True}}


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[bytes]
    printed: Path
    log_disk: Path
    """As the server sees it; only its own processes do."""
    door: str
    http: str
    metrics: str

    @property
    def log(self) -> Path:
        return self.as_server_sees(self.log_disk / "log")

    def as_server_sees(self, path: Path) -> Path:
        return Path(f"/proc/{self.process.pid}/root{path}")

    def ask(self, content: str = "q", key: str = API_KEY, url: str = "", **fields: Any) -> tuple[int, str, bytes]:
        """(status, headers, body)."""
        body = json.dumps({**GREEDY, "messages": [{"role": "user", "content": content}], **fields}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        return fetch(urllib.request.Request(f"{url or self.door}/chat/completions", body, headers))

    def text(self) -> str:
        status, _, body = self.ask()
        assert status == 200, body
        message = json.loads(body)["choices"][0]["message"]
        return f"{message.get('reasoning_content')}{message['content']}"


def fetch(request: urllib.request.Request | str, context: ssl.SSLContext | None = None) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=BOUND_S, context=context) as answer:
            return answer.status, str(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, str(error.headers), error.read()


def fill(path: Path) -> None:
    """A disk to its last page."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    assert os.statvfs(path).f_bavail == 0


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it may have ended
            yield path.read_bytes()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("small")
    spec = write_spec(folder / "tiny.toml", make_tiny_models(folder / "models"), exit_timeout_s=60)
    keys, printed, disk = folder / "keys", folder / "printed", folder / "disk"
    keys.write_text(API_KEY + "\n")
    disk.mkdir()
    command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--spec", str(spec), "--log-file", str(disk / "log")]
    command += [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    command += ["--openai-keys", str(keys), "--repository", str(folder / "repository")]
    mounts = f"mount -t tmpfs -o size=1m tmpfs {disk} && mount -t tmpfs -o size=64m tmpfs /dev/shm"
    around = {**os.environ, "LOOKAHEAD_ADMIN_KEY": ADMIN_KEY}
    with printed.open("wb") as output:
        started = [*OWN_MOUNTS, "sh", "-c", f'{mounts} && exec "$@"', "sh", *command]
        process = subprocess.Popen(started, stdout=output, stderr=subprocess.STDOUT, env=around)
    try:
        said = said_when_ready(process, printed)
        door = re.search(r"http://\S+/v1\b", said)
        http, metrics = (re.search(rf"{name} +(http://\S+)", said) for name in ("HTTP", "Triton's metrics"))
        assert door is not None and http is not None and metrics is not None, said
        yield Served(process, printed, disk, door[0], http[1], metrics[1])
    finally:
        process.terminate()
        assert process.wait(BOUND_S) == 0, printed.read_text(encoding="utf-8")


def test_secrets_are_in_no_answer_metric_or_log(served: Served) -> None:
    """The prompt stands in no error and no line; nobody is told a key. Triton reads the administrator's from its own command line
    and from nowhere else, so there it is."""
    assert served.ask(PROMPT)[0] == 200
    heard = [
        served.ask(PROMPT, stop=[PROMPT] * 17),
        served.ask(PROMPT, role=PROMPT),
        served.ask(PROMPT * 3000),
        served.ask("q", key=f"wrong {PROMPT}"),
        fetch(f"{served.door}/models/{API_KEY[:6]}"),
        fetch(f"{served.door.removesuffix('/v1')}/metrics"),
        fetch(served.metrics),
        fetch(f"{served.http}/v2/repository/index"),
    ]
    assert [status for status, _, _ in heard[:5]] == [400, 400, 400, 401, 401]
    others = [line for line in command_lines() if b"tritonserver" not in line]
    seen = [
        *(text for _, headers, body in heard for text in (headers.encode(), body)),
        served.log.read_bytes(),
        served.printed.read_bytes(),
        *others,
    ]
    assert served.log.read_bytes().count(b"request_failed") + served.log.read_bytes().count(b"http_request") > 3
    found = [(secret, text[:80]) for secret in SECRETS for text in seen if secret.encode() in text]
    assert found == []


def test_it_serves_with_64_mb_of_shared_memory(served: Served) -> None:
    room = os.statvfs(served.as_server_sees(Path("/dev/shm")))
    assert room.f_blocks * room.f_frsize == 64 << 20
    answers = {served.text() for _ in range(8)}
    assert len(answers) == 1
    assert served.ask("q" * 900, n=4)[0] == 200


def test_it_answers_on_when_the_disk_of_its_log_is_full(served: Served) -> None:
    expected = served.text()
    filler = served.as_server_sees(served.log_disk / "filler")
    size = served.log.stat().st_size
    fill(filler)
    for _ in range(200):  # more lines than a page of the log's file may still have room for
        assert served.ask(colour=1)[0] == 400
    assert served.log.stat().st_size < size + (1 << 16)
    full = served.log.stat().st_size
    assert {served.text() for _ in range(3)} == {expected}
    assert served.log.stat().st_size == full, "no line found room"
    filler.unlink()
    assert served.text() == expected
    deadline = time.monotonic() + BOUND_S
    while served.log.stat().st_size == full:
        assert time.monotonic() < deadline, "lines are written again"
        time.sleep(0.1)
