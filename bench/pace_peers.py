"""Other ways to use the same three models, at the same pace.

All run over the same emulated engines and the same scripted texts on a virtual clock: the paper's synchronous procedure,
SpecReason's sequential one (arXiv 2504.07891), token speculation by each source of draft tokens, and the step loop. One request.

SpecReason's target scores a drafted step with one token behind a short question, and writes the step anew where the score is low.
Here it accepts the steps that the judge would accept, so that procedures are compared and not verifiers: the paper found that its
scores accept more, and cost accuracy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.synchronous import SynchronousLookahead
from bench.kit.synchronous import Texts as ReadAs
from lr_backend.build.pace import machine_of, pace_of, stood_for
from lr_backend.contract import IntArray
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.vocabulary import END, FIRST_WORD, NUM_WORDS, UNLIKE, VOCABULARY
from lr_backend.emulated.workload import Workload
from lr_backend.engine import EngineCall, Role, Sampling
from lr_backend.hardware.profile import find, label_of
from lr_backend.loop.assemble import Engines
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.seeds import Seeds
from lr_backend.loop.writer import StepWriter
from lr_backend.plan.equal_gpus import BY_ITSELF, COMPILED, DRAFT_TOKENS, LLM_API
from lr_backend.plan.simulation import Policy, Scenario, judge_prompt, run_on_engines, simulate
from lr_backend.request import Mode
from lr_backend.steps.rules import StepRules
from lr_backend.steps.step import StepEnd

DEPLOYMENT, SYSTEM = "qwen3-32b-apart", "h200_sxm"
NUM_STEPS = 40
"""Of a text."""
SCORE_QUESTION_TOKENS = 80
"""SpecReason's question for a score, about as long as its prompt."""
SAMPLING, DRAFTING = Sampling(temperature=0.6), Sampling()
"""As the server's own modes: so the same drafted steps are accepted in all procedures."""
EXTERNAL: Mapping[str, Any] = {"num_draft_tokens": 8}
ROWS: Mapping[str, tuple[Policy, str]] = {
    "ar": (Policy(Mode.AR), COMPILED),
    "ar, LLM API": (Policy(Mode.AR), LLM_API),
    "sd, n-gram": (Policy(Mode.SD, 0, fields={**EXTERNAL, "proposer": "ngram"}), COMPILED),
    "sd, draft model": (Policy(Mode.SD, 0, fields=DRAFT_TOKENS), COMPILED),
    "sd, draft model in the engine": (Policy(Mode.SD, 0, fields=BY_ITSELF), LLM_API),
    "lr": (Policy(Mode.LR, 8), COMPILED),
    "lr_sd, draft model": (Policy(Mode.LR_SD, 8, fields=DRAFT_TOKENS), COMPILED),
    "lr_sd, draft model in the engine": (Policy(Mode.LR_SD, 8, fields=BY_ITSELF), LLM_API),
}
"""Modes of the server, and the runtime of ours that can run each."""
SYNCHRONOUS_DEPTHS = (2, 4, 8)
"""Target steps of one batch."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One contender: what could run it, and milliseconds and tokens of each text."""

    name: str
    runtime: str
    texts: tuple[tuple[float, int], ...]

    @property
    def ms_a_token(self) -> float:
        """Of all texts together."""
        return sum(ms for ms, _ in self.texts) / sum(tokens for _, tokens in self.texts)

    def gain(self, alone: Peer) -> tuple[float, float, float]:
        """Over another contender: of all texts together, and the lowest and highest of single texts, each over itself."""
        pairs = zip(alone.texts, self.texts, strict=True)
        each = [(their_ms / their_tokens) / (ms / tokens) for (their_ms, their_tokens), (ms, tokens) in pairs]
        return alone.ms_a_token / self.ms_a_token, min(each), max(each)


async def synchronous(engines: Engines, texts: Texts, workload: Workload, max_depth: int) -> int:
    """Answer one question by the synchronous procedure; tokens of the answer."""
    rules = StepRules.from_tokenizer(VOCABULARY, [END], think_open=None, think_close=None)
    read = ReadAs(rules, VOCABULARY, judge_prompt(workload), VOCABULARY)
    procedure = SynchronousLookahead(engines, read, SAMPLING, max_depth, workload.max_tokens, draft_sampling=DRAFTING)
    return len((await procedure.answer(texts.prompt(0), "synchronous", 1)).token_ids)


async def sequential(engines: Engines, texts: Texts, workload: Workload) -> int:
    """Answer one question by SpecReason's procedure; tokens of the answer."""
    rules = StepRules.from_tokenizer(VOCABULARY, [END], think_open=None, think_close=None)
    prefix = prompt = texts.prompt(0)
    ledger = Ledger(lambda: 0.0, len(prompt))
    draft, target = (
        StepWriter(engine, role, sampling, Seeds(1), "sequential", ledger)
        for engine, role, sampling in ((engines.draft, Role.DRAFT, DRAFTING), (engines.target, Role.TARGET, SAMPLING))
    )
    numbers = count()
    while True:
        step = await draft.write(prefix, workload.longest_step, rules.of_step)
        scored = np.concatenate([prefix, np.asarray(step.ids, np.int32), _question()])
        await engines.target.generate(EngineCall(f"score-{next(numbers)}", scored, 1))
        if any(UNLIKE <= token < UNLIKE + NUM_WORDS for token in step.ids):
            step = await target.write(prefix, workload.longest_step, rules.of_step)
        prefix = np.concatenate([prefix, np.asarray(step.ids, np.int32)])
        if step.end is StepEnd.END:
            return len(prefix) - len(prompt)


def _question() -> IntArray:
    return np.full(SCORE_QUESTION_TOKENS, FIRST_WORD, dtype=np.int32)


def compare(workload: Workload, num_texts: int) -> list[Peer]:
    """Every contender over the same texts."""
    spec = stood_for(DEPLOYMENT)
    machines = (machine_of(spec, SYSTEM, drafts_itself=by_itself) for by_itself in (False, True))
    outside, inside = (Scenario.of(spec.loop_config(), workload, one, prompts_are_cached=True) for one in machines)
    found = [
        Peer(name, runtime, tuple(_served(inside if runtime == LLM_API else outside, policy, seed) for seed in range(num_texts)))
        for name, (policy, runtime) in ROWS.items()
    ]
    for depth in SYNCHRONOUS_DEPTHS:
        texts = [_asked(outside, seed, partial(synchronous, workload=workload, max_depth=depth)) for seed in range(num_texts)]
        found.append(Peer(f"the synchronous procedure, {depth} steps", COMPILED, tuple(texts)))
    texts = [_asked(outside, seed, partial(sequential, workload=workload)) for seed in range(num_texts)]
    return [*found, Peer("SpecReason's procedure", COMPILED, tuple(texts))]


def _served(scenario: Scenario, policy: Policy, seed: int) -> tuple[float, int]:
    (usage,) = simulate(scenario, policy, seed).usages
    return 1e3 * usage.latency_s, usage.completion_tokens


def _asked(scenario: Scenario, seed: int, work: Callable[[Engines, Texts], Awaitable[int]]) -> tuple[float, int]:
    num_tokens, seconds = run_on_engines(scenario, seed, work)
    return 1e3 * seconds, num_tokens


def main(
    workload: Annotated[str, typer.Option(help="By name or file.")] = "qwen3-gsm8k",
    num_texts: Annotated[int, typer.Option("--texts", min=1)] = 6,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "pace_peers.json",
) -> None:
    """Print a table and one line of JSON."""
    found = compare(replace(Workload.load(workload), num_steps=NUM_STEPS), num_texts)
    profiles = [find(pace_of(stood_for(DEPLOYMENT), role, SYSTEM).profile) for role in Role]
    console = console_of_any_width()
    table = Table(title=f"{DEPLOYMENT} on {SYSTEM}, workload {workload}, one request, {num_texts} texts of {NUM_STEPS} steps")
    for name in ("contender", "runtime", "ms a token", "over ar (range over texts)"):
        table.add_column(name, justify="left" if name in ("contender", "runtime") else "right")
    alone = min((one for one in found if one.name.startswith("ar")), key=lambda one: one.ms_a_token)
    gains = {one.name: tuple(round(gain, 3) for gain in one.gain(alone)) for one in found}
    for one in sorted(found, key=lambda one: -one.ms_a_token):
        table.add_row(one.name, one.runtime, f"{one.ms_a_token:.2f}", "{:.2f} ({:.2f} to {:.2f})".format(*gains[one.name]))
    console.print(table)
    console.print(f"[yellow]the loop is real, texts are scripted, no model; {label_of(profiles)}[/]", soft_wrap=True)
    told, low, high = ({name: gain[place] for name, gain in gains.items()} for place in range(3))
    settings = {"label": label_of(profiles), "system": SYSTEM, "workload": workload}
    document = {**settings, "speedup": told, "speedup_low": low, "speedup_high": high}
    write_json(output, document)
    print_line(console, told)
