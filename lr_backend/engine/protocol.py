"""What the loop asks of an engine, whichever kind it is.

An engine takes one :class:`EngineCall` and answers with one :class:`Generation`; it batches calls in flight by itself. The
scripted engines of :mod:`lr_backend.testing`, the embedded engine in process, and any engine behind Triton are used through the
same two methods. There is no finish reason on purpose: the TensorRT-LLM contract has none, so the loop reads the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lr_backend.contract import LOGITS_DTYPE, NUMPY_DTYPES, IntArray, engine_tensor


class Role(StrEnum):
    """Which of the three models an engine serves."""

    TARGET = "target"
    DRAFT = "draft"
    JUDGE = "judge"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. ``temperature == 0`` is greedy; ``top_k == 0`` and ``top_p == 1`` switch those off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


GREEDY = Sampling()

DOUBT = 4e-4
"""How much less than 1 a drafted token's probability is by its one-hot draft logits. In FP16 it then has 0.9995, next to 1.

Upstream's kernel accepts where p(target) > r p(draft), and r may be exactly 1. With 1 on both sides a token that is certain would
be rejected, and the rest that is drawn from instead would be zero divided by zero. p(target) has the same rounding.
"""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to an engine.

    Attributes:
        request_id: unique among calls in flight; also names the call when it is cancelled.
        input_ids: the whole prefix, shape [N].
        max_new_tokens: with ``draft_ids`` it is len(draft_ids) + 1: one verification.
        seed: of the noise that tokens are drawn with. On engines with coupled noise calls of one seed draw with the same noise at
            the same position, prompt included: a call that begins within the text of another goes on as it does.
        stop_words: ``stop_words_list`` of the contract, shape [2, L], or None. Stop tokens are kept in the output.
        draft_ids: draft tokens to verify, shape [K]; None when there are none (an empty tensor is an error upstream).
        draft_logits: shape [K, vocabulary]; see :func:`one_hot_logits`.
        num_draft_tokens: tokens that the engine's own draft model may write for each pass of the target; 0: none. For engines of
            which :class:`~lr_backend.config.LoopConfig` says so. The tokens that come back are the same.
    """

    request_id: str
    input_ids: IntArray
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop_words: IntArray | None = None
    draft_ids: IntArray | None = None
    draft_logits: npt.NDArray[Any] | None = None
    return_log_probs: bool = False
    return_perf_metrics: bool = False
    """Ask for the counts and times of :class:`Generation` beyond its tokens; they cost a few output tensors."""
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        assert len(self.input_ids) > 0 and self.max_new_tokens > 0, (len(self.input_ids), self.max_new_tokens)
        if self.draft_ids is not None:
            assert 0 < len(self.draft_ids) == self.max_new_tokens - 1, (len(self.draft_ids), self.max_new_tokens)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The call as contract tensors with a batch dimension of one; absent options are left out."""
        values: dict[str, Any] = {
            "input_ids": self.input_ids,
            "input_lengths": len(self.input_ids),
            "request_output_len": self.max_new_tokens,
            "exclude_input_in_output": True,
            "seed": self.seed,
        }
        if self.sampling.greedy:
            values["runtime_top_k"] = 1
        else:
            values |= {
                "temperature": self.sampling.temperature,
                "runtime_top_k": self.sampling.top_k,
                "runtime_top_p": self.sampling.top_p,
            }
        optional = {
            "stop_words_list": self.stop_words,
            "draft_input_ids": self.draft_ids,
            "draft_logits": self.draft_logits,
            "num_draft_tokens": self.num_draft_tokens or None,
            "return_log_probs": self.return_log_probs or None,
            "return_perf_metrics": self.return_perf_metrics or None,
        }
        values |= {name: value for name, value in optional.items() if value is not None}
        return {name: engine_tensor(name, value) for name, value in values.items()}


def cancel_tensors() -> dict[str, npt.NDArray[Any]]:
    """The request that cancels another of the same id, as upstream's own helper builds it."""
    values: dict[str, Any] = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    return {name: engine_tensor(name, value) for name, value in values.items()}


def one_hot_logits(draft_ids: IntArray, vocab_size: int) -> npt.NDArray[Any]:
    """Draft logits that put all probability but :data:`DOUBT` on the drafted token, shape [K, vocabulary], in the contract's
    type.

    With them an engine whose token-only rule is biased accepts with p(target) and else draws from the rest.
    """
    # Made in that type: to convert a million values takes longer than a verification.
    logits = np.full((len(draft_ids), vocab_size), math.log(DOUBT / vocab_size), dtype=NUMPY_DTYPES[LOGITS_DTYPE])
    logits[np.arange(len(draft_ids)), draft_ids] = 0.0
    return logits


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine wrote for one call.

    Attributes:
        token_ids: new tokens only; stop tokens kept. Shorter than asked for after a stop, a cancel, or dropped drafts.
        num_draft_tokens: drafts that were verified (the engine may shorten them silently).
        num_accepted_tokens: how many of those it accepted.
        num_reused_tokens: prefix tokens that came from the KV cache; None: the engine does not say.
        queue_s, total_s: from its arrival until it was first scheduled and until its last token, on the engine's own clock; 0
            where the engine does not say.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reused_tokens: int | None = None
    log_probs: tuple[float, ...] = ()
    queue_s: float = 0.0
    total_s: float = 0.0

    @classmethod
    def from_tensors(cls, outputs: dict[str, npt.NDArray[Any]], *, tokens_per_block: int = 32) -> Generation:
        """Read the contract's outputs (with or without the batch dimension) of a call that excluded its input."""
        length = int(np.ravel(outputs["sequence_length"])[0])
        token_ids = tuple(np.ravel(outputs["output_ids"])[:length].tolist())

        def number(name: str) -> int:
            return int(np.ravel(outputs[name])[0]) if name in outputs else 0

        arrival = number("arrival_time_ns")

        def since_arrival(name: str) -> float:
            return max(0, number(name) - arrival) / 1e9 if name in outputs else 0.0

        return cls(
            token_ids=token_ids,
            num_draft_tokens=number("total_draft_tokens"),
            num_accepted_tokens=number("total_accepted_draft_tokens"),
            num_reused_tokens=number(reused) * tokens_per_block if (reused := "kv_cache_reused_blocks") in outputs else None,
            log_probs=tuple(np.ravel(outputs["output_log_probs"])[:length].tolist()) if "output_log_probs" in outputs else (),
            queue_s=since_arrival("first_scheduled_time_ns"),
            total_s=since_arrival("last_token_time_ns"),
        )


@runtime_checkable
class Engine(Protocol):
    """One model that generates.

    ``generate`` may be cancelled as any coroutine: the engine then stops that call's work, and nothing of it outlives
    :meth:`close`. Raises :class:`~lr_backend.errors.EngineError` and nothing else.
    """

    async def generate(self, call: EngineCall) -> Generation: ...

    async def close(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
