"""Runs one program that nobody has read. Started by ``sandbox.py`` with ``-I -S``, in an empty folder.

Reads one JSON object from stdin: ``program``, ``nonce`` and the limits. Writes JSON lines to what stdout was: first the
protections that hold, then, if the program ran through, a line with the nonce. Knows nothing of the project and imports only the
standard library.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534


def isolate(libc: Any, was_root: bool) -> list[str]:
    """Spaces of its own for network and processes, and every file system read-only, where the system permits; what holds."""
    uid, gid = os.getuid(), os.getgid()
    spaces = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS
    if libc.unshare(spaces if was_root else spaces | CLONE_NEWUSER) != 0:
        return []
    if not was_root:  # be root in the new space, where alone that lets us mount
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return ["network"]
    # The old /proc would go on telling of every process of the machine.
    hidden = libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, b"mode=555") == 0
    return ["network", *(["processes"] if hidden else []), *(["files"] if seal_files(libc, os.getcwd()) else [])]


def seal_files(libc: Any, folder: str) -> bool:
    """Nothing can be written but in a small folder in memory, which becomes the working directory; False: left as it was."""
    library = sysconfig.get_path("stdlib")
    read_only = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    if libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, ctypes.sizeof(read_only)) != 0:
        return False
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=16m,mode=755") != 0:
        return False
    work, modules = os.path.join(folder, "work"), os.path.join(folder, "modules")
    os.mkdir(work)
    os.chmod(work, 0o777)
    os.mkdir(modules)
    # The interpreter may live where only root can go.
    if libc.mount(library.encode(), modules.encode(), None, MS_BIND, None) == 0:
        for paths in (sys.path, *(module.__path__ for module in list(sys.modules.values()) if hasattr(module, "__path__"))):
            paths[:] = [path.replace(library, modules, 1) if path.startswith(library) else path for path in paths]
    os.chdir(work)
    return True


def give_up_rights(libc: Any, was_root: bool) -> None:
    """No right that a program could use to undo its limits."""
    if was_root:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    nothing = (ctypes.c_uint32 * 6)()
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), nothing)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def limit(order: dict[str, Any]) -> None:
    """Ceilings that the kernel holds. Last, as nothing can be started afterwards."""
    for name, value in (
        ("RLIMIT_AS", order["max_memory_bytes"]),
        ("RLIMIT_CPU", order["max_cpu_s"]),
        ("RLIMIT_FSIZE", order["max_file_bytes"]),
        ("RLIMIT_NOFILE", order["max_files"]),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)

    def say(line: dict[str, Any]) -> None:
        os.write(channel, (json.dumps(line) + "\n").encode())

    libc = ctypes.CDLL(None, use_errno=True)
    was_root = os.geteuid() == 0
    held = isolate(libc, was_root)
    if held:
        child = os.fork()  # the first process of the new space; this one only waits for it
        if child:
            os.close(channel)
            os.waitpid(child, 0)
            os._exit(0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    give_up_rights(libc, was_root)
    if was_root:
        held.append("user")
    if not held:
        vars(os).update(kill=None, killpg=None)  # a slip must not end all that is the same user's
    compiled = failure = None
    try:
        compiled = compile(order["program"], "answer.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        failure = f"{type(error).__name__}: {error}"
    limit(order)
    say({"held": held})
    if compiled is not None:
        try:
            exec(compiled, {"__name__": "answer"})
        except BaseException as error:  # SystemExit too: leaving early passes no test
            failure = f"{type(error).__name__}: {error}"
    say({"failed": failure[:300]} if failure is not None else {"passed": order["nonce"]})
    os._exit(0)


if __name__ == "__main__":
    main()
