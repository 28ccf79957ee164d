"""Data sets: what is asked, and what would be right. Generated ones are seeded; files are read line by line and checked.

A file is JSONL, one problem a line, plain or gzipped (``.gz``). Fields of a data set of your own:

    question or problem   what is asked                              not empty
    answer                the right answer, as LaTeX or plain        not empty; compared by math-verify
    id                    names the problem in the results           optional; by default its line number

or, for programs: ``prompt``, ``entry_point``, ``test`` and an optional ``task_id``, as HumanEval has them. Other fields are
ignored.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from bench.evaluation.errors import DataSetError
from demo import problems as demo_world
from demo import second_domain

GENERATED_PROBLEMS = 100
"""Of a generated data set, where no end is given."""
DATA_DIR_VARIABLE = "LOOKAHEAD_DATA_DIR"

StepChecker = Callable[[str, str], bool]
"""(drafted or target text, the other) -> whether the two steps mean the same."""


class Rule(StrEnum):
    """How an answer is scored."""

    BOXED = "boxed"
    """The last boxed text is the answer, character for character: the generated data sets."""
    MATH = "math"
    """math-verify."""
    GSM8K = "gsm8k"
    """The number that was asked for."""
    AIME = "aime"
    """A whole number from 0 to 999."""
    CODE = "code"
    """The program passes its tests."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """What a program is held against, as HumanEval has it."""

    prompt: str
    entry_point: str
    test: str


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. ``question`` is what is sent, instruction included."""

    id: str
    question: str
    answer: str = ""
    code: CodeTest | None = None


@dataclass(frozen=True, slots=True)
class DataSet:
    """Problems that are scored by one rule.

    Attributes:
        source: where they are from, in words.
        checker: says of two steps whether they mean the same, where the world of the problems lets that be read; else None.
    """

    name: str
    rule: Rule
    tasks: tuple[Task, ...]
    source: str
    checker: StepChecker | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with any question, answer or id."""
        parts = [(task.id, task.question, task.answer, task.code.test if task.code else "") for task in self.tasks]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:16]


REASON = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
WRITE = "Write the whole Python function that is begun below, in one ```python block, imports included.\n\n```python\n"


@dataclass(frozen=True, slots=True)
class _FileSet:
    file_names: tuple[str, ...]
    rule: Rule
    why_absent: str


FILE_SETS: Mapping[str, _FileSet] = {
    "gsm8k": _FileSet(("gsm8k-test.jsonl", "gsm8k-test.jsonl.gz", "test.jsonl"), Rule.GSM8K, "it comes with this package"),
    "aime24": _FileSet(
        ("aime-2024.jsonl", "aime-2024.jsonl.gz", "aime24.jsonl"),
        Rule.AIME,
        "its problems are the MAA's and do not come with this package; each line needs problem and answer (and may have an id)",
    ),
    "humaneval": _FileSet(("HumanEval.jsonl.gz", "HumanEval.jsonl"), Rule.CODE, "it comes with this package"),
}
GENERATED: Mapping[str, tuple[Callable[[int], Iterator[tuple[str, str]]], StepChecker]] = {
    "demo": (lambda seed: ((one.question, one.answer) for one in demo_world.problems(seed, "test")), demo_world.same_step),
    "second": (lambda seed: ((one.question, one.answer) for one in second_domain.problems(seed)), second_domain.same_step),
}
NAMES = (*GENERATED, *FILE_SETS)


def step_checker(name: str) -> StepChecker | None:
    """The step checker of a data set, by its name."""
    return GENERATED[name][1] if name in GENERATED else None


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    seed: int = 0,
    start: int = 0,
    end: int | None = None,
    instruction: str | None = None,
) -> DataSet:
    """Problems ``start`` up to, not including, ``end`` of a data set: one of :data:`NAMES`, or a path.

    Args:
        data_dir: searched for the file before what comes with the package.
        seed: of a generated data set.
        end: None is all of a file, and :data:`GENERATED_PROBLEMS` after ``start`` of a generated data set.
        instruction: follows each question instead of the data set's own; not for programs.

    Raises:
        DataSetError: no such file, nothing in that range, or a line that cannot be used.
    """
    if start < 0 or (end is not None and end <= start):
        raise DataSetError(f"problems {start} to {end}: start must be at least 0 and below end")
    if name in GENERATED:
        last = start + GENERATED_PROBLEMS if end is None else end
        pairs = islice(GENERATED[name][0](seed), start, last)
        tasks = [
            Task(f"{number}", question + (instruction or ""), answer) for number, (question, answer) in enumerate(pairs, start)
        ]
        return DataSet(name, Rule.BOXED, tuple(tasks), f"generated, seed {seed}", GENERATED[name][1])
    path, rule = _found(name, data_dir)
    tasks = [task for _, task in zip(range(end or 1 << 60), _read(path, rule), strict=False)]
    if not tasks:
        raise DataSetError(f"{path}: no problems in it")
    if start >= len(tasks):
        raise DataSetError(f"{path}: problem {start} was asked for, and it has {len(tasks)}")
    if rule is None:
        rule = Rule.CODE if tasks[0].code else Rule.MATH
    kept = [_with_instruction(task, instruction) for task in tasks[start:]]
    seen: set[str] = set()
    for task in kept:
        if task.id in seen:
            raise DataSetError(f"{path}: two problems are called {task.id!r}")
        seen.add(task.id)
    return DataSet(name if name in FILE_SETS else path.stem.removesuffix(".jsonl"), rule, tuple(kept), str(path))


def _with_instruction(task: Task, instruction: str | None) -> Task:
    if task.code is not None:
        return replace(task, question=f"{WRITE}{task.code.prompt}```")
    return replace(task, question=task.question + (REASON if instruction is None else instruction))


def _found(name: str, data_dir: Path | None) -> tuple[Path, Rule | None]:
    if name not in FILE_SETS:
        path = Path(name)
        if not path.is_file():
            known = ", ".join(NAMES)
            raise DataSetError(f"no data set {name!r}: there are {known}, and any path of a JSONL file")
        return path, None
    wanted = FILE_SETS[name]
    shipped = Path(str(files("bench.evaluation").joinpath("data")))
    for folder in (data_dir, shipped):
        for file_name in wanted.file_names if folder is not None else ():
            assert folder is not None
            if (folder / file_name).is_file():
                return folder / file_name, wanted.rule
    where = f"not in {data_dir}" if data_dir is not None else f"no --data-dir, and {DATA_DIR_VARIABLE} is not set"
    raise DataSetError(f"no file {wanted.file_names[0]} for {name} ({where}): {wanted.why_absent}")


def _read(path: Path, rule: Rule | None) -> Iterator[Task]:
    """Every line as a task. Raises DataSetError with file, line and field."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataSetError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataSetError(f"{where}: not a JSON object")
        yield _task(row, rule, number, where)


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataSetError(f"cannot read {path}: {error}") from None


def _task(row: Mapping[str, Any], rule: Rule | None, number: int, where: str) -> Task:
    if rule is Rule.CODE or (rule is None and "entry_point" in row):
        code = CodeTest(*(_text(row, (field,), where) for field in ("prompt", "entry_point", "test")))
        if f"def {code.entry_point}(" not in code.prompt:
            raise DataSetError(f"{where}, field prompt: it does not begin the function {code.entry_point!r} of entry_point")
        return Task(_id(row, ("task_id", "id"), number, where), code.prompt, code=code)
    question = _text(row, ("question", "problem"), where)
    answer = _text(row, ("answer",), where)
    if rule is Rule.GSM8K:
        answer = _gsm8k_gold(answer, where)
    if rule is Rule.AIME and not re.fullmatch(r"\d{1,3}", answer):
        raise DataSetError(f"{where}, field answer: {answer!r} is no whole number from 0 to 999")
    return Task(_id(row, ("id",), number, where), question, answer)


def _text(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """The first of these fields that there is; numbers count as text."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataSetError(f"{where}, field {name}: {type(value).__name__} instead of text")
        if not str(value).strip():
            raise DataSetError(f"{where}, field {name}: empty")
        return value if isinstance(value, str) else str(value)
    raise DataSetError(f"{where}: no field {' or '.join(names)}; it has {', '.join(row) or 'none'}")


def _id(row: Mapping[str, Any], names: Sequence[str], number: int, where: str) -> str:
    return _text(row, names, where) if any(row.get(name) is not None for name in names) else str(number)


def _gsm8k_gold(answer: str, where: str) -> str:
    """What stands behind ``####``; a bare number is taken as it is."""
    value = answer.rsplit("####", 1)[-1].strip().replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", value):
        raise DataSetError(f"{where}, field answer: no number behind ####")
    return value
