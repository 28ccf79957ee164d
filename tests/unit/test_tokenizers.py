"""Which tokenizer a checkpoint gets: the one that transformers would choose, without what it loads in order to choose."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lr_backend.build.render import lookahead_files
from lr_backend.build.spec import DeploymentSpec
from lr_backend.config import LoopConfig
from lr_backend.emulated.vocabulary import TOKENIZER_DIR
from lr_backend.errors import CheckpointError, ConfigError
from lr_backend.triton.models import load_models, load_tokenizer
from tests.support import tiny_models
from tests.support.checkpoints import CHECKPOINTS
from tests.support.tiny_models import make_checkpoint, make_tiny_models, write_spec

TEXT = "<think>\nMia has 12 apples.\n\n7 + 5 = 12, naïve </think> <|im_end|> \\boxed{12}"
TURN = [{"role": "user", "content": "Why?"}]


def tiny(folder: Path, **named: object) -> Path:
    """A checkpoint whose tokenizer has these settings."""
    path = make_checkpoint(folder) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **named}), encoding="utf-8")
    return folder


def facts(tokenizer: Any) -> dict[str, object]:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return {
        "class": type(tokenizer),
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "special": (tokenizer.all_special_ids, tokenizer.eos_token_id, tokenizer.pad_token_id),
        "words": tokenizer.get_vocab(),
        "prompt": tokenizer.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True),
    }


@pytest.mark.parametrize("checkpoint", [CHECKPOINTS / "target", CHECKPOINTS / "judge", TOKENIZER_DIR], ids=lambda path: path.name)
def test_a_plain_tokenizer_is_the_one_that_transformers_finds(checkpoint: Path) -> None:
    assert facts(load_tokenizer(checkpoint)) == facts(AutoTokenizer.from_pretrained(checkpoint))


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2TokenizerFast", None])
def test_the_class_is_the_one_that_the_checkpoint_names(tmp_path: Path, name: str | None) -> None:
    checkpoint = tiny(tmp_path, tokenizer_class=name)
    found = load_tokenizer(checkpoint)
    assert facts(found) == facts(AutoTokenizer.from_pretrained(checkpoint))
    assert ("Qwen2" in type(found).__name__) == (name in ("Qwen2TokenizerFast", None)), "None: by the model's type"


def test_no_checkpoint_has_blanks_taken_out_of_its_text(tmp_path: Path) -> None:
    assert load_tokenizer(tiny(tmp_path, clean_up_tokenization_spaces=True)).clean_up_tokenization_spaces is False


def test_a_folder_without_a_tokenizer_is_refused_and_so_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer in the checkpoint directory"):
        load_tokenizer(tmp_path)
    shutil.copytree(CHECKPOINTS / "target", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="broken: the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "broken")


NAMED, NONE = 'think_open = "<think>"\nthink_close = "</think>"\n', 'think_open = ""\nthink_close = ""\n'


@pytest.mark.parametrize(
    ("named", "template", "refused"),
    [
        ("", "", None),
        (NAMED, "", "think_open: '<think>' is not one token"),
        ("", "{% if '</think>' in messages[0].content %}{% endif %}", "think_close: '</think>' is not one token"),
        (NONE, "{% if '</think>' in messages[0].content %}{% endif %}", None),
    ],
)
def test_a_marker_of_the_reasoning_that_is_meant_is_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, template: str, refused: str | None
) -> None:
    monkeypatch.setattr(tiny_models, "THINK_TOKENS", ())
    monkeypatch.setattr(tiny_models, "CHAT_TEMPLATE", tiny_models.CHAT_TEMPLATE + template)
    path = write_spec(tmp_path / "engines" / "tiny.toml", make_tiny_models(tmp_path / "models"))
    path.write_text(path.read_text(encoding="utf-8").replace("[lookahead.limits]", f"[lookahead]\n{named}[lookahead.limits]"))
    rendered = lookahead_files(DeploymentSpec.load(path), 10)["lookahead/1/lookahead.json"]
    config = LoopConfig.model_validate_json(rendered)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert load_models(config).rules.think_close_id is None


def test_a_marker_that_is_one_token_is_taken(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    rules = load_models(LoopConfig(tokenizer_dir=checkpoint, judge_tokenizer_dir=checkpoint, think_close="</think>")).rules
    assert None not in (rules.think_open_id, rules.think_close_id)
