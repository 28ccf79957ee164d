"""The embedded engine as a Triton Python model behind the ``tensorrt_llm`` tensor contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from lr_backend.embedded.config import EngineConfig
from lr_backend.emulated.engine import PacedEngine
from lr_backend.emulated.open import open_engine
from lr_backend.errors import LookaheadError
from lr_backend.logs import configure
from lr_backend.triton.client_watch import CLIENT_LOOK_S, ClientWatch
from lr_backend.triton.contract_model import LOOP_KEY, ContractModel, model_parameters
from lr_backend.triton.engine_metrics import engine_metrics
from lr_backend.triton.threads import end_lightly, share_interpreter

if TYPE_CHECKING:
    from lr_backend.embedded.engine import EmbeddedEngine


def engine_config(args: Mapping[str, str]) -> EngineConfig:
    """Engine settings from what Triton gives a model. Engines that share cards meet on a file beside their models.

    Raises:
        ConfigError: naming what is wrong.
    """
    config = EngineConfig.from_parameters(model_parameters(args))
    if config.pace is None or not config.pace.cards:
        return config
    return config.model_copy(update={"pace": replace(config.pace, board=Path(args["model_repository"]).parent / BOARD)})


BOARD = "cards.board"
"""In a model repository: what its engines ask of the cards that they share."""


class TritonPythonModel(ContractModel):
    """One engine; Triton loads one instance of it."""

    pb = pb_utils
    _engine: EmbeddedEngine | PacedEngine

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine. A failure here keeps the model from becoming ready."""
        configure(knows_texts=False)
        share_interpreter()
        end_lightly()
        try:
            self._config = engine_config(args)
            self._engine = open_engine(self._config)
        except LookaheadError as error:
            raise pb_utils.TritonModelException(error.public()) from error
        self._exclude_input = self._config.exclude_input_in_output
        # The loop of this server cancels its calls by itself. One elsewhere may go away without a word.
        period_s = CLIENT_LOOK_S if LOOP_KEY is None else None
        if (pace := self._config.pace) is not None:
            self._fails_as_internal = pace.rules.fails_as_internal
            if (period_ms := pace.rules.cancellation_check_period_ms) is not None:
                period_s = pace.slow_motion * period_ms / 1e3
        if period_s is not None:
            self._watch = ClientWatch(period_s, self._engine.cancel)
        self._metrics = engine_metrics(pb_utils.MetricFamily, args["model_name"], self._engine.stats)
        self._watch_engine()
