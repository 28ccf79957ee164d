"""One engine request, read once from contract tensors, and its answer.

Everything after this module works on these two types; tensors exist only at the rim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lr_backend.contract import DRAFTING_ENGINE_INPUTS, TensorMap, decode_stop_words
from lr_backend.engine import EngineCall, Generation, Sampling
from lr_backend.errors import EngineRejected, InvalidRequest

_SPECS = {spec.name: spec for spec in DRAFTING_ENGINE_INPUTS}
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StopWords:
    """Words at which a run ends, for a look-up by what was written last: its cost does not grow with their number.

    Attributes:
        words: token ids; none is empty.
        lengths: every length that a word has, ascending.
        last_tokens: with which any of them ends.
    """

    words: frozenset[tuple[int, ...]] = frozenset()
    lengths: tuple[int, ...] = ()
    last_tokens: frozenset[int] = frozenset()

    @classmethod
    def of(cls, words: Iterable[tuple[int, ...]]) -> Self:
        """Of any number of words, in any order."""
        found = frozenset(words)
        return cls(found, tuple(sorted({len(word) for word in found})), frozenset(word[-1] for word in found))

    @property
    def longest(self) -> int:
        """Tokens of the longest word; 0 where there is none."""
        return self.lengths[-1] if self.lengths else 0

    def end(self, tokens: Sequence[int]) -> bool:
        """``tokens`` end with a word."""
        # Of fewer tokens than a length all are looked up: if they are a word, it is a shorter one.
        return any(tuple(tokens[-length:]) in self.words for length in self.lengths)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine is asked for.

    Attributes:
        request_id: may be empty; then it cannot be cancelled by id.
        max_new_tokens: of a plain run; a verification ends by itself after at most ``len(draft_ids) + 1``.
        draft_logits: float32 [K, vocabulary], as the contract has them; drafts are verified by drawing, which does not need them.
        num_draft_tokens: tokens that the engine's own draft model may propose for each pass; 0: none.
        end_id: never emitted, ends the run; None: there is none.
        min_tokens: before so many the end token is not drawn. Stop words end a run at any time, as upstream's do.
        exclude_input: the answer leaves the prompt out.
        stop: this is no run but the cancelling of another of the same id.
    """

    request_id: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    draft_ids: tuple[int, ...] = ()
    draft_logits: npt.NDArray[np.float32] | None = None
    num_draft_tokens: int = 0
    end_id: int | None = None
    stop_words: StopWords = StopWords()
    min_tokens: int = 0
    return_log_probs: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    exclude_input: bool = True
    stop: bool = False

    @classmethod
    def from_tensors(cls, request_id: str, tensors: TensorMap, *, exclude_input: bool = False) -> Self:
        """Read contract tensors, with or without the leading batch dimension of one.

        ``exclude_input`` holds when ``exclude_input_in_output`` is absent.

        Raises:
            EngineRejected: naming the tensor and the rule it breaks.
        """
        reader = _Reader(tensors)
        if reader.boolean("stop"):
            return cls(request_id, (), 0, stop=True)
        reader.refuse_unsupported()
        draft_ids = reader.ids("draft_input_ids") if "draft_input_ids" in tensors else ()
        if "draft_input_ids" in tensors and not draft_ids:
            raise _rejected("draft_input_ids", "[]", "at least one draft token; leave the tensor out when there are none")
        return cls(
            request_id=request_id,
            input_ids=reader.prompt(),
            max_new_tokens=reader.integer("request_output_len", least=1),
            sampling=reader.sampling(),
            seed=reader.integer("seed", default=0, least=0, most=MAX_SEED),
            draft_ids=draft_ids,
            draft_logits=reader.draft_logits(len(draft_ids)),
            num_draft_tokens=reader.integer("num_draft_tokens", default=0, least=0),
            end_id=reader.end_id(),
            stop_words=reader.stop_words(),
            min_tokens=reader.integer("min_tokens", default=0, least=0),
            return_log_probs=reader.boolean("return_log_probs"),
            return_perf_metrics=reader.boolean("return_perf_metrics"),
            return_num_input_tokens=reader.boolean("return_num_input_tokens"),
            return_num_output_tokens=reader.boolean("return_num_output_tokens"),
            exclude_input=reader.boolean("exclude_input_in_output", default=exclude_input),
        )

    @classmethod
    def from_call(cls, call: EngineCall) -> Self:
        """The same request as ``from_tensors(call.tensors())``, without the detour.

        Raises:
            EngineRejected: naming the field and the rule it breaks.
        """
        draft_ids = () if call.draft_ids is None else tuple(np.asarray(call.draft_ids).tolist())
        return cls(
            request_id=call.request_id,
            input_ids=tuple(np.asarray(call.input_ids).tolist()),
            max_new_tokens=call.max_new_tokens,
            sampling=_checked_sampling(call.sampling),
            seed=call.seed & MAX_SEED,
            draft_ids=draft_ids,
            draft_logits=None if call.draft_logits is None else _checked_draft_logits(call.draft_logits, len(draft_ids)),
            num_draft_tokens=call.num_draft_tokens,
            stop_words=StopWords() if call.stop_words is None else _stop_words(np.asarray(call.stop_words)),
            return_log_probs=call.return_log_probs,
            return_perf_metrics=call.return_perf_metrics,
        )


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """What a run came to. Times are ``time.monotonic_ns``; token ids are the new ones only.

    Attributes:
        num_reused_tokens: None: the engine does not say, nor ``num_allocated_blocks``.
        first_scheduled_ns: 0: it does not say.
    """

    request: EngineRequest
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reused_tokens: int | None = 0
    num_allocated_blocks: int = 0
    tokens_per_block: int = 1
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Output tensors as the engine sends them: one batch row, one beam."""
        request = self.request
        tokens = self.token_ids if request.exclude_input else request.input_ids + self.token_ids
        outputs: dict[str, npt.NDArray[Any]] = {
            "output_ids": np.array(tokens, dtype=np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(tokens)]], dtype=np.int32),
        }
        if request.return_log_probs:
            outputs["output_log_probs"] = np.array(self.log_probs, dtype=np.float32).reshape(1, 1, -1)
            if len(self.log_probs) == len(self.token_ids):
                outputs["cum_log_probs"] = np.array([[math.fsum(self.log_probs)]], dtype=np.float32)
        if request.return_num_input_tokens:
            outputs["num_input_tokens"] = np.array([[len(request.input_ids)]], dtype=np.int32)
        if request.return_num_output_tokens:
            outputs["num_output_tokens"] = np.array([[len(self.token_ids)]], dtype=np.int32)
        if request.return_perf_metrics:
            outputs |= self._perf_metrics()
        return outputs

    def _perf_metrics(self) -> dict[str, npt.NDArray[Any]]:
        rate = self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
        integers = {
            "total_accepted_draft_tokens": self.num_accepted_tokens,
            "total_draft_tokens": self.num_draft_tokens,
        }
        if self.num_reused_tokens is not None:
            reused_blocks = self.num_reused_tokens // self.tokens_per_block
            integers |= {
                "kv_cache_alloc_new_blocks": self.num_allocated_blocks,
                "kv_cache_reused_blocks": reused_blocks,
                "kv_cache_alloc_total_blocks": self.num_allocated_blocks + reused_blocks,
            }
        times = {
            "arrival_time_ns": self.arrival_ns,
            "first_token_time_ns": self.first_token_ns,
            "last_token_time_ns": self.last_token_ns,
        }
        if self.first_scheduled_ns:
            times["first_scheduled_time_ns"] = self.first_scheduled_ns
        metrics: dict[str, npt.NDArray[Any]] = {name: np.array([[value]], dtype=np.int32) for name, value in integers.items()}
        metrics |= {name: np.array([[value]], dtype=np.int64) for name, value in times.items()}
        metrics["acceptance_rate"] = np.array([[rate]], dtype=np.float32)
        return metrics

    def generation(self) -> Generation:
        """The answer as the loop reads it; reused tokens exact, not in whole blocks."""

        def since_arrival(time_ns: int) -> float:
            return max(0, time_ns - self.arrival_ns) / 1e9

        return Generation(
            token_ids=self.token_ids,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_reused_tokens=self.num_reused_tokens,
            log_probs=self.log_probs,
            queue_s=since_arrival(self.first_scheduled_ns),
            total_s=since_arrival(self.last_token_ns),
        )


class _Reader:
    """Typed access to a tensor map; every refusal names its tensor."""

    def __init__(self, tensors: TensorMap) -> None:
        self._tensors = tensors

    def refuse_unsupported(self) -> None:
        for name in self._tensors:
            spec = _SPECS.get(name)
            if spec is None or not spec.embedded:
                raise EngineRejected(f"{name}: this engine does not support this input")
        if self.boolean("streaming"):
            raise _rejected("streaming", True, "one response a request; streaming is not supported")
        if self.integer("beam_width", default=1, least=1) > 1:
            raise _rejected("beam_width", self.integer("beam_width"), "beam search is not supported")

    def integer(self, name: str, *, default: int | None = None, least: int = -(2**31), most: int = 2**31 - 1) -> int:
        if name not in self._tensors and default is not None:
            return default
        value = int(self._scalar(name, "iu"))
        if not least <= value <= most:
            raise _rejected(name, value, f"an integer from {least} to {most}")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        return bool(self._scalar(name, "b")) if name in self._tensors else default

    def real(self, name: str, default: float) -> float:
        return float(self._scalar(name, "fiu")) if name in self._tensors else default

    def ids(self, name: str) -> tuple[int, ...]:
        array = self._tensors[name]
        if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] != 1) or array.dtype.kind not in "iu":
            raise _rejected(name, f"{array.dtype}{array.shape}", "token ids of shape (N,) or (1, N)")
        return tuple(np.ravel(array).tolist())

    def prompt(self) -> tuple[int, ...]:
        if "input_ids" not in self._tensors:
            raise EngineRejected("input_ids: missing")
        ids, length = self.ids("input_ids"), self.integer("input_lengths", least=1)
        if length > len(ids):
            raise _rejected("input_lengths", length, f"at most the {len(ids)} ids of input_ids")
        return ids[:length]

    def sampling(self) -> Sampling:
        """Upstream's defaults: top_k 0 and top_p <= 0 are off, and where both are, whatever the temperature, it is greedy."""
        top_p = self.real("runtime_top_p", 0.0)
        sampling = Sampling(
            temperature=self.real("temperature", 1.0),
            top_k=self.integer("runtime_top_k", default=0),
            top_p=1.0 if top_p <= 0.0 else top_p,
        )
        checked = _checked_sampling(sampling)
        return Sampling() if checked.top_k == 0 and top_p <= 0.0 else checked

    def end_id(self) -> int | None:
        end_id = self.integer("end_id", default=-1, least=-1)
        return None if end_id == -1 else end_id

    def stop_words(self) -> StopWords:
        if "stop_words_list" not in self._tensors:
            return StopWords()
        return _stop_words(self._tensors["stop_words_list"])

    def draft_logits(self, num_drafts: int) -> npt.NDArray[np.float32] | None:
        if "draft_logits" not in self._tensors:
            return None
        return _checked_draft_logits(self._tensors["draft_logits"], num_drafts)

    def _scalar(self, name: str, kinds: str) -> Any:
        array = self._tensors.get(name)
        if array is None:
            raise EngineRejected(f"{name}: missing")
        if array.size != 1 or array.ndim > 2 or array.dtype.kind not in kinds:
            raise _rejected(name, f"{array.dtype}{array.shape}", "one value of shape (1,) or (1, 1)")
        return array.item()


def _checked_sampling(sampling: Sampling) -> Sampling:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise _rejected("temperature", sampling.temperature, "a finite number, at least 0")
    if sampling.top_k < 0:
        raise _rejected("runtime_top_k", sampling.top_k, "at least 0")
    if not 0.0 < sampling.top_p <= 1.0:
        raise _rejected("runtime_top_p", sampling.top_p, "at most 1")
    return sampling


def _checked_draft_logits(array: npt.NDArray[Any], num_drafts: int) -> npt.NDArray[np.float32]:
    logits = array[0] if array.ndim == 3 and array.shape[0] == 1 else array
    if logits.ndim != 2 or logits.dtype.kind != "f" or len(logits) != num_drafts:
        raise _rejected("draft_logits", f"{array.dtype}{array.shape}", f"[{num_drafts}, vocabulary]: a row a draft token")
    if not np.isfinite(logits).all():
        raise EngineRejected("draft_logits: all values must be finite")
    # A copy: the caller may own memory that Triton reuses.
    return np.array(logits, dtype=np.float32)


def _stop_words(array: npt.NDArray[Any]) -> StopWords:
    rows = array[0] if array.ndim == 3 and array.shape[0] == 1 else array
    if rows.dtype.kind not in "iu":
        raise _rejected("stop_words_list", rows.dtype, "token ids are integers")
    try:
        return _indexed(rows.tobytes(), rows.dtype, rows.shape)
    except InvalidRequest as error:
        raise EngineRejected(error.message) from error


@lru_cache(maxsize=16)
def _indexed(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> StopWords:
    """The words of a ``stop_words_list``; a server sends the same few lists, some of thousands of words, with every call."""
    return StopWords.of(decode_stop_words(np.frombuffer(data, dtype).reshape(shape)))


def _rejected(name: str, value: object, rule: str) -> EngineRejected:
    return EngineRejected(f"{name}={value}: {rule}")
