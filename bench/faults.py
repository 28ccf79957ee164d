"""What bad luck and bad clients do to a served deployment: processes killed, the server told to end, storms of every kind.

``lookahead serve`` runs as a process of its own under a small supervisor, which starts it anew when it ends by itself. Clients
ask all the while. A request counts as served, as refused or failed with one of the client's typed errors, or as hung.
``recovery`` is the time from a fault to the end of the first answer that all three models took part in; ``longest`` that of
any request.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from lr_client import AsyncClient, ClientError, Options, Overloaded, RequestTimeout, ServerError, ServerUnreachable
from rich.table import Table

from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import demo_spec
from lr_backend.build.base import Layout
from lr_backend.serve.warmup import QUESTION

START_S = 180.0
HUNG_S = 60.0
"""A request without an end for so long has hung."""
NUM_CLIENTS = 8
PAUSE_S = 0.5
"""Before a client that was refused or failed asks again."""
REFUSED = (Overloaded.__name__, ServerUnreachable.__name__)
"""Of which a proxy asks the next server: nothing was started."""
MODES = ("ar", "sd", "lr", "lr_sd", "auto")
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Ended:
    """One request. ``kind``: ``served``, a typed error's name, ``untyped`` or ``hung``."""

    start_s: float
    end_s: float
    kind: str
    degraded: bool = False
    text: str = ""


@dataclass(frozen=True)
class Row:
    """What one fault came to; times are the longest over its tries."""

    layout: str
    fault: str
    tries: int
    requests: int
    served: int
    typed_errors: int
    untyped_errors: int
    hangs: int
    recovery_s: float | None
    longest_s: float
    told: str = ""

    @classmethod
    def of(cls, layout: str, fault: str, tries: int, ended: list[Ended], recovery_s: float | None = None, told: str = "") -> Row:
        kinds = Counter(one.kind for one in ended)
        served, untyped, hung = kinds.pop("served", 0), kinds.pop("untyped", 0), kinds.pop("hung", 0)
        errors = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        longest_s = max((one.end_s - one.start_s for one in ended), default=0.0)
        told = "; ".join(filter(None, (told, errors)))
        return cls(layout, fault, tries, len(ended), served, sum(kinds.values()), untyped, hung, recovery_s, longest_s, told)


@dataclass
class Stand:
    """A deployment served by ``lookahead serve``, which a supervisor starts anew when it ends by itself."""

    layout: Layout
    folder: Path
    grpc_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    statuses: list[int] = field(default_factory=list)
    _stopping: bool = False
    _supervisor: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.layout}.out"

    def start(self) -> None:
        self.grpc_port = free_port()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()
        self.wait_served()

    def wait_served(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.output.exists() or "ask it something" not in self.output.read_text(encoding="utf-8"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not served within {START_S:g} s: {self.output.read_text(encoding='utf-8')}")
            time.sleep(0.2)

    def stop(self) -> None:
        self._stopping = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
        if self._supervisor is not None:
            self._supervisor.join(START_S)

    def terminate(self) -> None:
        """Tell it to end, as an orchestrator does before it starts the next."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def victim(self, name: str) -> psutil.Process:
        """The process of a model, or the server's."""
        assert self.process is not None
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = each.cmdline()
                program = Path(words[0]).name if words else ""
                if program == name or (program.endswith("_stub") and Path(words[1]).parents[1].name == name):
                    return each
        raise RuntimeError(f"{name} is not running")

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def _supervise(self) -> None:
        command = [str(Path(sys.executable).with_name("lookahead")), "serve", "--spec", str(self._spec())]
        command += ["--http-port", "0", "--metrics-port", "0", "--openai-port", "0", "--grpc-port", str(self.grpc_port)]
        while not self._stopping:
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
                self.statuses.append(self.process.wait())

    def _spec(self) -> Path:
        """The demo's spec in this layout, in a folder of its own."""
        spec = demo_spec()
        text = spec.path.read_text(encoding="utf-8").replace(f'layout = "{spec.server.layout}"', f'layout = "{self.layout}"')
        for role in ("target", "draft", "judge"):
            text = text.replace(f'"demo/checkpoints/{role}"', json.dumps(str(spec.root / "demo" / "checkpoints" / role)))
        path = self.folder / "engines" / f"{self.layout}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace('name = "demo"', f'name = "demo.{self.layout}"'), encoding="utf-8")
        return path


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


# Clients -----------------------------------------------------------------------------------------------------------


async def ask(client: AsyncClient, options: Options, question: str = QUESTION) -> Ended:
    """One request, however it ends."""
    start_s, kind, text, degraded = time.monotonic(), "served", "", False
    try:
        result = await client.ask(question, options, timeout_s=HUNG_S)
        text, degraded = result.text, bool(result.usage.degraded)
    except RequestTimeout:
        kind = "hung"
    except ServerError as error:
        kind = type(error).__name__ if error.code else "untyped"
    except ClientError as error:
        kind = type(error).__name__
    except asyncio.CancelledError:
        kind = "cancelled by the client"
    return Ended(start_s, time.monotonic(), kind, degraded, text)


@asynccontextmanager
async def crowd(url: str, ended: list[Ended], num_clients: int = NUM_CLIENTS, **fields: object) -> AsyncIterator[None]:
    """Clients that ask one question after another; when the block ends, their last ones are awaited."""
    stop = asyncio.Event()
    numbers = iter(range(10**9))

    async def one(client: AsyncClient) -> None:
        while not stop.is_set():
            options = Options(**{"mode": "lr", "stream": False, "max_tokens": 96, "seed": next(numbers), **fields})  # type: ignore[arg-type]
            ended.append(await ask(client, options))
            if ended[-1].kind != "served":
                await asyncio.sleep(PAUSE_S)

    async with AsyncExitStack() as held:
        clients = [await held.enter_async_context(AsyncClient(url)) for _ in range(min(num_clients, NUM_CLIENTS))]
        tasks = [asyncio.create_task(one(clients[index % NUM_CLIENTS])) for index in range(num_clients)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


async def until(reached: Callable[[], bool], timeout_s: float = START_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


# Faults ------------------------------------------------------------------------------------------------------------


async def killed(stand: Stand, name: str, tries: int) -> Row:
    """kill -9 of one process under load."""
    ended: list[Ended] = []
    recoveries: list[float] = []
    async with crowd(stand.url, ended):
        for _ in range(tries):
            await until(lambda: any(one.kind == "served" and not one.degraded for one in ended))
            victim, killed_s = stand.victim(name), time.monotonic()
            victim.kill()

            def whole(since_s: float = killed_s) -> list[Ended]:
                late = [one for one in ended if one.start_s > since_s + 0.2 and one.kind == "served" and not one.degraded]
                return late if stand.output.exists() else []

            if await until(lambda: bool(whole())):  # awaited within this turn
                recoveries.append(min(one.end_s for one in whole()) - killed_s)
            await asyncio.sleep(1.0)
    told = "" if len(recoveries) == tries else f"{tries - len(recoveries)} times not back within {START_S:g} s"
    return Row.of(stand.layout, f"kill -9 {name}", tries, ended, max(recoveries, default=None), told)


async def drained(stand: Stand, tries: int) -> Row:
    """SIGTERM under load: what is in flight is answered, and the status is 0."""
    ended: list[Ended] = []
    lost, statuses = 0, []
    for _ in range(tries):
        seen: list[Ended] = []
        async with crowd(stand.url, seen):
            await until(lambda seen=seen: len(seen) >= 2 * NUM_CLIENTS)  # type: ignore[misc]
            num_before, told_s = len(stand.statuses), time.monotonic()
            stand.terminate()
            await until(lambda num=num_before: len(stand.statuses) > num)  # type: ignore[misc]
        statuses.append(stand.statuses[-1])
        lost += sum(one.start_s < told_s < one.end_s and one.kind not in ("served", *REFUSED) for one in seen)
        ended += seen
        await asyncio.to_thread(stand.wait_served)
    return Row.of(stand.layout, "SIGTERM", tries, ended, None, f"{lost} lost in flight, status {max(statuses)}")


async def cancelled(stand: Stand, num: int) -> Row:
    """Half of many requests at once are cancelled at random; the others' answers are those of a quiet server."""
    random.seed(1)
    options = [Options(mode=MODES[index % 4], stream=False, max_tokens=64, seed=index, deterministic=True) for index in range(8)]
    async with AsyncClient(stand.url) as client:
        alone = [(await ask(client, one)).text for one in options]

        async def one(index: int) -> Ended:
            task = asyncio.create_task(ask(client, options[index % len(options)]))
            if index % 2:
                await asyncio.sleep(random.random() * 2.0)
                task.cancel()
            return await task

        found: list[Ended] = []
        for start in range(0, num, 56):  # below the admission limit: all are to be served
            found += await asyncio.gather(*(one(index) for index in range(start, min(num, start + 56))))
        changed = sum(each.kind == "served" and each.text != alone[index % len(alone)] for index, each in enumerate(found))
    return Row.of(stand.layout, "half cancelled", 1, found, None, f"{changed} answers changed")


async def overloaded(stand: Stand, num_clients: int, seconds: float) -> Row:
    """Many more clients than are admitted."""
    ended: list[Ended] = []
    async with crowd(stand.url, ended, num_clients):
        await asyncio.sleep(seconds)
    refused = [one.end_s - one.start_s for one in ended if one.kind == Overloaded.__name__]
    told = f"refused in {1e3 * float(np.median(refused)):.0f} ms (median)" if refused else "nobody refused"
    return Row.of(stand.layout, f"{num_clients} clients", 1, ended, None, told)


async def large_prompts(stand: Stand, megabytes: int, seconds: float) -> Row:
    """Prompts of many megabytes beside good requests, whose times are compared with those without."""

    async def good() -> list[Ended]:
        found: list[Ended] = []
        async with crowd(stand.url, found, 2):
            await asyncio.sleep(seconds)
        return found

    before = await good()
    stop = asyncio.Event()

    async def bad() -> list[Ended]:
        found = []
        async with AsyncClient(stand.url) as client:
            while not stop.is_set():
                found.append(await ask(client, Options(stream=False), "a" * (megabytes << 20)))
        return found

    storm = [asyncio.create_task(bad()) for _ in range(2)]
    during = await good()
    stop.set()
    large = [one for each in storm for one in await each]
    taken = [np.quantile([one.end_s - one.start_s for one in each], 0.99) for each in (before, during)]
    told = f"p99 of good ones {taken[0]:.2f} s without, {taken[1]:.2f} s beside {len(large)}"
    return Row.of(stand.layout, f"prompts of {megabytes} MB", 1, [*before, *during, *large], None, told)


async def mixed(stand: Stand, num: int) -> tuple[Row, float]:
    """Requests of every kind, and how much memory each process keeps of one: bytes a request, the largest slope."""
    random.seed(2)
    pids = {process.pid for process in stand.family()}
    samples: list[tuple[int, dict[int, int]]] = []
    ended: list[Ended] = []

    async def one(client: AsyncClient, index: int) -> None:
        fields: dict[str, object] = {"mode": MODES[index % len(MODES)], "stream": False, "max_tokens": 32, "seed": index}
        if index % 10 == 7:
            fields["temperature"] = -1.0
        task = asyncio.create_task(ask(client, Options(**fields)))  # type: ignore[arg-type]
        if index % 10 == 3:
            await asyncio.sleep(random.random() * 0.2)
            task.cancel()
        ended.append(await task)

    async with AsyncClient(stand.url) as client:
        for start in range(0, num, 16):
            await asyncio.gather(*(one(client, index) for index in range(start, min(num, start + 16))))
            samples.append((len(ended), {pid: psutil.Process(pid).memory_info().rss for pid in pids}))
    warm = samples[len(samples) // 3 :]
    counts = [count for count, _ in warm]
    slopes = [float(np.polyfit(counts, [rss[pid] for _, rss in warm], 1)[0]) for pid in pids]
    return Row.of(stand.layout, "requests of every kind", 1, ended, None, f"{max(slopes):.0f} bytes a request stay"), max(slopes)


@contextmanager
def standing(layout: Layout, folder: Path) -> Iterator[tuple[Stand, list[str]]]:
    """A stand, and after it what it has left behind: processes, and names in shared memory."""
    left: list[str] = []
    before = set(os.listdir(SHM))
    stand = Stand(layout, folder)
    stand.start()
    family = stand.family()
    try:
        yield stand, left
    finally:
        family += stand.family() if stand.process is not None and stand.process.poll() is None else []
        stand.stop()
        _, alive = psutil.wait_procs(family, timeout=10.0)
        left += [f"process {process.pid}" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        left += orphaned(set(os.listdir(SHM)) - before)


def orphaned(names: Collection[str]) -> list[str]:
    """Names in shared memory of servers that run no more; they begin with the server's id."""
    words = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or ()]
    running = {word.removeprefix("--id=") for word in words if word.startswith("--id=")}
    return [name for name in names if name.startswith("lookahead_") and name.rpartition("_")[0] not in running]


async def all_of(
    stand: Stand, tries: int, num_requests: int, seconds: float, say: Callable[[Row], None]
) -> tuple[list[Row], float]:
    rows: list[Row] = []

    async def note(row: Awaitable[Row]) -> None:
        rows.append(await row)
        say(rows[-1])

    victims = ["lookahead", "tritonserver"]
    if stand.layout is Layout.PROCESS_A_ROLE:
        victims = ["draft", "judge", "target", *victims]
    row, slope = await mixed(stand, num_requests)
    rows.append(row)
    say(row)
    await note(cancelled(stand, 200))
    await note(overloaded(stand, 300, seconds))
    await note(large_prompts(stand, 20, seconds))
    for name in victims:
        await note(killed(stand, name, tries))
    await note(drained(stand, tries))
    return rows, slope


def main(
    tries: Annotated[int, typer.Option(min=1, help="How often each process is killed, and the server told to end.")] = 5,
    num_requests: Annotated[int, typer.Option("--requests", min=48, help="To see what memory stays.")] = 2000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of overload, and of large prompts.")] = 10.0,
    layouts: Annotated[list[Layout] | None, typer.Option("--layout", help="By default both.")] = None,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "faults.json",
) -> None:
    """Print a table, and one JSON line."""
    console = console_of_any_width()
    headings = "layout|fault|tries|requests|served|typed|untyped|hung|recovery s|longest s|told"
    table = Table(*headings.split("|"), title="faults under load, the demo's models, on this machine")
    rows: list[Row] = []
    slopes, left = [], []

    def say(row: Row) -> None:
        console.print(f"[dim]{row.layout}: {row.fault}: {row.served} of {row.requests} served; {row.told}[/]", soft_wrap=True)

    for layout in layouts or list(Layout):
        with (
            tempfile.TemporaryDirectory(prefix="lookahead-faults-") as folder,
            standing(layout, Path(folder)) as (stand, remains),
        ):
            found, slope = asyncio.run(all_of(stand, tries, num_requests, seconds, say))
        rows += found
        slopes.append(slope)
        left += remains
    for row in rows:
        recovery = "" if row.recovery_s is None else f"{row.recovery_s:.1f}"
        counts = (row.tries, row.requests, row.served, row.typed_errors, row.untyped_errors, row.hangs)
        table.add_row(row.layout, row.fault, *map(str, counts), recovery, f"{row.longest_s:.1f}", row.told)
    console.print(table)
    result = {
        "requests": sum(row.requests for row in rows),
        "hangs": sum(row.hangs for row in rows),
        "untyped_errors": sum(row.untyped_errors for row in rows),
        "leaked_bytes_per_request": round(max(slopes)),
        "orphans": len(left),
        "largest_stall_s": round(max(row.longest_s for row in rows), 2),
    }
    write_json(output, {**result, "rows": [asdict(row) for row in rows], "left": left})
    print_line(console, result)


if __name__ == "__main__":
    typer.run(main)
