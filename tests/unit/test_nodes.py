"""A role over several machines: its group, what mpirun and ssh are told, and what a node opens. No machine is reached here."""

from __future__ import annotations

import io
import json
import pwd
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lr_backend.build.placement import Placement
from lr_backend.build.spec import DeploymentSpec
from lr_backend.cli import serve
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.serve import nodes as leading
from lr_backend.serve import sshd
from lr_backend.serve.launch import COMPILED_ENVIRONMENT, launch_plan
from lr_backend.serve.nodes import KEY_VARIABLE, Group, Nodes, group_of, private_key, public_key, why_silent
from lr_backend.serve.server import ServerOptions, TritonServer
from lr_backend.serve.warmup import WarmupError
from tests.support import fake_mpirun, fake_triton
from tests.support.fake_trtllm import write_gpu_spec

TARGET = Placement(Role.TARGET, "tensorrtllm", 4, (0, 1), 2)
POD = {"LWS_LEADER_ADDRESS": "lr-target-1.lr-target.prod", "LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "0"}
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExampleExampleExampleExampleExampleExampleExa"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a scripted ssh-keygen takes for a key. ``ssh`` is there as well."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, line in {"ssh-keygen": f"echo {PUBLIC} me@home", "ssh": "exit 9"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    path = tmp_path / "my key"
    path.write_text("private", encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------------------------- the group


def test_leader_worker_set_says_who_the_nodes_are() -> None:
    group = group_of([replace(TARGET, tp_size=6, num_nodes=3)], POD)
    assert group == Group("lr-target-1.lr-target.prod", 3, 0)
    # As its controller names pods: the set, the group's number, the worker's.
    assert group.others == ("lr-target-1-1.lr-target.prod", "lr-target-1-2.lr-target.prod")


def test_a_role_on_one_machine_leads_nobody() -> None:
    alone = replace(TARGET, tp_size=2, num_nodes=1)
    assert group_of([alone], {}) is None and group_of((), {}) is None
    assert group_of([alone], {**POD, "LWS_GROUP_SIZE": "1"}) is None, "a set may have groups of one"


@pytest.mark.parametrize(
    ("placements", "changes", "why"),
    [
        ([TARGET], {"LWS_LEADER_ADDRESS": None}, "target is over num_nodes = 2 machines, and this server leads no group"),
        ([TARGET], {}, "target is over num_nodes = 2 machines, and LWS_GROUP_SIZE is 3"),
        ([replace(TARGET, num_nodes=3)], {"LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX is 2: the leader serves"),
        ([replace(TARGET, num_nodes=1)], {}, "LWS_GROUP_SIZE=3, and no role here has num_nodes above 1"),
        (
            [TARGET, replace(TARGET, role=Role.DRAFT, num_nodes=1)],
            {},
            "a role over num_nodes = 2 machines has a server of its own",
        ),
        ([TARGET], {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE and LWS_WORKER_INDEX are not numbers"),
        ([TARGET], {"LWS_WORKER_INDEX": None}, "LWS_GROUP_SIZE and LWS_WORKER_INDEX are not numbers"),
    ],
)
def test_spec_and_group_have_to_go_together(placements: list[Placement], changes: dict[str, str | None], why: str) -> None:
    environment = {name: value for name, value in {**POD, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=why):
        group_of(placements, environment)


# ------------------------------------------------------------------------------------------------------------- mpirun and ssh


def test_what_mpirun_and_ssh_are_told(tmp_path: Path, key: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    made = Nodes.prepare(("lr-target-0-1.lr-target.prod",), 8, key, folder)
    assert made.hostfile.read_text().splitlines() == [f"{socket.gethostname()} slots=8", "lr-target-0-1.lr-target.prod slots=8"]
    assert (folder / "known_hosts").read_text() == f"lookahead-node {PUBLIC}\n"
    plan = launch_plan([TARGET]).across(made)
    assert plan.launcher[-2:] == ("--default-hostfile", str(made.hostfile)) and plan.num_ranks == 4
    told = plan.over({"OMPI_MCA_plm_rsh_agent": "rsh", "PATH": "/bin"})
    assert told["OMPI_MCA_plm_rsh_agent"] == told["PRTE_MCA_plm_ssh_agent"] == f"ssh -F '{folder}/ssh_config'"
    # Else Open MPI 4 cuts the domain off, and the name is nobody's.
    assert told["OMPI_MCA_orte_keep_fqdn_hostnames"] == "1"
    assert told["OMPI_MCA_plm_rsh_no_tree_spawn"] == "1", "nodes need not reach each other by ssh"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed (Debian's package openssh-client)")
def test_ssh_reads_it_and_trusts_the_groups_key_alone(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes.prepare(("host",), 8, key, tmp_path)
    monkeypatch.undo()
    command = ["ssh", "-F", str(tmp_path / "ssh_config"), "-G", "lr-target-0-1.lr-target.prod"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    settings = dict(line.split(" ", 1) for line in shown.splitlines())
    assert settings["port"] == "2222" and settings["identityfile"].strip('"') == str(key)
    assert settings["stricthostkeychecking"] in ("true", "yes") and settings["batchmode"] == "yes"
    assert settings["userknownhostsfile"].strip('"') == str(tmp_path / "known_hosts")
    assert settings["hostkeyalias"] == "lookahead-node" and settings["identitiesonly"] == "yes"


def test_a_key_has_to_be_one(tmp_path: Path, key: Path) -> None:
    assert public_key(key) == PUBLIC
    with pytest.raises(ConfigError, match=f"give {KEY_VARIABLE}"):
        private_key({})
    with pytest.raises(ConfigError, match="there is no such file"):
        private_key({KEY_VARIABLE: str(tmp_path / "none")})
    (tmp_path / "tools" / "ssh-keygen").write_text("#!/bin/sh\necho 'Load key: bad passphrase' >&2; exit 255\n")
    with pytest.raises(ConfigError, match="is no private key without a passphrase: Load key: bad passphrase"):
        public_key(key)


def test_without_ssh_nothing_is_tried(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install openssh-client"):
        Nodes.prepare(("host",), 8, key, tmp_path)


@pytest.mark.parametrize(
    ("user", "why"), [(None, "is not in /etc/passwd"), ("/usr/sbin/nologin", "by which ssh can start nothing")]
)
def test_ssh_needs_a_user_with_a_shell(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, user: str | None, why: str
) -> None:
    def look_up(number: int) -> pwd.struct_passwd:
        if user is None:
            raise KeyError(number)
        return pwd.struct_passwd(("someone", "x", number, number, "", "/", user))

    monkeypatch.setattr(pwd, "getpwuid", look_up)
    with pytest.raises(ConfigError, match=why):
        Nodes.prepare(("host",), 8, key, tmp_path)


def test_serve_leads_the_group_of_its_spec(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gpu_spec(tmp_path / "spec", checkpoints=False)
    text = path.read_text().replace("tp_size = 2\n", 'tp_size = 4\nnum_nodes = 2\nurl = "grpc://one:8001"\n')
    path.write_text(text.replace("[draft]\n", '[draft]\nurl = "grpc://two:8001"\n'))
    deployment = DeploymentSpec.load(path)
    for name, value in {**POD, "LWS_GROUP_SIZE": "2", KEY_VARIABLE: str(key)}.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as ended:
        nodes = serve._nodes(deployment.only([Role.TARGET]), ended)
        assert nodes is not None
        assert (nodes.others, nodes.slots) == (("lr-target-1-1.lr-target.prod",), 2)
        assert nodes.hostfile.is_file()
    assert not nodes.hostfile.exists(), "it ends with the server"
    with pytest.raises(ConfigError, match="no role here has num_nodes above 1"):
        serve._nodes(deployment.only([Role.DRAFT]), ExitStack())


def test_the_loop_waits_for_a_leader_as_long_as_that_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    asked: list[float] = []
    monkeypatch.setattr(serve, "warm_engines", lambda *_, timeout_s, **__: asked.append(timeout_s))
    monkeypatch.setattr(serve, "wait_for_roles", lambda _, timeout_s, give_up: waited.append(timeout_s) or give_up.set() or {})
    path = write_gpu_spec(tmp_path, checkpoints=False)
    apart = path.read_text(encoding="utf-8").replace("tp_size = 2\n", 'tp_size = 2\nurl = "grpc://target:8001"\n')
    for text in (apart, apart.replace("tp_size = 2\n", "tp_size = 4\nnum_nodes = 2\n")):
        path.write_text(text, encoding="utf-8")
        server = SimpleNamespace(http_url="", loop_key="", options=ServerOptions())
        stop = SimpleNamespace(event=threading.Event())
        serve._warm_up(Console(), server, DeploymentSpec.load(path), stop, time.monotonic() + 1000.0)  # type: ignore[arg-type]
    assert waited == [120, 240], "its nodes first, then its models"
    assert all(900.0 < left_s <= 1000.0 for left_s in asked) and asked, "what is left of all that they may take"


def test_a_draft_elsewhere_that_fails_keeps_no_loop_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have another key by now. One of the server's own must answer, and so must the target."""
    degraded = ["draft"]
    answer = {"text_output": "6", "finish_reason": "stop", "usage": json.dumps({"degraded": degraded})}
    monkeypatch.setattr("lr_backend.serve.warmup.post_json", lambda *given: answer)
    monkeypatch.setattr(serve, "warm_engines", lambda *given, **others: None)
    monkeypatch.setattr(serve, "wait_for_roles", lambda *given: {})
    path = write_gpu_spec(tmp_path, checkpoints=False)
    text = path.read_text(encoding="utf-8")
    server = SimpleNamespace(http_url="", loop_key="", options=ServerOptions(), seats=SimpleNamespace(num_used=9))

    def warm_up() -> str:
        said, stop = io.StringIO(), SimpleNamespace(event=threading.Event())
        serve._warm_up(Console(file=said), server, DeploymentSpec.load(path), stop, time.monotonic())  # type: ignore[arg-type]
        return said.getvalue()

    with pytest.raises(WarmupError, match="answered without draft"):
        warm_up()
    path.write_text(text.replace("[draft]\n", '[draft]\nurl = "grpc://draft:8001"\n'), encoding="utf-8")
    assert warm_up() == "without draft: it is there, and fails\n"


# ------------------------------------------------------------------------------------------------------------ waiting for nodes


@pytest.fixture
def speaker() -> Iterator[tuple[int, list[bytes]]]:
    """Answers on a port with what is in the list, one line a caller."""
    lines: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    caller, _ = listening.accept()
                except OSError:
                    return
                with caller:
                    caller.sendall(lines[0])
                    del lines[: len(lines) > 1]

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1], lines
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_nodes_are_waited_for_until_an_ssh_server_answers(
    speaker: tuple[int, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "LOOK_S", 0.01)
    port, lines = speaker
    lines += [b"HTTP/1.0 400\r\n", b"HTTP/1.0 400\r\n", b"SSH-2.0-x\r\n"]
    assert why_silent("127.0.0.1", port) == "what answers there is no ssh server"
    Nodes(("127.0.0.1",), 8, tmp_path, {}).wait(60, threading.Event(), port)
    assert lines == [b"SSH-2.0-x\r\n"]


def test_who_does_not_answer_in_time_is_named_with_the_reason(speaker: tuple[int, list[bytes]], tmp_path: Path) -> None:
    port, lines = speaker
    lines.append(b"SSH-2.0-x\r\n")
    with pytest.raises(ConfigError, match=rf"port {port} within 0 s: no-such-host\.invalid \(\w") as caught:
        Nodes(("127.0.0.1", "no-such-host.invalid"), 8, tmp_path, {}).wait(0.0, threading.Event(), port)
    assert "127.0.0.1" not in caught.value.message


def test_waiting_ends_with_the_wish_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    Nodes(("no-such-host.invalid",), 8, tmp_path, {}).wait(60, stop)


# ----------------------------------------------------------------------------------------------------------------------- a node

ENVIRONMENT = {
    **POD,
    "PATH": "/opt/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/lib",
    "NCCL_DEBUG": 'say "all" \\ of it',
    "HOSTNAME": "lr-target-0-1",
    "HOME": "/tmp",
    "OMPI_COMM_WORLD_RANK": "3",
    "TWO": "lines\nof it",
}


def test_ranks_get_the_containers_environment_and_not_the_pods() -> None:
    assert sorted(sshd.given_to_ranks(ENVIRONMENT).keys() - COMPILED_ENVIRONMENT) == ["LD_LIBRARY_PATH", "NCCL_DEBUG", "PATH"]
    assert sshd.given_to_ranks(ENVIRONMENT).items() >= COMPILED_ENVIRONMENT.items(), "they are compiled engines' ranks"


def test_a_node_is_open_to_one_user_by_one_key_for_commands_alone(tmp_path: Path) -> None:
    config = sshd.sshd_config(tmp_path / "key", tmp_path / "keys", "triton-server", ENVIRONMENT)
    lines = config.splitlines()
    settings = 'PATH="/opt/bin:/bin" LD_LIBRARY_PATH="/opt/lib" NCCL_DEBUG="say \\"all\\" \\\\ of it"'
    assert any(line.startswith("SetEnv ") and line.endswith(settings) for line in lines)
    assert sum(line.startswith("SetEnv") for line in lines) == 1, "sshd takes the first alone"
    assert {"Port 2222", "AllowUsers triton-server", "AuthenticationMethods publickey", "DisableForwarding yes"} <= set(lines)
    assert {"PermitTTY no", "PermitUserRC no", "PidFile none"} <= set(lines)


def test_a_node_without_sshd_says_what_to_install(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd, "_SBIN", ())
    with pytest.raises(ConfigError, match="apt-get install openssh-server"):
        sshd.run_node({KEY_VARIABLE: str(key), "PATH": str(tmp_path)}, lambda: 0, lambda line: None)


@pytest.fixture
def scripted(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A node whose sshd is a script of the test's. All that came from this process is pytest's, and none of the node's affair."""
    server = tmp_path / "tools" / "sshd"
    server.write_text("#!/bin/sh\nexec sleep 600\n")
    server.chmod(0o755)
    monkeypatch.setattr(sshd, "LOOK_S", 0.02)
    monkeypatch.setattr(sshd, "find_sshd", lambda environment: server)
    monkeypatch.setattr(sshd, "become_subreaper", lambda: None)
    monkeypatch.setattr(sshd, "_all", list)
    return {KEY_VARIABLE: str(key)}


def test_a_node_that_nobody_led_ends_when_told(scripted: dict[str, str]) -> None:
    said: list[str] = []
    sshd.run_node(scripted, lambda: 1, said.append)
    assert len(said) == 1 and said[0].startswith("waits for its leader on port 2222")


@pytest.mark.parametrize("asked", [0, 1])
def test_a_node_ends_once_its_ranks_have(scripted: dict[str, str], monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    """Told to end or not: a leader that drains needs them."""
    said: list[str] = []
    looks: Iterator[list[str]] = iter([["rank"], ["rank"], ["rank"], []])
    monkeypatch.setattr(sshd, "ranks_of", lambda pid: next(looks))
    sshd.run_node(scripted, lambda: asked, said.append)
    assert said[1:] == ["the leader's ranks are here", "the leader's ranks have ended"]
    assert next(looks, None) is None


def test_a_node_that_is_told_twice_ends_with_its_ranks(scripted: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([0, 1, 2])
    monkeypatch.setattr(sshd, "ranks_of", lambda pid: ["rank"])
    sshd.run_node(scripted, lambda: next(asked), lambda line: None)
    assert next(asked, None) is None


def test_a_node_whose_ssh_server_dies_says_so(scripted: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tools" / "sshd").write_text("#!/bin/sh\nexit 255\n")
    with pytest.raises(sshd.NodeError, match="sshd ended with status 255"):
        sshd.run_node(scripted, lambda: 0, lambda line: None)


# ------------------------------------------------------------------------------------------------------------------ the launcher


def test_a_server_over_machines_is_started_by_the_plan(tmp_path: Path, key: Path) -> None:
    """Against a scripted mpirun, which starts the first rank alone."""
    for name, module in {"mpirun": fake_mpirun, "tritonserver": fake_triton}.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{Path(str(module.__file__)).read_text(encoding='utf-8')}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "repository").mkdir()
    nodes = Nodes.prepare(("lr-target-0-1.lr-target.prod",), 2, key, tmp_path)
    plan = replace(launch_plan([TARGET]), launcher=(str(tmp_path / "mpirun"),)).across(nodes)
    options = ServerOptions(
        tritonserver=tmp_path / "tritonserver", plan=replace(plan, num_ranks=1), environment={"FAKE_PIDS": str(tmp_path / "pids")}
    )
    with TritonServer(tmp_path / "repository", options) as server:
        server.wait_ready(60)
        pid = (tmp_path / "pids").read_text().split()[0]
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert f"OMPI_MCA_plm_rsh_agent=ssh -F {tmp_path}/ssh_config" in environment
        assert str(nodes.hostfile) in Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
        assert server.stop() == 0
