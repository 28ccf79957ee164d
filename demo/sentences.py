"""The sentences of the demo world: every phrasing of every step, fact, question and answer.

Each family of steps holds at least eight phrasings that state the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = (
    "Mia", "Tom", "Ben", "Ana", "Leo", "Zoe", "Sam", "Eva", "Max",
    "Ivy", "Kai", "Lily", "Noah", "Ruth", "Omar", "Nina", "Hugo", "Emma",
)  # fmt: skip
ITEMS = (
    "apples", "books", "coins", "cards", "pens", "stamps", "marbles", "shells",
    "stickers", "cookies", "pears", "balls", "stones", "beads", "tickets", "flowers",
)  # fmt: skip
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter"}

# {s} subject, {t} the other person, {a} {o} {b} = {r} the arithmetic, {f} the fraction 1/b in words,
# {w} the wrong result that is mended, {u} the unit.

_HAS = (", so {s} has {r} {u}.", ", and now {s} has {r} {u}.", ", which means that {s} has {r} {u}.", ". So {s} has {r} {u}.")
_GOES = (", so {r} {u} go away.", ", and these {r} {u} go away.", ", which means that {r} {u} go.", ". So {r} {u} go away.")
_SUM = (", so the sum is {r}.", ", and now the sum is {r}.", ", which means that the sum is {r}.", ". So the sum is {r}.")


def _with(endings: tuple[str, ...], *openings: str) -> tuple[str, ...]:
    """Every opening with every ending."""
    return tuple(opening + ending for opening in openings for ending in endings)


STEPS: Mapping[str, tuple[str, ...]] = {
    "goal-now": (
        "We need to find how many {u} {s} has now.",
        "The question asks for the number of {u} that {s} has now.",
        "Let me work out how many {u} {s} has now.",
        "So the goal is to count the {u} that {s} has now.",
        "Okay, I want to know how many {u} {s} has now.",
        "First, note that we are asked how many {u} {s} has now.",
        "What is asked is how many {u} are with {s} now.",
        "I should follow the facts to see how many {u} {s} has now.",
    ),
    "goal-total": (
        "We need to find how many {u} they all have together.",
        "The question asks for the number of {u} that they have together.",
        "Let me work out how many {u} there are together.",
        "So the goal is to add up all the {u} of everyone.",
        "Okay, I want to know how many {u} everyone has together.",
        "First, note that we are asked for all the {u} together.",
        "What is asked is how many {u} all of them have in total.",
        "I should follow the facts and then add up all the {u}.",
    ),
    "goal-more": (
        "We need to find how many more {u} {s} has than {t}.",
        "The question asks how far {s} is ahead of {t} in {u}.",
        "Let me work out how many {u} {s} has beyond those of {t}.",
        "So the goal is the lead in {u} that {s} has over {t}.",
        "Okay, I want to know how many more {u} are with {s} than with {t}.",
        "First, note that we are asked how many {u} more {s} has than {t}.",
        "What is asked is by how many {u} {s} beats {t}.",
        "I should follow the facts and then compare {s} with {t} in {u}.",
    ),
    "goal-who": (
        "We need to find who has more {u}, {s} or {t}.",
        "The question asks which of {s} and {t} has more {u}.",
        "Let me work out whether {s} or {t} has more {u}.",
        "So the goal is to see who of {s} and {t} has more {u}.",
        "Okay, I want to know if {s} or {t} ends up with more {u}.",
        "First, note that we are asked who has more {u}, either {s} or {t}.",
        "What is asked is the one with more {u}, which is {s} or {t}.",
        "I should follow the facts and see whether {s} or {t} leads in {u}.",
    ),
    "given": (
        "We know that {s} has {r} {u}.",
        "At the start, {s} has {r} {u}.",
        "It is given that {s} has {r} {u}.",
        "The problem says that {s} has {r} {u}.",
        "To begin with, {s} has {r} {u}.",
        "From the first facts, {s} has {r} {u}.",
        "Let me write down that {s} has {r} {u}.",
        "Okay, at first {s} has {r} {u}.",
    ),
    "add": _with(
        _HAS,
        "{s} has {a} {u} and gets {b} more, and {a} + {b} = {r}",
        "Since {s} has {a} {u}, adding {b} gives {a} + {b} = {r}",
        "Then {s} has {a} {u} and {b} new ones, which makes {a} + {b} = {r}",
        "So far {s} has {a} {u}, and with {b} more we get {a} + {b} = {r}",
        "Now {s} has {a} {u} and gains {b}, so we have {a} + {b} = {r}",
        "Next, {s} has {a} {u} that grow by {b}, and {a} + {b} = {r}",
        "As {s} has {a} {u} and {b} come on top, the count is {a} + {b} = {r}",
        "Before that {s} has {a} {u}, and after getting {b} it is {a} + {b} = {r}",
    ),
    "sub": _with(
        _HAS,
        "{s} has {a} {u} and loses {b} of them, and {a} - {b} = {r}",
        "Since {s} has {a} {u}, taking {b} away gives {a} - {b} = {r}",
        "Then {s} has {a} {u} and {b} of them leave, which makes {a} - {b} = {r}",
        "So far {s} has {a} {u}, and with {b} fewer we get {a} - {b} = {r}",
        "Now {s} has {a} {u} and parts with {b}, so we have {a} - {b} = {r}",
        "Next, {s} has {a} {u} that shrink by {b}, and {a} - {b} = {r}",
        "As {s} has {a} {u} and {b} are gone, the count is {a} - {b} = {r}",
        "Before that {s} has {a} {u}, and after {b} go away it is {a} - {b} = {r}",
    ),
    "mul": _with(
        _HAS,
        "{s} has {a} {u} and the number grows {b} times, and {a} * {b} = {r}",
        "Since {s} has {a} {u}, taking them {b} times gives {a} * {b} = {r}",
        "Then {s} has {a} {u} that become {b} times as many, which makes {a} * {b} = {r}",
        "So far {s} has {a} {u}, and with {b} times as many we get {a} * {b} = {r}",
        "Now {s} has {a} {u} and works for {b} times that, so we have {a} * {b} = {r}",
        "Next, {s} has {a} {u} that multiply by {b}, and {a} * {b} = {r}",
        "As {s} has {a} {u} and gets {b} times as many, the count is {a} * {b} = {r}",
        "Before that {s} has {a} {u}, and after growing {b} times it is {a} * {b} = {r}",
    ),
    "div": _with(
        _HAS,
        "{s} has {a} {u} and keeps one of {b} equal bags, and {a} / {b} = {r}",
        "Since {s} has {a} {u}, sharing them among {b} bags gives {a} / {b} = {r}",
        "Then {s} has {a} {u} that go into {b} bags, and one bag makes {a} / {b} = {r}",
        "So far {s} has {a} {u}, and with one bag of {b} we get {a} / {b} = {r}",
        "Now {s} has {a} {u} and keeps one bag of {b}, so we have {a} / {b} = {r}",
        "Next, {s} has {a} {u} that are divided by {b}, and {a} / {b} = {r}",
        "As {s} has {a} {u} in {b} equal bags, the count of one is {a} / {b} = {r}",
        "Before that {s} has {a} {u}, and after sharing by {b} it is {a} / {b} = {r}",
    ),
    "part": _with(
        _GOES,
        "{s} has {a} {u}, and {f} of them is {a} / {b} = {r}",
        "Since {s} has {a} {u}, taking {f} of them gives {a} / {b} = {r}",
        "Then {s} has {a} {u} to take {f} of, which makes {a} / {b} = {r}",
        "So far {s} has {a} {u}, and for {f} of them we get {a} / {b} = {r}",
        "Now {s} has {a} {u} and parts with {f}, so we have {a} / {b} = {r}",
        "Next, {s} has {a} {u}, and we need {f} of that, and {a} / {b} = {r}",
        "As {s} has {a} {u} and {f} will go, the number is {a} / {b} = {r}",
        "Before that {s} has {a} {u}, and finding {f} of it means {a} / {b} = {r}",
    ),
    "more": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {b} more, and {a} + {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {b} more than that, we get {a} + {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {b} more, which makes {a} + {b} = {r}",
        "So far {t} has {a} {u}, and with {b} more for {s} we get {a} + {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {b} more than that, we have {a} + {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {b} more than that, so {a} + {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {b} more is {a} + {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {b} more makes {a} + {b} = {r}",
    ),
    "fewer": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {b} fewer, and {a} - {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {b} fewer than that, we get {a} - {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {b} fewer, which makes {a} - {b} = {r}",
        "So far {t} has {a} {u}, and with {b} fewer for {s} we get {a} - {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {b} fewer than that, we have {a} - {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {b} fewer than that, so {a} - {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {b} fewer is {a} - {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {b} fewer makes {a} - {b} = {r}",
    ),
    "times": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {b} times as many, and {a} * {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {b} times that, we get {a} * {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {b} times as many, which makes {a} * {b} = {r}",
        "So far {t} has {a} {u}, and with {b} times as many for {s} we get {a} * {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {b} times that, we have {a} * {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {b} times that, so {a} * {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {b} times as many is {a} * {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {b} times as many makes {a} * {b} = {r}",
    ),
    "fraction": _with(
        _HAS,
        "{t} has {a} {u}, and {s} has {f} as many, and {a} / {b} = {r}",
        "Since {t} has {a} {u} and {s} gets {f} of that, we get {a} / {b} = {r}",
        "Then {t} has {a} {u}, and for {s} it is {f} as many, which makes {a} / {b} = {r}",
        "So far {t} has {a} {u}, and with {f} as many for {s} we get {a} / {b} = {r}",
        "Now {t} has {a} {u}, and as {s} gets {f} of that, we have {a} / {b} = {r}",
        "Next, {t} has {a} {u}, and {s} gets {f} of that, so {a} / {b} = {r}",
        "As {t} has {a} {u}, the count for {s} with {f} as many is {a} / {b} = {r}",
        "Compared with {s}, {t} has {a} {u}, and {f} as many makes {a} / {b} = {r}",
    ),
    "start": (
        "To add them up, {s} has {r} {u}, so the sum is {r}.",
        "We begin to count: {s} has {r} {u}, so the sum is {r}.",
        "First for the sum, {s} has {r} {u}, and the sum is {r}.",
        "Let me add up: {s} has {r} {u}, so the sum is {r}.",
        "Now for the total, {s} has {r} {u}, so the sum is {r}.",
        "I start with {s}, and {s} has {r} {u}, so the sum is {r}.",
        "Counting all, {s} has {r} {u}, which means the sum is {r}.",
        "So for all {u}, {s} has {r} of them, and the sum is {r}.",
    ),
    "total": _with(
        _SUM,
        "The sum is {a}, and {s} has {b} {u}, and {a} + {b} = {r}",
        "Since the sum is {a} and {s} has {b} {u}, we get {a} + {b} = {r}",
        "Then the sum is {a}, and {s} has {b} {u}, which makes {a} + {b} = {r}",
        "So far the sum is {a}, and {s} has {b} {u}, so {a} + {b} = {r}",
        "Now the sum is {a}, and as {s} has {b} {u}, we have {a} + {b} = {r}",
        "Next, the sum is {a}, and {s} has {b} {u} to add, and {a} + {b} = {r}",
        "As the sum is {a} and {s} has {b} {u}, it goes to {a} + {b} = {r}",
        "Before that the sum is {a}, and {s} has {b} {u}, so it is {a} + {b} = {r}",
    ),
    "more-than": (
        "{s} has {a} {u} and {t} has {b}, so the lead is {a} - {b} = {r}.",
        "Since {s} has {a} {u} and {t} has {b}, the lead is {a} - {b} = {r}.",
        "Then {s} has {a} {u} and {t} has {b}, which makes a lead of {a} - {b} = {r}.",
        "So far {s} has {a} {u} and {t} has {b}, and the gap is {a} - {b} = {r}.",
        "Now {s} has {a} {u} and {t} has only {b}, so we have {a} - {b} = {r} more.",
        "Next, {s} has {a} {u} and {t} has {b}, and {a} - {b} = {r} is the gap.",
        "As {s} has {a} {u} and {t} has {b}, the lead of {s} is {a} - {b} = {r}.",
        "Comparing, {s} has {a} {u} and {t} has {b}, and {a} - {b} = {r}.",
    ),
    "who": (
        "{s} has {a} {u} and {t} has {b}, so {s} has more.",
        "{t} has {b} {u} and {s} has {a}, so {s} has more.",
        "Since {s} has {a} {u} and {t} has {b}, the one with more is {s}.",
        "Since {t} has {b} {u} and {s} has {a}, the one with more is {s}.",
        "Comparing, {s} has {a} {u} and {t} has {b}, so the winner is {s}.",
        "Comparing, {t} has {b} {u} and {s} has {a}, so the winner is {s}.",
        "Now {s} has {a} {u} and {t} has {b}, and the higher count is for {s}.",
        "Now {t} has {b} {u} and {s} has {a}, and the higher count is for {s}.",
    ),
    "check": (
        "{s} check: {a} {o} {b} = {r} {u}, which fits.",
        "Checking the {u} of {s} backwards, {a} {o} {b} = {r}, which is right.",
        "Let me verify this for {s}: {a} {o} {b} = {r} {u}, good.",
        "To be sure about {s}, going back gives {a} {o} {b} = {r} {u} again.",
        "Going backwards for {s}, we see {a} {o} {b} = {r} {u}, as before.",
        "Indeed, for {s} the way back is {a} {o} {b} = {r} {u}, so it holds.",
        "A quick test of the {u} of {s}: {a} {o} {b} = {r}, fine.",
        "That is right for {s}, because {a} {o} {b} = {r} {u}.",
    ),
    "mend": (
        "Wait, {a} {o} {b} is not {w} but {r}, so {s} has {r} {u}.",
        "Hmm, {w} is wrong, because {a} {o} {b} = {r}, so {s} has {r} {u}.",
        "No, that slipped: {a} {o} {b} = {r} and not {w}, so {s} has {r} {u}.",
        "Actually, I made a mistake with {w}, and {a} {o} {b} = {r}, so {s} has {r} {u}.",
        "Oops, it is {a} {o} {b} = {r} and not {w}, so {s} has {r} {u}.",
        "Sorry, the {w} must be {r}, since {a} {o} {b} = {r}, so {s} has {r} {u}.",
        "But {a} {o} {b} is {r}, and {w} was a slip, so {s} has {r} {u}.",
        "Correction: not {w} but {a} {o} {b} = {r}, so {s} has {r} {u}.",
    ),
    "conclude-now": (
        "So {s} has {r} {u}, and the answer is {r}.",
        "Therefore, {s} has {r} {u}, so the answer is {r}.",
        "In the end, {s} has {r} {u}, and the answer is {r}.",
        "This means that {s} has {r} {u}, so the answer is {r}.",
        "All in all, {s} has {r} {u}, which gives the answer {r}.",
        "Thus, {s} has {r} {u}, and {r} is what was asked for.",
        "We are done: {s} has {r} {u}, so the answer is {r}.",
        "Okay, {s} has {r} {u}, and so the result is {r}.",
    ),
    "conclude-total": (
        "So the sum is {r} {u}, and the answer is {r}.",
        "Therefore, the sum is {r} {u}, so the answer is {r}.",
        "In the end, the sum is {r} {u}, and the answer is {r}.",
        "This means that the sum is {r} {u}, so the answer is {r}.",
        "All in all, the sum is {r} {u}, which gives the answer {r}.",
        "Thus, the sum is {r} {u}, and {r} is what was asked for.",
        "We are done: the sum is {r} {u}, so the answer is {r}.",
        "Okay, the sum is {r} {u}, and so the result is {r}.",
    ),
    "conclude-more": (
        "So the lead is {r} {u}, and the answer is {r}.",
        "Therefore, the lead is {r} {u}, so the answer is {r}.",
        "In the end, the lead is {r} {u}, and the answer is {r}.",
        "This means that the lead is {r} {u}, so the answer is {r}.",
        "All in all, the lead is {r} {u}, which gives the answer {r}.",
        "Thus, the lead is {r} {u}, and {r} is what was asked for.",
        "We are done: the lead is {r} {u}, so the answer is {r}.",
        "Okay, the lead is {r} {u}, and so the result is {r}.",
    ),
    "conclude-who": (
        "So the answer is {s}, who has more {u}.",
        "Therefore, the one with more {u} is {s}.",
        "That gives {s} as the one who has more {u}.",
        "In the end, {s} has more {u}, and that is the answer.",
        "This means that the answer for the {u} is {s}.",
        "All in all, {s} leads in {u}, which answers the question.",
        "Thus, {s} is the one with more {u} that was asked for.",
        "We are done, and {s} has more {u}.",
    ),
}

FACTS: Mapping[str, tuple[str, ...]] = {
    "given": ("{s} has {r} {u}.", "{s} starts with {r} {u}.", "{s} owns {r} {u}."),
    "more": ("{s} has {b} more {u} than {t}.", "{s} has {b} {u} more than {t}."),
    "fewer": ("{s} has {b} fewer {u} than {t}.", "{s} has {b} {u} fewer than {t}."),
    "times": ("{s} has {b} times as many {u} as {t}.", "{s} has {b} times the {u} of {t}."),
    "fraction": ("{s} has {f} as many {u} as {t}.", "{s} has {f} of the number of {u} that {t} has."),
    "add": ("{s} buys {b} more {u}.", "{s} finds {b} {u}.", "{s} gets {b} {u} from a friend."),
    "sub": ("{s} loses {b} {u}.", "{s} gives away {b} {u}.", "{s} sells {b} {u}."),
    "mul": ("{s} works until there are {b} times as many {u}.", "The {u} of {s} become {b} times as many."),
    "div": ("{s} packs the {u} into {b} equal bags and keeps one bag.",
            "{s} shares the {u} equally among {b} bags and keeps one."),
    "part": ("{s} gives away {f} of the {u}.", "{s} sells {f} of the {u}.", "{s} loses {f} of the {u}."),
    "give": ("{s} gives {b} {u} to {t}.", "{s} hands {b} {u} to {t}."),
}  # fmt: skip

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "goal-now": ("How many {u} does {s} have now?", "How many {u} are with {s} now?"),
    "goal-total": ("How many {u} do they have together?", "How many {u} are there in total?"),
    "goal-more": ("How many more {u} does {s} have than {t}?", "By how many {u} does {s} beat {t}?"),
    "goal-who": ("Who has more {u}, {s} or {t}?", "Which of {s} and {t} has more {u}?"),
}

ANSWERS = (
    "The answer is \\boxed{{{x}}}.",
    "So the answer is \\boxed{{{x}}}.",
    "Answer: \\boxed{{{x}}}.",
    "The result is \\boxed{{{x}}}.",
)

OPERATOR: Mapping[str, str] = {
    "add": "+", "more": "+", "total": "+", "sub": "-", "fewer": "-", "more-than": "-",
    "mul": "*", "times": "*", "div": "/", "part": "/", "fraction": "/",
}  # fmt: skip
INVERSE: Mapping[str, str] = {"+": "-", "-": "+", "*": "/", "/": "*"}
KIND: Mapping[str, str] = {
    "given": "given", "check": "check", "mend": "mend", "more-than": "compare", "who": "compare",
    "start": "given", **dict.fromkeys(("conclude-now", "conclude-total", "conclude-more", "conclude-who"), "conclude"),
    **{family: "goal" for family in STEPS if family.startswith("goal")},
    **{family: "op" for family in ("add", "sub", "mul", "div", "part", "more", "fewer", "times", "fraction", "total")},
}  # fmt: skip
