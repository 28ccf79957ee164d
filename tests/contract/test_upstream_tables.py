"""The tables here are in the form of ``tools/upstream_tables.py``: of files that say the same, it makes the same tables.

So what the tool makes of another release's files differs from the tables in what has changed, and in nothing else.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lr_backend.build.placement import Placement
from lr_backend.engine import Role, upstream_errors
from lr_backend.serve.launch import MPIRUN, LaunchMode, launch_plan
from tests.contract.upstream import TABLE
from tools import upstream_tables as tool

PATH = Path(__file__).with_name("upstream_1_2_1.toml")
CPP_TYPES = {"int": "int32_t", "float": "float", "bool": "bool", "text": "std::string"}
PLUGIN_ENDS = "disable"
REFUSED_IN = {
    "request": ("Prompt", "Draft"),
    "request_checks": ("mMax",),
    "executor": ("Maximum", "Encountered"),
    "instance": ("Executor", " due"),
    "tensors": (" is not",),
}
"""Where upstream has a text that begins so."""


def pbtxt(table: Mapping[str, Any]) -> str:
    """The model's template."""
    types = {"L": "${logits_datatype}", "F": "${other_datatype}"}
    lines = []
    for kind in ("input", "output"):
        for name, (dtype, dims, *flags) in table[f"{kind}s"].items():
            letters = flags[0] if flags else ""
            told = [f'name: "{name}"', f"data_type: {types.get(dtype, f'TYPE_{dtype}')}", f"dims: {json.dumps(dims)}"]
            told += ["reshape: { shape: [ ] }"] * ("S" in letters) + ["allow_ragged_batch: true"] * ("R" in letters)
            lines.append(f"{kind} [ {{ {' '.join([*told, *['optional: true'] * ('O' in letters)])} }} ]")
    for key in table["parameters"]:
        lines.append(f'parameters: {{ key: "{key}" value: {{ string_value: "${{{key}}}" }} }}')
    return "\n".join(lines)


def backend(table: Mapping[str, Any]) -> str:
    """What reads the parameters, and how a flag is told."""
    lines = ["void read() {"]
    for number, (key, kind) in enumerate(table["parameters"].items()):
        choices = kind if isinstance(kind, list) else []
        read = f'auto const v{number} = model->GetParameter<{CPP_TYPES["text" if choices else kind]}>("{key}");'
        lines.append(read if key in table["rules"]["required_parameters"] else f"try {{ {read} }} catch (...) {{ }}")
        lines += [f'if (v{number} == "{choice}") {{ }}' for choice in choices]
    lines += ["}", "template <>", "bool Model::GetParameter<bool>(std::string const& name)", "{"]
    lines += [f'    if (text == "{text}") return true;' for text in table["rules"]["booleans"]]
    return "\n".join([*lines, "}", ""])


def parser(flags: Mapping[str, Any], required: Iterable[str] = ()) -> str:
    """A command line's."""
    lines = []
    for flag, kind in flags.items():
        given = {"flag": "action='store_true'", "int": "type=int", "float": "type=float"}
        told = f"choices={kind!r}" if isinstance(kind, list) else given.get(kind, "type=str")
        lines.append(f"parser.add_argument('--{flag}', {told}{', required=True' if flag in required else ''})")
    return "\n".join(lines)


def plugins(flags: Mapping[str, Any]) -> str:
    lines = ["class PluginConfig:"]
    for flag, kind in flags.items():
        choices = ", ".join(f'"{choice}"' for choice in kind[:-1]) if isinstance(kind, list) else ""
        switch = kind == ["enable", "disable"]
        lines.append(f"    {flag}: {'bool' if switch else kind if kind == 'int' else f'Optional[Literal[{choices}]]'} = None")
    return "\n".join([*lines, f"cli_plugin_args = {list(flags)!r}"])


def launcher(table: Mapping[str, Any]) -> str:
    lines = [parser(table["flags"]), f"cmd = {table['options']!r}"]
    return "\n".join([*lines, *(f"env['{name}'] = '1'" for name in table["environment"])])


def refusing(texts: Iterable[str]) -> str:
    return "\n".join(f'throw Error("{text}");' if " > " not in text else f"TLLM_CHECK({text});" for text in texts)


def files(table: Mapping[str, Any]) -> dict[str, str]:
    """Upstream's files, as far as the tool reads them, that say what a table does."""
    build = table["trtllm_build"]
    first = next(at for at, kind in enumerate(build.values()) if isinstance(kind, list) and kind[-1] == PLUGIN_ENDS)
    split = dict(list(build.items())[:first]), dict(list(build.items())[first:])
    found = {"template": pbtxt(table), "model": backend(table), "build": parser(split[0]), "plugins": plugins(split[1])}
    found |= {
        name: parser(table[name]["flags"], table[name]["required"]) for name in ("convert_qwen", "convert_llama", "quantize")
    }
    told = table["refusals"]["texts"]
    found |= {place: refusing(text for text in told if text.startswith(begins)) for place, begins in REFUSED_IN.items()}
    return found | {"launch": launcher(table["launch"])}


def checkout(folder: Path, table: Mapping[str, Any]) -> Path:
    for name, text in files(table).items():
        path = folder / tool.FILES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def body(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_of_files_that_say_the_same_the_tool_makes_these_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([str(checkout(tmp_path, TABLE)), "--version", TABLE["version"]])
    assert body(capsys.readouterr().out) == body(PATH.read_text(encoding="utf-8"))


def test_what_another_release_changes_is_all_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tomllib.loads(PATH.read_text(encoding="utf-8"))
    del table["inputs"]["draft_acceptance_threshold"]
    table["trtllm_build"]["gemm_swiglu_plugin"] = ["fp8", "nvfp4", "disable"]
    table["launch"]["environment"].append("TRTLLM_WORKERS")
    tool.main([str(checkout(tmp_path, table)), "--version", "1.2.1"])
    old, new = set(body(PATH.read_text(encoding="utf-8"))), set(body(capsys.readouterr().out))
    assert {line.partition(" ")[0] for line in old - new} == {"draft_acceptance_threshold", "gemm_swiglu_plugin", "environment"}
    assert {line.partition(" ")[0] for line in new - old} == {"gemm_swiglu_plugin", "environment"}


def test_refusals_are_told_by_texts_that_upstream_has() -> None:
    """A text of ours has upstream's words in its order, with numbers where upstream puts them."""
    texts = TABLE["refusals"]["texts"]
    around = "|".join(re.escape(text) for text in texts if not text.startswith(("Prompt", "Draft", "Maximum")))
    for made in (
        upstream_errors.prompt_too_long(1, 9, 8),
        upstream_errors.too_many_drafts(1, 9, 8),
        upstream_errors.queue_full(1, 8),
    ):
        said = re.sub(rf"{around}|^\d+", "", re.sub(r"requestId \d+", "requestId ", made.message))
        assert re.sub(r"\d+", "%d", said) in texts
    for words in (*upstream_errors.REFUSALS, upstream_errors.BUSY[0]):  # the other one is Triton's
        assert any(words in text for text in texts), f"{words!r} is no refusal of upstream's"


def test_orchestrator_mode_is_started_with_what_upstreams_launcher_says() -> None:
    plan = launch_plan(tuple(Placement(role, "tensorrtllm", 2, (0, 1)) for role in Role))
    assert plan.mode is LaunchMode.ORCHESTRATOR
    upstream = TABLE["launch"]
    assert set(upstream["environment"]) <= plan.environment.keys()
    wanted = {"--pinned-memory-pool-byte-size", "--enable-peer-access", "--cuda-memory-pool-byte-size"}
    assert wanted <= set(upstream["options"]) and wanted <= {word.partition("=")[0] for word in plan.arguments}
    assert MPIRUN[1] in upstream["options"]
    assert {"multi-model", "disable-spawn-processes"} <= upstream["flags"].keys(), "the two ways for several engines"
