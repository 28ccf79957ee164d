"""Logs: an event a line, as JSON, and no word of a prompt in any of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from lr_backend.errors import InvalidRequest
from lr_backend.testing import run_virtual
from tests.unit.test_service import RecordedReplies, arrays, make_world, service_of

CANARY = "Zanzibar quokka"
PROGRAM = """
import logging, structlog
from lr_backend.logs import configure
configure(knows_texts={knows})
try:
    raise ValueError("{canary}")
except ValueError as error:
    structlog.get_logger().error("ours", exc_info=error)
    structlog.get_logger().exception("ours again")
    logging.getLogger("some.library").exception("theirs: %s", 7)
logging.getLogger("some.library").warning("plain")
structlog.get_logger().info("well", request_id="a")
structlog.get_logger().debug("too much")
with structlog.contextvars.bound_contextvars(request_id="b"):
    logging.getLogger("some.library").warning("within")
    structlog.get_logger().info("another's", request_id="c")
"""


def lines(knows: bool) -> list[dict[str, Any]]:
    """What a process of its own writes."""
    program = PROGRAM.format(knows=knows, canary=CANARY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not done.stdout
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_is_an_event_whoever_logs_it() -> None:
    found = lines(True)
    assert [line["event"] for line in found] == ["ours", "ours again", "theirs: 7", "plain", "well", "within", "another's"]
    assert all({"level", "timestamp"} <= set(line) for line in found)
    assert found[2]["logger"] == found[5]["logger"] == "some.library"
    assert [line.get("request_id") for line in found] == [None, None, None, None, "a", "b", "c"]


@pytest.mark.parametrize("knows", [True, False])
def test_an_exceptions_message_is_told_only_by_who_knows_no_texts(knows: bool) -> None:
    failures = lines(knows)[:3]
    for line in failures:
        assert line["kind"] == "ValueError" and "line 6" in line["frames"][-1]
        assert line.get("message") == (None if knows else CANARY)
        assert ("message" in line) is not knows
        assert "exc_info" not in line and "exception" not in line


def logged(fields: dict[str, Any]) -> Sequence[Any]:
    replies = RecordedReplies()
    with capture_logs() as found:
        run_virtual(service_of(make_world()).serve("id", fields, replies))
    (error,) = replies.errors
    assert isinstance(error, InvalidRequest)
    return found


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (arrays(stop=[CANARY * 20]), "stop"),
        (arrays(text_input=None, messages=CANARY), "messages"),
        (arrays(text_input=None, messages=json.dumps([{"role": CANARY, "content": CANARY}])), "messages"),
        (arrays(text_input=None, messages=json.dumps([{"role": "user", "content": "a", CANARY: 1}])), "messages"),
        (arrays(mode=CANARY), "mode"),
        (arrays(verifier=CANARY, mode="lr"), "verifier"),
        (arrays(text_input=CANARY * 20000), "text_input"),
        ({**arrays(), "text_input": np.array([CANARY.encode() + b"\xff"], dtype=object)}, "text_input"),
    ],
)
def test_a_refused_request_is_logged_by_its_field_and_without_its_value(fields: dict[str, Any], field: str) -> None:
    (line,) = logged(fields)
    assert line["event"] == "request_failed" and line["field"] == field and line["rule"]
    assert CANARY not in json.dumps(line)


def test_a_line_that_finds_no_room_is_lost_and_nothing_else() -> None:
    """``/dev/full`` says of every write that the disk is full."""
    program = PROGRAM.format(knows=True, canary=CANARY) + "\nprint('served')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert done.stdout == "served\n"
