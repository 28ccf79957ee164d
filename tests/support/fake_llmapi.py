"""A stand-in for ``tensorrt_llm``'s LLM API, after upstream's sources of release 1.2.

What it keeps to (file in NVIDIA/TensorRT-LLM: what):

- ``llmapi/llm.py``: unknown arguments of ``LLM`` are a ValueError; ``generate_async`` raises RuntimeError once shut down,
  ValueError for a prompt over ``max_num_tokens`` without chunked prefill, ValueError without both ``end_id`` and tokenizer;
  returns at once; ``_check_health`` says whether it was shut down.
- ``executor/base_worker.py``: ``ignore_eos`` switches off the end id and all stop words.
- ``sampling_params.py``: keyword arguments only; ``pad_id`` falls back to ``end_id``; ranges of top_p, top_k, temperature; greedy
  for top_k 1, top_p 0, temperature 0 or nothing given; ``_get_stop_words`` is the ``stop_token_ids``, each a word.
- ``executor/result.py``: an object is awaited or iterated, each step takes one response; ``outputs[0].token_ids`` grows in
  place; with ``include_stop_str_in_output`` false the stop word is cut off at the end; ``abort`` marks and returns; responses
  come through a queue of the loop in which ``generate_async`` was called.
- ``_torch/pyexecutor/sampler.py``: end id first, then length, then stop words; all of these stay in ``token_ids``;
  log-probabilities are the k likeliest tokens of each position; **one generator for all requests**, whatever their seeds.
- ``_torch/pyexecutor/model_engine.py``: logits processors get (request id, logits [beams, 1, vocabulary] to change in place,
  token ids [beams][tokens], None, None); they have crossed processes by then (``executor/base_worker.py``).
- ``pyexecutor``: an iteration gives each running request a token; at most ``max_batch_size`` run; a cancelled one gets a last
  response without tokens.
- Speculation: configuration classes know the fields of ``tests/contract/llm_api.toml`` and no others; n-grams and draft-target
  need ``disable_overlap_scheduler``, as the guide has them. After the prompt's pass each pass verifies ``max_draft_len`` draft
  tokens and gives those that the model says itself and one more, all in one response, up to the first end. ``decoding_iter``
  counts passes. ``request_perf_metrics.speculative_decoding`` stays zero.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lr_backend.llmapi.upstream import Upstream

LLM_ARGUMENTS = {
    "model", "tokenizer", "skip_tokenizer_init", "tensor_parallel_size", "dtype", "gpus_per_node", "kv_cache_config",
    "enable_chunked_prefill", "max_batch_size", "max_seq_len", "max_beam_width", "max_num_tokens", "cuda_graph_config",
    "sampler_type", "stream_interval", "return_perf_metrics", "disable_overlap_scheduler", "scheduler_config",
    "speculative_config",
}  # fmt: skip
"""Fields of ``TorchLlmArgs`` (``llmapi/llm_args.py``): those that could be of use here."""
KV_CACHE_ARGUMENTS = {
    "enable_block_reuse",
    "max_tokens",
    "free_gpu_memory_fraction",
    "tokens_per_block",
    "dtype",
    "host_cache_size",
}


RELEASES: dict[str, Any] = tomllib.loads((Path(__file__).parents[1] / "contract" / "llm_api.toml").read_text(encoding="utf-8"))
"""Fields of the configuration classes for speculation, by release."""
WITHOUT_OVERLAP = ("NGramDecodingConfig", "DraftTargetDecodingConfig")


@dataclass(kw_only=True)
class FakeSamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    logits_processor: Any = None

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.pad_id is None:
            self.pad_id = self.end_id

    @property
    def greedy(self) -> bool:
        nothing = self.temperature is None and self.top_p is None and self.top_k is None
        return nothing or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class Ask:
    """One token to choose: after ``context``, by ``params``; ``draw`` is the position in the one generator's sequence."""

    context: tuple[int, ...]
    params: FakeSamplingParams
    draw: int


Choice = tuple[int, dict[int, float]]
"""The token, and the log-probabilities of the likeliest ones."""
Choose = Callable[[list[Ask]], list[Choice]]
Guess = Callable[[tuple[int, ...]], int]
"""What a drafter says after a context."""


def scripted(next_token: Callable[[tuple[int, ...], int], int]) -> Choose:
    """Tokens by a function of (context, draw); every one is sure."""

    def choose(asks: list[Ask]) -> list[Choice]:
        tokens = [next_token(ask.context, ask.draw) for ask in asks]
        return [(token, {token: -0.25}) for token in tokens]

    return choose


def by_logits(logits_after: Callable[[tuple[int, ...]], Any]) -> Choose:
    """Greedy tokens of what the logits processors leave of the torch logits [vocabulary] after a context."""

    def choose(asks: list[Ask]) -> list[Choice]:
        choices: list[Choice] = []
        for ask in asks:
            logits = logits_after(ask.context)
            if (processor := ask.params.logits_processor) is not None:
                assert 4 <= len(inspect.signature(processor).parameters) <= 5
                processor(1, logits.view(1, 1, -1), [list(ask.context)], None, None)
            assert ask.params.greedy
            choices.append((int(logits.argmax()), {}))
        return choices

    return choose


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    request_perf_metrics: Any = None


@dataclass
class Response:
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None = None
    error: Exception | None = None
    decoding_iter: int = 0


class FakeRequestOutput:
    def __init__(self, llm: FakeLLM, number: int, prompt: list[int], params: FakeSamplingParams) -> None:
        self._llm, self.request_id, self.prompt_token_ids, self.params = llm, number, prompt, params
        self.outputs = [Completion()]
        self.finished = False
        self.decoding_iter = 0
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Response] = asyncio.Queue()

    def abort(self) -> None:
        self._llm.aborted.append(self.request_id)
        self._llm.heard_abort.set()
        self._llm._wake()

    def put(self, response: Response) -> None:
        """From the executor's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def __aiter__(self) -> AsyncIterator[FakeRequestOutput]:
        return self

    async def __anext__(self) -> FakeRequestOutput:
        if self.finished:
            raise StopAsyncIteration
        response = await self._queue.get()
        if response.error is not None:
            self.finished = True
            raise response.error
        completion = self.outputs[0]
        self.decoding_iter = response.decoding_iter
        completion.token_ids.extend(response.tokens)
        completion.logprobs.extend(response.logprobs)
        if response.finish_reason is not None:
            self.finished = True
            completion.finish_reason = response.finish_reason
            if response.finish_reason == "stop" and not self.params.include_stop_str_in_output:
                del completion.token_ids[-1:]
            if self.params.return_perf_metrics:
                times = {"arrival_time": timedelta(seconds=5), "first_scheduled_time": timedelta(seconds=5, milliseconds=2)}
                cache = {"num_reused_blocks": 3, "num_new_allocated_blocks": 2, "num_total_allocated_blocks": 5}
                completion.request_perf_metrics = SimpleNamespace(
                    kv_cache_metrics=SimpleNamespace(**cache),
                    timing_metrics=SimpleNamespace(**times),
                    speculative_decoding=self._llm.reported,
                )
        return self


@dataclass
class Active:
    output: FakeRequestOutput
    written: list[int] = field(default_factory=list)
    num_passes: int = 0

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.output.prompt_token_ids, *self.written)


class RequestError(RuntimeError):
    """As ``executor/utils.py`` has it."""


class FakeLLM:
    """``gate`` set to an event holds the executor before each iteration until it is set; ``hold_at`` clears it after so many
    draws. ``deaf``: aborts are not heard. ``guess`` drafts, where a ``speculative_config`` has it; ``reported`` is what upstream
    reports of it with the last response."""

    def __init__(self, choose: Choose, guess: Guess = lambda context: -1, **arguments: Any) -> None:
        for name in arguments:
            if name not in LLM_ARGUMENTS:
                raise ValueError(f"LLM got invalid argument: {name}")
        speculation = arguments.get("speculative_config")
        if speculation is not None and arguments.get("sampler_type") == "TRTLLMSampler":
            raise ValueError("the TRTLLMSampler verifies no draft tokens")
        if speculation is not None and speculation.kind in WITHOUT_OVERLAP:
            assert arguments.get("disable_overlap_scheduler"), "as upstream's guide has it"
        self.arguments = arguments
        self._choose, self._guess = choose, guess
        self._num_drafts = speculation.max_draft_len if speculation is not None else 0
        self.reported = SimpleNamespace(total_draft_tokens=0, total_accepted_draft_tokens=0, acceptance_rate=0.0)
        self._condition = threading.Condition()
        self._new: list[FakeRequestOutput] = []
        self.aborted: list[int] = []
        self.heard_abort = threading.Event()
        self.seen: list[FakeSamplingParams] = []
        self.deaf = False
        self.fails: Exception | None = None
        self.gate = threading.Event()
        self.hold_at: int | None = None
        self.gate.set()
        self.num_draws = self._num_requests = 0
        self.batch_sizes: list[int] = []
        self._down = False
        self._thread = threading.Thread(target=self._run, name="fake-executor", daemon=True)
        self._thread.start()

    def generate_async(
        self, inputs: list[int], sampling_params: FakeSamplingParams | None = None, *, streaming: bool = False
    ) -> FakeRequestOutput:
        if self._down:
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or FakeSamplingParams()
        if params.end_id is None and self.arguments.get("skip_tokenizer_init"):
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not (isinstance(inputs, list) and all(type(token) is int for token in inputs)):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        limit = self.arguments.get("max_num_tokens", 8192)
        if not self.arguments.get("enable_chunked_prefill") and len(inputs) > limit:
            raise ValueError(
                f"The sum of prompt length ({len(inputs)}), query length (0) should not exceed max_num_tokens ({limit})"
            )
        assert streaming, "this stand-in only streams"
        self.seen.append(params)
        if params.logits_processor is not None:
            params = replace(params, logits_processor=pickle.loads(pickle.dumps(params.logits_processor)))  # noqa: S301
        with self._condition:
            self._num_requests += 1
            output = FakeRequestOutput(self, self._num_requests, inputs, params)
            self._new.append(output)
            self._condition.notify()
        return output

    def shutdown(self) -> None:
        self._down = True
        self.gate.set()
        self._wake()
        self._thread.join(10)

    def _check_health(self) -> bool:
        return not self._down

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        active: list[Active] = []
        while True:
            with self._condition:
                while not (self._new or active or self._down):
                    self._condition.wait()
                active += [Active(output) for output in self._new]
                self._new.clear()
            if self.hold_at is not None and self.num_draws >= self.hold_at:
                self.gate.clear()
                self.hold_at = None
            self.gate.wait(30)
            if self._down:
                return
            active = [one for one in active if not self._cancelled(one)]
            running = active[: self.arguments.get("max_batch_size", 2048)]
            self.batch_sizes.append(len(running))
            active = [one for one in self._iterate(running) if one] + active[len(running) :]

    def _cancelled(self, one: Active) -> bool:
        if self.deaf or one.output.request_id not in self.aborted:
            return False
        one.output.put(Response([], [], "cancelled"))
        return True

    def _iterate(self, running: list[Active]) -> list[Active]:
        """A pass for each; the tokens of one are drawn one after another, as far as its drafts go."""
        if self.fails is not None:
            for one in running:
                one.output.put(Response([], [], None, self.fails))
            return []
        rounds = {id(one): Response([], []) for one in running}
        drafting = running
        for number in range(1 + self._num_drafts):
            drafts = [self._guess(one.context) for one in drafting]
            drawn = self._draw(drafting, rounds)
            # The prompt's pass has no drafts; a pass goes on while they are what the model says.
            drafting = [
                one
                for one, draft, token in zip(drafting, drafts, drawn, strict=True)
                if one.num_passes and draft == token and rounds[id(one)].finish_reason is None and number < self._num_drafts
            ]
        for one in running:
            one.num_passes += 1
            one.output.put(replace(rounds[id(one)], decoding_iter=one.num_passes))
        return [one for one in running if rounds[id(one)].finish_reason is None]

    def _draw(self, running: list[Active], rounds: dict[int, Response]) -> list[int]:
        """One token for each, and why it was the last."""
        asks = []
        for one in running:
            asks.append(Ask(one.context, one.output.params, self.num_draws))
            self.num_draws += 1
        choices = self._choose(asks) if asks else []
        for one, (token, likely) in zip(running, choices, strict=True):
            params, response = one.output.params, rounds[id(one)]
            one.written.append(token)
            response.tokens.append(token)
            if token == params.end_id and not params.ignore_eos:
                response.finish_reason = "stop"
            elif len(one.written) >= params.max_tokens:
                response.finish_reason = "length"
            elif token in (params.stop_token_ids or ()) and not params.ignore_eos:
                response.finish_reason = "stop"
            best = sorted(likely.items(), key=lambda item: -item[1])[: params.logprobs or 0]
            if params.logprobs:
                response.logprobs.append({each: Logprob(value, rank + 1) for rank, (each, value) in enumerate(best)})
        return [token for token, _ in choices]


def fake_config(allowed: set[str], **constants: Any) -> Callable[..., SimpleNamespace]:
    """A config class that forbids unknown fields."""

    def make(**fields: Any) -> SimpleNamespace:
        assert set(fields) <= allowed, set(fields) - allowed
        return SimpleNamespace(**fields, **constants)

    return make


def fake_classes(release: str = "1.2.1") -> dict[str, Callable[..., SimpleNamespace]]:
    """The configuration classes for speculation that a release has, by name."""
    table = RELEASES[release]
    base = set(table["base"])
    return {name: fake_config(base | set(own), kind=name) for name, own in table.items() if name != "base"}


def fake_upstream(choose: Choose, guess: Guess = lambda context: -1) -> Upstream:
    """What ``load_upstream`` would give; :class:`FakeLLM` instances choose tokens by ``choose``, and draft by ``guess``."""
    graphs = fake_config({"batch_sizes", "max_batch_size", "enable_padding"})
    kv_cache = fake_config(KV_CACHE_ARGUMENTS)

    def make(**arguments: Any) -> FakeLLM:
        return FakeLLM(choose, guess, **arguments)

    return Upstream(make, FakeSamplingParams, kv_cache, graphs, fake_classes().get)
