"""What runs the chunks of an iteration: the seam between scheduling and computing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.scheduler import Chunk
from lr_backend.embedded.sequence import NewTokens


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``start + count`` of one sequence, whose ``blocks`` cover them and all before."""

    start: int
    count: int
    blocks: Items[int]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Output:
    """The logits of one chunk: rows ``first`` to ``first + chunk.num_logits`` of the iteration's logits."""

    chunk: Chunk
    first: int


def flattened(chunks: Items[Chunk]) -> tuple[list[int], list[int], list[Output]]:
    """The tokens of an iteration, chunk after chunk, which of them yield logits, and whose these are."""
    tokens: list[int] = []
    rows: list[int] = []
    outputs: list[Output] = []
    for chunk in chunks:
        tokens += chunk.sequence.pending(chunk.count)
        if chunk.num_logits:
            outputs.append(Output(chunk, len(rows)))
            rows += range(len(tokens) - chunk.num_logits, len(tokens))
    return tokens, rows, outputs


def span_of(chunk: Chunk) -> Span:
    """Where a chunk stands in its sequence, and the blocks of that."""
    return Span(chunk.start, chunk.count, chunk.sequence.table.blocks)


class Runner(Protocol):
    """A model and the memory behind the KV cache; the engine's thread owns it."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def is_concurrent(self) -> bool:
        """Whether two threads may :meth:`run` at a time, with different sequences."""
        ...

    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Output]]:
        """Logits, float32 [R, ids], and which rows are whose; keys and values of all tokens are stored.

        Of the ids that there are alone: rows may lie further apart, as checkpoints pad the vocabulary.
        """
        ...

    def run_ahead(self, chunks: Items[Chunk], max_passes: int | None = None) -> tuple[list[NewTokens], int] | None:
        """Decode these sequences several times in one call; returns what each gained, and the number of passes.

        It ends when a sequence may have ended, when one has no more room, after ``max_passes``, or at :meth:`interrupt`. A
        sequence whose logits are not finite ends it too, and gains no token.
        None where that cannot be done: then nothing has happened, and :meth:`run` is to be used.
        """
        ...

    def interrupt(self, wanted: bool) -> None:
        """Have :meth:`run_ahead` return soon, or no longer; from any thread."""
        ...

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens' keys and values of one block to another, in all layers."""
        ...

    def allocated(self, blocks: Items[int]) -> None:
        """These blocks get a new owner: what they held is of no use."""
        ...

    def clear(self, blocks: Items[int]) -> None:
        """Forget what a failed iteration may have left in ``blocks`` and wherever else it wrote."""
        ...

    def reset(self) -> None:
        """Forget everything stored."""
        ...
