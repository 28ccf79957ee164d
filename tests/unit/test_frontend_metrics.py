"""The front end's page for Prometheus: what it counts, Triton's page behind it, keys, and a Triton that does not answer."""

from __future__ import annotations

import asyncio
import http.server
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lr_backend.frontend.call import Call
from lr_backend.frontend.errors import CODES
from lr_backend.frontend.limits import Gate as Limit
from lr_backend.frontend.metrics import ANSWERING, CONTENT_TYPE, DoorMetrics
from tests.support.fake_lookahead import Fail, FakeServer, Gate, Reply
from tests.support.frontend import Served, frontend
from tests.support.observed import alert_expressions

THEIRS = "# HELP nv_x Something.\n# TYPE nv_x counter\nnv_x 3\n"
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "reasoning_tokens": 1, "num_steps": 2, "seed": 7}
SCRIPTS = {
    "q": [Reply(text="yes"), Reply(finish="stop", usage=USAGE)],
    "full": [Fail("LR_OVERLOADED: 64 requests are in flight"), Gate()],
    "fails midway": [Reply(text="a"), Fail("LR_TARGET_UNAVAILABLE: gone"), Gate()],
}
KEY = "k" * 32


@contextmanager
def triton_page(status: int = 200) -> Iterator[str]:
    """Where a page stands, as ``host:port``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(THEIRS.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@contextmanager
def door(metrics_url: str | None = None, keys: tuple[str, ...] = ()) -> Iterator[Served]:
    with FakeServer(SCRIPTS) as upstream, frontend(upstream.url, keys=keys, metrics_url=metrics_url) as served:
        yield served


def samples(served: Served, headers: Mapping[str, str] | None = None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = served.ask("GET", "/metrics", headers=headers or {})
    assert answer.status == 200 and answer.headers["content-type"] == CONTENT_TYPE
    families = list(text_string_to_metric_families(answer.raw.decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def ended(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> dict[tuple[str, ...], float]:
    return {
        tuple(dict(labels)[label] for label in ("route", "status", "code")): value
        for (name, labels), value in found.items()
        if name == "lr_http_requests_total" and value
    }


def test_answers_and_failures_are_counted_by_route_status_and_code() -> None:
    with door() as served:
        served.chat("q")
        served.chat("q", stream=True)
        served.chat("full")
        served.chat("fails midway", stream=True)
        served.chat("q", depht=3)
        served.ask("GET", "/nowhere/at/all")
        found = samples(served)

    chat = "/v1/chat/completions"
    assert ended(found) == {
        (chat, "200", "ok"): 2.0,
        (chat, "503", "overloaded"): 1.0,
        (chat, "200", "unavailable"): 1.0,
        (chat, "400", "unknown_field"): 1.0,
        ("none", "404", "not_found"): 1.0,
    }
    assert found["lr_http_request_duration_seconds_count", (("route", chat),)] == 2.0
    assert found["lr_http_answers_in_flight", ()] == 0.0 < found["lr_http_answers_in_flight_limit", ()]
    assert not any(name.endswith("_created") for name, _ in found)


def test_every_failure_that_an_alert_looks_at_is_there_before_it_happens() -> None:
    """With the status of a refusal, and with that of a stream that fails midway."""
    metrics = DoorMetrics(Limit(1), None)
    families = text_string_to_metric_families(asyncio.run(metrics.page()).decode())
    samples = [one.labels for family in families for one in family.samples if one.name == "lr_http_requests_total"]
    found = {(labels["route"], labels["status"], labels["code"]) for labels in samples}
    codes = set(re.findall(r"\w+", alert_expressions()["LookaheadErrors"].split('code=~"')[1].split('"')[0])) | {"overloaded"}
    wanted = {(route, str(status), code) for route in ANSWERING for code in codes for status in (200, CODES[code][0])}
    assert "not_finite" in codes and wanted <= found and all(one[0] in ANSWERING for one in found)


def test_tritons_page_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lr_backend.frontend.metrics.TIMEOUT_S", 20.0)
    with triton_page() as address, door(address) as served:
        found = samples(served)
    assert found["nv_x_total" if ("nv_x_total", ()) in found else "nv_x", ()] == 3.0
    assert found["lr_triton_up", ()] == 1.0


@pytest.mark.parametrize("status", [None, 500])
def test_without_tritons_page_the_front_ends_stays(status: int | None) -> None:
    with triton_page(status or 200) as address:
        if status is not None:
            with door(address) as served:
                found = samples(served)
    if status is None:  # nobody listens there any more
        with door(address) as served:
            found = samples(served)
    assert found["lr_triton_up", ()] == 0.0
    assert not any(name.startswith("nv_") for name, _ in found)


def test_where_there_are_keys_the_page_wants_one() -> None:
    with door(keys=(KEY,)) as served:
        assert served.ask("GET", "/metrics", headers={}).status == 401
        found = samples(served, {"Authorization": f"Bearer {KEY}"})
    assert ended(found) == {("/metrics", "401", "invalid_api_key"): 1.0}


def test_a_request_is_counted_by_the_first_end_that_it_comes_to() -> None:
    """A client may leave while the last event is on its way to it."""
    ended: list[tuple[Any, ...]] = []
    request: Any = SimpleNamespace(method="POST", headers={}, scope={})
    metrics: Any = SimpleNamespace(ended=lambda *told: ended.append(told))
    call = Call(request, metrics)
    call.log(200, streamed=True)
    call.log(499, code="client_gone", streamed=True)
    assert [told[1] for told in ended] == [200]
