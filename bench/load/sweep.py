"""The points of a load test, each measured once: what is on disk is not measured again.

A point's folder appears when it is whole (input, perf_analyzer's CSV and profile export, its log), so that an interrupted run
goes on where it stopped. ``run.json`` beside them says under which settings they were measured; others are refused there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bench.kit.turns import rotated
from bench.load import inputs
from bench.load.errors import LoadError
from bench.load.export import Limits, PointFigures, RequestTimes, figures, read_export
from bench.load.perf_analyzer import PerfAnalyzerError
from lr_backend.hardware.lateness import Lateness

MODEL = "lookahead"
MANIFEST = "run.json"
EXPORT, CSV, INPUT, LOG, LATE = "profile.json", "latency.csv", "input.json", "perf_analyzer.txt", "lateness.json"
CONNECT_ATTEMPTS = 3
RATE_THREADS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the plot: how every request of it is asked."""

    name: str
    mode: str
    stream: bool

    @property
    def whole(self) -> bool:
        """Compared by latency and throughput: modes that need no steps are asked for the whole answer at once, as their best."""
        return self.stream == (self.mode in ("lr", "lr_sd", "auto"))


SERIES = (
    Series("ar", "ar", stream=False),
    Series("ar_streamed", "ar", stream=True),
    Series("sd", "sd", stream=False),
    Series("sd_streamed", "sd", stream=True),
    Series("lr", "lr", stream=True),
    Series("lr_sd", "lr_sd", stream=True),
    Series("auto", "auto", stream=True),
)
BASELINE = SERIES[0]


def series_of(modes: Sequence[str]) -> tuple[Series, ...]:
    """Those of these modes, in the order of :data:`SERIES`; where none is named, all.

    Raises:
        LoadError: there is no such mode.
    """
    known = dict.fromkeys(series.mode for series in SERIES)
    if unknown := [mode for mode in modes if mode not in known]:
        raise LoadError(f"--mode {unknown[0]}: one of {', '.join(known)}")
    return tuple(series for series in SERIES if not modes or series.mode in modes)


@dataclass(frozen=True, slots=True)
class Point:
    """One series under one load: so many requests in flight, or arrivals a second (Poisson)."""

    series: Series
    concurrency: int | None = None
    rate: float | None = None
    num_requests: int = 1

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None), self

    @property
    def load(self) -> float:
        return float(self.concurrency) if self.concurrency is not None else float(self.rate or 0.0)

    @property
    def name(self) -> str:
        return f"{self.series.name}/{f'c{self.concurrency}' if self.concurrency is not None else f'r{self.rate:g}'}"

    def arguments(self, url: str, folder: Path, slow_motion: float = 1.0) -> list[str]:
        """perf_analyzer's; the profile export may not exist yet.

        Args:
            slow_motion: the server takes so many times as long for everything, so arrivals come as much slower.
        """
        load = self.load if self.rate is None else self.rate / slow_motion
        only = f"{load:g}:{load:g}:1"  # without an end, a rate below 1 would be a range up to 1
        if self.concurrency is not None:
            asked = ["--concurrency-range", only]
        else:
            poisson = ["--request-distribution", "poisson", "--max-threads", str(RATE_THREADS)]
            asked = ["--request-rate-range", only, *poisson]
        return [
            *("-m", MODEL, "-i", "grpc", "-u", url, "--async", "--streaming"),
            *("--input-data", str(folder / INPUT)),
            *asked,
            *("--request-count", str(self.num_requests)),
            *("--profile-export-file", str(folder / EXPORT)),
            *("-f", str(folder / CSV), "--verbose-csv"),
        ]


def closed_points(concurrency: Iterable[int], min_requests: int, asked: Sequence[Series] = SERIES) -> list[Point]:
    """Every series at every concurrency, in turns; four rounds of requests each, so that the run-out weighs little."""
    points = []
    for number, width in enumerate(concurrency):
        count = max(min_requests, 4 * width)
        points += [Point(series, concurrency=width, num_requests=count) for series in rotated(asked, number)]
    return points


def open_points(rates: Iterable[float], num_requests: int, asked: Sequence[Series] = SERIES) -> list[Point]:
    """Every series at every rate, in turns. perf_analyzer draws the same arrivals for all of them."""
    points = []
    for number, rate in enumerate(rates):
        points += [Point(series, rate=rate, num_requests=num_requests) for series in rotated(asked, number)]
    return points


def rates_from(capacity_rps: float, shares: Iterable[float]) -> list[float]:
    """Arrival rates as shares of what the baseline could answer a second at most, to two digits."""
    return list(dict.fromkeys(float(f"{share * capacity_rps:.2g}") for share in shares))


class Runner(Protocol):
    """Runs perf_analyzer; see :class:`~bench.load.perf_analyzer.PerfAnalyzer`."""

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        log: Path | None = None,
        server_lives: Callable[[], bool] = ...,
    ) -> str: ...


@dataclass(frozen=True)
class Results:
    """The folder of one run.

    Attributes:
        slow_motion: of what was measured, which is read as if everything had gone so many times as fast.
    """

    folder: Path
    slow_motion: float = 1.0

    def begin(self, settings: Mapping[str, Any], *, fresh: bool) -> None:
        """Take the folder up, or begin it.

        Raises:
            LoadError: it holds points that were measured under other settings.
        """
        path = self.folder / MANIFEST
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        if path.is_file():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise LoadError(f"{path} is no JSON: {error}; use --fresh to begin anew") from error
            differing = sorted(key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key))
            if differing:
                told = ", ".join(f"{key} {before.get(key)!r}, now {settings.get(key)!r}" for key in differing)
                raise LoadError(f"{self.folder} holds another run ({told}): use --fresh, or another --folder")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    def has(self, point: Point) -> bool:
        """It was measured."""
        return self._export(point).is_file()

    def requests(self, point: Point) -> list[RequestTimes] | None:
        """What was measured at a point; None where nothing was.

        Raises:
            MalformedExport: it was, and the file has been damaged since.
        """
        if not self.has(point):
            return None
        return [one.sped_up(self.slow_motion) for one in read_export(self._export(point))]

    def figures(self, points: Iterable[Point], limits: Limits) -> dict[Point, PointFigures]:
        """Of the points that were measured."""
        return {
            point: self._judged(point, figures(found, limits)) for point in points if (found := self.requests(point)) is not None
        }

    def _judged(self, point: Point, found: PointFigures) -> PointFigures:
        path = self.folder / point.name / LATE
        if not path.is_file():
            return found
        late = Lateness(**json.loads(path.read_text(encoding="utf-8")))
        return replace(found, late_share=late.share, void=late.void)

    def keep(self, point: Point, measured: Path) -> None:
        """Make a measured point's folder the point's own, at once."""
        target = self.folder / point.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        measured.rename(target)
        self._failure_log(point).unlink(missing_ok=True)

    def keep_failure(self, point: Point, measured: Path) -> None:
        """What perf_analyzer said at a point without a result."""
        log = measured / LOG
        if log.is_file():
            target = self._failure_log(point)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, target)

    def _export(self, point: Point) -> Path:
        return self.folder / point.name / EXPORT

    def _failure_log(self, point: Point) -> Path:
        return self.folder / f"{point.name}.failed.txt"


@dataclass(frozen=True)
class Sweep:
    """Measures points against one server.

    Attributes:
        questions: of each point.
        fields: of every request, beside the question's and the series' own.
        is_ready: whether the server answers; asked when a point has failed.
        lateness: of engines that keep a pace, since it was last asked; None: there are none.
    """

    runner: Runner
    url: str
    questions: inputs.Questions
    fields: Mapping[str, Any]
    results: Results
    point_timeout_s: float
    is_ready: Callable[[], bool]
    lateness: Callable[[], Lateness] | None = None

    def run(self, points: Iterable[Point], report: Callable[[Point, str], None]) -> None:
        """Measure what is not there yet.

        A point that fails while the server is well is left out, and the next is tried. ``report`` hears of each point: ``kept``,
        ``measured``, or the error.

        Raises:
            LoadError: the server has gone; what was measured stays.
        """
        for point in points:
            if self.results.requests(point) is not None:
                report(point, "kept")
                continue
            try:
                self._measure(point)
            except PerfAnalyzerError as error:
                report(point, str(error))
                if not self.is_ready():
                    raise LoadError(f"the server at {self.url} died at {point.name} ({error})") from error
            else:
                report(point, "measured")

    def _measure(self, point: Point) -> None:
        """One point; a server that was too busy to take the connection in time is tried again."""
        self.results.folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            with tempfile.TemporaryDirectory(prefix=".point-", dir=self.results.folder) as temporary:
                folder = Path(temporary) / "point"
                folder.mkdir()
                fields = {**self.fields, "mode": point.series.mode, "stream": point.series.stream}
                asked = self.questions(point.name, point.num_requests)
                document = inputs.for_point(asked, fields, point.name, point.num_requests)
                (folder / INPUT).write_text(json.dumps(document), encoding="utf-8")
                try:
                    arguments = point.arguments(self.url, folder, self.results.slow_motion)
                    log, lives = folder / LOG, self.is_ready
                    self.runner.run(arguments, timeout_s=self.point_timeout_s, log=log, server_lives=lives)
                    read_export(folder / EXPORT)  # what cannot be read later is no result
                except PerfAnalyzerError as error:
                    if error.unreachable and attempt < CONNECT_ATTEMPTS and self.is_ready():
                        continue
                    self.results.keep_failure(point, folder)
                    raise
                except LoadError as error:
                    self.results.keep_failure(point, folder)
                    raise PerfAnalyzerError(f"perf_analyzer left no usable export: {error}") from error
                finally:
                    late = self.lateness() if self.lateness is not None else None
                if late is not None:
                    (folder / LATE).write_text(json.dumps(asdict(late)), encoding="utf-8")
                self.results.keep(point, folder)
                return
