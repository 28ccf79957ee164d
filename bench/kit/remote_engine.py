"""An engine behind any Triton, over gRPC: the contract's tensors from outside the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from lr_backend.errors import EngineError, EngineRejected, EngineUnavailable, Overloaded
from lr_backend.triton.bls_engine import Arrays, BlsEngine, CallGate

KINDS: dict[str, type[EngineError]] = {
    "StatusCode.INVALID_ARGUMENT": EngineRejected,
    "StatusCode.UNIMPLEMENTED": EngineRejected,
    "StatusCode.UNAVAILABLE": EngineUnavailable,
}


def grpc_inputs(arrays: Mapping[str, npt.NDArray[Any]]) -> list[grpcclient.InferInput]:
    """Named arrays as a client sends them."""
    tensors = []
    for name, array in arrays.items():
        tensors.append(grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


class RemoteEngine:
    """One model of a server as an :class:`~lr_backend.engine.Engine`, with the cancellation of the engines behind BLS."""

    def __init__(self, url: str, model_name: str, *, tokens_per_block: int = 32, max_in_flight_calls: int = 64) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        gate = CallGate(max_in_flight_calls)
        self._engine = BlsEngine(model_name, self._infer, gate, tokens_per_block=tokens_per_block)
        self.generate = self._engine.generate

    async def close(self) -> None:
        await self._engine.close()
        await self._client.close()

    async def _infer(
        self, model_name: str, request_id: str, inputs: Arrays, wanted: tuple[str, ...]
    ) -> dict[str, npt.NDArray[Any]]:
        outputs = [grpcclient.InferRequestedOutput(name) for name in wanted]
        try:
            response = await self._client.infer(model_name, grpc_inputs(inputs), outputs=outputs, request_id=request_id)
        except InferenceServerException as error:
            text = str(error)
            kind = EngineError if Overloaded.code in text else KINDS.get(str(error.status()), EngineError)
            raise kind(text) from error
        arrays = {name: response.as_numpy(name) for name in wanted}
        return {name: array for name, array in arrays.items() if array is not None}
