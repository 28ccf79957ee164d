"""Proof that a server answers: one call to each engine, then one question through the step loop, all over HTTP.

Besides the proof it pays the first calls' one-off costs (lazy imports, memory growth) before a client would.
"""

from __future__ import annotations

import http.client
import json
import shlex
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lr_backend.contract import BY_NAME
from lr_backend.engine import EngineCall, Role
from lr_backend.engine.address import ENGINE_HEADER, LOOP_PARAMETER
from lr_backend.errors import LookaheadError
from lr_backend.serve.server import TritonServer

QUESTION = "Tom has 8 books. Mia has 2 times as many books as Tom. Mia gives 5 books to Tom. How many books does Tom have now?"
ANSWER = 13
"""The example of the documentation and of ``lookahead serve``. The demo's models answer it right in every mode."""
MAX_TOKENS = 96
WARM_UP_S = 120.0
"""For one of these answers. A large model on a CPU may take longer: it has what loading has left of its time, too."""
MAX_ROUNDS = 8
"""Of a question for each process. One that none of them reached is warmed by a client's first."""
_JSON_DTYPES = {"STRING": "BYTES"}


class WarmupError(LookaheadError):
    """The server is ready but does not answer."""

    code = "LR_SERVER"


@dataclass(frozen=True, slots=True)
class WarmupAnswer:
    """What came back for :data:`QUESTION`; ``usage`` as the server counted it."""

    text: str
    finish_reason: str
    usage: dict[str, Any]

    @property
    def without(self) -> frozenset[str]:
        """Roles that failed."""
        return frozenset(self.usage.get("degraded", ()))


def warm_engines(
    http_url: str, roles: Iterable[Role] = Role, *, key: str = "", loop_key: str = "", timeout_s: float = WARM_UP_S
) -> None:
    """Ask these models of the server at ``host:port`` once.

    Args:
        key, loop_key: what opens them, where they are there for a step loop elsewhere, or for this server's alone.

    Raises:
        WarmupError: one of them refused, failed, or did not answer in time.
    """
    for role in roles:
        _warm_engine(http_url, role, key, loop_key, timeout_s)


def warm_loop(http_url: str, *, without: Container[str] = (), timeout_s: float = WARM_UP_S) -> WarmupAnswer:
    """Ask the step loop of the server at ``host:port`` once. ``without``: roles that it may go on without.

    Raises:
        WarmupError: it refused, failed, did not answer in time, or without another role.
    """
    body = {"text_input": QUESTION, "mode": "lr_sd", "max_tokens": MAX_TOKENS, "temperature": 0.0, "stream": False}
    answer = post_json(http_url, "lookahead", "generate", body, timeout_s)
    reason = str(answer.get("finish_reason", ""))
    if reason not in ("stop", "length"):
        raise WarmupError(f"lookahead ended its answer with {reason or 'no finish reason'!r}")
    usage = answer.get("usage")
    counts = json.loads(usage) if isinstance(usage, str) and usage else {}
    found = WarmupAnswer(str(answer.get("text_output", "")), reason, counts)
    if lost := [role for role in sorted(found.without) if role not in without]:
        raise WarmupError(f"lookahead answered without {', '.join(lost)}")
    return found


def warm_loops(
    server: TritonServer, num_loops: int, *, without: Container[str] = (), timeout_s: float = WARM_UP_S
) -> WarmupAnswer:
    """Ask until every process of the step loop has answered, or so often that the rest may wait.

    Triton gives a request to whichever process takes it first, so nobody can ask a certain one.

    Returns:
        The answer that went without most roles.

    Raises:
        WarmupError: as :func:`warm_loop`.
    """
    ask = partial(warm_loop, server.http_url, without=without, timeout_s=timeout_s)
    answers: list[WarmupAnswer] = []
    for _ in range(MAX_ROUNDS):
        with ThreadPoolExecutor(num_loops) as pool:
            answers += pool.map(lambda _: ask(), range(num_loops))
        if server.seats.num_used >= num_loops:
            break
    return max(answers, key=lambda answer: len(answer.without))


def curl_line(http_url: str) -> str:
    """A command that asks the server at ``host:port`` the example, for a shell."""
    body = json.dumps({"text_input": QUESTION, "stream": False})
    return f"curl -s http://{http_url}/v2/models/lookahead/generate -d {shlex.quote(body)}"


def _warm_engine(http_url: str, role: Role, key: str, loop_key: str, timeout_s: float) -> None:
    call = EngineCall(f"warm-up-{role}", np.arange(1, 17, dtype=np.int32), max_new_tokens=2)
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": _JSON_DTYPES.get(BY_NAME[name].dtype, BY_NAME[name].dtype),
            "data": array.ravel().tolist(),
        }
        for name, array in call.tensors().items()
    ]
    body: dict[str, Any] = {
        "id": call.request_id,
        "inputs": inputs,
        "outputs": [{"name": "output_ids"}, {"name": "sequence_length"}],
    }
    headers = {ENGINE_HEADER: key} if key else {}
    body |= {"parameters": {LOOP_PARAMETER: loop_key}} if loop_key else {}
    outputs = post_json(http_url, role.value, "infer", body, timeout_s, headers).get("outputs", [])
    lengths = [output["data"][0] for output in outputs if output["name"] == "sequence_length"]
    if not lengths or lengths[0] < 1:
        raise WarmupError(f"{role} generated nothing")


def post_json(
    http_url: str, model: str, verb: str, body: dict[str, Any], timeout_s: float, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One POST to a model of the server at ``host:port``; ``verb`` is ``infer`` or ``generate``.

    Raises:
        WarmupError: no answer in time, no JSON, or an HTTP status other than 200.
    """
    host, port = http_url.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        sent = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
        connection.request("POST", f"/v2/models/{model}/{verb}", json.dumps(body), sent)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise WarmupError(f"{model} did not answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200 or not isinstance(answer, dict):
        reason = answer.get("error", answer) if isinstance(answer, dict) else answer
        raise WarmupError(f"{model} refused with HTTP {response.status}: {reason}")
    return answer
