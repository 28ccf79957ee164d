"""The keeper, a Triton that does not answer it, and calls that are lost with dead models."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lr_backend.cli import serve
from lr_backend.notice import Seat, Seats
from lr_backend.serve import keeper as room
from lr_backend.serve.keeper import StubKeeper
from lr_backend.serve.server import ServerError, ServerOptions
from tests.support.waiting import until


@pytest.fixture
def silent() -> Iterator[str]:
    """Takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def server_of(directory: Path, url: str = "") -> Any:
    """What the keeper sees of a server that runs: its seats, and where Triton listens."""
    notices = directory / "notice"
    common: dict[str, Any] = {"pid": None, "admin_key": "k", "running": True, "options": ServerOptions(thread_pool_size=128)}
    return SimpleNamespace(http_url=url, notice_file=notices, seats=Seats.make(notices), **common)


@pytest.mark.parametrize(("model", "drains"), [("draft", True), ("lookahead", False)])
def test_a_model_that_is_not_let_go_is_lost_and_the_answers_in_flight_are_not(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, drains: bool
) -> None:
    monkeypatch.setattr(room, "UNLOAD_S", 0.1)
    server = server_of(tmp_path, silent)
    said: list[str] = []
    keeper = StubKeeper(server, said.append)
    keeper._have_died({model})
    assert keeper.lost.wait(10.0) and keeper.can_drain is drains
    assert f"{model} is back" not in said and "died" in keeper.why
    keeper.stop()


def test_a_server_that_is_to_stop_does_not_wait_for_a_model_that_loads(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(room, "stubs_of", lambda _: {"draft": [dead.pid], "lookahead": [os.getpid()]})
    monkeypatch.setattr(room, "STOP_S", 10.0)
    server = server_of(tmp_path, silent)
    heard = threading.Event()
    keeper = StubKeeper(server, lambda _: heard.set())
    keeper.start()
    dead.kill()
    dead.wait()
    assert heard.wait(10.0), "a thread now waits for Triton, which does not answer"
    keeper.stop()
    assert not keeper._thread.is_alive() and not keeper.lost.is_set()


def test_while_one_model_loads_others_are_seen_to_die(silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is short takes one process after another."""
    processes = {name: subprocess.Popen(["sleep", "60"]) for name in ("draft", "judge", "lookahead", "target")}
    monkeypatch.setattr(room, "stubs_of", lambda _: {name: [process.pid] for name, process in processes.items()})
    server = server_of(tmp_path, silent)
    posted: list[set[str]] = []
    monkeypatch.setattr(room, "post", lambda path, dead: posted.append(set(dead)))
    said: Queue[str] = Queue()
    keeper = StubKeeper(server, said.put)
    keeper.start()
    for name in ("draft", "judge"):
        processes[name].kill()
        processes[name].wait()
        assert name in said.get(timeout=10.0), "Triton does not answer to the unload of the draft meanwhile"
    assert not keeper.lost.is_set()
    processes["lookahead"].kill()
    processes["lookahead"].wait()
    assert keeper.lost.wait(10.0) and "step loop" in keeper.why
    processes["target"].kill()
    processes["target"].wait()
    until(lambda: "target" in keeper.dead)  # it is watched on: the answers in flight come to their end, or do not
    until(lambda: len(posted) == 4)
    keeper.stop()
    assert "step loop" in keeper.why and said.empty(), "and it is not mended"
    assert posted.pop() == set(processes)
    assert posted == [{"draft"}, {"draft", "judge"}, {"draft", "judge", "lookahead"}]
    keeper.stop()


@pytest.mark.parametrize("others", [{}, {"judge": [os.getpid()]}], ids=["alone", "beside another"])
def test_a_server_without_a_step_loop_ends_with_the_first_model_to_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, list[int]]
) -> None:
    """A step loop elsewhere is told nothing: its calls end as their connection breaks. Another model ends what it has."""
    dead = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(room, "stubs_of", lambda _: {"target": [dead.pid], **others})
    keeper = StubKeeper(server_of(tmp_path), lambda line: None)
    keeper.start()
    dead.kill()
    dead.wait()
    assert keeper.lost.wait(10.0) and keeper.why == "the process of target died" and keeper.can_drain == bool(others)
    keeper.stop()


@pytest.mark.parametrize(
    ("num_lost", "dead", "lasts"), [(0, set(), True), (63, set(), True), (64, set(), False), (64, {"draft"}, True)]
)
def test_a_server_that_has_lost_too_many_calls_ends_once_every_model_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_lost: int, dead: set[str], lasts: bool
) -> None:
    """Each of them holds a thread of the step loop for good; without threads nothing is ever answered."""
    monkeypatch.setattr(room, "stubs_of", lambda _: {"lookahead": [os.getpid()]})
    server = server_of(tmp_path)
    Seats.beside(server.notice_file).seat(1).lose(num_lost)
    keeper = StubKeeper(server, lambda line: None)
    keeper._dead |= dead
    keeper.start()
    assert keeper.lost.wait(0.1 if lasts else 10.0) is not lasts
    assert keeper.can_drain and (lasts or f"{num_lost} calls" in keeper.why)
    keeper.stop()


def test_a_model_that_is_back_is_watched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubKeeper, "_call", lambda *_: None)
    monkeypatch.setattr(room, "stubs_of", lambda _: {"draft": [os.getpid()]})
    server = server_of(tmp_path)
    said: list[str] = []
    keeper = StubKeeper(server, said.append)
    keeper._dead.add("draft")
    keeper._mend("draft")
    assert said == ["draft is back"] and not keeper.dead and list(keeper._watched.values()) == ["draft"]
    keeper.stop()


def test_a_server_is_drained_once_no_process_of_the_loop_answers_any_more(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    first, second = (Seats.beside(server.notice_file).seat(loop) for loop in range(2))
    keeper = StubKeeper(server, lambda line: None)
    first.enter()
    second.enter()
    assert not keeper.drained and not first.ending
    keeper.drain()
    assert first.ending and second.ending and not keeper.drained
    second.leave()
    assert not keeper.drained
    first.leave()
    assert keeper.drained
    keeper.stop()


def test_a_server_that_answers_nothing_but_was_not_told_to_end_is_not_drained(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    keeper = StubKeeper(server, lambda line: None)
    assert not keeper.drained
    keeper.stop()


@pytest.mark.parametrize(
    ("meanwhile", "lost"),
    [
        pytest.param(lambda seat: None, True, id="nothing"),
        pytest.param(lambda seat: seat.answered(), False, id="it answers another call"),
        pytest.param(lambda seat: seat.hangs(-1), False, id="it lets go"),
    ],
)
def test_a_target_that_hangs_ends_the_server_unless_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Seat], None], lost: bool
) -> None:
    clock = iter([0.0, 29.0, 31.0, 60.0])
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    server = server_of(tmp_path)
    keeper = StubKeeper(server, lambda line: None)
    seat = server.seats.seat(1)
    server.seats.seat(0).answered()
    seat.hangs(1)
    for _ in range(2):
        keeper._look_for_hang()
        assert not keeper.lost.is_set()
    meanwhile(seat)
    for _ in range(2):
        keeper._look_for_hang()
    assert keeper.lost.is_set() is lost and keeper.can_drain is not lost
    assert ("the target hangs" in keeper.why) is lost
    keeper.stop()


def test_a_target_does_not_hang_where_the_machine_was_suspended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(tmp_path)
    keeper = StubKeeper(server, lambda line: None)
    server.seats.seat(0).hangs(1)
    for now_s in (0, 10, 3600, 3610, 3620, 3629):
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda now_s=now_s: float(now_s)))
        keeper._look_for_suspension()
        keeper._look_for_hang()
    assert not keeper.lost.is_set()
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: 3631.0))
    keeper._look_for_suspension()
    keeper._look_for_hang()
    assert keeper.lost.is_set()
    keeper.stop()


@pytest.mark.parametrize(
    ("meanwhile", "looks_s", "lost"),
    [
        pytest.param(lambda seat: None, range(0, 90, 10), True, id="nothing"),
        pytest.param(lambda seat: seat.beat(), range(0, 90, 10), False, id="it goes round"),
        pytest.param(lambda seat: seat.leave(), range(0, 90, 10), False, id="it has answered"),
        pytest.param(lambda seat: None, [0, 10, 3600, 3610, 3620], False, id="the machine was suspended"),
    ],
)
def test_a_process_of_the_loop_that_stands_still_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Seat], None], looks_s: Iterable[float], lost: bool
) -> None:
    """A plug-in that waits for the network in its event loop answers nobody, and Triton calls its model ready."""
    server = server_of(tmp_path)
    keeper = StubKeeper(server, lambda line: None)
    still, lives = server.seats.seat(0), server.seats.seat(1)
    for seat in (still, lives):
        seat.enter()
    for now_s in looks_s:
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda now_s=now_s: float(now_s)))
        lives.beat()
        if now_s == 50:
            meanwhile(still)
        keeper._look_for_suspension()
        keeper._look_for_stillness()
    assert keeper.lost.is_set() is lost and keeper.can_drain is not lost
    assert ("stands still" in keeper.why) is lost
    keeper.stop()


def test_a_server_that_nobody_watches_any_more_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the notice of a death: the step loop is not told, so that its calls would hang."""
    dead = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(room, "stubs_of", lambda _: {"draft": [dead.pid], "lookahead": [os.getpid()]})
    server = server_of(tmp_path)
    server.notice_file = tmp_path / "gone" / "notice"
    keeper = StubKeeper(server, lambda line: None)
    keeper.start()
    dead.kill()
    dead.wait()
    assert keeper.lost.wait(10.0) and "gone" in keeper.why
    keeper.stop()


class Full(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "no space left on device")])
def test_a_server_goes_on_where_nobody_can_read_what_it_says(error: OSError) -> None:
    serve._tell(Console(file=Full(error)), "the process of draft died")


@pytest.mark.parametrize(("drained", "tritons", "status"), [(True, 0, 0), (True, 143, 0), (False, 0, 1), (False, 137, 1)])
def test_a_drain_that_ran_out_of_time_is_no_success(drained: bool, tritons: int, status: int) -> None:
    """However Triton itself ended: answers were lost."""
    nothing: Any = lambda *_: None  # noqa: E731
    server = SimpleNamespace(options=SimpleNamespace(exit_timeout_s=0), running=True, stop=lambda _: tritons)
    keeper = SimpleNamespace(drain=nothing, drained=drained, stop=nothing, lost=threading.Event(), can_drain=True)
    front = SimpleNamespace(terminate=nothing, stop=nothing, wait=lambda _: 0)
    parts: Any = (server, None, keeper, SimpleNamespace(impatient=False), front)
    assert serve._drain(*parts) == status


@pytest.mark.parametrize("drained", [True, False])
def test_slow_readers_are_waited_for_until_a_second_signal(monkeypatch: pytest.MonkeyPatch, drained: bool) -> None:
    """Where the step loop has answered; else only a moment, for what they wait for never comes."""
    now = Now()
    monkeypatch.setattr(serve, "time", now)
    stop = SimpleNamespace(impatient=False)

    def wait(seconds: float) -> None:
        now.sleep(seconds)
        stop.impatient = now.seconds > 30.0

    nothing: Any = lambda *_: None  # noqa: E731
    server = SimpleNamespace(options=SimpleNamespace(exit_timeout_s=60.0), running=True, stop=lambda _: 0)
    keeper = SimpleNamespace(drain=nothing, drained=drained, stop=nothing, lost=threading.Event(), can_drain=False)
    keeper.lost.set()
    front = SimpleNamespace(terminate=nothing, stop=lambda drain_s: -signal.SIGKILL, wait=wait)
    parts: Any = (server, None, keeper, stop, front)

    assert serve._drain(*parts) == 1
    assert now.seconds == pytest.approx(30.0 if drained else serve._AFTER_DRAIN_S, abs=0.2)


@dataclass
class Now:
    """A clock that only sleeping moves."""

    seconds: float = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_warm_up_that_hangs_is_not_waited_for_once_the_server_is_to_stop_or_a_process_has_died(tmp_path: Path) -> None:
    stop, hangs = SimpleNamespace(event=threading.Event()), threading.Event()
    server = server_of(tmp_path)
    server.log_text = lambda: "killed: out of memory"

    def keeper(*dead: str, why: str = "") -> Any:
        lost = threading.Event()
        if why:
            lost.set()
        return SimpleNamespace(lost=lost, dead=frozenset(dead), why=why)

    def warmed(work: Callable[[], Any], keeper: Any) -> Any:
        return serve._unless_lost(server, keeper, stop, work)  # type: ignore[arg-type]

    assert warmed(lambda: 7, keeper()) == 7
    with pytest.raises(ServerError, match="bad"):
        warmed(fails, keeper())
    for died in (keeper("draft"), keeper("lookahead", why="the process of draft died")):
        with pytest.raises(ServerError, match=r"^the process of draft died, asked for a first answer\nkilled: out of memory$"):
            warmed(hangs.wait, died)
    threading.Timer(0.05, stop.event.set).start()
    assert warmed(hangs.wait, keeper()) is None
    assert warmed(fails, keeper()) is None
    hangs.set()


def fails() -> None:
    raise ServerError("bad")
