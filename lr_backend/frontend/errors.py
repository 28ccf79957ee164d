"""Every failure that a client of the front end may see: one code each, with its status and its type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from lr_client import (
    Cancelled,
    ClientError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ServerUnreachable,
    TargetUnavailable,
)

from lr_backend.serve.health import WAITS_FOR

_INVALID, _SERVER = "invalid_request_error", "server_error"

CODES: Mapping[str, tuple[int, str]] = {
    "invalid_json": (400, _INVALID),
    "unknown_field": (400, _INVALID),
    "unsupported_field": (400, _INVALID),
    "missing_field": (400, _INVALID),
    "invalid_value": (400, _INVALID),
    "over_limit": (400, _INVALID),
    "context_length_exceeded": (400, _INVALID),
    "engine_rejected": (400, _INVALID),
    "invalid_api_key": (401, "authentication_error"),
    "not_found": (404, _INVALID),
    "model_not_found": (404, _INVALID),
    "method_not_allowed": (405, _INVALID),
    "body_timeout": (408, _INVALID),
    "body_too_large": (413, _INVALID),
    "unsupported_media_type": (415, _INVALID),
    "rate_limited": (429, "rate_limit_error"),
    "client_gone": (499, _INVALID),
    "internal": (500, _SERVER),
    "not_finite": (500, _SERVER),
    "overloaded": (503, _SERVER),
    "unavailable": (503, _SERVER),
    "draining": (503, _SERVER),
    "timeout": (504, _SERVER),
}
"""Code -> (HTTP status, type). Clients match on the code."""

ONCE = ("not_finite", "timeout")
"""What OpenAI's client would ask again by itself, and had better not: it would fail again, or took all the time that there is."""

MAX_MESSAGE_CHARS = 500
SOON_S, LATER_S = 1, 5
"""After so many seconds another try may be worth it: when a place is free, when something has been started again."""


class ApiError(Exception):
    """What a request is answered with instead of an answer.

    Attributes:
        param: the field at fault, as the client wrote it.
        headers: to send with it.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, *, retry_after_s: int | None = None, waits_for: str = ""
    ) -> None:
        """``waits_for``: who is missing, where starting this server anew would not bring them back."""
        super().__init__(code)  # not the message: it may quote a prompt, and what is raised may be logged
        self.code = code
        self.status, self.type = CODES[code]
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."
        self.param = param if param is None else param[:200]
        self.headers: dict[str, str] = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
        if waits_for:
            self.headers[WAITS_FOR] = waits_for
        if code in ONCE:
            self.headers["x-should-retry"] = "false"

    def body(self, request_id: str) -> bytes:
        """The document; text in it may be anything, half a surrogate pair too, hence ASCII."""
        fields = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return json.dumps({"error": {**fields, "request_id": request_id}}).encode("ascii")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def from_client(error: ClientError, param_of: Callable[[str], str]) -> ApiError:
    """What the server said, as its client raised it.

    Args:
        param_of: the name that a field of the server's has in the request.
    """
    match error:
        case InvalidRequest():
            code = "context_length_exceeded" if error.code == "LR_PROMPT_TOO_LONG" else "invalid_value"
            return ApiError(code, error.message, param_of(error.field) if error.field else None)
        case Overloaded():
            return ApiError("overloaded", error.message, retry_after_s=SOON_S)
        case RequestTimeout():
            return ApiError("timeout", "the answer did not end in the time that a request has")
        case TargetUnavailable():
            return ApiError("unavailable", "the target is down", retry_after_s=LATER_S)
        case Cancelled() | ServerUnreachable():
            return ApiError("unavailable", "the server is stopping or does not answer", retry_after_s=LATER_S)
    made = _BY_SERVERS_CODE.get(error.code or "")
    return made(error) if made is not None else internal()


def internal() -> ApiError:
    """A fault of ours; what it was stands in the log."""
    return ApiError("internal", "internal error; the server's log has it under this request's id")


_BY_SERVERS_CODE: Mapping[str, Callable[[ClientError], ApiError]] = {
    "LR_ENGINE_REJECTED": lambda error: ApiError("engine_rejected", error.message),
    "LR_NOT_FINITE": lambda error: ApiError("not_finite", "the target computed NaN or infinity for this request"),
}

TAGS = frozenset({"_text", "_parts", "_one", "_many"})
"""Our names for the forms that a value may have; the data checker puts them into the places that it tells."""


def place(parts: tuple[int | str, ...]) -> str:
    """A place in a document as one writes it: ``messages[0].content``. Our own :data:`TAGS` are left out."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in TAGS:
            path += f".{part}" if path else part
    return path
