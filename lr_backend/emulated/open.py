"""Opening an engine by its settings: the embedded one, or one at some pace in front of it."""

from __future__ import annotations

from dataclasses import replace

from lr_backend.emulated.engine import PacedEngine
from lr_backend.emulated.model_source import ModelSource
from lr_backend.hardware.cost import Iteration
from lr_backend.torch_engine.config import EngineConfig
from lr_backend.torch_engine.engine import TorchEngine


def open_engine(config: EngineConfig) -> TorchEngine | PacedEngine:
    """The engine of these settings.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: a setting cannot be kept, or there is no profile of the pace.
    """
    if config.pace is None:
        return TorchEngine(config)
    pace = config.pace
    token_s = pace.costs().seconds(Iteration((), 1, 1))  # what is missing is said before a model is loaded
    source = ModelSource(replace(config, pace=None), token_s)
    try:
        return PacedEngine(config, pace, source, source.engine.spec.vocab_size)
    except BaseException:
        source.close()
        raise
