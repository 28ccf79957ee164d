"""How the command line shows an answer: coloured steps for people, JSON lines for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Protocol

from rich.console import Console
from rich.text import Text

from lr_client.reasoning import ReasoningSplitter
from lr_client.types import Event, FinishEvent, StepEvent, TextEvent, Usage

STYLES = {"draft": "green", "correction": "yellow", "target": "blue"}
LEGEND = {"draft": "draft accepted", "correction": "target's correction", "target": "target"}
_DASH = "-"
# A model may write escape sequences; they must not reach the terminal.
_NO_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Renderer(Protocol):
    """Shows the events of one answer."""

    def show(self, event: Event) -> None:
        """Show the next event, at once."""

    def close(self) -> None:
        """Nothing more will come; the answer may have broken off."""


class JsonRenderer:
    """One JSON object a line; ``event`` is ``text``, ``step`` or ``finish``, the other keys are its own.

    Args:
        with_trace: the finish has the trace too, which is long.
    """

    def __init__(self, console: Console, *, with_trace: bool) -> None:
        self._file = console.file
        self._with_trace = with_trace

    def show(self, event: Event) -> None:
        """Write one line, and flush it."""
        if isinstance(event, FinishEvent) and not self._with_trace:
            event = replace(event, trace=None)
        # ASCII: a pipe may have any encoding.
        print(json.dumps(_document(event)), file=self._file, flush=True)

    def close(self) -> None:
        """Every line is complete already."""


def _document(event: Event) -> dict[str, object]:
    match event:
        case TextEvent():
            return {"event": "text", **asdict(event)}
        case StepEvent(record):
            return {"event": "step", **asdict(record)}
        case FinishEvent(reason, usage, trace):
            traced = {} if trace is None else {"trace": trace}
            return {"event": "finish", "finish_reason": reason, "usage": asdict(usage), **traced}


class ConsoleRenderer:
    """The reasoning step by step in the colour of its origin, then the answer, then one line of numbers."""

    def __init__(self, console: Console, *, legend: bool) -> None:
        self._console = console
        self._splitter = ReasoningSplitter()
        self._style = ""
        self._num_steps = 0
        """Whose text is still to come."""
        self._at_line_start = True
        self._has_reasoned = self._has_answered = False
        if legend and console.color_system is not None:
            marks = [Text(f"■ {LEGEND[origin]}", style=style) for origin, style in STYLES.items()]
            console.print(Text("  ").join(marks), end="\n\n")

    def show(self, event: Event) -> None:
        """Print what is new, at once."""
        match event:
            case StepEvent(record):
                # A whole answer comes in one piece behind all of its steps: it has no colour of one of them.
                self._style = "" if self._num_steps else STYLES.get(record.origin, "")
                self._num_steps += 1
            case TextEvent():
                self._text(event)
            case FinishEvent(reason, usage):
                self.close()
                self._console.print(Text(closing_line(reason, usage), style="dim"))

    def close(self) -> None:
        """Print what was held back, and end the line."""
        self._write("".join(self._splitter.flush()), self._style)
        self._end_line()

    def _text(self, event: TextEvent) -> None:
        was_in_answer = self._splitter.in_answer
        reasoning, answer = self._splitter.feed(event.text, event.num_reasoning_chars)
        self._has_reasoned = self._has_reasoned or bool(reasoning)
        self._write(reasoning, self._style)
        if self._has_reasoned and self._splitter.in_answer and not was_in_answer:
            self._end_line()
            self._console.rule(Text("answer"), style="dim")
        self._answer(answer)
        self._style, self._num_steps = "", 0  # a step colours its own text only

    def _answer(self, text: str) -> None:
        """Print text of the answer: bold behind a reasoning, else in the colour of its step."""
        if self._has_reasoned and not self._has_answered:
            text = text.lstrip()
        if text:
            self._has_answered = True
            self._write(text, "bold" if self._has_reasoned else self._style)

    def _write(self, text: str, style: str) -> None:
        clean = text.translate(_NO_CONTROLS)
        if clean:
            self._console.print(Text(clean, style=style), end="")
            self._at_line_start = clean.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._console.print()
            self._at_line_start = True


def closing_line(finish_reason: str, usage: Usage) -> str:
    """The numbers of one answer, in one line; a dash where nothing was counted."""
    parts = [
        f"{_number(usage.tokens_per_s)} tokens/s",
        f"{usage.latency_s:.2f} s",
        f"steps accepted {_percent(usage.step_acceptance_rate)}",
        f"tokens accepted {_percent(usage.token_acceptance_rate)}",
        f"mean accepted length {_number(usage.mean_accepted_length)}",
        f"{usage.num_wasted_tokens} wasted tokens",
        f"finish: {finish_reason}",
    ]
    if usage.num_audited:
        parts.append(f"{usage.num_false_accepts} of {usage.num_audited} audited steps wrong")
    if usage.risk_budget_spent:
        parts.append("risk budget spent")
    if usage.degraded:
        parts.append(f"without {', '.join(usage.degraded)}")
    return " · ".join(parts)


def _number(value: float | None) -> str:
    return _DASH if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return _DASH if value is None else f"{value:.0%}"
