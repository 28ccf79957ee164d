"""The body of a request: read no further than it may be long, and JSON that means one thing."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lr_backend.frontend.errors import SOON_S, ApiError, ClientGone
from lr_backend.request import is_nested_deeper

LINGER_LEAST_BYTES = 64 << 10
"""A body of which no more is said to come is thrown away at once."""
LINGER_S = 10.0
"""So long the rest of a body that was refused is thrown away."""
LINGER_BYTES_A_S = 32 << 20
"""So fast, of all such bodies together. To read as fast as clients send would take the cores from good requests."""

MAX_DEPTH = 100
"""Objects and lists inside each other. No field goes as deep, and whoever copies or compares deeper ones may run out of stack."""


def is_long(request: Request) -> bool:
    """More of a body may be on its way than is thrown away at once."""
    return "transfer-encoding" in request.headers or _num_declared(request) > LINGER_LEAST_BYTES


def _num_declared(request: Request) -> int:
    """Bytes that a header says there are; 0: it does not say."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


class Lingering(Response):
    """The answer to a body that is still on its way: said at once, while the rest is thrown away.

    A connection that is closed with bytes unread is reset, and a client that goes on sending never sees the answer.
    """

    _free_s = 0.0
    """On the event loop's clock: until then what was read takes up the pace. All answers share it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (read := await receive()).get("more_body", False):
                    await self._pause(len(read["body"]))
        await send({"type": "http.response.body", "body": b""})

    @staticmethod
    async def _pause(num_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        Lingering._free_s = max(Lingering._free_s, now_s) + num_bytes / LINGER_BYTES_A_S
        await asyncio.sleep(Lingering._free_s - now_s)


SMALL_BYTES = 64 << 10
"""So many bytes of each body need no room. A connection may hold as many before anybody reads them."""


@dataclass(slots=True)
class Room:
    """Bytes that large bodies on their way may still take, all together. Until a body is there its request holds no place."""

    num_bytes: int


async def read_body(request: Request, room: Room, max_bytes: int, max_s: float) -> bytes:
    """The whole body; what a header says of its length is believed only where it is too much.

    Raises:
        ApiError: it is no JSON by its type, too long, too slow, or finds no room.
        ClientGone: the client went away.
    """
    _require_json(request)
    if _num_declared(request) > max_bytes:
        raise _too_large(max_bytes)
    parts, num_bytes, taken = [], 0, 0
    try:
        async with asyncio.timeout(max_s):
            async for part in request.stream():
                num_bytes += len(part)
                room.num_bytes += taken - max(0, num_bytes - SMALL_BYTES)
                taken = max(0, num_bytes - SMALL_BYTES)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                if room.num_bytes < 0:
                    raise _closing(ApiError("overloaded", "too many bodies are on their way", retry_after_s=SOON_S))
                parts.append(part)
    except TimeoutError:
        raise _closing(ApiError("body_timeout", f"the body did not arrive within {max_s:g} s")) from None
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        room.num_bytes += taken
    return b"".join(parts)


def _require_json(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8"):
        raise ApiError("unsupported_media_type", "send JSON in UTF-8, with the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError("unsupported_media_type", "send the body as it is, without a Content-Encoding")


def _too_large(max_bytes: int) -> ApiError:
    return _closing(ApiError("body_too_large", f"the body may have {max_bytes} bytes"))


def _closing(error: ApiError) -> ApiError:
    """The rest of the body is not waited for."""
    error.headers["connection"] = "close"
    return error


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: it is no JSON object, is nested deeply, says a name twice, or holds a number or a text that is none.
    """
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_number, parse_float=_number)
        if b"\\u" in raw:  # the one way to half a surrogate pair
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise ApiError("invalid_json", "the body holds text that UTF-8 cannot encode") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        why = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError("invalid_json", f"the body is not JSON{why}") from error
    if not isinstance(document, dict):
        raise ApiError("invalid_json", "the body is not a JSON object")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and is_nested_deeper(document, MAX_DEPTH):
        raise ApiError("invalid_json", f"the body is nested more than {MAX_DEPTH} deep")
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        twice = next(name for name, num in Counter(name for name, _ in pairs).items() if num > 1)
        raise ApiError("invalid_json", f"{twice[:80]!r} is said twice", twice)
    return document


def _number(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ApiError("invalid_json", f"{word[:80]} is a number that nothing can hold")
    return value
