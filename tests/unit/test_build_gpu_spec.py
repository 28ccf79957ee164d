"""Deployments on GPUs: what is read, where engines are placed, and what is refused with a reason."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from lr_backend.build.gpu_build import build_gpu_deployment
from lr_backend.build.memory import estimate
from lr_backend.build.pace import on_system, pace_of
from lr_backend.build.placement import Placement
from lr_backend.build.shapes import find_sources
from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, GpuDeployment, LlmapiEngineSpec, TrtllmEngineSpec
from lr_backend.engine import Role
from lr_backend.errors import ConfigError
from tests.support.fake_trtllm import write_gpu_spec

OF_THE_LLM_API = (
    ('runtime = "tensorrtllm"', 'runtime = "llmapi"'),
    ("max_draft_len = 8\n\n[draft]", "\n[draft]"),
)


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    return write_gpu_spec(tmp_path, checkpoints=False)


def load(path: Path, *edits: tuple[str, str]) -> GpuDeployment:
    text = path.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    spec = DeploymentSpec.load(path)
    assert isinstance(spec, GpuDeployment)
    return spec


def test_every_role_says_where_it_runs(spec_path: Path) -> None:
    assert load(spec_path).placements == (
        Placement(Role.TARGET, "tensorrtllm", 2, (0, 1)),
        Placement(Role.DRAFT, "tensorrtllm", 1, (1,)),
        Placement(Role.JUDGE, "tensorrtllm", 1, (1,)),
    )


SPANS = (
    ("tp_size = 2\n", 'tp_size = 4\nnum_nodes = 2\nurl = "grpc://one:8001"\n'),
    ("[draft]\n", '[draft]\nurl = "grpc://two:8001"\n'),
    ("[judge]\n", '[judge]\nurl = "grpc://two:8001"\n'),
)


def test_a_role_over_machines_names_the_cards_of_one_and_renders_upstreams_two_numbers(spec_path: Path) -> None:
    spec = load(spec_path, *SPANS)
    assert spec.only([Role.TARGET]).placements == (Placement(Role.TARGET, "tensorrtllm", 4, (0, 1), 2),)
    parameters = spec.target.parameters(Path("/engine"))
    assert (parameters["gpu_device_ids"], parameters["num_nodes"]) == ("0,1", "2")
    assert "num_nodes" not in spec.draft.parameters(Path("/engine")), "upstream's default is one"


def test_of_a_role_over_machines_each_card_holds_a_rank_and_no_pace_is_known(tmp_path: Path) -> None:
    one = load(write_gpu_spec(tmp_path / "one"))
    two = load(write_gpu_spec(tmp_path / "two"), *SPANS)
    report = build_gpu_deployment(two.only([Role.TARGET]), dry_run=True)
    assert "target is over 2 machines of 2 cards: 4 ranks; the sums are of each" in report.notes
    (weights,) = {engine.weights for gpu in report.memory for engine in gpu.engines}
    assert weights < next(engine.weights for gpu in estimate(one, find_sources(one)) for engine in gpu.engines)
    convert, build = (step.command.argv for step in report.steps)
    assert convert[convert.index("--tp_size") + 1] == "4"
    assert [argv[argv.index("--workers") + 1] for argv in (convert, build)] == ["2", "1"], "built on one machine"
    with pytest.raises(ConfigError, match=r"target\.num_nodes=2: the kernel tables are of one machine"):
        on_system(two, "h200_sxm")
    with pytest.raises(ConfigError, match=r"target\.num_nodes=2: the kernel tables are of one machine"):
        pace_of(two, Role.TARGET, "h200_sxm")


def test_a_role_may_have_another_runtime(spec_path: Path) -> None:
    spec = load(spec_path, ("[judge]\n", '[judge]\nruntime = "llmapi"\n'))
    assert isinstance(spec.target, TrtllmEngineSpec)
    assert isinstance(spec.judge, LlmapiEngineSpec)
    assert [spec.template(role) for role in Role] == ["tensorrtllm", "tensorrtllm", "llmapi"]
    assert spec.placements[2].runtime == "llmapi"
    parameters = spec.judge.parameters(Path("/ck/judge"))
    assert (parameters["gpt_model_path"], parameters["tp_size"]) == ("/ck/judge", "1")


def test_a_deployment_of_the_llm_api_takes_no_draft_tokens(spec_path: Path) -> None:
    spec = load(spec_path, *OF_THE_LLM_API)
    assert spec.loop_config().limits.max_draft_len == 0
    assert {placement.runtime for placement in spec.placements} == {"llmapi"}


def test_draft_tokens_go_one_hot_unless_the_spec_says_off(spec_path: Path) -> None:
    assert load(spec_path).loop_config().draft_logits == "one_hot"
    spec = load(spec_path, ("[lookahead.limits]", '[lookahead]\ndraft_logits = "off"\n[lookahead.limits]'))
    assert spec.loop_config().draft_logits == "off"


@pytest.mark.parametrize(
    ("target", "draft", "shares"),
    [
        ("", "", True),
        ("", 'url = "grpc://127.0.0.1:8101"\n', True),
        ('url = "grpc://a:1"\n', 'url = "grpc://a:2"\n', True),
        ('url = ["grpc://a:1", "grpc://b:1"]\n', 'url = "grpc://b:2"\n', True),
        ('url = "grpc://a:1"\n', 'url = "grpc://b:1"\n', False),
    ],
)
def test_cards_are_shared_by_roles_of_one_machine(spec_path: Path, target: str, draft: str, shares: bool) -> None:
    """Where they are, a share of the memory that is free says nothing."""
    apart = ("[judge]\n", '[judge]\nurl = "grpc://c:1"\n')
    share = ("max_tokens_in_paged_kv_cache = 4096", "kv_cache_free_gpu_mem_fraction = 0.9")
    refused = pytest.raises(ConfigError, match="target shares a GPU") if shares else nullcontext()
    with refused:
        load(spec_path, share, ("[target]\n", f"[target]\n{target}"), ("[draft]\n", f"[draft]\n{draft}"), apart)


def test_noise_is_shared_where_target_and_draft_both_say_so(spec_path: Path) -> None:
    assert not load(spec_path, *OF_THE_LLM_API).loop_config().coupled_noise
    assert not load(spec_path, ("[target]\n", "[target]\ncoupled_noise = true\n")).loop_config().coupled_noise
    assert load(spec_path, ("[draft]\n", "[draft]\ncoupled_noise = true\n")).loop_config().coupled_noise


def test_a_default_of_sampled_lossless_answers_needs_noise_that_is_shared(spec_path: Path) -> None:
    asked = '[lookahead.defaults]\nmode = "lossless"\ntemperature = 0.6\n[lookahead.limits]'
    with pytest.raises(ConfigError, match=r"lookahead\.defaults\.mode=lossless: above temperature 0 it needs engines whose"):
        load(spec_path, ("[lookahead.limits]", asked))
    greedy = load(spec_path, ("temperature = 0.6", "temperature = 0.0"))
    assert greedy.loop_config().defaults["mode"] == "lossless"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[target]\n", "[target]\nnum_threads = 1\n", "target.num_threads: Extra inputs are not permitted"),
        ("[target]\n", '[target]\nruntime = "embedded"\n', "target: Input tag 'embedded'"),
        ("[judge]\n", '[judge]\nruntime = "llmapi"\nquantization = "fp8"\n', "judge.quantization: Extra inputs"),
        ("[hardware]\n", "[hardware]\ncolour = 1\n", "hardware.colour"),
        ('compute_capability = "9.0"', 'compute_capability = "sm_90"', "hardware.compute_capability"),
        ('compute_capability = "9.0"', 'compute_capability = "7.5"', "needs compute capability 8.0, not 7.5"),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [0]", "must name tp_size = 2 different GPUs"),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [1, 1]", "must name tp_size = 2 different GPUs"),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [7, 8]", "TensorRT-LLM knows 8 cards a machine"),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [1, 2]", "target.gpu_device_ids=[1, 2]: there are 2 GPUs"),
        (
            "tp_size = 2\n",
            "tp_size = 4\nnum_nodes = 2\n",
            "target.num_nodes=2: a role over several machines has servers of its own",
        ),
        (
            "tp_size = 2\n",
            "tp_size = 2\nnum_nodes = 2\n",
            "tp_size = 2 different GPUs on num_nodes = 2 machines, so tp_size / num_nodes",
        ),
        ("gpu_device_ids = [0, 1]", "gpu_device_ids = [1, 2]", "a compiled engine over more says num_nodes"),
        (
            "[judge]\n",
            '[judge]\nruntime = "llmapi"\ntp_size = 2\nnum_nodes = 2\n',
            "judge: num_nodes: only an engine of the runtime tensorrtllm spans machines",
        ),
        ("tokens_per_block = 32", "tokens_per_block = 48", "power of two"),
        ("max_tokens_in_paged_kv_cache = 4096", "", "give one of max_tokens_in_paged_kv_cache and"),
        (
            "max_tokens_in_paged_kv_cache = 4096",
            "max_tokens_in_paged_kv_cache = 4096\nkv_cache_free_gpu_mem_fraction = 0.9",
            "give one of max_tokens_in_paged_kv_cache and",
        ),
        (
            "max_tokens_in_paged_kv_cache = 4096",
            "kv_cache_free_gpu_mem_fraction = 0.9",
            "target shares a GPU, where a kv_cache_free_gpu_mem_fraction depends on who loads first",
        ),
        ("max_tokens_in_paged_kv_cache = 4096", "max_tokens_in_paged_kv_cache = 1023", "must hold one sequence"),
        ("max_num_tokens = 1024", "max_num_tokens = 35", "at least max_batch_size x (max_draft_len + 1) = 36"),
        ("max_num_tokens = 1024", "max_num_tokens = 4097", "beyond max_batch_size x max_seq_len is never used"),
        ("max_num_tokens = 1024", "max_num_tokens = 1023\nenable_chunked_context = false", "a prompt must fit max_num_tokens"),
        ("max_draft_len = 8", "max_draft_len = 8\nenable_kv_cache_reuse = false", "needs enable_kv_cache_reuse"),
        ("max_draft_len = 8", 'max_draft_len = 8\nkv_cache_dtype = "fp8"', "kv_cache_dtype fp8 needs its scales"),
        ("[target]\n", '[target]\nquantization = "fp8"\n', "target: quantization needs a calib_dataset"),
        (
            "[target]\n",
            '[target]\ncalib_dataset = "cnn_dailymail"\n',
            "cnn_dailymail is a name on a hub, and the build has no network",
        ),
        ("[draft]\n", "[draft]\nmax_draft_len = 4\n", "draft.max_draft_len must be 0"),
        ("max_seq_len = 1024", "max_seq_len = 519", "must hold the longest answer and its last drafts: 520"),
        ("max_seq_len = 1024", "max_seq_len = 511", "limits.max_prompt_tokens + limits.max_tokens = 512"),
        ("[lookahead.limits]", '[lookahead]\ndraft_logits = "none"\n[lookahead.limits]', "would sample with a bias"),
        (
            "[lookahead.limits]",
            '[lookahead.defaults]\nverifier = "likely"\n[lookahead.limits]',
            "verifier=likely: this server has exact, judge, cascade",
        ),
        (
            "[lookahead.limits]",
            "[lookahead.limits]\nmax_draft_len = 8",
            "lookahead: limits.max_draft_len comes from the target's max_draft_len; leave it out",
        ),
    ],
)
def test_mistakes_are_named(spec_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load(spec_path, (old, new))
    assert "\n" not in caught.value.message


def test_fp8_needs_a_card_that_has_it(spec_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target with fp8 needs compute capability 8\.9, not 8\.0"):
        load(
            spec_path,
            ('compute_capability = "9.0"', 'compute_capability = "8.0"'),
            ("[target]\n", '[target]\nquantization = "fp8"\ncalib_dataset = "texts/ours"\n'),
        )


SHIPPED = sorted(path.stem for path in (PACKAGE_ROOT / "engines").glob("*.toml") if path.stem != "demo")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_key_of_a_deployment_says_why(name: str) -> None:
    lines = (PACKAGE_ROOT / "engines" / f"{name}.toml").read_text().splitlines()
    keys = [line for line in lines if re.match(r"\w+ = ", line)]
    assert {line for line in keys if "#" not in line and not line.startswith("checkpoint = ")} == set()
    assert all(len(line) <= 130 for line in lines)


def test_compiled_engines_run_in_no_process_of_the_loops(spec_path: Path) -> None:
    spec_path.write_text(re.sub(r"\[server\]\n|\Z", '[server]\nlayout = "one_process"\n', spec_path.read_text(), count=1))
    with pytest.raises(ConfigError, match=r"server\.layout: one_process needs the runtime embedded"):
        DeploymentSpec.load(spec_path)
