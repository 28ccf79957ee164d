"""The pages and files that a trace becomes: self-contained, escaped, valid; and the command that makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lr_backend.cli.app import app
from lr_backend.request import Origin
from lr_backend.trace.analysis import analyse
from lr_backend.trace.chrome import chrome_json
from lr_backend.trace.html import lay_out, milliseconds, page
from lr_backend.trace.intervals import at_least
from lr_backend.trace.report import report
from lr_backend.trace.schema import Trace
from tests.support.markup import read
from tests.support.traces import NUM_STEPS, numbered_world, traced

HOSTILE = '</title></svg><script>alert("1")</script> ]]> & <img src=x onerror=y> {{ 7 * 7 }} [red]'
ACCEPTED = [step for step in range(NUM_STEPS) if step % 3]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(numbered_world(*ACCEPTED), "How many?", mode="lr_sd", max_depth=3)


@pytest.fixture(scope="module")
def hostile(trace: Trace) -> Trace:
    """Every text that a model or a client writes is hostile."""
    texts = {"text": HOSTILE, "drafted_text": HOSTILE + "d", "target_text": HOSTILE + "t"}
    steps = tuple(record.model_copy(update=texts) for record in trace.steps)
    request = trace.request.model_copy(update={"text_input": HOSTILE})
    return trace.model_copy(update={"steps": steps, "request": request, "request_id": HOSTILE})


def test_the_page_shows_every_call_and_step(trace: Trace) -> None:
    analysis = analyse(trace)

    reader = read(page(trace, analysis))

    bars = [attrs for tag, attrs in reader.elements if tag == "rect"]
    assert len(bars) == len(trace.calls) + len(trace.steps) + len(analysis.critical)
    for call in trace.calls:
        assert any(bar["class"] == call.outcome.value for bar in bars)
    shown = "".join(reader.texts)
    assert "How many?" in shown
    assert all(record.text.strip() in shown for record in trace.steps)


def test_indentation_of_code_is_kept(trace: Trace) -> None:
    told = {"text": "\n \n    a = 1\n    b = 2\n", "target_text": "\n    a = 2\n", "origin": Origin.DRAFT}
    code = trace.model_copy(update={"steps": (trace.steps[0].model_copy(update=told),)})

    texts = read(page(code, analyse(code))).texts

    assert {"    a = 1\n    b = 2", "    a = 2"} <= set(texts)


def test_the_page_needs_nothing_from_elsewhere(trace: Trace) -> None:
    html = page(trace, analyse(trace))

    reader = read(html)
    assert not {tag for tag, _ in reader.elements} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not {name for _, attrs in reader.elements for name in attrs} & {"src", "href", "srcset", "action"}
    assert not any(name.startswith("on") for _, attrs in reader.elements for name in attrs)
    assert "url(" not in html and "@import" not in html and "://" not in html


def test_nothing_that_a_model_writes_becomes_markup(hostile: Trace, trace: Trace) -> None:
    html = page(hostile, analyse(hostile))

    reader = read(html)
    plain = read(page(trace, analyse(trace)))
    extra = {tag for tag, _ in reader.elements} - {tag for tag, _ in plain.elements}
    assert extra <= {"details", "summary"}
    assert "<script" not in html and "<img" not in html
    assert "".join(reader.texts).count(HOSTILE) >= 2 * len(hostile.steps)


def test_bars_stay_inside_and_lanes_do_not_touch(trace: Trace) -> None:
    timeline = lay_out(trace, analyse(trace))

    for track in timeline.tracks:
        for bar in track.bars:
            assert bar.x >= 0 and bar.x + bar.width <= timeline.width + 2
            assert track.y <= bar.y and bar.y + bar.height <= track.y + track.height
    ends = [track.y + track.height for track in timeline.tracks]
    assert all(end < track.y for end, track in zip(ends, timeline.tracks[1:], strict=False))
    assert ends[-1] < timeline.height


def test_a_long_chain_grows_wide_but_not_without_bound(trace: Trace) -> None:
    short = lay_out(trace, analyse(trace)).width
    calls = tuple(
        call.model_copy(update={"start_ms": call.start_ms + 1e3 * number, "end_ms": call.end_ms + 1e3 * number})
        for number in range(0, 10_000, 500)
        for call in trace.calls
    )
    long = trace.model_copy(update={"calls": calls})

    assert short < lay_out(long, analyse(long)).width <= 24_000


@pytest.mark.parametrize("mode", ["ar", "lr"])
def test_an_empty_trace_is_drawn_too(trace: Trace, mode: str) -> None:
    empty = traced(numbered_world(), mode=mode).model_copy(update={"calls": (), "steps": ()})
    nothing = empty.model_copy(update={"usage": empty.usage.model_copy(update={"latency_s": 0.0})})

    for one in (empty, nothing):
        read(page(one, analyse(one)))
        assert json.loads(chrome_json(one))["traceEvents"]


def test_chrome_events_are_complete_named_and_do_not_cross(hostile: Trace) -> None:
    document = json.loads(chrome_json(hostile))

    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    metadata = [event for event in events if event["ph"] == "M"]
    assert len(complete) == len(hostile.calls) + len(hostile.steps)
    assert len(events) == len(complete) + len(metadata)
    assert all({"name", "cat", "ts", "dur", "pid", "tid", "args"} <= set(event) for event in complete)
    assert all(event["dur"] >= 0 for event in complete)
    named = {(event["pid"], event["tid"]) for event in metadata if event["name"] == "thread_name"}
    threads = {(event["pid"], event["tid"]) for event in complete}
    assert threads <= named
    for thread in threads:
        # Half a nanosecond of slack for times that are decimal fractions.
        own = [(e["ts"], e["ts"] + e["dur"] - 5e-4) for e in complete if (e["pid"], e["tid"]) == thread]
        assert not at_least(own, 2)


def test_chrome_times_are_microseconds(trace: Trace) -> None:
    events = json.loads(chrome_json(trace))["traceEvents"]
    targets = [event for event in events if event["ph"] == "X" and event["cat"] == "verified"]

    assert targets[0]["dur"] == pytest.approx(1e6)
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["answer", "draft", "target", "judge"]


def shown(trace: Trace) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(report(trace, analyse(trace)))
    return capture.get()


def test_the_report_names_times_and_signature(trace: Trace) -> None:
    text = shown(trace)
    assert "critical path" in text and "overlapped" in text and "waiting" in text
    assert "of its time batched" in text
    assert "no failure signature" in text

    text = shown(traced(numbered_world(*range(12)), mode="lr"))
    assert "failure signature: cascade rejection" in text
    assert "up to 12 in a row" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.04, "0.0 ms"), (12.34, "12.3 ms"), (123.4, "123 ms"), (1234.0, "1.23 s"), (54321.0, "54.3 s")]
)
def test_durations_are_short(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_the_command_reports_and_writes(trace: Trace, tmp_path: Path) -> None:
    file, html, chrome = (tmp_path / name for name in ("trace.json", "trace.html", "trace.chrome.json"))
    file.write_text(trace.as_json(), encoding="utf-8")

    result = CliRunner().invoke(app, ["trace", str(file), "--html", str(html), "--chrome", str(chrome)])

    assert result.exit_code == 0, result.output
    assert "no failure signature" in result.output
    assert html.read_text(encoding="utf-8") == page(trace, analyse(trace))
    assert chrome.read_text(encoding="utf-8") == chrome_json(trace)


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, [], "cannot read"),
        ("{}", [], "not a trace of version 2"),
        ("", ["--html", "missing/x.html"], "cannot write"),
    ],
)
def test_the_command_fails_in_one_line(
    trace: Trace, tmp_path: Path, content: str | None, arguments: list[str], words: str
) -> None:
    file = tmp_path / "trace.json"
    if content is not None:
        file.write_text(content or trace.as_json(), encoding="utf-8")
    arguments = [str(tmp_path / argument) if "/" in argument else argument for argument in arguments]

    result = CliRunner().invoke(app, ["trace", str(file), *arguments])

    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


def test_the_pace_stands_beside_the_times(trace: Trace) -> None:
    label = "iteration times from tables; not a run on <h200>"
    paced = trace.model_copy(update={"pace": label})
    analysis = analyse(paced)
    assert "not a run on &lt;h200&gt;" in page(paced, analysis)
    assert 'class="pace"' not in page(trace, analyse(trace))
    console = Console(width=200)
    with console.capture() as shown:
        console.print(report(paced, analysis))
    assert label in shown.get()


def test_a_call_says_how_long_it_was_on_its_way(trace: Trace) -> None:
    call = trace.calls[0]
    half = call.model_copy(update={"engine_ms": call.duration_ms / 2})
    slower = trace.model_copy(update={"calls": (half, *trace.calls[1:])})
    said = page(slower, analyse(slower))
    assert f"{milliseconds(half.engine_ms)} in the engine, {milliseconds(half.engine_ms)} on the way" in said
