"""The vocabulary of scripted texts, and its tokenizer.

A word of an answer is one token. How it ends says who wrote it: ``kito`` is the target's own, ``kito~`` a draft's that means the
same, ``kito?`` a draft's that means something else. Questions are read by characters, and the judge's instructions by words.

``tokenizer/`` beside this file holds the same for ``transformers``; ``python -m lr_backend.emulated.vocabulary`` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lr_backend.verify import judge_prompt

TOKENIZER_DIR = Path(__file__).with_name("tokenizer")
END, THINK, CLOSE, BREAK, USER, ASSISTANT, SYSTEM, UNALIGNED, ALIGNED = range(9)
NAMED = ("<end>", "<think>", "</think>", "\n\n", "<user>", "<assistant>", "<system>", "unaligned", "aligned")
SPECIAL = (END, USER, ASSISTANT, SYSTEM)
"""Not text: no answer shows them, and no question can hold them."""
FIRST_WORD = len(NAMED)
NUM_WORDS = 997
"""Of each kind: so many that no text repeats itself by chance."""
LIKE, UNLIKE = FIRST_WORD + NUM_WORDS, FIRST_WORD + 2 * NUM_WORDS
_SYLLABLES = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou")
_WORD = r" [a-z]{4}[~?]?(?![A-Za-z~?])"
_PIECES = rf"\n\n|</?think>|{_WORD}| ?[A-Za-z]+|[\s\S]"
"""What a text is cut into; a piece that is no token is read by its characters, and those that are none by their bytes."""
TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _tokens() -> tuple[str, ...]:
    pairs = (divmod(index * 9973 % 10_000, 100) for index in range(NUM_WORDS))  # all different, and none like its neighbour
    words = [f" {_SYLLABLES[first]}{_SYLLABLES[second]}" for first, second in pairs]
    spoken = [word + mark for mark in ("", "~", "?") for word in words]
    instructions = "".join(value for name, value in vars(judge_prompt).items() if name.endswith(("_TEXT", "_OPEN", "_CLOSE")))
    read = [piece for piece in re.findall(_PIECES, instructions) if len(piece) > 1]
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    numbered = [f"<0x{code:02X}>" for code in range(256)]
    return tuple(dict.fromkeys([*NAMED, *spoken, *characters, *read, *numbered]))


class Vocabulary:
    """The tokenizer in plain Python, with the methods of Hugging Face's that the project calls."""

    def __init__(self) -> None:
        self.words = _tokens()
        self._ids = {word: index for index, word in enumerate(self.words)}
        self._specials = re.compile("(" + "|".join(re.escape(self.words[token]) for token in SPECIAL) + ")")

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def all_special_ids(self) -> list[int]:
        return list(SPECIAL)

    @property
    def eos_token_id(self) -> int:
        return END

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        return {token: self.words[token] for token in SPECIAL}

    def encode(self, text: str, **_: Any) -> list[int]:
        """Token ids of a text."""
        parts = self._specials.split(text)
        return [token for index, part in enumerate(parts) for token in ([self._ids[part]] if index % 2 else self._read(part))]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        kept = (int(token) for token in token_ids if not (skip_special_tokens and int(token) in SPECIAL))
        return "".join(self.words[token] for token in kept)

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.decode(ids, **options) for ids in sequences]

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return turns + ("<assistant>" if add_generation_prompt else "")

    def _read(self, text: str) -> list[int]:
        found: list[int] = []
        for piece in re.findall(_PIECES, text):
            token = self._ids.get(piece)
            found += [token] if token is not None else [one for character in piece for one in self._character(character)]
        return found

    def _character(self, character: str) -> list[int]:
        token = self._ids.get(character)
        return [token] if token is not None else [self._ids[f"<0x{code:02X}>"] for code in character.encode()]


VOCABULARY = Vocabulary()


def tokenizer_files() -> dict[str, str]:
    """The same tokenizer as ``transformers`` reads it: file name to text."""
    specials = [
        {"id": token, "content": NAMED[token], "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token in SPECIAL
    ]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": True,
            "vocab": {word: index for index, word in enumerate(VOCABULARY.words)},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": NAMED[END],
        "additional_special_tokens": [NAMED[token] for token in SPECIAL if token != END],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=0) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
    }


if __name__ == "__main__":
    TOKENIZER_DIR.mkdir(exist_ok=True)
    for name, text in tokenizer_files().items():
        (TOKENIZER_DIR / name).write_text(text, encoding="utf-8")
