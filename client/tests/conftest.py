from collections.abc import Iterator

import pytest
from fake_server import FINISH, Abort, Act, Fail, FakeServer, Gate, Reply
from grpc import StatusCode

STEPS = [
    Reply(text="one. ", step={"index": 0, "origin": "draft", "text": "one. ", "later_field": 1}),
    Reply(text="two. ", step={"index": 1, "origin": "correction", "text": "two. ", "reason": "judge"}),
    Reply(text="three. ", step={"index": 2, "origin": "target", "text": "three. "}),
]
USAGE = {
    "completion_tokens": 30,
    "reasoning_tokens": 20,
    "latency_s": 1.5,
    "step_acceptance_rate": 0.5,
    "token_acceptance_rate": 0.25,
    "mean_accepted_length": 1.0,
    "num_wasted_tokens": 12,
    "degraded": ["judge"],
    "later_field": 1,
}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def server(gate: Gate) -> Iterator[FakeServer]:
    """Knows a script for each way an answer can go; ``held`` waits for the gate in its middle."""
    scripts: dict[str, list[Act]] = {
        "plain": [Reply(text="a"), Reply(), Reply(text=""), Reply(text="b"), FINISH],
        "steps": [*STEPS, Reply(text="</think>\n\n42"), Reply(finish="stop", usage=USAGE)],
        "held": [Reply(text="a"), gate, Reply(text="b"), FINISH],
        "overloaded": [Fail("LR_OVERLOADED: 64 requests are in flight")],
        "invalid": [Fail("LR_INVALID_REQUEST: width=99: at most 8")],
        "fails midway": [Reply(text="a"), Fail("in lookahead, LR_TARGET_UNAVAILABLE: gone"), Gate(), FINISH],
        "aborts": [Abort(StatusCode.INTERNAL, "oops")],
        "cut short": [Reply(text="a")],
        "garbage": [Reply(text="a"), Reply(step={"index": "zero"})],
        "aborts after the finish": [Reply(text="a"), FINISH, Abort(StatusCode.UNAVAILABLE, "bye")],
        "traced": [*STEPS, Reply(finish="stop", usage=USAGE, trace='{"schema": "é"}')],
        "What is 1 + 1?": [Reply(text="2"), FINISH],
        "escapes": [Reply(text="\x1b[31mred [bold]:smile:\r\n"), FINISH],
    }
    with FakeServer(scripts) as running:
        yield running
