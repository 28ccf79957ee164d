"""What runs say, joined: one table of settings for each data set. Pure; reads records, asks nobody.

Runs of the same problems are joined: a setting that several runs have asked is one row. Speeds are taken from answers without a
trace where all settings have such, since a trace takes time; everything else from all answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from lr_client import StepRecord, Usage

from bench.evaluation.errors import EvaluationError
from bench.evaluation.records import OWN_SERVER, TIMED_OUT, AnswerRecord, Key, RunDirectory, RunRecord, ScoreRecord
from bench.evaluation.scoring import Outcome
from bench.evaluation.statistics import (
    chance_of_difference,
    common,
    means,
    non_inferiority,
    paired_difference,
    percentiles,
    share,
)
from bench.evaluation.tasks import StepChecker, step_checker
from bench.kit.hardware import Hardware, ceilings
from bench.kit.intervals import Cluster, Estimate, Share, ratio, ratio_of_sums
from bench.kit.measure import Sample, accepted_runs, compared, looks_ahead, mean_step_tokens, num_decided
from lr_backend.hardware.lateness import Lateness
from lr_backend.request import LookaheadRequest, Mode
from lr_backend.verify.verdict import FAILED, SAME, Reason

BASELINE = "ar"
DEFAULT_MARGIN = 0.015
MAX_POSITIONS = 40
NO_VERDICT = FAILED | {Reason.CAPPED, Reason.RISK_BUDGET}
"""Reasons of a rejection by which nobody says that the two steps differ in meaning."""


@dataclass(frozen=True)
class Run:
    """One run directory, read. ``lateness`` is that of its paced engines, if it had such."""

    path: str
    settings: RunRecord
    answers: tuple[AnswerRecord, ...]
    scores: Mapping[Key, ScoreRecord]
    num_failures: int
    hardware: Hardware | None
    lateness: Lateness = field(default_factory=Lateness)

    @classmethod
    def read(cls, directory: RunDirectory) -> Run:
        """Raises EvaluationError where a file is no record of a run, or nothing was answered."""
        answers = directory.answers()
        if not answers:
            raise EvaluationError(f"{directory.path} holds no answers yet")
        answered = {answer.key for answer in answers}
        failed = {Key(one.task, one.turn, one.sample) for one in directory.failures()} - answered
        return cls(
            str(directory.path),
            directory.run(),
            tuple(answers),
            directory.scores(),
            len(failed),
            _hardware(directory.hardware()),
            directory.lateness(),
        )

    @property
    def is_late(self) -> bool:
        """Its engines kept a pace, and fell too far behind it."""
        return self.lateness.paced_s > 0.0 and self.lateness.void


def _hardware(document: Mapping[str, Any] | None) -> Hardware | None:
    if document is None:
        return None
    times = {int(num): float(seconds) for num, seconds in document["target_token_s"].items()}
    return Hardware(float(document["cost_ratio"]), times, float(document["beside_draft"]))


@dataclass(frozen=True)
class Position:
    """How many drafted steps were accepted of those decided at one place of the answer. ``worth``: as of a share."""

    index: int
    accepted: int
    decided: int
    worth: float | None

    @property
    def share(self) -> Share:
        return Share(self.accepted, self.decided, self.worth)


@dataclass(frozen=True)
class Checked:
    """Drafted steps that were compared at the root and are not the same tokens, and what the data set's checker says of them.

    Attributes:
        agreed: verdicts that say what the checker says, of all.
        wrong: ones accepted in other words that the checker would not have accepted, of those accepted so.
        by: agreement by who decided (of a cascade: the stage).
    """

    agreed: Share
    wrong: Share
    by: Mapping[str, Share]


@dataclass(frozen=True)
class Row:
    """One setting on one data set. Rates are None where nothing was counted.

    Attributes:
        accuracy: right answers, of those that were scored; None where none was.
        difference, p_value, verdict: of its accuracy less the baseline's, over the problems that both answered.
        speedup: seconds of the baseline over its own, over the problems that both answered; ``token_speedup``: its tokens a
            second over the baseline's, which a change of the answers' length does not move.
        ceiling: the paper's S1 or S2 at the measured acceptance and cost ratio, over a target like the best ``sd`` where
            tokens are speculated too; ``hardware_ceiling``: as in :mod:`bench.kit.hardware`. ``realised_share``: speedup over
            the latter. None of a row that hardly looks ahead (:data:`bench.kit.measure.MIN_DECIDED_SHARE`).
        num_accepted, num_decided: drafted steps at the root, late ones among the decided.
        audits, false_accepts: the server's own audits, of these answers.
    """

    name: str
    mode: str
    num_answers: int
    num_problems: int
    num_unscored: int
    num_without_answer: int
    num_cut: int
    accuracy: Estimate | None
    difference: Estimate | None
    p_value: float | None
    verdict: str | None
    latency_s: Mapping[str, float]
    first_step_s: Mapping[str, float]
    tokens_per_s: Estimate | None
    completion_tokens: float
    speedup: Estimate | None
    token_speedup: Estimate | None
    num_accepted: int
    num_decided: int
    step_acceptance_rate: float | None
    mean_accepted_length: float | None
    token_acceptance_rate: float | None
    passes_per_token: float | None
    wasted_share: float | None
    ceiling: float | None = None
    hardware_ceiling: float | None = None
    realised_share: float | None = None
    checked: Checked | None = None
    audits: int = 0
    false_accepts: int = 0
    positions: tuple[Position, ...] = ()
    latencies_s: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Summary:
    """All settings on one data set. Its speeds are void where paced engines were too late."""

    data_set: str
    rule: str
    source: str
    num_problems: int
    baseline: str | None
    margin: float
    cost_ratio: float | None
    cost_ratio_from: str
    speeds_from: str
    speeds_void: bool
    rows: tuple[Row, ...]
    runs: tuple[Mapping[str, Any], ...]
    num_failures: int
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        document = asdict(self)
        for row, plain in zip(self.rows, document["rows"], strict=True):
            del plain["latencies_s"]
            if row.checked is not None:
                plain["checked"] = {
                    "agreement": _share_dict(row.checked.agreed),
                    "false_accept_rate": _share_dict(row.checked.wrong),
                    "by": {name: _share_dict(one) for name, one in row.checked.by.items()},
                }
        return document


def _share_dict(one: Share) -> dict[str, Any] | None:
    if not one.total:
        return None
    low, high = one.interval()
    return {"value": one.value, "low": low, "high": high, "hits": one.hits, "total": one.total}


def summarise(runs: Sequence[Run], *, margin: float = DEFAULT_MARGIN, baseline: str = BASELINE) -> list[Summary]:
    """One summary a data set, in the order in which they come."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.settings.data_set, run.settings.source), []).append(run)
    return [_summary(group, margin, baseline) for group in groups.values()]


@dataclass(frozen=True)
class _Answer:
    """An answer with what belongs to it."""

    record: AnswerRecord
    use: Usage
    outcome: Outcome | None
    traced: bool


def _summary(runs: Sequence[Run], margin: float, baseline: str) -> Summary:
    _check_alike(runs)
    answers: dict[str, list[_Answer]] = defaultdict(list)
    requests: dict[str, LookaheadRequest] = {}
    modes: dict[str, str] = {}
    for run in runs:
        for turn in run.settings.turns:
            modes[turn.name] = str(turn.fields.get("mode", ""))
            if turn.request is not None:
                requests[turn.name] = LookaheadRequest.model_validate(turn.request, strict=False)
        for record in run.answers:
            score = run.scores.get(record.key)
            # One that was given up has no trace though it was asked for one.
            traced = record.trace is not None or (record.finish_reason == TIMED_OUT and run.settings.trace)
            found = _Answer(record, record.use, score.outcome if score else None, traced)
            answers[record.turn].append(found)
            if record.turn not in requests and record.trace is not None:
                requests[record.turn] = LookaheadRequest.model_validate(record.trace["request"], strict=False)
    names = [name for name in modes if name in answers]
    untraced = all(any(not one.traced for one in answers[name]) for name in names)
    timed = {name: [one for one in answers[name] if not (untraced and one.traced)] for name in names}
    hardware = next((run.hardware for run in reversed(runs) if run.hardware is not None), None)
    checker = step_checker(runs[0].settings.data_set)
    base = baseline if baseline in names else None
    rows = [
        _row(name, modes[name], answers[name], timed[name], answers.get(base or ""), timed.get(base or ""), margin, checker)
        for name in names
    ]
    rows = _with_ceilings(rows, requests, hardware, [one for name in names for one in answers[name]])
    notes = _notes(runs, base, baseline, rows, names)
    cost = (
        (hardware.cost_ratio, "measured, each engine alone")
        if hardware
        else (None, "not measured: the run used another's server")
    )
    return Summary(
        data_set=runs[0].settings.data_set,
        rule=runs[0].settings.rule.value,
        source=runs[0].settings.source,
        num_problems=len({one.record.task for name in names for one in answers[name]}),
        baseline=base,
        margin=margin,
        cost_ratio=cost[0],
        cost_ratio_from=cost[1],
        speeds_from="answers without a trace" if untraced else "answers with a trace",
        speeds_void=any(run.is_late for run in runs),
        rows=tuple(rows),
        runs=tuple(_provenance(run) for run in runs),
        num_failures=sum(run.num_failures for run in runs),
        notes=notes,
    )


def _check_alike(runs: Sequence[Run]) -> None:
    """Runs of one data set must agree on what a setting's name means, and on the questions of a problem."""
    fields: dict[str, tuple[Mapping[str, Any], str]] = {}
    questions: dict[str, tuple[str, str]] = {}
    for run in runs:
        for turn in run.settings.turns:
            first, path = fields.setdefault(turn.name, (turn.fields, run.path))
            if dict(first) != dict(turn.fields):
                raise EvaluationError(
                    f"{path} and {run.path} mean different settings by {turn.name!r}: {first} and {turn.fields}"
                )
        for task in run.settings.tasks:
            asked, path = questions.setdefault(task.id, (task.question, run.path))
            if asked != task.question:
                raise EvaluationError(f"{path} and {run.path} ask different questions as problem {task.id!r}")


def _provenance(run: Run) -> dict[str, Any]:
    one = run.settings
    return {
        "path": run.path,
        "num_answers": len(run.answers),
        "num_failures": run.num_failures,
        "endpoint": one.endpoint,
        "hardware": one.hardware,
        "created": one.created,
        "versions": dict(one.versions),
        "seed": one.seed,
        "num_samples": one.num_samples,
        "concurrency": one.concurrency,
        "trace": one.trace,
        "fingerprint": one.fingerprint,
        "served_hash": one.served_hash,
        "code_hash": one.code_hash,
        "late_share": run.lateness.share if run.lateness.paced_s else None,
        "turns": {turn.name: turn.fields for turn in one.turns},
    }


def _notes(runs: Sequence[Run], base: str | None, wanted: str, rows: Sequence[Row], names: Sequence[str]) -> tuple[str, ...]:
    found = []
    if base is None:
        found.append(f"There is no setting {wanted!r}, so nothing is compared.")
    with_base = [run.path for run in runs if any(turn.name == base for turn in run.settings.turns)]
    apart = [name for name in names if base and not any(_has(run, name) for run in runs if run.path in with_base)]
    if apart:
        found.append(
            f"Not of the same run as {base}, so that their speedups compare two times of the machine: {', '.join(apart)}."
        )
    endpoints = {answer.endpoint or run.settings.endpoint for run in runs for answer in run.answers}
    if len(endpoints) > 1:
        found.append(f"Different endpoints were asked: {', '.join(sorted(endpoints))}.")
    found += _not_alike(runs)
    found += [f"{run.path}: {run.lateness}." for run in runs if run.lateness.paced_s]
    if any(run.settings.concurrency > 1 for run in runs):
        found.append("Several requests were in flight at once: seconds are those of a busy server.")
    if unscored := sum(row.num_unscored for row in rows):
        found.append(f"{unscored} answers are unscored and count neither way.")
    if cut := sum(row.num_cut for row in rows):
        found.append(f"{cut} answers did not end by themselves (length, deadline, timeout); one cut in its reasoning is wrong.")
    return tuple(found)


def _not_alike(runs: Sequence[Run]) -> list[str]:
    """What joined runs have not been served alike."""
    own = [run.settings for run in runs if run.settings.endpoint.startswith(OWN_SERVER)]
    found = []
    if len({one.served_hash for one in own}) > 1:
        found.append("Servers of different specs or checkpoints were asked.")
    if len({one.code_hash for one in own}) > 1:
        found.append("Servers of different code were asked.")
    if len({run.settings.concurrency for run in runs}) > 1 or len({run.settings.hardware for run in runs}) > 1:
        found.append("Runs of different loads or machines are joined: speeds and speedups are over a mixture. Report them apart.")
    requests: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn in (turn for run in runs for turn in run.settings.turns if turn.request is not None):
        asked = {name: value for name, value in (turn.request or {}).items() if name != "seed"}
        if asked not in requests[turn.name]:
            requests[turn.name].append(asked)
    if differ := [name for name, asked in requests.items() if len(asked) > 1]:
        found.append(f"The deployments have different defaults, so one name stands for different requests: {', '.join(differ)}.")
    return found


def _has(run: Run, name: str) -> bool:
    return any(turn.name == name for turn in run.settings.turns)


def _row(
    name: str,
    mode: str,
    group: Sequence[_Answer],
    timed: Sequence[_Answer],
    base: Sequence[_Answer] | None,
    base_timed: Sequence[_Answer] | None,
    margin: float,
    checker: StepChecker | None,
) -> Row:
    usages = [one.use for one in group]
    rights = _rights(group)
    accepted = sum(use.num_steps_accepted for use in usages)
    decided = sum(map(num_decided, usages))
    tokens = sum(use.completion_tokens for use in usages)
    steps = [(one.record.task, step) for one in group for step in one.record.step_records]
    difference = p_value = verdict = None
    if base is not None and base is not group and rights and (theirs := _rights(base)):
        ours, others = common(rights, theirs)
        if ours:
            difference = paired_difference(ours, others)
            p_value = chance_of_difference(means(ours), means(others))
            verdict = non_inferiority(difference, margin).value
    speedup, token_speedup = _speedups(timed, base_timed)
    latencies = tuple(one.record.latency_s for one in timed)
    return Row(
        name=name,
        mode=mode,
        num_answers=len(group),
        num_problems=len({one.record.task for one in group}),
        num_unscored=sum(one.outcome in (None, Outcome.UNSCORED) for one in group),
        num_without_answer=sum(one.outcome is Outcome.NO_ANSWER for one in group),
        num_cut=sum(one.record.finish_reason != "stop" for one in group),
        accuracy=share(list(rights.values())) if rights else None,
        difference=difference,
        p_value=p_value,
        verdict=verdict,
        latency_s=percentiles(latencies),
        first_step_s=percentiles([one.use.first_step_s for one in timed if one.use.first_step_s is not None]),
        tokens_per_s=ratio_of_sums(list(rates.values())) if (rates := _rates(timed)) else None,
        completion_tokens=tokens / max(1, sum(map(_ended, group))),
        speedup=speedup,
        token_speedup=token_speedup,
        num_accepted=accepted,
        num_decided=decided,
        step_acceptance_rate=_rate(accepted, decided),
        mean_accepted_length=_rate(accepted, sum(map(accepted_runs, usages))) if decided else None,
        token_acceptance_rate=_rate(sum(use.num_accepted_tokens for use in usages), sum(use.num_draft_tokens for use in usages)),
        passes_per_token=_rate(sum(use.num_target_passes for use in usages), tokens),
        wasted_share=_rate(sum(use.num_wasted_tokens for use in usages), tokens + sum(use.num_wasted_tokens for use in usages)),
        checked=checked(steps, checker) if checker is not None and decided else None,
        audits=sum(use.num_audited for use in usages),
        false_accepts=sum(use.num_false_accepts for use in usages),
        positions=positions(steps),
        latencies_s=latencies,
    )


def _speedups(timed: Sequence[_Answer], base: Sequence[_Answer] | None) -> tuple[Estimate | None, Estimate | None]:
    """The baseline's seconds over these, and tokens a second over the baseline's, of the problems that both answered."""
    if base is None:
        return None, None
    seconds, their_seconds = common(_seconds(timed), _seconds(base))
    rates, their_rates = common(_rates(timed), _rates(base))
    return ratio(their_seconds, seconds) if seconds else None, ratio(rates, their_rates) if rates else None


def _rights(group: Iterable[_Answer]) -> dict[str, Cluster]:
    """Right answers by problem; those that are unscored are left out."""
    found: dict[str, Cluster] = {}
    for one in group:
        if one.outcome is not None and one.outcome is not Outcome.UNSCORED:
            before = found.get(one.record.task, Cluster(0.0, 0.0))
            found[one.record.task] = Cluster(before.total + (one.outcome is Outcome.RIGHT), before.weight + 1.0)
    return found


def _seconds(group: Iterable[_Answer]) -> dict[str, Cluster]:
    """Seconds of an answer by problem. A problem counts once, however many answers to it there are."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in group:
        found[one.record.task].append(one.record.latency_s)
    return {task: Cluster(fmean(seconds), 1.0) for task, seconds in found.items()}


def _rates(group: Iterable[_Answer]) -> dict[str, Cluster]:
    """Tokens and seconds of an answer by problem, of those that have ended: how much the others had written, nobody has said."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for one in filter(_ended, group):
        found[one.record.task].append((one.use.completion_tokens, one.record.latency_s))
    return {task: Cluster(*map(fmean, zip(*answers, strict=True))) for task, answers in found.items()}


def _ended(one: _Answer) -> bool:
    return one.record.finish_reason != TIMED_OUT


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _with_ceilings(
    rows: Sequence[Row], requests: Mapping[str, LookaheadRequest], hardware: Hardware | None, answers: Sequence[_Answer]
) -> list[Row]:
    """Rows that speculate by steps get what they could gain at most, unless they hardly look ahead."""
    if hardware is None:
        return list(rows)
    by_tokens = max([1.0, *(row.speedup.value for row in rows if row.mode == Mode.SD and row.speedup is not None)])
    samples = [Sample(one.record.turn, 0, False, one.record.latency_s, one.use) for one in answers]
    step_tokens = mean_step_tokens(samples)
    found = []
    for row in rows:
        alpha, request = row.step_acceptance_rate, requests.get(row.name)
        ahead = looks_ahead([one.usage for one in samples if one.mode == row.name])
        by_steps = request is not None and request.mode.speculates_steps and request.max_depth > 0
        if request is None or alpha is None or alpha >= 1.0 or not (ahead and by_steps):
            found.append(row)
            continue
        free, real = ceilings(hardware, request, alpha, step_tokens, by_tokens=by_tokens)
        realised = row.speedup.value / real if row.speedup is not None else None
        found.append(Row(**{**_fields(row), "ceiling": free, "hardware_ceiling": real, "realised_share": realised}))
    return found


def _fields(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def checked(steps: Iterable[tuple[str, StepRecord]], checker: StepChecker) -> Checked | None:
    """What the checker says of the verdicts on these steps, each with its problem; None where there was none.

    Equal tokens need no verdict, and a rejection because something failed or was not allowed is none. What was accepted for its
    same words cannot be wrong.
    """
    verdicts = [
        (task, step, step.origin == "draft", checker(step.target_text or "", step.drafted_text or ""))
        for task, step in steps
        if compared(step) and step.verifier is not None and step.reason not in NO_VERDICT
    ]
    if not verdicts:
        return None
    return Checked(
        Share.of((task, said == right) for task, _, said, right in verdicts),
        Share.of((task, not right) for task, step, said, right in verdicts if said and step.reason not in SAME),
        {
            name: Share.of((task, said == right) for task, step, said, right in verdicts if step.verifier == name)
            for name in sorted({step.verifier or "" for _, step, _, _ in verdicts})
        },
    )


def positions(steps: Iterable[tuple[str, StepRecord]]) -> tuple[Position, ...]:
    """Acceptance by place in the answer, from 0, of steps each with its problem; ``late`` counts as not accepted."""
    found: dict[int, list[tuple[str, bool]]] = defaultdict(list)
    for task, step in steps:
        if compared(step) or step.reason == "late":
            found[step.index].append((task, step.origin == "draft"))
    shares = {index: Share.of(found[index]) for index in sorted(found) if index < MAX_POSITIONS}
    return tuple(Position(index, one.hits, one.total, one.worth) for index, one in shares.items())
