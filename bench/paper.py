"""The paper's own table (arXiv 2506.19830, table 1), emulated on the hardware that it was measured on.

The real step loop answers scripted texts on a virtual clock. How long an iteration lasts is what NVIDIA's kernel tables say of
vLLM on H100s, with constants for what they lack; how texts behave is what the paper says of each data set and pair of models. So
nothing is measured here: each cell says what the paper's algorithm would come to by this account, which can be held against
what the paper has measured, and what our own policy would come to.

``--fit`` finds the rates at which n-grams hit, of which the paper says nothing: those with which token speculation alone comes
out as published. They are the only thing that is fitted to published speeds, and of these only the column SD is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.table import Table

from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from lr_backend.cli.errors import refuse
from lr_backend.emulated.workload import Workload, published
from lr_backend.engine import Role
from lr_backend.hardware.cost import ProfileCosts
from lr_backend.hardware.machine import Hops, Machine, Place
from lr_backend.hardware.overheads import Bound, Constant, Overheads, at
from lr_backend.hardware.profile import Profile, ProfileKey, find, label_of
from lr_backend.plan.simulation import Policy, Prediction, Scenario, simulate
from lr_backend.request import Mode

# What is compared ------------------------------------------------------------------------------------------------------

ALONE = Policy(Mode.AR)
"""Of tokens, where the place drafts by itself."""
NO_DRAFT_TOKENS: Mapping[str, Any] = {"verifier": "judge", "num_draft_tokens": 0}
"""Of the loop: where tokens are drafted, each engine does so by itself."""
PAPERS = Policy(Mode.LR, max_depth=6, width=1, fields=NO_DRAFT_TOKENS)
"""The paper's algorithm in the paper's setting (section 4), without own branches. With them it is what they alone add."""
OURS = Policy(Mode.AUTO, max_depth=8, width=1, fields=NO_DRAFT_TOKENS)
"""What our server does where a request chooses nothing, with the paper's verifier. This is the one place that says so."""

# What was published ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """Speedups over the target alone: lookahead, token speculation by n-grams (None: not said), and both."""

    lr: float
    sd: float | None
    lr_sd: float


TABLE: Mapping[str, Published] = {
    "r1-aime24": Published(1.36, 1.53, 1.82),
    "r1-amc23": Published(1.48, 1.50, 2.00),
    "r1-gsm8k": Published(1.71, 1.39, 2.11),
    "r1-humaneval": Published(1.27, 1.32, 1.54),
    "r1-gpqa": Published(1.14, 1.48, 1.63),
    "r1-mt-bench": Published(1.27, 1.25, 1.51),
    "r1-livecodebench": Published(1.21, 1.45, 1.58),
    "qwen3-aime24": Published(1.12, 1.40, 1.49),
    "qwen3-amc23": Published(1.22, 1.38, 1.62),
    "qwen3-gsm8k": Published(1.32, 1.32, 1.68),
    "qwen3-humaneval": Published(1.13, 1.32, 1.39),
    "qwen3-gpqa": Published(1.04, 1.40, 1.44),
    "qwen3-mt-bench": Published(1.10, 1.41, 1.49),
    "qwen3-livecodebench": Published(1.08, 1.25, 1.32),
}
"""arXiv 2506.19830v1, table 1, by the name of the cell's workload."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a cell was measured on.

    Attributes:
        system: the kernel tables' name of the machine.
        num_draft_tokens: of an n-gram, in both roles.
        papers: the algorithm as it was set.
    """

    system: str = "h100_sxm"
    num_draft_tokens: int = 8
    papers: Policy = PAPERS


RERUN, RERUN_CELL = Published(1.19, None, 1.58), "qwen3-aime24"
"""The authors' second run, of their public code (its README); it has no figure for token speculation alone."""
RERUN_SETTING = Setting("h200_sxm", 6, replace(PAPERS, max_depth=4))

# What it is emulated with ----------------------------------------------------------------------------------------------

VLLM_PROFILES = Path(__file__).parent / "inputs" / "vllm"
VLLM_LOOP_MS = Constant(
    1.7,
    0.7,
    3.0,
    "measured minus table of Qwen3-32B on H100 at 8 and 16 sequences, vLLM 0.12.0 (silicon_sample.csv): median of 24",
)
VLLM_LOOKUP_MS = Constant(
    0.5,
    0.1,
    2.0,
    "assumed: n-gram lookup and rejection of an iteration; the lookup alone took 1.5 to 2.2 ms in Python (vLLM PR 9333)",
)
VLLM_CALL_MS = Constant(
    3.0, 1.0, 6.0, "assumed: a request to AsyncLLM and its answer cross two processes each, in Python, beside a loop that polls"
)
VLLM_HTTP_MS = Constant(
    4.0, 2.0, 8.0, "assumed: the same by an OpenAI client through the API server: JSON, tokenizer and two more event loops"
)
JUDGE = ("Qwen2.5-7B-Instruct", 1)
MODELS: Mapping[str, Mapping[Role, tuple[str, int]]] = {
    "r1": {
        Role.TARGET: ("DeepSeek-R1-Distill-Qwen-32B", 2),
        Role.DRAFT: ("DeepSeek-R1-Distill-Qwen-1.5B", 1),
        Role.JUDGE: JUDGE,
    },
    "qwen3": {Role.TARGET: ("Qwen3-32B", 2), Role.DRAFT: ("Qwen3-1.7B", 1), Role.JUDGE: JUDGE},
}
"""Model and cards of each role, by the pair's name; each role has cards of its own."""
MAX_NUM_TOKENS, TOKENS_PER_BLOCK, KV_TOKENS = 8192, 16, 1 << 17
"""Of the authors' code, of vLLM's default, and room enough for one request."""
NUM_TEXTS = 10
HIT_RATES = (0.0, 0.8)
"""That a workload may have."""
FITS_WITHIN = 0.002
"""Share by which a fitted speedup may be off."""


def profile_of(system: str, pair: str, role: Role) -> Profile:
    """Raises: ConfigError: there is no such profile."""
    model, tp_size = MODELS[pair][role]
    return find(ProfileKey(system, model, tp_size, "bfloat16"), VLLM_PROFILES)


def overheads_of(profile: Profile, *, looks_up: bool = False, http: bool = False, bound: Bound = Bound.VALUE) -> Overheads:
    """An engine of vLLM's first generation of V1: graphs of all but attention, and host work that does not overlap.

    Its loop was measured at several parallelisms and does not grow with them.

    Args:
        looks_up: it drafts by looking up n-grams, whether it finds any or not.
        http: it is called through its API server, not in process.
    """
    return Overheads(
        profile,
        replays_graphs=True,
        poll_ms=None,
        loop_ms=at(VLLM_LOOP_MS, bound) + (at(VLLM_LOOKUP_MS, bound) if looks_up else 0.0),
        loop_samples=True,
        bound=bound,
        replays_joins=True,
        call_ms=at(VLLM_CALL_MS, bound) + (at(VLLM_HTTP_MS, bound) if http else 0.0),
    )


def place_of(profile: Profile, num_draft_tokens: int, *, http: bool, bound: Bound = Bound.VALUE) -> Place:
    """An engine of vLLM's with this profile; ``num_draft_tokens``: of an n-gram, 0 for none."""
    overheads = overheads_of(profile, looks_up=num_draft_tokens > 0, http=http, bound=bound)
    hop_s = overheads.hop_ms / 1e3
    return Place(
        ProfileCosts(profile, overheads),
        Hops(hop_s, hop_s),
        num_draft_tokens=num_draft_tokens,
        looks_up=num_draft_tokens > 0,
        kv_tokens=KV_TOKENS,
        max_num_tokens=MAX_NUM_TOKENS,
        tokens_per_block=TOKENS_PER_BLOCK,
    )


def machine_of(system: str, pair: str, num_draft_tokens: int = 0, bound: Bound = Bound.VALUE) -> Machine:
    """The paper's machine: target and draft in process, the judge behind its API server; n-grams in the first two."""
    places = {}
    for role in Role:
        drafts = 0 if role is Role.JUDGE else num_draft_tokens
        places[role] = place_of(profile_of(system, pair, role), drafts, http=role is Role.JUDGE, bound=bound)
    return Machine(places)


def label() -> str:
    """What must stand beside every figure."""
    systems = (Setting().system, RERUN_SETTING.system)
    return label_of([profile_of(system, pair, role) for system in systems for pair in MODELS for role in Role])


# Gains -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """A speedup over the target alone, with the same texts.

    Attributes:
        alone_s, taken_s: of each text.
    """

    alone_s: tuple[float, ...]
    taken_s: tuple[float, ...]

    @classmethod
    def of(cls, alone: Prediction, taken: Prediction) -> Self:
        return cls(tuple(one.latency_s for one in alone.usages), tuple(one.latency_s for one in taken.usages))

    @cached_property
    def mean(self) -> float:
        """Of all texts together."""
        return sum(self.alone_s) / sum(self.taken_s)

    @property
    def error(self) -> float:
        """Standard error of the mean: each text left out in turn."""
        alone_s, taken_s, count = sum(self.alone_s), sum(self.taken_s), len(self.taken_s)
        without = [(alone_s - alone) / (taken_s - taken) for alone, taken in zip(self.alone_s, self.taken_s, strict=True)]
        return sqrt((count - 1) / count * sum((one - fmean(without)) ** 2 for one in without)) if count > 1 else float("nan")

    @property
    def by_text(self) -> list[float]:
        return [alone / taken for alone, taken in zip(self.alone_s, self.taken_s, strict=True)]

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "error": self.error, "low": min(self.by_text), "high": max(self.by_text)}


@dataclass(frozen=True)
class Row:
    """One cell: what was published, and what comes out.

    Attributes:
        sd: fitted, so as published.
        papers, own, ours: lookahead by the paper's algorithm, by that with own branches, and by our policy; ``_sd``: over engines
            that look up n-grams.
        acceptance_rate: of ``papers``, as it came out.
    """

    name: str
    published: Published
    alpha: float
    acceptance_rate: float
    sd: Gain
    papers: Gain
    own: Gain
    ours: Gain
    papers_sd: Gain
    own_sd: Gain
    ours_sd: Gain

    @property
    def ratio_lr(self) -> float:
        """How well the emulation reproduces what was published: 1 is exactly."""
        return self.papers.mean / self.published.lr

    @property
    def ratio_lr_sd(self) -> float:
        return self.papers_sd.mean / self.published.lr_sd

    @property
    def own_gain_lr(self) -> float:
        """What own branches alone add to the paper's algorithm."""
        return self.own.mean / self.papers.mean

    @property
    def own_gain_lr_sd(self) -> float:
        return self.own_sd.mean / self.papers_sd.mean

    @property
    def gain_lr(self) -> float:
        """What our policy adds to the paper's."""
        return self.ours.mean / self.papers.mean

    @property
    def gain_lr_sd(self) -> float:
        return self.ours_sd.mean / self.papers_sd.mean

    def as_dict(self) -> dict[str, Any]:
        gains = ("sd", "papers", "own", "ours", "papers_sd", "own_sd", "ours_sd")
        ratios = ("ratio_lr", "ratio_lr_sd", "own_gain_lr", "own_gain_lr_sd", "gain_lr", "gain_lr_sd")
        return {
            "cell": self.name,
            "alpha": self.alpha,
            "acceptance_rate": self.acceptance_rate,
            "published": asdict(self.published),
            **{name: getattr(self, name).as_dict() for name in gains},
            **{name: getattr(self, name) for name in ratios},
        }


def pair_of(cell: str) -> str:
    return cell.partition("-")[0]


def workload_of(cell: str, num_steps: int | None = None) -> Workload:
    """Of the paper; ``num_steps``: answers of another length."""
    found = published()[cell]
    return replace(found, num_steps=num_steps) if num_steps else found


@dataclass(frozen=True)
class Emulation:
    """How much is computed, and with which end of the constants' ranges."""

    num_texts: int = NUM_TEXTS
    num_steps: int | None = None
    bound: Bound = Bound.VALUE

    def row(self, cell: str, was: Published, setting: Setting) -> Row:
        """One cell in one setting."""
        workload, pair = workload_of(cell, self.num_steps), pair_of(cell)
        plain, looking_up = (
            Scenario(workload, machine_of(setting.system, pair, number, self.bound)) for number in (0, setting.num_draft_tokens)
        )
        without, without_sd = (replace(one, own_branches=False) for one in (plain, looking_up))
        alone = self._answers(plain, ALONE)
        gain = partial(self._gain, alone)
        papers = self._answers(without, setting.papers)
        return Row(
            cell,
            was,
            workload.acceptance_rate,
            papers.step_acceptance_rate or 0.0,
            sd=gain(looking_up, ALONE),
            papers=Gain.of(alone, papers),
            own=gain(plain, setting.papers),
            ours=gain(plain, OURS),
            papers_sd=gain(without_sd, setting.papers),
            own_sd=gain(looking_up, setting.papers),
            ours_sd=gain(looking_up, OURS),
        )

    def fitted_rate(self, cell: str) -> float:
        """The rate at which n-grams hit with which token speculation alone is as published; by false position."""
        workload, pair, setting = workload_of(cell, self.num_steps), pair_of(cell), Setting()
        alone = self._answers(Scenario(workload, machine_of(setting.system, pair)), ALONE)
        machine, wanted = machine_of(setting.system, pair, setting.num_draft_tokens), TABLE[cell].sd
        assert wanted is not None

        def off(rate: float) -> float:
            return self._gain(alone, Scenario(replace(workload, ngram_hit_rate=rate), machine), ALONE).mean / wanted - 1.0

        ends = {rate: off(rate) for rate in HIT_RATES}
        while True:
            low, high = max(rate for rate in ends if ends[rate] <= 0.0), min(rate for rate in ends if ends[rate] > 0.0)
            middle = round(low - ends[low] * (high - low) / (ends[high] - ends[low]), 3)
            if middle in ends:
                return middle
            ends[middle] = off(middle)
            if abs(ends[middle]) < FITS_WITHIN:
                return middle

    def _gain(self, alone: Prediction, scenario: Scenario, policy: Policy) -> Gain:
        return Gain.of(alone, self._answers(scenario, policy))

    def _answers(self, scenario: Scenario, policy: Policy) -> Prediction:
        """By one server, one after another."""
        return simulate(scenario, policy, num_sets=self.num_texts)


# What is shown ---------------------------------------------------------------------------------------------------------


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """A table for lookahead alone, and one over engines that look up n-grams."""
    block = ("paper's", "ratio", "own branches", "gain", "ours", "gain")
    alone, looking_up = Table(title=f"LR: {title}"), Table(title=f"SD+LR: {title}")
    for table, names in ((alone, ("α", "published")), (looking_up, ("SD", "published"))):
        for name in ("cell", *names, *block):
            table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True)
    for row in rows:
        alone.add_row(row.name, f"{row.alpha:.2f}", *_block(row.published.lr, row.papers, row.own, row.ours))
        looking_up.add_row(row.name, f"{row.sd.mean:.2f}", *_block(row.published.lr_sd, row.papers_sd, row.own_sd, row.ours_sd))
    console.print(alone)
    console.print(looking_up)


def _block(was: float, papers: Gain, *others: Gain) -> list[str]:
    found = [f"{was:.2f}", f"{papers.mean:.2f}", f"{papers.mean / was:.2f}"]
    for one in others:
        colour = "green" if one.mean > was else "red"
        found += [f"[{colour}]{one.mean:.2f}[/]", f"{one.mean / papers.mean:.2f}"]
    return found


def noise(rows: Sequence[Row]) -> float:
    """The largest standard error of a cell of the paper's algorithm, as a share."""
    return max(gain.error / gain.mean for row in rows for gain in (row.papers, row.papers_sd))


def summary(rows: Sequence[Row], rerun: Row) -> dict[str, float | int]:
    """The last line. ``ratio``: the paper's algorithm over published; ``own_gain``, ``gain``: own branches alone, and our policy,
    over the paper's algorithm."""

    def middle(of: Callable[[Row], float]) -> float:
        return round(median(of(row) for row in rows), 4)

    return {
        "cells": len(rows),
        "median_ratio_lr": middle(lambda row: row.ratio_lr),
        "median_ratio_lr_sd": middle(lambda row: row.ratio_lr_sd),
        "median_own_gain_lr": middle(lambda row: row.own_gain_lr),
        "median_own_gain_lr_sd": middle(lambda row: row.own_gain_lr_sd),
        "median_gain_lr": middle(lambda row: row.gain_lr),
        "median_gain_lr_sd": middle(lambda row: row.gain_lr_sd),
        "ahead_lr": sum(row.ours.mean > row.published.lr for row in rows),
        "ahead_lr_sd": sum(row.ours_sd.mean > row.published.lr_sd for row in rows),
        "rerun_lr": round(rerun.papers.mean, 4),
        "rerun_lr_sd": round(rerun.papers_sd.mean, 4),
    }


def main(
    num_texts: Annotated[int, typer.Option("--texts", min=2, help="Answers in each cell.")] = NUM_TEXTS,
    num_steps: Annotated[int | None, typer.Option("--steps", min=2, help="Of an answer, instead of the workload's.")] = None,
    cells: Annotated[list[str] | None, typer.Option("--cell", help="Only this one; repeat it for more.")] = None,
    bound: Annotated[Bound, typer.Option(help="Which end of the constants' ranges.")] = Bound.VALUE,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compute cells.")] = 2,
    fit: Annotated[bool, typer.Option("--fit", help="Print the rates at which n-grams hit, and nothing else.")] = False,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "paper.json",
) -> None:
    """Print the paper's table and last one line of JSON."""
    if unknown := set(cells or ()) - set(TABLE):
        refuse(f"--cell {', '.join(sorted(unknown))}: known are {', '.join(TABLE)}")
    chosen = {name: was for name, was in TABLE.items() if not cells or name in cells}
    emulation = Emulation(num_texts, num_steps, bound)
    console = console_of_any_width()
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(workers)) if workers > 1 else None
        compute: Callable[..., Any] = pool.map if pool is not None else map
        if fit:
            _print_rates(console, dict(zip(chosen, compute(emulation.fitted_rate, chosen), strict=True)))
            return
        settings = [*repeat(Setting(), len(chosen)), RERUN_SETTING]
        found = compute(emulation.row, [*chosen, RERUN_CELL], [*chosen.values(), RERUN], settings)
        with console.status("answering on the virtual clock"):
            *rows, rerun = found
    texts = f"{num_texts} answers a cell, constants at their {bound}"
    show(console, f"the paper's table, H100, depth 6, n-grams of 8; {texts}", rows)
    show(console, "the authors' second run, H200, depth 4, n-grams of 6", [rerun])
    console.print(f"[dim]standard error of the paper's algorithm: at most {noise(rows):.1%} in a cell[/]", highlight=False)
    console.print(f"[yellow]real loop, virtual clock, scripted texts; {label()}[/]", highlight=False, soft_wrap=True)
    document = {
        "label": label(),
        "num_texts": num_texts,
        "bound": bound.value,
        "rows": [row.as_dict() for row in rows],
        "rerun": rerun.as_dict(),
        "noise": noise(rows),
        "summary": summary(rows, rerun),
    }
    write_json(output, document)
    console.print(f"written to {output}")
    print_line(console, summary(rows, rerun))


def _print_rates(console: Console, rates: Mapping[str, float]) -> None:
    for cell, rate in rates.items():
        console.print(f"[{cell}]\nngram_hit_rate = {rate}", highlight=False, markup=False)
