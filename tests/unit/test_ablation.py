"""The ablation on made-up samples and made-up servers: which rows there are, and what is made of what they measured."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from lr_client import Options, Result, StepRecord, Usage
from typer.testing import CliRunner

from bench import ablation
from bench.ablation import (
    HEADINGS,
    PARTS,
    Checked,
    Hardware,
    Line,
    Row,
    all_rows,
    chosen,
    lines,
    markdown,
    mean_step_tokens,
)
from bench.kit import hardware as hardware_module
from bench.kit.hardware import hardware_ceiling
from bench.kit.intervals import Share
from bench.kit.measure import Sample
from bench.kit.serving import demo_spec, with_verifiers
from lr_backend.hardware.lateness import Lateness
from lr_backend.hardware.machine import LinearTimes
from lr_backend.policy.formulas import ceiling

CONFIG = demo_spec().loop_config()
ROWS = all_rows(CONFIG, (2,))
FREE = Hardware(0.2, {1: 0.005, 2: 0.005, 4: 0.005}, 1.0)
LINE_FIELDS = {
    "name",
    "speedup",
    "speedup_low",
    "speedup_high",
    "alpha",
    "c",
    "ceiling",
    "hardware_ceiling",
    "realised_share",
    "correct",
    "total",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short simulations, where only their use is tested."""
    monkeypatch.setattr(hardware_module, "SIMULATED_STEPS", 12)
    monkeypatch.setattr(hardware_module, "SIMULATED_SEEDS", 1)


def row(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def answered(name: str, latency_s: float, accepted: int = 0, rejected: int = 0, num_problems: int = 4) -> list[Sample]:
    usage = Usage(
        completion_tokens=200,
        num_steps=10,
        num_steps_drafted=accepted + rejected,
        num_steps_accepted=accepted,
        num_steps_rejected={"judge": rejected} if rejected else {},
    )
    return [Sample(name, problem, problem > 0, latency_s * (1 + problem), usage) for problem in range(num_problems)]


SAMPLES = [
    *answered("ar", 1.2),
    *answered("sd", 1.5),
    *answered("sd num_draft_tokens 4", 1.0),
    *answered("lr", 1.0, accepted=6, rejected=4),
    *answered("lr_sd", 0.8, accepted=6, rejected=4),
]


def test_the_rows_begin_with_the_baselines_and_end_with_the_default() -> None:
    names = [row.name for row in ROWS]

    assert names[:2] == ["ar", "ar at 2 threads"]
    assert names[-1] == "auto"
    assert len(set(names)) == len(names) <= 36
    assert row("lr_sd").fields == {"mode": "lr_sd"}
    assert {**CONFIG.defaults, **row("auto").fields} == CONFIG.defaults
    some = {"lr depth 4", "lr own branches off", "lr width 4", "lr verifier exact", "lr_sd proposer ngram", "lossless"}
    assert some <= {*names}


def test_every_row_is_a_request_that_client_and_server_know() -> None:
    requests = [row.request(CONFIG) for row in ROWS]
    for one in ROWS:
        Options(**one.fields)

    settings = [request.model_copy(update={"seed": 0}).model_dump_json() for request in requests]
    assert len({(row.change, setting) for row, setting in zip(ROWS, settings, strict=True)}) == len(ROWS)
    assert row("lr").request(CONFIG).max_depth == CONFIG.defaults["max_depth"]
    assert all(request.max_depth <= CONFIG.limits.max_depth and request.width <= CONFIG.limits.max_width for request in requests)


def test_the_server_s_own_verifiers_have_a_row_each() -> None:
    assert {"lr verifier chance", "lossless"} & {row.name for row in ROWS} == {"lossless"}
    taken_on = with_verifiers(demo_spec(), ablation.VERIFIERS).loop_config()
    other = all_rows(taken_on.model_copy(update={"coupled_noise": False}))
    assert {"lr verifier chance", "lr verifier grade", "lossless"} & {row.name for row in other} == {
        "lr verifier chance",
        "lr verifier grade",
    }
    assert next(row for row in other if row.name == "lr verifier chance").request(taken_on).verifier == "chance"


def test_a_setting_that_no_request_carries_has_a_server_of_its_own() -> None:
    spec = demo_spec()
    changes = {row.change for row in ROWS}
    served = {str(change): change.of(spec) for change in changes}
    assert served.keys() == {"all", "threads-2", "no-own-branches"}
    assert served["all"] == spec
    assert not served["no-own-branches"].loop_config().own_branches
    assert served["threads-2"].target.num_threads == 2
    assert {row.fields["mode"] for row in ROWS if row.change.models} == {"ar"}


def test_chosen_rows_keep_their_order_and_the_baselines() -> None:
    assert chosen(ROWS, None) == ROWS
    assert [row.name for row in chosen(ROWS, ["lr_sd", "lr"])] == ["ar", "ar at 2 threads", "lr", "lr_sd"]
    with pytest.raises(ValueError, match="no row 'lr depth 3'; there are ar, "):
        chosen(ROWS, ["lr depth 3"])


def test_hardware_is_summed_up_as_the_simulator_takes_it() -> None:
    hardware = Hardware(0.2, {1: 0.010, 2: 0.012, 4: 0.016}, 1.25)

    assert hardware.crowding == pytest.approx(0.2)
    assert hardware.num_cores == pytest.approx(1.6)
    scenario = hardware.scenario(0.5, 20)
    assert scenario.machine == LinearTimes(0.010, 0.002, crowding=0.2, num_cores=hardware.num_cores).machine()
    assert (FREE.crowding, FREE.num_cores) == (0.0, None)
    assert replace(FREE, beside_draft=3.0).num_cores == 1.0


def test_on_hardware_without_crowds_the_hardware_ceiling_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_module, "SIMULATED_SEEDS", 2)
    request = row("lr").request(CONFIG)
    free = hardware_ceiling(FREE, request, 0.6, 10)

    assert free == pytest.approx(ceiling(0.6, 0.2, 4), rel=0.1)
    assert hardware_ceiling(Hardware(0.2, {1: 1.0, 2: 1.4, 4: 2.2}, 1.3), request, 0.6, 10) < 0.9 * free


def test_width_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured rate is that of positions, whatever the number of candidates that it took."""
    monkeypatch.setattr(hardware_module, "SIMULATED_SEEDS", 1)
    one, four = (hardware_ceiling(FREE, row(name).request(CONFIG), 0.6, 8) for name in ("lr", "lr width 4"))
    assert four == pytest.approx(one, rel=0.25)


def test_auto_may_choose_any_depth_or_none(short: None) -> None:
    crowded = Hardware(0.2, {1: 1.0, 2: 2.0, 4: 4.0}, 2.0)
    assert hardware_ceiling(crowded, row("lr").request(CONFIG), 0.3, 20) < 1.0
    auto = row("auto").request(CONFIG).model_copy(update={"max_depth": 2})
    assert hardware_ceiling(crowded, auto, 0.3, 20) == 1.0


def test_branches_that_are_not_begun_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_module, "SIMULATED_SEEDS", 1)
    request = row("lr").request(CONFIG)
    both, one = (hardware_ceiling(FREE, request, 0.6, 10, own_branches=own) for own in (True, False))
    assert one < both


def test_a_line_holds_the_speedup_beside_both_ceilings(short: None) -> None:
    result = {line.name: line for line in lines(ROWS, SAMPLES, FREE, CONFIG)}

    assert list(result) == ["ar", "sd", "sd num_draft_tokens 4", "lr", "lr_sd"]
    both = json.loads(json.dumps(result["lr_sd"].as_dict()))
    assert both.keys() >= LINE_FIELDS
    assert both["speedup"] == both["speedup_low"] == both["speedup_high"] == pytest.approx(1.5)
    assert (both["alpha"], both["c"], both["correct"], both["total"]) == (0.6, 0.2, 3, 4)
    # Over a target that is as fast as the best of the sd rows.
    assert both["ceiling"] == pytest.approx(1.2 * ceiling(0.6, 1.2 * 0.2, CONFIG.defaults["max_depth"]), abs=1e-3)
    of_steps, of_both = result["lr"].hardware_ceiling, result["lr_sd"].hardware_ceiling
    assert of_steps is not None and of_both is not None and of_steps < of_both < 1.2 * of_steps
    assert both["realised_share"] == pytest.approx(1.5 / (result["lr_sd"].hardware_ceiling or 0.0), abs=1e-3)


@pytest.mark.parametrize("name", ["ar", "sd"])
def test_rows_without_steps_have_no_ceiling(short: None, name: str) -> None:
    line = next(line for line in lines(ROWS, SAMPLES, FREE, CONFIG) if line.name == name).as_dict()

    assert [line[key] for key in ("alpha", "ceiling", "hardware_ceiling", "realised_share")] == [None] * 4
    assert line["speedup"] == (1.0 if name == "ar" else 0.8)


def test_a_row_that_hardly_looks_ahead_has_no_ceiling(short: None) -> None:
    for accepted, rejected, has_one in ((3, 1, False), (3, 2, True)):  # of ten steps
        samples = [*answered("ar", 1.2), *answered("auto", 1.0, accepted, rejected)]
        (line,) = (line for line in lines(ROWS, samples, FREE, CONFIG) if line.name == "auto")
        assert line.measured.step_acceptance_rate is not None
        assert (line.ceiling is not None, line.hardware_ceiling is not None) == (has_one, has_one)


def test_steps_are_as_long_as_in_the_answers_that_were_written_in_steps() -> None:
    assert mean_step_tokens(SAMPLES) == 20
    assert mean_step_tokens(answered("ar", 1.0)) == 24


def test_accepted_steps_are_read_by_the_checker() -> None:
    said, same, changed = "Tom has 3 + 4 = 7 apples.", "Tom has 3 + 4 = 7 apples.", "Tom has 3 + 5 = 8 apples."
    steps = [
        StepRecord(index=0, origin="draft", text=same, reason="exact", drafted_text=same, target_text=said),
        StepRecord(index=1, origin="draft", text=changed, reason="judge", drafted_text=changed, target_text=said),
        StepRecord(index=2, origin="correction", text=said, reason="judge", drafted_text=changed, target_text=said),
        StepRecord(index=3, origin="correction", text=said, reason="late", drafted_text=changed, target_text=said),
        StepRecord(index=4, origin="target", text=said, target_text=said),
    ]

    found = Checked.of([steps[:2], steps[2:]])

    assert (found.accepted.hits, found.accepted.total) == (2, 3)
    assert (found.wrong.hits, found.wrong.total, found.wrong.worth) == (1, 2, 1.0)


def test_the_table_has_a_row_a_line(short: None) -> None:
    checked = {"lr": Checked(Share(30, 50), Share(3, 30))}
    result = lines(ROWS, SAMPLES, FREE, CONFIG, checked)

    table = [[cell.strip() for cell in text.strip("|").split("|")] for text in markdown(result).splitlines()]

    assert table[0] == list(HEADINGS)
    assert {len(row) for row in table} == {len(HEADINGS)}
    assert [row[0] for row in table[2:]] == [f"`{line.name}`" for line in result]
    lr = dict(zip(HEADINGS, table[5], strict=True))
    assert lr["speedup (95 %)"] == "1.20 (1.20 to 1.20)"
    assert lr["wrongly accepted (95 %)"].startswith("10.0% (")
    line: Line = result[3]
    assert (line.as_dict()["accept_rate"], line.as_dict()["false_accept_rate"]) == (0.6, 0.1)


class MadeUpClient:
    """Answers at once and wrongly; notes what it was asked."""

    asked: list[tuple[str, Options]]

    def __init__(self, url: str) -> None:
        self.asked = []

    def ask(self, question: str, options: Options, *, timeout_s: float) -> Result:
        self.asked.append((question, options))
        usage = Usage(
            completion_tokens=40, num_steps=2, num_steps_drafted=2, num_steps_accepted=1, num_steps_rejected={"judge": 1}
        )
        return Result(text="?", reasoning="?", answer="?", finish_reason="stop", usage=usage if options.mode != "ar" else Usage())


@pytest.fixture
def clients(short: None, monkeypatch: pytest.MonkeyPatch) -> list[MadeUpClient]:
    """Of the servers of a run, none of which starts."""
    clients: list[MadeUpClient] = []

    def client(url: str) -> Any:
        clients.append(MadeUpClient(url))
        return nullcontext(clients[-1])

    monkeypatch.setattr(ablation, "Client", client)
    for name in ("serving", "engines_alone"):
        monkeypatch.setattr(ablation, name, lambda *arguments, **options: nullcontext(SimpleNamespace(grpc_url="nowhere")))
    monkeypatch.setattr(ablation, "measure_hardware", lambda *arguments: FREE)
    monkeypatch.setattr(ablation, "other_thread_counts", lambda spec: [2])
    return clients


def run(*arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that it ends in."""
    app = typer.Typer()
    app.command()(ablation.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]


def test_a_run_asks_every_row_every_problem_and_ends_with_the_default(clients: list[MadeUpClient], tmp_path: Path) -> None:
    printed = run(
        "--problems",
        "2",
        "--checked",
        "1",
        "--row",
        "lr",
        "--row",
        "lr_sd",
        "--output",
        str(tmp_path / "a" / "out.json"),
        "--page",
        str(tmp_path / "out.md"),
    )

    assert [line["name"] for line in printed] == ["ar", "lr", "lr_sd"]
    assert all(line.keys() >= LINE_FIELDS and line["total"] == 2 for line in printed)
    assert json.loads((tmp_path / "a" / "out.json").read_text())["rows"] == printed
    assert (tmp_path / "out.md").read_text().startswith("| row |")
    main, other = clients
    modes = [options.mode for _, options in main.asked]
    assert modes == ["ar", "lr", "lr_sd", *("ar", "lr", "lr_sd"), *("lr", "lr_sd", "ar"), *("lr", "lr_sd")]
    assert [options.trace for _, options in main.asked] == [None] * 9 + [True] * 2
    assert len({options.seed for _, options in main.asked[3:9]}) == 6
    assert len(other.asked) == 3  # the target alone at another thread count


def test_at_the_pace_of_a_system_the_parts_of_the_loop_have_rows_and_no_ceilings(
    clients: list[MadeUpClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ablation, "LatenessSince", lambda server: lambda: Lateness(50.0, 0.25))
    output = tmp_path / "out.json"

    printed = run("--problems", "1", "--checked", "0", "--pace", "h200_sxm", "--slow-motion", "2", "--output", str(output))

    assert {line["name"] for line in printed} == {"ar", *PARTS}
    assert all(line["c"] is line["hardware_ceiling"] is None for line in printed)
    document = json.loads(output.read_text())
    assert "h200_sxm" in document["pace"] and "hardware" not in document
    assert (document["late_share"], document["void"]) == (0.005, False)
    assert {(line["late_share"], line["void"]) for line in printed} == {(0.005, False)}
    as_it_is, no_own_branches = clients
    assert {options.mode for _, options in no_own_branches.asked} == {"lr", "lr_sd"}
    assert "auto" in {options.mode for _, options in as_it_is.asked}


def test_a_server_that_says_nothing_makes_its_own_rows_void(
    clients: list[MadeUpClient], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers: list[object] = []

    def late_since(server: object) -> Any:
        servers.append(server)
        return (lambda: Lateness()) if len(servers) == 2 else (lambda: Lateness(50.0, 0.1))

    monkeypatch.setattr(ablation, "LatenessSince", late_since)
    output = tmp_path / "out.json"

    printed = run("--problems", "1", "--checked", "0", "--pace", "h200_sxm", "--output", str(output))

    assert {line["name"] for line in printed if line["void"]} == {"lr own branches off", "lr_sd own branches off"}
    assert json.loads(output.read_text())["void"]


def test_an_unknown_row_is_refused_before_anything_starts() -> None:
    app = typer.Typer()
    app.command()(ablation.main)
    result = CliRunner().invoke(app, ["--row", "lr depth 3"])
    assert result.exit_code == 2
    assert "no row 'lr depth 3'" in result.output
