"""Every command line that the launcher makes, held against Triton's own option names, their types and values.

``data/triton_options.json`` was taken from Triton's sources (see its ``source``): option names with the type of their argument.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lr_backend.build.placement import Placement
from lr_backend.engine import Role
from lr_backend.serve.launch import LaunchPlan, launch_plan
from lr_backend.serve.restrictions import HEADER, RESTRICTED, restriction_arguments
from lr_backend.serve.server import Ports, ServerOptions, TritonServer

UPSTREAM = json.loads((Path(__file__).parent / "data" / "triton_options.json").read_text())
KEY = "0123456789abcdef"


def placements(runtime: str, target_tp: int = 1) -> list[Placement]:
    gpus = iter(range(8))
    sizes = {Role.TARGET: target_tp, Role.DRAFT: 1, Role.JUDGE: 1}
    return [Placement(role, runtime, size, tuple(next(gpus) for _ in range(size))) for role, size in sizes.items()]


def command(plan: LaunchPlan, tmp_path: Path) -> list[str]:
    server = TritonServer(tmp_path, ServerOptions(thread_pool_size=96, exit_timeout_s=7, plan=plan))
    server.ports, server.shm_prefix = Ports(8000, 8001, 8002), "lookahead_abc_"
    return server.command(Path("/opt/tritonserver/bin/tritonserver"), Path("/links"), restriction_arguments(KEY))


PLANS = {
    "embedded": (launch_plan(()), "24.10"),
    "orchestrator": (launch_plan(placements("tensorrtllm", 2)), "26.07"),
    "leader": (launch_plan(placements("tensorrtllm", 2)[:1] + placements("llmapi")[1:]), "26.07"),
    "over two machines": (launch_plan([replace(placements("tensorrtllm", 4)[0], num_nodes=2)]), "26.07"),
    "llmapi": (launch_plan(placements("llmapi", 2)), "26.07"),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_option_exists_in_the_release_that_it_is_for_and_takes_such_a_value(name: str, tmp_path: Path) -> None:
    plan, release = PLANS[name]
    options = UPSTREAM["options"][release]
    given = [word[2:] for word in command(plan, tmp_path) if word.startswith("--") and word not in plan.launcher]
    assert len(given) > 15
    assert len([word for word in given if word == "allow-http=false"]) == plan.num_ranks - 1
    for option in given:
        key, equals, value = option.partition("=")
        assert key in options, f"{release} has no --{key}"
        kind = options[key]
        assert bool(equals) != (kind == "none"), option
        if kind == "bool":
            assert value in ("true", "false"), option
        if kind == "int":
            assert value.isdigit(), option


def test_what_is_restricted_are_categories_of_tritons_in_tritons_syntax() -> None:
    assert set(RESTRICTED) <= set(UPSTREAM["restricted"])
    assert not {"health", "metadata", "inference"} & set(RESTRICTED), "clients and load balancers need these"
    for option in restriction_arguments(KEY):
        name, _, value = option[2:].partition("=")
        assert name in UPSTREAM["options"]["24.10"] and name in UPSTREAM["options"]["26.07"]
        categories, _, pair = value.partition(":")
        assert categories.split(",") == list(RESTRICTED)
        assert pair == f"{HEADER}={KEY}"


def test_client_shared_memory_is_said_to_be_off_where_the_release_has_the_option(tmp_path: Path) -> None:
    assert "allow-client-shm" not in UPSTREAM["options"]["24.10"]
    for name, (plan, release) in PLANS.items():
        assert ("--allow-client-shm=false" in command(plan, tmp_path)) == (release == "26.07"), name


def test_the_command_line_of_four_gpus(tmp_path: Path) -> None:
    """qwen3-32b-apart: target over two GPUs, draft and judge on one each."""
    restricted = "model-repository,shared-memory,trace,logging:lookahead-admin-key=0123456789abcdef"
    assert command(*PLANS["orchestrator"][:1], tmp_path) == [
        "mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", "1",
        "/opt/tritonserver/bin/tritonserver",
        "--id=lookahead_abc",
        f"--model-repository={tmp_path}",
        "--backend-directory=/links",
        "--http-address=127.0.0.1", "--http-port=8000", "--grpc-address=127.0.0.1", "--grpc-port=8001",
        "--grpc-header-forward-pattern=^traceparent$|^tracestate$",
        "--metrics-address=127.0.0.1", "--metrics-port=8002", "--metrics-interval-ms=500",
        "--backend-config=python,thread-pool-size=96",
        "--backend-config=python,shm-region-prefix-name=lookahead_abc_",
        "--model-control-mode=explicit", "--load-model=*",
        "--disable-auto-complete-config", "--exit-on-error=true", "--strict-readiness=true",
        "--exit-timeout-secs=7",
        "--allow-client-shm=false", "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0", "--cuda-memory-pool-byte-size=2:0",
        "--cuda-memory-pool-byte-size=3:0", "--model-load-thread-count=1",
        f"--http-restricted-api={restricted}", f"--grpc-restricted-protocol={restricted}",
    ]  # fmt: skip


def test_leader_mode_is_one_server_a_rank_and_the_others_load_the_engine_alone(tmp_path: Path) -> None:
    words = command(*PLANS["leader"][:1], tmp_path)
    assert words[:4] == ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
    at = words.index(":")
    first, second = words[4:at], words[at + 1 :]
    assert first[:3] == second[:3] == ["-n", "1", "/opt/tritonserver/bin/tritonserver"]
    assert {"--model-control-mode=explicit", "--load-model=*"} <= set(first)
    assert {"--model-control-mode=explicit", "--load-model=target"} <= set(second)
    assert sum(word.startswith("--load-model") for word in first) == 1
    assert {"--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"} <= set(second)
    assert any(KEY in word for word in first) and not any(KEY in word for word in second), "who does not listen has no key"
    assert not any("/links" in word for word in second), "a folder of the first one's machine"
    prefixes = [next(word.split("=")[-1] for word in rank if "shm-region-prefix-name" in word) for rank in (first, second)]
    assert prefixes == ["lookahead_abc_", "lookahead_abc_rank1_"], "each rank's own, and both go with the server's prefix"
    assert second.count(":") == 0
