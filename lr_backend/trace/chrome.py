"""A trace in Chrome's trace-event format, which Perfetto and chrome://tracing open.

One process a role, with as many threads as it has calls at once (events of one thread must not cross), and one for the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lr_backend.engine import Role
from lr_backend.trace.intervals import rows
from lr_backend.trace.schema import Call, Trace

Event = dict[str, Any]
ANSWER_PID = 1
PIDS = {Role.DRAFT: 2, Role.TARGET: 3, Role.JUDGE: 4}
US_PER_MS = 1e3


def chrome_json(trace: Trace) -> str:
    """The whole document."""
    events = [*_answer(trace), *(event for role in PIDS for event in _role(trace, role))]
    other = {"request_id": trace.request_id, "finish_reason": trace.finish_reason.value, "schema": trace.schema_name}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, ensure_ascii=False)


def _answer(trace: Trace) -> Iterator[Event]:
    yield from _names(ANSWER_PID, "answer", 1, "committed steps")
    start_ms = 0.0
    for record in trace.steps:
        end_ms = 1e3 * record.committed_s
        arguments = {"reason": record.reason, "num_tokens": record.num_tokens, "text": record.text}
        yield _complete(ANSWER_PID, 0, f"step {record.index} ({record.origin.value})", "step", start_ms, end_ms, arguments)
        start_ms = end_ms


def _role(trace: Trace, role: Role) -> Iterator[Event]:
    calls = [call for call in trace.calls if call.role is role]
    places = rows([call.interval for call in calls], [call.step for call in calls])
    yield from _names(PIDS[role], role.value, 1 + max(places, default=0), role.value)
    for call, row in zip(calls, places, strict=True):
        name = f"{call.purpose.value} {call.step} ({call.outcome.value})"
        yield _complete(PIDS[role], row, name, call.outcome.value, call.start_ms, call.end_ms, _arguments(call))


def _arguments(call: Call) -> dict[str, Any]:
    return call.model_dump(mode="json", exclude={"role", "start_ms", "end_ms"})


def _complete(pid: int, tid: int, name: str, category: str, start_ms: float, end_ms: float, arguments: Event) -> Event:
    """A complete event; its times are in microseconds."""
    start_us, end_us = round(US_PER_MS * start_ms, 3), round(US_PER_MS * end_ms, 3)
    times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, **times, "args": arguments}


def _names(pid: int, name: str, num_threads: int, thread_name: str) -> Iterator[Event]:
    """Metadata events: how a process and its threads are called, and in which order they stand."""
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid in range(num_threads):
        thread = thread_name if num_threads == 1 else f"{thread_name} {tid + 1}"
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
