"""The one tokenizer of the three demo models: byte-level BPE with the Qwen pre-tokenizer, trained on the demo world.

As with Qwen3, digits are single tokens and punctuation keeps the newlines that follow it, so the step delimiter hides
inside tokens such as ``".\\n\\n"``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo.problems import problems
from lr_backend.verify.judge_prompt import ALIGNED, SYSTEM_TEXT, TASK_TEXT, UNALIGNED

VOCABULARY = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
CONTEXT = 2048

PRE_TOKENIZER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def chat(question: str) -> str:
    """The prompt of one question, up to and including the line that opens the assistant turn."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def _corpus(documents: int, seed: int) -> Iterator[str]:
    """Problems, and the judge's words often enough to earn tokens of their own."""
    judge = f"system\n{SYSTEM_TEXT}\nuser\n{TASK_TEXT}\n<step 1>\n\n</step 1>\n<step 2>\n\n</step 2>\nassistant\n"
    for problem in islice(problems(seed, slip_rate=0.05), documents):
        yield f"user\n{problem.question}\nassistant\n"
        yield from re.split(f"{THINK}|{END_THINK}", problem.completion)
        yield judge
        yield from (ALIGNED, UNALIGNED, "[")


def train_tokenizer(documents: int = 20_000, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the shared tokenizer; at most ``VOCABULARY`` tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, TURN_START, TURN_END)]
    added += [AddedToken(text, special=False, normalized=False) for text in (THINK, END_THINK)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=20,
    )
    core.train_from_iterator(_corpus(documents, seed), trainer)
    core.add_tokens(added)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in ``directory``."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer
