"""What two steps compute with, compared without a model: a veto that is sure, or no opinion.

:func:`veto` speaks only where *each* step holds a number (an operator, a unit) that the other lacks, in every reading of the two
texts. So a step that leaves something out, says a number in words, or repeats one is never vetoed: that is for a judge.

What counts:

    numbers    digits, by value: 1,000 = 1000, 3.0 = 3, 50% = 0.5 = 1/2 = \\frac{1}{2}; sets, so that restating is free
    operators  + - * / ^ between two operands, with their LaTeX and Unicode forms and "plus", "times" ... between two numbers
    units      a modest list (:data:`UNITS`), right after a number

What does not: number words, list markers, subscripts, digits inside words, a dollar sign (it also quotes LaTeX), single
letters as units (they are variables as often), equations and comparisons. Known false vetoes: one quantity in two units or
notations (60 minutes and 1 hour, 10^3 and 1000, 1 1/2 and 1.5), the same sum over other partial results. A false veto costs
the target's own step, never a wrong answer. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

MAX_DIGITS = 100
"""Longer digit strings are compared as text: their value is of no use and costly."""

_UNIT_FORMS = {
    "percent": "percent %",
    "euro": "euro euros €",
    "pound": "pound pounds £ lb lbs",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "millimetre": "mm millimeter millimeters millimetre millimetres",
    "centimetre": "cm centimeter centimeters centimetre centimetres",
    "metre": "meter meters metre metres",
    "kilometre": "km kilometer kilometers kilometre kilometres",
    "inch": "inch inches",
    "foot": "foot feet ft",
    "yard": "yard yards",
    "mile": "mile miles",
    "milligram": "mg milligram milligrams",
    "gram": "gram grams",
    "kilogram": "kg kilogram kilograms",
    "ounce": "ounce ounces oz",
    "ton": "ton tons tonne tonnes",
    "millilitre": "ml milliliter milliliters millilitre millilitres",
    "litre": "liter liters litre litres",
    "gallon": "gallon gallons",
    "second": "second seconds sec secs",
    "minute": "minute minutes min mins",
    "hour": "hour hours hr hrs",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years",
    "degree": "degree degrees °",
}
UNITS = {form: unit for unit, forms in _UNIT_FORMS.items() for form in forms.split()}
"""Written form, in lower case, to unit."""

_OPERATORS = {"+": "+", "-": "-", "*": "*", "**": "^", "/": "/", "^": "^"}
_OPERATOR_WORDS = {"plus": "+", "minus": "-", "times": "*", "x": "*"}
_CHARACTERS = str.maketrans({"−": "-", "×": "*", "·": "*", "∙": "*", "⋅": "*", "÷": "/", "²": "^2", "³": "^3"})
_REWRITES = tuple(
    # Of each first what a text must hold for the pattern to match; most hold none of them.
    (needed, re.compile(pattern), text)
    for needed, pattern, text in (
        ("", r"(?m)^\s*(?:[Ss]tep\s+)?[0-9]{1,3}\s*[.):]\s+", " "),  # list markers
        ("**", r"(?<![\w)\]])\*\*(?=\S)([^*\n]+)(?<=\S)\*\*", r"\1"),  # bold
        ("frac", r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}", r" \1/\2 "),
        ("frac", r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" (\1) / (\2) "),
        ("\\", r"\\times\b|\\cdot\b|\\ast\b", " * "),
        ("\\", r"\\div\b", " / "),
        (",", r"\{,\}|\\,(?=[0-9]{3})", ","),
        ("\\", r"\\(?:left|right|text|mathrm|mathbf|boxed|displaystyle)\b", " "),
        ("\\", r"\\circ\b", "°"),
        ("_", r"_(?:\{[^{}]*\}|\w)", ""),  # subscripts
        ("^", r"\^\s*\{\s*(-?\w+|°)\s*\}", r"^\1"),
        ("^", r"\^\s*°", "°"),
        ("multiplied", r"\bmultiplied by\b", "times"),
        ("divided", r"\bdivided by\b", "/"),
        ("\\", r"\\[%$]", lambda match: match[0][1:]),
        ("", r"[{}$]", " "),
    )
)
_NUMBER = r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_REST = r"|(?P<word>[^\W\d_]\w*)|(?P<symbol>\*\*|[^\w\s]|_)"
_BY_SYMBOL = re.compile(_NUMBER + _REST)
_BY_VALUE = re.compile(
    r"(?P<fraction>(?<![0-9/.,])[0-9]+/[0-9]+(?![0-9/.,]*[0-9/]))|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)" + _REST
)


class Reading(Enum):
    """How a text is read where notation leaves two ways."""

    SYMBOLS = _BY_SYMBOL
    """``1/2`` is a division, ``50%`` fifty of a unit, ``1,000`` one number."""
    VALUES = _BY_VALUE
    """``1/2`` and ``50%`` are one half, ``1,000`` a list of two."""


Number = Fraction | str


@dataclass(frozen=True, slots=True)
class Quantities:
    """What one step computes with."""

    numbers: frozenset[Number]
    operators: frozenset[str]
    units: frozenset[str]


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


def _plain(text: str) -> str:
    """One notation for what has several."""
    text = text.translate(_CHARACTERS)
    for needed, pattern, replacement in _REWRITES:
        if needed in text:
            text = pattern.sub(replacement, text)
    return text


def quantities(text: str, reading: Reading) -> Quantities:
    """The numbers, operators and units that a step states. Never raises."""
    # \lastgroup names the one alternative that matched.
    tokens = [_Token(str(m.lastgroup), m[0], m.start(), m.end()) for m in reading.value.finditer(_plain(text))]
    by_value = reading is Reading.VALUES
    units = [unit for unit in _units(tokens) if not (by_value and unit == "percent")]
    return Quantities(frozenset(_numbers(tokens, by_value)), frozenset(_operators(tokens)), frozenset(units))


def veto(target_text: str, drafted_text: str) -> str | None:
    """What certainly differs between two steps: ``numbers``, ``operators`` or ``units``; None where nothing certainly does.

    Symmetric; two equal texts are never vetoed.
    """
    if target_text == drafted_text:
        return None
    first = None
    for reading in Reading:
        differs = _differing(quantities(target_text, reading), quantities(drafted_text, reading))
        if differs is None:
            return None  # one way to read them in which they agree is enough
        first = first or differs
    return first


def _differing(first: Quantities, second: Quantities) -> str | None:
    for name in ("numbers", "operators", "units"):
        one, other = getattr(first, name), getattr(second, name)
        if one - other and other - one:
            return name
    return None


def _numbers(tokens: list[_Token], by_value: bool) -> Iterator[Number]:
    for index, token in enumerate(tokens):
        if token.kind not in ("number", "fraction"):
            continue
        value = _value(token.text)
        following = tokens[index + 1] if index + 1 < len(tokens) else None
        if by_value and following is not None and UNITS.get(following.text.lower()) == "percent" and isinstance(value, Fraction):
            value /= 100
        yield -value if _is_negative(tokens, index) and isinstance(value, Fraction) else value


def _value(text: str) -> Number:
    text = text.replace(",", "")
    if len(text) > MAX_DIGITS:
        return text
    if text.isdigit():
        return Fraction(int(text))
    over, _, under = text.partition("/")
    if under and not int(under):
        return text
    return Fraction(over) / int(under or 1)


def _is_negative(tokens: list[_Token], index: int) -> bool:
    """A minus right before a number that nothing stands before to take it from."""
    if index == 0 or tokens[index - 1].text != "-" or tokens[index - 1].end != tokens[index].start:
        return False
    return index == 1 or not _is_operand(tokens[index - 2], left=True)


def _operators(tokens: list[_Token]) -> Iterator[str]:
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        sides = (before.kind, after.kind)
        if token.kind == "word":
            if token.text in _OPERATOR_WORDS and sides == ("number", "number"):
                yield _OPERATOR_WORDS[token.text]
            continue
        if token.text not in _OPERATORS or not (_is_operand(before, left=True) and _is_operand(after, left=False)):
            continue
        # Two letters with a stroke or a dash between are words as often.
        if not all(kind == "word" for kind in sides):
            yield _OPERATORS[token.text]


def _is_operand(token: _Token, *, left: bool) -> bool:
    if token.kind == "symbol":
        return token.text in (")%]" if left else "([-")
    return token.kind != "word" or len(token.text) == 1


def _units(tokens: list[_Token]) -> Iterator[str]:
    for token, following in pairwise(tokens):
        if token.kind in ("number", "fraction") and (unit := UNITS.get(following.text.lower())):
            yield unit
