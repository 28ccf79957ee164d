"""What the launcher tells the step loop while both run, by a small file: that the server is to end, and whose process has died.

Triton tells its models neither. It takes no BLS call once it is stopping, so answers must finish before it is told to stop; and a
call to a model whose process has died hangs until its client gives up. The loop answers by a second file: everything is answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NOTICE_VARIABLE = "LOOKAHEAD_NOTICE_FILE"
"""Names the file to the step loop. It need not be there yet."""

_DRAINING, _DEAD = "draining", "dead "


@dataclass(frozen=True, slots=True)
class Notice:
    """How things stand.

    Attributes:
        draining: no new requests; those in flight may finish.
        dead: models whose processes have died and are not back yet.
    """

    draining: bool = False
    dead: frozenset[str] = frozenset()


def post(path: Path, notice: Notice) -> None:
    """Put up a notice in place of the one before. Readers see the old one or the new one."""
    lines = [_DRAINING] if notice.draining else []
    lines += [f"{_DEAD}{model}" for model in sorted(notice.dead)]
    staging = path.with_suffix(".new")
    staging.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    staging.replace(path)


def read(path: Path) -> Notice:
    """The notice that is up; nothing is said where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return Notice()
    return Notice(_DRAINING in lines, frozenset(line.removeprefix(_DEAD) for line in lines if line.startswith(_DEAD)))


def drained_file(path: Path) -> Path:
    """What the loop puts beside a notice of :attr:`~Notice.draining` once it has answered everything."""
    return path.with_suffix(".drained")
