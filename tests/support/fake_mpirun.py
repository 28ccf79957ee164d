"""A program that behaves like Open MPI's mpirun towards one rank, as seen with release 5.0.11.

The rank gets a process group of its own; asked to end, mpirun kills it almost at once; and it waits for as long as anything holds
the rank's output. ``-n 1 COMMAND...`` comes last.
"""

from __future__ import annotations

import signal
import subprocess
import sys


def main() -> None:
    command = sys.argv[sys.argv.index("-n") + 2 :]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
    signal.signal(signal.SIGTERM, lambda *_: rank.kill())
    assert rank.stdout is not None
    for line in rank.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
    code = rank.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
