"""The LLM API engine as a Triton Python model behind the ``tensorrt_llm`` tensor contract.

One instance, one process: which GPUs it sees is decided by its environment before TensorRT-LLM is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from lr_backend.errors import LookaheadError
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.engine import LlmApiEngine
from lr_backend.llmapi.environment import apply, engine_environment, own_packages
from lr_backend.llmapi.stats import DRAFT_COUNTERS, GAUGES, LlmApiStats
from lr_backend.llmapi.upstream import load_upstream, make_llm
from lr_backend.logs import configure
from lr_backend.triton.client_watch import CLIENT_LOOK_S, ClientWatch
from lr_backend.triton.contract_model import LOOP_KEY, ContractModel, model_parameters
from lr_backend.triton.engine_metrics import counters_of, engine_metrics


class TritonPythonModel(ContractModel):
    """One engine; Triton loads one instance of it."""

    pb = pb_utils
    _engine: LlmApiEngine

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine. A failure here keeps the model from becoming ready."""
        configure(knows_texts=False)
        try:
            self._config = LlmApiConfig.from_parameters(model_parameters(args))
            self._config.check_checkpoint()
            packages = own_packages()
            wanted = engine_environment(os.environ, self._config.gpu_device_ids, packages)
            apply(os.environ, wanted, sys.path, packages)
            upstream = load_upstream()
            self._engine = LlmApiEngine(self._config, make_llm(self._config, upstream), upstream.SamplingParams)
        except LookaheadError as error:
            raise pb_utils.TritonModelException(error.public()) from error
        self._exclude_input = self._config.exclude_input_in_output
        if LOOP_KEY is None:  # a step loop elsewhere may go away without a word
            self._watch = ClientWatch(CLIENT_LOOK_S, self._engine.cancel)
        counters = counters_of(LlmApiStats, GAUGES if self._config.drafts else (*GAUGES, *DRAFT_COUNTERS))
        self._metrics = engine_metrics(pb_utils.MetricFamily, args["model_name"], self._engine.stats, counters, GAUGES)
        self._watch_engine()
