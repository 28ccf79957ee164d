"""The load test: what is asked, what is resumed, and what is said when something fails."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import typer
from lr_client import InvalidRequest
from typer.testing import CliRunner

import bench.load.command as command
from bench.kit import serving
from bench.kit.served import served_hash
from bench.kit.serving import MAX_TRIES, LatenessSince, short_texts
from bench.load import inputs, perf_analyzer, summary
from bench.load.errors import LoadError
from bench.load.export import Limits, PointFigures, RequestTimes, figures
from bench.load.perf_analyzer import PerfAnalyzer, PerfAnalyzerError, last_words
from bench.load.plot import draw
from bench.load.sweep import (
    CSV,
    EXPORT,
    INPUT,
    LOG,
    SERIES,
    Point,
    Results,
    Sweep,
    closed_points,
    open_points,
    rates_from,
    series_of,
)
from lr_backend.build.emulated_spec import emulated
from lr_backend.emulated.workload import Workload
from lr_backend.fields import LOOKAHEAD_INPUTS
from lr_backend.hardware.lateness import Lateness
from lr_backend.serve.server import ServerError, TritonServer

DATA = Path(__file__).parents[1] / "data" / "perf_analyzer"
LIMITS = Limits(first_step_s=0.5, latency_s=2.0)
LR = next(series for series in SERIES if series.name == "lr")
AR = SERIES[0]


# Points ------------------------------------------------------------------------------------------------------------


def test_every_series_meets_every_load_in_turns() -> None:
    points = closed_points((1, 8), min_requests=6)

    assert len(points) == 2 * len(SERIES)
    assert [point.series for point in points[: len(SERIES)]] == list(SERIES)
    assert points[len(SERIES)].series == SERIES[1]
    assert {point.num_requests for point in points if point.concurrency == 1} == {6}
    assert {point.num_requests for point in points if point.concurrency == 8} == {32}
    assert [series.name for series in SERIES if series.whole] == ["ar", "sd", "lr", "lr_sd", "auto"]


def test_rates_are_shares_of_a_capacity() -> None:
    assert rates_from(4.4321, (0.25, 0.5, 1.0)) == [1.1, 2.2, 4.4]
    assert rates_from(0.011, (0.99, 1.0)) == [0.011]
    (point,) = [point for point in open_points([1.1], 24) if point.series == LR]
    assert point.name == "lr/r1.1"


def test_arguments_are_perf_analyzers(tmp_path: Path) -> None:
    closed = Point(LR, concurrency=4, num_requests=16).arguments("127.0.0.1:8001", tmp_path)
    assert closed[:8] == ["-m", "lookahead", "-i", "grpc", "-u", "127.0.0.1:8001", "--async", "--streaming"]
    assert closed[closed.index("--concurrency-range") + 1] == "4:4:1"
    assert "--request-distribution" not in closed

    poisson = Point(LR, rate=0.55, num_requests=16).arguments("127.0.0.1:8001", tmp_path)
    assert poisson[poisson.index("--request-rate-range") + 1] == "0.55:0.55:1"
    assert poisson[poisson.index("--request-distribution") + 1] == "poisson"


def test_in_slow_motion_arrivals_come_slower_and_as_many_are_in_flight(tmp_path: Path) -> None:
    closed = Point(LR, concurrency=4, num_requests=16).arguments("127.0.0.1:8001", tmp_path, slow_motion=4.0)
    assert closed[closed.index("--concurrency-range") + 1] == "4:4:1"

    poisson = Point(LR, rate=0.6, num_requests=16).arguments("127.0.0.1:8001", tmp_path, slow_motion=4.0)
    assert poisson[poisson.index("--request-rate-range") + 1] == "0.15:0.15:1"


# A sweep, with a scripted perf_analyzer ------------------------------------------------------------------------------


class ScriptedAnalyzer:
    """Leaves a recorded export, or fails as told; remembers what it was asked."""

    def __init__(self, failures: dict[str, list[PerfAnalyzerError]] | None = None) -> None:
        self.failures = failures or {}
        self.asked: list[str] = []

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        log: Path | None = None,
        server_lives: Callable[[], bool] = lambda: True,
    ) -> str:
        given = dict(pairwise(arguments))
        rows = json.loads(Path(given["--input-data"]).read_text())["data"]
        load = (given.get("--concurrency-range") or "r" + given["--request-rate-range"]).split(":")[0]
        name = f"{rows[0]['mode'][0]}{'' if rows[0]['stream'][0] else '!'} {load}"
        self.asked.append(name)
        assert log is not None
        log.write_text("what it printed")
        assert not Path(given["--profile-export-file"]).exists()
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        shutil.copy(DATA / "lr_streamed.json", given["--profile-export-file"])
        Path(given["-f"]).write_text("Concurrency,Inferences/Second\n")
        return ""


def sweep_of(tmp_path: Path, analyzer: ScriptedAnalyzer, *, ready: bool = True) -> Sweep:
    questions = inputs.load(inputs.INPUTS / "demo.json")
    return Sweep(
        analyzer,
        "127.0.0.1:1",
        lambda name, count: questions,
        {"temperature": 0.6},
        Results(tmp_path / "load"),
        5.0,
        lambda: ready,
    )


def ignore(point: Point, what: str) -> None:
    pass


def failures(sweep: Sweep) -> dict[str, str]:
    """What is told of each point that could not be measured."""
    told: dict[str, str] = {}
    sweep.run(POINTS, lambda point, what: told.__setitem__(point.name, what))
    return {name: what for name, what in told.items() if what not in ("kept", "measured")}


POINTS = [Point(AR, concurrency=1, num_requests=2), Point(LR, concurrency=1, num_requests=2), Point(LR, rate=1.0, num_requests=2)]


def test_a_point_keeps_everything_that_was_written(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ScriptedAnalyzer())

    assert failures(sweep) == {}

    folder = tmp_path / "load" / "lr" / "c1"
    assert {path.name for path in folder.iterdir()} == {EXPORT, CSV, INPUT, LOG}
    rows = json.loads((folder / INPUT).read_text())["data"]
    assert [row["mode"] for row in rows] == [["lr"], ["lr"]]
    assert [row["stream"] for row in rows] == [[True], [True]]
    assert rows[0]["seed"] != rows[1]["seed"]
    assert rows[0]["temperature"] == [0.6]
    assert set(sweep.results.figures(POINTS, LIMITS)) == set(POINTS)
    assert not [path for path in (tmp_path / "load").iterdir() if path.name.startswith(".")]


def test_each_point_keeps_how_late_its_engines_were(tmp_path: Path) -> None:
    since = iter([Lateness(10.0, 0.05), Lateness(10.0, 0.5), Lateness()])  # the last one says nothing
    sweep = replace(sweep_of(tmp_path, ScriptedAnalyzer()), lateness=lambda: next(since))

    sweep.run(POINTS, ignore)

    found = sweep.results.figures(POINTS, LIMITS)
    assert [one.late_share for one in found.values()] == [0.005, 0.05, 0.0]
    assert [row[-1] for row in summary.rows(found)] == ["0.5%", "5.0% (void)", "0.0% (void)"]
    assert summary.document(found, {}, LIMITS, {})["speedups"] == {"lr": {}}


def test_a_server_that_does_not_say_how_late_it_was_is_taken_to_be_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REFRESH_S", 0.0)
    said: list[dict[str, Lateness] | ServerError] = [
        {"target": Lateness(5.0, 0.0)},
        {"target": Lateness(9.0, 0.01)},
        ServerError("its metrics do not answer"),
        {"target": Lateness(20.0, 0.02)},
        *[ServerError("its metrics do not answer")] * MAX_TRIES,
        {"target": Lateness(40.0, 9.0)},
        {"target": Lateness(50.0, 9.01)},
    ]

    class Served:
        def lateness(self) -> dict[str, Lateness]:
            found = said.pop(0)
            if isinstance(found, ServerError):
                raise found
            return found

    late = LatenessSince(cast(TritonServer, Served()))

    assert late() == Lateness(4.0, 0.01)
    assert late() == Lateness(11.0, 0.01), "one answer that is missing is asked for again"
    assert late().void
    assert late() == Lateness(), "what was late before is not this turn's"
    assert late() == Lateness(10.0, pytest.approx(0.01))


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    sweep_of(tmp_path, ScriptedAnalyzer()).run(POINTS[:2], ignore)
    analyzer, told = ScriptedAnalyzer(), []

    sweep_of(tmp_path, analyzer).run(POINTS, lambda point, what: told.append((point.name, what)))

    assert analyzer.asked == ["lr r1"]
    assert told == [("ar/c1", "kept"), ("lr/c1", "kept"), ("lr/r1", "measured")]


def test_a_server_that_dies_ends_the_sweep_and_loses_nothing(tmp_path: Path) -> None:
    analyzer = ScriptedAnalyzer({"lr 1": [PerfAnalyzerError("perf_analyzer: Thread [0] had error: Socket closed")]})
    sweep = sweep_of(tmp_path, analyzer, ready=False)

    with pytest.raises(LoadError, match=r"the server at 127\.0\.0\.1:1 died at lr/c1 .*Socket closed"):
        sweep.run(POINTS, ignore)

    assert analyzer.asked == ["ar! 1", "lr 1"]
    assert set(sweep.results.figures(POINTS, LIMITS)) == {POINTS[0]}
    assert (tmp_path / "load" / "lr" / "c1.failed.txt").read_text() == "what it printed"
    assert not (tmp_path / "load" / "lr" / "c1").exists()

    sweep_of(tmp_path, ScriptedAnalyzer()).run(POINTS, ignore)
    assert {path.name for path in (tmp_path / "load" / "lr").iterdir()} == {"c1", "r1"}


def test_a_point_that_fails_while_the_server_is_well_is_left_out(tmp_path: Path) -> None:
    analyzer = ScriptedAnalyzer({"lr 1": [PerfAnalyzerError("perf_analyzer: LR_OVERLOADED")]})
    sweep = sweep_of(tmp_path, analyzer)

    assert failures(sweep) == {POINTS[1].name: "perf_analyzer: LR_OVERLOADED"}
    assert set(sweep.results.figures(POINTS, LIMITS)) == {POINTS[0], POINTS[2]}


def test_a_connection_that_came_too_late_is_tried_again(tmp_path: Path) -> None:
    late = [PerfAnalyzerError("perf_analyzer: failed to connect to all addresses")]
    analyzer = ScriptedAnalyzer({"lr 1": late})

    assert failures(sweep_of(tmp_path, analyzer)) == {}
    assert analyzer.asked == ["ar! 1", "lr 1", "lr 1", "lr r1"]


def test_what_was_measured_in_slow_motion_is_told_at_the_pace(tmp_path: Path) -> None:
    slow = replace(sweep_of(tmp_path, analyzer := ScriptedAnalyzer()), results=Results(tmp_path / "load", slow_motion=4.0))
    slow.run(POINTS, ignore)

    assert analyzer.asked == ["ar! 1", "lr 1", "lr r0.25"]
    as_written = Results(tmp_path / "load").figures(POINTS, LIMITS)
    for point, one in slow.results.figures(POINTS, LIMITS).items():
        assert one.latency_s.mean == pytest.approx(as_written[point].latency_s.mean / 4.0)
        assert one.tokens_per_s == pytest.approx(4.0 * as_written[point].tokens_per_s)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    results = Results(tmp_path / "load")
    results.begin({"server": "demo", "temperature": 0.6}, fresh=False)
    sweep_of(tmp_path, ScriptedAnalyzer()).run(POINTS[:1], ignore)
    results.begin({"server": "demo", "temperature": 0.6}, fresh=False)

    with pytest.raises(LoadError, match=r"holds another run \(temperature 0\.6, now 1\.0\): use --fresh"):
        results.begin({"server": "demo", "temperature": 1.0}, fresh=False)

    results.begin({"server": "demo", "temperature": 1.0}, fresh=True)
    assert results.figures(POINTS, LIMITS) == {}


# Inputs ------------------------------------------------------------------------------------------------------------


def test_the_committed_inputs_are_the_demos_problems() -> None:
    data = inputs.load(inputs.INPUTS / "demo.json")
    assert data == inputs.input_file(inputs.demo_questions(inputs.NUM_DEMO), inputs.MAX_TOKENS["demo"])["data"]


def test_requests_of_a_point_go_through_the_questions_in_turn_under_seeds_of_their_own() -> None:
    questions = [{"text_input": ["a"]}, {"text_input": ["b"]}]

    rows = inputs.for_point(questions, {"mode": "lr", "stream": True}, "lr/c1", 3)["data"]

    assert [row["text_input"] for row in rows] == [["a"], ["b"], ["a"]]
    assert len({row["seed"][0] for row in rows}) == 3
    assert set().union(*rows) <= {spec.name for spec in LOOKAHEAD_INPUTS}
    other = inputs.for_point(questions, {"mode": "ar", "stream": True}, "ar/c1", 1)["data"]
    assert other[0]["seed"] != rows[0]["seed"]


def test_an_emulated_deployment_is_asked_nothing_twice() -> None:
    questions = inputs.scripted_anew(Workload.load("qwen3-gsm8k"))

    asked = [row["text_input"][0] for name in ("ar/c1", "lr/c1", "lr/c4") for row in questions(name, 8)]

    assert len(set(asked)) == 24
    assert questions("ar/c1", 2) == questions("ar/c1", 8)[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("[]", "is no perf_analyzer input file"),
        ('{"data": []}', "at least one request"),
        ('{"data": [{"text_input": ["a"]}, {"max_tokens": [3]}]}', "request 1 has neither"),
        ('{"data": [{"text_input": ["a"], "maxtokens": [3]}]}', "request 0 has 'maxtokens'"),
    ],
)
def test_an_input_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "input.json"
    path.write_text(text)
    with pytest.raises(LoadError, match=message):
        inputs.load(path)


def test_data_sets_become_inputs(tmp_path: Path) -> None:
    source, output = tmp_path / "gsm8k.jsonl", tmp_path / "out.json"
    source.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n\n{"question": "2 + 2?", "answer": "#### 4"}\n')
    app = typer.Typer()
    app.command()(inputs.main)

    result = CliRunner().invoke(app, ["gsm8k", str(source), "--output", str(output), "--count", "1"])

    assert result.exit_code == 0, result.output
    (row,) = inputs.load(output)
    assert row == {"text_input": ["1 + 1?" + inputs.BOXED], "max_tokens": [4096]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": 3}', "gsm8k.jsonl:1: no text in the field question"),
        ("oops", "gsm8k.jsonl:1: no JSON"),
        ("\n", "no question"),
    ],
)
def test_a_malformed_data_set_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(text)
    with pytest.raises(LoadError, match=message):
        inputs.read_questions(source, "gsm8k")


# perf_analyzer itself ------------------------------------------------------------------------------------------------


def script(path: Path, body: str) -> PerfAnalyzer:
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return PerfAnalyzer((str(path),))


def test_a_failure_is_told_in_its_own_words(tmp_path: Path) -> None:
    usage = "Usage: perf_analyzer [options]\n==== OPTIONS ====\n -m: required"
    analyzer = script(
        tmp_path / "pa", f"print('measuring'); print('''{usage}\\nError: Invalid option''', file=sys.stderr); sys.exit(99)"
    )
    with pytest.raises(PerfAnalyzerError, match=r"^perf_analyzer: Error: Invalid option \(exit status 99\)$"):
        analyzer.run([], timeout_s=20.0, log=tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text().startswith("measuring\n")


def test_a_run_that_hangs_is_stopped_and_what_it_said_is_kept(tmp_path: Path) -> None:
    log, analyzer = tmp_path / "log.txt", script(tmp_path / "pa", "print('began', flush=True); time.sleep(600)")
    for limit_s in (1.0, 5.0, 20.0):  # on a busy machine it may not have begun by the first
        with pytest.raises(PerfAnalyzerError, match="stopped after"):
            analyzer.run([], timeout_s=limit_s, log=log)
        if log.read_text():
            break
    assert "began" in log.read_text()


def test_a_run_whose_server_has_died_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_analyzer, "WATCH_S", 0.05)
    alive = iter([True, True, False])
    analyzer = script(tmp_path / "pa", "time.sleep(600)")
    with pytest.raises(PerfAnalyzerError, match="stopped, as the server no longer answers"):
        analyzer.run([], timeout_s=600.0, server_lives=lambda: next(alive))


def test_a_binary_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PerfAnalyzerError, match="absent cannot be run: No such file"):
        PerfAnalyzer((str(tmp_path / "absent"),)).version()


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            "Failed to retrieve results from inference request.\nThread [0] had error: LR_X\n\nThread [1] had error: LR_X\n",
            "Thread [0] had error: LR_X; Thread [1] had error: LR_X (exit status 99)",
        ),
        ("error: failed to get model metadata: failed to connect to all addresses", None),
        ("", "no reason given (exit status 99)"),
    ],
)
def test_last_words(stderr: str, words: str | None) -> None:
    assert last_words(stderr, 99) == (words or f"{stderr} (exit status 99)")


def test_an_older_system_runs_it_with_libraries_of_its_own(tmp_path: Path) -> None:
    new, old = (perf_analyzer.command_in(tmp_path, glibc).command for glibc in ((2, 38), (2, 36)))

    assert new == (str(tmp_path / perf_analyzer.BINARY),)
    assert old[0].endswith("ld-linux-x86-64.so.2") and old[1] == "--library-path" and old[-1] == new[0]


def test_a_system_without_glibc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_analyzer.platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(PerfAnalyzerError, match="needs a system with glibc"):
        perf_analyzer.obtain(tmp_path)


def test_another_processor_is_told_to_bring_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_analyzer.platform, "machine", lambda: "riscv64")
    with pytest.raises(PerfAnalyzerError, match="name one of your own"):
        perf_analyzer.obtain(tmp_path)


def test_a_download_that_fails_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_analyzer.sys, "executable", str(script(tmp_path / "pip", "sys.exit('no network')").command[0]))
    with pytest.raises(PerfAnalyzerError, match=r"pip cannot download perf-analyzer 2\.60\.0: no network"):
        perf_analyzer.obtain(tmp_path / "tools")
    assert list((tmp_path / "tools").iterdir()) == []


# What is told ------------------------------------------------------------------------------------------------------


@pytest.fixture
def found() -> dict[Point, PointFigures]:
    result = {}
    for series, factor in ((AR, 1.0), (LR, 0.5)):
        for width, slow in ((1, 1.0), (4, 1.0 if series == AR else 4.0)):
            requests = [RequestTimes(0.1 * n, (0.1 * n + 0.2,), 0.1 * n + factor * slow, 100, "stop") for n in range(4)]
            result[Point(series, concurrency=width, num_requests=4)] = figures(requests, LIMITS)
        result[Point(series, rate=1.0, num_requests=4)] = figures(requests, LIMITS)
    return result


def test_the_document_holds_speedups_and_their_crossover(found: dict[Point, PointFigures]) -> None:
    whole = summary.document(found, {"device": "here"}, LIMITS, {POINTS[0]: "died"})

    assert whole["speedups"] == {"lr": {"1": 2.0, "4": 0.5}}
    assert whole["crossover"] == {"lr": pytest.approx(3.0)}
    assert whole["failed"] == {"ar/c1": "died"}
    line = summary.line(whole)
    assert (line["num_points"], line["num_failed"], line["device"]) == (6, 1, "here")
    assert json.loads(json.dumps(line)) == line
    assert summary.markdown(found).count("\n") == 2 + len(found)


def test_the_plot_is_drawn_of_whatever_there_is(found: dict[Point, PointFigures], tmp_path: Path) -> None:
    for name, some in {"all": found, "one": dict([next(iter(found.items()))]), "none": {}}.items():
        draw(some, LIMITS, "title", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_keeps_a_pace_has_slow_motion(tmp_path: Path) -> None:
    slow = command.Subject.of(None, "qwen3-32b-apart", "h200_sxm", None, tmp_path, slow_motion=4.0)
    assert "4 times as long" in slow.told

    for url, spec in (("127.0.0.1:9", "demo"), (None, "demo")):
        assert command.Subject.of(url, spec, "h200_sxm", None, tmp_path).told == (url or "demo")
        with pytest.raises(LoadError, match="--slow-motion goes with an emulated deployment"):
            command.Subject.of(url, spec, "h200_sxm", None, tmp_path, slow_motion=4.0)


def test_a_server_of_our_own_is_known_by_what_it_serves_and_its_code(tmp_path: Path) -> None:
    hashes = []
    for name, steps in (("a", 12), ("b", 12), ("c", 13)):  # the file of a workload lies elsewhere in each run
        (tmp_path / name).mkdir()
        texts = short_texts("qwen3-gsm8k", steps, tmp_path / name)
        hashes.append(served_hash(emulated("qwen3-32b-apart", "h200_sxm", texts)))
    assert hashes[0] == hashes[1] != hashes[2]
    assert set(command.Subject.of(None, "demo", "h200_sxm", None, tmp_path).hashes) == {"served_hash", "code_hash"}
    assert command.Subject.of("127.0.0.1:9", "demo", "h200_sxm", None, tmp_path).hashes == {}


class ScriptedClient:
    """Refuses some modes, and remembers what it was asked: mode, stream, seconds."""

    asked: list[tuple[str, bool, float | None]]
    refuses: tuple[str, ...] = ()

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> ScriptedClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_ready(self, *, timeout_s: float) -> bool:
        return True

    def ask(self, question: str, options: command.Options, *, timeout_s: float) -> None:
        self.asked.append((str(options.mode), bool(options.stream), timeout_s))
        if options.mode in self.refuses:
            raise InvalidRequest("mode: this server's target drafts by itself")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedClient]:
    monkeypatch.setattr(ScriptedClient, "asked", [], raising=False)
    monkeypatch.setattr(command, "Client", ScriptedClient)
    return ScriptedClient


def test_a_warm_up_asks_each_series_once_and_auto_until_it_has_learned(client: type[ScriptedClient]) -> None:
    rows = inputs.load(inputs.INPUTS / "demo.json")

    command.warm_up("here", lambda name, count: rows, 0.6, (1, 20), learns_from=50, timeout_s=7.0)

    each, learned = client.asked[: len(SERIES)], client.asked[len(SERIES) :]
    assert sorted(each) == sorted((series.mode, series.stream, 7.0) for series in SERIES)
    assert learned == [("auto", True, 7.0)] * (50 + 60)


def test_a_server_that_refuses_a_mode_is_asked_in_the_others(
    tmp_path: Path, client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose target drafts by itself: it answers neither ``ar`` nor ``lr``."""
    monkeypatch.setattr(client, "refuses", ("ar", "lr"))
    analyzer = ScriptedAnalyzer()
    monkeypatch.setattr(command, "obtain", lambda tools: analyzer)
    monkeypatch.setattr(ScriptedAnalyzer, "version", lambda self: "0", raising=False)
    app = typer.Typer()
    app.command()(command.main)
    folder, output = tmp_path / "load", tmp_path / "load.json"
    given = ["--url", "here", "--concurrency", "1", "--min-requests", "4", "--folder", str(folder), "--output", str(output)]

    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 1 and "does not answer in mode ar: mode: this server's target drafts by itself" in refused.output
    assert not analyzer.asked

    unknown = CliRunner().invoke(app, [*given, "--mode", "al"])
    assert unknown.exit_code == 1 and "--mode al: one of ar, sd, lr, lr_sd, auto" in unknown.output

    client.asked.clear()
    result = CliRunner().invoke(app, [*given, "--mode", "lr_sd", "--mode", "sd"])
    assert result.exit_code == 0, result.output
    assert {mode for mode, _, _ in client.asked} == {"sd", "lr_sd"}
    points = json.loads(output.read_text())["here, 1 in flight, slow motion 1, lr_sd, sd"]["points"]
    assert {point["mode"] for point in points} == {"sd", "lr_sd"}
    assert {point["rate"] for point in points} > {None}, "rates from what sd can answer"
    assert output.with_suffix(".png").is_file()

    published = command.PUBLISHED.read_bytes()
    again = CliRunner().invoke(app, [*given[:-2], "--mode", "sd"])
    assert again.exit_code == 0 and (folder / "load.json").is_file(), again.output
    assert command.PUBLISHED.read_bytes() == published, "of a server of one's own"


def test_all_series_are_asked_where_no_mode_is_named() -> None:
    assert series_of(()) == SERIES
    assert [series.name for series in series_of(("sd",))] == ["sd", "sd_streamed"]


def test_without_a_server_the_command_says_so_and_ends(tmp_path: Path) -> None:
    binary = script(tmp_path / "pa", "print('Perf Analyzer Version 0')").command[0]
    app = typer.Typer()
    app.command()(command.main)
    arguments = ["--url", "127.0.0.1:9", "--perf-analyzer", binary, "--folder", str(tmp_path / "load")]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 1
    assert "error: the server at 127.0.0.1:9 does not answer" in result.output
    assert "Traceback" not in result.output
