"""Whether the servers of roles that live elsewhere are ready, and take our key: asked from here by gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from lr_backend.engine import Role, cancel_tensors
from lr_backend.engine.address import ENGINE_HEADER, ENGINE_KEY_VARIABLE, GRPC_PREFIX, Address
from lr_backend.errors import LookaheadError
from lr_backend.serve.startup_check import Finding, Level

ANSWER_S = 2.0
"""For one server to say that it is ready."""
LOOK_S = 0.5
GRACE_S = 30.0
"""How long draft and judge are waited for once the target is there. Without them the target answers alone."""


class RemoteError(LookaheadError):
    """A role that lives elsewhere does not answer."""

    code = "LR_SERVER"


def why_not_ready(url: str, role: Role) -> str:
    """What keeps a role's server from answering; empty: nothing does."""
    address = Address.parse(url)
    client = grpcclient.InferenceServerClient(address.host_and_port, ssl=address.secure)
    try:
        return "" if client.is_model_ready(role.value, client_timeout=ANSWER_S) else f"{url} has no model {role} that is ready"
    except InferenceServerException as error:
        return f"{url} does not answer: {error.message()}"
    finally:
        client.close()


def why_refused(url: str, role: Role, key: str) -> str:
    """Why a server that is ready would not compute for whoever says ``key``; empty: it would. It is asked to cancel nothing."""
    address = Address.parse(url)
    tensors = []
    for name, array in cancel_tensors().items():
        tensors.append(grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    headers = {f"{GRPC_PREFIX}{ENGINE_HEADER}": key} if key else None
    client = grpcclient.InferenceServerClient(address.host_and_port, ssl=address.secure)
    try:
        client.infer(role.value, tensors, request_id="lookahead-doctor", headers=headers, client_timeout=ANSWER_S)
    except InferenceServerException as error:
        told = "without a key" if not key else "with this key"
        return f"ready, and answers nobody {told}: {error.message()}"
    finally:
        client.close()
    return ""


def missing_roles(remotes: Mapping[Role, Sequence[str]], why: Callable[[str, Role], str] = why_not_ready) -> dict[Role, str]:
    """Roles of which no server is ready, each with what its servers say."""
    found: dict[Role, str] = {}
    for role, urls in remotes.items():
        reasons = [why(url, role) for url in urls]
        if all(reasons):
            found[role] = "; ".join(reasons)
    return found


def check_remotes(
    remotes: Mapping[Role, Sequence[str]],
    why: Callable[[str, Role], str] = why_not_ready,
    refuses: Callable[[str, Role], str] = lambda url, role: "",
) -> tuple[Finding, ...]:
    """A line for each server of a role that lives elsewhere. A server starts once one target is there.

    Args:
        refuses: why one that is ready would not compute for us, as :func:`why_refused` says it.
    """
    findings = []
    for role, urls in remotes.items():
        away = {url: why(url, role) for url in urls}
        refused = {url: "" if away[url] else refuses(url, role) for url in urls}
        needed = role is Role.TARGET and all(away[url] or refused[url] for url in urls)
        for url in urls:
            reason = away[url] or refused[url]
            level = Level.OK if not reason else Level.MISSING if needed else Level.WARNING
            remedy = f"start it there: lookahead serve --role {role}" if away[url] else ""
            if refused[url]:
                remedy = f"give {ENGINE_KEY_VARIABLE}_FILE here the key that its server was started with"
            findings.append(Finding(f"{role} at {url}", reason or "ready", level, remedy))
    return tuple(findings)


def wait_for_roles(
    remotes: Mapping[Role, Sequence[str]],
    timeout_s: float,
    give_up: threading.Event,
    why: Callable[[str, Role], str] = why_not_ready,
) -> dict[Role, str]:
    """Wait until every role that lives elsewhere has a server, or ``give_up`` is set.

    Returns those of draft and judge that did not come: the target answers without them.

    Raises:
        RemoteError: there is no target after ``timeout_s``; names its addresses.
    """
    deadline = time.monotonic() + timeout_s
    while (missing := missing_roles(remotes, why)) and not give_up.is_set():
        left_s = deadline - time.monotonic()
        if Role.TARGET not in missing:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if left_s <= 0.0:
            break
        give_up.wait(LOOK_S)
    if Role.TARGET in missing and not give_up.is_set():
        raise RemoteError(f"the target is not there after {timeout_s:g} s: {missing[Role.TARGET]}")
    return missing
