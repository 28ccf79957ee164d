"""Bytes that are no proper HTTP: an error or a closed connection, never a fault of ours, and the next request is answered."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lr_backend.frontend.settings import Settings
from lr_backend.frontend.wire import KEEP_IDLE_S, UNREAD_S
from tests.support.bad_input import GOOD_BODY
from tests.support.examples import answers
from tests.support.fake_lookahead import FakeServer, Reply
from tests.support.frontend import CHAT, Served, frontend

BOUNDED = Settings(max_head_s=0.6, max_body_s=0.6, max_body_bytes=2000)
ANSWER = [Reply(text="yes"), Reply(finish="stop", usage={"completion_tokens": 1})]
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n".encode()
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD_BODY) + GOOD_BODY


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with FakeServer({"q": ANSWER}) as running:
        yield running


@pytest.fixture(scope="module")
def served(server: Any) -> Iterator[Served]:
    with frontend(server.url, BOUNDED) as running:
        yield running


def heard(served: Served, *parts: bytes) -> bytes:
    """All that the server says until it closes. What it no longer reads is not sent."""
    with served.raw_connection() as connection:
        said = b""
        try:
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(1 << 16):
                said += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return said


def statuses(said: bytes) -> list[int]:
    return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]


def content(served: Served) -> Any:
    for _ in range(5):  # a busy machine may take longer than is allowed here for the head, or between head and body
        with suppress(ConnectionError):
            answer = served.ask("POST", CHAT, GOOD_BODY)
            if answer.status != 408:
                assert answer.status == 200
                return answer.document["choices"]
    raise AssertionError("no answer in its time")


def chunked(*chunks: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "one byte": b"G",
    "NUL bytes": b"\x00" * 100,
    "TLS hello": bytes.fromhex("16030100c8010000c40303") + b"\x00" * 189,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n",
    "no version": b"GET /health\r\nHost: h\r\n\r\n",
    "a version that is none": b"GET /health HTTP/9.9\r\nHost: h\r\n\r\n",
    "bare line feeds and a NUL": b"GET /health\x00 HTTP/1.1\nHost: h\n\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nHost: h\r\nX-A: a\x00b\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: h\r\n: x\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: h\r\nX-A: a\r\n b\r\n\r\n",
    "a blank before the colon": b"GET /health HTTP/1.1\r\nHost : h\r\n\r\n",
    "a huge header": b"GET /health HTTP/1.1\r\nHost: h\r\nX-A: " + b"a" * (1 << 22) + b"\r\n\r\n",
    "a huge line": b"GET /" + b"a" * (1 << 22) + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "a storm of headers": b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(50_000)) + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "a length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a coding that nobody knows": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a chunk's size that is none": chunked(b"zz\r\n{}\r\n0\r\n\r\n"),
    "a negative chunk": chunked(b"-1\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than it says": chunked(b"1\r\n{}\r\n0\r\n\r\n"),
    "an endless size of a chunk": chunked(b"0" * 100_000),
    "an endless extension of a chunk": chunked(b"1;" + b"a" * 100_000),
    "trailers without end": chunked(b"0\r\n", b"X-A: a\r\n" * 50_000),
    "a huge chunk": chunked(b"ffffffffffffffff\r\n{}"),
    "chunks that end early": chunked(b"5\r\n{"),
    "a body that ends early": HEAD + b"Content-Length: 100\r\n\r\n{",
    "a gzip bomb": HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(gzip.compress(bytes(1 << 20)))
    + gzip.compress(bytes(1 << 20)),
    "a websocket": b"GET /v1/models HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "a proxy's request": b"CONNECT example.org:443 HTTP/1.1\r\nHost: h\r\n\r\n",
    "another host's page": b"GET http://example.org/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "a percent sign and no number": b"GET /%zz HTTP/1.1\r\nHost: h\r\n\r\n",
    "no ASCII": "GET /caf\xe9 HTTP/1.1\r\nHost: h\r\n\r\n".encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_request_is_an_error_or_a_closed_connection(served: Served, name: str) -> None:
    """Nobody closes on this side: it ends because the server ends it."""
    before = content(served)
    # A request that is whole may keep its connection; the half of a next one is then what ends it.
    found = statuses(heard(served, BROKEN[name], b"X"))
    assert all(status < 500 for status in found)
    assert content(served) == before


def test_a_request_whose_head_drips_is_not_waited_for(served: Served) -> None:
    """A byte every now and then moves nothing: with a wait of its own for each, this would never end."""
    with served.raw_connection() as connection:
        connection.settimeout(0.05)
        for byte in (GOOD[index % len(HEAD) : index % len(HEAD) + 1] for index in range(10_000)):
            try:
                connection.sendall(byte if byte not in (b"\r", b"\n") else b"x")
                closed = not connection.recv(1 << 10)
            except TimeoutError:
                continue
            except OSError:
                closed = True
            if closed:
                break
        else:
            raise AssertionError("the server goes on waiting")
    content(served)


def test_idle_connections_are_closed_and_hold_nobody_up(served: Served) -> None:
    idle = [served.raw_connection() for _ in range(200)]
    try:
        content(served)
        assert all(connection.recv(1) == b"" for connection in idle)
    finally:
        for connection in idle:
            connection.close()


def test_without_a_bound_an_idle_connection_stays(server: Any) -> None:
    """The tests above see the bound's work."""
    with frontend(server.url, Settings(max_head_s=3600.0)) as unbounded, unbounded.raw_connection() as connection:
        connection.settimeout(4 * BOUNDED.max_head_s)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_connection_may_rest_between_requests_and_is_answered_again(served: Served) -> None:
    """What bounds a head leaves alone a client that has been answered and rests for longer."""
    with served.raw_connection() as connection, connection.makefile("rb") as lines:
        for _ in range(2):
            connection.sendall(GOOD)
            assert lines.readline() == b"HTTP/1.1 200 OK\r\n"
            length = next(int(line.split()[1]) for line in iter(lines.readline, b"\r\n") if line.startswith(b"content-length"))
            while lines.peek(1)[:1] != b"{":
                lines.readline()
            json.loads(lines.read(length))
            connection.settimeout(3 * BOUNDED.max_head_s)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(None)


@pytest.mark.parametrize("num_bytes", [len(GOOD_BODY), 1])
def test_a_connection_whose_body_comes_behind_the_answer_may_rest_once_it_is_whole(server: Any, num_bytes: int) -> None:
    """Without a key the answer does not wait for the body."""
    with frontend(server.url, BOUNDED, keys=["a-key-of-16-chars"]) as keyed, keyed.raw_connection() as connection:
        connection.sendall(GOOD.removesuffix(GOOD_BODY))
        refused = b""
        while not refused.endswith(b"}}"):
            part = connection.recv(1 << 16)
            assert part
            refused += part
        assert statuses(refused) == [401]
        connection.sendall(GOOD_BODY[:num_bytes])
        if num_bytes < len(GOOD_BODY):
            assert connection.recv(1) == b""
            return
        connection.settimeout(3 * BOUNDED.max_head_s)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_client_that_is_gone_without_a_word_is_noticed(served: Served) -> None:
    """Its machine lost power, or a firewall forgot the connection: nothing comes any more, no end either."""
    with served.raw_connection() as connection:
        connection.sendall(GOOD)
        connection.recv(1)
        with other_end(connection) as servers:
            assert servers.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert servers.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEP_IDLE_S
            assert servers.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1e3 * UNREAD_S


def other_end(connection: socket.socket) -> socket.socket:
    """The server's socket: it lives in this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), ExitStack() as opened:  # it is closed meanwhile, or has no other end
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = opened.enter_context(socket.socket(fileno=os.dup(int(name))))
                if found.getpeername() == connection.getsockname():
                    opened.pop_all()
                    return found
    raise AssertionError


def test_requests_in_a_row_without_waiting_are_answered_in_order(served: Served) -> None:
    said = heard(served, GOOD * 5 + HEAD.replace(b"POST", b"BREW") + b"\r\n" + GOOD + b"\x00\r\n\r\n")
    assert statuses(said) == [200] * 5 + [405, 200, 400]


FRAGMENTS = st.sampled_from(
    (
        *(b"GET ", b"POST ", CHAT.encode(), b" HTTP/1.1", b"\r\n", b"\n", b"\r", b"\x00", b": ", b"Host: h\r\n", b"\r\n\r\n"),
        *(b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Content-Type: application/json\r\n", b"0\r\n\r\n", b"5"),
        *(b"\xff", GOOD_BODY),
    )
)


@answers(100)
@given(st.lists(FRAGMENTS | st.binary(max_size=8), max_size=12).map(b"".join) | st.integers(0, 2**32))
@example(0)
def test_any_bytes_on_the_wire(served: Served, what: bytes | int) -> None:
    """Any bytes, or a good request with some of its bytes changed."""
    if isinstance(what, int):
        chance, changed = random.Random(what), bytearray(GOOD)
        for _ in range(chance.randint(1, 6)):
            changed[chance.randrange(len(HEAD))] = chance.randrange(256)
        what = bytes(changed)
    with served.raw_connection() as connection:
        said = b""
        try:
            connection.sendall(what)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                said += part
        except TimeoutError:
            raise
        except OSError:  # it was refused and closed already
            pass
    assert all(status < 500 for status in statuses(said))
    content(served)
