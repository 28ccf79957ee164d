"""NVIDIA's perf_analyzer: obtained when it is wanted, and run so that every failure has a name.

PyPI has it as a wheel that holds one binary, built for glibc 2.38. On a newer system it runs as it is. On an older one it runs
with the C and C++ libraries of Debian 13, unpacked into a folder of their own and loaded by their own dynamic linker: nothing of
the system is touched. pip checks the wheel's hash, apt the archive's signature and with it each package's hash.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.load.errors import LoadError

VERSION = "2.60.0"
WHEEL_SHA256 = "23ef56b107ae9233e5cf09fbdf508dd9b936a52f1bae2f63f53c8117087b3f25"
WHEEL_PLATFORM = "manylinux_2_38_x86_64"
NEEDED_GLIBC = (2, 38)
SUITE = "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
LINKER = f"{LIBRARIES}/ld-linux-x86-64.so.2"
BINARY = "perf_analyzer/bin/perf_analyzer"
DOWNLOAD_TIMEOUT_S = 600.0
STARTING_TIMEOUT_S = 30.0
WATCH_S = 5.0

SOURCES = f"""Types: deb
URIs: http://deb.debian.org/debian
Suites: {SUITE}
Components: main
Signed-By: {KEYRING}
"""


class PerfAnalyzerError(LoadError):
    """perf_analyzer cannot be had, or ended without a measurement."""

    @property
    def unreachable(self) -> bool:
        """It found no server, or none that answered in time."""
        return "failed to connect" in str(self)


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """How to run it: the words before its own arguments."""

    command: tuple[str, ...]

    def version(self) -> str:
        """What it says of itself.

        Raises:
            PerfAnalyzerError: it does not start.
        """
        return self.run(["--version"], timeout_s=STARTING_TIMEOUT_S).strip()

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        log: Path | None = None,
        server_lives: Callable[[], bool] = lambda: True,
    ) -> str:
        """Run it to its end; returns what it printed.

        Args:
            log: keeps what it printed, whatever became of it.
            server_lives: asked now and then. When its server dies perf_analyzer goes on waiting for the answers.

        Raises:
            PerfAnalyzerError: it did not start, failed (its own last words are the message), took longer than ``timeout_s``, or
                its server died.
        """
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            try:
                process = subprocess.Popen([*self.command, *arguments], stdout=stdout, stderr=stderr)
            except OSError as error:
                raise PerfAnalyzerError(f"{self.command[0]} cannot be run: {error.strerror}") from error
            try:
                stopped = _why_stopped(process, timeout_s, server_lives)
            finally:
                process.kill()
                exit_code = process.wait()
                printed = [_whole(file) for file in (stdout, stderr)]
                if log is not None:
                    log.write_text("\n--- standard error\n".join(printed), encoding="utf-8")
        if stopped is not None:
            raise PerfAnalyzerError(stopped)
        if exit_code:
            raise PerfAnalyzerError(f"perf_analyzer: {last_words(printed[1], exit_code)}")
        return "".join(printed)


def last_words(stderr: str, exit_code: int) -> str:
    """Why it failed, in one line: refused options are explained after its whole usage text, other errors stand alone."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if line.lower().startswith("error:") or " had error: " in line]
    told = "; ".join(dict.fromkeys(reasons)) or (lines[-1] if lines else "no reason given")
    return f"{told} (exit status {exit_code})"


def obtain(folder: Path) -> PerfAnalyzer:
    """The pinned release, from ``folder`` or downloaded into it.

    Raises:
        PerfAnalyzerError: it cannot be had on this machine, and why.
    """
    home = folder.absolute() / f"perf_analyzer-{VERSION}"
    glibc = _glibc()
    if not (home / BINARY).is_file() or (glibc < NEEDED_GLIBC and not (home / LINKER).is_file()):
        _install(home, glibc)
    found = command_in(home, glibc)
    found.version()
    return found


def command_in(home: Path, glibc: tuple[int, ...]) -> PerfAnalyzer:
    """How to run what :func:`obtain` unpacked."""
    binary = home / BINARY
    if glibc >= NEEDED_GLIBC:
        return PerfAnalyzer((str(binary),))
    return PerfAnalyzer((str(home / LINKER), "--library-path", str(home / LIBRARIES), str(binary)))


def _install(home: Path, glibc: tuple[int, ...]) -> None:
    """Into a folder beside it first: an interrupted download leaves nothing that looks whole."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise PerfAnalyzerError(f"perf_analyzer {VERSION} is taken for Linux on x86_64; on this machine name one of your own")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".perf_analyzer-", dir=home.parent) as temporary:
        made = Path(temporary) / "whole"
        made.mkdir()
        _unpack_wheel(made, Path(temporary))
        if glibc < NEEDED_GLIBC:
            _unpack_libraries(made, Path(temporary) / "apt")
        shutil.rmtree(home, ignore_errors=True)
        made.rename(home)


def _unpack_wheel(target: Path, work: Path) -> None:
    requirement = work / "requirements.txt"
    requirement.write_text(f"perf-analyzer=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    chosen = ["--only-binary=:all:", "--platform", WHEEL_PLATFORM, "--dest", str(work), "--requirement", str(requirement)]
    _do([*pip, *chosen], f"pip cannot download perf-analyzer {VERSION}")
    (wheel,) = work.glob("perf_analyzer-*.whl")
    shutil.unpack_archive(wheel, target, "zip")
    (target / BINARY).chmod(0o755)


def _unpack_libraries(target: Path, work: Path) -> None:
    """apt with folders of its own: neither its lists nor its sources are the system's."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise PerfAnalyzerError(f"{_needs_libraries()}, and {tool} is not here to get them with")
    if not KEYRING.is_file():
        raise PerfAnalyzerError(f"{_needs_libraries()}, and {KEYRING} is missing: install the package debian-archive-keyring")
    for name in ("sources", "lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources" / f"{SUITE}.sources").write_text(SOURCES, encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": str(work / "sources"),
        "Dir::State::Lists": str(work / "lists"),
        "Dir::State::Status": str(work / "status"),
        "Dir::Cache": str(work / "cache"),
        "Acquire::Languages": "none",
        "APT::Architecture": "amd64",
    }
    if os.geteuid() == 0:
        settings["APT::Sandbox::User"] = "root"  # the folders are not those of apt's own user
    (work / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()), encoding="utf-8")
    environment = {**os.environ, "APT_CONFIG": str(work / "apt.conf")}
    _do(["apt-get", "--quiet", "update"], f"apt cannot read the package lists of Debian {SUITE}", environment=environment)
    download = ["apt-get", "--quiet", "download", *PACKAGES]
    _do(download, "apt cannot download Debian's libraries", environment=environment, cwd=work)
    for package in sorted(work.glob("*.deb")):
        _do(["dpkg-deb", "--extract", str(package), str(target)], f"{package.name} cannot be unpacked")


def _needs_libraries() -> str:
    needed, here = (".".join(map(str, version)) for version in (NEEDED_GLIBC, _glibc()))
    return f"perf_analyzer {VERSION} needs glibc {needed}, this system has {here}: it would run with Debian {SUITE}'s libraries"


def _glibc() -> tuple[int, ...]:
    """Raises: PerfAnalyzerError: the C library is another one."""
    name, version = platform.libc_ver()
    if name != "glibc":
        raise PerfAnalyzerError("perf_analyzer needs a system with glibc")
    return tuple(int(part) for part in version.split("."))


def _do(command: Sequence[str], failed: str, *, environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, env=environment, cwd=cwd, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PerfAnalyzerError(f"{failed}: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise PerfAnalyzerError(f"{failed}: {lines[-1].strip() if lines else f'exit status {done.returncode}'}")


def _why_stopped(process: subprocess.Popen[bytes], timeout_s: float, server_lives: Callable[[], bool]) -> str | None:
    """Wait for the end; a reason to stop it earlier, or None."""
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            process.wait(min(left_s, WATCH_S))
        except subprocess.TimeoutExpired:
            if not server_lives():
                return "perf_analyzer was stopped, as the server no longer answers"
        else:
            return None
    return f"perf_analyzer was stopped after {timeout_s:.0f} s"


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
