"""A run directory: settings, answers, failures and scores, one JSON object a line, each flushed when it is written.

A run that was killed may leave half a line at the end of a file: it is cut off, and what it stood for is done again.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from lr_client import Result, StepRecord, Usage
from lr_client.protocol import read_record
from pydantic import BaseModel, ConfigDict, ValidationError

from bench.evaluation.errors import EvaluationError
from bench.evaluation.scoring import Outcome, Score
from bench.evaluation.tasks import Rule
from lr_backend.errors import first_error
from lr_backend.hardware.lateness import Lateness

VERSION = 1
RUN, ANSWERS, FAILURES, SCORES, HARDWARE = "run.json", "answers.jsonl", "failures.jsonl", "scores.jsonl", "hardware.json"
LATENESS = "lateness.jsonl"
TIMED_OUT = "timeout"
"""The finish reason of an answer that the client gave up; the server's own words for ends are others."""
OWN_SERVER = "own server, spec "
"""How an endpoint begins that the run itself has started; the name of the spec follows."""


class Key(NamedTuple):
    """Which answer: of which problem, in which turn, and which of its samples."""

    task: str
    turn: str
    sample: int


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TaskRecord(_Record):
    """A problem as it was asked."""

    id: str
    question: str
    answer: str


class TurnRecord(_Record):
    """A setting that takes turns with the others: its name, and the request fields that make it.

    ``request`` holds all fields of the request with the deployment's defaults, where they are known.
    """

    name: str
    fields: dict[str, Any]
    request: dict[str, Any] | None = None


class RunRecord(_Record):
    """The settings of a run. What is in ``compared()`` must stay the same for a run to go on.

    Attributes:
        served_hash, code_hash: of the spec of a server of our own and its checkpoints' files, and of its code; see
            :mod:`bench.kit.served`. Empty for a server that runs already.
    """

    version: int = VERSION
    data_set: str
    rule: Rule
    source: str
    fingerprint: str
    num_problems: int
    start: int
    turns: tuple[TurnRecord, ...]
    num_samples: int
    seed: int
    concurrency: int
    trace: bool
    endpoint: str
    served_hash: str = ""
    code_hash: str = ""
    hardware: str = ""
    created: str = ""
    versions: dict[str, str] = {}
    tasks: tuple[TaskRecord, ...] = ()

    def compared(self) -> dict[str, Any]:
        names = (
            "version",
            "data_set",
            "fingerprint",
            "num_problems",
            "start",
            "num_samples",
            "seed",
            "concurrency",
            "trace",
            "served_hash",
            "code_hash",
            "hardware",
        )
        turns = {turn.name: turn.fields for turn in self.turns}
        # A server that runs may come back at another address. One of our own must have the same spec, pace included.
        served = self.endpoint if self.endpoint.startswith(OWN_SERVER) else "by its address"
        return {**{name: getattr(self, name) for name in names}, "turns": turns, "served": served}


class AnswerRecord(_Record):
    """One answer. Times are the client's, in seconds from submit.

    Attributes:
        endpoint: who was asked; a run may go on with another one.
        usage, steps, trace: as the server sent them.
    """

    task: str
    turn: str
    sample: int
    seed: int
    text: str
    finish_reason: str
    latency_s: float
    endpoint: str = ""
    usage: dict[str, Any]
    steps: tuple[dict[str, Any], ...] = ()
    trace: dict[str, Any] | None = None

    @property
    def key(self) -> Key:
        return Key(self.task, self.turn, self.sample)

    @property
    def use(self) -> Usage:
        return read_record(Usage, json.dumps(self.usage).encode())

    @property
    def step_records(self) -> list[StepRecord]:
        return [read_record(StepRecord, json.dumps(step).encode()) for step in self.steps]


class FailureRecord(_Record):
    """A request that failed. It is asked again when the run goes on."""

    task: str
    turn: str
    sample: int
    error: str
    at: str


class ScoreRecord(_Record):
    """What the scorer said of one answer; see :class:`~bench.evaluation.scoring.Score`."""

    task: str
    turn: str
    sample: int
    outcome: Outcome
    found: str | None = None
    note: str = ""
    held: tuple[str, ...] | None = None

    @property
    def key(self) -> Key:
        return Key(self.task, self.turn, self.sample)

    @classmethod
    def of(cls, key: Key, score: Score) -> ScoreRecord:
        return cls(task=key.task, turn=key.turn, sample=key.sample, **asdict(score))


class LatenessRecord(_Record):
    """How late the paced engines of one server were, in seconds; see :class:`~lr_backend.hardware.lateness.Lateness`."""

    paced_s: float
    late_s: float


def answer_record(key: Key, seed: int, result: Result, latency_s: float) -> AnswerRecord:
    """An answer as it is kept."""
    return AnswerRecord(
        task=key.task,
        turn=key.turn,
        sample=key.sample,
        seed=seed,
        text=result.text,
        finish_reason=result.finish_reason,
        latency_s=latency_s,
        usage=asdict(result.usage),
        steps=tuple(asdict(step) for step in result.steps),
        trace=json.loads(result.trace) if result.trace else None,
    )


RecordT = TypeVar("RecordT", bound=_Record)


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self) -> RunRecord:
        """The settings. Raises EvaluationError where there is no run."""
        try:
            text = (self.path / RUN).read_text(encoding="utf-8")
        except OSError:
            raise EvaluationError(f"{self.path} holds no run: there is no {RUN} in it") from None
        try:
            return RunRecord.model_validate_json(text)
        except ValidationError as error:
            raise EvaluationError(f"{self.path / RUN}: {first_error(error)}") from None

    def begin(self, run: RunRecord) -> bool:
        """Write the settings, or hold them against those that are there; whether an earlier run goes on.

        Raises:
            EvaluationError: an earlier run has other settings; the message says which.
        """
        if not (self.path / RUN).exists():
            if self.path.exists() and any(path.name != ".lock" for path in self.path.iterdir()):
                raise EvaluationError(f"{self.path} holds other files and no run; give another directory with --out")
            (self.path / RUN).write_text(run.model_dump_json(indent=2) + "\n", encoding="utf-8")
            return False
        there = self.run()
        different = differences(there.compared(), run.compared())
        if different and there.compared() | {"code_hash": run.code_hash} == run.compared():
            raise EvaluationError(
                f"{self.path} holds answers of a server with other code than today's, which are not added to: "
                "delete it to ask everything again, or give another directory with --out"
            )
        if different:
            raise EvaluationError(
                f"{self.path} holds a run with other settings: {'; '.join(different)}. "
                "Give the same settings to go on with it, or another directory with --out"
            )
        return True

    def answers(self) -> list[AnswerRecord]:
        return list(_lines(self.path / ANSWERS, AnswerRecord))

    def failures(self) -> list[FailureRecord]:
        return list(_lines(self.path / FAILURES, FailureRecord))

    def scores(self) -> dict[Key, ScoreRecord]:
        """The last score of each answer."""
        return {record.key: record for record in _lines(self.path / SCORES, ScoreRecord)}

    def lateness(self) -> Lateness:
        """Of all servers of the run that kept a pace."""
        records = _lines(self.path / LATENESS, LatenessRecord)
        return sum((Lateness(one.paced_s, one.late_s) for one in records), Lateness())

    def hardware(self) -> dict[str, Any] | None:
        """What was measured of the engines alone, where the run had its own server."""
        try:
            found = json.loads((self.path / HARDWARE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. Raises EvaluationError where somebody does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise EvaluationError(f"another run is writing to {self.path}") from None
            yield

    @contextmanager
    def appending(self, name: str) -> Iterator[Appender]:
        """A file of records to add to, half a line at its end cut off."""
        path = self.path / name
        _cut_half_line(path)
        with path.open("a", encoding="utf-8") as file:
            yield Appender(file)


class Appender:
    """Adds records to a file; each is on its way to the disk when the call returns."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def add(self, record: BaseModel) -> None:
        self._file.write(record.model_dump_json() + "\n")
        self._file.flush()


def differences(there: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two runs' settings, a clause each."""
    found = []
    for name in {**there, **wanted}:
        old, new = there.get(name), wanted.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{name} ")
        elif old != new:
            found.append(f"{prefix}{name} was {_shown(old)} and is {_shown(new)}")
    return found


def _shown(value: object) -> str:
    return "not there" if value is None else json.dumps(value, ensure_ascii=False)


def _lines(path: Path, record: type[RecordT]) -> Iterator[RecordT]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # half a line: the run was killed while writing it
            try:
                yield record.model_validate_json(line)
            except ValidationError as error:
                raise EvaluationError(f"{path}, line {number}: {first_error(error)}") from None


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
