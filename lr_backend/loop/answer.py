"""The committed part of an answer: what is written so far, what of it is text, and whether it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from lr_backend.contract import IntArray
from lr_backend.loop.ledger import Ledger
from lr_backend.loop.tree import Decision, append
from lr_backend.request import FinishReason, LookaheadRequest, Origin, StepRecord, Usage
from lr_backend.steps.reasoning import Reasoning
from lr_backend.steps.rules import StepRules
from lr_backend.steps.step import Step, StepEnd, StepTokenizer
from lr_backend.steps.text import TextStream, text_of
from lr_backend.verify import Reason

MOST_PIECES = 4
"""Tokens of one character, which has four bytes at most."""
DRAFTED_TIMES = ("drafted_started_s", "drafted_finished_s")
TARGET_TIMES = ("target_started_s", "target_finished_s")


@dataclass(frozen=True, slots=True)
class StepMark:
    """What is counted of a committed step. ``depth``: steps ahead at which the target was at work when it was decided."""

    origin: Origin
    reason: Reason
    num_tokens: int
    depth: int


@dataclass(frozen=True)
class Committed:
    """Newly committed text, and the step that brought it: its record where it is traced. None for text that was held back.

    ``num_reasoning_chars``: so many characters of the text, from its first on, are reasoning, marks among them.
    """

    text: str
    record: StepRecord | None
    step: StepMark | None
    num_reasoning_chars: int


Emit = Callable[[Committed], None]
"""Receives committed text in order; must not block."""


@dataclass(frozen=True)
class Outcome:
    """The one end of a request, which has the window that it got."""

    request: LookaheadRequest
    finish_reason: FinishReason
    usage: Usage
    completion_ids: tuple[int, ...]
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """What an answer may have.

    Attributes:
        most: tokens of all of it.
        thinking: tokens after which the reasoning has one step left; None: it ends by itself.
    """

    most: int
    thinking: int | None = None


class Answer:
    """One answer. Committed text is final.

    Args:
        prompt_ids: the rendered prompt, shape [N].
        text: what is sent.
        steps_text: what the records of steps say, which heeds no stop string; None: no record is kept.

    Attributes:
        prefix: prompt and committed tokens.
        end: absolute token count at which the answer is full.
        finish: why it has ended; None: it has not.
    """

    def __init__(
        self,
        prompt_ids: IntArray,
        budget: TokenBudget,
        rules: StepRules,
        text: TextStream,
        tokenizer: StepTokenizer,
        ledger: Ledger,
        emit: Emit,
        steps_text: TextStream | None = None,
    ) -> None:
        self.prefix = prompt_ids
        self.end = len(prompt_ids) + budget.most
        self._thinking_end = min(self.end, len(prompt_ids) + (budget.thinking or budget.most))
        self.finish: FinishReason | None = None
        self._prompt_length = len(prompt_ids)
        self._rules, self._text, self._tokenizer = rules, text, tokenizer
        self._ledger, self._emit, self._steps_text = ledger, emit, steps_text
        self._reasoning = Reasoning(prompt_ids, rules, self._decoded)
        self._num_sent = 0
        self._num_reasoning_chars = 0
        """Of the whole text, once the reasoning has ended."""

    @property
    def is_reasoning(self) -> bool:
        """The reasoning goes on, or may yet begin; lookahead belongs to it."""
        return self._reasoning.goes_on

    @property
    def is_closing(self) -> bool:
        """The reasoning has had its tokens: the next step is its last one."""
        return self.is_reasoning and len(self.prefix) >= self._thinking_end

    def room(self, num_tokens: int) -> int:
        """Tokens that a text may have which begins after ``num_tokens``, the prompt's included.

        Steps are cut where the last one of the reasoning begins. So that one is the same in every mode.
        """
        cut = self._thinking_end if self.is_reasoning and num_tokens < self._thinking_end else self.end
        return cut - num_tokens

    @property
    def num_left(self) -> int:
        """Tokens until it is full."""
        return self.end - len(self.prefix)

    @property
    def completion_ids(self) -> tuple[int, ...]:
        return tuple(self.prefix[self._prompt_length :].tolist())

    def commit(self, step: Step, origin: Origin, reason: Reason, decision: Decision | None = None) -> None:
        """Make a step final: extend the prefix, send its text, see whether it ends anything. What stands behind a stop string was
        never said."""
        was_closing = self.is_closing
        text, num_tokens, num_reasoning = self._read(step)
        step = replace(step, ids=step.ids[:num_tokens])
        self.prefix = append(self.prefix, step)
        self._ledger.step_committed(num_tokens, num_reasoning=num_reasoning)
        if self._text.stopped or step.end is StepEnd.END:
            self.finish = FinishReason.STOP
        elif len(self.prefix) >= self.end:
            self.finish = FinishReason.LENGTH
        record = self._record(step, self._steps_text, origin, reason, decision) if self._steps_text is not None else None
        depth = decision.depth if decision is not None else 0
        self._send(text, record, StepMark(origin, reason, len(step.ids), depth))
        if was_closing and self.finish is None and self._reasoning.is_inside:
            self._close()

    def flush(self) -> None:
        """Send what was still held back; call once, at the end."""
        if held := self._text.flush():
            self._send(held)
        if self._steps_text is not None and (held := self._steps_text.flush()):
            last = self._ledger.records.pop()
            self._ledger.records.append(last.model_copy(update={"text": last.text + held}))

    def may_accept_by_meaning(self, prefix: IntArray, step: Step) -> bool:
        """The reasoning has begun, and no tool call has: from its first marker on every word counts.

        Args:
            prefix: with the drafted step; ``step`` is the target's. Shape [N].
        """
        tools = self._rules.tool_ids
        if not self._reasoning.has_begun(prefix) or not tools.isdisjoint(step.ids):
            return False
        return not tools or not np.isin(prefix[self._prompt_length :], list(tools)).any()

    def decided_by_meaning(self, decision: Decision) -> bool:
        """Whether other tokens than the target's could be accepted of the first drafted step; of a late one, had it come."""
        target, child = decision.position.target, next(iter(decision.position.children), None)
        if target is None or child is None:
            return False
        return self.may_accept_by_meaning(append(decision.position.prefix, child.drafted or target), target)

    def plain(self, step: Step) -> str:
        """The text of a step, without special tokens."""
        return self._decoded(step.ids)

    def stated(self, step: Step) -> str:
        """What a verifier reads of a step: its plain text without the marks of the reasoning, which every pair has in common
        (:func:`~lr_backend.verify.verdict.settle`)."""
        marks = (self._rules.think_open_id, self._rules.think_close_id)
        return self._decoded(token for token in step.ids if token not in marks)

    def _decoded(self, ids: Iterable[int]) -> str:
        return text_of(self._tokenizer, ids, self._rules.hidden_ids)

    def _close(self) -> None:
        """Write what ends the reasoning. No engine has written it."""
        before, ids = len(self.prefix), self._rules.answer_ids[: self.num_left]
        self.commit(self._rules.step(ids, StepEnd.THINK_CLOSE), Origin.TARGET, Reason.THINKING_BUDGET)
        self._ledger.num_closing_tokens += len(self.prefix) - before

    def _read(self, step: Step) -> tuple[str, int, int]:
        """(new text, tokens of the step up to a stop string, those of the reasoning among them)."""
        begin, end = self._reasoning.take(step.ids)
        text = self._text.push(step.ids[:end])
        num_tokens = self._text.num_last
        if end and not self.is_reasoning:
            self._num_reasoning_chars = self._num_sent + len(text) + self._text.num_held
        if not self._text.stopped:
            text += self._text.push(step.ids[end:])
            num_tokens += self._text.num_last
        return text, num_tokens, max(0, min(end, num_tokens) - begin)

    def _send(self, text: str, record: StepRecord | None = None, mark: StepMark | None = None) -> None:
        self._num_sent += len(text)
        num_after = 0 if self._reasoning.is_inside else max(0, self._num_sent - self._num_reasoning_chars)
        self._emit(Committed(text, record, mark, max(0, len(text) - num_after)))

    def _text_of_record(self, text: TextStream, ids: tuple[int, ...]) -> str:
        """What a step adds to the text. A character over two steps belongs to the second."""
        whole, end = ids[:-MOST_PIECES], ids[-MOST_PIECES:]
        return text.push(whole) + "".join(text.push([token]) for token in end) + (text.flush() if self.finish else "")

    def _record(self, step: Step, text: TextStream, origin: Origin, reason: Reason, decision: Decision | None) -> StepRecord:
        compared = decision.compared if decision is not None else None
        drafted_times = compared.times_s if compared is not None else {}
        target_times = decision.position.times_s if decision is not None else {}
        target = decision.position.target if decision is not None else step
        verdict = decision.verdict if decision is not None else None
        record = StepRecord(
            index=self._ledger.num_steps - 1,
            origin=origin,
            reason=reason.value,
            verifier=verdict.verifier if verdict is not None else None,
            score=verdict.score if verdict is not None else None,
            text=self._text_of_record(text, step.ids),
            num_tokens=len(step.ids),
            sibling=compared.sibling if compared is not None else None,
            drafted_text=self.plain(compared.drafted) if compared is not None and compared.drafted else None,
            target_text=self.plain(target) if target is not None else None,
            committed_s=self._ledger.now_s(),
            **{name: drafted_times[name] for name in DRAFTED_TIMES if name in drafted_times},
            **{name: target_times[name] for name in TARGET_TIMES if name in target_times},
        )
        self._ledger.records.append(record)
        return record
