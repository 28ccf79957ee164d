"""From a request to the prompt's token ids: size, template, control tokens, and off the event loop where it takes time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lr_backend.config import Limits, LoopConfig
from lr_backend.contract import IntArray
from lr_backend.errors import InvalidRequest, PromptTooLong
from lr_backend.request import LookaheadRequest
from lr_backend.steps.plain import PlainText, mark_for

MAX_BYTES_A_TOKEN = 64
"""Of a prompt as a whole. Long runs of blanks have tokens this long; text has four or five bytes a token."""
QUICK_CHARS = 4096
"""So much is encoded at once; a thread would take longer to wake up."""
QUICK_CUTS = 32
"""Control tokens that so little text may hold. It is cut inside each of them, and each piece is encoded by a call of its own."""
TURN_CHARS = 32
"""What a turn counts for beside its text: the template is rendered for each of them, the empty ones too."""
SLICE_CHARS = 1 << 14
EDGE_TOKENS = 8
"""A slice's ends may be cut inside a token: so many fewer it may have as part of the whole."""
NUM_THREADS = 2


def max_text_bytes(limits: Limits) -> int:
    """Of any string input: with more no prompt is short enough."""
    return limits.max_prompt_tokens * MAX_BYTES_A_TOKEN


class Prompts:
    """Makes the prompts of one server.

    Args:
        tokenizer: of the target, from Hugging Face.
    """

    def __init__(self, tokenizer: Any, config: LoopConfig) -> None:
        self._tokenizer = tokenizer
        self._plain = PlainText.of(tokenizer)
        thinking = {text for text in (config.think_open, config.think_close) if text}
        self._turns = PlainText.of(tokenizer, but=thinking)
        self._config = config
        # What a tokenizer itself puts before a text; a chat template writes it where there is one.
        first = getattr(tokenizer, "bos_token_id", None)
        self._first = [first] if first is not None and tokenizer.encode("")[:1] == [first] else []
        self._threads = ThreadPoolExecutor(NUM_THREADS, "prompts")

    async def ids(self, request: LookaheadRequest) -> IntArray:
        """Token ids of a request's prompt, shape [N].

        Raises:
            InvalidRequest: it is empty or too long, or the target's template refuses the conversation.
        """
        messages, limit = request.messages or (), self._config.limits.max_prompt_tokens
        if len(messages) > limit:  # a turn costs at least a token
            raise PromptTooLong("messages", f"at least {len(messages)} tokens", f"{limit} prompt tokens")
        num_chars = len(request.text_input or "") + sum(TURN_CHARS + len(message.content) for message in messages)
        if num_chars <= QUICK_CHARS and self._plain.num_cuts(turn["content"] for turn in request.conversation) <= QUICK_CUTS:
            return self._make(request)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._make, request)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, request: LookaheadRequest) -> IntArray:
        text, mark = self._text(request)
        limit = self._config.limits.max_prompt_tokens
        least = text.count(mark)  # each piece has a token at least
        if least <= limit and len(text) > QUICK_CHARS:
            least = max(least, self._least_tokens(text.replace(mark, ""), limit))
        ids = self._plain.ids_of_cut(text, mark) if least <= limit else []
        if ids and request.raw and not self._config.raw_prompts:
            ids = [*self._first, *ids]
        field = "text_input" if request.messages is None else "messages"
        if max(least, len(ids)) > limit:
            found = f"at least {least}" if least > limit else str(len(ids))
            raise PromptTooLong(field, f"{found} tokens", f"{limit} prompt tokens")
        if not ids:
            raise InvalidRequest(field, "0 tokens", "a prompt has one at least")
        return np.asarray(ids, dtype=np.int32)

    def _text(self, request: LookaheadRequest) -> tuple[str, str]:
        """(the prompt, the mark that stands in it where control tokens are cut)."""
        contents = [turn["content"] for turn in request.conversation]
        mark = mark_for(*contents)
        if request.raw:
            return (contents[0] if self._config.raw_prompts else self._plain.cut(contents[0], mark)), mark
        # A model's own turn may hold its reasoning, which templates look for.
        turns = [
            {**turn, "content": (self._turns if turn["role"] == "assistant" else self._plain).cut(turn["content"], mark)}
            for turn in request.conversation
        ]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise whatever they like at turns they do not accept
            raise InvalidRequest("messages", "", f"the target's chat template refuses it: {error}") from error
        return str(text), mark

    def _least_tokens(self, text: str, enough: int) -> int:
        """How many tokens a long text has at least; no more is encoded than it takes to pass ``enough``."""
        least = 0
        for start in range(0, len(text), SLICE_CHARS):
            ids = self._tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
            least += max(0, len(ids) - EDGE_TOKENS)
            if least > enough:
                break
        return least
