"""Deployment specs: what is read, and what is refused with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lr_backend.build import base
from lr_backend.build.render import lookahead_files
from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, EmbeddedDeployment, ServerSpec
from lr_backend.config import CANCEL_RESERVE
from lr_backend.embedded.config import EngineConfig
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.request import Mode
from tests.support.tiny_models import make_tiny_models, write_spec

ROLES = ("target", "draft", "judge")


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    return write_spec(tmp_path / "engines" / "tiny.toml", {role: Path("ck") / role for role in ROLES})


def edited(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def test_the_demo_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = DeploymentSpec.load("demo")
    assert isinstance(spec, EmbeddedDeployment)
    assert spec.root == PACKAGE_ROOT
    assert spec.checkpoint_dir(Role.TARGET) == PACKAGE_ROOT / "demo" / "checkpoints" / "target"
    assert spec.loop_config(1024).defaults["mode"] == "auto"
    assert spec.built_dir == PACKAGE_ROOT / "engines" / "built" / "demo"


def test_the_working_folder_comes_before_the_checkout(spec_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(spec_path.parent.parent)
    assert DeploymentSpec.load("tiny").path == spec_path


def test_every_key_of_the_demo_says_why() -> None:
    lines = (PACKAGE_ROOT / "engines" / "demo.toml").read_text().splitlines()
    keys = [line for line in lines if re.match(r"\w+ = ", line)]
    explained = {line.split(" = ")[0] for line in keys if "#" in line}
    assert {line.split(" = ")[0] for line in keys} - explained == {"checkpoint"}


def test_paths_are_relative_to_the_project_root(spec_path: Path) -> None:
    spec = DeploymentSpec.load(spec_path)
    assert isinstance(spec, EmbeddedDeployment)
    assert spec.checkpoint_dir(Role.DRAFT) == spec_path.parent.parent / "ck" / "draft"


def test_a_spec_outside_of_engines_is_its_own_root(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "mine.toml", {role: Path(role) for role in ROLES})
    assert DeploymentSpec.load(path).root == tmp_path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"embedded"', '"embeded"', "runtime 'embeded' is not one of embedded, llmapi, tensorrtllm"),
        ("num_threads = 1", "num_thread = 1", "target.num_thread"),
        ("num_threads = 1", "num_threads = 0", "target.num_threads"),
        ("[server]", "[serve]", "serve"),
        ("max_num_tokens = 256", "max_num_tokens = 23", "at least max_batch_size"),
        ("max_tokens_in_paged_kv_cache = 8192", "max_tokens_in_paged_kv_cache = 2047", "must hold one sequence"),
        ("max_tokens_in_paged_kv_cache = 8192", "max_tokens_in_paged_kv_cache = 2049\ntokens_per_block = 33", "2046 in whole"),
        ("num_threads = 1", "num_threads = 1\nkv_cache_free_mem_fraction = 1.5", "target.kv_cache_free_mem_fraction"),
        ("max_seq_len = 2048", "max_seq_len = 1279", "target.max_seq_len must hold"),
        ("max_tokens = 256", "max_tokenz = 256", "lookahead.limits.max_tokenz"),
        ("max_tokens = 256", "max_tokens = 0", "lookahead.limits.max_tokens"),
        ("max_step_tokens = 16", "max_step_tokens = 1024", "judge.max_seq_len must hold two steps"),
        (
            "[lookahead.limits]",
            "[lookahead.limits]\nmax_draft_len = 16",
            "lookahead: limits.max_draft_len comes from the target's max_draft_len; leave it out",
        ),
        (
            "[lookahead.limits]",
            "[lookahead.limits]\nmax_in_flight_calls = 120",
            "lookahead: limits.max_in_flight_calls comes from server.thread_pool_size; leave it out",
        ),
        ("[lookahead.limits]\nmax_tokens = 256\nmax_step_tokens = 16\n", "[lookahead]\nlimits = 3\n", "lookahead.limits: "),
        ("[server]", "[lookahead.defaults]\nmode = 'fast'\n[server]", "lookahead.defaults.mode"),
        ("[server]", "[lookahead.defaults]\nmax_tokens = 257\n[server]", "beyond the limit 256"),
        (
            "[server]",
            '[lookahead]\nthink_close = ""\n[lookahead.defaults]\nthinking_token_budget = 9\n[server]',
            "lookahead.defaults.thinking_token_budget: the target marks no end",
        ),
        ("[server]", "[lookahead.defaults]\ncolour = 1\n[server]", "lookahead.defaults.colour"),
        (
            "[lookahead.limits]",
            "[lookahead]\nvocab_size = 3\n[lookahead.limits]",
            "vocab_size comes from the engines and checkpoints",
        ),
        (
            "[lookahead.limits]",
            "[lookahead]\ncoupled_noise = true\n[lookahead.limits]",
            "coupled_noise comes from the engines and checkpoints",
        ),
        ("[lookahead.limits]", "[lookahead]\nverification_cost = 1.3\n[lookahead.limits]", "lookahead.verification_cost: Extra"),
        ("[server]", '[lookahead.defaults]\ndepth = "auto"\n[server]', "lookahead.defaults.depth"),
        (
            "[lookahead.limits]",
            '[lookahead.audit]\nauditor = "checker"\n[lookahead.limits]',
            'lookahead.audit: the auditor "checker" goes with a checker = "module:function"',
        ),
        (
            "[lookahead.limits]",
            '[lookahead.audit]\nchecker = "demo.problems:same_meaning"\n[lookahead.limits]',
            'goes with a checker = "module:function", and no other auditor does',
        ),
        ("[lookahead.limits]", '[lookahead.audit]\nchecker = "same_meaning"\n[lookahead.limits]', "lookahead.audit.checker"),
        ("[server]", "[lookahead.defaults]\naudit_rate = 2\n[server]", "lookahead.defaults.audit_rate"),
        ('name = "tiny"', 'name = "../tiny"', "name"),
        ("[server]", "[server", "cannot be read"),
    ],
)
def test_mistakes_are_named(spec_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        DeploymentSpec.load(edited(spec_path, old, new))
    assert "\n" not in caught.value.message


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no deployment spec named 'nope'; known: .*demo"):
        DeploymentSpec.load("nope")
    with pytest.raises(ConfigError, match=r"no deployment spec at engines/nope\.toml"):
        DeploymentSpec.load("engines/nope.toml")


def test_a_default_that_the_server_has_not_is_refused(spec_path: Path) -> None:
    edited(spec_path, "[lookahead.limits]", '[lookahead.defaults]\nverifier = "embedding"\n[lookahead.limits]')
    with pytest.raises(ConfigError, match=r"lookahead\.defaults\.verifier=embedding: this server has exact, judge, cascade"):
        DeploymentSpec.load(spec_path)


def test_an_empty_marker_is_none(spec_path: Path) -> None:
    edited(spec_path, "[lookahead.limits]", '[lookahead]\nthink_open = ""\nthink_close = ""\n[lookahead.limits]')
    config = DeploymentSpec.load(spec_path).loop_config()
    assert (config.think_open, config.think_close) == (None, None)


def test_a_wheels_own_spec_belongs_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside it; its models are the wheel's, and those that the wheel has not are looked for here."""
    packaged = tmp_path / "site-packages" / "lr_backend" / "_data"
    make_tiny_models(packaged / "models")
    checkpoints = {"target": Path("models/target"), "draft": Path("models/draft"), "judge": Path("checkpoints/own")}
    path = write_spec(packaged / "engines" / "tiny.toml", checkpoints)
    monkeypatch.setattr(base, "PACKAGE_ROOT", packaged)
    monkeypatch.setattr(base, "is_checkout", lambda: False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    spec = DeploymentSpec.load("tiny")

    assert (spec.path, spec.root) == (path, here)
    assert spec.built_dir == here / "engines" / "built" / "tiny"
    assert spec.checkpoint_dir(Role.TARGET) == packaged / "models" / "target"
    assert spec.checkpoint_dir(Role.JUDGE) == here / "checkpoints" / "own"


def test_embedded_engines_share_their_noise(spec_path: Path) -> None:
    edited(spec_path, "[server]", '[lookahead.defaults]\nmode = "lossless"\ntemperature = 0.6\n[server]')
    config = DeploymentSpec.load(spec_path).loop_config()
    assert config.coupled_noise
    assert config.lacks_mode(Mode.LOSSLESS) is None


def test_draft_tokens_and_calls_are_limited_by_what_the_target_and_the_server_say(spec_path: Path) -> None:
    edited(spec_path, "max_draft_len = 16\n\n[draft]", "max_draft_len = 5\n\n[draft]")
    spec = DeploymentSpec.load(edited(spec_path, "[server]", "[server]\nthread_pool_size = 40"))
    rendered = json.loads(lookahead_files(spec, 10)["lookahead/1/lookahead.json"])
    assert (rendered["limits"]["max_draft_len"], rendered["limits"]["max_in_flight_calls"]) == (5, 40 - CANCEL_RESERVE)


def test_a_target_may_take_no_draft_tokens_at_all(spec_path: Path) -> None:
    spec = DeploymentSpec.load(edited(spec_path, "max_draft_len = 16", "max_draft_len = 0"))
    assert spec.loop_config().limits.max_draft_len == 0
    assert spec.placements == ()


@pytest.mark.parametrize("num_loops", [1, 3])
def test_the_step_loop_has_as_many_processes_as_the_spec_says(spec_path: Path, num_loops: int) -> None:
    spec = DeploymentSpec.load(edited(spec_path, "[server]", f"[server]\nnum_loops = {num_loops}"))
    config = lookahead_files(spec, 10)["lookahead/config.pbtxt"]
    assert f"instance_group [ {{ count: {num_loops} kind: KIND_CPU }} ]" in config


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("num_loops = 0", "num_loops"),
        ("num_loops = 65", "num_loops"),
        ('layout = "one_process"\nnum_loops = 2', "one_process holds the engines and the loop in one, so there is one loop"),
    ],
)
def test_a_number_of_loops_that_cannot_be_is_refused(spec_path: Path, lines: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DeploymentSpec.load(edited(spec_path, "[server]", f"[server]\n{lines}"))


def test_there_are_no_more_processes_than_requests_for_them(spec_path: Path) -> None:
    edited(spec_path, "[lookahead.limits]", "[lookahead.limits]\nmax_in_flight_requests = 2")
    DeploymentSpec.load(edited(spec_path, "[server]", "[server]\nnum_loops = 2"))
    with pytest.raises(ConfigError, match="each process needs a request and a call"):
        DeploymentSpec.load(edited(spec_path, "num_loops = 2", "num_loops = 3"))


@pytest.mark.parametrize("num_loops", [1, 3, 64])
def test_processes_share_out_the_threads_and_each_has_its_reserve(num_loops: int) -> None:
    server = ServerSpec(num_loops=num_loops, thread_pool_size=128)
    most = server.max_in_flight_calls
    assert most + CANCEL_RESERVE == server.thread_pool_size
    assert most // num_loops + CANCEL_RESERVE <= server.threads_a_loop <= 128
    assert num_loops * (server.threads_a_loop - CANCEL_RESERVE) <= most


def test_only_a_loop_that_runs_its_engines_is_told_of_them(spec_path: Path) -> None:
    assert DeploymentSpec.load(spec_path).loop_config().engines == {}

    spec = DeploymentSpec.load(edited(spec_path, "[server]", '[server]\nlayout = "one_process"'))

    assert isinstance(spec, EmbeddedDeployment)
    own = {name: EngineConfig.from_parameters(parameters) for name, parameters in spec.loop_config().engines.items()}
    assert {name: config.checkpoint_dir for name, config in own.items()} == {
        role.value: spec.checkpoint_dir(role) for role in Role
    }
    assert own["target"].max_draft_len == spec.target.max_draft_len
