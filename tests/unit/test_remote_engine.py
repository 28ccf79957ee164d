"""Roles that live elsewhere: which replica a call goes to, when a server is taken for dead, and what a spec may say of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, GpuDeployment
from lr_backend.engine import EngineCall, Generation, Role
from lr_backend.engine.address import ENGINE_KEY_VARIABLE, Address, key_from
from lr_backend.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable
from lr_backend.serve.remotes import GRACE_S, RemoteError, check_remotes, missing_roles, wait_for_roles
from lr_backend.serve.restrictions import is_loopback, tls_arguments
from lr_backend.serve.startup_check import Level
from lr_backend.testing import run_virtual
from lr_backend.triton.remote_engine import (
    ANSWER_S,
    FIRST_PREFIX,
    LOOK_S,
    MAX_IMBALANCE,
    MAX_MISSES,
    RETRY_S,
    Pulse,
    RemoteEngine,
    Replicas,
    prefix_keys,
)
from tests.support.tiny_models import make_tiny_models, write_spec


@dataclass
class Replica:
    """Answers after ``seconds`` with its own number, or raises."""

    number: int
    seconds: float = 1.0
    error: Exception | None = None
    out_of_order: bool = False
    calls: list[str] = field(default_factory=list)
    is_closed: bool = False

    async def generate(self, call: EngineCall) -> Generation:
        self.calls.append(call.request_id)
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return Generation((self.number,))

    async def close(self) -> None:
        self.is_closed = True


def call(name: str, num_tokens: int = 2, first: int = 1) -> EngineCall:
    return EngineCall(name, np.full(num_tokens, first, dtype=np.int32), 4)


async def at_once(engine: Replicas, *calls: EngineCall) -> list[int]:
    """Who answered each."""
    return [found.token_ids[0] for found in await asyncio.gather(*(engine.generate(one) for one in calls))]


# Which replica -----------------------------------------------------------------------------------------------------


def test_calls_without_a_common_prefix_are_spread_evenly() -> None:
    async def main() -> None:
        found = await at_once(Replicas([Replica(0), Replica(1), Replica(2)]), *(call(str(index)) for index in range(9)))
        assert sorted(found) == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    run_virtual(main())


def test_a_text_goes_on_where_its_prefix_was_computed() -> None:
    async def main() -> None:
        engine = Replicas([Replica(0), Replica(1)])
        await at_once(engine, call("x", 40, first=7), call("y", 40, first=8))
        for length in (41, 70, 130, 500, 1000):
            assert await at_once(engine, call("a", length, first=7), call("b", length, first=8)) == [0, 1]

    run_virtual(main())


def test_a_prefix_is_not_waited_for_at_a_replica_that_is_much_busier() -> None:
    async def main() -> None:
        engine = Replicas([Replica(0), Replica(1)])
        await at_once(engine, call("x", 64))
        found = await at_once(engine, *(call(str(index), 64) for index in range(MAX_IMBALANCE + 4)))
        assert found[: MAX_IMBALANCE + 1] == [0] * (MAX_IMBALANCE + 1)
        assert 1 in found[MAX_IMBALANCE + 1 :]

    run_virtual(main())


def test_a_replica_that_is_away_loses_no_call() -> None:
    async def main() -> None:
        away = Replica(0, error=EngineUnavailable("its connection is gone"))
        engine = Replicas([away, Replica(1)])
        assert await at_once(engine, *(call(str(index)) for index in range(6))) == [1] * 6
        assert len(away.calls) == 3
        away.out_of_order = True
        assert await at_once(engine, call("later"), call("and later")) == [1, 1]
        assert len(away.calls) == 3, "one that is known to be away is not asked"

    run_virtual(main())


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        ("StatusCode.NOT_FOUND", "Request for unknown model: 'target' has no available versions", EngineUnavailable),
        ("StatusCode.UNKNOWN", "Stream removed", EngineUnavailable),
        ("StatusCode.UNAVAILABLE", "connection refused", EngineUnavailable),
        ("StatusCode.INVALID_ARGUMENT", "unexpected shape", EngineRejected),
    ],
)
def test_a_server_that_loads_its_model_anew_is_away_and_does_not_refuse(
    monkeypatch: pytest.MonkeyPatch, status: str, said: str, kind: type[EngineError]
) -> None:
    """So that its call is made at another replica."""

    async def main() -> None:
        engine = RemoteEngine("grpc://127.0.0.1:1", "target")

        async def infer(*_: Any, **__: Any) -> None:
            raise InferenceServerException(msg=said, status=status)

        monkeypatch.setattr(engine._client, "infer", infer)
        with pytest.raises(EngineError) as found:
            await engine.generate(call("a"))
        assert type(found.value) is kind
        await engine.close()

    asyncio.run(main())


def test_a_server_that_was_away_for_long_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waits two minutes at last, by its own settings: as long would one that is back be left out."""
    said = dict[str, int]()
    connect = grpc.aio.insecure_channel

    def connects(url: str, options: Any) -> Any:
        said.update(options)
        return connect(url, options=options)

    async def main() -> None:
        monkeypatch.setattr(grpc.aio, "insecure_channel", connects)
        await RemoteEngine("grpc://127.0.0.1:1", "target").close()

    asyncio.run(main())
    assert said["grpc.max_reconnect_backoff_ms"] <= 5000
    assert said["grpc.max_receive_message_length"] == said["grpc.max_send_message_length"] == -1


def test_a_replica_that_fails_every_call_loses_none_and_does_not_draw_them() -> None:
    """It answers at once, so it is always the least busy."""

    async def main() -> None:
        failing, replicas = Replica(0, error=EngineError("the iteration failed")), [Replica(1), Replica(2)]
        engine = Replicas([failing, *replicas])
        assert set(await at_once(engine, *(call(str(index)) for index in range(6)))) == {1, 2}
        before = len(failing.calls)
        for index in range(20):
            assert await at_once(engine, call(f"later {index}")) != [0]
        assert len(failing.calls) - before <= 20 / RETRY_S, "each call takes a second"
        failing.error = None
        await asyncio.sleep(2 * RETRY_S)
        assert 0 in await at_once(engine, *(call(f"last {index}") for index in range(3))), "it is tried again"

    run_virtual(main())


def test_where_all_are_away_the_failure_is_told() -> None:
    async def main() -> None:
        replicas = [Replica(number, error=EngineUnavailable("gone"), out_of_order=True) for number in range(2)]
        with pytest.raises(EngineUnavailable):
            await Replicas(replicas).generate(call("a"))
        assert [one.calls for one in replicas] == [["a"], ["a"]]

    run_virtual(main())


def test_a_call_that_is_at_fault_is_made_once() -> None:
    async def main() -> None:
        replicas = [Replica(number, error=EngineRejected("too long")) for number in range(2)]
        with pytest.raises(EngineRejected):
            await Replicas(replicas).generate(call("a"))
        assert sum(len(one.calls) for one in replicas) == 1

    run_virtual(main())


def test_a_cancelled_call_makes_room_and_closing_closes_all() -> None:
    async def main() -> None:
        replicas = [Replica(0, seconds=100.0), Replica(1, seconds=100.0)]
        engine = Replicas(replicas)
        tasks = [asyncio.create_task(engine.generate(call(str(index)))) for index in range(4)]
        await asyncio.sleep(1)
        for task in tasks[0], tasks[2]:
            task.cancel()
        await asyncio.wait({tasks[0], tasks[2]})
        new = [asyncio.create_task(engine.generate(call(f"new {index}"))) for index in range(2)]
        await asyncio.sleep(1)
        assert replicas[0].calls == ["0", "2", "new 0", "new 1"]
        for task in (*tasks, *new):
            task.cancel()
        await asyncio.wait({*tasks, *new})
        await engine.close()
        assert all(one.is_closed for one in replicas)

    run_virtual(main())


@given(st.lists(st.integers(0, 3), max_size=300), st.integers(0, 300))
def test_texts_have_the_keys_of_the_prefixes_that_they_share(tokens: list[int], num_shared: int) -> None:
    num_shared = min(num_shared, len(tokens))
    one = np.array(tokens, dtype=np.int32)
    other = np.array([*tokens[:num_shared], *(token + 1 for token in tokens[num_shared:])], dtype=np.int32)
    common = [a for a, b in zip(prefix_keys(one), prefix_keys(other), strict=True) if a == b]
    lengths = [FIRST_PREFIX << index for index in range(5) if FIRST_PREFIX << index <= num_shared]
    assert len(common) == len(lengths)


# When a server is taken for dead -----------------------------------------------------------------------------------


def test_calls_of_a_server_that_answers_are_waited_for() -> None:
    async def main() -> None:
        num_asked = 0

        async def ask() -> bool:
            nonlocal num_asked
            num_asked += 1
            return True

        pulse = Pulse(ask)
        await pulse.while_it_beats(asyncio.sleep(100 * LOOK_S + 0.5))
        assert num_asked == 100
        await asyncio.sleep(100)
        assert num_asked == 100, "nobody waits, so nobody asks"

    run_virtual(main())


def test_calls_of_a_server_that_has_gone_silent_fail_soon() -> None:
    async def main() -> None:
        pulse, clock = Pulse(lambda: asyncio.sleep(1e6, True)), asyncio.get_running_loop()
        started = clock.time()
        waiting = [asyncio.create_task(pulse.while_it_beats(asyncio.sleep(1e5))) for _ in range(3)]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [TimeoutError] * 3
        assert clock.time() - started == pytest.approx(MAX_MISSES * (LOOK_S + ANSWER_S))

    run_virtual(main())


def test_calls_of_a_server_that_takes_nothing_new_are_waited_for() -> None:
    """It is told to end, and finishes what it has."""

    async def main() -> None:
        async def ask() -> bool:
            raise InferenceServerException("Server exiting", "StatusCode.UNAVAILABLE")

        await Pulse(ask).while_it_beats(asyncio.sleep(100 * LOOK_S))

    run_virtual(main())


def test_one_answer_that_is_late_kills_nothing_and_a_cancel_is_one() -> None:
    async def main() -> None:
        answers = iter([1e6, 1e6, 0.0, 1e6, 1e6, 0.0])

        async def ask() -> None:
            await asyncio.sleep(next(answers, 0.0))

        pulse = Pulse(ask)
        await pulse.while_it_beats(asyncio.sleep(20))
        waiting = asyncio.create_task(pulse.while_it_beats(asyncio.sleep(1e5)))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run_virtual(main())


# What a spec says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("grpc://10.0.0.7:8001", Address("10.0.0.7", 8001)),
        ("grpcs://target.models.svc:443/", Address("target.models.svc", 443, secure=True)),
        ("grpc://[::1]:8001", Address("[::1]", 8001)),
    ],
)
def test_an_address_is_read(url: str, found: Address) -> None:
    assert Address.parse(url) == found


@pytest.mark.parametrize(
    "url", ["", "host:8001", "http://host:8001", "grpc://host", "grpc://host:0", "grpc://host:70000", "grpc://a b:1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form grpc://host:port"):
        Address.parse(url)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("apart")
    return write_spec(root / "engines" / "tiny.toml", make_tiny_models(root / "checkpoints"))


def apart(path: Path, **urls: str) -> Path:
    """The spec with roles elsewhere."""
    text = path.read_text(encoding="utf-8")
    for role, url in urls.items():
        text = text.replace(f"[{role}]\n", f"[{role}]\nurl = {url}\n")
    changed = path.with_name(f"tiny-{'-'.join(urls)}-{abs(hash(tuple(urls.values())))}.toml")
    changed.write_text(text, encoding="utf-8")
    return changed


def test_each_server_gets_the_models_that_it_runs(tiny: Path, tmp_path: Path) -> None:
    spec = DeploymentSpec.load(apart(tiny, target='["grpc://a:8001", "grpc://b:8001"]', judge='"grpc://c:8001"'))
    build_repository(spec, tmp_path / "loop")
    build_repository(spec.only([Role.TARGET]), tmp_path / "target")
    assert models_in(tmp_path / "loop") == ["draft", "lookahead"]
    assert models_in(tmp_path / "target") == ["target"]
    assert spec.only([Role.TARGET]).built_dir.name == "tiny.target"
    assert spec.loop_config().remotes == {Role.TARGET: ("grpc://a:8001", "grpc://b:8001"), Role.JUDGE: ("grpc://c:8001",)}
    with pytest.raises(ConfigError, match="draft has no url in the spec"):
        spec.only([Role.DRAFT])


def models_in(repository: Path) -> list[str]:
    return sorted(path.name for path in repository.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ('"http://a:8001"', "draft.url: 'http://a:8001' is not of the form"),
        ('["grpc://a:8001", "grpc://a:8001/"]', "draft.url: names a server twice"),
    ],
)
def test_a_spec_with_a_bad_address_is_refused(tiny: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeploymentSpec.load(apart(tiny, draft=url))


def test_engines_elsewhere_have_cards_of_their_own(tmp_path: Path) -> None:
    source = DeploymentSpec.load("r1-distill-32b").path.read_text(encoding="utf-8")
    path = tmp_path / "engines" / "apart.toml"
    path.parent.mkdir()
    path.write_text(source.replace("[judge]\n", '[judge]\nurl = "grpc://judge:8001"\n'), encoding="utf-8")
    spec = DeploymentSpec.load(path)
    assert isinstance(spec, GpuDeployment)
    assert [one.role for one in spec.placements] == [Role.TARGET, Role.DRAFT]
    assert [one.role for one in spec.only([Role.JUDGE]).placements] == [Role.JUDGE]
    (gpu,) = spec.judge.gpu_device_ids
    assert Role.JUDGE not in spec.roles_on(gpu)
    assert spec.only([Role.JUDGE]).roles_on(gpu) == (Role.JUDGE,)


# Keys, and who is waited for ---------------------------------------------------------------------------------------


def test_a_key_is_optional_and_may_not_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("", encoding="utf-8")
    assert key_from({}, "KEY") == ""
    with pytest.raises(ConfigError, match="KEY_FILE: 16 to 256"):
        key_from({"KEY_FILE": str(path)}, "KEY")


@pytest.mark.parametrize(
    ("host", "is_own"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)]
)
def test_what_only_this_machine_reaches(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


def test_a_certificate_that_is_not_there_is_missed_before_triton_starts(tmp_path: Path) -> None:
    assert tls_arguments(None, None) == ()
    with pytest.raises(ConfigError, match="no such file"):
        tls_arguments(tmp_path / "cert.pem", tmp_path / "key.pem")


REMOTES = {Role.TARGET: ("grpc://a:1", "grpc://b:1"), Role.JUDGE: ("grpc://c:1",)}


def away(*urls: str) -> Callable[[str, Role], str]:
    return lambda url, role: f"{url} is away" if url in urls else ""


def test_a_role_is_there_if_one_of_its_servers_is() -> None:
    assert missing_roles(REMOTES, away("grpc://a:1")) == {}
    assert missing_roles(REMOTES, away("grpc://a:1", "grpc://b:1", "grpc://c:1")) == {
        Role.TARGET: "grpc://a:1 is away; grpc://b:1 is away",
        Role.JUDGE: "grpc://c:1 is away",
    }


def test_a_server_does_not_start_without_its_target() -> None:
    with pytest.raises(RemoteError, match="the target is not there after 0 s: grpc://a:1 is away; grpc://b:1 is away"):
        wait_for_roles(REMOTES, 0.0, threading.Event(), away("grpc://a:1", "grpc://b:1"))


def test_it_starts_without_a_judge_and_says_so() -> None:
    assert GRACE_S > 0.0
    assert wait_for_roles(REMOTES, 0.0, threading.Event(), away("grpc://c:1")) == {Role.JUDGE: "grpc://c:1 is away"}


def test_a_server_that_is_to_stop_waits_for_nobody() -> None:
    stop = threading.Event()
    stop.set()
    assert wait_for_roles(REMOTES, 1e6, stop, away("grpc://a:1", "grpc://b:1")) == {
        Role.TARGET: "grpc://a:1 is away; grpc://b:1 is away"
    }


def test_the_doctor_has_a_line_for_each_server_and_misses_a_target_alone() -> None:
    findings = check_remotes(REMOTES, away("grpc://a:1", "grpc://c:1"))
    assert [(one.what, one.level) for one in findings] == [
        ("target at grpc://a:1", Level.WARNING),
        ("target at grpc://b:1", Level.OK),
        ("judge at grpc://c:1", Level.WARNING),
    ]
    assert {one.level for one in check_remotes(REMOTES, away("grpc://a:1", "grpc://b:1"))} == {Level.MISSING, Level.OK}


def test_the_doctor_tries_the_key_where_a_server_is_ready() -> None:
    asked: list[str] = []

    def refuses(url: str, role: Role) -> str:
        asked.append(url)
        return "" if url == "grpc://c:1" else "ready, and answers nobody with this key"

    away_one = check_remotes(REMOTES, away("grpc://a:1"), refuses)
    assert asked == ["grpc://b:1", "grpc://c:1"], "who is away is not asked"
    assert [one.level for one in away_one] == [Level.MISSING, Level.MISSING, Level.OK], "neither target computes for us"
    assert "lookahead serve --role target" in away_one[0].remedy and ENGINE_KEY_VARIABLE in away_one[1].remedy
