"""Builds wheel and sdist, installs the wheels into an empty environment, and serves the demo from another folder.

    python -m tests.long.package_check            # third-party packages are this environment's
    python -m tests.long.package_check --whole    # they are installed too, from the package index

``make package-check`` runs it; a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from lr_backend.serve.warmup import ANSWER, QUESTION

PROJECT = Path(__file__).resolve().parents[2]
SERVE_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
IN_WHEEL = (
    "lr_backend/_data/engines/demo.toml",
    "lr_backend/_data/model_repository/embedded/config.pbtxt",
    "lr_backend/_data/demo/checkpoints/target/model.safetensors",
    "lr_backend/_data/demo/problems.py",
    "lr_backend/build/templates/embedded.toml.jinja",
    "lr_backend/trace/timeline.html.jinja",
    "lr_backend/py.typed",
)
IN_SDIST = ("engines/demo.toml", "lr_backend/embedded/native/decoder.h", "lr_backend/embedded/native/run.c", "LICENSE")

console = Console(highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="install third-party packages from the package index too")
    whole = parser.parse_args().whole
    with tempfile.TemporaryDirectory(prefix="lookahead-package-") as folder:
        work = Path(folder)
        server, client = build(work)
        check_wheel(server, client)
        python = install(work / "venv", [f"{server}[cpu]" if whole else str(server), str(client)], whole)
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        check_names(python, elsewhere)
        check_commands(python, elsewhere)
        with serving(python, elsewhere) as address:
            check_answer(python, elsewhere, address)
        check_editable(work, elsewhere, client)
    console.print("the package is whole")


def build(work: Path) -> tuple[Path, Path]:
    """The wheels of server and client, the server's made from its own sdist, as an index would have it."""
    out = work / "dist"
    out.mkdir()
    sdist = out / backend(copy_of_sources(work / "source"), "build_sdist", out)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(work / "unpacked", filter="data")
    expect(not (missing := set(IN_SDIST) - names), f"the sdist has its sources {missing or ''}")
    (unpacked,) = (work / "unpacked").iterdir()
    return out / backend(unpacked, "build_wheel", out), out / backend(work / "source" / "client", "build_wheel", out)


def copy_of_sources(into: Path) -> Path:
    """What is or would be committed, without what a build left behind."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], PROJECT)
    for name in filter(None, listed.split("\0")):
        source, target = PROJECT / name, into / name
        if source.is_file() and not name.startswith(("results/", "docs/")):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return into


def backend(source: Path, hook: str, out: Path) -> str:
    """Call the build backend as pip does, with this environment's setuptools; the name of what it made."""
    code = f"from setuptools import build_meta; print('made', build_meta.{hook}({str(out)!r}))"
    return run([sys.executable, "-c", code], source).splitlines()[-1].removeprefix("made ")


def check_wheel(server: Path, client: Path) -> None:
    names = set(zipfile.ZipFile(server).namelist())
    expect(not (missing := set(IN_WHEEL) - names), f"the wheel has specs, templates, checkpoints {missing or ''}")
    decoder = [name for name in names if re.fullmatch(r"lr_backend/embedded/native/_decoder\..*so", name)]
    expect(bool(decoder), f"the wheel has the decoder in C {decoder}")
    for wheel, package in ((server, "lr_backend"), (client, "lr_client")):
        tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        own = {name for name in tops if not name.endswith(".dist-info")}
        expect(own == {package}, f"{wheel.name} installs {sorted(own)} and nothing else")


def install(venv: Path, wheels: Sequence[str], whole: bool) -> Path:
    """An environment with the wheels, and this one's packages or its own behind them; its Python."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], PROJECT)
    python = venv / "bin" / "python"
    options = ["--constraint", str(PROJECT / "constraints.txt")] if whole else ["--no-deps", "--no-index"]
    run([sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", *options, *wheels], PROJECT)
    if not whole:  # a folder that a .pth file names is searched, but .pth files in it are not: no editable install comes along
        packages = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], venv).strip()
        (Path(packages) / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def check_names(python: Path, elsewhere: Path) -> None:
    code = "import importlib.util as u, json; print(json.dumps([bool(u.find_spec(n)) for n in ('lr_backend', 'demo', 'bench')]))"
    found = json.loads(run([str(python), "-c", code], elsewhere))
    expect(found == [True, False, False], f"lr_backend can be imported, demo and bench cannot: {found}")


def check_commands(python: Path, elsewhere: Path) -> None:
    command = python.with_name("lookahead")
    version = run([str(command), "--version"], elsewhere).split()[-1]
    client = run([str(python), "-c", "import lr_client; print(lr_client.__version__)"], elsewhere).strip()
    expect(version == client, f"server {version} and client {client} have one version")
    refused = subprocess.run([command, "eval"], cwd=elsewhere, capture_output=True, text=True, check=False, env=environment())
    said = refused.stderr.strip()
    expect(refused.returncode == 2 and "make venv" in said and "\n" not in said, f"eval says what is missing: {said}")
    doctor = run([str(command), "doctor", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"], elsewhere)
    expect("missing" not in doctor, "doctor finds nothing missing")


@contextmanager
def serving(python: Path, elsewhere: Path) -> Iterator[str]:
    """``lookahead serve --spec demo`` from another folder; its gRPC address."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    log = elsewhere / "serve.out"
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(
            [str(python.with_name("lookahead")), "serve", "--spec", "demo", *ports],
            cwd=elsewhere,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        told = wait_for(log, server, "curl -s ")
        address = re.search(r"gRPC\s+(\S+)", told)
        assert address is not None, told
        expect(
            (elsewhere / "engines" / "built" / "demo").is_dir(), "it serves, and writes into the folder that it was started in"
        )
        yield address[1]
        server.send_signal(signal.SIGINT)
        expect(server.wait(STOP_TIMEOUT_S) == 0, "Ctrl-C ends it")
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(STOP_TIMEOUT_S)


def wait_for(log: Path, server: subprocess.Popen[bytes], word: str) -> str:
    """What a server has said, as soon as ``word`` is in it."""
    for _ in range(int(SERVE_TIMEOUT_S)):
        text = log.read_text(encoding="utf-8")
        if word in text and text.endswith("\n"):
            return text
        try:
            status = server.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
        raise SystemExit(f"serve ended with status {status}:\n{log.read_text(encoding='utf-8')}")
    raise SystemExit(f"serve was not ready within {SERVE_TIMEOUT_S:g} s:\n{log.read_text(encoding='utf-8')}")


def check_answer(python: Path, elsewhere: Path, address: str) -> None:
    code = (
        "import sys; from lr_client import Client, Options\n"
        "with Client(sys.argv[1]) as client:\n"
        "    print(client.ask(sys.argv[2], Options(temperature=0.0, max_tokens=600)).answer)"
    )
    answer = run([str(python), "-c", code, address, QUESTION], elsewhere).strip()
    expect(rf"\boxed{{{ANSWER}}}" in answer, f"{QUESTION} -> {answer}")


def check_editable(work: Path, elsewhere: Path, client: Path) -> None:
    """From a checkout the commands of bench/ work with the installed command too, wherever it is called."""
    venv = work / "editable"
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], PROJECT)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps", "--no-index"]
    # An isolated build would look for setuptools in an index; the backend runs in the new environment and finds this one's.
    packages = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], venv).strip()
    (Path(packages) / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    # Without a compiler, which a second decoder is not worth.
    run([*pip, "--no-build-isolation", "--editable", str(work / "source"), str(client)], PROJECT, CC="false")
    for command in ("eval", "report"):
        told = run([str(python.with_name("lookahead")), command, "--help"], elsewhere)
        expect(f"lookahead {command}" in told, f"from a checkout: lookahead {command}")


def environment() -> dict[str, str]:
    """This one's, without what would make the checkout importable."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def run(command: Sequence[str], folder: Path, **variables: str) -> str:
    """A command's output. Raises: SystemExit: it failed, with what it said."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment() | variables)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds: bool, what: str) -> None:
    console.print(f"{'ok' if holds else 'FAILED'}  {what}")
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
