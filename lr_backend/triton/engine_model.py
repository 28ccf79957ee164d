"""The torch engine as a Triton Python model behind the ``tensorrt_llm`` tensor contract.

``execute`` only hands requests over; the engine's thread answers each later through its response sender, exactly once. So
requests of one model instance are batched in flight although the model is not decoupled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from lr_backend.errors import Cancelled, EngineRejected, EngineUnavailable, InvalidRequest, LookaheadError, Overloaded
from lr_backend.torch_engine.config import EngineConfig
from lr_backend.torch_engine.engine import TorchEngine
from lr_backend.torch_engine.request import EngineRequest, EngineResponse
from lr_backend.triton.engine_metrics import EngineMetrics

REQUIRED_OUTPUTS = ("output_ids", "sequence_length")


def engine_config(model_config: Mapping[str, Any], model_dir: Path) -> EngineConfig:
    """Engine settings from a parsed ``config.pbtxt``: its parameters and ``max_batch_size``.

    A relative ``gpt_model_path`` is taken from the model's folder.

    Raises:
        ConfigError: naming what is wrong.
    """
    parameters = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    path = parameters.get("gpt_model_path", "")
    if path and not path.startswith("${"):
        parameters["gpt_model_path"] = str(model_dir / path)
    defaults: dict[str, Any] = {}
    if int(model_config.get("max_batch_size", 0)) > 0:
        defaults["max_batch_size"] = int(model_config["max_batch_size"])
    return EngineConfig.from_parameters(parameters, **defaults)


class TritonPythonModel:
    """One engine; Triton loads one instance of it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine. A failure here keeps the model from becoming ready."""
        model_config = json.loads(args["model_config"])
        model_dir = Path(args.get("model_repository", "."))
        try:
            if (model_config.get("model_transaction_policy") or {}).get("decoupled"):
                raise InvalidRequest("decoupled", True, "the engine sends one response a request: decoupled must be false")
            self._config = engine_config(model_config, model_dir)
            self._engine = TorchEngine(self._config)
        except LookaheadError as error:
            raise pb_utils.TritonModelException(error.public()) from error
        self._metrics = EngineMetrics(pb_utils.MetricFamily, args["model_name"], self._engine.stats)

    def execute(self, requests: Sequence[Any]) -> None:
        """Queue requests; returns at once."""
        for request in requests:
            self._enqueue(request)
        self._metrics.touch()

    def finalize(self) -> None:
        """Fail what is in flight, and wait for the threads."""
        self._engine.close()
        self._metrics.close()

    def _enqueue(self, request: Any) -> None:
        sender = request.get_response_sender()
        wanted = frozenset(request.requested_output_names())

        def on_done(result: EngineResponse | LookaheadError) -> None:
            sender.send(_response(result, wanted), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self._metrics.touch()

        try:
            parsed = self._parse(request)
            if not parsed.stop:
                _check_wanted(wanted)
            self._engine.submit(parsed, on_done)
        except LookaheadError as error:
            on_done(error)
        except Exception as error:
            on_done(LookaheadError(f"{type(error).__name__}: {error}"))

    def _parse(self, request: Any) -> EngineRequest:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        exclude_input = self._config.exclude_input_in_output
        return EngineRequest.from_tensors(request.request_id(), tensors, exclude_input=exclude_input)


def _check_wanted(wanted: frozenset[str]) -> None:
    """Upstream refuses a list of outputs without these two."""
    missing = [name for name in REQUIRED_OUTPUTS if wanted and name not in wanted]
    if missing:
        raise EngineRejected(f"{missing[0]}: must be among the requested outputs")


def _response(result: EngineResponse | LookaheadError, wanted: frozenset[str]) -> Any:
    if isinstance(result, LookaheadError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(result.public(), _status(result)))
    tensors = [pb_utils.Tensor(name, array) for name, array in result.tensors().items() if not wanted or name in wanted]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _status(error: LookaheadError) -> Any:
    """Triton's error code: the caller's fault, not now, or ours."""
    codes = pb_utils.TritonError
    if isinstance(error, EngineRejected | InvalidRequest):
        return codes.INVALID_ARG
    if isinstance(error, EngineUnavailable | Overloaded):
        return codes.UNAVAILABLE
    return codes.CANCELLED if isinstance(error, Cancelled) else codes.INTERNAL
