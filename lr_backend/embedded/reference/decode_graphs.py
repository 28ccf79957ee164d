"""Decode iterations recorded once and replayed: a CUDA graph launches its hundreds of kernels in one call.

A recording is of one shape, so batch and length are rounded up to a few sizes: a :class:`Bucket`. What differs between iterations
is read from the recording's input buffer; everything else is fixed when it is recorded, the window's memory above all, so that
recordings end with that. Rows of a bucket that no sequence has decode token 0 at position 0: they write to unused rows of the
window and to the pool's scratch block, where nothing is ever read before it is written anew.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lr_backend.embedded.reference.attention import IterationAttention, additive_mask
from lr_backend.embedded.reference.decode_window import DecodeRow, DecodeWindow
from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.reference.model import DecoderModel
from lr_backend.embedded.reference.transfer import refill

NUM_WARM_UPS = 2
"""Runs before a capture, in which libraries allocate what they keep."""

_logger = logging.getLogger(__name__)

Step = Callable[[], Tensor]
"""One decode iteration: reads its input buffer, writes keys and values, returns logits float32 [batch, vocabulary]."""


class Recorder(Protocol):
    """Makes steps cheaper to run again."""

    def __call__(self, step: Step) -> Step:
        """Record ``step``, which may run any number of times meanwhile; what comes back has the same effects and result.

        A result is good until the next replay of any recording of this recorder.
        """
        ...


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How decode iterations are recorded.

    Attributes:
        make_recorder: called anew whenever all recordings have become invalid.
        record_after: iterations of a bucket that run eagerly before it is recorded, so that what is rare or soon over is not.
        max_recordings: the one that has been idle longest goes first.
        min_length: shorter windows than this share one bucket.
    """

    make_recorder: Callable[[], Recorder]
    record_after: int = 8
    max_recordings: int = 32
    min_length: int = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a recording: rows of the window, and tokens that each attends over."""

    batch: int
    length: int


def bucket_for(num_rows: int, longest: int, window: Bucket, min_length: int) -> Bucket:
    """The smallest bucket for so many rows of up to ``longest`` tokens: powers of two, but not beyond the ``window``."""
    return Bucket(min(_power_of_two(num_rows), window.batch), min(_power_of_two(max(longest, min_length)), window.length))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class BucketGroup:
    """The window's first rows, used or not, each over its own length: a decode group whose numbers all lie on the device."""

    def __init__(self, store: KvStore, window: DecodeWindow, lengths: Tensor, bucket: Bucket) -> None:
        """``lengths`` int64 [batch]: tokens before the new one."""
        self.num_rows = bucket.batch
        self._store = store
        self._window = window
        self._tokens = slice(0, bucket.length)
        self._positions = window.positions_at(lengths)
        blocked = torch.arange(bucket.length, device=store.device) > lengths[:, None]
        self._mask = additive_mask(blocked, store.rows.dtype)[:, None, None]

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        self._window.append(layer, self._positions, key_value)
        keys, values = self._window.view(layer, slice(0, self.num_rows), self._tokens)
        heads = query.view(self.num_rows, self._store.num_kv_heads, -1, self._store.head_dim)
        return F.scaled_dot_product_attention(heads, keys, values, attn_mask=self._mask).reshape(self.num_rows, -1)


@dataclass(frozen=True, slots=True)
class Recording:
    """``inputs`` int64 [3, batch]: token ids, positions, slots."""

    inputs: Tensor
    replay: Step


class DecodeGraphs:
    """Recordings by bucket; the engine's thread owns them."""

    def __init__(self, model: DecoderModel, store: KvStore, window: DecodeWindow, settings: GraphSettings) -> None:
        self.num_recorded = 0
        self.num_replays = 0
        self._model = model
        self._store = store
        self._window = window
        self._settings = settings
        self._recorder: Recorder | None = None
        self._recordings: OrderedDict[Bucket, Recording] = OrderedDict()
        self._uses: Counter[Bucket] = Counter()
        self._generation = window.generation
        self._failed = False

    def run(self, rows: Items[DecodeRow], token_ids: Items[int]) -> Tensor | None:
        """Logits, float32 [rows, vocabulary], of ``rows`` as the window has arranged them, with each its next token.

        They are good until the next call. None: nothing was computed, and the caller does it eagerly: the bucket is not recorded
        yet, or recording has failed once, which is logged and not tried again.
        """
        if self._failed:
            return None
        window, settings = self._window, self._settings
        if self._generation != window.generation:
            self._forget()
        longest = max(row.length for row in rows) + 1
        bucket = bucket_for(len(rows), longest, Bucket(window.batch, window.length), settings.min_length)
        values = self._values(rows, token_ids, bucket)
        recording = self._recordings.get(bucket) or self._record(bucket, values)
        if recording is None:
            return None
        self._recordings.move_to_end(bucket)
        refill(recording.inputs, values)
        self.num_replays += 1
        return recording.replay()[: len(rows)]

    def _values(self, rows: Items[DecodeRow], token_ids: Items[int], bucket: Bucket) -> list[list[int]]:
        size, num_unused = self._store.tokens_per_block, bucket.batch - len(rows)
        slots = [row.blocks[row.length // size] * size + row.length % size for row in rows]
        nothing = [0] * num_unused
        scratch = [self._store.scratch_block * size] * num_unused
        return [[*token_ids, *nothing], [*(row.length for row in rows), *nothing], [*slots, *scratch]]

    def _record(self, bucket: Bucket, values: list[list[int]]) -> Recording | None:
        """Record a bucket that has been used often enough. The step runs with ``values`` meanwhile, which repeats itself."""
        self._uses[bucket] += 1
        if self._uses[bucket] <= self._settings.record_after:
            return None
        inputs = torch.empty(3, bucket.batch, dtype=torch.int64, device=self._store.device)
        refill(inputs, values)
        try:
            self._recorder = self._recorder or self._settings.make_recorder()
            recording = Recording(inputs, self._recorder(self._step(inputs, bucket)))
        except Exception:
            _logger.exception("a decode iteration of %s could not be recorded; all run eagerly from now on", bucket)
            self._failed = True
            self._forget()
            return None
        self.num_recorded += 1
        self._recordings[bucket] = recording
        # Only now: a recorder's memory lives as long as one of its recordings.
        if len(self._recordings) > self._settings.max_recordings:
            evicted, _ = self._recordings.popitem(last=False)
            del self._uses[evicted]
        return recording

    def _step(self, inputs: Tensor, bucket: Bucket) -> Step:
        def step() -> Tensor:
            token_ids, positions, slots = inputs.unbind(0)
            group = BucketGroup(self._store, self._window, positions, bucket)
            return self._model.forward(token_ids, positions, IterationAttention(self._store, [group], slots), None)

        return step

    def _forget(self) -> None:
        """Drop all recordings: they hold addresses of a window that is gone."""
        self._recordings.clear()
        self._uses.clear()
        self._recorder = None
        self._generation = self._window.generation


class CudaGraphRecorder:
    """Captures steps as CUDA graphs, on a stream of their own; all share one memory pool, since no two run at a time.

    The pool ends with the last of its graphs and cannot be captured into after that: then a new recorder is needed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> Step:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only what this one does is captured, and checked.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
