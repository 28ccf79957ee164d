"""A package of somebody else's, installed in an environment of its own: a real server takes its parts on by name."""

from __future__ import annotations

import json
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.plug_in_docs import PACKAGE, write_package
from tests.support.tiny_models import make_tiny_models, write_spec

pytestmark = pytest.mark.integration

PROJECT = Path(__file__).parents[2]
ENTRY_POINTS = f"""
[lookahead.verifiers]
same_numbers = {PACKAGE}.verify:SameNumbers
[lookahead.segmenters]
lines = {PACKAGE}.segment:Lines
"""
SPEC = f"""
[lookahead]
raw_prompts = true
[lookahead.segmenter]
factory = "lines"
least_words = 1
[lookahead.proposers.repeat]
factory = "{PACKAGE}.propose:Repeat"
[lookahead.verifiers.none_at_all]
factory = "{PACKAGE}.verify:SameNumbers"
least = 1000
"""
BUILD = "from lr_backend.cli.app import app; app()"
SERVE = """
import json, sys
from pathlib import Path
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.serve.warmup import post_json

spec = DeploymentSpec.load(Path(sys.argv[1]))
build_repository(spec)
asked = {"text_input": "<think>", "raw": True, "max_tokens": 60, "temperature": 1.0, "seed": 3, "stream": False}
asked["deterministic"] = True  # no draft is late
with TritonServer(spec.built_dir, ServerOptions(exit_timeout_s=5)) as server:
    server.wait_ready(120)
    for own in json.loads(sys.argv[2]):
        answer = post_json(server.http_url, "lookahead", "generate", {**asked, **own}, 60)
        print("USAGE", answer["usage"])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the package, beside all that this one has."""
    folder = tmp_path_factory.mktemp("theirs")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    library = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Behind its own packages those of this environment, and the project.
    (library / "ours.pth").write_text("".join(f"{path}\n" for path in (*site.getsitepackages(), PROJECT)), encoding="utf-8")
    write_package(library)
    about = library / f"{PACKAGE}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return folder / "bin" / "python"


def test_a_server_takes_on_what_a_package_offers(python: Path, tmp_path: Path) -> None:
    path = write_spec(tmp_path / "engines" / "own.toml", make_tiny_models(tmp_path / "checkpoints"), name="own")
    path.write_text(path.read_text(encoding="utf-8") + SPEC, encoding="utf-8")
    questions = [
        {"mode": "lr", "verifier": "same_numbers"},
        {"mode": "lr", "verifier": "none_at_all"},
        {"mode": "sd", "proposer": "repeat", "temperature": 0.0},
    ]

    # Not below the project: only what is installed can be found.
    told = subprocess.run(
        [python, "-c", SERVE, path, json.dumps(questions)], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )

    usages = [json.loads(line.removeprefix("USAGE ")) for line in told.stdout.splitlines() if line.startswith("USAGE ")]
    assert len(usages) == len(questions), told.stdout + told.stderr
    named, none, repeat = usages
    assert all(one["completion_tokens"] > 20 for one in usages)
    # A text of random letters names few numbers: those who ask for a thousand accept nothing.
    assert named["num_steps_drafted"] > 0 and none["num_steps_accepted_by"].get("plug_in", 0) == 0
    assert named["num_steps_accepted_by"].get("plug_in", 0) + named["num_steps_rejected"].get("plug_in", 0) > 0
    assert not named["degraded"] and not none["degraded"]
    assert repeat["num_draft_tokens"] > 0


def test_without_the_package_the_spec_is_refused_by_name(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "engines" / "own.toml", make_tiny_models(tmp_path / "checkpoints"), name="own")
    path.write_text(path.read_text(encoding="utf-8") + SPEC, encoding="utf-8")

    told = subprocess.run([sys.executable, "-c", BUILD, "build", "--spec", path], capture_output=True, text=True)

    assert told.returncode != 0
    assert "lines" in told.stderr + told.stdout and "no installed package offers one" in told.stderr + told.stdout
