"""A deployment at the pace of another: what it takes from that one, what it keeps, and what is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.kit.serving import demo_spec
from lr_backend.build.base import Layout
from lr_backend.build.paced import paced
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment
from lr_backend.cli.app import app
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.hardware import profile
from lr_backend.hardware.pace import EnginePace, Runtime
from lr_backend.request import Mode

SYSTEM = "h200_sxm"
LIKE = DeploymentSpec.load("qwen3-32b-apart")


@pytest.fixture(scope="module")
def fast() -> EmbeddedDeployment:
    return paced(demo_spec(), SYSTEM)


def pace(spec: EmbeddedDeployment, role: Role) -> EnginePace:
    found = spec.engine_pace(role)
    assert found is not None
    return found


def test_each_role_has_the_profile_of_the_same_role(fast: EmbeddedDeployment) -> None:
    keys = {role: str(pace(fast, role).profile) for role in Role}
    assert keys == {
        Role.TARGET: "Qwen3-32B at TP 2 in bfloat16 on h200_sxm",
        Role.DRAFT: "Qwen3-1.7B at TP 1 in bfloat16 on h200_sxm",
        Role.JUDGE: "Qwen2.5-7B-Instruct at TP 1 in bfloat16 on h200_sxm",
    }
    assert {pace(fast, role).runtime for role in Role} == {Runtime.COMPILED}
    assert [role for role in Role if pace(fast, role).one_hot] == [Role.TARGET]


def test_sizes_limits_and_defaults_are_those_of_the_engines_that_are_stood_for(fast: EmbeddedDeployment) -> None:
    for role in Role:
        assert fast.engine(role).max_batch_size == LIKE.engine(role).max_batch_size  # type: ignore[attr-defined]
        assert fast.engine(role).num_drafts == LIKE.engine(role).num_drafts
        assert fast.checkpoint_dir(role) == demo_spec().checkpoint_dir(role)
    ours, theirs = fast.loop_config(), LIKE.loop_config()
    assert ours.defaults == theirs.defaults
    for name in ("max_depth", "max_draft_len", "max_in_flight_requests", "max_in_flight_calls"):
        assert getattr(ours.limits, name) == getattr(theirs.limits, name)
    assert ours.draft_temperature == theirs.draft_temperature is None
    assert ours.limits.max_tokens == demo_spec().loop_config().limits.max_tokens
    assert fast.server.layout is Layout.PROCESS_A_ROLE
    assert fast.name == "demo.h200_sxm"


def test_a_target_that_drafts_by_itself_is_paced_as_the_llm_api_is() -> None:
    inside = pace(paced(demo_spec(), SYSTEM, drafts_itself=True), Role.TARGET)
    assert inside.runtime is Runtime.LLMAPI
    assert inside.draft is not None
    assert (inside.draft.model, inside.draft.tp_size) == ("Qwen3-1.7B", 2)


def test_only_engines_that_stand_for_none_of_tensorrt_llms_share_their_noise(fast: EmbeddedDeployment) -> None:
    own, inside = demo_spec().loop_config(), paced(demo_spec(), SYSTEM, drafts_itself=True).loop_config()
    assert (own.coupled_noise, own.draft_temperature) == (True, None)
    for config in (fast.loop_config(), inside):
        assert (config.coupled_noise, config.draft_temperature) == (False, None)


def test_engines_at_that_pace_share_their_noise_where_they_are_told_to(fast: EmbeddedDeployment) -> None:
    sharing = paced(demo_spec(), SYSTEM, shares_noise=True)
    config = sharing.loop_config()
    assert (config.coupled_noise, config.draft_temperature, config.lacks_mode(Mode.LOSSLESS)) == (True, None, None)
    assert config.limits == fast.loop_config().limits
    for role in Role:
        assert pace(sharing, role) == replace(pace(fast, role), one_hot=False)
    assert "target and draft draw with noise in common" in config.pace
    assert "noise" not in fast.pace_label


def test_roles_on_one_card_know_of_one_another(tmp_path: Path) -> None:
    spec = paced(demo_spec(), "l40s", "qwen3-8b-24gb")
    for role in Role:
        found = EnginePace.from_json(spec.engine_parameters(role, tmp_path)["pace"])
        assert found == pace(spec, role)
        assert found.cards == {role.value: (0,) for role in Role}
    alone = paced(demo_spec(), SYSTEM)
    assert not any(pace(alone, role).cards for role in Role)


def test_times_that_a_request_may_take_are_in_slow_motion_too(fast: EmbeddedDeployment) -> None:
    plain, slow = fast.loop_config().timeouts, paced(demo_spec(), SYSTEM, slow_motion=4.0).loop_config().timeouts
    assert plain == demo_spec().loop_config().timeouts
    assert slow.model_dump() == {name: 4.0 * seconds for name, seconds in plain.model_dump().items()}


def test_the_label_names_tables_release_and_what_it_is_not(fast: EmbeddedDeployment) -> None:
    label = fast.loop_config().pace
    assert label == fast.pace_label
    parts = (
        "real server, loop and models",
        "measured, partly interpolated",
        "aiconfigurator-core 0.12.0",
        "not a run on h200_sxm",
    )
    for part in parts:
        assert part in label
    assert "slow motion" not in label
    assert "in slow motion: all of it takes 2.5 times as long here" in paced(demo_spec(), SYSTEM, slow_motion=2.5).pace_label
    assert demo_spec().loop_config().pace == ""


def test_a_role_at_this_machines_own_pace_is_named(fast: EmbeddedDeployment) -> None:
    own = fast.model_copy(update={"judge": fast.judge.model_copy(update={"pace": None})})
    assert "judge at this machine's own pace" in own.pace_label


@pytest.mark.parametrize(
    ("system", "like", "said"),
    [
        ("h300", None, "there is no hardware profile of the system 'h300'; known: b200_sxm, h100_sxm, h200_sxm, l40s"),
        ("l40s", "qwen3-32b-apart", "there is no hardware profile of Qwen3-32B at TP 2 in bfloat16 on l40s; of that system: "),
        (SYSTEM, "demo", "whose pace it is: demo.toml: the runtime 'embedded' is no GpuDeployment"),
        (SYSTEM, "gpt-5", "whose pace it is: no deployment spec named 'gpt-5'; known: "),
    ],
)
def test_what_has_no_pace_is_refused_in_one_line(system: str, like: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        paced(demo_spec(), system, like)
    assert refused.value.message.startswith(said)
    assert "\n" not in refused.value.message


def test_a_profile_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in profile.PROFILES.glob("h200_sxm.*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace('"version": 1', '"version": 2', 1))
    monkeypatch.setattr(profile.find, "__defaults__", (tmp_path,))
    with pytest.raises(ConfigError, match=r"is of version 2, and version 1 is read: make profiles"):
        paced(demo_spec(), SYSTEM)


def test_a_spec_may_name_the_pace_of_its_roles(tmp_path: Path) -> None:
    text = (demo_spec().path).read_text()
    path = tmp_path / "engines" / "mine.toml"
    path.parent.mkdir()
    text = text.replace("[target]\n", '[target]\npace = "h300"\n').replace('layout = "one_process"', 'layout = "process_a_role"')
    path.write_text(text)
    with pytest.raises(ConfigError, match="no hardware profile of the system 'h300'"):
        DeploymentSpec.load(path)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--pace", "h300"], 1, "no hardware profile of the system 'h300'"),
        (["--spec", "qwen3-32b-apart", "--pace", "l40s"], 1, "no hardware profile of Qwen3-32B at TP 2 in bfloat16 on l40s"),
        (
            ["--spec", "qwen3-32b-apart", "--pace", SYSTEM, "--paced-as", "demo"],
            1,
            "--paced-as: qwen3-32b-apart is emulated as what it is",
        ),
        (
            ["--spec", "qwen3-32b-apart", "--pace", SYSTEM, "--workload", "essays"],
            1,
            "no workload named 'essays'; known: r1-aime24, ",
        ),
        (["--pace", SYSTEM, "--workload", "qwen3-gsm8k"], 1, "--workload: demo has models that write its texts"),
        (["--workload", "qwen3-gsm8k"], 2, "--paced-as, --workload and --slow-motion go with --pace"),
        (["--slow-motion", "2"], 2, "--paced-as, --workload and --slow-motion go with --pace"),
        (["--paced-as", "qwen3-32b-apart"], 2, "--paced-as, --workload and --slow-motion go with --pace"),
        (["--pace", SYSTEM, "--slow-motion", "0.5"], 2, "slow-motion"),
    ],
)
def test_serve_refuses_a_pace_that_cannot_be_before_anything_starts(arguments: list[str], status: int, said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status
    assert said in result.stderr
