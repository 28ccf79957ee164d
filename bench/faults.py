"""What bad luck and bad clients do to a served deployment: processes killed, the server told to end, storms of every kind.

``lookahead serve`` runs as a process of its own under a small supervisor, which starts it anew when it ends by itself. Clients
ask all the while. A request counts as served, as refused or failed with one of the client's typed errors, or as hung.
``recovery`` is the time from a fault to the end of the first answer that all three models took part in; ``longest`` that of
any request.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from lr_client import AsyncClient, Options, Overloaded, ServerUnreachable
from rich.table import Table

from bench.kit.crowd import NUM_CLIENTS, Crowd, Ended, ask, crowd
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.stand import START_S, Stand, proxied, standing
from lr_backend.build.base import Layout

REFUSED = (Overloaded.__name__, ServerUnreachable.__name__)
"""Of which a proxy asks the next server: nothing was started."""
MODES = ("ar", "sd", "lr", "lr_sd", "auto")
NUM_PROCESSES = 3
"""Of many clients."""
LARGE_MEGABYTES = 50
SPARED = ("draft", "judge")
"""Without which the server stays ready: the target answers alone."""


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


# Clients -----------------------------------------------------------------------------------------------------------


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
    waited_s, unready_s = 0.0, 0.0
    async with crowd(stand.url, ended):
        for _ in range(tries):
            await until(lambda: any(one.kind == "served" and not one.degraded for one in ended))
            victim, killed_s = stand.victim(name), time.monotonic()
            victim.kill()
            if name not in SPARED:
                await asyncio.to_thread(stand.wait_unready)
                unready_s = max(unready_s, time.monotonic() - killed_s)

            def whole(since_s: float = killed_s) -> list[Ended]:
                late = [one for one in ended if one.start_s > since_s + 0.2 and one.kind == "served" and not one.degraded]
                return late if stand.output.exists() else []

            if await until(lambda: bool(whole())):  # awaited within this turn
                recoveries.append(min(one.end_s for one in whole()) - killed_s)
            in_flight = [one.end_s - killed_s for one in ended if one.start_s < killed_s < one.end_s]
            waited_s = max(waited_s, *in_flight, 0.0)
            await asyncio.sleep(1.0)
    told = f"in flight ended within {waited_s:.1f} s"
    told += "" if name in SPARED else f", not ready within {unready_s:.1f} s"
    told += "" if len(recoveries) == tries else f", {tries - len(recoveries)} times not back within {START_S:g} s"
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


async def overloaded(stand: Stand, url: str, num_clients: int, seconds: float) -> Row:
    """Many more clients than are admitted."""
    crowds = (Crowd(url, num_clients // NUM_PROCESSES, seconds).ended() for _ in range(NUM_PROCESSES))
    ended = [one for found in await asyncio.gather(*crowds) for one in found]
    refused = [one.end_s - one.start_s for one in ended if one.kind in (Overloaded.__name__, "overloaded")]
    told = f"refused in {_ms(refused, 0.5)} (median), {_ms(refused, 0.99)} (p99)" if refused else "nobody refused"
    return Row.of(stand.layout, f"{num_clients} clients{_door(url)}", 1, ended, None, told)


async def large_prompts(stand: Stand, url: str, megabytes: int, seconds: float) -> Row:
    """Prompts of many megabytes beside good requests, whose times are compared with those without."""
    good, large = Crowd(url, 2, seconds), Crowd(url, 2, seconds, megabytes)
    before = await good.ended()
    during, refused = await asyncio.gather(good.ended(), large.ended())
    taken = [float(np.quantile([one.end_s - one.start_s for one in each], 0.99)) for each in (before, during)]
    told = f"p99 of good ones {taken[0]:.2f} s without, {taken[1]:.2f} s beside {len(refused)}"
    return Row.of(stand.layout, f"prompts of {megabytes} MB{_door(url)}", 1, [*before, *during, *refused], None, told)


def _door(url: str) -> str:
    return ", OpenAI API" if url.startswith("http") else ", gRPC"


def _ms(seconds: list[float], quantile: float) -> str:
    return f"{1e3 * float(np.quantile(seconds, quantile)):.0f} ms"


async def restarted(stands: Sequence[Stand], folder: Path, tries: int) -> Row:
    """Servers behind a proxy are told to end one after the other, and started anew, while clients ask the proxy."""
    ended: list[Ended] = []
    with proxied(folder, stands) as url:
        async with crowd(url, ended):
            for stand in [*stands] * tries:
                num_before = len(stand.statuses)
                stand.terminate()
                await until(lambda stand=stand, num=num_before: len(stand.statuses) > num)  # type: ignore[misc]
                await asyncio.to_thread(stand.wait_served)
    failed = sum(one.kind != "served" for one in ended)
    return Row.of("two servers", "rolling restart behind nginx", tries, ended, None, f"{failed} failed")


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
    for url in (stand.openai_url, stand.url):
        await note(overloaded(stand, url, 300, seconds))
        await note(large_prompts(stand, url, LARGE_MEGABYTES, seconds))
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
    if shutil.which("nginx"):
        with ExitStack() as held:
            folders = [Path(held.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-faults-"))) for _ in range(2)]
            pairs = [held.enter_context(standing(Layout.ONE_PROCESS, folder)) for folder in folders]
            row = asyncio.run(restarted([stand for stand, _ in pairs], folders[0], tries))
        rows.append(row)
        say(row)
        left += [name for _, remains in pairs for name in remains]
    else:
        console.print("[yellow]no nginx here: the rolling restart is left out[/]")
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
