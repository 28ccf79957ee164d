"""What is in the images, and what is known against it.

    python -m tools.supply_chain sbom     # a bill of materials of each image, by CycloneDX, under out/sbom/
    python -m tools.supply_chain audit    # what PyPI's advisories say of the packages in them

Both read what the images are locked to: for ``cpu`` what the package and the extras of its image need, at the versions of
``constraints.txt``; for ``trtllm`` the files ``deploy/requirements-*.txt``. What a base image brings is its maker's to tell.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from tempfile import NamedTemporaryFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("cpu", "trtllm")
OUTPUT = ROOT / "out" / "sbom"
TRTLLM_REQUIREMENTS = ("deploy/requirements-trtllm.txt", "deploy/requirements-llmapi.txt")


def pinned(path: Path) -> dict[str, str]:
    """Version by name, of a file of ``name==version`` lines."""
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def locked(image: str) -> dict[str, str]:
    """Version by name, of all that an image gets from PyPI."""
    if image == "trtllm":
        return {name: version for file in TRTLLM_REQUIREMENTS for name, version in pinned(ROOT / file).items()}
    said = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, extras = said["project"], said["tool"]["lookahead"]["cpu-image-extras"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    versions = pinned(ROOT / "constraints.txt")
    return {name: versions[name] for name in sorted(with_what_they_need(map(Requirement, lines)))}


def with_what_they_need(wanted: Iterable[Requirement]) -> set[str]:
    """Names, as the installed packages tell what each needs here."""
    names: set[str] = set()
    waiting = [(requirement, extra) for requirement in wanted for extra in ("", *requirement.extras)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        names.add(name)
        for line in _needs(name):
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed, each) for each in ("", *needed.extras)]
    return names


def _needs(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed: make venv") from None


def sbom(image: str) -> str:
    """The bill of materials, as CycloneDX's JSON; the same each time."""
    lines = "".join(f"{name}=={version}\n" for name, version in locked(image).items())
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--output-reproducible", "--of", "JSON", "-o", "-", "-"]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout


def audit() -> int:
    """Exit status: 1 where something is known against a package, 0 where not, and where nobody could be asked."""
    packages = {name: version for image in IMAGES for name, version in locked(image).items()}
    with NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in packages.items()))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json"]
        done = subprocess.run([*command, "-r", file.name], capture_output=True, text=True)
    told = json.loads(done.stdout)["dependencies"] if done.stdout else []
    asked = [each for each in told if "skip_reason" not in each]
    for each in told:
        for known in each.get("vulns", ()):
            _say(f"{each['name']} {each['version']}: {known['id']}, mended in {', '.join(known['fix_versions']) or 'none'}")
    if not asked:
        _say("SKIPPED: PyPI's advisories cannot be reached from here; nothing was audited")
        return 0
    left_out = sorted(each["name"] for each in told if "skip_reason" in each)
    _say(f"{len(asked)} packages audited" + (f"; not known there: {', '.join(left_out)}" if left_out else ""))
    return int(any(each.get("vulns") for each in asked))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(arguments: list[str]) -> int:
    match arguments:
        case ["sbom"]:
            OUTPUT.mkdir(parents=True, exist_ok=True)
            for image in IMAGES:
                path = OUTPUT / f"lookahead-{image}.cdx.json"
                path.write_text(sbom(image), encoding="utf-8")
                _say(str(path.relative_to(ROOT)))
            return 0
        case ["audit"]:
            return audit()
    _say(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
