"""tools/upstream_tables.py over made-up files in upstream's forms: what is read, what is left out, and how it is written."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import upstream_tables as tool

TEMPLATE = """
name: "engine"  # input [ { name: "no_input" } ]
input [
  { name: "words" data_type: TYPE_INT32 dims: [ -1 ] optional: true allow_ragged_batch: true },
  { name: "length" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } }
]
input { name: "scores" data_type: ${logits_datatype} dims: [ -1, -1 ] optional: true }
output [ { name: "ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
parameters: { key: "size" value: { string_value: "${size}" } }
parameters: { key: "note" value: { string_value: "${note}" } }
"""
INSTANCE = """
void read() {
    auto size = model->GetParameter<int32_t>("size");
    try { auto share = model->GetParameter<float>("share"); } catch (...) { }
    // model->GetParameter<int>("in_a_comment");
    std::string const kind = model->GetParameter<std::string>("kind");
    if (kind == "small" || kind == "large") { }
    TLLM_CHECK(mMaxNewTokens > 0);
    throw std::runtime_error("Maximum queue size of "
        "%d reached");
}
template <> bool Model::GetParameter<bool>(std::string const& name)
{
    if (text == "true" || text == "1") return true;
}
"""
BUILD = """
parser.add_argument('--max_size', type=int, required=True)
parser.add_argument('--kind', '-k', choices=['a', 'b', None])
parser.add_argument('--fast', '--quick', action='store_true')
parser.add_argument('place')
"""
PLUGINS = """
Kind = Literal["auto", "float16"]
class Base:
    _hidden: bool = False
    shown: bool = True
class PluginConfig(Base):
    gemm: Optional[Kind] = None
    block: int = 32
    unlisted: bool = True
cli_plugin_args = ["gemm", "block", "shown"]
"""
LLM_ARGS = """
class Base(StrictBaseModel):
    max_len: Optional[PositiveInt] = None
    known: ClassVar[int] = 1
class NGramDecodingConfig(Base):
    public: bool = Field(default=True, deprecated="gone soon")
    kind: Literal["x", "y"] = "x"
    other: dict[str, int] = {}
EagleDecodingConfig = NGramDecodingConfig
"""


def test_tensors_are_read_with_their_types_and_flags() -> None:
    message = tool.parse_pbtxt(TEMPLATE)
    assert tool.tensors(message, "input") == {
        "words": ["INT32", [-1], "RO"],
        "length": ["INT32", [1], "S"],
        "scores": ["L", [-1, -1], "O"],
    }
    assert tool.tensors(message, "output") == {"ids": ["INT32", [-1, -1]]}


def test_a_template_that_is_cut_off_is_no_template() -> None:
    with pytest.raises((ValueError, StopIteration, RuntimeError)):
        tool.parse_pbtxt("input { name: { ")


def test_parameters_are_those_of_template_and_backend_by_kind() -> None:
    tables = tool.backend_tables(TEMPLATE, [INSTANCE])
    assert tables["parameters"] == {"size": "int", "note": "text", "share": "float", "kind": ["large", "small"]}
    assert tables["rules"] == {"booleans": ["true", "1"], "required_parameters": ["kind", "size"]}


def test_command_lines_are_read_with_every_long_name() -> None:
    flags, required = tool.command_line(BUILD)
    assert flags == {"max_size": "int", "kind": ["a", "b"], "fast": "flag", "quick": "flag"}
    assert required == ["max_size"]


def test_plugins_are_flags_where_upstream_lists_them() -> None:
    assert tool.plugin_flags(PLUGINS) == {
        "shown": ["enable", "disable"],
        "gemm": ["auto", "float16", "disable"],
        "block": "int",
    }


def test_classes_have_the_fields_of_their_bases_and_of_what_they_stand_for() -> None:
    made = tool.tables({"llm_args": LLM_ARGS})["llmapi"]
    of_ngram = {"deprecated": ["public"], "fields": {"max_len": "int", "public": "bool", "kind": ["x", "y"], "other": "any"}}
    assert made == {"NGramDecodingConfig": of_ngram, "EagleDecodingConfig": of_ngram}


def test_refusals_are_joined_texts_and_checks() -> None:
    assert tool.refusals([INSTANCE]) == ["Maximum queue size of %d reached", "mMaxNewTokens > 0"]


def _checkout(folder: Path) -> Path:
    for name, text in (("template", TEMPLATE), ("build", BUILD), ("plugins", PLUGINS), ("instance", INSTANCE)):
        path = folder / "some" / "where" / tool.FILES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_a_folder_becomes_toml_and_what_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([str(_checkout(tmp_path)), "--version", "9.9", "--note", "commit abc"])
    printed = capsys.readouterr()
    made = tomllib.loads(printed.out)
    assert made["version"] == "9.9" and printed.out.splitlines()[1] == "# commit abc"
    assert made["inputs"]["words"] == ["INT32", [-1], "RO"] and made["trtllm_build"]["gemm"] == ["auto", "float16", "disable"]
    assert f"not found: {tool.FILES['quantize']}" in printed.err and "quantize" not in made
    assert f"not found: {tool.FILES['build']}" not in printed.err


def test_a_git_revision_is_read_and_not_what_lies_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    _checkout(tmp_path)
    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "commit", "--quiet", "--message", "one")
    build = tmp_path / "some" / "where" / tool.FILES["build"]
    build.write_text("parser.add_argument('--later')", encoding="utf-8")
    tool.main([f"{tmp_path}@HEAD", "--version", "1"])
    assert "max_size" in tomllib.loads(capsys.readouterr().out)["trtllm_build"]
    tool.main([str(tmp_path), "--version", "1"])
    assert "later" in tomllib.loads(capsys.readouterr().out)["trtllm_build"]


def test_a_path_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere: no folder, no file and no git directory"):
        tool.main([str(tmp_path / "nowhere"), "--version", "1"])
