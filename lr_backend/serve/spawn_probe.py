"""Whether the processes that MPI starts for engines come up, and on which cores: a tiny program that starts others.

It is started as the server is, with its launcher and in its environment, and starts as many as the server would. Run as a script
it knows the standard library and ``mpi4py`` alone, which TensorRT-LLM brings along.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Spawned:
    """What came of it.

    Attributes:
        parent: numbers of the cores that the starting process may use.
        children: of those that each started one may use, by its rank.
        failure: why nothing was started, in MPI's words; empty: it was.
        left_out: why it was not tried; empty: it was.
    """

    parent: tuple[int, ...] = ()
    children: tuple[tuple[int, ...], ...] = ()
    failure: str = ""
    left_out: str = ""

    @property
    def bound(self) -> bool:
        """Whether a started process may use fewer cores than the one that started it."""
        return any(len(cores) < len(self.parent) for cores in self.children)

    def in_words(self) -> str:
        """Where each of them may run, those of the same cores together."""
        fewest = min(map(len, self.children))
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, cores in enumerate(self.children):
            ranks.setdefault(cores, []).append(rank)
        where = "; ".join(
            f"rank{'s' if len(those) > 1 else ''} {ranges(those)} on {ranges(cores)}" for cores, those in ranks.items()
        )
        return f"{len(self.children)} started, on {fewest} of {len(self.parent)} cores each: {where}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as Linux writes lists of cores: ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def probe_spawn(launcher: Sequence[str], environment: Mapping[str, str], count: int) -> Spawned:
    """Start ``count`` processes. ``launcher``: what stands before the program, such as ``mpirun -n 1``; empty: nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return Spawned(left_out="this Python has no mpi4py")
    try:
        # The file itself, by no name of the package: what is started does not depend on where it lies.
        command = [*launcher, sys.executable, os.path.abspath(__file__), str(count)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        return Spawned(left_out=f"there is no {launcher[0] if launcher else sys.executable}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Spawned(failure=f"{type(error).__name__}: {error}")
    return read_answer(done.stdout, done.stderr)


def read_answer(output: str, errors: str = "") -> Spawned:
    """What the program printed, among whatever MPI did."""
    for line in output.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            return Spawned(tuple(found["parent"]), tuple(tuple(cores) for cores in found["children"]))
    said = [line.strip() for line in (errors or output).splitlines()]
    words = [line for line in said if any(map(str.isalnum, line))]
    return Spawned(failure=" ".join(words[:3]) or "it ended without a word")


def main() -> None:
    """The program: the parent starts itself, and gathers from which cores each may choose."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    cores = sorted(os.sched_getaffinity(0))
    above = mpi.Comm.Get_parent()
    if above != mpi.COMM_NULL:
        above.gather(cores, root=0)
        above.Disconnect()
        return
    below = mpi.COMM_SELF.Spawn(sys.executable, [os.path.abspath(__file__)], int(sys.argv[1]))
    sys.stdout.write(json.dumps({"parent": cores, "children": below.gather(None, root=mpi.ROOT)}) + "\n")
    sys.stdout.flush()
    below.Disconnect()


if __name__ == "__main__":
    main()
