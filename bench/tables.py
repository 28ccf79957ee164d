"""The registry: every table, the page that tells of it, and the short form that shows that it still runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is measured.

    Attributes:
        name: as in ``python -m bench NAME``.
        module: its ``main`` measures, prints a table and ends with a line of JSON.
        measures: what, in a few words.
        minutes: how long it takes on two cores.
        page: that tells of it, under ``docs``.
        json: that it writes, under ``docs/benchmarks``; None: its figures are not published, and go to ``out``.
        short: options of its short form.
        figure: keys of one figure in the last line of JSON, with dots between.
        needs_card: it measures a GPU.
    """

    name: str
    module: str
    measures: str
    minutes: int
    page: str
    json: str | None
    short: tuple[str, ...]
    figure: str
    needs_card: bool = False


def _options(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TABLES = (
    Table(
        "pace",
        "bench.pace",
        "every mode at the pace of H200s, and how near the planner comes",
        12,
        "benchmarks/pace.md",
        "pace.json",
        _options("--problems 2 --slow-motion 4 --compiled-only"),
        "lr_sd",
    ),
    Table(
        "card",
        "bench.card",
        "hardware profiles and laws of sharing beside a real card",
        25,
        "benchmarks/card.md",
        "card.json",
        _options("--part constants"),
        "constants.LAUNCH_US",
        needs_card=True,
    ),
    Table(
        "maps",
        "bench.maps",
        "where lookahead pays, over load, context and acceptance; what equal GPUs are best used for",
        60,
        "benchmarks/emulation.md",
        "maps.json",
        _options("--system h200_sxm --load 1 --context 1000 --alpha 0.6"),
        "equal_gpus.4.lr_over_ar",
    ),
    Table(
        "admission",
        "bench.admission",
        "what the token budget of an iteration is worth, behind longer and longer prefixes",
        2,
        "benchmarks/emulation.md",
        "admission.json",
        _options("--load 2 --context 1000"),
        "40960 1000",
    ),
    Table(
        "faults",
        "bench.faults",
        "processes killed, drains, cancels, overload, large prompts, and what memory stays",
        22,
        "reliability.md",
        "faults.json",
        _options("--tries 1 --requests 1200 --seconds 3 --layout one_process"),
        "hangs",
    ),
    Table(
        "paper",
        "bench.paper",
        "the paper's own table, emulated on its hardware",
        8,
        "benchmarks/paper.md",
        "paper.json",
        _options("--texts 2 --steps 12 --cell qwen3-gsm8k"),
        "median_ratio_lr",
    ),
    Table(
        "pace_peers",
        "bench.pace_peers",
        "other procedures over the same three models, at the pace of H200s",
        1,
        "benchmarks/emulation.md",
        "pace_peers.json",
        _options("--texts 1"),
        "lr",
    ),
    Table(
        "emulation",
        "bench.emulation",
        "an emulated server on the wall's clock, beside the virtual one",
        7,
        "benchmarks/emulation.md",
        "emulation.json",
        _options("--load 1"),
        "worst",
    ),
    Table(
        "ablation",
        "bench.ablation",
        "what depth, width, own branches, verifiers and draft tokens are each worth",
        6,
        "benchmarks/ablation.md",
        "ablation.json",
        (*_options("--problems 1 --checked 1 --row sd --row lr --row lr_sd --row auto"), "--row", "lr verifier chance"),
        "speedup",
    ),
    Table(
        "planner",
        "bench.planner",
        "what the planner predicts from recorded requests, beside what others take",
        2,
        "tracing.md",
        "planner.json",
        _options("--recorded 4 --problems 2"),
        "depth 4 without.nothing",
    ),
    Table(
        "peers",
        "bench.peers",
        "transformers, the target alone and the paper's synchronous procedure beside the modes",
        5,
        "benchmarks/README.md",
        "peers.json",
        _options("--problems 1"),
        "synchronous_acceptance",
    ),
    Table(
        "systems",
        "bench.systems",
        "random models of real shapes with scripted acceptance, against the paper's formulas",
        4,
        "benchmarks/README.md",
        "systems.json",
        _options("--target 10m --draft 3m --judge 3m --questions 2 --steps 4 --alpha 0.8 --depth 4"),
        "ms_a_token",
    ),
    Table(
        "engine",
        "bench.engine",
        "what an iteration of the embedded engine costs, beside transformers",
        2,
        "benchmarks/engine.md",
        "engine.json",
        _options("--rounds 1"),
        "decode_vs_transformers",
    ),
    Table(
        "overhead",
        "bench.overhead",
        "what the loop and Triton add to the engines' own time",
        1,
        "benchmarks/engine.md",
        "engine.json",
        _options("--problems 2"),
        "overhead_share",
    ),
    Table(
        "loop_limit",
        "bench.loop_limit",
        "how many requests one process of the step loop carries, at the pace of H200s",
        5,
        "benchmarks/loop_limit.md",
        "loop_limit.json",
        _options("--mode lr --load 1 --load 4 --steps 4"),
        "lr.loop_alone",
    ),
    Table(
        "verifiers",
        "bench.verifiers",
        "each verifier on pairs of steps, beside the demo world's checker",
        2,
        "benchmarks/evaluation.md",
        None,
        _options("--problems 2 --pairs 20"),
        "drafted.judge.agreement",
    ),
    Table(
        "evaluation",
        "bench.evaluation.speed",
        "speed and quality of the modes over 200 problems",
        2,
        "benchmarks/evaluation.md",
        "evaluation.json",
        _options("--problems 4"),
        "demo.lr_sd.tokens_per_s.0",
    ),
    Table(
        "quality",
        "bench.evaluation.quality",
        "whether mode auto keeps what ar gets right: 2,000 problems",
        4,
        "benchmarks/evaluation.md",
        "quality.json",
        _options("--problems 8"),
        "difference_points",
    ),
    Table(
        "wording",
        "bench.wording",
        "what answers lose by a draft's wording, with a checker that is never wrong",
        25,
        "benchmarks/evaluation.md",
        "wording.json",
        _options("--problems 4 --samples 1"),
        "num_problems",
    ),
    Table(
        "trial",
        "bench.evaluation.trial",
        "what each verifier lets through, and what that does to the answers",
        11,
        "benchmarks/evaluation.md",
        "trial.json",
        _options("--problems 2 --verifiers judge,exact"),
        "demo.lr judge.alpha",
    ),
    Table(
        "load",
        "bench.load.command",
        "each mode under rising load, by NVIDIA's perf_analyzer",
        35,
        "benchmarks/README.md",
        "load.json",
        _options("--spec demo --concurrency 1 --no-rates --min-requests 2"),
        "num_points",
    ),
    Table(
        "aiperf",
        "bench.load.aiperf",
        "the OpenAI API of the demo and of an emulated deployment, by NVIDIA's AIPerf",
        5,
        "benchmarks/README.md",
        "aiperf.json",
        _options("--deployment demo --concurrency 1 --requests 2"),
        "errors_percent",
    ),
)
"""In the order of the list; ``check-all`` runs them in it."""
