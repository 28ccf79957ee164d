"""A tokenizer whose tokens are words that a test can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class WordTokenizer:
    """A tokenizer over a fixed list of words, with the Hugging Face methods that the project calls."""

    words: Sequence[str]
    special: frozenset[str] = frozenset({"<end>"})

    def __len__(self) -> int:
        return len(self.words)

    @property
    def all_special_ids(self) -> list[int]:
        return [index for index, word in enumerate(self.words) if word in self.special]

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        return {index: self.words[index] for index in self.all_special_ids}

    def encode(self, text: str, **_: Any) -> list[int]:
        """Greedy longest match; characters that no word begins with are dropped."""
        words = sorted(((word, index) for index, word in enumerate(self.words)), key=lambda pair: -len(pair[0]))
        ids: list[int] = []
        while text:
            word, index = next(((w, i) for w, i in words if text.startswith(w)), ("", -1))
            if index >= 0:
                ids.append(index)
            text = text[max(1, len(word)) :]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        words = [self.words[int(token)] for token in token_ids]
        return "".join(word for word in words if not (skip_special_tokens and word in self.special))

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.decode(ids, **options) for ids in sequences]

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **_: Any) -> str:
        return "".join(turn["content"] for turn in conversation)
