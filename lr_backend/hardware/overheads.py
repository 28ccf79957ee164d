"""What the kernel tables lack: host time, launches, hops and copies, each a named constant with its source.

Most is read from upstream's sources, where no figure is published; what is *assumed* is arithmetic from those sources, and says
so. Every constant has a range, so that a figure can be made at both ends. The values were fixed before any figure made with them
was compared with a published one. ``python -m bench card`` holds some of them against a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import log2
from typing import Self

from lr_backend.hardware.profile import Profile


@dataclass(frozen=True, slots=True)
class Constant:
    """One figure with its range and its source."""

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        assert 0.0 <= self.low <= self.value <= self.high, self


class Bound(StrEnum):
    """Which end of every constant's range."""

    LOW = "low"
    VALUE = "value"
    HIGH = "high"


# Launches ------------------------------------------------------------------------------------------------------------

LAUNCH_US = Constant(
    3.5, 2.5, 6.0, "CPU time to launch a kernel without a graph: 80 kernels in 260 us (CUDA.jl's documentation of CUDA graphs)"
)
EAGER_GAP_US = Constant(
    0.5, 0.0, 1.0, "assumed: idle time between two kernels launched one by one, beyond that in a graph, which the tables hold"
)
KERNELS_A_LAYER = Constant(
    11.0, 8.0, 14.0, "counted in upstream's attentionOp.cpp and Qwen model: norms, products, q/k norms, attention, SwiGLU"
)
KERNELS_A_LAYER_TP = Constant(2.0, 2.0, 2.0, "two all-reduces a layer with tensor parallelism")
KERNELS_A_LAYER_MIXED = Constant(
    3.0, 1.0, 4.0, "gptAttentionPlugin.cpp enqueues attention once for the joins and once for the decodes"
)

# The executor's loop -------------------------------------------------------------------------------------------------

LOOP_MS = Constant(
    0.30,
    0.15,
    0.60,
    "assumed: idle time between iterations, whatever is in them; executorImpl.cpp schedules and launches in turn",
)
LOOP_MS_A_TP_DOUBLING = Constant(
    0.10, 0.03, 0.20, "measured minus table of Llama-3.1-8B on H100 grows so with TP (silicon_sample.csv of the tables' package)"
)
REQUEST_US = Constant(5.0, 2.0, 10.0, "assumed: a pass over the requests in flight for update, answer and copies")
JOIN_MS = Constant(
    0.10, 0.05, 0.30, "assumed: some 30 small copies for the decoder of a new request (createNewDecoderRequests.cpp)"
)
SAMPLING_MS = Constant(
    0.10, 0.06, 0.15, "top-k over 152 k logits: 0.08 to 0.26 ms reported for other engines' kernels (vLLM PR 40376, aiter)"
)
DRAFT_STEP_MS = Constant(
    0.10, 0.06, 0.25, "externalDraftTokensLayer.cpp decides draft tokens one after another, 15 to 20 launches each; time assumed"
)

# On the way to an engine and back --------------------------------------------------------------------------------------

BLS_MS = Constant(0.70, 0.30, 1.00, "a call through Triton's Python backend and back, measured by this project on two CPU cores")
POLL_SLACK_MS = Constant(0.06, 0.05, 0.10, "how late Linux ends a sleep of 1 ms (default timer slack)")
MESSAGE_MS = Constant(0.05, 0.02, 0.20, "assumed: two hand-overs between threads and two small MPI messages, one way")
COPY_BYTES_PER_S = Constant(8e9, 5e9, 12e9, "assumed: one core copies fresh memory")
DRAFT_LOGITS_COPIES = Constant(
    5.5, 4.0, 7.0, "copies of a call's draft logits before it can be scheduled: pb_memory.cc, utils.cc, requestWithId.cpp, MPI"
)
DRAFT_LOGITS_COPIES_INSIDE = Constant(1.0, 1.0, 1.0, "retrieveDraftLogits, within the iteration")
DRAFT_LOGITS_COPIES_INSIDE_TP = Constant(
    4.5, 3.0, 5.5, "and with tensor parallelism serialised, broadcast and read again on each rank (executorImpl.cpp)"
)
LOGIT_BYTES = 2
"""``logits_dtype`` of the builds is float16."""

# The LLM API -----------------------------------------------------------------------------------------------------------

LLMAPI_LOOP_MS = Constant(
    0.20, 0.0, 0.40, "measured minus table of Llama-3.1-8B on H100 under the PyTorch flow (silicon_sample.csv)"
)
LLMAPI_ROUND_MS = Constant(
    1.5, 0.5, 3.0, "assumed: host work of a draft-target round, which does not overlap (upstream's example disables it)"
)
LLMAPI_DRAFT_STEP_MS = Constant(0.05, 0.02, 0.10, "assumed: argmax and updates within the graph (drafting_loops.py)")

# Cards that are shared -------------------------------------------------------------------------------------------------

TIME_SLICE_SWITCH_SHARE = Constant(
    0.10, 0.02, 0.50, "assumed: 0.1 ms to change the process in a slice of 1.024 ms (kernel_fifo_gv100.c of NVIDIA's open driver)"
)
MPS_OVERLAP = Constant(
    0.45, 0.3, 0.65, "measured on an H200 with CUDA MPS, in six pairings of three models (python -m bench card --part sharing)"
)


@dataclass(frozen=True)
class Overheads:
    """What a runtime adds to the kernels of one model's iterations, and to the calls on their way. Milliseconds.

    Attributes:
        replays_graphs: iterations that only decode are one launch. The LLM API's are; a compiled engine's only where
            ``cuda_graph_mode`` says so, which upstream and our specs leave off.
        poll_ms: ``recv_poll_period_ms``, at which orchestrator and leader look for messages; None: there is no orchestrator.
        loop_ms: of each iteration, whatever is in it.
        loop_samples: ``loop_ms`` was measured with sampling and the accounting of requests in it.
        replays_joins: iterations in which requests join replay graphs too. vLLM's do, which ``python -m bench paper`` stands for.
        call_ms: of each call, on its way there and back, beside messages; vLLM's too.
    """

    profile: Profile
    replays_graphs: bool
    poll_ms: float | None
    loop_ms: float
    loop_samples: bool = False
    bound: Bound = Bound.VALUE
    replays_joins: bool = False
    call_ms: float = 0.0

    @classmethod
    def compiled(cls, profile: Profile, poll_ms: float, bound: Bound = Bound.VALUE) -> Self:
        """A compiled engine behind Triton's ``tensorrtllm`` backend, in orchestrator mode."""
        return cls(profile, replays_graphs=False, poll_ms=poll_ms, loop_ms=_loop_ms(LOOP_MS, profile, bound), bound=bound)

    @classmethod
    def llmapi(cls, profile: Profile, bound: Bound = Bound.VALUE) -> Self:
        """An engine of the LLM API: graphs, host work that overlaps, no orchestrator."""
        loop_ms = _loop_ms(LLMAPI_LOOP_MS, profile, bound)
        return cls(profile, replays_graphs=True, poll_ms=None, loop_ms=loop_ms, loop_samples=True, bound=bound)

    def iteration_ms(self, kernels_ms: float, num_joins: int, num_decodes: int, num_draft_tokens: int) -> float:
        """An iteration with all that it takes beside its kernels.

        Args:
            num_draft_tokens: most draft tokens that came with one of its joins.
        """
        if not (self.replays_joins if num_joins else self.replays_graphs):
            launches = self.profile.num_layers * self._kernels_a_layer(mixed=num_joins > 0 and num_decodes > 0)
            kernels_ms = max(kernels_ms + launches * self._at(EAGER_GAP_US) / 1e3, launches * self._at(LAUNCH_US) / 1e3)
        found_ms = kernels_ms + self.loop_ms + num_joins * self._at(JOIN_MS) + num_draft_tokens * self._at(DRAFT_STEP_MS)
        if not self.loop_samples:
            found_ms += (num_joins + num_decodes) * self._at(REQUEST_US) / 1e3 + self._at(SAMPLING_MS)
        return found_ms

    @property
    def hop_ms(self) -> float:
        """One way between the loop and the executor: a message that is looked for now and then, on average half a period late."""
        if self.poll_ms is None:
            return self.call_ms / 2.0
        slack_ms = self._at(POLL_SLACK_MS) if self.poll_ms else 0.0
        return self._at(MESSAGE_MS) + (self.poll_ms + slack_ms) / 2.0

    @property
    def round_ms(self) -> float:
        """Host work of a round in which the engine drafts by itself."""
        return self._at(LLMAPI_ROUND_MS)

    @property
    def draft_pass_ms(self) -> float:
        """Of each pass of the engine's own draft model, beside its kernels."""
        return self._at(LLMAPI_DRAFT_STEP_MS)

    def draft_logits_ms(self, num_draft_tokens: int) -> float:
        """What the one-hot logits of so many draft tokens take on the way to the executor."""
        return self._at(DRAFT_LOGITS_COPIES) * self._copy_ms(num_draft_tokens)

    def draft_logits_inside_ms(self, num_draft_tokens: int) -> float:
        """And what they take within the iteration that verifies them."""
        copies = DRAFT_LOGITS_COPIES_INSIDE_TP if self.profile.key.tp_size > 1 else DRAFT_LOGITS_COPIES_INSIDE
        return self._at(copies) * self._copy_ms(num_draft_tokens)

    def _copy_ms(self, num_draft_tokens: int) -> float:
        # The more bytes a second the less time: the ends change places.
        opposite = {Bound.LOW: Bound.HIGH, Bound.HIGH: Bound.LOW, Bound.VALUE: Bound.VALUE}[self.bound]
        return 1e3 * num_draft_tokens * self.profile.vocab_size * LOGIT_BYTES / at(COPY_BYTES_PER_S, opposite)

    def _kernels_a_layer(self, *, mixed: bool) -> float:
        found = self._at(KERNELS_A_LAYER)
        found += self._at(KERNELS_A_LAYER_TP) if self.profile.key.tp_size > 1 else 0.0
        return found + (self._at(KERNELS_A_LAYER_MIXED) if mixed else 0.0)

    def _at(self, constant: Constant) -> float:
        return at(constant, self.bound)


def _loop_ms(alone: Constant, profile: Profile, bound: Bound) -> float:
    return at(alone, bound) + at(LOOP_MS_A_TP_DOUBLING, bound) * log2(profile.key.tp_size)


def at(constant: Constant, bound: Bound) -> float:
    """A constant at one end of its range, or where it is taken to be."""
    return float(getattr(constant, bound.value))
