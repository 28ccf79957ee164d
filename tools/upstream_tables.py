"""Write the table of upstream's contract from upstream's own files, to hold ``tests/contract`` against a release.

    python tools/upstream_tables.py PATH... --version 1.2.1 [--note TEXT]... > upstream.toml

A PATH is a folder (a checkout, an installed ``tensorrt_llm``, ``/app`` of NVIDIA's image), one file, or a git directory, each of
these with ``@REVISION`` if not HEAD is meant. Of each file in :data:`FILES` the first that a PATH has is read. Standard library
only and nothing is imported of upstream, so this runs inside NVIDIA's image too. What no file was found for is left out and named
on standard error, and so it is in the difference between two releases.

What upstream says in prose alone (which parameters are device lists, what excludes what) is not read here:
``tests/contract/upstream.py`` says it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

Table = dict[str, Any]
Kind = str | list[str]
"""Of a value: ``int``, ``float``, ``bool``, ``text``, ``any``, ``flag`` (a switch without one), or the texts to choose from."""

FILES: Mapping[str, str] = {
    "template": "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt",
    "instance": "inflight_batcher_llm/src/model_instance_state.cc",
    "model": "inflight_batcher_llm/src/model_state.cc",
    "build": "tensorrt_llm/commands/build.py",
    "plugins": "tensorrt_llm/plugin/plugin.py",
    "convert_qwen": "examples/models/core/qwen/convert_checkpoint.py",
    "convert_llama": "examples/models/core/llama/convert_checkpoint.py",
    "quantize": "examples/quantization/quantize.py",
    "launch": "scripts/launch_triton_server.py",
    "llm_args": "tensorrt_llm/llmapi/llm_args.py",
    "sampling": "tensorrt_llm/sampling_params.py",
    "request": "tensorrt_llm/batch_manager/llmRequest.h",
    "request_body": "tensorrt_llm/batch_manager/llmRequest.cpp",
    "request_checks": "tensorrt_llm/executor/requestImpl.h",
    "executor": "tensorrt_llm/executor/executorImpl.cpp",
    "tensors": "inflight_batcher_llm/src/utils.cc",
}
"""What is read, by the end of its path, which is the same in a checkout and in the image."""

LLM_API = (
    *("LlmArgs", "KvCacheConfig", "CudaGraphConfig"),
    *("NGramDecodingConfig", "DraftTargetDecodingConfig", "EagleDecodingConfig", "Eagle3DecodingConfig"),
)
REFUSING = ("request", "request_body", "request_checks", "executor", "instance", "tensors")
REFUSALS = (
    *("exceeds maximum input length", "exceeds maximum draft tokens length", "Maximum queue size of", "mMaxNewTokens > 0"),
    *(
        "failed process requestId",
        "due to the following error",
        "Encountered an error when fetching new request",
        "is not present in the request",
    ),
)
"""By these the texts of refusals are told from the others; ``lr_backend/engine/upstream_errors.py`` quotes them."""


# Where files are ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One PATH: which files it has, and how one is read."""

    names: tuple[str, ...]
    read: Callable[[str], str]

    def text(self, ending: str) -> str | None:
        """The file whose path ends so; the shortest path if there are several."""
        found = [name for name in self.names if _ends(name, ending)]
        return self.read(min(found, key=len)) if found else None


def _ends(name: str, ending: str) -> bool:
    parts, wanted = PurePosixPath(name).parts, PurePosixPath(ending).parts
    return parts[-len(wanted) :] == wanted


def open_source(path: str) -> Source:
    """A folder, a file, or a git directory.

    Raises:
        SystemExit: there is no such thing.
    """
    place, _, revision = path.partition("@")
    root = Path(place)
    git_dir = next((each for each in (root / ".git", root) if (each / "objects").is_dir()), None)
    if git_dir is not None and (revision or git_dir == root):
        return _git_source(git_dir, revision or "HEAD")
    if root.is_file():
        return Source((root.absolute().as_posix(),), _read)
    if not root.is_dir():
        raise SystemExit(f"{path}: no folder, no file and no git directory")
    names = (each.absolute().as_posix() for each in root.rglob("*") if each.name in _NAMES and each.is_file())
    return Source(tuple(names), _read)


_NAMES = {PurePosixPath(ending).name for ending in FILES.values()}


def _read(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


def _git_source(git_dir: Path, revision: str) -> Source:
    def git(*words: str) -> str:
        done = subprocess.run(["git", f"--git-dir={git_dir}", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{git_dir}@{revision}: {done.stderr.strip()}")
        return done.stdout

    names = git("ls-tree", "-r", "--name-only", revision).splitlines()
    return Source(tuple(names), lambda name: git("show", f"{revision}:{name}"))


# The model's template -----------------------------------------------------------------------------------------------------

_PBTXT = re.compile(r'"(?:[^"\\]|\\.)*"|\$\{\w+\}|[\w.+-]+|[{}\[\]]')
Message = list[tuple[str, Any]]


def parse_pbtxt(text: str) -> Message:
    """Fields of a message in their order: texts, lists and messages. Colons and commas say nothing that the order does not."""
    words = _PBTXT.findall(re.sub(r"#[^\n]*", "", text))
    return _message(iter([*words, "}"]))


def _message(words: Iterator[str]) -> Message:
    fields: Message = []
    for key in words:
        if key == "}":
            return fields
        value = _value(next(words), words)
        # A repeated field may be written as a list of messages or once for each.
        several = isinstance(value, list) and value and isinstance(value[0], list)
        fields += [(key, each) for each in value] if several else [(key, value)]
    raise ValueError("a message without an end")


def _value(word: str, words: Iterator[str]) -> Any:
    if word == "{":
        return _message(words)
    if word == "[":
        return [_value(each, words) for each in iter(lambda: next(words), "]")]
    return word.strip('"')


def tensors(template: Message, kind: str) -> Table:
    """``name = [dtype, dims, flags]`` of every ``input``, ``name = [dtype, dims]`` of every ``output``."""
    found: Table = {}
    for fields in (dict(value) for key, value in template if key == kind):
        dims = [int(each) for each in fields["dims"]]
        flags = [("S", "reshape" in fields), ("R", fields.get("allow_ragged_batch") == "true")]
        flags += [("O", fields.get("optional") == "true")]
        told = ["".join(letter for letter, holds in flags if holds)] if kind == "input" else []
        found[fields["name"]] = [_dtype(fields["data_type"]), dims, *told]
    return found


def _dtype(name: str) -> str:
    """``L`` for the type of the logits, ``F`` for one that the user fills in as well."""
    if name.startswith("${"):
        return "L" if "logits" in name else "F"
    return name.removeprefix("TYPE_")


# What the backend reads ---------------------------------------------------------------------------------------------------

_READ = r"GetParameter<(?P<type>(?:[^<>]|<[^<>]*>)*)>\((?P<key>\w+|\"\w+\")\)"
_CPP = re.compile(
    rf"//[^\n]*|(?P<try>\btry\s*\{{)|(?P<open>\{{)|(?P<close>\}})|(?P<name>\w+)\s*=\s*\"(?P<text>\w+)\";|{_READ}|\"(?:[^\"\\]|\\.)*\""
)
_CPP_KINDS = {"int": r"int|u?int\d+_t|size_t|SizeType32", "float": r"float|double", "bool": "bool"}


@dataclass(frozen=True)
class ParameterRead:
    """One ``GetParameter``; unguarded where nothing catches that it is missing."""

    key: str
    kind: Kind
    guarded: bool


def parameter_reads(source: str) -> list[ParameterRead]:
    """Every parameter that a C++ file reads by its name, or by a variable that was set to it."""
    found, blocks, names = [], [], {}
    for match in _CPP.finditer(source):
        if match["try"] or match["open"]:
            blocks.append(bool(match["try"]))
        elif match["close"] and blocks:
            blocks.pop()
        elif match["name"]:
            names[match["name"]] = match["text"]
        elif match["type"]:
            key = match["key"].strip('"') if '"' in match["key"] else names.get(match["key"])
            if key is not None:
                found.append(ParameterRead(key, _cpp_kind(match, source), any(blocks)))
    return found


def _cpp_kind(match: re.Match[str], source: str) -> Kind:
    kind = next((kind for kind, types in _CPP_KINDS.items() if re.fullmatch(types, match["type"])), "text")
    variable = re.search(r"(\w+)\s*=\s*\S*$", source[max(0, match.start() - 120) : match.start()])
    if kind != "text" or variable is None or match["type"] != "std::string":
        return kind
    compared = re.findall(rf"\b{variable[1]}\s*==\s*\"(\w+)\"", source)
    return sorted(set(compared)) or kind


def booleans(source: str) -> list[str]:
    """The texts that ``GetParameter<bool>`` takes."""
    body = re.search(r"::GetParameter<bool>\(std::string const& \w+\)\s*\{(.*?)\n\}", source, re.DOTALL)
    return re.findall(r"==\s*\"(\w+)\"", body[1]) if body else []


def backend_tables(template: str | None, sources: Sequence[str]) -> Table:
    """``inputs``, ``outputs``, ``parameters`` and ``rules``, as far as there are files for them."""
    tables: Table = {}
    keys: list[str] = []
    if template is not None:
        message = parse_pbtxt(template)
        tables |= {"inputs": tensors(message, "input"), "outputs": tensors(message, "output")}
        keys = [dict(value)["key"] for key, value in message if key == "parameters"]
    reads = [read for source in sources for read in parameter_reads(source)]
    kinds = {read.key: read.kind for read in reversed(reads)}
    if keys or kinds:
        tables["parameters"] = {key: kinds.get(key, "text") for key in sorted({*keys, *kinds})}
    if reads:
        required = sorted({read.key for read in reads if not read.guarded} - {read.key for read in reads if read.guarded})
        texts = [text for source in sources for text in booleans(source)]
        tables["rules"] = {"booleans": texts, "required_parameters": required}
    return tables


# Command lines ------------------------------------------------------------------------------------------------------------


def command_line(source: str) -> tuple[dict[str, Kind], list[str]]:
    """Flags that ``argparse`` is told of, every long name of each, and those that are required."""
    flags: dict[str, Kind] = {}
    required = []
    for call in _calls(ast.parse(source), "add_argument"):
        names = [text for text in map(_text, call.args) if text is not None and text.startswith("--")]
        given = {word.arg: word.value for word in call.keywords}
        flags |= {name[2:]: _argument_kind(given) for name in names}
        if names and ast.dump(given.get("required", ast.Constant(False))) == ast.dump(ast.Constant(True)):
            required.append(names[0][2:])
    return flags, required


def _argument_kind(given: Mapping[str | None, ast.expr]) -> Kind:
    if _text(given.get("action")) == "store_true":
        return "flag"
    if isinstance(given.get("choices"), ast.List):
        return _choices(given["choices"])
    kind = given.get("type")
    return kind.id if isinstance(kind, ast.Name) and kind.id in ("int", "float") else "text"


def plugin_flags(source: str) -> dict[str, Kind]:
    """Flags that ``trtllm-build`` makes of ``PluginConfig``: those that upstream lists for its command line."""
    tree = ast.parse(source)
    shown = next(
        _strings(node.value) for node in tree.body if _assigned(node) == "cli_plugin_args" and isinstance(node, ast.Assign)
    )
    named = {_assigned(node): node.value for node in tree.body if isinstance(node, ast.Assign)}
    flags = {name: _plugin_kind(kind, named) for name, kind in _annotations(tree, "PluginConfig").items()}
    return {name: kind for name, kind in flags.items() if name in shown}


def _plugin_kind(annotation: ast.expr, named: Mapping[str | None, ast.expr]) -> Kind:
    """A switch takes ``enable`` and ``disable``; what may be absent is ``disable`` then."""
    parts = [named.get(node.id, node) if isinstance(node, ast.Name) else node for node in ast.walk(annotation)]
    literal = next((part for part in parts if isinstance(part, ast.Subscript) and _name(part.value) == "Literal"), None)
    if literal is not None:
        return [*_choices(literal.slice), "disable"]
    return "int" if _name(annotation) == "int" else ["enable", "disable"]


def launch_table(source: str) -> Table:
    """What upstream's launcher can be told, and what it tells: options of tritonserver, and the environment."""
    tree = ast.parse(source)
    told = {id(node) for call in _calls(tree, "add_argument") for node in ast.walk(call)}
    words = [_text(node) for node in ast.walk(tree) if id(node) not in told]
    options = {word.partition("=")[0] for word in words if word is not None and re.match(r"--[a-z]", word)}
    places = [node.targets[0] for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    variables = [_text(place.slice) for place in places if isinstance(place, ast.Subscript) and _name(place.value) == "env"]
    flags, _ = command_line(source)
    return {"options": sorted(options), "environment": sorted(name for name in variables if name), "flags": flags}


# The LLM API --------------------------------------------------------------------------------------------------------------


def class_table(tree: ast.Module, name: str) -> Table | None:
    """Public fields of a class and of its bases in the same file, by kind, and which of them upstream calls deprecated."""
    annotations = _annotations(tree, name)
    if not annotations:
        return None
    fields = {field: _field_kind(kind) for field, kind in annotations.items()}
    defaults = {field: value for node in _lineage(tree, name) for field, value in _values(node).items()}
    old = [field for field in fields if _is_deprecated(defaults.get(field))]
    return {"deprecated": old, "fields": fields}


def _is_deprecated(value: ast.expr | None) -> bool:
    given = {word.arg: word.value for word in value.keywords} if isinstance(value, ast.Call) else {}
    return "deprecated" in given or _text(given.get("status")) == "deprecated"


_KINDS = {"bool": "bool", "str": "text", "int": "int", "float": "float"}
_NUMBERS = {
    "PositiveInt": "int",
    "NonNegativeInt": "int",
    "StrictInt": "int",
    "NonNegativeFloat": "float",
    "PositiveFloat": "float",
}


def _field_kind(annotation: ast.expr) -> Kind:
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Optional":
        return _field_kind(annotation.slice)
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Literal":
        return _choices(annotation.slice)
    return {**_KINDS, **_NUMBERS}.get(_name(annotation) or "", "any")


def _lineage(tree: ast.Module, name: str) -> list[ast.ClassDef]:
    """A class behind its bases, through names that stand for it."""
    aliases = {_assigned(node): _name(node.value) for node in tree.body if isinstance(node, ast.Assign)}
    name = aliases.get(name) or name
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return []
    bases = [_name(base) or "" for base in classes[name].bases]
    return [*(each for base in bases for each in _lineage(tree, base)), classes[name]]


def _annotations(tree: ast.Module, name: str) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in _lineage(tree, name):
        found |= {field: each.annotation for field, each in _fields(node)}
    return found


def _values(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    return {field: each.value for field, each in _fields(node)}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for each in node.body:
        field = _name(each.target) if isinstance(each, ast.AnnAssign) else None
        if (
            isinstance(each, ast.AnnAssign)
            and field
            and not field.startswith("_")
            and "ClassVar" not in ast.dump(each.annotation)
        ):
            yield field, each


# Refusals -----------------------------------------------------------------------------------------------------------------


def refusals(sources: Iterable[str]) -> list[str]:
    """Texts of C++ with one of :data:`REFUSALS` in them, adjacent literals joined, and checks, whose failure quotes them."""
    found = []
    for source in sources:
        literals = re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', source)
        texts = [re.sub(r'"\s*"', "", match[0]).strip('"') for match in literals]
        texts += [match[1].strip() for match in re.finditer(r"TLLM_CHECK\(([^;]*)\);", source)]
        found += [text for text in texts if any(mark in text for mark in REFUSALS)]
    return list(dict.fromkeys(found))


# Python that is read and not run ------------------------------------------------------------------------------------------


def _calls(tree: ast.AST, method: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            yield node


def _assigned(node: ast.AST) -> str | None:
    return _name(node.targets[0]) if isinstance(node, ast.Assign) else None


def _name(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _strings(node: ast.AST) -> list[str]:
    return [text for text in map(_text, ast.walk(node)) if text is not None]


def _choices(node: ast.expr) -> list[str]:
    """Constants of a list or of a ``Literal``, without None, as they stand on a command line."""
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [str(part.value) for part in parts if isinstance(part, ast.Constant) and part.value is not None]


# All tables ---------------------------------------------------------------------------------------------------------------


def tables(texts: Mapping[str, str]) -> Table:
    """What upstream's files say; ``texts`` are files by their name in :data:`FILES`."""
    made = backend_tables(texts.get("template"), [texts[name] for name in ("instance", "model") if name in texts])
    if "build" in texts:
        made["trtllm_build"] = command_line(texts["build"])[0]
        made["trtllm_build"] |= plugin_flags(texts["plugins"]) if "plugins" in texts else {}
    for name in ("convert_qwen", "convert_llama", "quantize"):
        if name in texts:
            flags, required = command_line(texts[name])
            made[name] = {"path": FILES[name], "required": required, "flags": flags}
    if "launch" in texts:
        made["launch"] = launch_table(texts["launch"])
    modules: list[tuple[ast.Module, tuple[str, ...]]] = [(ast.parse(texts["llm_args"]), LLM_API)] if "llm_args" in texts else []
    modules += [(ast.parse(texts["sampling"]), ("SamplingParams",))] if "sampling" in texts else []
    classes = {name: class_table(tree, name) for tree, names in modules for name in names}
    if classes:
        made["llmapi"] = {name: table for name, table in classes.items() if table is not None}
    told = refusals(texts[name] for name in REFUSING if name in texts)
    return made | ({"refusals": {"texts": told}} if told else {})


def toml(table: Table, path: tuple[str, ...] = ()) -> str:
    """As TOML: in each table first the values, one a line, then the tables in it."""
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    head = f"\n[{'.'.join(path)}]\n" if path and (values or not table) else ""
    return head + "".join(lines) + "".join(toml(value, (*path, key)) for key, value in table.items() if isinstance(value, dict))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the table of upstream's contract from upstream's own files.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="folders, files, git directories (DIR@REVISION)")
    parser.add_argument("--version", required=True, help="the release that the files are of")
    parser.add_argument("--note", action="append", default=[], help="a line for the head of the table, such as a commit")
    options = parser.parse_args(arguments)
    sources = [open_source(path) for path in options.paths]
    found = {name: [text for source in sources if (text := source.text(ending)) is not None] for name, ending in FILES.items()}
    texts = {name: each[0] for name, each in found.items() if each}
    for name in FILES.keys() - texts.keys():
        sys.stderr.write(f"not found: {FILES[name]}\n")
    sys.stdout.write("".join(f"# {line}\n" for line in (HEAD, *options.note)))
    sys.stdout.write("\n" + toml({"version": options.version, **tables(texts)}))


HEAD = "Made by tools/upstream_tables.py from files of NVIDIA/TensorRT-LLM. Not written by hand."

if __name__ == "__main__":
    main()
