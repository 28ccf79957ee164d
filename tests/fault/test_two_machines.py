"""A role over two machines, by the real ``mpirun``, ssh and sshd: where its ranks are, and how all of it ends.

The machines are namespaces of this one, and the ranks stand-ins for tritonserver. No engine runs, and no GPU is needed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lr_backend.serve.nodes import GROUP_SIZE, KEY_VARIABLE, LEADER_ADDRESS, WORKER_INDEX
from tests.support import fake_triton, pods
from tests.support.pods import BOUND_S, DOMAIN, NAMES, USER, Pods
from tests.support.waiting import all_ended

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = pods.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

LEADER = """
import os, sys, tempfile, threading
from pathlib import Path
from lr_backend.build.placement import Placement
from lr_backend.engine import Role
from lr_backend.errors import LookaheadError
from lr_backend.serve.launch import launch_plan
from lr_backend.serve.nodes import Nodes, group_of, private_key
from lr_backend.serve.server import ServerOptions, TritonServer

placements = [Placement(Role.TARGET, "tensorrtllm", 4, (0, 1), 2)]
with tempfile.TemporaryDirectory() as folder:
    nodes = Nodes.prepare(group_of(placements, os.environ).others, 2, private_key(os.environ), Path(folder))
    nodes.wait(60, threading.Event())
    options = ServerOptions(tritonserver=Path(sys.argv[2]), plan=launch_plan(placements).across(nodes), exit_timeout_s=5)
    server = TritonServer(Path(sys.argv[1]), options)
    try:
        server.start()
        server.wait_ready(60)
        print("ready", server.pid, flush=True)
        end = threading.Thread(target=sys.stdin.read, daemon=True)
        end.start()
        while end.is_alive() and server.wait(0.1) is None:
            pass
        print("stopped with", server.stop() if server.running else server.wait(), flush=True)
    except LookaheadError as error:
        print("refused:", error.message, flush=True)
    finally:
        server.stop(0.0)
"""


class World:
    """Both machines and the ranks on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids, self.log = folder, folder / "shared" / "pids", folder / "said"
        self.pids.parent.mkdir()
        self.pids.parent.chmod(0o777)
        (folder / "repository" / "target").mkdir(parents=True)
        (folder / "repository" / "target" / "config.pbtxt").touch()
        fake = folder / "tritonserver"
        fake.write_text(f"#!{sys.executable}\n" + Path(fake_triton.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        fake.chmod(0o755)
        self.keys = [self._key(name) for name in NAMES]
        self.pods = Pods(folder)

    def _key(self, name: str) -> Path:
        path = self.folder / f"key-{name}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True, timeout=BOUND_S)
        # As a Secret is mounted: root's, and its group's to read.
        os.chown(path, 0, USER)
        path.chmod(0o440)
        return path

    def start(self, *, same_key: bool = True) -> None:
        commands = (
            [sys.executable, "-c", LEADER, str(self.folder / "repository"), str(self.folder / "tritonserver")],
            [sys.executable, "-c", "from lr_backend.cli.app import app; app()", "node"],
        )
        environments = [
            {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'client' / 'src'}",
                "FAKE_PIDS": str(self.pids),
                "TMPDIR": str(self.pids.parent),
                "ONE_OF_ITS_OWN": 'a "b" c\\d $HOME',
                LEADER_ADDRESS: f"{NAMES[0]}.{DOMAIN}",
                GROUP_SIZE: "2",
                WORKER_INDEX: str(index),
                KEY_VARIABLE: str(self.keys[0] if same_key else self.keys[index]),
            }
            for index in range(2)
        ]
        self.pods.start(commands, environments, self.log)

    def said(self, machine: int) -> str:
        return self.log.with_suffix(f".{NAMES[machine]}").read_text(encoding="utf-8", errors="replace")

    def until_said(self, machine: int, words: str) -> str:
        deadline = time.monotonic() + BOUND_S
        while words not in (said := self.said(machine)):
            assert time.monotonic() < deadline, f"{NAMES[machine]} never said {words!r}: {said}"
            time.sleep(0.02)
        return said

    def ranks(self) -> list[tuple[int, str]]:
        """Process and machine of each rank; the first one's own file names its machine nowhere."""
        deadline = time.monotonic() + BOUND_S
        files = [self.pids, *(Path(f"{self.pids}.rank{rank}") for rank in (1, 2, 3))]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, f"not all ranks came: {self.said(0)} {self.said(1)}"
            time.sleep(0.02)
        words = [file.read_text(encoding="utf-8").split() for file in files]
        return [(int(words[0][0]), NAMES[0]), *((int(pid), machine) for pid, machine in words[1:])]


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be root's alone
        Path(folder).chmod(0o755)
        made = World(Path(folder))
        yield made
        made.pods.end()


def test_ranks_fill_the_leader_then_the_node_and_a_node_that_is_told_to_end_waits_for_them(world: World) -> None:
    world.start()
    world.until_said(0, "ready")
    ranks = world.ranks()
    assert [machine for _, machine in ranks] == [NAMES[0], NAMES[0], NAMES[1], NAMES[1]]
    environment = psutil.Process(ranks[2][0]).environ()
    assert environment["ONE_OF_ITS_OWN"] == 'a "b" c\\d $HOME', "what the container says reaches its ranks"
    assert not [name for name in environment if name.startswith("LWS_")]
    assert all(psutil.Process(pid).uids().real == USER for pid, _ in ranks)
    lines = psutil.Process(ranks[3][0]).cmdline()
    assert not any("restricted" in word for word in lines), "keys stay where somebody can be asked for them"
    world.until_said(1, "the leader's ranks are here")
    descriptors = [os.pidfd_open(pid) for pid, _ in ranks]
    world.pods.node.send_signal(signal.SIGTERM)
    assert not select.select(descriptors, [], [], 2.0)[0], "a leader that drains still has its ranks"
    assert world.pods.node.poll() is None
    assert world.pods.leader.stdin is not None
    world.pods.leader.stdin.close()
    assert "stopped with 0" in world.until_said(0, "stopped with")
    assert all_ended(descriptors, BOUND_S)
    assert world.pods.node.wait(BOUND_S) == 0
    assert "the leader's ranks have ended" in world.said(1)


def kill_rank(number: int) -> Callable[[World], None]:
    return lambda world: os.kill(world.ranks()[number][0], signal.SIGKILL)


def kill_leader(world: World) -> None:
    world.pods.leader.kill()


def kill_node(world: World) -> None:
    for process in (*psutil.Process(world.pods.node.pid).children(recursive=True), psutil.Process(world.pods.node.pid)):
        process.kill()


@pytest.mark.parametrize("strike", [kill_rank(0), kill_rank(3), kill_leader, kill_node])
def test_when_one_dies_the_group_ends(world: World, strike: Callable[[World], None]) -> None:
    world.start()
    world.until_said(0, "ready")
    world.until_said(1, "the leader's ranks are here")
    descriptors = [os.pidfd_open(pid) for pid, _ in world.ranks()]
    strike(world)
    assert all_ended(descriptors, BOUND_S), world.said(0)
    world.pods.leader.wait(BOUND_S)
    world.pods.node.wait(BOUND_S)
    if strike is not kill_leader:
        assert "stopped with" in world.said(0) and "stopped with 0" not in world.said(0)
    if strike is not kill_node:
        assert world.pods.node.returncode == 0 and "have ended" in world.said(1)


def test_a_leader_with_another_key_starts_nothing(world: World) -> None:
    world.start(same_key=False)
    said = world.until_said(0, "refused:")
    assert "Host key verification failed" in said, said
    assert not Path(f"{world.pids}.rank2").exists() and world.pods.node.poll() is None
    world.pods.node.terminate()
    assert world.pods.node.wait(BOUND_S) == 0
