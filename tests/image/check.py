"""Builds both images without a daemon and without pulling, runs the CPU one, asks and measures it: ``make image-check``.

The base is made by debootstrap (Debian with Python); under the ``trtllm`` target a virtual environment with what NVIDIA's image
brings of Python stands in for that image. Needs root, and Debian's or Ubuntu's packages and PyPI. Everything it makes lies under
``out/image-check``. Prints a table and ends with one JSON line; exit status 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.load.errors import LoadError
from bench.load.perf_analyzer import obtain
from lr_backend.errors import LookaheadError
from lr_backend.serve.server import Ports, ServerOptions, free_ports
from lr_backend.serve.warmup import ANSWER as RIGHT_ANSWER
from lr_backend.serve.warmup import QUESTION, post_json
from tests.image.sandbox import Container, ImageConfig, Sandbox

PROJECT = Path(__file__).resolve().parents[2]
TOOLS = {"buildah": "buildah", "debootstrap": "debootstrap", "bwrap": "bubblewrap"}
SUITE = "bookworm"
BASE_PACKAGES = "python3,python3-venv,libpython3.11,ca-certificates"
PYTHON_BASE = "localhost/lookahead-check/python"
TRTLLM_BASE = "localhost/lookahead-check/trtllm-stand-in"
IMAGES = {"cpu": "localhost/lookahead-check/cpu", "trtllm": "localhost/lookahead-check/trtllm"}
NGC_VENV = "/opt/venv-tritonserver"
# What NVIDIA's image has of our dependencies, by TensorRT-LLM 1.2.1's own requirements, and of Triton's own OpenAI front
# end. Not torch: the command does without.
NGC_PACKAGES = (
    "numpy<2",
    "transformers==4.57.3",
    "pydantic>=2.9.1,<3",
    "psutil",
    "jinja2",
    "safetensors",
    "fastapi==0.121.2",
    "setuptools<80",
    "wheel<=0.45.1",
)
LIST_PACKAGES = """
import json
from importlib.metadata import distributions
print(json.dumps({each.name: each.version for each in distributions()}))
"""
BUILD_TOOLS = ("cc", "c++", "gcc", "g++", "cpp", "clang", "ld", "as", "make", "cmake", "ninja", "rustc", "cargo", "git")
KEPT_IN_CONTEXT = {
    *("build_engines.py", "client", "constraints.txt", "LICENSE", "pyproject.toml", "setup.py"),
    *("lr_backend", "demo", "engines", "model_repository", "deploy"),
}
MAX_CPU_IMAGE_MB = 1600
ANSWER = rf"\boxed{{{RIGHT_ANSWER}}}"
ANSWER_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 120.0
MEASURE_TIMEOUT_S = 180.0
EMULATED = "qwen3-32b"
OURS = ("lookahead-server", "lookahead-client")
LISTENS = "0A"  # the state of a socket in /proc/net/tcp

console = Console() if sys.stdout.isatty() else Console(width=150)


@dataclass
class Checks:
    """What was looked at, in order."""

    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def add(self, what: str, passed: bool, detail: object = "") -> None:
        self.rows.append((what, passed, str(detail)))
        verdict = "[green]ok[/]" if passed else "[red]FAILED[/]"
        console.print(verdict, what if passed else f"{what}: {escape(str(detail))}", highlight=False)

    @property
    def failed(self) -> list[str]:
        return [what for what, passed, _ in self.rows if not passed]

    def table(self) -> Table:
        table = Table("check", "", "seen")
        for what, passed, detail in self.rows:
            table.add_row(what, "[green]ok[/]" if passed else "[red]failed[/]", detail)
        return table


class Buildah:
    """Buildah with a storage of its own: overlay where the kernel has it, else plain copies."""

    def __init__(self, work: Path) -> None:
        self._work = work
        driver = "overlay" if "overlay" in Path("/proc/filesystems").read_text(encoding="ascii") else "vfs"
        self._options = ["--root", str(work / "storage"), "--runroot", str(work / "run"), "--storage-driver", driver]

    def __call__(self, command: str, *arguments: str, stdin: str | None = None) -> str:
        """Run one command; its output. Raises: SystemExit: it failed, with the end of what it said."""
        line = ["buildah", *self._options, command, *arguments]
        done = subprocess.run(line, input=stdin, capture_output=True, text=True, check=False, cwd=PROJECT)
        with (self._work / "buildah.log").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(line)}\n{done.stdout}{done.stderr}\n")
        if done.returncode != 0:
            console.print(f"buildah {command} failed:\n{(done.stdout + done.stderr)[-6000:]}", highlight=False, markup=False)
            raise SystemExit(1)
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        return image in self("images", "--format", "{{.Name}}").split()

    def build(self, target: str, *build_args: str) -> None:
        arguments = [part for each in (*build_args, *_pip_arguments()) for part in ("--build-arg", each)]
        options = ["--format", "docker", "--isolation", "chroot", "--layers", "--pull-never", "--target", target, *_volumes()]
        self("build", *options, *arguments, "--tag", IMAGES[target], "--file", "Dockerfile", ".")

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The image's files, as a container of it sees them."""
        container = self("from", "--pull-never", image)
        try:
            yield Path(self("mount", container))
        finally:
            self("umount", container)
            self("rm", container)


def _package_sources() -> dict[str, str]:
    """This machine's own pip settings, which the build stages take as arguments; the images keep nothing of them."""
    names = {
        "index-url": "PIP_INDEX_URL",
        "extra-index-url": "PIP_EXTRA_INDEX_URL",
        "find-links": "PIP_FIND_LINKS",
        "cert": "PIP_CERT",
    }
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = names.get(key.rpartition(".")[2])
        if name:
            found[name] = " ".join(value.strip("'").split())
    return found


def _pip_arguments() -> list[str]:
    return [f"{name}={value}" for name, value in _package_sources().items()]


def _volumes() -> list[str]:
    """Files and folders of this machine that its pip settings name, readable in the build at the same place."""
    words = [word.removeprefix("file://") for value in _package_sources().values() for word in value.split()]
    places = dict.fromkeys(_top(Path(word)) for word in words if word.startswith("/") and Path(word).exists())
    return [part for place in places for part in ("--volume", f"{place}:{place}:ro")]


def _top(place: Path) -> Path:
    """An index names files beside its own folder, so a folder is taken with what lies around it, up to the second level."""
    return place if place.is_file() else Path(*place.parts[:3])


def lint(checks: Checks) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "Dockerfile"], capture_output=True, text=True, check=False, cwd=PROJECT)
    version = subprocess.run([hadolint, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    checks.add("Dockerfile lints", done.returncode == 0, done.stdout.strip() or f"hadolint {version} has nothing to say")


def make_bases(buildah: Buildah, work: Path) -> None:
    """The two images that the Dockerfile starts from here; kept for the next time."""
    if not buildah.has(PYTHON_BASE):
        root = work / "base"
        shutil.rmtree(root, ignore_errors=True)
        with console.status("debootstrap ..."):
            line = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, str(root)]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            console.print(done.stdout[-3000:] + done.stderr[-3000:], highlight=False, markup=False)
            raise SystemExit(1)
        container = buildah("from", "scratch")
        buildah("copy", container, str(root), "/")
        buildah("config", "--cmd", "python3", container)
        buildah("commit", "--rm", container, PYTHON_BASE)
        shutil.rmtree(root)
    if not buildah.has(TRTLLM_BASE):
        container = buildah("from", "--pull-never", PYTHON_BASE)
        environment = [part for line in _pip_arguments() for part in ("--env", line)]
        run = ["--isolation", "chroot", *environment, *_volumes(), container, "--"]
        buildah("run", *run, "sh", "-c", "userdel ubuntu 2>/dev/null; useradd --uid 1000 --user-group triton-server")
        buildah("run", *run, "python3", "-m", "venv", NGC_VENV)
        buildah("run", *run, f"{NGC_VENV}/bin/pip", "install", "--quiet", "--no-cache-dir", *NGC_PACKAGES)
        buildah("config", "--env", f"PATH={NGC_VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        buildah("commit", "--rm", container, TRTLLM_BASE)


def check_context(checks: Checks, buildah: Buildah) -> None:
    """What .dockerignore lets through, as buildah reads it."""
    name = "localhost/lookahead-check/context"
    buildah(
        "build",
        "--format",
        "docker",
        "--ignorefile",
        ".dockerignore",
        "--tag",
        name,
        "--file",
        "-",
        ".",
        stdin="FROM scratch\nCOPY . /\n",
    )
    with buildah.mounted(name) as root:
        top = {path.name for path in root.iterdir() if path.name not in ("dev", "etc", "proc", "run", "sys")}
        unwanted = [path for path in root.rglob("*") if path.name == "__pycache__" or path.suffix in (".so", ".log", ".pyc")]
        size = _megabytes(root)
    built = (root / "engines" / "built").exists()
    checks.add("build context", top == KEPT_IN_CONTEXT and not unwanted and not built, f"{size:.0f} MB: {', '.join(sorted(top))}")


def check_config(checks: Checks, target: str, config: ImageConfig) -> None:
    checks.add(f"{target}: user", config.user == "1000:1000", config.user)
    wanted = {
        f"org.opencontainers.image.{name}" for name in ("title", "description", "version", "revision", "licenses", "base.name")
    }
    values = {name: value for name, value in config.labels.items() if name in wanted}
    checks.add(f"{target}: labels", set(values) == wanted and all(values.values()), values.get("org.opencontainers.image.title"))
    checks.add(
        f"{target}: entry point", config.entrypoint[:2] == ("lookahead", "serve"), " ".join(config.entrypoint + config.command)
    )
    checks.add(
        f"{target}: ports, stop signal", (config.ports, config.stop_signal) == ((8000, 8001, 8002, 9000), "SIGTERM"), config.ports
    )
    checks.add(f"{target}: health check", bool(config.health), " ".join(config.health))


def check_files(checks: Checks, target: str, sandbox: Sandbox) -> None:
    """Nothing of the build is left, and nothing is writable by the user who serves."""
    root, folders = sandbox.root, sandbox.config.environment["PATH"].split(":")
    tools = [f"{folder}/{tool}" for folder in folders for tool in BUILD_TOOLS if os.path.lexists(root / folder.strip("/") / tool)]
    checks.add(f"{target}: no build tools", not tools, ", ".join(tools) or f"none of {', '.join(BUILD_TOOLS)}")
    left = [
        name
        for name in ("src", "root/.cache", "opt/pip", "opt/pypi", "opt/wheels")
        if (root / name).exists() and _files(root / name)
    ]
    checks.add(f"{target}: no leftovers", not left, ", ".join(left) or "no sources, no pip cache, no package folder")
    writable = [path for path in _files(root / "opt") if path.lstat().st_uid == 1000 and not path.is_symlink()]
    checks.add(
        f"{target}: files are root's", not writable, f"{len(writable)} of {len(_files(root / 'opt'))} in /opt are the user's"
    )


def check_cpu_packages(checks: Checks, sandbox: Sandbox) -> None:
    code = "import torch, numpy; print(torch.__version__, torch.version.cuda, numpy.__version__)"
    done = sandbox.run("python3", "-c", code)
    checks.add(
        "cpu: torch is the CPU build",
        done.returncode == 0 and done.stdout.split()[1:2] == ["None"],
        (done.stdout + done.stderr[-300:]).strip(),
    )
    pins = dict(line.split("==") for line in (PROJECT / "constraints.txt").read_text(encoding="utf-8").split())
    done = sandbox.run("python3", "-c", LIST_PACKAGES)
    installed = {name: version for name, version in json.loads(done.stdout).items() if name not in OURS}
    canonical = {_canonical(name): version for name, version in pins.items()}
    other = [
        f"{name} {version}" for name, version in installed.items() if canonical.get(_canonical(name)) != version.partition("+")[0]
    ]
    checks.add(
        "cpu: packages are the pinned ones",
        not other and len(installed) > 20,
        ", ".join(other) or f"{len(installed)} of {len(pins)} pins",
    )
    done = sandbox.run("python3", "-m", "pip", "--version")
    checks.add("cpu: no pip", done.returncode != 0, done.stderr.strip() or done.stdout.strip())


def check_run(checks: Checks, sandbox: Sandbox, work: Path) -> None:
    """Serve, answer, and stop: the image's own command line on a read-only root."""
    ports, door = free_ports(ServerOptions()), _free_port()
    url = f"127.0.0.1:{ports.http}"
    health = (*sandbox.config.health, f"http://127.0.0.1:{door}/ready")
    container = Container(sandbox, work / "cpu.log", *sandbox.config.command, *_port_options(ports, door))
    try:
        early = sandbox.run(*health)
        checks.add("cpu: unhealthy while it loads", early.returncode == 1, early.stdout.strip())
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (probe := sandbox.run(*health)).returncode and container.running and time.monotonic() < deadline:
            time.sleep(2.0)
        checks.add("cpu: healthy", probe.returncode == 0, probe.stdout.strip() or f"{' '.join(health)}: 0")
        if probe.returncode:
            console.print(container.log[-4000:], highlight=False, markup=False)
            return
        _ask(checks, url)
        _look_inside(checks, container)
        _measure(checks, "cpu", work, ports.grpc, door)
        _look_at_listeners(checks, container, {ports.http, ports.grpc, ports.metrics, door})
        _stop(checks, container, url)
        checks.add(
            "cpu: log goes to the container's output",
            "Started HTTPService" in container.log,
            f"{len(container.log.splitlines())} lines",
        )
    finally:
        container.kill()


def check_emulated(checks: Checks, sandbox: Sandbox, work: Path) -> None:
    """A deployment on GPUs, emulated by the CPU image, under the same tool. The image is read-only: `serve` renders into /tmp."""
    ports, door = free_ports(ServerOptions()), _free_port()
    options = ("--spec", EMULATED, "--pace", "h200_sxm", *_port_options(ports, door))
    container = Container(sandbox, work / "emulated.log", *options)
    try:
        probe = (*sandbox.config.health, f"http://127.0.0.1:{door}/ready")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (seen := sandbox.run(*probe)).returncode and container.running and time.monotonic() < deadline:
            time.sleep(2.0)
        checks.add("emulated: healthy", seen.returncode == 0, seen.stdout.strip() or f"{EMULATED} at the pace of h200_sxm")
        if seen.returncode:
            console.print(container.log[-4000:], highlight=False, markup=False)
        else:
            _measure(checks, "emulated", work, ports.grpc, door)
    finally:
        container.kill()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number: int = taken.getsockname()[1]
        return number


def _port_options(ports: Ports, door: int) -> list[str]:
    """``door`` is the port of OpenAI's API."""
    numbers = {"http": ports.http, "grpc": ports.grpc, "metrics": ports.metrics, "openai": door}
    return [f"--{name}-port={number}" for name, number in numbers.items()]


def _look_at_listeners(checks: Checks, container: Container, wanted: set[int]) -> None:
    """What a runtime publishes reaches a container from outside, so nothing of it may listen on loopback alone."""
    tables = [Path(f"/proc/{container.pid}/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
    local = [fields[1].split(":") for fields in sockets if fields[3] == LISTENS]
    found = {int(port, 16) for address, port in local if not address.strip("0")} & wanted
    checks.add("cpu: every port is open to the container's network", found == wanted, f"{len(found)} of {len(wanted)}")


def _served(door: int) -> str:
    """The model's name by OpenAI's API, which opens once Triton is ready and warm. Raises: OSError: it never does."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{door}/v1/models", timeout=ANSWER_TIMEOUT_S) as answer:
                name: str = json.load(answer)["data"][0]["id"]
                return name
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _measure(checks: Checks, what: str, work: Path, grpc: int, door: int) -> None:
    """perf_analyzer by the lines of its own documentation: a decoupled model by gRPC, and OpenAI's API.

    Added are the address, the input, and how many requests end it: a small machine is never stable.
    """
    folder = work / f"measured-{what}"
    shutil.rmtree(folder, ignore_errors=True)  # an export that is there already is refused
    folder.mkdir()
    question = {"data": [{"text_input": [QUESTION]}]}
    (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
    try:
        analyzer = obtain(PROJECT / "out" / "tools")
        model = _served(door)
        chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32}
        (folder / "chat.json").write_text(json.dumps({"data": [{"payload": [chat]}]}), encoding="utf-8")
        streamed = ["-m", "lookahead", "-i", "grpc", "--async", "--streaming", f"--profile-export-file={folder / 'profile.json'}"]
        streamed += ["--periodic-concurrency-range", "1:4:1", "--request-period", "1"]
        streamed += ["--request-parameter", "max_tokens:256:int"]
        streamed += ["-u", f"127.0.0.1:{grpc}", f"--input-data={folder / 'question.json'}"]
        analyzer.run(streamed, timeout_s=MEASURE_TIMEOUT_S, log=folder / "streamed.txt")
        (experiment,) = json.loads((folder / "profile.json").read_text(encoding="utf-8"))["experiments"]
        num_responses = [len(request["response_timestamps"]) for request in experiment["requests"]]
        checks.add(f"{what}: perf_analyzer streams", len(num_responses) == 4 and min(num_responses) > 1, f"{num_responses} parts")
        openai = ["-m", model, f"--input-data={folder / 'chat.json'}", "--service-kind=openai", "--endpoint=v1/chat/completions"]
        openai += ["--async", "-u", f"127.0.0.1:{door}", "--request-count=20"]
        said = analyzer.run(openai, timeout_s=MEASURE_TIMEOUT_S, log=folder / "openai.txt")
    except (OSError, LoadError) as error:
        checks.add(f"{what}: perf_analyzer measures", False, error)
        return
    count = re.search(r"Request count: (\d+)", said)
    last = said.strip().splitlines()[-1]
    checks.add(f"{what}: perf_analyzer measures OpenAI's API", count is not None and int(count[1]) == 20, last)


def _ask(checks: Checks, url: str) -> None:
    body = {"text_input": QUESTION, "max_tokens": 600, "temperature": 0.0, "stream": False, "mode": "lr"}
    try:
        answer = post_json(url, "lookahead", "generate", body, ANSWER_TIMEOUT_S)
    except LookaheadError as error:
        checks.add("cpu: answers", False, error.message)
        return
    last = (str(answer.get("text_output", "")).strip().splitlines() or [""])[-1]
    checks.add("cpu: answers", answer.get("finish_reason") == "stop" and ANSWER in last, f"{QUESTION!r} -> {last!r}")
    usage = json.loads(answer.get("usage") or "{}")
    steps = {key: usage.get(f"num_{key}_calls") for key in ("target", "draft", "judge")}
    checks.add("cpu: looked ahead", all(steps.values()) and not usage.get("degraded"), f"calls: {steps}")


def _look_inside(checks: Checks, container: Container) -> None:
    status = [_status(folder) for folder in container.processes()]
    users = {each["Uid"].split()[1] for each in status}
    checks.add("cpu: nothing runs as root", users == {"1000"}, f"{len(status)} processes, users {', '.join(sorted(users))}")
    powers = {(each["CapEff"], each["NoNewPrivs"]) for each in status}
    checks.add(
        "cpu: no capabilities",
        powers == {("0" * 16, "1")},
        f"effective {', '.join(sorted(cap for cap, _ in powers))}, no new privileges",
    )
    mounts = [line.split() for line in Path(f"/proc/{container.pid}/mountinfo").read_text(encoding="utf-8").splitlines()]
    root = next(fields[5] for fields in mounts if fields[4] == "/")
    writable = sorted(
        fields[4] for fields in mounts if "rw" in fields[5].split(",") and not fields[4].startswith(("/proc", "/dev/pts"))
    )
    checks.add("cpu: root is read-only", "ro" in root.split(","), f"writable: {', '.join(writable)}")
    # The demo's layout is one process: of Triton's models the step loop alone, which runs the engines itself.
    models = [folder for folder in container.processes() if b"python_backend_stub" in (folder / "cmdline").read_bytes()]
    num_native = sum("native/_decoder" in (folder / "maps").read_text(encoding="utf-8") for folder in models)
    checks.add("cpu: decodes in C", num_native == len(models) == 1, f"in {num_native} of {len(models)} models' processes")
    used = {place: shutil.disk_usage(f"/proc/{container.pid}/root{place}").used >> 20 for place in ("/tmp", "/dev/shm")}
    checks.add("cpu: writable space in use", used["/tmp"] < 32, f"{used} MB")


def _stop(checks: Checks, container: Container, url: str) -> None:
    """SIGTERM to process 1 while a request runs: it ends, and so does everything else."""
    answers: list[dict[str, Any]] = []
    body = {"text_input": QUESTION, "mode": "ar", "max_tokens": 1000, "temperature": 0.0, "stream": False}
    asking = threading.Thread(target=lambda: answers.append(post_json(url, "lookahead", "generate", body, STOP_TIMEOUT_S)))
    asking.start()
    time.sleep(0.05)
    processes = container.processes()
    began = time.monotonic()
    container.signal(signal.SIGTERM)
    try:
        code = container.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        checks.add("cpu: ends on SIGTERM", False, f"still there after {STOP_TIMEOUT_S:g} s")
        return
    asking.join()
    checks.add("cpu: ends on SIGTERM", code == 0, f"status {code} after {time.monotonic() - began:.1f} s")
    reason = answers[0].get("finish_reason") if answers else "none"
    checks.add("cpu: the request in flight was answered", reason == "stop", reason)
    left = [folder.name for folder in processes if folder.exists() and _status(folder).get("State", "Z")[0] != "Z"]
    checks.add("cpu: leaves no process", not left, ", ".join(left) or f"{len(processes)} ended")


def check_trtllm(checks: Checks, buildah: Buildah) -> None:
    """The steps of the other target, on the stand-in."""
    with buildah.mounted(TRTLLM_BASE) as base:
        before = {
            path.relative_to(base): path.stat().st_size for path in _files(base / NGC_VENV.strip("/")) if path.suffix != ".pyc"
        }
    config = ImageConfig.parse(buildah("inspect", "--type", "image", IMAGES["trtllm"]))
    check_config(checks, "trtllm", config)
    with buildah.mounted(IMAGES["trtllm"]) as root:
        sandbox = Sandbox(root, config)
        after = {
            path.relative_to(root): path.stat().st_size for path in _files(root / NGC_VENV.strip("/")) if path.suffix != ".pyc"
        }
        changed = {str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        only = len(changed) == 1 and next(iter(changed)).endswith("lookahead.pth")
        checks.add(
            "trtllm: the image's own packages stay as they are",
            only,
            f"{len(before)} files, new: {', '.join(sorted(changed)[:3])}",
        )
        check_files(checks, "trtllm", sandbox)
        done = sandbox.run("lookahead", "version")
        checks.add("trtllm: the command runs", done.returncode == 0, (done.stdout + done.stderr).strip().splitlines()[0])
        for spec in sorted((root / "opt/lookahead/lr_backend/_data/engines").glob("*.toml")):
            line = ["python3", "build_engines.py", "--spec", spec.stem, "--dry-run"]
            done = subprocess.run(sandbox.command(line), capture_output=True, text=True, check=False)
            said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            checks.add(
                f"trtllm: dry run of {spec.stem}",
                done.returncode == 0,
                f"{len(said)} lines, the last: {said[-1] if said else ''}",
            )
        checks.add("trtllm: size without the base", True, f"{_megabytes(root / 'opt' / 'lookahead'):.0f} MB")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def _status(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in _files(folder)) / 1e6


def _require_tools(install: bool) -> None:
    if os.geteuid() != 0:
        raise SystemExit("image-check needs root: debootstrap, mounts, another user")
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing and not install:
        raise SystemExit(f"missing: {', '.join(missing)}; install them, or run this with --install")
    if missing:
        line = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
        for command in (["apt-get", "update"], line):
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def main(
    work: Annotated[Path, typer.Option(help="Everything is made here.")] = PROJECT / "out" / "image-check",
    install: Annotated[bool, typer.Option("--install", help="Install missing tools through apt.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the images for the next time (some gigabytes).")] = False,
) -> None:
    """Build both images, run the CPU one, check what comes out."""
    _require_tools(install)
    work.mkdir(parents=True, exist_ok=True)
    buildah, checks, began = Buildah(work), Checks(), time.monotonic()
    try:
        lint(checks)
        make_bases(buildah, work)
        check_context(checks, buildah)
        with console.status("building the cpu target ..."):
            buildah.build("cpu", f"PYTHON_IMAGE={PYTHON_BASE}", "TORCH_INDEX_URL=", "REVISION=check")
        config = ImageConfig.parse(buildah("inspect", "--type", "image", IMAGES["cpu"]))
        check_config(checks, "cpu", config)
        with buildah.mounted(IMAGES["cpu"]) as root, buildah.mounted(PYTHON_BASE) as base:
            size, base_size = _megabytes(root), _megabytes(base)
            checks.add(
                "cpu: size", size < MAX_CPU_IMAGE_MB, f"{size:.0f} MB, of it {base_size:.0f} MB base; at most {MAX_CPU_IMAGE_MB}"
            )
            sandbox = Sandbox(root, config)
            check_files(checks, "cpu", sandbox)
            check_cpu_packages(checks, sandbox)
            check_run(checks, sandbox, work)
            check_emulated(checks, sandbox, work)
        with console.status("building the trtllm target on a stand-in ..."):
            buildah.build("trtllm", f"BASE={TRTLLM_BASE}", "REVISION=check")
        check_trtllm(checks, buildah)
    finally:
        if not keep:
            buildah("rm", "--all")
            buildah("rmi", "--all", "--force")
    console.print(checks.table())
    summary = {
        "checks": len(checks.rows),
        "failed": checks.failed,
        "cpu_image_mb": round(size),
        "seconds": round(time.monotonic() - began),
    }
    typer.echo(json.dumps(summary))
    raise typer.Exit(1 if checks.failed else 0)


if __name__ == "__main__":
    typer.run(main)
