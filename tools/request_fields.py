"""Write what follows from the fields of a request into the files that show them (``make fields``).

    python -m tools.request_fields

The fields are said in :class:`lr_backend.request.LookaheadRequest`. From there follow the client's ``Options``, which do not
import the server's package, and the tables in the documentation: in each file what stands between two marks. A test holds them
equal to what this command makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import wrap

from lr_backend.fields import REQUEST_FIELDS, RequestField

ROOT = Path(__file__).parents[1]
PROMPT = ("text_input", "messages")
"""The client takes them as the question, beside its options."""
OPTIONS = tuple(field for field in REQUEST_FIELDS if field.name not in PROMPT)
MARKS = re.compile(r"(made by `make fields`[^\n]*\n).*?([^\n]*end of what `make fields` makes)", re.DOTALL)
LINE = 110
"""Characters of the client's lines, at most."""
PYTHON = {"BOOL": "bool", "INT32": "int", "UINT64": "int", "FP32": "float", "STRING": "str"}
JSON = {"list": "Sequence[Mapping[str, Any]]", "object": "Mapping[str, Any]"}
WIRE = {"STRING": "BYTES"}
"""Datatypes that the wire calls otherwise than a config file."""


def options(fields: Iterable[RequestField]) -> str:
    """The attributes of the client's ``Options``, in the style of ``ruff format``."""
    return "".join(map(_option, fields))


def _option(field: RequestField) -> str:
    kind = PYTHON[field.dtype]
    if field.choices:
        kind = f"Literal[{', '.join(map(_quoted, field.choices))}] | str"
    elif field.many:
        kind = f"{kind} | Sequence[{kind}]"
    elif field.json:
        kind = f"{kind} | {JSON[field.json]}"
    datatype = _quoted(WIRE.get(field.dtype, field.dtype))
    meaning = field.meaning + (f" ({field.rule})" if field.rule else "")
    more = ["is_json=True"] if field.json else []
    line = f"    {field.name}: Annotated[{kind} | None, Field({', '.join((datatype, _quoted(meaning), *more))})] = None\n"
    if len(line) <= LINE + 1:
        return line
    *words, last = wrap(meaning, LINE - len('            " ",'))
    quoted = "\n            ".join([*(_quoted(part + " ") for part in words), _quoted(last)])
    arguments = "".join(f"            {argument},\n" for argument in (datatype, quoted, *more))
    return f"    {field.name}: Annotated[\n        {kind} | None,\n        Field(\n{arguments}        ),\n    ] = None\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


Column = Callable[[RequestField], str]
COLUMNS: Mapping[str, Column] = {
    "field": lambda field: f"`{field.name}`",
    "type": lambda field: field.dtype + (" [n]" if field.many else ""),
    "values": lambda field: ", ".join(f"`{choice}`" for choice in field.choices) or field.rule,
    "default": lambda field: f"`{field.default}`" if field.default else "",
    "meaning": lambda field: field.meaning,
}


def table(fields: Iterable[RequestField], *names: str) -> str:
    """A Markdown table, a row a field; ``names`` are those of :data:`COLUMNS`."""
    rows = [names, ["---"] * len(names), *([COLUMNS[name](field) for name in names] for field in fields)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written() -> dict[Path, str]:
    """Every file that shows the fields, as it should be.

    Raises:
        ValueError: a file lacks the marks.
    """
    parts = {
        "client/src/lr_client/fields.py": options(OPTIONS),
        "client/README.md": table(OPTIONS, "field", "values", "default", "meaning"),
        "docs/api.md": table(REQUEST_FIELDS, "field", "type", "values", "default", "meaning"),
    }
    return {ROOT / name: _renewed(name, part) for name, part in parts.items()}


def _renewed(name: str, part: str) -> str:
    text, num_found = MARKS.subn(lambda found: found[1] + part + found[2], (ROOT / name).read_text(encoding="utf-8"))
    if num_found != 1:
        raise ValueError(f"{name} needs one pair of marks of `make fields`; it has {num_found}")
    return text


def main() -> None:
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
