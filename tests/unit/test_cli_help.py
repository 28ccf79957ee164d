"""Help pages in words that people write, the version, and the line that a served deployment prints to try."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lr_client
import pytest
import yaml
from lr_client.cli import app as client
from rich.console import Console
from typer.testing import CliRunner

import lr_backend
from lr_backend.cli import serve
from lr_backend.cli.app import app
from lr_backend.cli.help import in_words, range_in_words
from lr_backend.frontend.app import GRACE_S
from lr_backend.serve.warmup import QUESTION, WarmupAnswer, curl_line

PROJECT = Path(__file__).resolve().parents[2]
COMMANDS = ("init", "build", "plan", "emulate", "workload", "serve", "node", "doctor", "health", "trace", "version")


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_no_help_page_shows_a_type_as_a_program_has_it(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    assert not re.search(r"<(bool|str|int|float|path|list)|list\[|<=x", text), text


def test_values_are_written_as_people_write_them() -> None:
    text = help_of("serve")
    assert re.search(r"--http-port +PORT \[0 to 65535\]", text)
    assert re.search(r"--log-file +FILE ", text)
    assert re.search(r"--help +Show", text)
    assert re.search(r"--mode +auto\|ar\|sd", help_of("plan"))


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ("<bool>", ""),
        ("<str>", "TEXT"),
        ("<int range>", "NUMBER"),
        ("<list[path]>", "PATH"),
        ("<a|b>", "a|b"),
        ("<list[a|b]>", "a|b"),
    ],
)
def test_types_in_words(shown: str, words: str) -> None:
    assert in_words(shown) == words


@pytest.mark.parametrize(
    ("shown", "words"), [("0<=x<=9", "0 to 9"), ("x>=1", "1 or more"), ("x<=5", "5 or less"), ("odd", "odd")]
)
def test_ranges_in_words(shown: str, words: str) -> None:
    assert range_in_words(shown) == words


def test_the_version_is_said_by_an_option_and_a_command() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"lookahead {lr_backend.__version__}\n"
    assert f"lookahead {lr_backend.__version__}, Python" in CliRunner().invoke(app, ["version"]).output


def test_the_line_to_try_stands_alone_and_can_be_copied() -> None:
    written = io.StringIO()
    server: Any = SimpleNamespace(http_url="h:1", grpc_url="h:2", metrics_url="h:3", log_file=Path("/log"))
    deployment: Any = SimpleNamespace(name="demo", runs_loop=True, remotes={}, loop_config=lambda: SimpleNamespace(pace=""))
    serve._say_served(Console(file=written, width=60), server, deployment, WarmupAnswer("", "stop", {}))
    lines = written.getvalue().splitlines()
    assert lines[-1] == curl_line("h:1")
    assert shlex.split(lines[-1])[:3] == ["curl", "-s", "http://h:1/v2/models/lookahead/generate"]


def test_the_line_for_openais_client_waits_as_long_as_an_answer_may_take() -> None:
    """Else that client gives up before the server, and has the same answer written anew, twice."""
    written = io.StringIO()
    server: Any = SimpleNamespace(http_url="h:1", grpc_url="h:2", metrics_url="h:3", log_file=Path("/log"))
    config = SimpleNamespace(pace="", timeouts=SimpleNamespace(request_s=900.0))
    deployment: Any = SimpleNamespace(name="demo", runs_loop=True, remotes={}, loop_config=lambda: config)
    front: Any = SimpleNamespace(url="http://h:4/v1", settings=SimpleNamespace(keys_file=None))
    serve._say_served(Console(file=written, width=60), server, deployment, WarmupAnswer("", "stop", {}), front)
    python = f"{shlex.quote(sys.executable)} -c"
    (line,) = (shlex.split(line) for line in written.getvalue().splitlines() if line.startswith(python))
    (made,) = (call for call in ast.walk(ast.parse(line[2])) if isinstance(call, ast.Call) and ast.unparse(call.func) == "OpenAI")
    assert {word.arg: ast.literal_eval(word.value) for word in made.keywords}["timeout"] > 900 + 2 * GRACE_S


def test_the_documentation_asks_the_same_question() -> None:
    assert QUESTION in (PROJECT / "README.md").read_text(encoding="utf-8")


def test_the_clients_help_is_written_so_too() -> None:
    text = CliRunner().invoke(client, ["ask", "--help"], env={"COLUMNS": "160"}).output
    assert not re.search(r"<(bool|str|int|float|path|list)|list\[", text), text
    assert re.search(r"--max-tokens +NUMBER", text) and re.search(r"--trace-file +FILE", text)


def test_the_version_is_the_same_everywhere() -> None:
    version = lr_backend.__version__
    assert lr_client.__version__ == version
    assert yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    changes = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == version, "the newest entry of the changelog"
    assert f"latest minor version, today {version.rpartition('.')[0]}." in (PROJECT / "SECURITY.md").read_text(encoding="utf-8")
    assert (PROJECT / "client" / "LICENSE").read_bytes() == (PROJECT / "LICENSE").read_bytes()


@pytest.mark.parametrize(("given", "used"), [(None, ""), ("http://proxy:3128", "http://proxy:3128")])
def test_parts_of_a_deployment_call_one_another_past_a_proxy_for_the_web(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    """Unless an operator names one for gRPC."""
    monkeypatch.delenv("grpc_proxy", raising=False)
    if given is not None:
        monkeypatch.setenv("grpc_proxy", given)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert CliRunner().invoke(app, ["version"]).exit_code == 0
    assert os.environ.get("grpc_proxy") == used  # noqa: SIM112 - gRPC's own name


@pytest.mark.parametrize("one", [app, client], ids=["lookahead", "lookahead-client"])
def test_what_a_terminal_has_no_letter_for_is_replaced(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model writes what it likes, and half an answer with a traceback is worth less than a question mark."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with pytest.raises(SystemExit):
        one(["no-such-command"])
    one.registered_callback.callback()
    for stream in streams:
        stream.write("x \u2192 1/2")
        stream.flush()
        assert stream.buffer.getvalue().endswith(b"x ? 1/2")  # type: ignore[attr-defined]
