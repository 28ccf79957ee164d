"""The blocks of README.md run as they stand, against the fake server in place of ``localhost:8001``."""

import contextlib
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from fake_server import FINISH, FakeServer, Reply
from typer.testing import CliRunner

from lr_client.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.fixture
def answering(server: FakeServer) -> FakeServer:
    step = {"index": 0, "origin": "draft", "text": "so"}
    (question,) = set(re.findall(r'"(Tom has [^"]+)"', README))
    server.scripts["How many?"] = server.scripts["Are you sure?"] = server.scripts[question] = [
        Reply(text="so", step=step),
        Reply(text="</think>13"),
        replace(FINISH, usage={**FINISH.usage, "reasoning_tokens": 2}, trace="{}"),
    ]
    return server


@pytest.mark.parametrize(
    ("index", "printed"),
    [(0, "13 stop None\n[draft] so</think>13"), (1, "['13', '13']\n13"), (2, "seed is wrong:")],
)
def test_python_blocks_run(answering: FakeServer, index: int, printed: str) -> None:
    code = blocks("python")[index].replace("localhost:8001", answering.url)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, f"README.md block {index}", "exec"), {"__name__": "__main__"})
    assert output.getvalue().startswith(printed)


def test_no_python_block_is_left_out() -> None:
    assert len(blocks("python")) == 3


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_shell_lines_run(
    answering: FakeServer, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    name, *arguments = shlex.split(line)
    assert name == "lookahead-client"
    result = CliRunner().invoke(app, arguments, env={"LOOKAHEAD_URL": answering.url})
    assert result.exit_code == 0, result.output
