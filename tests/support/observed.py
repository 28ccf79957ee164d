"""What deploy/ asks of a server's metrics, and a Prometheus and a collector of spans to ask with."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lr_backend.serve.server import ServerOptions, free_ports
from lr_backend.triton.metrics import REFRESH_S

T = TypeVar("T")
PROJECT = Path(__file__).parents[2]
POLL_S = 0.02
"""Each look may be a question to a server that has other work."""
DASHBOARD = PROJECT / "deploy" / "grafana" / "dashboard.json"
ALERTS = PROJECT / "deploy" / "prometheus" / "alerts.yaml"
ALERTS_TEST = ALERTS.with_name("alerts_test.yaml")
SCRAPE = ALERTS.with_name("prometheus.yaml")
WAIT_S = 60.0

_NAME = re.compile(r"(?<![\w:$])(?:(?:lr|nv)_\w+|vllm:\w+)")
_PARTS = re.compile(r"_(bucket|sum|count)$")
UPSTREAMS = re.compile(r"nv_trt_llm_\w+")
"""Of TensorRT-LLM's engines (its backend's custom_metrics_reporter), which have no others."""


def reached_within(limit_s: float, reached: Callable[[], bool]) -> None:
    """Wait for what another process does; it takes no longer than that, or the test fails."""
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def settled(read: Callable[[], T]) -> T:
    """What a server's metrics come to: threads of their own send them, so three reads in a row have to agree."""
    deadline, found, num_alike = time.monotonic() + WAIT_S, read(), 1
    while num_alike < 3:
        assert time.monotonic() < deadline
        time.sleep(1.4 * REFRESH_S)
        before, found = found, read()
        num_alike = num_alike + 1 if found == before else 1
    return found


def samples(metrics_url: str, name: str) -> list[Sample]:
    """What a server's page says now of one metric."""
    with urllib.request.urlopen(metrics_url, timeout=60.0) as page:
        families = text_string_to_metric_families(page.read().decode())
        return [sample for family in families for sample in family.samples if sample.name == name]


def panels() -> list[dict[str, Any]]:
    """The dashboard's, without its rows."""
    found = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def filled_in(expression: str, rate_interval: str = "1m") -> str:
    """With the variables as Grafana would fill them in, for all servers."""
    return expression.replace("$__rate_interval", rate_interval).replace("$instance", ".*")


def dashboard_expressions() -> dict[str, str]:
    """By panel and letter."""
    return {f"{panel['title']} {target['refId']}": filled_in(target["expr"]) for panel in panels() for target in panel["targets"]}


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def alert_expressions() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in alerts()}


def named(expression: str) -> set[str]:
    """The metrics that an expression is about; a histogram by its own name."""
    return {_PARTS.sub("", name) for name in _NAME.findall(expression) if not UPSTREAMS.fullmatch(name)}


def answering(expression: str) -> str:
    """The same with every comparison answered by 0 or 1, so that no answer means that there is nothing to compare."""
    return re.sub(r"(?<![=!<>~])(==|[<>])(?!=|\s*bool)(?=\s*[\d.]+)", r"\1 bool", expression)


class Prometheus:
    """A real one over a server's page."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression has now."""
        found = self._get("query", query=expression)["result"]
        assert isinstance(found, list), found
        return found

    def over_time(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """The lines that it draws."""
        lines: list[dict[str, Any]] = self._get("query_range", query=expression, start=start_s, end=end_s, step=step_s)["result"]
        return lines

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait_for(self, expression: str) -> None:
        """Until it has a sample above zero."""
        deadline = time.monotonic() + WAIT_S
        while not any(float(one["value"][1]) > 0 for one in self.ask(expression)):
            assert time.monotonic() < deadline, f"{expression}: nothing came"
            time.sleep(0.1)

    def _get(self, path: str, **asked: Any) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(asked)}", timeout=WAIT_S) as answer:
            told = json.loads(answer.read())
        assert told["status"] == "success", told
        data: dict[str, Any] = told["data"]
        return data


def has_prometheus() -> bool:
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


@contextmanager
def prometheus(target: str, folder: Path, interval: str = "250ms") -> Iterator[Prometheus]:
    """Run Prometheus as deploy/prometheus says, only faster and on ``target`` (``host:port``)."""
    config = yaml.safe_load(SCRAPE.read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), interval)
    config["rule_files"] = [str(ALERTS)]
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_ports(ServerOptions()).metrics}"
    options = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        asked, deadline = Prometheus(f"http://{address}"), time.monotonic() + WAIT_S
        while True:
            try:
                if asked.ask('up{job="lookahead"} == 1'):
                    break
            except OSError:
                pass
            assert process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.1)
        yield asked
    finally:
        process.terminate()
        process.wait(WAIT_S)


class Collector:
    """Takes spans by OTLP over HTTP. ``url``: the endpoint as OpenTelemetry's variables have it."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Any] = []
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            self._spans += [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
            self._came.notify_all()

    def trace(self, trace_id: str, *names: str) -> list[Any]:
        """The spans of one trace, once there is one of each of these names."""

        def mine() -> list[Any]:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]

        with self._came:
            assert self._came.wait_for(lambda: {*names} <= {span.name for span in mine()}, WAIT_S), mine()
            return mine()


@contextmanager
def collector() -> Iterator[Collector]:
    taking = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers.get("content-encoding") is None
            taking.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        taking.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield taking
        finally:
            server.shutdown()
            thread.join()
