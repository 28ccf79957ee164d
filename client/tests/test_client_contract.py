"""The client against the server's own tables; skipped where the client is installed alone."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lr_client import Options, StepRecord, Usage
from lr_client.client import DEFAULT_TIMEOUT_S
from lr_client.protocol import INPUTS, OUTPUTS, Decoder, encode, error_from_text, read_record
from lr_client.render import STYLES

server = pytest.importorskip("lr_backend.fields")
request = pytest.importorskip("lr_backend.request")
errors = pytest.importorskip("lr_backend.errors")


def test_inputs_and_outputs_are_the_server_s() -> None:
    wire = {"STRING": "BYTES"}
    assert {spec.name: wire.get(spec.dtype, spec.dtype) for spec in server.LOOKAHEAD_INPUTS} == INPUTS
    assert tuple(spec.name for spec in server.LOOKAHEAD_OUTPUTS) == OUTPUTS


def test_every_field_of_the_server_s_request_can_be_sent() -> None:
    prompt = {"text_input", "messages"}
    assert prompt | {item.name for item in fields(Options)} == set(request.LookaheadRequest.model_fields)


def test_the_server_s_own_limit_ends_an_answer_first() -> None:
    """Its text is kept then; who gives up gets none."""
    specs = list((Path(__file__).parents[2] / "engines").glob("*.toml"))
    found = [re.search(r"^request_s = ([\d.]+)", spec.read_text(encoding="utf-8"), re.M) for spec in specs]
    limits_s = [float(limit[1]) for limit in found if limit is not None]
    assert limits_s and max(limits_s) < DEFAULT_TIMEOUT_S


def test_what_the_client_sends_parses() -> None:
    tensors = pytest.importorskip("lr_backend.triton.tensors")
    sent = encode([{"role": "user", "content": "q"}], Options(mode="lr", max_depth=2, stop="x", trace=True))
    asked = request.LookaheadRequest.parse(
        tensors.request_fields({tensor.name: tensor.values for tensor in sent}, max_bytes=1000)
    )
    assert (asked.conversation, asked.mode, asked.max_depth) == ([{"role": "user", "content": "q"}], "lr", 2)
    assert (asked.stop, asked.trace) == (("x",), True)


def test_the_server_s_records_are_read_whole() -> None:
    usage = request.Usage(num_steps=3, num_steps_rejected={"judge": 1}, degraded=("draft",), latency_s=2.0)
    assert read_record(Usage, usage.as_json().encode()).num_steps_rejected == {"judge": 1}
    assert {item.name for item in fields(Usage)} == set(request.Usage.model_fields)
    assert {item.name for item in fields(StepRecord)} == set(request.StepRecord.model_fields)
    step = request.StepRecord(index=1, origin="draft", reason="judge", text="t", num_tokens=2)
    assert read_record(StepRecord, step.model_dump_json().encode()).origin == "draft"


def test_the_server_reads_the_traces_that_it_sends() -> None:
    schema = pytest.importorskip("lr_backend.trace.schema")
    sent = schema.Trace(
        request_id="r",
        request=request.LookaheadRequest.parse({"text_input": "?"}),
        finish_reason="stop",
        steps=(),
        calls=(),
        usage=request.Usage(),
    )
    (finish,) = Decoder().feed({"finish_reason": b"stop", "usage": b"{}", "trace": sent.as_json().encode()})
    assert schema.Trace.from_json(finish.trace) == sent


def test_every_origin_has_a_colour() -> None:
    assert set(STYLES) == {str(origin) for origin in request.Origin}


def test_public_messages_of_the_server_are_understood() -> None:
    refused = errors.InvalidRequest("width", 99, "at most 8")
    error = error_from_text(refused.public())
    assert (type(error).__name__, getattr(error, "field", None)) == ("InvalidRequest", "width")
    ends = error_from_text(errors.Cancelled("the server is shutting down").public())
    assert type(ends).__name__ == "ServerUnreachable"
    for kind in (errors.Overloaded, errors.TargetUnavailable):
        assert type(error_from_text(kind("why").public())).__name__ == kind.__name__
