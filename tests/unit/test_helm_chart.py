"""deploy/helm/lookahead, rendered by Helm itself and held strictly against Kubernetes' schemas: it says what the code says."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import helm_python as helm
import pytest
import typer
import yaml
from click.testing import CliRunner
from huggingface_hub.cli.hf import app as hub

import lr_backend
from lr_backend.build.memory import GIB, estimate
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.cli.app import app as cli
from lr_backend.cli.ports import OPENAI_PORT, PORTS
from lr_backend.engine import Role
from lr_backend.engine.address import ENGINE_KEY_VARIABLE, Address
from lr_backend.frontend import app as frontend
from lr_backend.frontend.settings import Settings
from lr_backend.serve import health
from lr_backend.serve.nodes import GROUP_SIZE, KEY_VARIABLE, LEADER_ADDRESS, SSH_PORT, WORKER_INDEX, group_of
from lr_backend.serve.server import CLEANUP_MARGIN_S
from tests.support.observed import has_prometheus

PROJECT = Path(__file__).resolve().parents[2]
CHART = PROJECT / "deploy" / "helm" / "lookahead"
PROFILES = sorted(path.stem for path in (CHART / "profiles").glob("*.yaml"))
KUBERNETES = ("1.37", "1.34", "1.32")
"""The newest that the validator knows, and the oldest that the chart takes."""
EVERYTHING: dict[str, Any] = {
    "openai": {"settings": {"max_requests_a_minute": 60}},
    "monitoring": {
        "serviceMonitor": True,
        "prometheusRule": True,
        "dashboard": True,
        "credentialsSecret": {"name": "scrape"},
    },
    "httpRoute": {"enabled": True, "gateway": "front", "gatewayNamespace": "edge", "hostname": "lookahead.example"},
    "ingress": {"enabled": True, "className": "nginx", "hostname": "lookahead.example", "tlsSecret": "tls"},
    "autoscaling": {"kind": "keda"},
    "checkpoints": {"enabled": True},
    "engines": {"enabled": True},
    "download": {
        "repositories": [{"repository": "Qwen/Qwen3-1.7B", "folder": "Qwen3-1.7B", "revision": "main"}],
        "tokenSecret": {"name": "hub"},
    },
    "build": {"enabled": True},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]},
    "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}],
}
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "LeaderWorkerSet"}
"""Of operators: no schema of Kubernetes' own; their shape is said below."""

Document = dict[str, Any]
NEEDS_PROMETHEUS = pytest.mark.skipif(not has_prometheus(), reason="promtool is not installed (Debian's package prometheus)")


def over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes laid over them, as Helm lays a second file over the first."""
    merged = copy.deepcopy(dict(values))
    for key, value in changes.items():
        merged[key] = over(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged


def profile(name: str, **changes: Any) -> dict[str, Any]:
    return over(helm.values_from_yaml((CHART / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")), changes)


def render(values: Mapping[str, Any], chart: Path = CHART, release: str = "lr") -> list[Document]:
    with helm.Chart.load(chart) as loaded:
        pages = loaded.render(dict(values), name=release, namespace="prod")
    return [each for name, text in pages.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text) if each]


def named(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = (each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    for each in documents:
        owner, spec = f"{each['kind']}/{each['metadata']['name']}", each.get("spec", {})
        if "template" in spec:
            yield owner, spec["template"]["spec"]
        for part in ("leaderTemplate", "workerTemplate"):
            if part in spec.get("leaderWorkerTemplate", {}):
                yield f"{owner}/{part}", spec["leaderWorkerTemplate"][part]["spec"]


def validator() -> ModuleType:
    """Compiles grammars for seconds, and every process of the tests reads this file: imported where it is needed."""
    return import_module("kubernetes_validate")


def validate(documents: list[Document], version: str = KUBERNETES[0]) -> None:
    for each in documents:
        if each["kind"] == "LeaderWorkerSet":
            for pods_of in pod_templates(each):
                validator().validate(pods_of, version, strict=True)
        elif each["kind"] not in CUSTOM:
            validator().validate(each, version, strict=True)


def pod_templates(group: Document) -> Iterator[Document]:
    """What the controller makes of a LeaderWorkerSet: a StatefulSet of leaders, and one of workers for each."""
    for part in ("leaderTemplate", "workerTemplate"):
        template = group["spec"]["leaderWorkerTemplate"][part]
        labels = template["metadata"]["labels"]
        spec = {"serviceName": group["metadata"]["name"], "selector": {"matchLabels": labels}, "template": template}
        yield {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": group["metadata"]["name"]}, "spec": spec}


HPA = {"kind": "hpa", "requestsInFlight": 12}
OVER_NODES = {"nodeKeySecret": {"name": "node-key"}, "target": {"nodes": 2, "gpus": 1}}
RELEASES: dict[str, dict[str, Any]] = {
    **{name: profile(name) for name in PROFILES},
    **{f"{name}, everything": profile(name, **EVERYTHING) for name in PROFILES},
    "roles-apart, by TLS": profile("roles-apart", roles={"tlsSecret": "roles-tls"}),
    "roles-apart, a target over two nodes": profile("roles-apart", **over(EVERYTHING, {"roles": OVER_NODES})),
    "cpu, hpa": profile("cpu", autoscaling=HPA),
}
"""The values that tests look at."""


@cache
def rendered(name: str) -> list[Document]:
    """One of :data:`RELEASES`; whoever changes it changes a copy."""
    return render(RELEASES[name])


# ------------------------------------------------------------------------------------------------------------------ the schemas


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", RELEASES)
def test_is_what_kubernetes_takes(name: str, version: str) -> None:
    validate(rendered(name), version)
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(name)]
    assert len(names) == len(set(names)) and ("Deployment", "lr-lookahead") in names


@pytest.mark.parametrize("name", PROFILES)
def test_helm_lint_finds_nothing(name: str) -> None:
    report = helm.lint(CHART, profile(name), strict=True)
    assert report["errors"] == [] and {each["severity"] for each in report["messages"]} <= {1}  # 1: it would like an icon


@pytest.mark.parametrize(
    ("template", "right", "wrong"),
    [
        ("server.yaml", "readinessProbe:", "readynessProbe:"),
        ("server.yaml", "containerPort: 9000", "containerPort: nine"),
        ("networkpolicy.yaml", "policyTypes: [Ingress, Egress]", "policyTypes: Ingress"),
        ("storage.yaml", "accessModes:", "accessMode:"),
    ],
)
def test_a_broken_template_is_seen(tmp_path: Path, template: str, right: str, wrong: str) -> None:
    for path in CHART.rglob("*"):
        if path.is_file():
            copied = tmp_path / "lookahead" / path.relative_to(CHART)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
    chart = tmp_path / "lookahead"
    validate(render(profile("one-node"), chart))
    broken = chart / "templates" / template
    text = broken.read_text(encoding="utf-8")
    assert right in text
    broken.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(validator().ValidationError):
        validate(render(profile("one-node"), chart))


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 2},
        {"server": {"gpus": -1}},
        {"server": {"gpus": "4"}},
        {"server": {"shm": "8 GB"}},
        {"server": {"resources": {"limit": {}}}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"spec": {"name": "../demo"}},
        {"spec": {"exitTimeoutSeconds": 4000}},
        {"openai": {"settings": {"max_in_fligth": 3}}},
        {"openai": {"settings": {"open_to_network": True}}},
        {"openai": {"keysSecret": {"name": "Not A Name"}}},
        {"openai": {"keys": ["sk-1"]}},
        {"roles": {"enabled": True, "target": {"replicas": 0}}},
        {"roles": {"key": "secret"}},
        {"roles": {"target": {"nodes": 0}}},
        {"roles": {"nodeKeySecret": "node-key"}},
        {"engines": {"accessModes": []}},
        {"download": {"repositories": [{"repository": "Qwen3-32B", "folder": "x"}]}},
        {"download": {"repositories": [{"repository": "Qwen/Qwen3-32B", "folder": "../x"}]}},
        {"download": {"token": "hf_1"}},
        {"autoscaling": {"kind": "vpa"}},
        {"autoscaling": {"takenShare": 1.5}},
        {"monitoring": {"interval": "15"}},
        {"service": {"port": 0}},
        {"httpRoute": {"requestTimeout": "forever"}},
    ],
    ids=str,
)
def test_the_schema_of_the_values_refuses(wrong: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(profile("cpu"))
        with pytest.raises(helm.HelmError):
            chart.validate_schema(profile("cpu", **wrong))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (over(profile("cpu"), {"image": {"repository": ""}}), "image.repository"),
        (over(profile("cpu"), {"openai": {"keysSecret": {"name": ""}}}), "openai: give keysSecret.name"),
        (over(profile("roles-apart"), {"roles": {"keySecret": {"name": ""}}}), "roles.keySecret.name"),
        (over(profile("roles-apart"), {"roles": {"target": {"nodes": 2}}}), "roles.nodeKeySecret.name"),
        (over(profile("roles-apart"), {"spec": {"name": "mine"}}), "the chart needs its text"),
        (over(profile("cpu"), {"build": {"enabled": True}}), "build: it needs engines.enabled"),
        (over(profile("cpu"), {"download": EVERYTHING["download"]}), "download: it needs checkpoints.enabled"),
        (over(profile("cpu"), {"httpRoute": {"enabled": True}}), "httpRoute.gateway"),
        (over(profile("roles-apart"), {"monitoring": {"serviceMonitor": True}}), "networkPolicy.metricsFrom"),
        (
            over(profile("cpu"), {"monitoring": {"serviceMonitor": True}, "networkPolicy": {"from": [{"podSelector": {}}]}}),
            "networkPolicy.metricsFrom",
        ),
        (profile("cpu", autoscaling={"kind": "hpa"}), "autoscaling.requestsInFlight"),
        (over(profile("cpu"), {"ingress": {"enabled": True, "hostname": "a.example"}}), "ingress.tlsSecret"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused_by_name(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(why)):
        render(values)


@pytest.mark.parametrize(("nodes", "fits"), [(1, True), (2, False)])
def test_names_of_pods_over_several_nodes_fit_into_labels(nodes: int, fits: bool) -> None:
    """A worker's set is named after release, role and replica, and its pods are labelled with that and a hash."""
    values = over(profile("roles-apart"), {"roles": {"target": {"nodes": nodes}, "nodeKeySecret": {"name": "key"}}})
    with nullcontext() if fits else pytest.raises(helm.HelmError, match=r"roles\.target\.nodes: a shorter name"):
        render(values, release="team-reasoning-production-eu")


# --------------------------------------------------------------------------------------------------------------------- security


@pytest.mark.parametrize("name", RELEASES)
def test_no_pod_has_powers(name: str) -> None:
    seen = list(pods(rendered(name)))
    assert seen
    for _, pod in seen:
        assert pod["automountServiceAccountToken"] is False and pod["serviceAccountName"] == "lr-lookahead"
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == 1000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert all("hostPath" not in volume for volume in pod["volumes"])
    assert named(rendered(name), "ServiceAccount", "lr-lookahead")["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", RELEASES)
def test_only_memory_and_what_a_job_fills_can_be_written(name: str) -> None:
    for owner, pod in pods(rendered(name)):
        writable = {
            mount["mountPath"]
            for container in pod["containers"]
            for mount in container["volumeMounts"]
            if not mount.get("readOnly")
        }
        by_job = {"/checkpoints"} if "download" in owner else {"/opt/lookahead/engines/built"} if "build" in owner else set()
        assert writable == {"/tmp", *by_job} | (set() if "download" in owner else {"/dev/shm"})


@pytest.mark.parametrize("name", RELEASES)
def test_secrets_come_by_reference(name: str) -> None:
    assert not [each for each in rendered(name) if each["kind"] == "Secret"]
    for _, pod in pods(rendered(name)):
        for container in pod["containers"]:
            for variable in container.get("env", ()):
                if re.search("TOKEN|KEY|SECRET|PASSWORD", variable["name"]):
                    by_file = variable["name"].endswith("_FILE") and variable["value"].startswith("/run/secrets/")
                    assert by_file or "secretKeyRef" in variable["valueFrom"], variable
            for argument in container.get("args", ()):
                if "key" in argument.partition("=")[0]:
                    assert argument.partition("=")[2].startswith("/run/secrets/"), argument
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for path, volume in mounts.items():
                assert path.startswith("/run/secrets/") == ("secret" in volumes[volume])


@pytest.mark.parametrize("name", PROFILES)
def test_the_network_leads_to_the_openai_api_and_from_the_loop_to_roles(name: str) -> None:
    documents = rendered(f"{name}, everything")
    policies = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "NetworkPolicy"}
    assert [rule["ports"] for rule in policies["lr-lookahead"]["ingress"]] == [[{"port": OPENAI_PORT, "protocol": "TCP"}]]
    assert "ingress" not in policies["lr-lookahead-build"] and "egress" not in policies["lr-lookahead-build"]
    assert all(set(each["policyTypes"]) == {"Ingress", "Egress"} for each in policies.values())
    if name == "roles-apart":
        calls, metrics = policies["lr-lookahead-roles"]["ingress"]
        (peer,) = calls["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server" and len(peer) == 1
        assert [port["port"] for port in calls["ports"]] == [PORTS.grpc]
        assert [port["port"] for port in metrics["ports"]] == [PORTS.metrics] and metrics["from"]
        assert "egress" not in policies["lr-lookahead-roles"]
        (closed,) = (each for each in rendered(name) if each["metadata"]["name"] == "lr-lookahead-roles")
        assert len(closed["spec"]["ingress"]) == 1  # nobody reads metrics unless a peer is named


def test_who_reads_metrics_is_let_in_beside_those_who_ask() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}}]
    documents = render(over(profile("cpu", **EVERYTHING), {"networkPolicy": {"from": peers}}))
    clients, scrapers = named(documents, "NetworkPolicy", "lr-lookahead")["spec"]["ingress"]
    assert clients["from"] == peers and scrapers["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    assert clients["ports"] == scrapers["ports"] == [{"port": OPENAI_PORT, "protocol": "TCP"}]


# ------------------------------------------------------------------------------------------------------------ what the code says


def options_of(command: str) -> set[str]:
    """Long options in the help of one of the CLI's commands."""
    group: Any = typer.main.get_command(cli)
    return {option for parameter in group.commands[command].params for option in parameter.opts}


@pytest.mark.parametrize("name", RELEASES)
def test_every_flag_is_the_commands(name: str) -> None:
    for owner, pod in pods(rendered(name)):
        for container in pod["containers"]:
            if container["command"] == ["hf", "download"]:
                continue
            command = "build" if "build" in owner else "node" if owner.endswith("/workerTemplate") else "serve"
            assert " ".join(container["command"]).count(f"lookahead {command}") == 1
            given = {argument.partition("=")[0] for argument in container["args"]}
            assert given <= options_of(command), given - options_of(command)


def test_the_download_is_by_flags_that_the_hubs_command_has() -> None:
    known = set(re.findall(r"--[a-z-]+", CliRunner().invoke(hub, ["download", "--help"]).output))
    values = profile("cpu", **EVERYTHING)
    values["download"]["repositories"].append({"repository": "abisee/cnn_dailymail", "folder": "cnn_dailymail", "dataset": True})
    (job,) = (pod for owner, pod in pods(render(values)) if "download" in owner)
    assert "--repo-type=dataset" in job["containers"][-1]["args"]
    assert len({each["name"] for each in job["containers"]}) == len(job["containers"])
    given = {argument.partition("=")[0] for each in job["containers"] for argument in each["args"] if argument.startswith("--")}
    assert given == {"--revision", "--local-dir", "--repo-type"} and given <= known
    assert not [owner for owner, _ in pods(rendered("one-node")) if "download" in owner]  # nothing unless it is named


def test_the_probes_ask_what_the_servers_answer() -> None:
    source = Path(frontend.__file__).read_text(encoding="utf-8")
    documents = rendered("roles-apart")
    (server,) = named(documents, "Deployment", "lr-lookahead")["spec"]["template"]["spec"]["containers"]
    probes = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert all(f'("GET", "{path}"' in source for path in probes.values())
    (monitor,) = (each for each in rendered("cpu, everything") if each["kind"] == "ServiceMonitor")
    assert f'("GET", "{monitor["spec"]["endpoints"][0]["path"]}"' in source
    assert server["ports"] == [{"name": "openai", "containerPort": OPENAI_PORT}]
    (role,) = named(documents, "StatefulSet", "lr-lookahead-judge")["spec"]["template"]["spec"]["containers"]
    asked = Path(health.__file__).read_text(encoding="utf-8")
    assert role["readinessProbe"]["httpGet"] == role["startupProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert '"/v2/health/ready"' in asked  # what the images' own check asks Triton
    ports = {port["name"]: port["containerPort"] for port in role["ports"]}
    assert ports == {"http": PORTS.http, "grpc": PORTS.grpc, "metrics": PORTS.metrics}
    assert role["env"][0] == {"name": f"{ENGINE_KEY_VARIABLE}_FILE", "value": "/run/secrets/engine/engine-key"}


@pytest.mark.parametrize("name", PROFILES)
def test_a_pod_has_the_time_that_its_spec_takes(name: str) -> None:
    spec = DeploymentSpec.load(profile(name)["spec"]["name"])
    checked = 0
    for owner, pod in pods(rendered(name)):
        (container,) = pod["containers"]
        sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= sleep_s + spec.server.exit_timeout_s + CLEANUP_MARGIN_S + 5, owner
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= spec.server.load_timeout_s + 30
        checked += 1
    server = named(rendered(name), "Deployment", "lr-lookahead")["spec"]
    assert server["progressDeadlineSeconds"] >= spec.server.load_timeout_s + 600
    assert checked == (4 if name == "roles-apart" else 1)


@pytest.mark.parametrize("name", ["roles-apart, everything", "roles-apart, a target over two nodes"])
def test_whoever_waits_for_the_roles_does_so_for_as_long_as_they_may_load(name: str, tmp_path: Path) -> None:
    documents = rendered(name)
    file = tmp_path / "spec.toml"
    file.write_text(named(documents, "ConfigMap", "lr-lookahead")["data"]["spec.toml"], encoding="utf-8")
    spec = DeploymentSpec.load(file)
    assert spec.remotes_load_s == spec.server.load_timeout_s * (2 if "two nodes" in name else 1)
    server = named(documents, "Deployment", "lr-lookahead")["spec"]
    startup = server["template"]["spec"]["containers"][0]["startupProbe"]
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_s >= spec.remotes_load_s + 30 and server["progressDeadlineSeconds"] >= spec.remotes_load_s + 600
    down, role_down, *_ = named(documents, "PrometheusRule", "lr-lookahead")["spec"]["groups"][0]["rules"]
    was_there, starts = (int(each) for each in re.findall(r"\[(\d+)m\].*offset (\d+)m", down["expr"])[0])
    assert was_there - 5 == starts >= start_s / 60, "a start that is within its time is no alert"
    assert role_down["for"] == f"{starts}m"


@pytest.mark.parametrize("name", PROFILES)
def test_the_front_end_takes_its_settings(name: str, tmp_path: Path) -> None:
    documents = rendered(f"{name}, everything")
    file = tmp_path / "openai.toml"
    file.write_text(named(documents, "ConfigMap", "lr-lookahead")["data"]["openai.toml"], encoding="utf-8")
    settings = Settings.load(file, host="0.0.0.0", port=OPENAI_PORT, keys_file=Path("/run/secrets/openai/keys"))
    assert settings.max_requests_a_minute == 60 and not settings.open_to_network


@pytest.mark.parametrize(("name", "scheme"), [("roles-apart", "grpc"), ("roles-apart, by TLS", "grpcs")])
def test_the_loop_finds_each_replica_of_a_role(name: str, scheme: str, tmp_path: Path) -> None:
    documents = rendered(name)
    file = tmp_path / "engines" / "qwen3-32b-apart.toml"
    file.parent.mkdir()
    file.write_text(named(documents, "ConfigMap", "lr-lookahead")["data"]["spec.toml"], encoding="utf-8")
    spec = DeploymentSpec.load(file)
    assert spec.runs_loop and spec.placements == ()  # the loop's pod needs no card
    assert set(spec.remotes) == set(Role)
    page = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    for role, urls in spec.remotes.items():
        pods_of = named(documents, "StatefulSet", f"lr-lookahead-{role}")["spec"]
        service = named(documents, "Service", pods_of["serviceName"])
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"] == pods_of["selector"]["matchLabels"]
        names = [f"lr-lookahead-{role}-{i}.{service['metadata']['name']}" for i in range(pods_of["replicas"])]
        assert [Address.parse(url) for url in urls] == [Address(each, PORTS.grpc, scheme == "grpcs") for each in names]
        assert all(f"`{each}`" in page for each in names), "a certificate has to hold them"
        (placement,) = spec.only([role]).placements
        (container,) = pods_of["template"]["spec"]["containers"]
        assert list(placement.gpu_device_ids) == list(range(container["resources"]["limits"]["nvidia.com/gpu"]))
        assert placement.tp_size == len(placement.gpu_device_ids)


def labels_of(group: Document, part: str, **more: str) -> dict[str, str]:
    """Labels of a pod of a LeaderWorkerSet: its template's, and those that the controller adds."""
    added = {f"leaderworkerset.sigs.k8s.io/{name.replace('_', '-')}": value for name, value in more.items()}
    of_the_set = {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]}
    return {**group["spec"]["leaderWorkerTemplate"][part]["metadata"]["labels"], **of_the_set, **added}


def chooses(selector: Document, labels: Mapping[str, str]) -> bool:
    """Whether a selector of Kubernetes' takes a pod with these labels."""
    if any(each["operator"] != "In" for each in selector.get("matchExpressions", ())):
        raise NotImplementedError(selector)
    named_too = all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))
    return named_too and selector.get("matchLabels", {}).items() <= labels.items()


def test_a_role_over_nodes_is_a_group_of_pods_a_replica(tmp_path: Path) -> None:
    """Held by hand against the API leaderworkerset.x-k8s.io/v1: no schema of it is at hand."""
    documents = rendered("roles-apart, a target over two nodes")
    (group,) = (each for each in documents if each["kind"] == "LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert group["metadata"]["name"] not in {each["metadata"]["name"] for each in documents if each["kind"] != "LeaderWorkerSet"}
    assert set(group["spec"]) == {"replicas", "startupPolicy", "networkConfig", "rolloutStrategy", "leaderWorkerTemplate"}
    assert group["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}
    rollout = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0}}
    assert group["spec"]["rolloutStrategy"] == rollout
    of = group["spec"]["leaderWorkerTemplate"]
    assert set(of) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert (of["size"], of["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    file = tmp_path / "engines" / "qwen3-32b-apart.toml"
    file.parent.mkdir()
    file.write_text(named(documents, "ConfigMap", "lr-lookahead")["data"]["spec.toml"], encoding="utf-8")
    spec = DeploymentSpec.load(file)
    (placement,) = spec.only([Role.TARGET]).placements
    assert (placement.tp_size, placement.gpu_device_ids, placement.num_nodes) == (2, (0,), of["size"])
    for index, url in enumerate(spec.remotes[Role.TARGET]):
        address = Address.parse(url)
        # The controller's name of a leader, from which the launcher makes the others'.
        environment = {LEADER_ADDRESS: f"{address.host}.prod", GROUP_SIZE: str(of["size"]), WORKER_INDEX: "0"}
        led = group_of([placement], environment)
        assert led is not None
        assert led.leader == f"lr-lookahead-target-nodes-{index}.lr-lookahead-target-nodes.prod"
        assert led.others == (f"lr-lookahead-target-nodes-{index}-1.lr-lookahead-target-nodes.prod",)
    assert {each["metadata"]["name"] for each in documents if each["kind"] == "StatefulSet"} == {
        "lr-lookahead-draft",
        "lr-lookahead-judge",
    }


@pytest.mark.parametrize(
    ("changes", "held_back"),
    [
        ({}, False),
        ({"server": {"replicas": 0}}, True),
        ({"build": {"enabled": True}, "server": {"replicas": 0}}, True),
        ({"build": {"enabled": True}}, False),
    ],
    ids=["to serve", "to download", "to build", "built, and told to build again"],
)
def test_roles_do_not_hold_the_cards_that_their_engines_are_built_on(changes: dict[str, Any], held_back: bool) -> None:
    documents = render(profile("roles-apart", **over(changes, {"roles": OVER_NODES})))
    sets = {each["metadata"]["name"]: each for each in documents if each["kind"] in ("StatefulSet", "LeaderWorkerSet")}
    num_pods = {name: each["spec"]["replicas"] for name, each in sets.items()}
    assert sorted(num_pods.values()) == ([0, 0, 0] if held_back else [1, 1, 2])
    spec = named(documents, "ConfigMap", "lr-lookahead")["data"]["spec.toml"]
    assert spec == named(render(profile("roles-apart", roles=OVER_NODES)), "ConfigMap", "lr-lookahead")["data"]["spec.toml"]


@pytest.mark.parametrize("name", sorted(set(Settings.model_fields) - {"host", "port", "keys_file", "open_to_network"}))
def test_the_chart_takes_every_setting_of_the_openai_api(name: str) -> None:
    default = Settings.model_fields[name].default
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(profile("cpu", openai={"settings": {name: 16 if default is None else default}}))


def test_of_a_group_the_leader_alone_is_asked_and_a_node_has_no_key_but_the_groups() -> None:
    documents = rendered("roles-apart, a target over two nodes")
    (group,) = (each for each in documents if each["kind"] == "LeaderWorkerSet")
    leader, node = (pod["containers"][0] for _, pod in pods([group]))
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes <= leader.keys() and not probes & node.keys()
    assert leader["startupProbe"]["periodSeconds"] * leader["startupProbe"]["failureThreshold"] >= 2 * 900 + 30
    assert node["ports"] == [{"name": "ssh", "containerPort": SSH_PORT}]
    (service,) = (each for each in documents if each["kind"] == "Service" and each["metadata"]["name"] == "lr-lookahead-target")
    selector = {"matchLabels": service["spec"]["selector"]}
    assert chooses(selector, labels_of(group, "leaderTemplate", group_index="0", worker_index="0"))
    assert not chooses(selector, labels_of(group, "workerTemplate", group_index="0", worker_index="1"))
    for container in (leader, node):
        assert {"name": KEY_VARIABLE, "value": "/run/secrets/node/ssh-privatekey"} in container["env"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        # Set here, they would stand before those that the controller says.
        assert not [variable for variable in container["env"] if variable["name"].startswith("LWS_")]
    secrets = {volume["secret"]["secretName"] for volume in list(pods([group]))[1][1]["volumes"] if "secret" in volume}
    assert secrets == {"node-key"}
    graces = {pod["terminationGracePeriodSeconds"] for _, pod in pods([group])}
    assert len(graces) == 1, "a node waits for its leader's drain"


def test_a_groups_nodes_reach_each_other_and_no_other_group() -> None:
    documents = rendered("roles-apart, a target over two nodes")
    (group,) = (each for each in documents if each["kind"] == "LeaderWorkerSet")
    members = [
        labels_of(group, part, group_index=str(index), worker_index=str(worker))
        for index in range(2)
        for worker, part in enumerate(("leaderTemplate", "workerTemplate"))
    ]
    policies = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]

    def allowed(one: Mapping[str, str], other: Mapping[str, str], direction: str, peers: str) -> bool:
        """At every port: MPI and NCCL choose theirs."""
        return any(
            chooses(peer["podSelector"], other)
            for policy in policies
            if chooses(policy["podSelector"], one)
            for rule in policy.get(direction, ())
            if "ports" not in rule
            for peer in rule[peers]
        )

    for one in members:
        for other in members:
            same = one["leaderworkerset.sigs.k8s.io/group-index"] == other["leaderworkerset.sigs.k8s.io/group-index"]
            assert allowed(one, other, "ingress", "from") == allowed(one, other, "egress", "to") == same
    (budget,) = (
        each["spec"]
        for each in documents
        if each["kind"] == "PodDisruptionBudget" and each["metadata"]["name"] == "lr-lookahead-target"
    )
    assert all(chooses(budget["selector"], one) for one in members), "a node that is evicted takes its group along"


@pytest.mark.parametrize("name", ["one-node", "cpu"])
def test_a_pod_has_the_cards_of_its_spec(name: str) -> None:
    spec: Any = DeploymentSpec.load(profile(name)["spec"]["name"])
    (container,) = named(rendered(name), "Deployment", "lr-lookahead")["spec"]["template"]["spec"]["containers"]
    cards = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert cards == (spec.hardware.num_gpus if spec.placements else 0)
    assert container["image"].endswith(f"{'trtllm' if cards else 'cpu'}-{lr_backend.__version__}")
    starts_mps = "--start-mps" in container["args"]
    devices = [device for each in spec.placements for device in each.gpu_device_ids]
    assert starts_mps == (len(devices) != len(set(devices)))


@pytest.mark.parametrize("name", ["one-node", "roles-apart"])
def test_a_pod_has_the_memory_that_its_engines_are_compiled_in(name: str) -> None:
    """A rank at a time takes up to three times its weights; /dev/shm and /tmp are the pod's memory too."""
    values = profile(name)
    spec = DeploymentSpec.load(values["spec"]["name"])
    assert isinstance(spec, GpuDeployment)
    engines = {each.role: each for gpu in estimate(spec, find_sources(spec)) for each in gpu.engines}
    parts = values["roles"] if values.get("roles") else dict.fromkeys(Role, values["server"])
    defaults = helm.values_from_yaml((CHART / "values.yaml").read_text(encoding="utf-8"))["roles"]["target"]
    for role in Role:
        part = {**defaults, **parts[role]}
        limit, shm, tmp = (
            float(text.removesuffix("Gi")) for text in (part["resources"]["limits"]["memory"], part["shm"], part["tmp"])
        )
        assert limit >= 3 * engines[role].weights / GIB + shm + tmp, role


@pytest.mark.parametrize("name", RELEASES)
def test_a_pod_without_cards_sees_none_of_its_node(name: str) -> None:
    """NVIDIA's image shows all of them to a container that asks for none, where its runtime is the node's default."""
    for owner, pod in pods(rendered(name)):
        for container in pod["containers"]:
            cards = container["resources"].get("limits", {}).get("nvidia.com/gpu", 0)
            shown = [each["value"] for each in container.get("env", ()) if each["name"] == "NVIDIA_VISIBLE_DEVICES"]
            assert shown == ([] if cards else ["void"]), (owner, container["name"])


def test_a_second_release_builds_beside_the_first_and_reads_its_checkpoints() -> None:
    first = rendered("one-node")
    claims = [each["metadata"]["name"] for each in first if each["kind"] == "PersistentVolumeClaim"]
    assert claims == ["lr-lookahead-checkpoints", "lr-lookahead-engines"]
    page = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"checkpoints.claim={claims[0]}" in page and f"engines.claim={claims[1]}" in page
    changes = {"checkpoints": {"claim": claims[0]}, "build": {"enabled": True}, "server": {"replicas": 0}}
    second = render(profile("one-node", **changes), release="lr2")
    validate(second)
    names = {(each["kind"], each["metadata"]["name"]) for each in second}
    assert not names & {(each["kind"], each["metadata"]["name"]) for each in first}
    assert ("PersistentVolumeClaim", "lr2-lookahead-engines") in names and ("Service", "lr2-lookahead") in names
    assert ("PersistentVolumeClaim", "lr2-lookahead-checkpoints") not in names
    for _, pod in pods(second):
        held = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each}
        assert held == {claims[0], "lr2-lookahead-engines"}


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({"openai": {"settings": {"max_requests_a_minute": 90}}}, {""}),
        ({"roles": {"target": {"replicas": 3}}}, {""}),
        ({"roles": {"judge": {"gpus": 2}}}, {"", *(f"-{role}" for role in Role)}),
    ],
    ids=["a setting of the OpenAI API", "another replica", "another spec"],
)
def test_a_change_restarts_those_whom_it_concerns(changes: dict[str, Any], restarted: set[str]) -> None:
    before, after = (
        {
            each["metadata"]["name"]: each["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for each in render(profile("roles-apart", **of))
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        for of in ({}, changes)
    )
    assert {name for name in before if before[name] != after[name]} == {f"lr-lookahead{name}" for name in restarted}


@pytest.mark.parametrize(("name", "part"), [("one-node", ("server",)), ("roles-apart", ("roles", "target"))])
def test_a_download_runs_where_its_volume_is_read(name: str, part: tuple[str, ...]) -> None:
    taint = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    where: dict[str, Any] = {"tolerations": taint, "nodeSelector": {"cards": "h200"}}
    for key in reversed(part):
        where = {key: where}
    documents = render(over(profile(name, **EVERYTHING), where))
    (download,) = (pod for owner, pod in pods(documents) if "download" in owner)
    assert (download["tolerations"], download["nodeSelector"]) == (taint, {"cards": "h200"})


@pytest.mark.parametrize(
    ("changes", "chart_version"),
    [
        ({"spec": {"name": "r1-distill-32b"}}, ""),
        ({"spec": {"name": "mine", "toml": "# a text"}}, ""),
        ({"image": {"tag": "trtllm-9", "pullSecrets": ["hub"]}}, ""),
        ({"image": {"pullPolicy": "Always"}}, ""),
        ({"checkpoints": {"claim": "elsewhere"}}, ""),
        ({"engines": {"claim": "elsewhere"}}, ""),
        ({"server": {"gpus": 2, "tolerations": []}}, ""),
        ({"spec": {"loadTimeoutSeconds": 1200}}, "9.9.9"),
    ],
    ids=str,
)
def test_an_upgrade_changes_no_job_that_is_there(changes: dict[str, Any], chart_version: str, tmp_path: Path) -> None:
    """Kubernetes refuses that. A Job that would do the same stays."""
    shutil.copytree(CHART, tmp_path / "chart")
    about = tmp_path / "chart" / "Chart.yaml"
    if chart_version:
        about.write_text(re.sub("(?m)^version: .*$", f"version: {chart_version}", about.read_text(encoding="utf-8")))
    first, second = (
        {each["metadata"]["name"]: each["spec"] for each in render(values, chart) if each["kind"] == "Job"}
        for values, chart in (
            (profile("one-node", **EVERYTHING), CHART),
            (profile("one-node", **over(EVERYTHING, changes)), tmp_path / "chart"),
        )
    )
    assert len(first) == len(second) == 2
    assert all(second[name] == first[name] for name in first.keys() & second.keys())
    assert (first == second) == bool(chart_version)


def test_the_jobs_build_each_servers_part() -> None:
    roles = {
        next((argument.partition("=")[2] for argument in pod["containers"][0]["args"] if "--role" in argument), "")
        for owner, pod in pods(rendered("roles-apart, everything"))
        if "build" in owner
    }
    assert roles == {"", *Role}


# ------------------------------------------------------------------------------------------------------ what operators understand


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\blr_[a-z_]+", text))


def test_scaling_asks_for_metrics_that_the_server_has() -> None:
    told = metrics_in((PROJECT / "docs" / "operations.md").read_text(encoding="utf-8"))
    (hpa,) = (each["spec"] for each in rendered("cpu, hpa") if each["kind"] == "HorizontalPodAutoscaler")
    assert [each["pods"]["metric"]["name"] for each in hpa["metrics"]] == ["lr_requests_in_flight"]
    page = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert "seriesQuery: lr_requests_in_flight{" in page, "prometheus-adapter has to tell it"
    (keda,) = (each for each in rendered("cpu, everything") if each["kind"] == "ScaledObject")
    assert keda["apiVersion"] == "keda.sh/v1alpha1" and keda["spec"]["scaleTargetRef"] == {"name": "lr-lookahead"}
    (trigger,) = keda["spec"]["triggers"]
    assert trigger["type"] == "prometheus" and trigger["metricType"] == "Value"
    assert set(trigger["metadata"]) == {"serverAddress", "threshold", "query"}
    assert all(isinstance(value, str) for value in trigger["metadata"].values())  # KEDA takes texts alone
    asked = metrics_in(trigger["metadata"]["query"])
    assert asked == {"lr_requests_in_flight", "lr_requests_in_flight_limit", "lr_steps_total"} and asked <= told
    for name in ("cpu, hpa", "cpu, everything"):
        assert "replicas" not in named(rendered(name), "Deployment", "lr-lookahead")["spec"]


def test_a_server_of_no_replicas_is_scaled_by_nobody() -> None:
    """Its cards are wanted for a build."""
    documents = render(profile("cpu", autoscaling=HPA, server={"replicas": 0}))
    assert named(documents, "Deployment", "lr-lookahead")["spec"]["replicas"] == 0
    assert not [each for each in documents if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]


@pytest.mark.parametrize("url", ['"grpc://elsewhere:8001"', '["grpc://one:8001", "grpc://two:8001"]'])
def test_roles_apart_take_a_spec_that_says_where_its_roles_are(url: str) -> None:
    text = (CHART / "files" / "specs" / "qwen3-32b-apart.toml").read_text(encoding="utf-8")
    documents = render(profile("roles-apart", spec={"toml": text.replace("[target]\n", f"[target]\nurl = {url}\n")}))
    spec = tomllib.loads(named(documents, "ConfigMap", "lr-lookahead")["data"]["spec.toml"])
    assert all("lr-lookahead-target" in each for each in spec["target"]["url"])


@NEEDS_PROMETHEUS
@pytest.mark.parametrize(
    ("accepted", "corrected", "load"),
    [(60, 40, 0.5), (90, 10, 0.5), (40, 60, 0.75), (0, 100, 3.0), (0, 0, 0.5)],
    ids=["as usual", "better than usual", "worse", "none", "no drafted steps"],
)
def test_fewer_accepted_steps_count_for_more_load(tmp_path: Path, accepted: int, corrected: int, load: float) -> None:
    """Prometheus' own answer to KEDA's question, with half of the places taken."""
    (keda,) = (each for each in rendered("cpu, everything") if each["kind"] == "ScaledObject")
    of = 'namespace="prod",service="lr-lookahead"'
    series = {
        f"lr_requests_in_flight{{{of}}}": "32+0x40",
        f"lr_requests_in_flight_limit{{{of}}}": "64+0x40",
        f'lr_steps_total{{{of},origin="draft",reason="judge"}}': f"0+{accepted}x40",
        f'lr_steps_total{{{of},origin="correction",reason="judge"}}': f"0+{corrected}x40",
    }
    query = keda["spec"]["triggers"][0]["metadata"]["query"]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"round({query}, 0.001)", "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": load}]}
        ],
    }
    file = tmp_path / "load.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_and_grafana_get_the_files_of_deploy() -> None:
    documents = rendered("roles-apart, everything")
    alerts = yaml.safe_load((PROJECT / "deploy" / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    rule = named(documents, "PrometheusRule", "lr-lookahead")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1" and rule["spec"] == alerts
    board = (PROJECT / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8")
    assert named(documents, "ConfigMap", "lr-lookahead-dashboard")["data"]["lookahead.json"].strip() == board.strip()
    monitors = [each["spec"] for each in documents if each["kind"] == "ServiceMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        assert set(monitor) == {"jobLabel", "selector", "endpoints"}
        (endpoint,) = monitor["endpoints"]
        components = {
            each["metadata"]["labels"]["app.kubernetes.io/component"]
            for each in documents
            if each["kind"] == "Service" and endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
        }
        assert components == ({"server"} if endpoint["port"] == "openai" else set(Role))
    assert monitors[0]["endpoints"][0]["authorization"] == {"credentials": {"name": "scrape", "key": "key"}}
    linked = render(profile("cpu", **over(EVERYTHING, {"monitoring": {"docsUrl": "https://docs.example/lookahead/"}})))
    links = [
        each["annotations"]["runbook_url"]
        for each in named(linked, "PrometheusRule", "lr-lookahead")["spec"]["groups"][0]["rules"]
    ]
    assert links[0] == "https://docs.example/lookahead/docs/operations/#lookaheaddown"
    assert all("../" not in link for link in links)


def test_the_route_leads_to_the_service() -> None:
    documents = rendered("cpu, everything")
    route = named(documents, "HTTPRoute", "lr-lookahead")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1" and set(route["spec"]) == {"parentRefs", "hostnames", "rules"}
    assert route["spec"]["parentRefs"] == [{"name": "front", "namespace": "edge"}]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    ports = named(documents, "Service", backend["name"])["spec"]["ports"]
    assert [port["port"] for port in ports] == [backend["port"]]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    waits_s = int(rule["timeouts"]["request"].removesuffix("s"))
    specs = [DeploymentSpec.load(path) for path in (PROJECT / "engines").glob("*.toml")]
    assert all(waits_s > spec.loop_config().timeouts.request_s for spec in specs)
    page = (PROJECT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f'proxy-read-timeout: "{waits_s}"' in page, "an ingress waits as long"


def test_the_chart_is_the_servers_version() -> None:
    with helm.Chart.load(CHART) as chart:
        assert chart.version == chart.metadata["appVersion"] == lr_backend.__version__
