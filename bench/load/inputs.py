"""``python -m bench.load.inputs``: perf_analyzer input files made from data sets.

``bench/inputs/demo.json`` is made so, from the demo world, and kept with the source. GSM8K and AIME are made on request from the
data sets' own JSONL files. A file holds questions and ``max_tokens``; :func:`for_point` adds what belongs to one point.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import typer

from bench.kit.output import write_json
from bench.load.errors import LoadError
from lr_backend.errors import ConfigError
from lr_backend.fields import LOOKAHEAD_INPUTS

if TYPE_CHECKING:
    from lr_backend.emulated.workload import Workload

INPUTS = Path(__file__).resolve().parents[1] / "inputs"
DEMO_SEED = 4242
NUM_DEMO = 40
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What the paper adds to every question."""
QUESTION_FIELDS: Mapping[str, tuple[str, ...]] = {"gsm8k": ("question",), "aime": ("problem", "question")}
MAX_TOKENS: Mapping[str, int] = {"demo": 640, "gsm8k": 4096, "aime": 32768}
WORKLOAD = "workload"
_KNOWN = frozenset(spec.name for spec in LOOKAHEAD_INPUTS)

Fields = dict[str, list[Any]]
"""One request: every input tensor flattened, as perf_analyzer wants it."""
Questions = Callable[[str, int], Sequence[Fields]]
"""(a point's name, how many) -> its requests; where they are fewer, they are asked again."""


def demo_questions(count: int) -> list[str]:
    from demo.problems import problems

    return [problem.question for problem in islice(problems(DEMO_SEED, "test"), count)]


def scripted_questions(name_or_path: str, count: int, prompt_tokens: int | None) -> tuple[list[str], int]:
    """Questions for an emulated deployment, and the tokens that no answer exceeds.

    Raises:
        ConfigError: there is no such workload.
    """
    from lr_backend.emulated.texts import Texts
    from lr_backend.emulated.workload import Workload

    workload = Workload.load(name_or_path)
    texts = Texts(replace(workload, prompt_tokens=prompt_tokens or workload.prompt_tokens), 0)
    return [texts.question(number) for number in range(count)], workload.max_tokens


def scripted_anew(workload: Workload) -> Questions:
    """Questions for an emulated deployment of this workload, other ones at every point.

    It has one text for a question, whatever the seed: who asks again would find the text in the KV cache.
    """
    from lr_backend.emulated.texts import Texts

    texts = Texts(workload, 0)

    def questions(name: str, count: int) -> Sequence[Fields]:
        first = crc32(name.encode())
        return input_file([texts.question(first + number) for number in range(count)], texts.workload.max_tokens)["data"]

    return questions


def read_questions(path: Path, dataset: str) -> list[str]:
    """The questions of a JSONL file.

    Raises:
        LoadError: naming the line and what is wrong with it.
    """
    names = QUESTION_FIELDS[dataset]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LoadError(f"{path}:{number}: no JSON: {error}") from error
        found = next((row[name] for name in names if isinstance(row, dict) and name in row), None)
        if not isinstance(found, str) or not found.strip():
            raise LoadError(f"{path}:{number}: no text in the field {' or '.join(names)}")
        questions.append(found.strip() + BOXED)
    if not questions:
        raise LoadError(f"{path} holds no question")
    return questions


def input_file(questions: Sequence[str], max_tokens: int) -> dict[str, list[Fields]]:
    """The document that perf_analyzer reads."""
    return {"data": [{"text_input": [question], "max_tokens": [max_tokens]} for question in questions]}


def load(path: Path) -> list[Fields]:
    """The requests of an input file.

    Raises:
        LoadError: it is none, or names an input that the ``lookahead`` model has not.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{path} is no JSON: {error}") from error
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list) or not data:
        raise LoadError(f'{path} is no perf_analyzer input file: {{"data": [{{...}}, ...]}} with at least one request')
    for number, row in enumerate(data):
        if not isinstance(row, dict) or not {"text_input", "messages"} & row.keys():
            raise LoadError(f"{path}: request {number} has neither text_input nor messages")
        if unknown := row.keys() - _KNOWN:
            raise LoadError(f"{path}: request {number} has {sorted(unknown)[0]!r}, which is no input of the lookahead model")
    return data


def for_point(questions: Sequence[Fields], fields: Mapping[str, Any], name: str, num_requests: int) -> dict[str, list[Fields]]:
    """The input file of one point of load: the questions in turn, with ``fields``, each request under a seed of its own.

    Two requests of one seed would write the same text, and the later one find it in the KV cache.
    """
    rows = []
    for index in range(num_requests):
        question = questions[index % len(questions)]
        common = {key: [value] for key, value in fields.items()}
        rows.append({**question, **common, "seed": [crc32(f"{name}/{index}".encode())]})
    return {"data": rows}


def main(
    dataset: Annotated[str, typer.Argument(help="demo, gsm8k, aime or workload")],
    source: Annotated[
        Path | None, typer.Argument(help="The data set's JSONL file, or a workload by name or file; the demo makes its own.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="By default bench/inputs/<dataset>.json.")] = None,
    count: Annotated[int, typer.Option(min=1, help="The first so many questions.")] = NUM_DEMO,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer; by default the data set's own.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=3, help="Of a workload: instead of its own.")] = None,
) -> None:
    """Write an input file."""
    known = (*MAX_TOKENS, WORKLOAD)
    if dataset not in known:
        raise typer.BadParameter(f"one of {', '.join(known)}", param_hint="dataset")
    if (source is None) != (dataset == "demo"):
        rule = "the demo world needs no file" if source is not None else f"{dataset} is read from its JSONL file"
        raise typer.BadParameter(rule, param_hint="source")
    try:
        if dataset == WORKLOAD:
            questions, longest = scripted_questions(str(source), count, prompt_tokens)
        else:
            questions = demo_questions(count) if source is None else read_questions(source, dataset)[:count]
            longest = MAX_TOKENS[dataset]
    except (LoadError, ConfigError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    path = output or INPUTS / f"{dataset}.json"
    write_json(path, input_file(questions, max_tokens or longest))
    typer.echo(f"wrote {path}: {len(questions)} questions")


if __name__ == "__main__":
    typer.run(main)
