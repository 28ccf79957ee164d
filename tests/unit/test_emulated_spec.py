"""A deployment on GPUs without the GPUs: what it takes over, what may be said otherwise, and what is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lr_backend.build.emulated_spec import emulated
from lr_backend.build.pace import CARD_MEMORY_GIB, kv_tokens, machine_of, pace_of, stood_for
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, EmulatedDeployment, GpuDeployment
from lr_backend.config import LoopConfig
from lr_backend.embedded.config import EngineConfig
from lr_backend.emulated.engine import PacedEngine
from lr_backend.emulated.open import open_engine
from lr_backend.emulated.texts import DRAFT_TEMPERATURE, Script, Texts
from lr_backend.emulated.vocabulary import TOKENIZER_DIR, VOCABULARY
from lr_backend.emulated.workload import Workload, published
from lr_backend.engine import Role
from lr_backend.engine.request import EngineResponse
from lr_backend.errors import ConfigError, EngineRejected
from lr_backend.hardware.pace import EnginePace, Runtime
from lr_backend.hardware.rules import OWN_RULES, UpstreamRules
from lr_backend.hardware.sharing import CardSharing
from tests.support.embedded_engines import Pending, engine_config, request
from tests.support.paced import TARGET, close

SYSTEM = "h200_sxm"
LIKE = DeploymentSpec.load("qwen3-32b-apart")
assert isinstance(LIKE, GpuDeployment)


@pytest.fixture(scope="module")
def plain() -> EmulatedDeployment:
    return emulated("qwen3-32b-apart", SYSTEM)


def test_sizes_limits_and_defaults_are_those_of_the_deployment(plain: EmulatedDeployment) -> None:
    for role in Role:
        ours, theirs = plain.engine(role), LIKE.engine(role)
        for name in (
            "max_seq_len",
            "tokens_per_block",
            "max_batch_size",
            "max_num_tokens",
            "enable_kv_cache_reuse",
            "num_drafts",
        ):
            assert getattr(ours, name) == getattr(theirs, name)
        assert plain.checkpoint_dir(role) == TOKENIZER_DIR
    ours_loop, theirs_loop = plain.loop_config(), LIKE.loop_config()
    assert (ours_loop.limits, ours_loop.defaults) == (theirs_loop.limits, theirs_loop.defaults)
    assert (ours_loop.coupled_noise, ours_loop.draft_temperature) == (False, DRAFT_TEMPERATURE) and DRAFT_TEMPERATURE > 0.0
    assert plain.server == LIKE.server.model_copy(update={"num_loops": 1})
    assert plain.placements == ()


def test_kv_memory_is_what_the_sum_leaves_on_the_systems_cards(plain: EmulatedDeployment) -> None:
    kept = kv_tokens(LIKE, SYSTEM)
    assert {role: plain.engine(role).max_tokens_in_paged_kv_cache for role in Role} == kept
    smaller = kv_tokens(LIKE, "h100_sxm")
    assert all(0 < smaller[role] < kept[role] for role in Role)
    # 128 KiB a token and card at TP 2: the two cards' memory less weights, activations and reserves.
    assert 0.5 < kept[Role.TARGET] * 128 / 2**20 / CARD_MEMORY_GIB[SYSTEM] < 0.95
    machine = machine_of(LIKE, SYSTEM)
    assert {role: machine.places[role].kv_tokens for role in Role} == kept


def test_compiled_engines_keep_upstreams_rules_with_their_own_settings(plain: EmulatedDeployment) -> None:
    for role in Role:
        engine = LIKE.engine(role)
        pace = plain.engine_pace(role)
        assert pace.runtime is Runtime.COMPILED
        assert pace.rules == UpstreamRules(
            reserves_kv_in_full=engine.batch_scheduler_policy == "guaranteed_no_evict",  # type: ignore[union-attr]
            cancellation_check_period_ms=engine.cancellation_check_period_ms,  # type: ignore[union-attr]
        )


def test_a_policy_that_evicts_reserves_nothing() -> None:
    engine = LIKE.engine(Role.TARGET).model_copy(update={"batch_scheduler_policy": "max_utilization"})
    evicting = LIKE.model_copy(update={"target": engine})
    assert not machine_of(evicting, SYSTEM).places[Role.TARGET].rules.reserves_kv_in_full


def test_a_target_that_drafts_by_itself_is_one_of_the_llm_api() -> None:
    spec = emulated("qwen3-32b-llmapi", SYSTEM)
    pace = spec.engine_pace(Role.TARGET)
    assert (pace.runtime, pace.rules) == (Runtime.LLMAPI, OWN_RULES)
    assert pace.draft is not None
    assert spec.engine_drafts and spec.loop_config().engine_drafts
    assert spec.engine_pace(Role.JUDGE).draft is None


def test_roles_on_one_card_know_of_one_another(tmp_path: Path) -> None:
    spec = emulated("qwen3-8b-24gb", "l40s")
    for role in Role:
        found = EnginePace.from_json(spec.engine_parameters(role, tmp_path)["pace"])
        assert found == spec.engine_pace(role)
        assert found.cards == {role.value: (0,) for role in Role}
        assert found.sharing is CardSharing.MPS


def test_the_label_says_that_there_is_no_model(plain: EmulatedDeployment) -> None:
    label = plain.loop_config().pace
    for part in ("real server and loop", "scripted texts, no model", "aiconfigurator-core", f"not a run on {SYSTEM}"):
        assert part in label
    slow = emulated("qwen3-32b-apart", SYSTEM, slow_motion=2.0)
    assert "in slow motion: all of it takes 2 times as long here" in slow.pace_label
    assert slow.engine_pace(Role.JUDGE).slow_motion == 2.0


def test_times_that_a_request_may_take_are_in_slow_motion_too() -> None:
    slow, plain = (emulated("qwen3-32b-apart", SYSTEM, slow_motion=factor).loop_config().timeouts for factor in (4.0, 1.0))
    assert slow.model_dump() == {name: 4.0 * seconds for name, seconds in plain.model_dump().items()}


def test_a_draft_inside_the_engine_takes_memory_and_calls_bring_it_no_draft_tokens(tmp_path: Path) -> None:
    alone, beside = (kv_tokens(LIKE, SYSTEM, drafts_itself=one)[Role.TARGET] for one in (False, True))
    assert alone / 2 < beside < alone
    spec = emulated("qwen3-32b-llmapi", SYSTEM)
    assert spec.loop_config().defaults["proposer"] == "engine"
    on_its_own = replace(spec.engine_pace(Role.TARGET), cards={}).as_json()
    engine = open_engine(EngineConfig.from_parameters({**spec.engine_parameters(Role.TARGET, tmp_path), "pace": on_its_own}))
    try:
        with pytest.raises(EngineRejected, match="the LLM API takes none"):
            engine.submit(request((5, 6), 3, draft_ids=(7, 8)), lambda result: None)
    finally:
        engine.close()


def test_a_workload_is_named(plain: EmulatedDeployment) -> None:
    assert plain.texts == published()["qwen3-gsm8k"]
    assert emulated("qwen3-32b-apart", SYSTEM, "r1-gpqa").texts == published()["r1-gpqa"]


def test_a_workload_file_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts.toml").write_text("acceptance_rate = 0.7\n")
    monkeypatch.chdir(tmp_path)
    spec = emulated("qwen3-32b-apart", SYSTEM, "texts.toml")
    monkeypatch.chdir("/")
    assert spec.texts == Workload(0.7)


@pytest.mark.parametrize(
    ("spec", "system", "workload", "said"),
    [
        ("qwen3-32b-apart", "h300", None, "how much memory a card of h300 has is not known; known: h100_sxm, h200_sxm, b200_sxm"),
        ("qwen3-32b-apart", "l40s", None, "there is no hardware profile of Qwen3-32B at TP 2 in bfloat16 on l40s"),
        ("qwen3-32b-apart", SYSTEM, "essays", "no workload named 'essays'; known: "),
        ("qwen3-32b-apart", SYSTEM, "none.toml", "workload none.toml cannot be read: "),
        ("gpt-5", SYSTEM, None, "whose pace it is: no deployment spec named 'gpt-5'; known: "),
        ("demo", SYSTEM, None, "whose pace it is: demo.toml: the runtime 'embedded' is no GpuDeployment"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec: str, system: str, workload: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        emulated(spec, system, workload)
    assert "\n" not in refused.value.message
    assert refused.value.message.startswith(said)


def test_slow_motion_is_no_time_lapse() -> None:
    with pytest.raises(ConfigError, match=r"^qwen3-32b-apart cannot be emulated: slow_motion: "):
        emulated("qwen3-32b-apart", SYSTEM, slow_motion=0.5)


def test_no_spec_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nruntime = "emulated"\n')
    with pytest.raises(ConfigError, match="runtime 'emulated' is not one of embedded, llmapi, tensorrtllm"):
        DeploymentSpec.load(path)


def test_times_over_other_keys_and_values_than_the_memory_holds_are_no_pace() -> None:
    spec = stood_for("qwen3-32b-llmapi")
    small = spec.model_copy(update={"target": spec.target.model_copy(update={"kv_cache_dtype": "fp8"})})
    with pytest.raises(ConfigError, match=r"target.kv_cache_dtype: .* attention over bfloat16, and no pace is known over fp8"):
        pace_of(small, Role.TARGET, "h200_sxm", drafts_itself=True)
    assert pace_of(small, Role.DRAFT, "h200_sxm") == pace_of(spec, Role.DRAFT, "h200_sxm")


def test_what_has_no_room_for_a_sequence_is_refused() -> None:
    longer = LIKE.target.model_copy(update={"max_seq_len": 2_000_000})
    with pytest.raises(
        ConfigError, match=r"^qwen3-32b-apart does not fit h200_sxm: target has memory for \d+ tokens of KV, less than one"
    ):
        kv_tokens(LIKE.model_copy(update={"target": longer}), SYSTEM)


def test_its_repository_holds_four_models_and_no_weights(plain: EmulatedDeployment, tmp_path: Path) -> None:
    report = build_repository(plain, tmp_path / "repository")
    assert {path.name for path in report.output.iterdir()} == {"target", "draft", "judge", "lookahead", "manifest.json"}
    assert [line for line in report.checked if line.startswith("target: ")] == [
        f"target: Qwen3-32B TP 2 bfloat16 on h200_sxm, compiled, emulated, {kv_tokens(LIKE, SYSTEM)[Role.TARGET]} tokens of KV"
    ]
    config = LoopConfig.load(report.output / "lookahead" / "1" / "lookahead.json")
    assert (config.vocab_size, config.tokenizer_dir) == (len(VOCABULARY), TOKENIZER_DIR)
    assert not build_repository(plain, tmp_path / "repository", only_if_stale=True).written
    other = emulated("qwen3-32b-apart", SYSTEM, "r1-gpqa")
    assert build_repository(other, tmp_path / "repository", only_if_stale=True).written


# Engines ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_its_parameters_open_an_engine_that_writes_the_workloads_texts(
    plain: EmulatedDeployment, tmp_path: Path, role: Role
) -> None:
    config = EngineConfig.from_parameters(plain.engine_parameters(role, tmp_path))
    engine = open_engine(config)
    assert isinstance(engine, PacedEngine)
    asked = request(Texts(plain.texts, 0).prompt(0).tolist(), 3)
    answer = Pending()
    engine.submit(asked, answer)
    found: EngineResponse = answer.result()
    feed = Script(role, plain.texts).source().begin(asked)
    assert feed.num_ready >= 3
    assert found.token_ids == tuple(token for _ in range(3) for token in feed.take().token_ids)
    close(engine)


def test_scripted_texts_need_a_pace(tmp_path: Path) -> None:
    script = Script(Role.TARGET, Workload(0.5)).as_json()
    with pytest.raises(ConfigError, match="script: scripted texts have no pace of their own"):
        open_engine(engine_config(tmp_path, script=script))


def test_a_script_that_is_none_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^script: "):
        open_engine(engine_config(tmp_path, script="{}", pace=TARGET))
