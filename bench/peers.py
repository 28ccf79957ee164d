"""What one could run instead, on the same checkpoints and machine, in one run.

Every contender answers the same problems, in turns whose order rotates: transformers' ``generate`` plain, with our draft as its
assistant, and with prompt lookup; the target's engine asked directly through Triton, without the ``lookahead`` model; the paper's
synchronous procedure (:mod:`bench.kit.synchronous`) over the same three engines; and the server's modes. ``ar`` is the baseline,
at its best thread setting. Transformers computes with the number of threads that is best for it. Each draws with own seeds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from zlib import crc32

import torch
import transformers
import tritonclient.grpc as grpcclient
import typer
from lr_client import Client, Options, Usage
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.kit.hardware import device_line, prompt_ids
from bench.kit.intervals import Cluster, Estimate, ratio
from bench.kit.measure import LEARNS_FROM, ModeReport, Sample, best_baseline, report
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import (
    ALONE,
    MAX_TOKENS,
    REQUEST_TIMEOUT_S,
    TEMPERATURE,
    demo_spec,
    other_thread_counts,
    serving,
    thread_setting,
    with_threads,
)
from bench.kit.synchronous import SynchronousLookahead, Texts
from bench.kit.turns import in_turns
from demo.problems import Problem, check_answer, problems
from demo.tokenizer import chat
from lr_backend.build.base import Layout
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.contract import encode_stop_words
from lr_backend.engine import EngineCall, Generation, Role, Sampling
from lr_backend.loop.assemble import Engines
from lr_backend.steps.rules import StepRules
from lr_backend.triton.models import end_ids, load_models
from lr_backend.triton.remote_engine import RemoteEngine, grpc_inputs

MODES = ("ar", "sd", "lr", "lr_sd", "auto")
PROBLEM_SEED = 3030
BASELINE = "ar"
TOP_K, TOP_P = 20, 0.95
SAMPLING = Sampling(TEMPERATURE, TOP_K, TOP_P)
LOOKUP_TOKENS = 8
MAX_DEPTH = 4
"""Target steps in flight, of the synchronous procedure too."""
SYNCHRONOUS = "synchronous LR"
DIRECT = "target, asked directly"
GENERATE, ASSISTED, LOOKUP = "transformers generate", "transformers assisted", "transformers prompt lookup"
THREAD_TRIAL_PROBLEMS = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What a contender wrote."""

    text: str
    num_tokens: int


Ask = Callable[[Problem, int], Answer]
"""(problem, seed) -> its answer."""


class TransformersPeer:
    """``generate`` on the demo's checkpoints, in float32 as the engines compute."""

    def __init__(self, spec: EmbeddedDeployment, tokenizer: Any, temperature: float) -> None:
        self._tokenizer = tokenizer
        self._target, self.draft = (self._model(spec.checkpoint_dir(role)) for role in (Role.TARGET, Role.DRAFT))
        ends = end_ids(tokenizer, spec.checkpoint_dir(Role.TARGET))
        sampled = {"do_sample": True, "temperature": temperature, "top_k": TOP_K, "top_p": TOP_P}
        greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        common = {"max_new_tokens": MAX_TOKENS, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
        self._settings: dict[str, Any] = common | (sampled if temperature else greedy)

    @staticmethod
    def _model(checkpoint: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def ask(self, problem: Problem, seed: int, **how: Any) -> Answer:
        """``how`` goes to ``generate``: an ``assistant_model``, ``prompt_lookup_num_tokens``, or nothing."""
        ids = torch.tensor([self._tokenizer.encode(chat(problem.question), add_special_tokens=False)])
        torch.manual_seed(seed)
        with torch.inference_mode():
            whole = self._target.generate(ids, attention_mask=torch.ones_like(ids), **self._settings, **how)
        written = whole[0, ids.shape[1] :].tolist()
        return Answer(str(self._tokenizer.decode(written, skip_special_tokens=True)), len(written))

    def best_threads(self, questions: Sequence[Problem]) -> int:
        """The thread count at which plain ``generate`` is fastest here; torch keeps it."""
        seconds: dict[int, float] = {}
        for threads in sorted({1, os.cpu_count() or 1}):
            torch.set_num_threads(threads)
            self.ask(questions[0], 0)
            started = perf_counter()
            num_tokens = sum(self.ask(problem, 0).num_tokens for problem in questions)
            seconds[threads] = (perf_counter() - started) / num_tokens
        best = min(seconds, key=lambda threads: seconds[threads])
        torch.set_num_threads(best)
        return best


class DirectTarget:
    """The target's engine through Triton, one call an answer, without the ``lookahead`` model."""

    def __init__(self, client: grpcclient.InferenceServerClient, tokenizer: Any, ends: Sequence[int]) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._stop_words = encode_stop_words([(token,) for token in ends])
        self._outputs = [grpcclient.InferRequestedOutput(name) for name in ("output_ids", "sequence_length")]

    def ask(self, problem: Problem, seed: int) -> Answer:
        call = EngineCall(
            request_id="",
            input_ids=prompt_ids(self._tokenizer, problem),
            max_new_tokens=MAX_TOKENS,
            sampling=SAMPLING,
            seed=seed,
            stop_words=self._stop_words,
        )
        response = self._client.infer(Role.TARGET.value, grpc_inputs(call.tensors()), outputs=self._outputs)
        found = Generation.from_tensors({name: response.as_numpy(name) for name in ("output_ids", "sequence_length")})
        return Answer(str(self._tokenizer.decode(list(found.token_ids), skip_special_tokens=True)), len(found.token_ids))


class SynchronousPeer:
    """The synchronous procedure over the engines of a server."""

    def __init__(self, procedure: SynchronousLookahead, runner: asyncio.Runner) -> None:
        self._procedure, self._runner = procedure, runner
        self.num_accepted = self.num_compared = 0

    def ask(self, problem: Problem, seed: int) -> Answer:
        tokenizer = self._procedure.texts.tokenizer
        work = self._procedure.answer(prompt_ids(tokenizer, problem), f"synchronous-{seed}", seed)
        found = self._runner.run(work)
        self.num_accepted += found.num_accepted
        self.num_compared += found.num_compared
        return Answer(str(tokenizer.decode(list(found.token_ids), skip_special_tokens=True)), len(found.token_ids))


@contextmanager
def synchronous_peer(url: str, spec: EmbeddedDeployment) -> Iterator[SynchronousPeer]:
    models = load_models(spec.loop_config())
    ends = end_ids(models.tokenizer, spec.checkpoint_dir(Role.TARGET))
    # The reference knows no end of the reasoning: its steps end at blank lines alone.
    rules = StepRules.from_tokenizer(models.tokenizer, ends, think_open=None, think_close=None)
    texts = Texts(rules, models.tokenizer, models.judge_prompt, models.judge_tokenizer)

    async def connect() -> Engines:
        return Engines(*(RemoteEngine(f"grpc://{url}", role.value) for role in (Role.TARGET, Role.DRAFT, Role.JUDGE)))

    async def disconnect(engines: Engines) -> None:
        for engine in (engines.target, engines.draft, engines.judge):
            await engine.close()

    with asyncio.Runner() as runner:
        engines = runner.run(connect())
        try:
            procedure = SynchronousLookahead(engines, texts, SAMPLING, MAX_DEPTH, MAX_TOKENS)
            yield SynchronousPeer(procedure, runner)
        finally:
            runner.run(disconnect(engines))


def served(client: Client, mode: str) -> Ask:
    """One mode of a server, as one uninterrupted answer."""

    def ask(problem: Problem, seed: int) -> Answer:
        options = Options(mode=mode, stream=False, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed)
        result = client.ask(problem.question, options, timeout_s=REQUEST_TIMEOUT_S)
        return Answer(result.text, result.usage.completion_tokens)

    return ask


def compare(contenders: Mapping[str, Ask], questions: Sequence[Problem], console: Console) -> list[Sample]:
    """Every contender on every problem, in turns; timed from the question to the whole answer."""
    samples = []
    for index, problem, name in in_turns(list(contenders), questions, "contenders in turn", console):
        # Under one seed ``ar`` and the engine asked directly would write the same, and the later find it in the KV cache.
        seed = crc32(f"{name}/{index}".encode())
        started = perf_counter()
        answer = contenders[name](problem, seed)
        seconds = perf_counter() - started
        usage = Usage(completion_tokens=answer.num_tokens)
        samples.append(Sample(name, index, check_answer(problem, answer.text), seconds, usage))
    return samples


def rate_ratio(samples: Sequence[Sample], name: str) -> Estimate:
    """Tokens/s of one contender over those of ``ar``, with its interval over problems."""

    def clusters(which: str) -> list[Cluster]:
        own = sorted((one for one in samples if one.mode == which), key=lambda one: one.problem)
        return [Cluster(one.usage.completion_tokens, one.latency_s) for one in own]

    return ratio(clusters(name), clusters(BASELINE))


def show(console: Console, rows: Mapping[str, ModeReport], ratios: Mapping[str, Estimate], title: str) -> None:
    table = Table(title=title)
    for heading in (
        "contender",
        "right",
        "tokens",
        "tokens/s",
        "tokens/s over ar (95 %)",
        "seconds",
        "ar's seconds over its (95 %)",
    ):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, row in rows.items():
        rate = ratios[name]
        table.add_row(
            name,
            f"{row.correct}/{row.total}",
            f"{row.tokens_per_s * row.latency_s:.0f}",
            f"{row.tokens_per_s:.0f}",
            f"{rate.value:.2f} ({rate.low:.2f} to {rate.high:.2f})",
            f"{row.latency_s:.2f}",
            f"{row.speedup:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
        )
    console.print(table)


@dataclass
class Everyone:
    """All contenders, and what is said of them beside their figures."""

    contenders: dict[str, Ask]
    synchronous: SynchronousPeer
    transformers_threads: int


@contextmanager
def everyone(
    spec: EmbeddedDeployment,
    trial: Sequence[Problem],
    learned: Sequence[Problem],
    folder: Path,
    console: Console,
) -> Iterator[Everyone]:
    """Servers and libraries that are ready to answer; each contender has answered the first problem of the ``trial``,
    and ``auto`` all those to learn from."""
    with ExitStack() as stack:
        with console.status("starting Triton with lookahead, target, draft and judge"):
            server = stack.enter_context(serving(spec, folder / "all"))
        tokenizer = load_models(spec.loop_config()).tokenizer
        peer = TransformersPeer(spec, tokenizer, TEMPERATURE)
        threads = peer.best_threads(trial)
        client = stack.enter_context(Client(server.grpc_url))
        connection = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
        direct = DirectTarget(connection, tokenizer, end_ids(tokenizer, spec.checkpoint_dir(Role.TARGET)))
        synchronous = stack.enter_context(synchronous_peer(server.grpc_url, spec))
        contenders: dict[str, Ask] = {BASELINE: served(client, BASELINE)}
        for count in other_thread_counts(spec):
            other = stack.enter_context(serving(with_threads(spec, count), folder / f"ar-{count}", only=ALONE))
            contenders[thread_setting(count)] = served(stack.enter_context(Client(other.grpc_url)), BASELINE)
        contenders |= {
            DIRECT: direct.ask,
            GENERATE: peer.ask,
            ASSISTED: lambda problem, seed: peer.ask(problem, seed, assistant_model=peer.draft),
            LOOKUP: lambda problem, seed: peer.ask(problem, seed, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            SYNCHRONOUS: synchronous.ask,
            **{mode: served(client, mode) for mode in MODES if mode != BASELINE},
        }
        for ask in contenders.values():  # one that cannot run fails here, and not in the middle
            ask(trial[0], 0)
        for problem in learned:
            contenders["auto"](problem, 0)
        synchronous.num_accepted = synchronous.num_compared = 0
        yield Everyone(contenders, synchronous, threads)


def main(
    num_problems: Annotated[int, typer.Option("--problems", min=1)] = 60,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "peers.json",
) -> None:
    """Print a table and one JSON line."""
    console = console_of_any_width()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    spec = demo_spec(Layout.PROCESS_A_ROLE)
    defaults = {**spec.lookahead["defaults"], "max_depth": MAX_DEPTH}
    spec = spec.model_copy(update={"lookahead": {**spec.lookahead, "defaults": defaults}})
    questions = list(islice(problems(PROBLEM_SEED, "test"), num_problems + THREAD_TRIAL_PROBLEMS + LEARNS_FROM))
    asked, trial, learned = questions[:num_problems], questions[num_problems:-LEARNS_FROM], questions[-LEARNS_FROM:]
    with (
        tempfile.TemporaryDirectory(prefix="lookahead-peers-") as folder,
        everyone(spec, trial, learned, Path(folder), console) as found,
    ):
        samples, baseline = best_baseline(compare(found.contenders, asked, console), BASELINE)
    rows = report(samples, BASELINE)
    ratios = {name: rate_ratio(samples, name) for name in rows}
    show(console, rows, ratios, f"{num_problems} problems at temperature {TEMPERATURE:g}, one at a time")
    alpha = found.synchronous.num_accepted / max(1, found.synchronous.num_compared)
    told = f"baseline: {baseline}; transformers {transformers.__version__} at {found.transformers_threads} thread(s)"
    console.print(f"[dim]{told}; the synchronous procedure accepted {alpha:.0%} of its drafted steps[/]")
    result = {
        "num_problems": num_problems,
        "temperature": TEMPERATURE,
        "max_depth": MAX_DEPTH,
        "baseline": baseline,
        "transformers": transformers.__version__,
        "transformers_threads": found.transformers_threads,
        "synchronous_acceptance": round(alpha, 4),
        "rows": [line_of(name, row, ratios[name]) for name, row in rows.items()],
        "device": device_line(spec.target.num_threads),
    }
    write_json(output, result)
    console.print(f"written to {output}", highlight=False)
    print_line(console, result)


def line_of(name: str, row: ModeReport, rate: Estimate) -> dict[str, Any]:
    """One contender in the document."""
    return {
        "name": name,
        "correct": row.correct,
        "total": row.total,
        "tokens_per_s": round(row.tokens_per_s, 2),
        "tokens_per_s_ratio": [round(value, 4) for value in (rate.value, rate.low, rate.high)],
        "seconds": round(row.latency_s, 4),
        "speedup": [round(value, 4) for value in (row.speedup, row.speedup_low, row.speedup_high)],
    }
