"""``lookahead serve`` as a process of its own, and what it shows outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openai import OpenAI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

BOUND_S = 180.0
"""Of every wait; reached only by a bug."""


@dataclass(frozen=True)
class Served:
    """``url``: of the OpenAI API."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc

    def page(self) -> dict[str, Metric]:
        """What Prometheus is told, by family."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=BOUND_S) as answer:
            text = answer.read().decode()
        names = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
        assert len(names) == len(set(names)), "a family stands there twice"
        # Counters by the name that they are asked for, which the parser cuts; Triton's own are not all called _total.
        whole = {name.removesuffix("_total"): name for name in names}
        return {whole[family.name]: family for family in text_string_to_metric_families(text)}

    def events(self) -> list[dict[str, Any]]:
        """Lines of the log that are an event. The last one may still be being written."""
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=BOUND_S)


def said_when_ready(process: subprocess.Popen[bytes], printed: Path, last: str = "ask it something") -> str:
    """All that ``lookahead serve`` has printed once it has said ``last``: it can be asked."""
    deadline = time.monotonic() + BOUND_S
    while last not in (said := printed.read_text(encoding="utf-8")):
        assert process.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.1)
    return said


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Served]:
    """The demo by the command itself, on free ports, with these options and variables."""
    printed = folder / "printed"
    ports = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--repository", str(folder / "demo"), "--spec", "demo"]
    with printed.open("wb") as output:
        around = {**os.environ, **environment}
        process = subprocess.Popen([*command, *ports, *options], stdout=output, stderr=subprocess.STDOUT, env=around)
    try:
        said = said_when_ready(process, printed)
        found = re.search(r"http://\S+/v1\b", said)
        assert found is not None, said
        yield Served(found[0], process, folder / "demo.log")
    finally:
        process.terminate()
        try:
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()
