"""Who may ask, how often, and how many at a time."""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Self

from lr_backend.errors import ConfigError
from lr_backend.frontend.errors import SOON_S, ApiError

MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 256


class Keys:
    """The API keys of a server. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """One key a line; empty lines and those that begin with ``#`` are none. Without a file everybody is let in.

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
        for number, key in enumerate(keys, start=1):
            if not (MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key):
                rule = f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII characters"
                raise ConfigError(f"{path}: key {number} has to be {rule}")
        if not keys:
            raise ConfigError(f"{path}: no API key in it")
        return cls(keys)

    def number_of(self, authorization: str) -> int:
        """Which key a request bears; 0 where there are none. The time that it takes says nothing of the keys.

        Raises:
            ApiError: it bears none of them.
        """
        scheme, _, given = authorization.partition(" ")
        hashed = _hash(given.strip())
        found = [number for number, known in enumerate(self._hashes) if hmac.compare_digest(known, hashed)]
        if not self._hashes:
            return 0
        if not found or scheme.lower() != "bearer":
            error = ApiError("invalid_api_key", "send a key of this server's, with the header Authorization: Bearer KEY")
            error.headers["www-authenticate"] = "Bearer"
            raise error
        return found[0]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


class Rate:
    """At most so many requests of one key within any minute. ``now_s``: a clock that never goes back."""

    def __init__(self, max_a_minute: int | None, now_s: Callable[[], float]) -> None:
        self._max, self._now_s = max_a_minute, now_s
        self._seen: dict[int, deque[float]] = {}

    def count(self, key: int) -> None:
        """Count a request.

        Raises:
            ApiError: it is one too many, and not counted; says when the next may come.
        """
        if self._max is None:
            return
        seen, now_s = self._seen.setdefault(key, deque()), self._now_s()
        while seen and seen[0] <= now_s - 60.0:
            seen.popleft()
        if len(seen) >= self._max:
            wait_s = max(1, ceil(seen[0] + 60.0 - now_s))
            raise ApiError("rate_limited", f"at most {self._max} requests a minute", retry_after_s=wait_s)
        seen.append(now_s)


class Gate:
    """At most so many answers at a time; the next is refused and not kept waiting."""

    def __init__(self, max_in_flight: int) -> None:
        self.limit = max_in_flight
        self.num_in_flight = 0

    @contextmanager
    def places(self, wanted: int) -> Iterator[None]:
        """Hold so many places.

        Raises:
            ApiError: they are taken.
        """
        if self.num_in_flight + wanted > self.limit:
            full = f"{self.limit} answers are in flight, or the choices asked for would be more; try again later"
            raise ApiError("overloaded", full, retry_after_s=SOON_S)
        self.num_in_flight += wanted
        try:
            yield
        finally:
            self.num_in_flight -= wanted
