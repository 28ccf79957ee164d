"""Opening an engine by its settings: the embedded one, or one at some pace, in front of it or over scripted texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lr_backend.embedded.config import EngineConfig
from lr_backend.emulated.engine import PacedEngine
from lr_backend.emulated.feed import TextSource
from lr_backend.emulated.texts import Script
from lr_backend.emulated.vocabulary import VOCABULARY
from lr_backend.errors import ConfigError
from lr_backend.hardware.cost import Iteration

if TYPE_CHECKING:
    from lr_backend.embedded.engine import EmbeddedEngine


def open_engine(config: EngineConfig) -> EmbeddedEngine | PacedEngine:
    """The engine of these settings.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: a setting cannot be kept, or there is no profile of the pace.
    """
    if config.pace is None:
        if config.script is not None:
            raise ConfigError("script: scripted texts have no pace of their own; give one")
        from lr_backend.embedded.engine import EmbeddedEngine  # torch, which scripted texts have no use for

        return EmbeddedEngine(config)
    pace = config.pace
    token_s = pace.costs().seconds(Iteration((), 1, 1))  # what is missing is said before a model is loaded
    source, vocab_size = _source(config, token_s)
    try:
        return PacedEngine(config, pace, source, vocab_size)
    except BaseException:
        source.close()
        raise


def _source(config: EngineConfig, token_s: float) -> tuple[TextSource, int]:
    """Who writes the texts, and of how many tokens the vocabulary is."""
    if config.script is not None:
        return Script.from_json(config.script).source(), len(VOCABULARY)
    from lr_backend.emulated.model_source import ModelSource  # likewise

    models = ModelSource(config.model_copy(update={"pace": None}), token_s)
    return models, models.engine.spec.vocab_size
