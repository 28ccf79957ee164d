"""What the machine at hand is and can do: its name, its engines timed alone, and the loop over them without any overhead."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from demo.problems import Problem
from demo.tokenizer import chat, load_tokenizer
from lr_backend.build.spec import EmbeddedDeployment
from lr_backend.contract import IntArray
from lr_backend.emulated.workload import Workload
from lr_backend.engine import EngineCall, Role
from lr_backend.hardware.machine import LinearTimes
from lr_backend.plan.simulation import Policy, Scenario, speedup
from lr_backend.policy.formulas import ceiling
from lr_backend.request import LookaheadRequest
from lr_backend.serve.server import TritonServer
from lr_backend.triton.remote_engine import grpc_inputs

PARALLEL = (1, 2, 4)
TIMING_TOKENS = 96
TIMING_ROUNDS = 3
SIMULATED_STEPS = 120
SIMULATED_SEEDS = 3
STEP_SPREAD = 0.3


def processor_line() -> str:
    """Processor and cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores"


def device_line(num_threads: int | None, device: str = "cpu") -> str:
    """What an engine ran on: the card, or processor, cores and threads; and the version of torch."""
    torch_version = f"torch {version('torch')}"
    if device == "cuda":
        import torch  # takes seconds to load

        return f"{torch.cuda.get_device_name()}, {torch_version}"
    return f"{processor_line()}, {num_threads} thread(s), {torch_version}"


@dataclass(frozen=True)
class Hardware:
    """What was measured before the rows, when nothing else ran.

    Attributes:
        cost_ratio: c, a drafted step's time over a target step's.
        target_token_s: seconds of a target iteration by sequences in it, 1 among them.
        beside_draft: time of a target token while the draft is busy too, over its time alone.
    """

    cost_ratio: float
    target_token_s: Mapping[int, float]
    beside_draft: float

    @property
    def crowding(self) -> float:
        """How much longer an iteration takes for each further sequence, as a share of its time with one (least squares)."""
        alone = self.target_token_s[1]
        further = [(num - 1, seconds / alone - 1.0) for num, seconds in self.target_token_s.items()]
        weight = sum(more * more for more, _ in further)
        return max(0.0, sum(more * longer for more, longer in further) / weight) if weight else 0.0

    @property
    def num_cores(self) -> float | None:
        """As how many cores the machine behaves when two roles are busy; None: neither slows the other down."""
        return max(1.0, 2.0 / self.beside_draft) if self.beside_draft > 1.0 else None

    def scenario(self, acceptance_rate: float, step_tokens: int, *, own_branches: bool = True) -> Scenario:
        """The loop on this hardware with no overhead."""
        alone = self.target_token_s[1]
        texts = Workload(acceptance_rate, step_tokens=max(2, step_tokens), step_spread=STEP_SPREAD, num_steps=SIMULATED_STEPS)
        times = LinearTimes(alone, self.cost_ratio * alone, crowding=self.crowding, num_cores=self.num_cores)
        return Scenario(texts, times.machine(), own_branches=own_branches)

    def sped_up(self, factor: float) -> Hardware:
        """With a target that writes ``factor`` times as fast, as by draft tokens; the draft beside it is as fast as it was."""
        target_token_s = {num: seconds / factor for num, seconds in self.target_token_s.items()}
        return replace(self, cost_ratio=min(1.0, factor * self.cost_ratio), target_token_s=target_token_s)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "crowding": self.crowding, "num_cores": self.num_cores}


def seconds_a_token(
    url: str, model: str, prompt: IntArray, num_tokens: int = TIMING_TOKENS, rounds: int = TIMING_ROUNDS
) -> float:
    """What one engine takes for a token when nothing else runs: the best of a few greedy calls through Triton."""
    call = EngineCall(request_id="", input_ids=prompt, max_new_tokens=num_tokens)
    inputs = grpc_inputs(call.tensors())
    times_s = []
    with grpcclient.InferenceServerClient(url) as client:
        for _ in range(rounds):
            started = time.perf_counter()
            client.infer(model, inputs)
            times_s.append((time.perf_counter() - started) / num_tokens)
    return min(times_s)


def cost_ratio(server: TritonServer, spec: EmbeddedDeployment, problem: Problem) -> float:
    """c: a drafted step's time over a target step's of as many tokens, each model alone."""
    prompt = prompt_of(spec, problem)
    draft_s, target_s = (seconds_a_token(server.grpc_url, role.value, prompt) for role in (Role.DRAFT, Role.TARGET))
    return draft_s / target_s


def prompt_of(spec: EmbeddedDeployment, problem: Problem) -> IntArray:
    """A problem as the target is asked it."""
    return prompt_ids(load_tokenizer(spec.checkpoint_dir(Role.TARGET)), problem)


def prompt_ids(tokenizer: Any, problem: Problem) -> IntArray:
    """A problem as a model with this tokenizer is asked it."""
    return np.asarray(tokenizer.encode(chat(problem.question), add_special_tokens=False), dtype=np.int32)


def measure_hardware(server: TritonServer, spec: EmbeddedDeployment, problem: Problem) -> Hardware:
    """Time the engines of an idle server; each figure is the best of a few rounds."""
    prompt = prompt_of(spec, problem)
    c = cost_ratio(server, spec, problem)
    together = {num: min(_together_s(server.grpc_url, prompt, num) for _ in range(TIMING_ROUNDS)) for num in PARALLEL}
    beside = min(_beside_draft_s(server.grpc_url, prompt) for _ in range(TIMING_ROUNDS))
    return Hardware(c, together, max(1.0, beside / together[1]))


def _together_s(url: str, prompt: IntArray, num_sequences: int) -> float:
    """Seconds of a target iteration with ``num_sequences`` calls in flight that share their prompt, as branches do."""
    with ThreadPoolExecutor(num_sequences) as pool:
        calls = [pool.submit(seconds_a_token, url, "target", prompt, TIMING_TOKENS, 1) for _ in range(num_sequences)]
        return fmean(call.result() for call in calls)


def _beside_draft_s(url: str, prompt: IntArray) -> float:
    """Seconds of a target iteration while the draft decodes, call after call, until the target has ended."""
    ended = threading.Event()

    def keep_busy() -> None:
        while not ended.is_set():
            seconds_a_token(url, "draft", prompt, TIMING_TOKENS, 1)

    with ThreadPoolExecutor(1) as pool:
        draft = pool.submit(keep_busy)
        try:
            seconds = seconds_a_token(url, "target", prompt, TIMING_TOKENS, 1)
        finally:
            ended.set()
        draft.result()
    return seconds


def acceptance_of_each(alpha: float, width: int) -> float:
    """Acceptance of each candidate where ``alpha`` of the positions accept one of ``width``."""
    rejected: float = (1.0 - alpha) ** (1.0 / width)
    return 1.0 - rejected


def hardware_ceiling(
    hardware: Hardware, request: LookaheadRequest, alpha: float, step_tokens: int, *, own_branches: bool = True
) -> float:
    """Speedup of the loop without any overhead on this hardware, where ``alpha`` of the positions accept a drafted step.

    Where the mode chooses, it is that of the best depth up to ``max_depth``, or of none.
    """
    scenario = hardware.scenario(acceptance_of_each(alpha, request.width), step_tokens, own_branches=own_branches)

    def gain(depth: int) -> float:
        policy = Policy(max_depth=depth, width=request.width)
        return fmean(speedup(scenario, policy, seed) for seed in range(SIMULATED_SEEDS))

    if request.mode.chooses:
        return max(1.0, *map(gain, range(1, request.max_depth + 1)))
    return gain(request.max_depth)


def ceilings(
    hardware: Hardware,
    request: LookaheadRequest,
    alpha: float,
    step_tokens: int,
    *,
    by_tokens: float = 1.0,
    own_branches: bool = True,
) -> tuple[float, float]:
    """What the paper's formula and the loop without overhead gain at most.

    Args:
        by_tokens: speedup by draft tokens alone, for a request that has both. Its target writes so much faster, so that drafted
            steps come later beside it.
    """
    factor = by_tokens if request.mode.speculates_tokens else 1.0
    paper = ceiling(alpha, min(1.0, hardware.cost_ratio), request.max_depth, by_tokens=factor)
    real = hardware_ceiling(hardware.sped_up(factor), request, alpha, step_tokens, own_branches=own_branches)
    return paper, factor * real
