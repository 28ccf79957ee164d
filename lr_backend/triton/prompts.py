"""From a request to the prompt's token ids: size, template, control tokens, and off the event loop where it takes time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from lr_backend.config import Limits, LoopConfig
from lr_backend.contract import IntArray
from lr_backend.errors import InvalidRequest, PromptTooLong
from lr_backend.request import LookaheadRequest
from lr_backend.steps.plain import PlainText, mark_for
from lr_backend.steps.rules import CALL_MARKS

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
OTHER_FORMS = ("<function=", "<arg_key>")
"""Calls of Qwen3-Coder and of GLM, which stand between the same marks."""
GLOBALS = ("namespace", "range", "dict", "cycler", "joiner", "lipsum", "raise_exception", "strftime_now")
"""What every template has: Jinja's, and those of ``transformers``."""


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
        templates = getattr(tokenizer, "chat_template", None) or ""
        self._template = templates if isinstance(templates, str) else "\n".join(templates.values())
        self._words = frozenset(re.findall(r"\w+", self._template))
        # By these names a template is called here, or calls; one of a special token would stand in that token's place.
        render = getattr(tokenizer, "apply_chat_template", None)
        self._reserved = {*GLOBALS, "messages", *(signature(render).parameters if render is not None else ())}
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
        num_chars = len(request.text_input or "") + sum(TURN_CHARS + len(one.content) for one in messages)
        has_more = any(one.tool_calls or one.reasoning_content or one.tool_call_id for one in messages)
        if num_chars <= QUICK_CHARS and not (has_more or request.tools or request.chat_template_kwargs):
            contents = (turn["content"] for turn in request.conversation)
            if self._plain.num_cuts(contents) <= QUICK_CUTS:
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
        turns, tools, own = _shown(request)
        mark = mark_for(*texts_of((turns, tools, own)))
        if request.raw:
            (turn,) = turns
            return (turn["content"] if self._config.raw_prompts else self._plain.cut(turn["content"], mark)), mark
        self._check(turns, tools, own)
        cut = partial(self._plain.cut, mark=mark)
        try:
            text = self._tokenizer.apply_chat_template(
                [self._turn(turn, mark) for turn in turns],
                tools=with_texts(tools, cut) or None,
                tokenize=False,
                add_generation_prompt=True,
                **with_texts(own, cut),
            )
        except Exception as error:  # templates raise whatever they like at turns they do not accept
            raise InvalidRequest("messages", "", f"the target's chat template refuses it: {error}") from error
        called = (call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ()))
        if any(cut(name) not in text for name in called):
            raise InvalidRequest("messages", "", "the target's chat template does not show every call of a tool")
        return str(text), mark

    def _turn(self, turn: dict[str, Any], mark: str) -> dict[str, Any]:
        """As the template takes it: control tokens cut, and the reasoning in the text where it is not known apart."""
        cut = partial(self._plain.cut, mark=mark)
        made = {name: value if name == "role" else with_texts(value, cut) for name, value in turn.items()}
        if turn["role"] != "assistant":
            return made
        if "reasoning_content" not in made:
            made["content"] = self._turns.cut(turn["content"], mark)  # it may hold its reasoning, which templates look for
        elif "reasoning_content" in self._words:
            made["content"] = made["content"].lstrip("\n")  # the template itself writes what stands between the two
        else:
            opening, close = self._config.think_open or "", self._config.think_close or mark
            made["content"] = f"{opening}{made.pop('reasoning_content')}{close}{made['content']}"
        return made

    def _check(self, turns: Iterable[Mapping[str, Any]], tools: Collection[object], own: Iterable[str]) -> None:
        """Refuse what the template does not read, and would be lost, and calls in a form that nobody here reads.

        Raises:
            InvalidRequest: names it.
        """
        if tools and "tools" not in self._words:
            raise InvalidRequest("tools", "", "the target's chat template shows no tools")
        opens, closes = CALL_MARKS
        if tools and (opens not in self._template or any(form in self._template for form in OTHER_FORMS)):
            rule = f"the target's chat template has calls in another form than JSON between {opens} and {closes}"
            raise InvalidRequest("tools", "", rule)
        needed = {"tool_calls" for turn in turns if "tool_calls" in turn} | {"tool" for turn in turns if turn["role"] == "tool"}
        if not needed <= self._words:
            raise InvalidRequest("messages", "", "the target's chat template shows no calls of tools")
        for name in own:
            if name in self._reserved or name.endswith("_token") or name not in self._words:
                raise InvalidRequest(f"chat_template_kwargs.{name[:64]}", "", "it stands nowhere in the target's chat template")

    def _least_tokens(self, text: str, enough: int) -> int:
        """How many tokens a long text has at least; no more is encoded than it takes to pass ``enough``."""
        least = 0
        for start in range(0, len(text), SLICE_CHARS):
            ids = self._tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
            least += max(0, len(ids) - EDGE_TOKENS)
            if least > enough:
                break
        return least


def _shown(request: LookaheadRequest) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """(turns, tools, the template's own values)."""
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    return request.conversation, tools, dict(request.chat_template_kwargs or {})


def texts_of(value: object) -> Iterator[str]:
    """Every text in what JSON can say, names among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_texts(inner, change) for name, inner in value.items()}
    return [with_texts(inner, change) for inner in value] if isinstance(value, list | tuple) else value
