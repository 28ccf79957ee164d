"""What a profile export of perf_analyzer says about one point of load. Pure.

The export holds, for every request, when it was sent and when each response came, with the responses' tensors. Its own CSV knows
latencies only; time to first step, gaps and tokens are read here from the responses. perf_analyzer says that it takes the first
response of a decoupled model for the latency; what it prints is nevertheless the time to the last one, as here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.load.errors import LoadError

QUANTILES = (50, 90, 99)
COMPLETE = ("stop", "length")
"""Finish reasons of an answer that went its own way to the end."""


class MalformedExport(LoadError):
    """The file is no export of requests to the ``lookahead`` model."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request as its client saw it; seconds since perf_analyzer began to measure.

    Attributes:
        text_s: arrivals of responses that held text. One step comes in each where the answer is streamed.
        end_s: arrival of the last response.
        num_tokens: of the answer, by the server's count.
    """

    sent_s: float
    text_s: tuple[float, ...]
    end_s: float
    num_tokens: int
    finish_reason: str

    @property
    def latency_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def first_step_s(self) -> float:
        """Until the first text; an answer without any is waited for in vain until its end."""
        return (self.text_s[0] if self.text_s else self.end_s) - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one text and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.text_s))

    def sped_up(self, times: float) -> RequestTimes:
        """As it would have been had everything gone so many times as fast."""
        text_s = tuple(at / times for at in self.text_s)
        return replace(self, sent_s=self.sent_s / times, text_s=text_s, end_s=self.end_s / times)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Interpolated linearly between order statistics, as numpy does; None of nothing."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        found = [float(value) for value in values]
        if not found:
            return cls(None, None, None, None)
        p50, p90, p99 = (float(value) for value in np.percentile(found, QUANTILES))
        return cls(p50, p90, p99, float(np.mean(found)))


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer must keep to for its request to count as good: seconds to the first step, and to the end."""

    first_step_s: float
    latency_s: float

    def kept_by(self, request: RequestTimes) -> bool:
        met = request.first_step_s <= self.first_step_s and request.latency_s <= self.latency_s
        return met and request.finish_reason in COMPLETE


@dataclass(frozen=True, slots=True)
class PointFigures:
    """One point of load.

    Attributes:
        duration_s: from the first request to the last response. Towards the end fewer requests are in flight than the point
            asks for, and throughput counts that time too.
        requests_per_s: completed answers.
        tokens_per_s: of all answers together.
        tokens_per_s_per_user: mean over requests of tokens by latency.
        num_cut: answers that ended by deadline, cancel or error.
        goodput_rps: answers a second that kept to the limits.
        good_share: of all requests.
        arrivals_per_s: requests sent a second, while any were sent.
        late_share: of engines that keep a pace; None: there were none.
        void: they were too late for the figures to say anything of the hardware that is stood for.
    """

    num_requests: int
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    tokens_per_s_per_user: float
    mean_tokens: float
    num_cut: int
    arrivals_per_s: float | None
    latency_s: Quantiles
    first_step_s: Quantiles
    gap_s: Quantiles
    goodput_rps: float
    good_share: float
    late_share: float | None = None
    void: bool = False

    @property
    def token_s(self) -> float | None:
        """Seconds of an answer over its tokens, of all answers together."""
        return self.latency_s.mean / self.mean_tokens if self.latency_s.mean and self.mean_tokens else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(requests: Sequence[RequestTimes], limits: Limits) -> PointFigures:
    """Of at least one request."""
    assert requests
    first, last = min(request.sent_s for request in requests), max(request.end_s for request in requests)
    last_sent = max(request.sent_s for request in requests)
    duration_s = last - first
    num_tokens = sum(request.num_tokens for request in requests)
    num_good = sum(map(limits.kept_by, requests))
    return PointFigures(
        num_requests=len(requests),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s,
        tokens_per_s=num_tokens / duration_s,
        tokens_per_s_per_user=float(np.mean([request.num_tokens / request.latency_s for request in requests])),
        mean_tokens=num_tokens / len(requests),
        num_cut=sum(request.finish_reason not in COMPLETE for request in requests),
        arrivals_per_s=(len(requests) - 1) / (last_sent - first) if last_sent > first else None,
        latency_s=Quantiles.of(request.latency_s for request in requests),
        first_step_s=Quantiles.of(request.first_step_s for request in requests),
        gap_s=Quantiles.of(gap for request in requests for gap in request.gaps_s),
        goodput_rps=num_good / duration_s,
        good_share=num_good / len(requests),
    )


def read_export(path: Path) -> list[RequestTimes]:
    """The requests of a profile export, in the order in which they were sent.

    Raises:
        MalformedExport: no such file, no JSON, or not the export of one point against the ``lookahead`` model.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MalformedExport(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MalformedExport(f"{path} is no JSON: {error}") from error
    try:
        return parse_export(document)
    except MalformedExport as error:
        raise MalformedExport(f"{path}: {error}") from error


def parse_export(document: Any) -> list[RequestTimes]:
    """As :func:`read_export`, of a parsed file.

    Raises:
        MalformedExport: see there.
    """
    try:
        (experiment,) = document["experiments"]
        began_ns, _ = experiment["window_boundaries"]
        requests = [_request(entry, began_ns) for entry in experiment["requests"]]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedExport(f"not the export of one point: {type(error).__name__}: {error}") from error
    if not requests:
        raise MalformedExport("no request completed")
    return sorted(requests, key=lambda request: request.sent_s)


def _request(entry: Mapping[str, Any], began_ns: int) -> RequestTimes:
    arrivals_s = [(stamp - began_ns) / 1e9 for stamp in entry["response_timestamps"]]
    outputs = entry["response_outputs"]
    if len(arrivals_s) != len(outputs) or not outputs:
        raise ValueError(f"{len(arrivals_s)} arrivals of {len(outputs)} responses")
    if len(outputs) > 1 and not any(outputs[-1].values()):  # the final flag: the server sends it by itself, after the answer
        arrivals_s, outputs = arrivals_s[:-1], outputs[:-1]
    last = outputs[-1]
    if not last.get("usage"):
        raise ValueError("a request has no last response with its usage")
    return RequestTimes(
        sent_s=(entry["timestamp"] - began_ns) / 1e9,
        text_s=tuple(at for at, output in zip(arrivals_s, outputs, strict=True) if output.get("text_output")),
        end_s=arrivals_s[-1],
        num_tokens=int(json.loads(last["usage"])["completion_tokens"]),
        finish_reason=str(last.get("finish_reason", "")),
    )


def crossover(loads: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The load at which a ratio that begins at 1 or above falls below 1, interpolated between points; None where it does not.

    A mode's speedup over ``ar`` by load: below this load the mode is the faster one.

    Args:
        loads: ascending.
    """
    points = list(zip(loads, ratios, strict=True))
    for (load, ratio), (further, lower) in pairwise(points):
        if ratio >= 1.0 > lower:
            return load + (further - load) * (ratio - 1.0) / (ratio - lower)
    return None
