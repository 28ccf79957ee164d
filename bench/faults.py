"""What bad luck and bad clients do to a served deployment: processes killed, the server told to end, storms of every kind.

``lookahead serve`` runs as a process of its own under a small supervisor, which starts it anew when it ends by itself. Clients
ask all the while. A request counts as served, as cancelled by its client, as refused or failed with one of the client's typed
errors, or as hung.
``recovery`` is the time from a fault to the end of the first answer that all three models took part in; ``longest`` that of
any request. Every row is held against what docs/reliability.md promises; what it misses is said, and the exit status is 1.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from lr_client import AsyncClient, Options, Overloaded, ServerUnreachable
from rich.table import Table

from bench.kit.crowd import CANCELLED, NUM_CLIENTS, Asking, Crowd, Ended, ask, asking, crowd
from bench.kit.held import Held, Kept
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import START_S
from bench.kit.stand import Stand, proxied, standing
from lr_backend.build.base import Layout
from lr_backend.serve.warmup import QUESTION

ARRIVING_S = 0.2
"""A request that is sent so shortly before SIGTERM may find nobody. One that was sent earlier and loses its server is lost."""
MODES = ("ar", "sd", "lr", "lr_sd", "auto")
NUM_PROCESSES = 3
"""Of many clients."""
NUM_CROWDED = 300
LARGE_MEGABYTES = 50
SPARED = ("draft", "judge")
"""Without which the server stays ready: the target answers alone."""
MAX_DEATH_S = 2.0
"""From a death to the end of what was in flight, and to the end of readiness."""
MAX_SLOWDOWN = 1.5
"""Of the p99 of good requests beside large prompts."""
CANCEL_SHARE, LEAST_CANCELLED = 0.8, 1 / 3
"""Of an answer's time, and of all requests, of which half are to be cancelled."""
SHORT_S = 10.0
"""Of load whose length tells nothing."""


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
    longest_s: float
    cancelled: int = 0
    """By the client, which is no error."""
    recovery_s: float | None = None
    told: str = ""
    missed: tuple[str, ...] = ()
    """Promises that did not hold."""

    @classmethod
    def of(cls, layout: str, fault: str, tries: int, ended: list[Ended], **more: Any) -> Row:
        """``more``: the last three attributes; promises about the requests themselves are looked at here."""
        kinds = Counter(one.kind for one in ended)
        served, untyped, hung = kinds.pop("served", 0), kinds.pop("untyped", 0), kinds.pop("hung", 0)
        errors = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        more["cancelled"] = kinds.pop(CANCELLED, 0)
        longest_s = max((one.end_s - one.start_s for one in ended), default=0.0)
        without = ", ".join(sorted({one.text for one in ended if one.kind == "untyped"}))
        more["told"] = "; ".join(filter(None, (more.get("told", ""), errors, without)))
        more["missed"] = (*more.get("missed", ()), *broken(nobody_served=not served, untyped=untyped, hung=hung))
        return cls(layout, fault, tries, len(ended), served, sum(kinds.values()), untyped, hung, longest_s, **more)


def broken(**promises: float) -> tuple[str, ...]:
    """The names of those that are not 0, as one reads them."""
    return tuple(f"{name.replace('_', ' ')}: {value:.3g}" for name, value in promises.items() if value)


def over(value: float, most: float) -> float:
    """The value where it is over its bound; else 0."""
    return value if value > most else 0.0


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
    deaths: list[float] = []
    recoveries: list[float] = []
    unready_s = 0.0
    async with crowd(stand.url, ended):
        for _ in range(tries):
            await until(lambda: any(one.whole for one in ended) and stand.victim(name) is not None)
            victim = stand.victim(name)
            assert victim is not None, f"{name} is not running"
            deaths.append(time.monotonic())
            victim.kill()
            if name not in SPARED:
                await asyncio.to_thread(stand.wait_unready)
                unready_s = max(unready_s, time.monotonic() - deaths[-1])

            def whole(since_s: float = deaths[-1]) -> list[Ended]:
                return [one for one in ended if one.start_s > since_s and one.whole]

            if await until(lambda: bool(whole())):  # awaited within this turn
                recoveries.append(min(one.end_s for one in whole()) - deaths[-1])
            await asyncio.sleep(1.0)
    cut_off = [one for one in ended if one.kind != "served"]
    waits = [one.end_s - death_s for death_s in deaths for one in cut_off if one.start_s < death_s < one.end_s]
    waited_s, lost = max(waits, default=0.0), tries - len(recoveries)
    told = f"cut off within {waited_s:.1f} s" if waits else "nothing cut off"
    told += "" if name in SPARED else f", not ready within {unready_s:.1f} s"
    missed = broken(s_to_an_error=over(waited_s, MAX_DEATH_S), s_ready=over(unready_s, MAX_DEATH_S), times_not_back=lost)
    recovery_s = max(recoveries, default=None)
    return Row.of(stand.layout, f"kill -9 {name}", tries, ended, recovery_s=recovery_s, told=told, missed=missed)


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
        lost += sum(is_lost(one, told_s) for one in seen)
        ended += seen
        await asyncio.to_thread(stand.wait_served)
    missed = broken(lost_in_flight=lost, status=max(statuses))
    told = f"{lost} lost in flight, status {max(statuses)}"
    return Row.of(stand.layout, "SIGTERM", tries, ended, told=told, missed=missed)


def is_lost(one: Ended, told_s: float) -> bool:
    """It was in flight when its server was told to end, and was neither answered nor refused before it was begun."""
    if not one.start_s < told_s < one.end_s or one.kind in ("served", Overloaded.__name__):
        return False
    return one.kind != ServerUnreachable.__name__ or told_s - one.start_s > ARRIVING_S


async def cancelled(stand: Stand, num: int) -> Row:
    """Half of many requests at once are cancelled while they are answered; the others' answers are those of a quiet server.

    A cancel comes within :data:`CANCEL_SHARE` of the time that the same answer takes alone, so that few answers end before it.
    """
    random.seed(1)
    options = [Options(mode=MODES[index % 4], stream=False, max_tokens=64, seed=index, deterministic=True) for index in range(8)]
    async with AsyncClient(stand.url) as client:
        alone = [await ask(client, one) for one in options]

        async def one(index: int) -> Ended:
            task = asyncio.create_task(ask(client, options[index % len(options)]))
            if index % 2:
                quiet = alone[index % len(alone)]
                await asyncio.sleep(random.random() * CANCEL_SHARE * (quiet.end_s - quiet.start_s))
                task.cancel()
            return await task

        found: list[Ended] = []
        for start in range(0, num, 56):  # below the admission limit: all are to be served
            found += await asyncio.gather(*(one(index) for index in range(start, min(num, start + 56))))
        changed = sum(each.kind == "served" and each.text != alone[index % len(alone)].text for index, each in enumerate(found))
    num_cancelled = sum(each.kind == CANCELLED for each in found)
    too_early = num // 2 - num_cancelled if num_cancelled < LEAST_CANCELLED * num else 0
    told, missed = f"{changed} answers changed", broken(answers_changed=changed, ended_before_their_cancel=too_early)
    return Row.of(stand.layout, "half cancelled", 1, found, told=told, missed=missed)


async def overloaded(stand: Stand, url: str, seconds: float) -> Row:
    """Many more clients than are admitted."""
    crowds = (Crowd(url, NUM_CROWDED // NUM_PROCESSES, seconds).ended() for _ in range(NUM_PROCESSES))
    ended = [one for found in await asyncio.gather(*crowds) for one in found]
    refused = [one.end_s - one.start_s for one in ended if one.kind in (Overloaded.__name__, "overloaded")]
    told = f"refused in {_ms(refused, 0.5)} (median), {_ms(refused, 0.99)} (p99)" if refused else "nobody refused"
    missed = broken(nobody_refused=not refused)
    return Row.of(stand.layout, f"{NUM_CROWDED} clients{_door(url)}", 1, ended, told=told, missed=missed)


async def large_prompts(stand: Stand, url: str, seconds: float) -> Row:
    """Prompts of many megabytes beside good requests, whose times are compared with those without."""
    good, large = Crowd(url, 2, seconds), Crowd(url, 2, seconds, LARGE_MEGABYTES)
    before = await good.ended()
    during, refused = await asyncio.gather(good.ended(), large.ended())
    served = [[one.end_s - one.start_s for one in each if one.kind == "served"] for each in (before, during)]
    taken = [float(np.quantile(each, 0.99)) for each in served]
    num_refused = len(before) + len(during) - sum(map(len, served))
    told = f"p99 of good ones {taken[0]:.2f} s without, {taken[1]:.2f} s beside {len(refused)}"
    # Triton reads a body of any size before a model sees it, so the promise is the OpenAI API's.
    slower = over(taken[1] / taken[0], MAX_SLOWDOWN)
    missed = broken(times_slower=slower, good_not_served=num_refused) if url == stand.openai_url else ()
    ended = [*before, *during, *refused]
    return Row.of(stand.layout, f"prompts of {LARGE_MEGABYTES} MB{_door(url)}", 1, ended, told=told, missed=missed)


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
    num_restarts = sum(status == 0 for stand in stands for status in stand.statuses)
    told, missed = f"{failed} failed", broken(failed=failed, not_restarted=max(0, len(stands) * tries - num_restarts))
    return Row.of("two servers", "rolling restart behind nginx", tries, ended, told=told, missed=missed)


async def mixed(stand: Stand, num: int) -> tuple[Row, Kept]:
    """Requests of every kind by both ports, and what the processes keep of them."""
    random.seed(2)
    samples: list[tuple[int, dict[int, Held]]] = []
    ended: list[Ended] = []

    async def one(ask_it: Asking, index: int) -> None:
        temperature = -1.0 if index % 10 == 7 else None
        options = Options(mode=MODES[index % len(MODES)], stream=False, max_tokens=32, seed=index, temperature=temperature)
        task: asyncio.Task[Ended] = asyncio.ensure_future(ask_it(options, QUESTION))
        if index % 10 == 3:
            await asyncio.sleep(random.random() * 0.2)
            task.cancel()
        ended.append(await task)

    async with asking(stand.url) as triton, asking(stand.openai_url) as openai:
        for start in range(0, num, 16):
            await asyncio.gather(*(one((triton, openai)[index // 8 % 2], index) for index in range(start, min(num, start + 16))))
            samples.append((len(ended), {process.pid: Held.of(process) for process in stand.family()}))
        await until(lambda: not stand.blocks_held())
    kept = Kept.of(samples, stand.blocks_held())
    return Row.of(stand.layout, "requests of every kind", 1, ended, told=kept.told, missed=kept.missed), kept


async def all_of(stand: Stand, tries: int, num_requests: int, seconds: float, note: Callable[[Row], None]) -> Kept:
    """Every fault in turn; ``note`` is told each row as soon as it is known."""
    victims = ["frontend", "lookahead", "tritonserver"]
    if stand.layout is Layout.PROCESS_A_ROLE:
        victims = ["draft", "judge", "target", *victims]
    row, kept = await mixed(stand, num_requests)
    note(row)
    note(await cancelled(stand, 200))
    note(await overloaded(stand, stand.openai_url, seconds))
    note(await overloaded(stand, stand.url, min(seconds, SHORT_S)))
    for url in (stand.openai_url, stand.url):
        note(await large_prompts(stand, url, min(seconds, SHORT_S)))
    for name in victims:
        note(await killed(stand, name, tries))
    note(await drained(stand, tries))
    return kept


def main(
    tries: Annotated[int, typer.Option(min=1, help="How often each process is killed, and the server told to end.")] = 5,
    num_requests: Annotated[int, typer.Option("--requests", min=48, help="To see what memory stays.")] = 20_000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of overload at the OpenAI API.")] = 180.0,
    layouts: Annotated[list[Layout] | None, typer.Option("--layout", help="By default both.")] = None,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "faults.json",
) -> None:
    """Print a table, and one JSON line.

    Raises:
        Exit: with status 1, if a promise was missed.
    """
    console = console_of_any_width()
    rows: list[Row] = []
    kept: list[Kept] = []
    left: list[str] = []

    def note(row: Row) -> None:
        rows.append(row)
        told = "; ".join(filter(None, (row.told, *(f"[bold red]{what}[/]" for what in row.missed))))
        console.print(f"[dim]{row.layout}: {row.fault}: {row.served} of {row.requests} served; {told}[/]", soft_wrap=True)

    for layout in layouts or list(Layout):
        with tempfile.TemporaryDirectory(prefix="lookahead-faults-") as folder:
            with standing(layout, Path(folder)) as (stand, remains):
                kept.append(asyncio.run(all_of(stand, tries, num_requests, seconds, note)))
            left += remains
    if shutil.which("nginx"):
        with ExitStack() as held:
            folders = [Path(held.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-faults-"))) for _ in range(2)]
            pairs = [held.enter_context(standing(Layout.ONE_PROCESS, folder)) for folder in folders]
            note(asyncio.run(restarted([stand for stand, _ in pairs], folders[0], tries)))
        left += [each for _, remains in pairs for each in remains]
    else:
        console.print("[yellow]no nginx here: the rolling restart is left out[/]")
    console.print(table_of(rows))
    result = {
        "requests": sum(row.requests for row in rows),
        "hangs": sum(row.hangs for row in rows),
        "untyped_errors": sum(row.untyped_errors for row in rows),
        "leaked_bytes_per_request": round(max(one.bytes_a_request for one in kept)),
        "orphans": len(left),
        "largest_stall_s": round(max(row.longest_s for row in rows), 2),
        "missed": sum(len(row.missed) for row in rows),
    }
    memory = [dict(one.bytes_by_process) for one in kept]
    write_json(output, {**result, "rows": [asdict(row) for row in rows], "left": left, "bytes_a_request": memory})
    print_line(console, result)
    if left or result["missed"]:
        raise typer.Exit(1)


def table_of(rows: Sequence[Row]) -> Table:
    headings = "layout|fault|tries|requests|served|cancelled|typed|untyped|hung|recovery s|longest s|told|missed"
    table = Table(*headings.split("|"), title="faults under load, the demo's models, on this machine")
    for row in rows:
        recovery = "" if row.recovery_s is None else f"{row.recovery_s:.1f}"
        counts = (row.tries, row.requests, row.served, row.cancelled, row.typed_errors, row.untyped_errors, row.hangs)
        table.add_row(
            *(row.layout, row.fault, *map(str, counts)), recovery, f"{row.longest_s:.1f}", row.told, "; ".join(row.missed)
        )
    return table
