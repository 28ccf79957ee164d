"""The judge's prompt, built from token ids.

A step is text that a model wrote, hence untrusted: it may hold ``<|im_end|>``, the markers below, or a verdict of its own.
So only the fixed parts are encoded with special tokens allowed; the steps are encoded as plain text between them, and
no step can close its section, forge a turn of the conversation, or write the verdict.

The wording follows the task of arXiv 2506.19830, appendix A: same meaning *and* same calculation results, doubt counts as
unaligned, the answer is one label whose opening bracket is already written, so that the verdict is one token.

Knows tokenizers by duck type; knows no engine and no loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lr_backend.steps.plain import PlainText
from lr_backend.steps.rules import THINK_MARKERS

ALIGNED, UNALIGNED = "aligned", "unaligned"

SYSTEM_TEXT = "You compare two reasoning steps."
TASK_TEXT = (
    "Decide whether step 1 and step 2 mean the same. Compare what is computed, the numbers, the operators, the units, "
    "the names and the results; ignore the wording. Answer [aligned] if the meaning and all results are the same, "
    "[unaligned] if anything differs or you are not sure. Answer with the label only."
)
STEP_1_OPEN, STEP_1_CLOSE = "\n<step 1>\n", "\n</step 1>"
STEP_2_OPEN, STEP_2_CLOSE = "\n<step 2>\n", "\n</step 2>"
VERDICT_PREFILL = "["
MAX_STEP_TOKENS = 512
"""Tokens of a step, by its own tokenizer, that a judge reads."""

AUDIT_SYSTEM_TEXT = "You check whether one reasoning step may replace another."
AUDIT_TASK_TEXT = (
    "Step 2 is to replace step 1 in a solution. Search for a difference: a number, an operator, a unit, a name, a result, "
    "a claim or a mistake that only one of them makes. Answer [aligned] only if everything that follows step 1 could follow "
    "step 2 unchanged, [unaligned] if you found a difference or are not sure. Answer with the label only."
)

_SECTION = re.compile(r"<\s*/?\s*step\s*[12]\s*>", re.IGNORECASE)
"""As a small model may read it."""
_SLOT_1, _SLOT_2 = "\x00first\x00", "\x00second\x00"


class PromptTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the prompt needs."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...


@dataclass(frozen=True)
class JudgePrompt:
    """Fixed token ids around the two steps; see :meth:`ids`.

    Attributes:
        max_step_tokens: of a step that is read.
        max_tokens: of the whole prompt; None: its engine has no such limit.
    """

    plain: PlainText
    head_ids: tuple[int, ...]
    middle_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    max_step_tokens: int
    max_tokens: int | None = None

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PromptTokenizer,
        *,
        max_step_tokens: int = MAX_STEP_TOKENS,
        system_text: str = SYSTEM_TEXT,
        task_text: str = TASK_TEXT,
        prefill: str = VERDICT_PREFILL,
    ) -> JudgePrompt:
        """Render the model's own chat template once and split it where the steps go."""
        user = task_text + STEP_1_OPEN + _SLOT_1 + STEP_1_CLOSE + STEP_2_OPEN + _SLOT_2 + STEP_2_CLOSE
        conversation = [{"role": "system", "content": system_text}, {"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        head, rest = text.split(_SLOT_1)
        middle, tail = rest.split(_SLOT_2)

        def fixed(part: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(part, add_special_tokens=False))

        return cls(PlainText.of(tokenizer), fixed(head), fixed(middle), fixed(tail) + fixed(prefill), max_step_tokens)

    @classmethod
    def for_audits(
        cls,
        tokenizer: PromptTokenizer,
        think_open: str | None,
        think_close: str | None,
        *,
        max_step_tokens: int = MAX_STEP_TOKENS,
    ) -> JudgePrompt:
        """The prompt on which a reasoning model audits an accepted pair at once: it is sent to search for a difference."""
        return cls.from_tokenizer(
            tokenizer,
            max_step_tokens=max_step_tokens,
            system_text=AUDIT_SYSTEM_TEXT,
            task_text=AUDIT_TASK_TEXT,
            prefill=closed_reasoning(tokenizer, think_open, think_close),
        )

    def ids(self, target_step_text: str, drafted_step_text: str) -> list[int] | None:
        """Token ids of the whole prompt; the next token is the verdict. Both steps are stripped of surrounding white
        space, but for the indentation of their first lines.

        None where they are longer than is read, as nobody can compare what was not read, or one closes a section of the prompt by
        its own words.
        """
        if _SECTION.search(target_step_text) or _SECTION.search(drafted_step_text):
            return None
        first, second = (self.plain.ids(_trimmed(text)) for text in (target_step_text, drafted_step_text))
        if max(len(first), len(second)) > self.max_step_tokens:
            return None
        ids = [*self.head_ids, *first, *self.middle_ids, *second, *self.tail_ids]
        return ids if self.max_tokens is None or len(ids) <= self.max_tokens else None


def _trimmed(text: str) -> str:
    """Without white space around it. Two blanks or more, or a tab, before its first word are indentation and stay."""
    text = re.sub(r"\A\s*\n", "", text.rstrip())
    return text[1:] if re.match(r" (?![ \t])", text) else text


def readable_step_tokens(max_step_tokens: int) -> int:
    """Tokens of a step that a judge reads, where the target's steps may have ``max_step_tokens``."""
    return max(MAX_STEP_TOKENS, max_step_tokens)


def closed_reasoning(tokenizer: PromptTokenizer, think_open: str | None, think_close: str | None) -> str:
    """What the answer of a reasoning model begins with, so that its verdict is its next token: its reasoning is closed already,
    its bracket open. Without the two markers the bracket alone."""
    if think_open is None or think_close is None:
        return VERDICT_PREFILL
    turn = [{"role": "user", "content": ""}]
    text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)).rstrip()
    opened = text.endswith(think_open)
    return f"{'' if opened else think_open + chr(10)}\n{think_close}\n\n{VERDICT_PREFILL}"


def judges_prefill(tokenizer: PromptTokenizer) -> str:
    """What the verdict of a judge begins with. One whose chat template knows marks of reasoning would reason first."""
    template = chat_template(tokenizer)
    marks = next(((opened, closed) for opened, closed in THINK_MARKERS if closed in template), (None, None))
    return closed_reasoning(tokenizer, *marks)


def chat_template(tokenizer: Any) -> str:
    """Empty where the tokenizer has none."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    return str(templates.get("default", "") if isinstance(templates, Mapping) else templates)


def parse_verdict(token_text: str) -> bool | None:
    """True for aligned, False for unaligned, None for anything else.

    The token must be a non-empty beginning of one label (tokenizers cut labels differently: ``ali``, ``un``, ``aligned``
    ...). ``None`` is doubt, and doubt rejects.
    """
    label = token_text.strip().lower()
    if not label:
        return None
    if ALIGNED.startswith(label):
        return True
    if UNALIGNED.startswith(label):
        return False
    return None
