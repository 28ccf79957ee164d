"""Dockerfile, .dockerignore, deploy/compose.yaml and docs/production.md: they say what the code and the pins say."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pathspec
import pytest
import yaml
from compose_spec import PyCompose
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

import lr_backend
from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.memory import GIB, estimate
from lr_backend.build.shapes import count_weights, find_sources, known_models
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.cli import app as cli
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.frontend.limits import Keys
from lr_backend.frontend.settings import Settings
from lr_backend.serve import health
from lr_backend.serve.mps import LOG_VARIABLE, PIPES_VARIABLE
from lr_backend.serve.server import CLEANUP_MARGIN_S
from lr_backend.serve.warmup import WARM_UP_S
from tools.supply_chain import locked, with_what_they_need

PROJECT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "trtllm")
INSTALLED_AT = "/opt/lookahead"


def dockerfile_stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage, by the stage's name: (instruction, value)."""
    parser = DockerfileParser(str(PROJECT / "Dockerfile"))
    stages: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in parser.structure:
        if line["instruction"] == "FROM":
            name = line["value"].split()[-1]
            stages[name] = []
        if line["instruction"] != "COMMENT":
            stages[name].append((line["instruction"], line["value"]))
    return stages


STAGES = dockerfile_stages()


def value_of(stage: str, instruction: str) -> str:
    values = [value for name, value in STAGES[stage] if name == instruction]
    assert len(values) == 1, f"{stage}: {instruction} stands there {len(values)} times"
    return values[0]


def pins(path: str) -> dict[str, str]:
    lines = (PROJECT / path).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pyproject() -> dict[str, Any]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------------- Dockerfile


def test_the_targets_start_from_the_pinned_images() -> None:
    default = next(value.partition("=")[2] for _, value in STAGES[""] if value.startswith("BASE="))
    tag, _, digest = default.partition("@")
    assert tag == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest), "what a tag names can change"
    assert pyproject()["project"]["optional-dependencies"]["trtllm"] == ["tensorrt-llm==1.2.1"]  # what that image has
    assert value_of("trtllm", "FROM") == "${BASE} AS trtllm"
    assert value_of("cpu", "FROM") == "${PYTHON_IMAGE} AS cpu"


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_run_without_root_and_by_the_command_itself(target: str) -> None:
    assert value_of(target, "USER") == "1000:1000"
    entrypoint = json.loads(value_of(target, "ENTRYPOINT"))  # JSON: the exec form, no shell between runtime and command
    assert entrypoint[:2] == ["lookahead", "serve"]
    assert value_of(target, "STOPSIGNAL") == "SIGTERM"
    options = [part for part in entrypoint[2:] + json.loads(value_of(target, "CMD")) if part.startswith("--")]
    known = {name.replace("_", "-") for name in inspect.signature(cli.serve).parameters}
    assert {option.removeprefix("--") for option in options} <= known


@pytest.mark.parametrize("target", TARGETS)
def test_the_ports_are_the_servers_defaults(target: str) -> None:
    defaults = inspect.signature(cli.serve).parameters
    ports = {parameter.default for name, parameter in defaults.items() if name.endswith("_port")}
    assert {int(port) for port in value_of(target, "EXPOSE").split()} == ports
    assert f":{defaults['openai_port'].default}/ready" in health.DEFAULT_URL


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_is_the_probe(target: str) -> None:
    command = json.loads(value_of(target, "HEALTHCHECK").partition("CMD ")[2])
    assert command[:3] == ["python3", "-I", "-S"]
    assert PROJECT / Path(command[3]).relative_to(INSTALLED_AT) == Path(health.__file__)
    timeout_s = re.search(r"--timeout=(\d+)s", value_of(target, "HEALTHCHECK"))
    assert timeout_s and int(timeout_s[1]) > health.TIMEOUT_S


@pytest.mark.parametrize("target", TARGETS)
def test_the_label_says_the_packages_version(target: str) -> None:
    assert ("ARG", f"VERSION={lr_backend.__version__}") in STAGES[target]


@pytest.mark.parametrize("stage", ["cpu-packages", "trtllm-app"])
def test_every_install_is_pinned(stage: str) -> None:
    """A constraint file is in force, or the file of requirements is itself made of pins."""
    pinned = any(re.search(r"PIP_CONSTRAINT=\S*constraints\.txt", value) for _, value in STAGES[stage])
    assert pinned
    for instruction, value in STAGES[stage]:
        if instruction == "RUN" and "pip" in value and " install " in value and stage == "trtllm-app":
            assert "--no-deps" in value and "--target" in value


def test_no_cpu_pin_reaches_the_ngc_image() -> None:
    """At the versions of constraints.txt, and none that decides how engines and their loaders behave.

    tritonclient is of the image's own release: the code that 2.73.0 generated refuses a grpcio below 1.81.1.
    """
    ours, theirs = (
        {canonical(name): version for name, version in pins("constraints.txt").items()},
        pins("deploy/requirements-trtllm.txt"),
    )
    assert theirs.pop("tritonclient") == "2.71.0"
    assert {canonical(name): version for name, version in theirs.items()}.items() <= ours.items()
    untouched = {
        "numpy",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface-hub",
        "pydantic",
        "pydantic-core",
        "psutil",
    }
    assert not untouched & {canonical(name) for name in theirs}
    assert not any("nvidia-pytriton" in value or "[cpu]" in value for _, value in STAGES["trtllm-app"] + STAGES["trtllm"])


def test_the_ngc_image_lacks_no_dependency_of_the_command() -> None:
    """Each dependency of the package and of the client is the image's, or among the pinned ones."""
    of_the_image = {"numpy", "torch", "transformers", "safetensors", "pydantic", "psutil", "jinja2"}
    client = tomllib.loads((PROJECT / "client" / "pyproject.toml").read_text(encoding="utf-8"))
    lines = pyproject()["project"]["dependencies"] + client["project"]["dependencies"]
    declared = {canonical(re.split(r"[\[<>=]", line)[0]) for line in lines}
    added = {canonical(name) for name in pins("deploy/requirements-trtllm.txt")}
    assert declared - of_the_image <= added


def test_the_bill_of_the_cpu_image_has_what_the_dockerfile_installs() -> None:
    (line,) = (value for name, value in STAGES["cpu-packages"] if name == "RUN" and "> requirements.txt" in value)
    _, *program = shlex.split(line)[:3]
    asked = subprocess.run([sys.executable, *program], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    wanted = with_what_they_need(map(Requirement, asked.splitlines()))
    assert {"torch", "nvidia-pytriton", "opentelemetry-sdk"} <= wanted == set(locked("cpu"))


def test_the_bill_of_the_ngc_image_has_what_the_dockerfile_installs() -> None:
    files = [file for _, value in STAGES["trtllm-app"] for file in re.findall(r"--requirement (\S+)", value)]
    wanted = {canonical(name): version for file in files for name, version in pins(file).items()}
    assert {"tritonclient", "openai"} <= set(wanted)
    assert wanted == locked("trtllm")


# -------------------------------------------------------------------------------------------------------------- .dockerignore


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out: the last pattern that matches it or a folder above it decides.

    Its patterns are anchored at the root, except those that begin with ``**``; here they are read as a .gitignore's.
    """
    lines = [
        line for line in (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    anchored = [re.sub(r"^(!?)(?!\*)", r"\1/", line) for line in lines]
    return pathspec.PathSpec.from_lines("gitignore", anchored).match_file(path)


@pytest.mark.parametrize(
    "path",
    [
        *(
            ".git/config",
            ".venv/bin/python",
            ".env",
            "deploy/.env",
            "deploy/compose.yaml",
            "out/image-check/storage/x",
            ".ci/run",
        ),
        *(
            "tests/unit/test_deploy_files.py",
            "docs/api.md",
            "client/tests/test_client_protocol.py",
            "client/src/lookahead_client.egg-info/PKG-INFO",
            "bench/engine.py",
            "shared/x",
        ),
        *("engines/built/demo/manifest.json", "checkpoints/Qwen3-32B/model.safetensors", "demo/runs/x.json"),
        *("lr_backend/embedded/native/_decoder.cpython-311-x86_64-linux-gnu.so", "lr_backend/__pycache__/cli.cpython-311.pyc"),
        *("demo/server.log", "id_rsa", "Dockerfile"),
    ],
)
def test_stays_out_of_the_build_context(path: str) -> None:
    assert ignored(path)


def test_what_the_dockerfile_copies_is_in_the_build_context() -> None:
    copied = {
        word
        for instructions in STAGES.values()
        for instruction, value in instructions
        if instruction == "COPY" and not value.startswith("--from")
        for word in value.split()[:-1]
    }
    assert {"lr_backend", "engines", "model_repository", "constraints.txt"} <= copied
    for name in copied:
        files = [
            path
            for path in [PROJECT / name, *(PROJECT / name).rglob("*.toml"), *(PROJECT / name).rglob("*.py")]
            if path.is_file()
        ]
        assert files or (PROJECT / name).is_dir()
        for path in files:
            if "__pycache__" not in path.parts and "built" not in path.parts:
                assert not ignored(str(path.relative_to(PROJECT))), path


# ---------------------------------------------------------------------------------------------------------------- compose.yaml


def compose(**given: str) -> dict[str, Any]:
    """The file with every variable that is not given at its default."""
    text = (PROJECT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    plain = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: given.get(match[1], match[2]), text)
    plain = re.sub(r"\$\{(\w+):\+([^}]*)\}", lambda match: match[2] if match[1] in given else "", plain)
    assert "${" not in plain, "a variable without a default"
    loaded: dict[str, Any] = yaml.safe_load(plain)
    return loaded


SERVICES: dict[str, Any] = compose()["services"]
SERVING = ("cpu", "gpu")


def num_bytes(size: str) -> int:
    """As Docker reads sizes: ``8gb``, ``160g``, ``64m``."""
    number, unit = re.fullmatch(r"(\d+)([kmg])b?", size, re.ASCII).groups()  # type: ignore[union-attr]
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit]


def num_seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def test_the_compose_file_is_valid() -> None:
    parsed = PyCompose.from_json(json.dumps(compose()))
    parsed.validate()
    assert parsed.service_names() == ["cpu", "gpu", "build"]


@pytest.mark.parametrize("mistake", [{"shm_siez": "1gb"}, {"restart": "sometimes"}, {"stop_grace_period": "60"}])
def test_the_validation_sees_mistakes(mistake: dict[str, Any]) -> None:
    spec = compose()
    spec["services"]["gpu"].update(mistake)
    with pytest.raises(ValueError):
        PyCompose.from_json(json.dumps(spec))


def test_each_service_is_started_by_its_profile_alone() -> None:
    assert {name: service["profiles"] for name, service in SERVICES.items()} == {
        "cpu": ["cpu"],
        "gpu": ["gpu"],
        "build": ["build"],
    }
    assert [SERVICES[name]["build"]["target"] for name in SERVICES] == ["cpu", "trtllm", "trtllm"]
    assert all((PROJECT / "deploy" / service["build"]["context"] / "Dockerfile").is_file() for service in SERVICES.values())
    assert all(service["image"].endswith(f"-{lr_backend.__version__}") for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_powers(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "1000:1000" and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "cap_add" not in service


@pytest.mark.parametrize("name", SERVING)
def test_a_server_writes_nowhere_but_in_memory(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    (mount,) = service["tmpfs"]
    where, _, options = mount.partition(":")
    assert where == "/tmp"
    # Docker mounts it noexec otherwise, and the LLM API loads libraries that it compiles there.
    assert ("exec" in options.split(",")) == (name == "gpu")
    assert all(volume["read_only"] for volume in service.get("volumes", ()))
    assert service["shm_size"] and service["restart"] == "unless-stopped" and service["init"] is True


@pytest.mark.parametrize(("name", "target"), [("cpu", "cpu"), ("gpu", "trtllm")])
def test_a_servers_health_check_is_its_images(name: str, target: str) -> None:
    health, image = SERVICES[name]["healthcheck"], value_of(target, "HEALTHCHECK")
    of_the_image = ["CMD", *json.loads(image.partition("CMD ")[2])]
    assert health["test"][: len(of_the_image)] == of_the_image
    options = {key.replace("_", "-"): str(value) for key, value in health.items() if key != "test"}
    assert options == dict(re.findall(r"--([a-z-]+)=(\S+)", image))


@pytest.mark.parametrize("path", sorted((PROJECT / "engines").glob("*.toml")), ids=lambda path: path.stem)
def test_a_server_that_stays_unhealthy_is_ended_and_one_that_drains_is_not(path: Path) -> None:
    spec = DeploymentSpec.load(path)
    service = SERVICES["cpu" if spec.runtime == "embedded" else "gpu"]
    *_, option, number = service["healthcheck"]["test"]
    assert option == "--end-after" and service["restart"] == "unless-stopped"
    ended_after_s = int(number) * num_seconds(service["healthcheck"]["interval"])
    assert ended_after_s > spec.server.exit_timeout_s + CLEANUP_MARGIN_S


@pytest.mark.parametrize("name", SERVING)
def test_ports_are_published_on_loopback(name: str) -> None:
    """Triton's three, and the front end's."""
    assert SERVICES[name]["ports"] == [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002, 9000)]


@pytest.mark.parametrize("name", SERVING)
def test_keys_are_asked_for_where_a_file_of_them_is_named(name: str) -> None:
    spec = ["--spec", "demo" if name == "cpu" else "qwen3-32b"]
    (mount,) = (each for each in SERVICES[name]["volumes"] if each["target"].startswith("/run/secrets/"))
    assert mount["source"] == "/dev/null" and shlex.split(SERVICES[name]["command"]) == spec
    service = compose(LOOKAHEAD_OPENAI_KEYS="/etc/keys")["services"][name]
    assert {**mount, "source": "/etc/keys"} in service["volumes"] and mount["read_only"]
    assert shlex.split(service["command"]) == [*spec, "--openai-keys", mount["target"]]
    assert "openai_keys" in inspect.signature(cli.serve).parameters


def test_a_file_without_keys_opens_nothing() -> None:
    with pytest.raises(ConfigError, match="no API key"):
        Keys.read(Path("/dev/null"))


@pytest.mark.parametrize("target", ["cpu", "trtllm"])
def test_the_openai_api_listens_where_published_ports_lead(target: str) -> None:
    options = json.loads(value_of(target, "ENTRYPOINT"))[2:8]
    given = dict(zip(options[::2], options[1::2], strict=True))
    settings = PROJECT / "deploy" / Path(given["--openai-settings"]).name
    assert ("COPY", f"deploy/{settings.name} {Path(given['--openai-settings']).parent}/") in STAGES[target]
    assert Settings.load(settings, host=given["--openai-host"], port=9000, keys_file=None).open_to_network
    with pytest.raises(ConfigError, match="can be reached from elsewhere"):
        Settings.load(None, host=given["--openai-host"], port=9000, keys_file=None)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_limited(name: str) -> None:
    service = SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    assert float(limits["cpus"]) >= 1 and int(limits["pids"]) >= 1024
    sizes = [service["shm_size"], *re.findall(r"size=(\w+)", " ".join(service.get("tmpfs", ())))]
    assert num_bytes(limits["memory"]) > sum(map(num_bytes, sizes)), "what lies in memory counts"


@pytest.mark.parametrize("path", sorted((PROJECT / "engines").glob("*.toml")), ids=lambda path: path.stem)
def test_the_memory_holds_the_engines_on_their_way_to_the_cards(path: Path) -> None:
    spec = DeploymentSpec.load(path)
    if not isinstance(spec, GpuDeployment):
        return
    gpu = SERVICES["gpu"]
    weights = sum(engine.weights for card in estimate(spec, find_sources(spec)) for engine in card.engines)
    room = num_bytes(gpu["deploy"]["resources"]["limits"]["memory"]) - num_bytes(gpu["shm_size"])
    assert weights < 0.8 * room


@pytest.mark.parametrize("name", ["gpu", "build"])
def test_the_base_is_the_dockerfiles(name: str) -> None:
    assert "BASE" not in SERVICES[name]["build"].get("args", {}), "it is said once, by digest"


def test_the_image_shares_cards_by_mps_in_its_own_container() -> None:
    assert "--start-mps" in json.loads(value_of("trtllm", "ENTRYPOINT"))
    assert "--start-mps" not in json.loads(value_of("cpu", "ENTRYPOINT"))
    (said,) = [value for name, value in STAGES["trtllm"] if name == "ENV"]
    folders = dict(re.findall(r"(CUDA_MPS_\w+)=(\S+)", said))
    assert folders[PIPES_VARIABLE] == folders[LOG_VARIABLE] and folders[LOG_VARIABLE].startswith("/tmp/"), (
        "the only place to write"
    )
    gpu = SERVICES["gpu"]
    assert "entrypoint" not in gpu, "the image's own"
    assert not any(name.startswith("CUDA_MPS") for name in gpu["environment"])
    assert gpu["ipc"] == "private"


@pytest.mark.parametrize("path", sorted((PROJECT / "engines").glob("*.toml")), ids=lambda path: path.stem)
def test_a_server_is_given_the_time_that_it_takes_to_drain(path: Path) -> None:
    spec = DeploymentSpec.load(path)
    service = SERVICES["cpu" if spec.runtime == "embedded" else "gpu"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= spec.server.exit_timeout_s + 2 * CLEANUP_MARGIN_S
    if isinstance(spec, GpuDeployment):
        assert spec.server.exit_timeout_s >= spec.loop_config().limits.max_tokens / 70, "the longest answer, at 70 tokens/s"
    start_s = int(service["healthcheck"]["start_period"].removesuffix("s"))
    assert start_s >= spec.server.load_timeout_s + (WARM_UP_S if isinstance(spec, GpuDeployment) else 0.0)


@pytest.mark.parametrize("name", ["gpu", "build"])
def test_gpus_and_limits(name: str) -> None:
    service = SERVICES[name]
    device = service["deploy"]["resources"]["reservations"]["devices"][0]
    assert device == {"driver": "nvidia", "count": 4, "capabilities": ["gpu"]}
    assert service["ulimits"]["memlock"] == -1 and service["ulimits"]["stack"] == 67108864
    data = {volume["target"] for volume in service["volumes"] if volume["source"] != "/dev/null"}
    assert data == {f"{INSTALLED_AT}/engines/built", f"{INSTALLED_AT}/checkpoints"}


def test_engines_are_written_by_the_build_alone() -> None:
    writable = [volume["target"] for volume in SERVICES["build"]["volumes"] if not volume.get("read_only")]
    assert writable == [f"{INSTALLED_AT}/engines/built"]
    assert SERVICES["build"]["network_mode"] == "none"


# ----------------------------------------------------------------------------------------------------------- docs/production.md

PAGE = (PROJECT / "docs" / "production.md").read_text(encoding="utf-8")


def test_the_page_names_the_images_that_are_built() -> None:
    base = next(value.partition("=")[2] for name, value in STAGES[""] if value.startswith("BASE="))
    assert base.partition("@")[0] in PAGE
    tags = set(re.findall(r"lookahead:([a-z]+-[0-9.]+)", PAGE))
    assert tags <= {service["image"].partition(":")[2] for service in SERVICES.values()}


def test_the_page_and_the_compose_file_name_the_same_variables() -> None:
    text = (PROJECT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    of_compose = set(re.findall(r"\$\{(LOOKAHEAD_\w+):-", text))
    listed = set(re.findall(r"LOOKAHEAD_\w+", text.partition("name: lookahead")[0]))
    assert of_compose == listed, "the comment at the top lists the variables"
    assert {"LOOKAHEAD_BIND", "LOOKAHEAD_VERSION", "LOOKAHEAD_ENGINES"} <= of_compose & set(re.findall(r"LOOKAHEAD_\w+", PAGE))


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:deploy|tests|docs|engines)/[\w./-]+|Dockerfile|[\w.-]+\.txt)`", PAGE)))
)
def test_the_page_names_files_that_exist(name: str) -> None:
    assert (PROJECT / name).exists() or name.startswith("engines/built")


def test_the_page_runs_containers_as_the_compose_file_does() -> None:
    gpu = SERVICES["gpu"]
    by_hand = PAGE[PAGE.index("    common=(") :].partition("\n\n")[0]
    assert f"--shm-size {gpu['shm_size'].removesuffix('b')}" in by_hand and f"--tmpfs {gpu['tmpfs'][0]}" in by_hand
    assert f"--stop-timeout {gpu['stop_grace_period'].removesuffix('s')}" in by_hand
    for limit, value in (("memlock", -1), ("stack", 67108864)):
        assert gpu["ulimits"][limit] == value and f"--ulimit {limit}={value}" in by_hand
    assert all(f":{volume['target']}:ro" in by_hand for volume in gpu["volumes"] if volume["source"] != "/dev/null")
    assert all(option in by_hand for option in ("--init", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges"))


def test_the_page_shows_what_the_plan_and_the_build_print(tmp_path: Path) -> None:
    spec = DeploymentSpec.load("qwen3-32b")
    assert isinstance(spec, GpuDeployment)
    root = tmp_path.absolute()  # no checkpoint there
    path = root / "engines" / "qwen3-32b.toml"
    path.parent.mkdir()
    path.write_text(spec.path.read_text(encoding="utf-8"), encoding="utf-8")
    planned = DeploymentSpec.load(path)
    assert isinstance(planned, GpuDeployment)
    report = build_gpu_deployment(planned, dry_run=True)
    printed = {f"waits {line}".replace(str(root), INSTALLED_AT) for line in report.waiting}
    printed |= {f"done {step.role}: {step.name} in ... s" for step in report.steps}
    for role in Role:
        shape = known_models()[planned.engine(role).hub]
        counts = count_weights(shape)
        total = counts.linear + counts.embedding + counts.replicated + (0 if shape.tied_embeddings else counts.head)
        sizes = f"{total / 1e9:.2f} B parameters, vocabulary {shape.vocab_size}, {shape.max_positions} positions"
        printed.add(f"checked {role}: {shape.architecture}, {sizes}")
    shown = {line.strip() for line in PAGE.splitlines() if re.match(r" +(waits|done|checked) ", line)}
    assert shown <= printed and len(shown) == 5 + 6 + 3
    assert all(f"waits {line}".replace(str(root), INSTALLED_AT) in shown for line in report.waiting)


@pytest.mark.parametrize("path", sorted((PROJECT / "engines").glob("*.toml")), ids=lambda path: path.stem)
def test_the_sizing_table_says_what_the_plan_does(path: Path) -> None:
    spec = DeploymentSpec.load(path)
    if not isinstance(spec, GpuDeployment):
        return
    cards = estimate(spec, find_sources(spec))
    fullest = max(cards, key=lambda card: card.total)
    target = next(engine for engine in cards[0].engines if engine.role is Role.TARGET)
    lines = (PROJECT / "docs" / "production.md").read_text(encoding="utf-8").splitlines()
    row = next(line.split("|") for line in lines if line.startswith("| `") and f"`{spec.name}`" in line and line.count("|") == 7)
    held, capacity = (float(number) for number in row[4].split(","))
    # One row may stand for two deployments of the same sizes.
    assert (held, capacity) == (pytest.approx(fullest.total / GIB, abs=0.11), pytest.approx(fullest.capacity / GIB, abs=0.06))
    assert row[5].strip() == f"{spec.target.max_num_tokens:,}"
    assert float(row[6].split()[0]) == pytest.approx(target.kv_tokens / 1000, abs=1.5) and row[6].split()[1] == "k"
