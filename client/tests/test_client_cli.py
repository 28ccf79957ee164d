import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import WAIT_S, Abort, FakeServer, Gate, Reply
from grpc import StatusCode
from rich.console import Console
from typer.testing import CliRunner, Result

from lr_client import __version__
from lr_client.cli import app
from lr_client.fields import FIELDS
from lr_client.render import ConsoleRenderer, closing_line
from lr_client.types import Event, StepEvent, StepRecord, TextEvent, Usage

GREEN, YELLOW, BLUE = "\x1b[32m", "\x1b[33m", "\x1b[34m"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FORCE_COLOR", "NO_COLOR", "LOOKAHEAD_URL", "LOOKAHEAD_MODEL", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield


def call(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, arguments, env=env)


def test_steps_are_coloured_by_their_origin(server: FakeServer) -> None:
    result = call("ask", "steps", "--url", server.url, FORCE_COLOR="1")
    assert result.exit_code == 0
    for colour, text in ((GREEN, "one. "), (YELLOW, "two. "), (BLUE, "three. ")):
        assert f"{colour}{text}\x1b[0m" in result.output
    assert f"{GREEN}■ draft accepted" in result.output  # the legend
    assert server.request().inputs["trace"] == [True]


def test_no_terminal_no_colour(server: FakeServer) -> None:
    result = call("ask", "steps", "--url", server.url)
    assert "\x1b" not in result.output
    assert "■" not in result.output
    reasoning, rule, *answer, closing = result.output.splitlines()
    assert reasoning == "one. two. three. "
    assert "answer" in rule
    assert answer == ["42"]
    assert closing == (
        "20.0 tokens/s · 1.50 s · steps accepted 50% · tokens accepted 25% · mean accepted length 1.0"
        " · 12 wasted tokens · finish: stop · without judge"
    )


def test_a_text_without_reasoning_is_shown_once(server: FakeServer) -> None:
    result = call("ask", "plain", "--no-trace", "--url", server.url)
    assert result.output.splitlines()[0] == "ab"
    assert "tokens accepted - " in result.output
    assert server.request().inputs["trace"] == [False]


def test_what_a_model_writes_cannot_steer_the_terminal(server: FakeServer) -> None:
    result = call("ask", "escapes", "--url", server.url)
    assert result.output.splitlines()[0] == "[31mred [bold]:smile:"


def test_the_trace_is_saved_as_it_came(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = call("ask", "traced", "--no-trace", "--trace-file", str(file), "--url", server.url)
    assert result.exit_code == 0
    assert file.read_text(encoding="utf-8") == '{"schema": "é"}'
    assert server.request().inputs["trace"] == [True]


@pytest.mark.parametrize(
    ("question", "folder", "words"),
    [
        ("plain", ".", "ServerError: the server sent no trace"),
        ("traced", "missing", "ClientError: cannot write"),
    ],
)
def test_a_trace_that_cannot_be_saved_is_one_line(
    server: FakeServer, tmp_path: Path, question: str, folder: str, words: str
) -> None:
    file = tmp_path / folder / "trace.json"
    result = call("ask", question, "--trace-file", str(file), "--url", server.url)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith(words)
    assert len(server.requests) == (folder != "missing")  # nothing is asked whose trace would be lost
    assert not file.exists()  # an empty one would be read as a trace


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(
    ("text", "finish", "warned"),
    [
        ("<think>so", "length", "no answer: cut before it began (finish: length); raise --max-tokens\n"),
        ("<think>so", "deadline", "no answer: cut before it began (finish: deadline); raise --deadline\n"),
        ("<think>so</think>4", "length", ""),
        ("4", "length", ""),
        ("<think>so</think>", "stop", ""),
    ],
)
def test_a_cut_in_the_reasoning_is_warned_of(
    server: FakeServer, more: list[str], text: str, finish: str, warned: str
) -> None:
    server.scripts["cut"] = [Reply(text=text), Reply(finish=finish)]
    result = call("ask", "cut", *more, "--url", server.url)
    assert (result.exit_code, result.stderr) == (0, warned)
    assert warned not in result.stdout or not warned


def test_json_prints_one_event_a_line(server: FakeServer) -> None:
    result = call("ask", "steps", "--json", "--url", server.url, FORCE_COLOR="1")
    events = [json.loads(line) for line in result.output.splitlines()]
    assert [event["event"] for event in events] == ["step", "text"] * 3 + ["text", "finish"]
    assert events[0]["origin"] == "draft"
    assert events[1]["text"] == "one. "
    assert events[-1]["finish_reason"] == "stop"
    assert set(events[-1]["usage"]) == set(Usage.__dataclass_fields__)


@pytest.mark.parametrize(
    ("flags", "traced"), [(["--trace"], '{"schema": "é"}'), ([], None), (["--no-trace"], None)]
)
def test_json_has_the_trace_that_was_asked_for(
    server: FakeServer, flags: list[str], traced: str | None
) -> None:
    result = call("ask", "traced", "--json", *flags, "--url", server.url)
    *_, finish = (json.loads(line) for line in result.output.splitlines())
    assert (finish["event"], finish.get("trace")) == ("finish", traced)


def test_the_version_is_the_packages() -> None:
    result = call("--version")
    assert (result.exit_code, result.output) == (0, f"lookahead-client {__version__}\n")


def test_the_help_says_what_the_command_is_for() -> None:
    assert "Ask a lookahead reasoning server." in call("--help").output


def test_the_closing_line_says_what_audits_found() -> None:
    line = closing_line("stop", Usage(num_audited=20, num_false_accepts=1, risk_budget_spent=True))
    assert line.endswith("finish: stop · 1 of 20 audited steps wrong · risk budget spent")


VALUES: dict[str, Any] = {"BOOL": True, "INT32": 3, "UINT64": 2**64 - 1, "FP32": 0.5, "BYTES": "lr"}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_an_option(server: FakeServer, name: str) -> None:
    value = VALUES[FIELDS[name].datatype]
    flag = f"--{name.removesuffix('_s').replace('_', '-')}"
    given = [flag] if value is True else [flag, str(value)]
    result = call("ask", "plain", *given, LOOKAHEAD_URL=server.url)
    assert result.exit_code == 0
    assert server.request().inputs == {"text_input": ["plain"], "trace": [True], name: [value]}


def test_options_are_combined_repeated_and_denied(server: FakeServer) -> None:
    flags = "--mode lossless --max-depth 2 --stop x --stop y --no-deterministic --no-stream --system brief"
    result = call("ask", "plain", *flags.split(), LOOKAHEAD_URL=server.url)
    assert result.exit_code == 0
    inputs = server.request().inputs
    assert json.loads(inputs.pop("messages")[0])[0] == {"role": "system", "content": "brief"}
    assert inputs == {
        "mode": ["lossless"],
        "max_depth": [2],
        "stop": ["x", "y"],
        "deterministic": [False],
        "stream": [False],
        "trace": [True],
    }


def rendered(events: list[Event]) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    renderer = ConsoleRenderer(console, legend=False)
    for event in events:
        renderer.show(event)
    renderer.close()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_whole_answer_has_the_colour_of_none_of_its_steps() -> None:
    draft, target = (
        StepEvent(StepRecord(index=0, origin=origin, text="?")) for origin in ("draft", "target")
    )
    streamed = rendered([draft, TextEvent("one "), target, TextEvent("two")])
    assert GREEN in streamed and BLUE in streamed
    assert "\x1b[" not in rendered([draft, target, TextEvent("one two")])


def test_help_says_what_each_field_means() -> None:
    words = " ".join(call("ask", "--help", COLUMNS="1000").output.split())
    assert all(" ".join(field.help.split()) in words for field in FIELDS.values())
    assert "auto|ar|sd|lr|lr_sd|lossless" in words


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["ask", "overloaded"], 1, "Overloaded: 64 requests"),
        (["ask", "invalid"], 2, "InvalidRequest: width=99"),
        (["ask", "held", "--timeout", "0.1"], 1, "RequestTimeout: "),
        (["ask", "plain", "--timeout", "0"], 2, "InvalidRequest: timeout_s"),
        (["ask", "plain", "--url", "http://localhost:1"], 2, "InvalidRequest: url"),
        (["ask", "plain", "--url", "localhost:1"], 1, "ServerUnreachable: no answer from localhost:1"),
        (["check", "--url", "localhost:1"], 1, "ServerUnreachable: no answer from localhost:1"),
    ],
)
def test_errors_are_one_line(server: FakeServer, arguments: list[str], exit_code: int, words: str) -> None:
    result = call(*arguments, LOOKAHEAD_URL=server.url)
    assert result.exit_code == exit_code
    last = result.output.splitlines()[-1]
    assert last.startswith(words)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [["ask"], ["ask", "q", "--max-tokens", "many"], ["sing"]])
def test_wrong_use_exits_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_an_error_midway_keeps_what_was_said(server: FakeServer) -> None:
    result = call("ask", "fails midway", "--url", server.url)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "a",
        "TargetUnavailable: gone (retry later, or ask another server)",
    ]


def test_check_asks_a_tiny_question(server: FakeServer) -> None:
    result = call("check", "--url", server.url)
    assert (result.exit_code, result.output[:3]) == (0, "OK:")
    server.ready = False  # some model is down, but this one answers
    assert call("check", "--url", server.url).exit_code == 0
    server.models.clear()
    result = call("check", "--url", server.url)
    assert (result.exit_code, "no ready model" in result.output) == (1, True)


def test_check_tells_what_keeps_it_from_asking(server: FakeServer) -> None:
    server.refusal = Abort(StatusCode.UNAUTHENTICATED, "no token")
    assert call("check", "--url", server.url).output[:3] == "OK:"  # a gateway may let questions alone pass
    server.scripts["What is 1 + 1?"] = [server.refusal]
    result = call("check", "--url", server.url)
    assert result.exit_code == 1
    assert result.output.startswith("ServerError: UNAUTHENTICATED: no token")


def test_ctrl_c_cancels_the_request_and_exits_130(server: FakeServer, gate: Gate) -> None:
    command = [sys.executable, "-m", "lr_client", "ask", "held", "--url", server.url]

    def hear_ctrl_c() -> None:
        """In the background of a script SIGINT is ignored and children inherit that."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=hear_ctrl_c) as process:
        try:
            assert process.stdout is not None
            assert gate.reached.wait(120.0)  # an interpreter starts first
            assert process.stdout.read(1) == "a"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.strip() == "cancelled"
    assert server.request().was_cancelled()


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_an_address_may_say_that_it_wants_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    made = f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {made}".split()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    trusting = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)}
    answer = [Reply(text="2"), Reply(finish="stop")]
    with FakeServer({"What is 1 + 1?": answer}, credentials=credentials) as secure:
        for url, status, limit_s in ((f"grpcs://{secure.url}", 0, "30"), (secure.url, 1, "5")):
            asked = [sys.executable, "-m", "lr_client", "check", "--timeout", limit_s, "--url", url]
            done = subprocess.run(asked, env=trusting, capture_output=True, text=True, timeout=60)
            assert done.returncode == status, done.stderr
