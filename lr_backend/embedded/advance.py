"""What an iteration changes: sequences take their new tokens, blocks are shared, and some sequences end.

It changes nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from lr_backend.embedded.scheduler import Chunk, Scheduler
from lr_backend.embedded.sequence import NewTokens, Sequence
from lr_backend.embedded.stats import Counters
from lr_backend.engine.stopping import cut_at_end


def advance(
    scheduler: Scheduler, counters: Counters, chunks: Items[Chunk], gained: Iterable[NewTokens], now_ns: int
) -> list[Sequence]:
    """Take in what ``chunks`` have brought; returns the sequences that ended, still in their places."""
    cache = scheduler.cache
    counters.num_batch_rows += len(chunks)
    for chunk in chunks:
        sequence = chunk.sequence
        counters.num_tokens_prefilled += chunk.count if not sequence.num_generated else 0
        sequence.num_computed = min(chunk.end, len(sequence.tokens))
        if sequence.num_computed // cache.tokens_per_block > len(sequence.table.keys):
            cache.register(sequence.table, sequence.tokens, sequence.num_computed)
        if (chunk.count > 1 and chunk.num_logits) or (not chunk.num_logits and sequence.num_pending == 1):
            # Branches of the same answer come next: they continue this prompt.
            cache.share_partial(sequence.table, sequence.tokens, sequence.num_computed)
    return [new.sequence for new in gained if _take_tokens(new, counters, now_ns)]


def _take_tokens(new: NewTokens, counters: Counters, now_ns: int) -> bool:
    """Append those of a sequence's new tokens that are emitted; returns whether it ended."""
    sequence = new.sequence
    num_output = sequence.num_generated
    tail = sequence.tokens[max(0, len(sequence.tokens) - sequence.request.stop_words.longest) :]
    emitted, ended = cut_at_end(sequence.request, num_output, tail, new.token_ids, sequence.max_new_tokens)
    sequence.tokens += emitted
    sequence.num_computed = min(sequence.num_computed + len(new.token_ids) - 1, len(sequence.tokens))
    sequence.log_probs += new.log_probs[: len(emitted)]
    num_accepted = min(new.num_accepted, len(emitted))
    sequence.num_accepted += num_accepted
    sequence.num_proposed += new.num_proposed
    sequence.first_token_ns = sequence.first_token_ns or now_ns
    sequence.last_token_ns = now_ns
    counters.num_tokens_decoded += len(emitted)
    counters.num_draft_tokens += len(sequence.drafts) + new.num_proposed
    counters.num_accepted_tokens += num_accepted
    return ended or sequence.is_verification


def stamp(chunks: Iterable[Chunk], now_ns: int) -> None:
    """Note when each sequence was first scheduled."""
    for chunk in chunks:
        chunk.sequence.first_scheduled_ns = chunk.sequence.first_scheduled_ns or now_ns
