"""Typed failures, ordered by what the caller can do about them.

    ClientError
    ├── InvalidRequest      mend the named field and send again
    ├── Overloaded          send again later; nothing was started
    ├── TargetUnavailable   the target engine is down; retry later or elsewhere
    ├── Cancelled           the caller asked for this
    ├── RequestTimeout      no end within ``timeout_s``; also a ``TimeoutError``
    ├── ServerUnreachable   no server answers, or it went away; also a ``ConnectionError``
    └── ServerError         the server failed, or sent what this client cannot read

``str(error)`` says what happened and what to do next, in one sentence.
"""

from __future__ import annotations

from typing import ClassVar


class ClientError(Exception):
    """Base of every failure that this package raises on purpose.

    Attributes:
        message: what happened.
        code: the server's stable code (``LR_OVERLOADED`` ...), or None where the failure is not the server's.
        advice: what to do next; may be empty.
    """

    default_advice: ClassVar[str] = ""

    def __init__(self, message: str, *, code: str | None = None, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.advice = self.default_advice if advice is None else advice

    def __str__(self) -> str:
        return f"{self.message} ({self.advice})" if self.advice else self.message


class InvalidRequest(ClientError):
    """A field of the request breaks a rule.

    Attributes:
        field: the offending field as it was sent, or None where the server did not name one.
    """

    default_advice = "mend the field and send again"

    def __init__(
        self, message: str, *, field: str | None = None, code: str | None = None, advice: str | None = None
    ) -> None:
        super().__init__(message, code=code, advice=advice)
        self.field = field


class Overloaded(ClientError):
    """The server's admission limit or an engine queue is full; nothing was started."""

    default_advice = "send again after a pause"


class TargetUnavailable(ClientError):
    """The target engine does not answer, so there is no answer of the promised quality."""

    default_advice = "retry later, or ask another server"


class Cancelled(ClientError):
    """The request was cancelled before its end."""


class RequestTimeout(ClientError, TimeoutError):
    """The request did not end within ``timeout_s``; the server has been told to stop."""

    default_advice = "raise timeout_s, or set deadline_s or max_tokens to get a shorter answer in time"


class ServerUnreachable(ClientError, ConnectionError):
    """Nothing answers at the address, or the connection broke."""

    default_advice = "check that the server runs and that the address is its gRPC host:port"


class ServerError(ClientError):
    """The server failed, or sent something that this client cannot read."""

    default_advice = "look at the server's log"
