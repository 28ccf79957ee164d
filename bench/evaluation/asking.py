"""Asks an endpoint for every answer that a run still lacks, and keeps each as it comes.

A request that fails is tried again where waiting may help, then counted as failed; after :data:`MAX_FAILURES` in a row the
endpoint is given up. What was answered is on disk by then, and the next run of the same settings goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from lr_client import (
    Client,
    ClientError,
    InvalidRequest,
    Options,
    Overloaded,
    RequestTimeout,
    ServerUnreachable,
    TargetUnavailable,
)
from lr_client.protocol import Collector

from bench.evaluation.errors import EndpointLost, EvaluationError
from bench.evaluation.records import ANSWERS, FAILURES, TIMED_OUT, AnswerRecord, FailureRecord, Key, RunDirectory, answer_record
from bench.evaluation.tasks import Task
from bench.evaluation.turns import Turn, seed_of

MAX_FAILURES = 3
"""In a row: then nothing more is asked."""
RETRIED = (Overloaded, ServerUnreachable, TargetUnavailable)
PAUSES_S = (0.5, 2.0)
"""Between the tries of one request."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run asks."""

    tasks: Mapping[str, Task]
    turns: Mapping[str, Turn]
    rounds: Sequence[Sequence[Key]]
    seed: int
    trace: bool
    timeout_s: float
    endpoint: str = ""
    """As the answers name it."""

    def options(self, key: Key) -> Options:
        return self.turns[key.turn].options(seed_of(self.seed, key), trace=self.trace)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many requests a call has asked, how many of them failed for good, and whether its time was up before the end."""

    num_answered: int
    num_failed: int
    time_is_up: bool = False


def ask(client: Client, plan: Plan, key: Key, pause: Callable[[float], None] = time.sleep) -> AnswerRecord:
    """One answer, timed by the client from submit to the last event; the tries before it do not count.

    One that is not there in time is an answer too, with what had come: the slowest must not drop out of a comparison. But
    where the endpoint is not ready either, nobody knows what it would have been.

    Raises:
        ClientError: the last try's.
    """
    for wait_s in (*PAUSES_S, None):
        try:
            return _ask_once(client, plan, key)
        except RETRIED:
            if wait_s is None:
                raise
            pause(wait_s)
    raise AssertionError("unreachable")


def _ask_once(client: Client, plan: Plan, key: Key) -> AnswerRecord:
    options = plan.options(key)
    collector = Collector()
    started = time.perf_counter()
    late: RequestTimeout | None = None
    with client.stream(plan.tasks[key.task].question, options, timeout_s=plan.timeout_s) as events:
        try:
            for event in events:
                collector.add(event)
        except RequestTimeout as error:
            late = error
    latency_s = time.perf_counter() - started
    if late is not None and not client.is_ready(models=[client.model]):
        raise late
    assert options.seed is not None
    record = answer_record(key, options.seed, collector.result(), latency_s)
    finish = record.finish_reason if late is None else TIMED_OUT
    return record.model_copy(update={"endpoint": plan.endpoint, "finish_reason": finish})


def warm_up(client: Client, plan: Plan, task: str) -> None:
    """Ask one problem in every turn, untimed and not kept: caches fill, and a setting that is refused is refused before the run.

    Raises:
        EvaluationError: the endpoint does not answer, or refuses a turn.
    """
    for name in plan.turns:
        try:
            found = ask(client, plan, Key(task, name, -1))
        except InvalidRequest as error:
            raise EvaluationError(f"{client.url} refuses the turn {name!r}: {error}") from None
        except ClientError as error:
            raise EndpointLost(f"{client.url} does not answer: {error}") from None
        if found.finish_reason == TIMED_OUT:
            raise EndpointLost(f"{client.url} does not answer within {plan.timeout_s:g} s")


def ask_all(
    client: Client,
    plan: Plan,
    directory: RunDirectory,
    *,
    concurrency: int = 1,
    progress: Callable[[Key], None] = lambda key: None,
    pause: Callable[[float], None] = time.sleep,
    time_is_up: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Ask for what ``directory`` lacks. ``progress`` is told of every new answer.

    Once ``time_is_up`` nothing more is asked. Whatever else ends it, such as Ctrl-C, closes the client: nothing waits for what is
    in flight.

    Raises:
        EndpointLost: too many requests failed in a row. Answers are kept.
    """
    done = {answer.key for answer in directory.answers()}
    num_answered = num_failed = in_a_row = 0
    with directory.appending(ANSWERS) as answers, directory.appending(FAILURES) as failures, _pool(client, concurrency) as pool:

        def attempt(key: Key) -> AnswerRecord | ClientError:
            try:
                return ask(client, plan, key, pause)
            except ClientError as error:
                return error

        for group in plan.rounds:
            missing = [key for key in group if key not in done]
            if missing and time_is_up():
                return Outcome(num_answered, num_failed, True)
            asked = {pool.submit(attempt, key): key for key in missing}
            for future in as_completed(asked):
                key, found = asked[future], future.result()
                if isinstance(found, AnswerRecord):
                    answers.add(found)
                    num_answered, in_a_row = num_answered + 1, 0
                    progress(key)
                else:
                    failures.add(_failure(key, found))
                    num_failed, in_a_row = num_failed + 1, in_a_row + 1
                    last = found
            if in_a_row >= MAX_FAILURES:
                raise EndpointLost(_lost(client.url, last, len(done) + num_answered, _total(plan.rounds), directory))
    return Outcome(num_answered, num_failed)


@contextmanager
def _pool(client: Client, num_threads: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
        raise
    pool.shutdown()


def _failure(key: Key, error: ClientError) -> FailureRecord:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return FailureRecord(task=key.task, turn=key.turn, sample=key.sample, error=f"{type(error).__name__}: {error.message}", at=at)


def _total(rounds: Iterable[Sequence[Key]]) -> int:
    return sum(len(group) for group in rounds)


def _lost(url: str, error: ClientError, num_kept: int, num_wanted: int, directory: RunDirectory) -> str:
    return (
        f"{url}: {MAX_FAILURES} requests failed in a row, the last with: {error}. "
        f"{num_kept} of {num_wanted} answers are kept in {directory.path}; the same command goes on from there"
    )
