"""Who may ask, how often, and how many at a time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Self

from lr_backend.errors import ConfigError
from lr_backend.frontend.errors import SOON_S, ApiError

MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 256
PRIORITY = "priority"
"""The word behind a key in the file."""
WAITS_S = 3.0 * SOON_S
"""Who was refused and has not asked again for so long waits no more."""
ASKS_S = 10.0
"""So long after its last request a key counts among those that share the places."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is: the number of its key from 1 on, 0 without one."""

    number: int = 0
    has_priority: bool = False


class Keys:
    """The API keys of a server. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        """``keys``: each may have the word ``priority`` behind it."""
        parts = [key.partition(" ") for key in keys]
        self._hashes = [_hash(key) for key, _, _ in parts]
        self._callers = [Caller(number, word.strip() == PRIORITY) for number, (_, _, word) in enumerate(parts, start=1)]

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """One key a line, which may have ``priority`` behind it; empty lines and those that begin with ``#`` are none.

        Without a file everybody is let in.

        Raises:
            ConfigError: the file cannot be read, holds no key, or one that is short or cannot stand in a header.
        """
        if path is None:
            return cls(())
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the API keys cannot be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        for number, line in enumerate(keys, start=1):
            key, _, word = line.partition(" ")
            visible = key.isascii() and key.isprintable() and word.strip() in ("", PRIORITY)
            if not (MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS and visible):
                rule = f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII characters, and behind them {PRIORITY} or nothing"
                raise ConfigError(f"{path}: key {number} has to be {rule}")
        if not keys:
            raise ConfigError(f"{path}: no API key in it")
        return cls(keys)

    @property
    def wanted(self) -> bool:
        """Requests need one."""
        return bool(self._callers)

    def caller_of(self, authorization: str) -> Caller:
        """Whose key a request bears. The time that it takes says nothing of the keys.

        Raises:
            ApiError: it bears none of them.
        """
        scheme, _, given = authorization.partition(" ")
        hashed = _hash(given.strip())
        found = [number for number, known in enumerate(self._hashes) if hmac.compare_digest(known, hashed)]
        if not self._hashes:
            return Caller()
        if not found or scheme.lower() != "bearer":
            error = ApiError("invalid_api_key", "send a key of this server's, with the header Authorization: Bearer KEY")
            error.headers["www-authenticate"] = "Bearer"
            raise error
        return self._callers[found[0]]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


class Rate:
    """At most so many requests of one key within any minute. ``now_s``: a clock that never goes back."""

    def __init__(self, max_a_minute: int | None, now_s: Callable[[], float]) -> None:
        self._max, self._now_s = max_a_minute, now_s
        self._seen: dict[int, deque[float]] = {}

    def count(self, key: int) -> float:
        """Count a request, and say when that was.

        Raises:
            ApiError: it is one too many, and not counted; says when the next may come.
        """
        now_s = self._now_s()
        if self._max is None:
            return now_s
        seen = self._seen.setdefault(key, deque())
        while seen and seen[0] <= now_s - 60.0:
            seen.popleft()
        if len(seen) >= self._max:
            wait_s = max(1, ceil(seen[0] + 60.0 - now_s))
            raise ApiError("rate_limited", f"at most {self._max} requests a minute", retry_after_s=wait_s)
        seen.append(now_s)
        return now_s

    def give_back(self, key: int, counted_s: float) -> None:
        """Count the request of that time no more: it was told to come again."""
        with suppress(KeyError, ValueError):  # nothing is counted, or it was longer ago than a minute
            self._seen[key].remove(counted_s)


@dataclass
class _Refused:
    """Since when a caller has been refused, and how often."""

    since_s: float
    times: int = 0


class Gate:
    """At most so many answers at a time; the next is refused and not kept waiting.

    Whoever asks alone may have all places. While several keys ask, each may hold its share and no more, but for one request of
    more choices where the key holds nothing else. A place that comes free is left for a while to who was refused before and
    holds fewer. Some places may be kept for keys of priority.

    Args:
        num_kept: places that only keys of priority get.
        now_s: a clock that never goes back.

    Attributes:
        empty: set while there is no answer.
    """

    def __init__(self, max_in_flight: int, num_kept: int = 0, now_s: Callable[[], float] = time.monotonic) -> None:
        self.limit = max_in_flight
        self.empty = asyncio.Event()
        self.empty.set()
        self._num_common = max_in_flight - num_kept
        self._now_s = now_s
        self._held: Counter[Caller] = Counter()
        self._asked_s: dict[Caller, float] = {}
        self._refused: dict[Caller, _Refused] = {}
        """Who was refused and asks again and again."""

    @property
    def num_in_flight(self) -> int:
        return self._held.total()

    def most(self, caller: Caller) -> int:
        """Places that a caller may have at best."""
        return self.limit if caller.has_priority else self._num_common

    @contextmanager
    def places(self, wanted: int, caller: Caller = Caller(), *, are_all: bool = True, own: int = 0) -> Iterator[None]:
        """Hold so many places.

        Args:
            are_all: the request wants no more.
            own: places that the same request holds already.

        Raises:
            ApiError: they are taken, or more than the caller's share.
        """
        now_s = self._now_s()
        if self._asked_s.get(caller, now_s) < now_s - WAITS_S:
            self._refused.pop(caller, None)
        self._asked_s[caller] = now_s
        if why := self._why_not(wanted, caller, own):
            self._refused.setdefault(caller, _Refused(now_s)).times += 1
            raise ApiError("overloaded", f"{why}; try again later", retry_after_s=SOON_S)
        if are_all:
            self._refused.pop(caller, None)
        self._held[caller] += wanted
        self._tell()
        try:
            yield
        finally:
            self._held[caller] -= wanted
            self._tell()

    def _why_not(self, wanted: int, caller: Caller, own: int) -> str:
        """What keeps a caller from so many more places; empty: nothing does."""
        num_common = sum(count for each, count in self._held.items() if not each.has_priority)
        if self.num_in_flight + wanted > self.limit or (not caller.has_priority and num_common + wanted > self._num_common):
            return f"{self.num_in_flight} answers are in flight, or the choices asked for would be more than are free"
        first = next((each for each in self._refused if self._comes_before(each, caller, wanted)), None)
        if first is not None and wanted:
            # One place is left, of those that the other one may have. More would stand empty where nobody comes back.
            left = 1 if first.has_priority else min(1, self._num_common - num_common)
            are_common = not first.has_priority and not caller.has_priority
            if self.num_in_flight + wanted + left > self.limit or (are_common and num_common + wanted + left > self._num_common):
                return "what is free is for one that was refused before"
        since_s = self._now_s() - ASKS_S
        asking = [each for each, asked_s in self._asked_s.items() if self._held[each] or asked_s > since_s]
        share = ceil(self.limit / len(asking))
        if not caller.has_priority:
            share = min(share, ceil(self._num_common / sum(not each.has_priority for each in asking)))
        else:  # nobody else gets the places that are kept
            share = max(share, ceil((self.limit - self._num_common) / sum(each.has_priority for each in asking)))
        # One request cannot come in parts: above a share it could never be answered.
        if wanted and self._held[caller] > own and self._held[caller] + wanted > share:
            return f"this key has its share of {share} answers in flight, and others ask"
        return ""

    def _comes_before(self, other: Caller, caller: Caller, wanted: int) -> bool:
        """Another one was refused earlier, has asked again, and would have no more places than this one."""
        now_s, refused = self._now_s(), self._refused[other]
        since_s = self._refused[caller].since_s if caller in self._refused else now_s
        waits = refused.times > 1 and self._asked_s[other] > now_s - WAITS_S and refused.since_s < since_s
        return other != caller and waits and self._held[other] < self._held[caller] + wanted

    def _tell(self) -> None:
        if self.num_in_flight:
            self.empty.clear()
        else:
            self.empty.set()
