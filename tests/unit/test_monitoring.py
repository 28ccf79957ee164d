"""deploy/prometheus and deploy/grafana without a server: what they ask for exists; every alert has its runbook and its test."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations

import pytest
import yaml

from lr_backend.frontend.limits import Gate
from lr_backend.frontend.metrics import BOUNDS_S, DoorMetrics
from lr_backend.triton import audit_metrics, engine_metrics, request_metrics, speculation_metrics
from tests.support.observed import (
    ALERTS,
    ALERTS_TEST,
    DASHBOARD,
    SCRAPE,
    alert_expressions,
    alerts,
    answering,
    dashboard_expressions,
    has_prometheus,
    named,
    panels,
)

NEEDS_PROMETHEUS = pytest.mark.skipif(not has_prometheus(), reason="promtool is not installed (Debian's package prometheus)")
EXPRESSIONS = {**alert_expressions(), **dashboard_expressions()}


def known() -> set[str]:
    """Every metric that the code can show."""
    names = {*request_metrics.COUNTERS, *request_metrics.GAUGES, *request_metrics.HISTOGRAMS}
    names |= {*speculation_metrics.COUNTERS, *audit_metrics.COUNTERS, *audit_metrics.GAUGES}
    names |= {engine_metrics.metric_name(name) for name in (*engine_metrics.COUNTERS, *engine_metrics.GAUGES)}
    registry = DoorMetrics(Gate(1), None)._registry
    suffix = {"counter": "_total"}
    return names | {family.name + suffix.get(family.type, "") for family in registry.collect()}


@pytest.mark.parametrize("bounds", [request_metrics.HISTOGRAMS[request_metrics.REQUEST_S].bounds, BOUNDS_S])
def test_the_longest_answer_has_a_bucket(bounds: tuple[float, ...]) -> None:
    """Beyond the last bound no quantile is told. Specs of GPUs give a request 900 s, those of CPUs 3600."""
    assert {900.0, 3600.0} < set(bounds) and list(bounds) == sorted(bounds)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_metric_of_an_expression_is_one_of_the_servers(name: str) -> None:
    assert named(EXPRESSIONS[name]) or name in ("LookaheadDown", "LookaheadRoleDown")
    assert named(EXPRESSIONS[name]) <= known()


def test_a_metric_that_nobody_has_is_found_out() -> None:
    expression = 'histogram_quantile(0.9, rate(lr_x_seconds_bucket{a="lr"}[1m])) > vllm:y_total or nv_trt_llm_z'
    assert named(expression) == {"lr_x_seconds", "vllm:y_total"}


def test_comparisons_can_be_made_to_answer() -> None:
    assert answering('a{b=~"c"} > 0.5 and d == 0 or e < 3') == 'a{b=~"c"} > bool 0.5 and d == bool 0 or e < bool 3'


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_every_alert_says_what_to_do(alert: dict[str, dict[str, str]]) -> None:
    name = str(alert["alert"])
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    page = (ALERTS.parent / path).resolve().read_text(encoding="utf-8")
    assert anchor == name.lower() and f"\n### {name}\n" in page
    assert alert["labels"]["severity"] in ("critical", "warning") and alert["for"] and alert["annotations"]["summary"]


def test_every_alert_is_seen_firing_and_silent() -> None:
    tests = yaml.safe_load(ALERTS_TEST.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired, silent = ({case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires} for fires in (True, False))
    assert fired == silent == set(alert_expressions())


@NEEDS_PROMETHEUS
@pytest.mark.parametrize("command", [["check", "config", SCRAPE], ["check", "rules", ALERTS], ["test", "rules", ALERTS_TEST]])
def test_promtool_agrees(command: list[str]) -> None:
    done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    every = document["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)
    variables = {variable["name"] for variable in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(every))) - {"__rate_interval", "1"}
    assert used == variables
    for panel in panels():
        assert panel["description"].endswith(".") and panel["datasource"]["uid"] == "${datasource}"
    places = [panel["gridPos"] for panel in every]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, two in combinations(places, 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
