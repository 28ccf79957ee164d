"""Scores what a run directory has answered and not scored, each rule where it belongs: here, in workers, or in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping

from bench.evaluation import sandbox, workers
from bench.evaluation.records import SCORES, TIMED_OUT, AnswerRecord, RunDirectory, ScoreRecord
from bench.evaluation.scoring import END_THINK, START_THINK, Outcome, Score, score, with_tests
from bench.evaluation.tasks import DataSet, Rule, Task

BATCH = 256
"""Answers that are scored together; the scores of a batch are kept before the next one begins."""
CUT = Score(Outcome.NO_ANSWER, note="cut before its answer")


def grade_all(
    directory: RunDirectory,
    data: DataSet,
    *,
    num_workers: int = 2,
    timeout_s: float = workers.DEFAULT_TIMEOUT_S,
    again: bool = False,
) -> Mapping[Outcome, int]:
    """Score answers that have no score, or whose scorer failed; ``again``: all of them. Counts all scores by outcome."""
    tasks = {task.id: task for task in data.tasks}
    there = {} if again else directory.scores()
    settled = {key for key, record in there.items() if record.outcome is not Outcome.UNSCORED}
    missing = [answer for answer in directory.answers() if answer.key not in settled]
    with directory.appending(SCORES) as scores:
        for start in range(0, len(missing), BATCH):
            batch = missing[start : start + BATCH]
            ended = [answer for answer in batch if not _is_cut_before_its_answer(answer)]
            cut = [(answer, CUT) for answer in batch if _is_cut_before_its_answer(answer)]
            for answer, found in (*cut, *_graded(data.rule, tasks, ended, num_workers, timeout_s)):
                scores.add(ScoreRecord.of(answer.key, found))
    counts = dict.fromkeys(Outcome, 0)
    for record in directory.scores().values():
        counts[record.outcome] += 1
    return counts


def _is_cut_before_its_answer(answer: AnswerRecord) -> bool:
    """It never came to its answer: a number or a box in there is no more than a thought.

    How far one got that was given up depends on how it was sent.
    """
    if answer.finish_reason == TIMED_OUT:
        return True
    if answer.finish_reason == "stop" or END_THINK in answer.text:
        return False
    return START_THINK in answer.text or answer.use.reasoning_tokens == answer.use.completion_tokens


def _graded(
    rule: Rule, tasks: Mapping[str, Task], batch: list[AnswerRecord], num_workers: int, timeout_s: float
) -> list[tuple[AnswerRecord, Score]]:
    if rule is Rule.MATH:
        jobs = [(answer, tasks[answer.task].answer, answer.text) for answer in batch]
        return list(workers.score_all(jobs, num_workers=num_workers, timeout_s=timeout_s))
    if rule is Rule.CODE:
        programs = []
        for answer in batch:
            code = tasks[answer.task].code
            assert code is not None
            programs.append((answer, with_tests(code, answer.text)))
        return list(sandbox.score_all(programs, num_workers=num_workers))
    return [(answer, score(rule, tasks[answer.task], answer.text) or Score(Outcome.UNSCORED)) for answer in batch]
