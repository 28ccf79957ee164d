"""Whether an answer is right: by the data set's rule, on the answer's text. What no rule can decide is *unscored*, by name.

The rules here are pure and quick. math-verify and programs need processes of their own: see :mod:`bench.evaluation.workers` and
:mod:`bench.evaluation.sandbox`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from bench.evaluation.tasks import CodeTest, Rule, Task

START_THINK, END_THINK = "<think>", "</think>"


class Outcome(StrEnum):
    """What became of an answer. ``UNSCORED``: its scorer failed or took too long; it counts neither way."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """Counts as wrong."""
    UNSCORED = "unscored"


@dataclass(frozen=True, slots=True)
class Score:
    """An outcome, what was read out of the answer, and why where that is not plain.

    Attributes:
        held: of a program that ran, what it was kept from; see :class:`~bench.evaluation.sandbox.RunResult`.
    """

    outcome: Outcome
    found: str | None = None
    note: str = ""
    held: tuple[str, ...] | None = None

    @property
    def correct(self) -> bool | None:
        """None where it is unscored."""
        return None if self.outcome is Outcome.UNSCORED else self.outcome is Outcome.RIGHT


def final_part(text: str) -> str:
    """What follows the reasoning; all of it where nothing marks its end."""
    return text.rsplit(END_THINK, 1)[-1]


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}``, braces inside it included; None where there is none that is closed."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for place in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[match.end() : place].strip()
    return None


_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+"
_WORDS = r"\\(?:text|textbf|textit|textrm|mathbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}"
_UNIT_AT_END = r"(?:\^\s*(?:\{?\s*\\circ\s*\}?)|" + _WORDS.replace("([", "(?:[") + r"\s*\^\s*\{?\s*\d\s*\}?)\s*$"
"""Degrees, and words with an exponent, as square feet have it."""


def _in_one_piece(text: str) -> str:
    """Numbers without the small spaces of LaTeX inside them, such as ``15,\\!625``, ``1\\,200`` and ``1{,}000``."""
    return re.sub(r"(?<=\d)\\,(?=\d{3})", "", text.replace("\\!", "").replace("{,}", ","))


def _decimal(found: str) -> Decimal:
    return Decimal(found.replace(",", ""))


def number(text: str) -> Decimal | None:
    """The one number in a short text such as ``\\$1,200.00`` or ``12\\text{ apples}``; None for none or several.

    Words beside the number may hold digits of their own. Where all is in words, so is the number: ``\\text{18}``.
    """
    joined = re.sub(_UNIT_AT_END, " ", _in_one_piece(text))
    plain = re.sub(_WORDS, " ", joined)
    if not re.search(r"\d", plain):
        plain = re.sub(_WORDS, r"\1", joined)
    plain = re.sub(r"\\[,; ]", " ", plain)
    found = re.findall(_NUMBER, plain.replace("\\$", "").replace("\\%", ""))
    if len(found) != 1 or re.search(r"\\[a-zA-Z]|\^|/\s*\d", plain):
        return None
    return _decimal(found[0])


def final_box(text: str) -> str | None:
    """The last box of what follows the reasoning. One in the reasoning counts only if the rest names no other number."""
    last = final_part(text)
    if (content := boxed(last)) is not None:
        return content
    content, named = boxed(text), {_decimal(found) for found in re.findall(_NUMBER, _in_one_piece(last))}
    return content if not named or (content is not None and number(content) in named) else None


def gsm8k_answer(text: str) -> Decimal | None:
    """The number that an answer names: boxed, else alone behind ``####``, else the last one in what follows the reasoning."""
    if (content := final_box(text)) is not None:
        return number(content)
    last = _in_one_piece(final_part(text))
    found = re.findall(rf"####[ \t]*\\?\$?({_NUMBER})[ \t]*\.?[ \t]*$", last, re.MULTILINE) or re.findall(_NUMBER, last)
    return _decimal(found[-1]) if found else None


def aime_answer(text: str) -> int | None:
    """The last boxed whole number from 0 to 999; leading zeros, spaces and dollar signs do not matter."""
    content = final_box(text)
    if content is None:
        return None
    digits = re.sub(r"[\s$]|\\[,;! ]", "", re.sub(_WORDS, r"\1", content)).removesuffix(".")
    return int(digits) if re.fullmatch(r"\d{1,4}", digits) and int(digits) <= 999 else None


def program(code: CodeTest, text: str) -> str:
    """The program to run: what the answer writes, after what the prompt brings, and before the tests.

    The last fenced block of the answer that holds the function counts, as others may show how to use it; else the last block, or
    all where there is none. It may be the whole function or its body.
    """
    last = final_part(text)
    blocks = re.findall(r"```[a-zA-Z0-9]*[ \t]*\r?\n(.*?)```", last, re.DOTALL)
    function = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(code.entry_point)}\s*\(", re.MULTILINE)
    written = next(filter(function.search, reversed(blocks)), blocks[-1] if blocks else last)
    if not function.search(written):
        return f"{code.prompt}{written}\n"
    start = code.prompt.index(f"def {code.entry_point}(")
    whole = f"{code.prompt[:start]}\n{textwrap.dedent(written)}\n"  # a block in a list is indented
    future = re.compile(r"^from __future__ import .*\n", re.MULTILINE)  # nothing may stand before these
    return "".join([*future.findall(whole), future.sub("", whole)])


def with_tests(code: CodeTest, text: str) -> str:
    """:func:`program` and the data set's tests, which raise where it is wrong."""
    return f"{program(code, text)}\n{code.test}\ncheck({code.entry_point})\n"


def score(rule: Rule, task: Task, text: str) -> Score | None:
    """By a rule that needs no process of its own; None for the others."""
    match rule:
        case Rule.BOXED:
            content = final_box(text)
            return _compared(content, content == task.answer)
        case Rule.GSM8K:
            value = gsm8k_answer(text)
            return _compared(value, value is not None and value == Decimal(task.answer))
        case Rule.AIME:
            whole = aime_answer(text)
            return _compared(whole, whole is not None and whole == int(task.answer))
    return None


def _compared(found: object, right: bool) -> Score:
    if found is None:
        return Score(Outcome.NO_ANSWER)
    return Score(Outcome.RIGHT if right else Outcome.WRONG, str(found))
