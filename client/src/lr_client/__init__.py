"""Client of the lookahead reasoning server: :class:`Client`, :class:`AsyncClient`, and a command line."""

from lr_client.aio import AsyncClient, AsyncStream
from lr_client.client import Client, Stream
from lr_client.errors import (
    Cancelled,
    ClientError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    ServerError,
    ServerUnreachable,
    TargetUnavailable,
)
from lr_client.fields import Options
from lr_client.reasoning import ReasoningSplitter
from lr_client.types import (
    Event,
    FinishEvent,
    FinishReason,
    Message,
    Question,
    Result,
    StepEvent,
    StepRecord,
    TextEvent,
    Usage,
)

__version__ = "0.2.0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "ClientError",
    "Event",
    "FinishEvent",
    "FinishReason",
    "InvalidRequest",
    "Message",
    "Options",
    "Overloaded",
    "Question",
    "ReasoningSplitter",
    "RequestTimeout",
    "Result",
    "ServerError",
    "ServerUnreachable",
    "StepEvent",
    "StepRecord",
    "Stream",
    "TargetUnavailable",
    "TextEvent",
    "Usage",
]
