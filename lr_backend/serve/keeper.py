"""Watches the processes of a server's Python models, and has Triton start those anew that die.

Triton itself does neither: calls to a model whose process is gone hang, and until 25.12 it stays "ready" (from 26.01 on the
model says that it is not, and from 26.04 on the server). Here its death is known at once.
The step loop is told, so that calls in flight fail and answers end or go on without; then the model is unloaded and loaded, which
starts a new process. What cannot be mended so ends the server, and whoever supervises it starts it anew: a process of the step
loop, whose answers are lost with it, or that stands still, a model that does not load, the loss of too many calls, and a target
that hangs, or fails every call, as one does whose cards have lost each other. Triton keeps a thread of the step loop for each
call that a dead process was to answer. A step loop elsewhere is told nothing, and waits until its connection breaks: so a server
without one ends with the first model that dies.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path

import psutil

from lr_backend.build.render import LOOKAHEAD_MODEL
from lr_backend.notice import MAX_LOOPS, post
from lr_backend.serve.restrictions import HEADER
from lr_backend.serve.server import TritonServer

STUB = "triton_python_backend_stub"
UNLOAD_S = 20.0
"""For Triton to answer to the unload of a dead model. It does at once, and takes the model apart afterwards."""
LOAD_S = 300.0
"""For a model to be loaded anew, where nobody says how long that takes."""
HANG_S, LOOK_S = 30.0, 1.0
"""How long a target may let go of no call, or fail all, while it answers none; how often that is looked at."""
STILL_S = 60.0
"""How long a process of the step loop that has requests may stand still: as one does in which a plug-in waits for the network."""
SUSPENDED_S = 15.0
"""A look that comes so long after the last one says that the machine was suspended."""
STOP_S = 1.0
"""For the thread that looks to end. One that waits for a model to load ends with the server."""


class StubKeeper:
    """To be started once the server is ready. Not for servers that are stopping: stop it first.

    Attributes:
        lost: set where something has died that is not mended in place; ``why`` says what. The keeper goes on
            watching: more may die while the answers in flight come to their end.
    """

    def __init__(self, server: TritonServer, say: Callable[[str], None], load_s: float = LOAD_S) -> None:
        """
        Args:
            say: is told, in a line, of each death and each return.
            load_s: for a model to be loaded anew.
        """
        self._server, self._say, self._load_s = server, say, load_s
        self._watched: dict[int, str] = {}
        """Models by the file descriptors of their processes."""
        self._dead: set[str] = set()
        self._state, self._mending = threading.Lock(), threading.Lock()
        """Of what stands above; and for one model to be loaded at a time, as that takes memory."""
        self._stopped = False
        self._hung: tuple[float, int] | None = None
        """Since when the target hangs, and how many calls it had answered then."""
        self._still: dict[tuple[int, int], float] = {}
        """Of each process of the step loop that has requests, with its last beat: since when no other came."""
        self._looked_s = inf
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self.lost = threading.Event()
        self._hangs, self._has_loop = False, True
        self.why = ""

    def start(self) -> None:
        stubs = stubs_of(self._server.pid)
        self._has_loop = LOOKAHEAD_MODEL in stubs
        for model, pids in stubs.items():
            self._watch(model, pids)
        self._thread.start()

    def drain(self) -> None:
        """Have the step loop take no new requests."""
        self._server.seats.end()

    @property
    def can_drain(self) -> bool:
        """What is in flight can end: the step loop lives, and the target does not hang. Without a loop: another model lives."""
        if self._has_loop:
            return LOOKAHEAD_MODEL not in self._dead and not self._hangs
        with self._state:
            return bool(set(self._watched.values()) - self._dead)

    @property
    def dead(self) -> frozenset[str]:
        """Models whose process died, and that are not back."""
        return frozenset(self._dead)

    @property
    def drained(self) -> bool:
        """The step loop has answered everything, and begins nothing."""
        seats = self._server.seats
        return seats.ending and seats.num_in_flight == 0

    def stop(self) -> None:
        """Watch no more: what dies now dies because it is told to."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread.is_alive():
            os.write(self._woken, b"x")
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            return
        with self._state:
            for descriptor in (*self._watched, self._wake, self._woken):
                os.close(descriptor)
            self._watched.clear()

    def _watch(self, model: str, pids: Iterable[int]) -> None:
        """From the next look on; what has died by then is seen to be dead."""
        for pid in pids:
            self._watched[os.pidfd_open(pid)] = model

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # who is not watched is not mended
            if not self._stopped:
                self._lose(f"what watches the models has failed: {error or type(error).__name__}")

    def _look(self) -> None:
        while True:
            poll = select.poll()
            with self._state:
                looked_at = (self._wake, *self._watched)
            for descriptor in looked_at:
                poll.register(descriptor, select.POLLIN)
            ended = {descriptor for descriptor, _ in poll.poll(1e3 * LOOK_S)}
            if self._wake in ended or not self._server.running:
                return
            self._look_for_suspension()
            self._look_for_hang()
            self._look_for_stillness()
            self._look_for_loss()
            with self._state:
                died = {self._watched.pop(descriptor) for descriptor in ended} - self._dead
            for descriptor in ended:  # only now: a number that is free may be the next process's
                os.close(descriptor)
            if died:
                self._have_died(died)

    def _look_for_suspension(self) -> None:
        """Where this process stood still itself, so did all that it watches."""
        now_s = time.monotonic()
        if now_s - self._looked_s > SUSPENDED_S:
            self._hung = None
            self._still.clear()
        self._looked_s = now_s

    def _look_for_hang(self) -> None:
        seats, now_s = self._server.seats, time.monotonic()
        if not seats.num_hung:
            self._hung = None
        elif self._hung is None or seats.num_answered > self._hung[1]:
            self._hung = now_s, seats.num_answered
        elif now_s - self._hung[0] > HANG_S:
            self._hangs = True
            self._lose(f"the target hangs: for {HANG_S:g} s it has answered no call, and let go of none or failed all")

    def _look_for_stillness(self) -> None:
        seats, now_s = self._server.seats, time.monotonic()
        beats = ((loop, seat.num_beats) for loop, seat in enumerate(map(seats.seat, range(MAX_LOOPS))) if seat.num_in_flight)
        self._still = {beat: self._still.get(beat, now_s) for beat in beats}
        if any(now_s - since_s > STILL_S for since_s in self._still.values()):
            self._hangs = True
            self._lose(f"a process of the step loop with requests stands still: for {STILL_S:g} s it has done nothing")

    def _look_for_loss(self) -> None:
        num_lost = self._server.seats.most_lost
        # While a model is started anew, what was asked of it just before its death is known may still be answered.
        if not self._dead and 2 * num_lost >= self._server.options.thread_pool_size:
            self._lose(f"{num_lost} calls were lost, half of what a process of the step loop may have in flight")

    def _have_died(self, models: set[str]) -> None:
        """Say so at once, and mend them meanwhile: others may die, or hang, before they are back."""
        with self._state:
            self._dead |= models
            post(self._server.notice_file, self._dead)
        if LOOKAHEAD_MODEL in models:
            self._lose("a process of the step loop died")
        elif not self._has_loop:
            self._lose(told_dead(models))
        if self.lost.is_set():
            return
        for model in sorted(models):
            threading.Thread(target=self._mend, args=(model,), name=f"keeper of {model}", daemon=True).start()
            self._say(f"the process of {model} died; it is started anew")

    def _mend(self, model: str) -> None:
        try:
            with self._mending:
                for verb, limit_s in (("unload", UNLOAD_S), ("load", self._load_s)):
                    if self._stopped:  # meanwhile; the server may be gone
                        return
                    self._call(f"{model}/{verb}", limit_s)
            pids = stubs_of(self._server.pid)[model]
            with self._state:
                if self._stopped:
                    return
                self._watch(model, pids)
                self._dead.discard(model)
                post(self._server.notice_file, self._dead)
        except (OSError, http.client.HTTPException, psutil.Error, KeyError) as error:
            if not self._stopped:
                self._lose(f"the process of {model} died and cannot be started anew: {error or type(error).__name__}")
            return
        self._say(f"{model} is back")

    def _lose(self, why: str) -> None:
        if not self.lost.is_set():  # what dies later dies of it, or with it
            self.why = why
        self.lost.set()

    def _call(self, verb: str, timeout_s: float) -> None:
        """Raises: OSError: Triton refuses, or takes too long."""
        host, port = self._server.http_url.rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
        try:
            headers = {HEADER: self._server.admin_key, "Connection": "close"}
            connection.request("POST", f"/v2/repository/models/{verb}", json.dumps({}), headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}: {text[:200]}")


def told_dead(models: Iterable[str]) -> str:
    """What is said of models whose processes have died."""
    return f"the process of {' and '.join(sorted(models))} died"


def stubs_of(pid: int | None) -> dict[str, list[int]]:
    """Process ids of a server's Python models, by model: one for each of its instances. ``pid``: the server's, or above it."""
    found: dict[str, list[int]] = {}
    if pid is None:
        return found
    for process in psutil.Process(pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:  # it has just ended
            continue
        if words and Path(words[0]).name == STUB:
            found.setdefault(Path(words[1]).parents[1].name, []).append(process.pid)
    return found
