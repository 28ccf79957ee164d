"""Where a run ends: at an end token, at a stop word, or at its length."""

from __future__ import annotations

from collections.abc import Sequence

from lr_backend.engine.request import EngineRequest


def cut_at_end(
    request: EngineRequest, num_output: int, tail: Sequence[int], new_tokens: Sequence[int], max_new_tokens: int
) -> tuple[list[int], bool]:
    """Those of the new tokens that are emitted, and whether the run ends with them.

    An end token is not emitted. A stop word is emitted. It may begin in the prompt, as upstream's may: a word of which one call
    writes the beginning and the next one the end is seen.

    Args:
        num_output: tokens that were emitted before.
        tail: the last tokens of prompt and output, at least as many as the longest stop word has, or all if there are fewer.
    """
    words = request.stop_words
    emitted = list(new_tokens[: max(1, max_new_tokens - num_output)])
    for count, token in enumerate(emitted):
        if token == request.end_id:
            return emitted[:count], True
        if token in words.last_tokens:
            before = tail[max(0, len(tail) + count + 1 - words.longest) :] if count + 1 < words.longest else ()
            if words.end([*before, *emitted[max(0, count + 1 - words.longest) : count + 1]]):
                return emitted[: count + 1], True
    return emitted, num_output + len(emitted) >= max_new_tokens
