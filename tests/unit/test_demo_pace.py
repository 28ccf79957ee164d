"""How the demo finds a slow motion that this machine can keep, and what it puts down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from lr_client import Usage
from rich.console import Console

from bench.kit import pace
from bench.kit.measure import Sample
from bench.kit.serving import demo_spec
from demo.problems import problems
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.hardware.lateness import Lateness
from lr_backend.serve.server import ServerError

PROBES = list(islice(problems(1, "test"), 2))
QUIET = Console(quiet=True)


class SlowServer:
    """Each answer takes ten paced seconds, and is late by so much unless it is in slow enough motion."""

    grpc_url = "nowhere"

    def __init__(self, slow_motion: float, needed: float) -> None:
        self.late_s = 0.5 if slow_motion < needed else 0.01
        self.num_asked = 0

    def lateness(self) -> dict[str, Lateness]:
        return {"target": Lateness(10.0 * self.num_asked, self.late_s * self.num_asked)}


class NoClient:
    def __init__(self, url: str) -> None: ...

    def __enter__(self) -> NoClient:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Slow motions that a server was started with; 2 is enough."""
    found: list[float] = []

    @contextmanager
    def serving(spec: EmbeddedDeployment, folder: Path) -> Iterator[SlowServer]:
        found.append(spec.slow_motion)
        yield SlowServer(spec.slow_motion, 2.0)

    def ask(client: Any, problem: Any, fields: Any, index: int, timeout_s: float) -> Any:
        raise AssertionError("the stage asks")

    def counted(stage: pace.Stage, problem: Any, row: str, fields: Any, index: int) -> tuple[Sample, None]:
        assert isinstance(stage.server, SlowServer)
        stage.server.num_asked += 1
        return Sample(row, index, True, 1.0, Usage(completion_tokens=10)), None

    monkeypatch.setattr(pace, "serving", serving)
    monkeypatch.setattr(pace, "Client", NoClient)
    monkeypatch.setattr("bench.kit.serving.REFRESH_S", 0.0)
    monkeypatch.setattr(pace, "ask", ask)
    monkeypatch.setattr(pace.Stage, "ask", counted)
    return found


def test_a_machine_that_falls_behind_is_shown_in_slow_motion(tried: list[float], tmp_path: Path) -> None:
    with pace.stage(demo_spec(), pace.SYSTEM, PROBES, tmp_path, QUIET) as stage:
        assert stage.spec.slow_motion == 2.0
        assert "in slow motion" in stage.spec.pace_label
    assert tried == [1.0, 2.0]


def test_a_slow_motion_that_is_given_is_taken(tried: list[float], tmp_path: Path) -> None:
    with pace.stage(demo_spec(), pace.SYSTEM, PROBES, tmp_path, QUIET, slow_motion=1.5) as stage:
        assert stage.spec.slow_motion == 1.5
    assert tried == [1.5]


@pytest.mark.parametrize("silent", [False, True])
def test_each_row_is_late_by_itself(tried: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """``lr`` alone falls behind; then the server says nothing behind one of its turns."""
    counted = pace.Stage.ask
    total = [Lateness()]

    def ask(stage: pace.Stage, problem: Any, row: str, *given: Any) -> Any:
        total[0] += Lateness(10.0, 0.5 if row == "lr" else 0.0)
        stage.server.is_silent = silent and row == "lr"  # type: ignore[attr-defined]
        return counted(stage, problem, row, *given)

    def lateness(server: Any) -> dict[str, Lateness]:
        if getattr(server, "is_silent", False):
            raise ServerError("its metrics do not answer")
        return {"target": total[0]}

    with pace.stage(demo_spec(), pace.SYSTEM, PROBES, tmp_path, QUIET, slow_motion=1.0) as stage:
        monkeypatch.setattr(pace.Stage, "ask", ask)
        monkeypatch.setattr(SlowServer, "lateness", lateness)
        found = pace.compare(stage, PROBES, QUIET)

    assert found.late_rows["ar"] == Lateness(20.0, 0.0)
    assert found.late_rows["lr"] == (Lateness() if silent else Lateness(20.0, 1.0))
    assert found.late_rows["lr"].void and found.lateness.void is silent, "together they are late by one percent, as they may be"
    assert found.lateness == (Lateness() if silent else Lateness(10.0 * len(PROBES) * len(pace.ROWS), 1.0))


def test_what_was_late_before_the_comparison_does_not_count(tried: list[float], tmp_path: Path) -> None:
    with pace.stage(demo_spec(), pace.SYSTEM, PROBES, tmp_path, QUIET, slow_motion=1.0) as stage:
        assert isinstance(stage.server, SlowServer)
        stage.server.late_s = 0.0
        stage.server.num_asked = 0
        pace.learn(stage, PROBES, QUIET)
        assert stage.server.num_asked == len(PROBES)
        found = pace.compare(stage, PROBES, QUIET)
    assert found.lateness == Lateness(10.0 * len(PROBES) * len(pace.ROWS), 0.0)
    assert found.rows.keys() == pace.ROWS.keys()
    assert {row.total for row in found.rows.values()} == {len(PROBES)}
