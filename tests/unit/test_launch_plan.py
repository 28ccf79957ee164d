"""Which mode a deployment is launched in, and the key of what only an administrator may use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lr_backend.build.placement import Placement
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from lr_backend.mpi import UNBOUND, UNBOUND_BY_MPIRUN
from lr_backend.serve.launch import COMPILED_ENVIRONMENT, PLAIN, LaunchMode, launch_plan
from lr_backend.serve.restrictions import KEY_VARIABLE, admin_key, unseen_arguments, without_key
from lr_backend.serve.server import ServerOptions, TritonServer


def on(role: Role, runtime: str, *gpus: int) -> Placement:
    return Placement(role, runtime, max(1, len(gpus)), gpus)


TARGET, DRAFT, JUDGE = Role.TARGET, Role.DRAFT, Role.JUDGE


def test_the_embedded_engine_needs_nothing() -> None:
    assert launch_plan(()) == launch_plan([on(role, "embedded") for role in Role]) == PLAIN


@pytest.mark.parametrize("gpus", [((0,), (0,), (0,)), ((0,), (1,), (2,)), ((0, 1), (2,), (3,))])
def test_several_compiled_engines_need_the_orchestrator(gpus: tuple[tuple[int, ...], ...]) -> None:
    plan = launch_plan([on(role, "tensorrtllm", *ids) for role, ids in zip(Role, gpus, strict=True)])
    assert plan.mode is LaunchMode.ORCHESTRATOR
    orchestrator = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    assert plan.environment == {**orchestrator, **COMPILED_ENVIRONMENT, **UNBOUND, **UNBOUND_BY_MPIRUN}
    more_than_cores = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    assert more_than_cores.items() <= plan.environment.items()
    assert plan.num_ranks == 1
    assert plan.launcher[0] == "mpirun"
    assert "--model-load-thread-count=1" in plan.arguments, "no two engines spawn at a time"


@pytest.mark.parametrize(
    "engines", [[on(TARGET, "tensorrtllm", 0), on(DRAFT, "tensorrtllm", 2)], [on(TARGET, "tensorrtllm", 0, 2)]]
)
def test_a_server_of_compiled_engines_keeps_off_every_gpu_that_it_sees(engines: list[Placement]) -> None:
    """One that spawns, and one of each rank."""

    def pools(num_gpus: int | None) -> list[str]:
        arguments = launch_plan(engines, num_gpus=num_gpus).arguments
        assert {"--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"} <= set(arguments)
        return [word.split("=")[1] for word in arguments if "cuda-memory" in word]

    assert pools(None) == ["0:0", "1:0", "2:0"]
    assert pools(8) == [f"{device}:0" for device in range(8)]


def test_one_compiled_engine_is_led_by_its_own_ranks() -> None:
    mixed = launch_plan([on(TARGET, "tensorrtllm", 0, 1), on(DRAFT, "llmapi", 2), on(JUDGE, "llmapi", 3)])
    assert (mixed.mode, mixed.num_ranks, mixed.worker_models) == (LaunchMode.LEADER, 2, ("target",))
    assert mixed.environment == COMPILED_ENVIRONMENT
    single = launch_plan([on(TARGET, "tensorrtllm", 0)])
    assert (single.mode, single.num_ranks, single.worker_models) == (LaunchMode.LEADER, 1, ())


def test_llm_api_engines_start_their_own_ranks() -> None:
    plan = launch_plan([on(TARGET, "llmapi", 0, 1), on(DRAFT, "llmapi", 2), on(JUDGE, "llmapi", 3)])
    assert (plan.mode, plan.launcher, plan.environment) == (LaunchMode.PLAIN, (), {})


JOB = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "1"}
SETTINGS = {"PATH": "/bin", "OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash", "OPAL_PREFIX": "/opt/hpcx/ompi"}


def test_a_server_under_mpirun_belongs_to_no_other_job_and_keeps_the_settings() -> None:
    engines = [on(TARGET, "tensorrtllm", 0), on(DRAFT, "tensorrtllm", 1)]
    assert launch_plan(engines).over({**SETTINGS, **JOB}) == {**SETTINGS, **launch_plan(engines).environment}
    assert launch_plan(engines[:1]).over({**SETTINGS, **JOB}) == {**SETTINGS, **COMPILED_ENVIRONMENT}
    assert PLAIN.over({**SETTINGS, **JOB}) == {**SETTINGS, **JOB}, "what starts no job is none of our business"


def test_what_an_operator_says_of_binding_stands_and_what_the_mode_needs_does_too() -> None:
    plan = launch_plan([on(TARGET, "tensorrtllm", 0), on(DRAFT, "tensorrtllm", 1)])
    said = {"OMPI_MCA_hwloc_base_binding_policy": "numa", "PRTE_MCA_rmaps_default_inherit": "0"}
    assert plan.over({**said, "TRTLLM_ORCHESTRATOR": "0"}) == {**plan.environment, **said}


def test_the_key_comes_from_a_variable_or_a_file_or_is_new_each_time(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef-from-file\n")
    assert admin_key({KEY_VARIABLE: "0123456789abcdef"}) == "0123456789abcdef"
    assert admin_key({f"{KEY_VARIABLE}_FILE": str(path)}) == "0123456789abcdef-from-file"
    made = {admin_key({}) for _ in range(8)}
    assert len(made) == 8
    assert all(admin_key({KEY_VARIABLE: key}) == key for key in made)


@pytest.mark.parametrize("text", ["short", "0123456789abcdef with space", "0123456789abcdef\nX: y", "0123456789abcdef,logging:x"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=KEY_VARIABLE) as caught:
        admin_key({KEY_VARIABLE: text})
    assert text not in caught.value.message


def test_two_keys_or_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both"):
        admin_key({KEY_VARIABLE: "0123456789abcdef", f"{KEY_VARIABLE}_FILE": str(tmp_path)})
    with pytest.raises(ConfigError, match="cannot be read"):
        admin_key({f"{KEY_VARIABLE}_FILE": str(tmp_path / "none")})


def test_the_key_is_in_no_log_and_no_models_environment(tmp_path: Path) -> None:
    options = ServerOptions(admin_key="0123456789abcdef")
    assert "0123456789abcdef" not in repr(options)
    assert not any("0123456789abcdef" in word for word in TritonServer(tmp_path, options).command(Path("/t"), None))
    assert without_key({KEY_VARIABLE: "x", f"{KEY_VARIABLE}_FILE": "y", "PATH": "z"}) == {"PATH": "z"}


@pytest.mark.parametrize(("folder", "unseen"), [("plain", True), ("with space", False), ("with:colon", False)])
def test_arguments_that_no_preloaded_library_could_bring_are_on_the_command_line(
    folder: str, unseen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``LD_PRELOAD`` splits at blanks and colons: what lies behind one is not loaded, and the server would be open."""
    library, binary = tmp_path / folder / "_arguments.so", tmp_path / "tritonserver"
    binary.write_bytes(b"\x7fELF")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(origin=str(library)))
    found = unseen_arguments(("--http-restricted-api=a:b=c",), binary, {})
    assert (found.arguments == ()) is unseen and bool(found.environment) is unseen
