"""What the demo models learn from: solved problems, drills, recitals and judged pairs, as packed batches.

Endless, seeded and made as they are used. Beside the tokens, a document says where the taught heads of ``demo/train.py`` should
look.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.kit.models import Model
from demo.judge_pairs import Pair, drafted_pairs, pairs
from demo.problems import DELIMITER, LARGEST, SMALLEST, Meaning, Problem, compute, problems, say, spans
from demo.sentences import ITEMS, NAMES
from demo.tokenizer import END_OF_TEXT, END_THINK, THINK, TURN_END, chat
from lr_backend.verify.judge_prompt import ALIGNED, UNALIGNED, JudgePrompt

ModelRole = Literal["target", "draft", "judge"]
Lesson = Literal["owner", "lookup", "order", "reading"]
"""What a head is taught to look for: from a count the name it belongs to; from where a digit is to be written where it stands
already; from the end of a fact the end of the one before; from anywhere in a step the end of the fact that it works on."""
Span = tuple[int, int]

LESSONS: tuple[Lesson, ...] = get_args(Lesson)

IGNORED = -100
SLIP_RATE = 0.04
DRILL_FACTS, DRILL_COMPARISONS = 18, 10
CLOSE_GAP, CLOSE_RATE = 9, 0.6
DRILL_EVERY = 3
RECITED_COUNTS, CHANGED_COUNTS = 40, 0.3
RECITAL_OPENINGS = (
    "",
    "Now ",
    "So far ",
    "Since ",
    "Then ",
    "Next, ",
    "As ",
    "Before that ",
    "It is given that ",
    "At the start, ",
)
ECHO_RATE, BLUR_RATE, SUBTLE_RATE = 0.1, 0.1, 0.6
DECISIVE = re.compile(r"\d+|" + "|".join(NAMES))
"""What a step can get wrong; its wording it cannot, so these tokens weigh more."""
DECISIVE_WEIGHT = 3.0
SENTENCE_END = re.compile(r"[.?](?= |$)")
COUNT = re.compile(f"({'|'.join(NAMES)}) has (\\d+)")
FIELD_WEIGHT, VERDICT_WEIGHT = 1.0, 2.0


@dataclass(frozen=True)
class Batch:
    """Packed sequences. All fields but the last are (rows, length) of int64: ``labels`` hold ``IGNORED`` where nothing is
    learned, ``segments`` number the documents of a row (-1 is padding, 0 is a prefix that every later segment sees).
    ``pointers`` (n, 3) by lesson are row, query and key of what the documents' attention is taught."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor
    weights: Tensor
    pointers: Mapping[Lesson, Tensor]

    def to(self, device: torch.device) -> Batch:
        moved = {name: getattr(self, name).to(device) for name in self.__dataclass_fields__ if name != "pointers"}
        return Batch(**moved, pointers={lesson: pairs.to(device) for lesson, pairs in self.pointers.items()})

    @cached_property
    def mask(self) -> Tensor:
        """(rows, 1, length, length) of bool: which positions (last axis) a position sees."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        prefix = (self.segments == 0)[:, None, :]
        order = torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        return ((same | prefix) & order)[:, None]


@dataclass(frozen=True)
class Document:
    """One training text: ``labels`` are the ids that are learned, ``IGNORED`` elsewhere; ``weights`` scale the loss.
    ``pointers`` are pairs of positions by lesson."""

    ids: list[int]
    labels: list[int]
    weights: list[float]
    pointers: Mapping[Lesson, Sequence[Span]] = field(default_factory=dict)


def document(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> Document:
    """A solved problem; the question and the digits of wrong results are not learned."""
    solved = _document(problem.question, problem.completion, _wrong_spans(problem), tokenizer)
    return replace(solved, pointers={**solved.pointers, **_reading(problem, tokenizer)})


def _reading(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> dict[Lesson, list[Span]]:
    """Which fact each token of the reasoning is about (from the token before it), and which fact each fact follows."""
    prompt = chat(problem.question)
    coded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    asked = prompt.index(problem.question)
    stops = [asked + match.end() for match in SENTENCE_END.finditer(problem.question)]
    ends = [next(place for place, (_, end) in enumerate(coded) if end >= stop) for stop in stops]
    text = problem.completion + TURN_END
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    begins = list(accumulate((len(step.text + DELIMITER) for step in problem.steps[:-1]), initial=len(f"{THINK}\n")))
    within = range(begins[0], text.index(END_THINK))
    about = {place: bisect_right(begins, start) - 1 for place, (start, _) in enumerate(offsets) if start in within}
    reading = [(len(coded) + place - 1, ends[problem.steps[step].fact]) for place, step in about.items()]
    return {"order": [(end, before) for before, end in pairwise(ends)], "reading": reading}


def _document(question: str, completion: str, unlearned: Sequence[Span], tokenizer: PreTrainedTokenizerFast) -> Document:
    """``unlearned`` are character spans of the completion that only give context."""
    ids = tokenizer.encode(chat(question), add_special_tokens=False)
    labels = [IGNORED] * len(ids)
    weights = [1.0] * len(ids)
    text = completion + TURN_END
    decisive = [match.span() for match in DECISIVE.finditer(text)]
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    place: dict[int, int] = {}  # of a character, among the ids
    for token, (start, end) in zip(coded["input_ids"], coded["offset_mapping"], strict=True):
        place |= dict.fromkeys(range(start, end), len(ids))
        ids.append(token)
        labels.append(IGNORED if any(_overlap((start, end), span) for span in unlearned) else token)
        weights.append(DECISIVE_WEIGHT if any(_overlap((start, end), span) for span in decisive) else 1.0)
    lookups = [(place[to] - 1, place[source]) for to, source in _recalled(completion) if labels[place[to]] != IGNORED]
    owners = [(place[count], place[name]) for count, name in _owned(completion)]
    return Document(ids, labels, weights, {"owner": owners, "lookup": lookups})


def _overlap(one: Span, two: Span) -> bool:
    return one[0] < two[1] and two[0] < one[1]


def _owned(text: str) -> Iterator[tuple[int, int]]:
    """(a digit of someone's count or the space before it, the name)."""
    for match in COUNT.finditer(text):
        yield from ((at, match.start(1)) for at in range(match.start(2) - 1, match.end(2)))


def _recalled(text: str) -> Iterator[tuple[int, int]]:
    """Digits of counts that were said before of the same person: (where they are said again, where last before that)."""
    last: dict[str, tuple[str, int]] = {}
    for match in COUNT.finditer(text):
        name, count = match.groups()
        before, start = last.get(name, ("", 0))
        if before == count:
            yield from ((match.start(2) + digit, start + digit) for digit in range(len(count)))
        last[name] = count, match.start(2)


def drill(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Document:
    """Plain arithmetic of the demo world, then who has more. Only results are learned: the operands come out of nowhere."""
    text, unlearned = f"{THINK}\n", []
    for _ in range(DRILL_FACTS):
        a, operator, b, result = _fact(rng)
        begin = len(text)
        text += f"And {a} {operator} {b} = "
        unlearned.append((begin, len(text)))
        text += f"{result}.{DELIMITER}"
    for _ in range(DRILL_COMPARISONS):
        said, winner = _comparison(rng)
        unlearned.append((len(text), len(text) + winner))
        text += said + DELIMITER
    return _document("Practice.", text, unlearned, tokenizer)


def _comparison(rng: random.Random) -> tuple[str, int]:
    """A sentence that says who has more, and where it names the winner (the space before). Close counts, which are harder,
    are more frequent."""
    winner, other = rng.sample(NAMES, 2)
    less, more = sorted(rng.sample(range(SMALLEST, LARGEST + 1), 2))
    if rng.random() < CLOSE_RATE:
        less = rng.randint(max(SMALLEST, more - CLOSE_GAP), more - 1)
    said = say(rng, Meaning("who", rng.choice(ITEMS), winner, other, more, "", less))
    return said, said.rindex(f" {winner}")


def _fact(rng: random.Random) -> tuple[int, str, int, int]:
    """Two operands that lead to a count of the demo world; sums and differences, which are harder, more often."""
    while True:
        operator = rng.choices("+-*/", (4, 4, 1, 1))[0]
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, 6 if operator in "*/" else 60)
        result = compute(a, operator, b)
        if result is not None and SMALLEST <= result <= LARGEST:
            return a, operator, b, result


def recital(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Document:
    """Who has how many, said over and over, with changes. Only counts that were said before are learned."""
    names, unit = rng.sample(NAMES, rng.randint(2, 5)), rng.choice(ITEMS)
    text, unlearned = f"{THINK}\n", []
    counts: dict[str, int] = {}
    for _ in range(RECITED_COUNTS):
        name, begin = rng.choice(names), len(text)
        text += f"{rng.choice(RECITAL_OPENINGS)}{name} has "
        known = name in counts and rng.random() >= CHANGED_COUNTS
        if not known:
            counts[name] = rng.randint(SMALLEST, LARGEST)
        said = f"{counts[name]}"
        unlearned.append((begin, len(text) + (0 if known else len(said))))
        text += f"{said} {unit}.{DELIMITER}"
    return _document("Practice.", text, unlearned, tokenizer)


def lessons(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Document]:
    """Solved problems; after every ``DRILL_EVERY`` of them a drill and a recital."""
    rng = random.Random(f"drill-{seed}")
    for number, problem in enumerate(problems(seed, slip_rate=SLIP_RATE)):
        yield document(problem, tokenizer)
        if number % DRILL_EVERY == 0:
            yield drill(rng, tokenizer)
            yield recital(rng, tokenizer)


def _wrong_spans(problem: Problem) -> list[Span]:
    """Character spans, in the completion, of results that are wrong on purpose."""
    wrong = []
    start = len(f"{THINK}\n")
    for step in problem.steps:
        if step.slip:
            at = start + step.text.rindex(f"= {step.meaning.result}") + len("= ")
            wrong.append((at, at + len(str(step.meaning.result))))
        start += len(step.text) + len(DELIMITER)
    return wrong


def _pair_document(pair: Pair, prompt: JudgePrompt, tokenizer: PreTrainedTokenizerFast, verdict_ids: tuple[int, int]) -> Document:
    """A judged pair without the common prefix.

    The verdict alone teaches nothing for hundreds of updates, so after each field of the second step the verdict on that
    field is learned too.
    """
    aligned, unaligned = verdict_ids
    asked = prompt.ids(pair.first, pair.second)
    assert asked is not None, pair
    ids = [*asked[len(prompt.head_ids) :], aligned if pair.aligned else unaligned]
    labels = [IGNORED] * (len(ids) - 1) + ids[-1:]
    first, second = (tokenizer(text, return_offsets_mapping=True)["offset_mapping"] for text in (pair.first, pair.second))
    start = len(ids) - 1 - len(prompt.tail_ids) - len(second)
    for end, same in pair.fields:
        place = next(index for index, (_, token_end) in enumerate(second) if token_end == end)
        labels[start + place + 1] = aligned if same else unaligned
    weights = [FIELD_WEIGHT] * (len(ids) - 1) + [VERDICT_WEIGHT]
    lookups = [(start + query, key) for query, key in _counterparts(pair, first, second)]
    return Document(ids, labels, weights, {"lookup": lookups})


def _counterparts(pair: Pair, first: Sequence[Span], second: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """(token of a field in the second step, its counterpart in the first); the steps' tokens by their character spans."""
    if not pair.fields:
        return
    stated = spans(pair.first)
    for name, span in spans(pair.second).items():
        if name in stated:
            keys = [index for index, token in enumerate(first) if _overlap(token, stated[name])]
            queries = [index for index, token in enumerate(second) if _overlap(token, span)]
            yield from ((query, keys[min(number, len(keys) - 1)]) for number, query in enumerate(queries))


def _lectures(seed: int, tokenizer: PreTrainedTokenizerFast, draft: Model) -> Iterator[Document]:
    """Judged pairs: made ones, easy ones among them, and as many of ``draft``."""
    prompt = JudgePrompt.from_tokenizer(tokenizer)
    verdicts = verdict_ids(tokenizer)
    made = pairs(seed, echo_rate=ECHO_RATE, blur_rate=BLUR_RATE, subtle_rate=SUBTLE_RATE)
    for both in zip(made, drafted_pairs(draft, seed), strict=False):
        for pair in both:
            yield _pair_document(pair, prompt, tokenizer, verdicts)


def pack(documents: Iterator[Document], rows: int, length: int, pad: int, prefix: tuple[int, ...] = ()) -> Batch:
    """Fill ``rows`` rows with whole documents behind a common ``prefix``; positions restart after the prefix."""
    shape = (rows, length)
    ids = torch.full(shape, pad)
    labels = torch.full(shape, IGNORED)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1)
    weights = torch.zeros(shape)
    filled = [len(prefix)] * rows
    count = [0] * rows
    pointers: dict[Lesson, list[tuple[int, int, int]]] = {lesson: [] for lesson in LESSONS}
    if prefix:
        ids[:, : len(prefix)] = torch.tensor(prefix)
        positions[:, : len(prefix)] = torch.arange(len(prefix))
        segments[:, : len(prefix)] = 0
    misses = 0
    while misses < 4:
        item = next(documents)
        size = len(item.ids)
        row = max((r for r in range(rows) if filled[r] + size <= length), key=lambda r: filled[r], default=None)
        if row is None:
            misses += 1
            continue
        start, end = filled[row], filled[row] + size
        count[row] += 1
        ids[row, start:end] = torch.tensor(item.ids)
        labels[row, start + 1 : end] = torch.tensor(item.labels[1:])
        weights[row, start + 1 : end] = torch.tensor(item.weights[1:])
        positions[row, start:end] = torch.arange(size) + len(prefix)
        segments[row, start:end] = count[row]
        for lesson, places in item.pointers.items():
            pointers[lesson] += [(row, start + query, start + key) for query, key in places]
        filled[row] = end
    moved = {lesson: torch.tensor(places, dtype=torch.long).view(-1, 3) for lesson, places in pointers.items()}
    return Batch(ids, labels, positions, segments, weights, moved)


def batches(
    role: ModelRole, rows: int, length: int, tokenizer: PreTrainedTokenizerFast, seed: int, draft: Model | None = None
) -> Iterator[Batch]:
    """Endless training batches; never a problem of the validation or test split. A judge learns from a ``draft``."""
    pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    if role == "judge":
        assert draft is not None
        documents = _lectures(seed, tokenizer, draft)
        prefix = JudgePrompt.from_tokenizer(tokenizer).head_ids
    else:
        documents = lessons(seed, tokenizer)
        prefix = ()
    while True:
        yield pack(documents, rows, length, pad, prefix)


def verdict_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """The single tokens of the two verdicts: aligned, unaligned."""
    (aligned,) = tokenizer.encode(ALIGNED, add_special_tokens=False)
    (unaligned,) = tokenizer.encode(UNALIGNED, add_special_tokens=False)
    return aligned, unaligned
