"""Tokenizers and what is derived from them, loaded once at start-up from local directories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lr_backend.config import LoopConfig
from lr_backend.errors import CheckpointError, ConfigError
from lr_backend.loop.assemble import Models
from lr_backend.steps.rules import StepRules, single_token
from lr_backend.verify.judge_prompt import JudgePrompt, chat_template, judges_prefill, readable_step_tokens

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names, before and since transformers 5, of the tokenizer that does what ``tokenizer.json`` says and nothing else."""


def load_tokenizer(directory: Path) -> Any:
    """A Hugging Face tokenizer from a checkpoint directory; nothing is downloaded and no code of the checkpoint is run.

    Raises:
        CheckpointError: there is none.
    """
    if not (directory / "tokenizer.json").exists() and not (directory / "tokenizer_config.json").exists():
        raise CheckpointError(f"{directory.name}: no tokenizer in the checkpoint directory")
    try:
        tokenizer = _class_for(directory).from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory.name}: the tokenizer cannot be loaded: {error}") from error
    # Up to transformers 4 this took blanks out of what was decoded (" !" became "!"), of code as well. Llama 3 has it on.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _class_for(directory: Path) -> Any:
    """The class that the checkpoint itself names where that is the plain one; else transformers looks for it, and loads torch."""
    config = directory / "tokenizer_config.json"
    named = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    whole = (directory / "tokenizer.json").exists() and "auto_map" not in named
    if whole and named.get("tokenizer_class") in _PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def end_ids(tokenizer: Any, directory: Path) -> list[int]:
    """Every token that ends an answer: the tokenizer's own and those of ``generation_config.json``."""
    ids = {tokenizer.eos_token_id}
    path = directory / "generation_config.json"
    if path.exists():
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [named])
    return sorted(token for token in ids if token is not None)


def load_models(config: LoopConfig) -> Models:
    """What the loop needs to know about the models: vocabularies and prompts; and the deployment's own parts.

    Raises:
        CheckpointError: a tokenizer cannot be loaded, or its chat template refuses a plain question.
        ConfigError: a plug-in or the auditor's checker cannot be made, or a marker of the reasoning is not one token.
    """
    checker = config.audit.load_checker(config.root)
    own = config.make_parts()
    tokenizer = load_tokenizer(config.tokenizer_dir)
    judge_tokenizer = load_tokenizer(config.judge_tokenizer_dir)
    _require_template(tokenizer)
    _require_marks(config, tokenizer)
    rules = StepRules.from_tokenizer(
        tokenizer,
        end_ids(tokenizer, config.tokenizer_dir),
        segmenter=own.segmenter,
        think_open=config.think_open,
        think_close=config.think_close,
        markers=config.markers,
    )
    prompt = JudgePrompt.from_tokenizer(
        judge_tokenizer,
        max_step_tokens=readable_step_tokens(config.limits.max_step_tokens),
        prefill=judges_prefill(judge_tokenizer),
    )
    if config.judge_seq_len is not None:
        prompt = replace(prompt, max_tokens=config.judge_seq_len - 1)  # a verdict is a token
    return Models(rules, tokenizer, prompt, judge_tokenizer, own.verifiers, own.proposers, checker)


def _require_template(tokenizer: Any) -> None:
    """It can be rendered, if with a turn of the system: else every chat would be refused.

    Raises:
        CheckpointError: it cannot.
    """
    question, system = {"role": "user", "content": "?"}, {"role": "system", "content": "?"}
    faults = []
    for chat in ([question], [system, question]):
        try:
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return
        except Exception as error:  # templates raise whatever they like
            faults.append(error)
    raise CheckpointError(f"the target's chat template refuses a plain question: {faults[0]}") from faults[0]


def _require_marks(config: LoopConfig, tokenizer: Any) -> None:
    """A marker that the spec names, or that the chat template writes, is one token; else nothing would end the reasoning, and the
    final answer would be accepted for its meaning.

    Raises:
        ConfigError: naming one that is not.
    """
    template = chat_template(tokenizer)
    for name, text in (("think_open", config.think_open), ("think_close", config.think_close)):
        if text and (name in config.model_fields_set or text in template) and single_token(tokenizer, text) is None:
            raise ConfigError(
                f"lookahead.{name}: {text!r} is not one token of the target's, so steps cannot tell the reasoning by it; with"
                ' both markers "" they are speculated over the whole answer'
            )
