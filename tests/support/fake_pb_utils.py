"""A stand-in for ``triton_python_backend_utils``: what an engine's model uses of it, and requests that remember their answers."""

from __future__ import annotations

import threading
import types
from dataclasses import dataclass, field
from typing import Any

FINAL = 1


class StubTensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class StubError:
    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED"
    UNSUPPORTED = "UNSUPPORTED"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class StubResponse:
    def __init__(self, output_tensors: Any = (), error: StubError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class StubFamily:
    COUNTER, GAUGE = "counter", "gauge"
    values: dict[tuple[str, str], float] = {}  # noqa: RUF012
    kinds: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description
        self.name = name
        self.kinds[name] = kind

    def Metric(self, labels: dict[str, str]) -> StubFamily:
        self.key = (self.name, labels["role"])
        self.values[self.key] = 0.0
        return self

    def increment(self, value: float) -> None:
        assert self.kinds[self.name] == self.COUNTER
        assert value > 0
        self.values[self.key] += value

    def set(self, value: float) -> None:
        assert self.kinds[self.name] == self.GAUGE
        self.values[self.key] = value


class StubException(Exception):
    pass


@dataclass
class StubRequest:
    tensors: dict[str, Any]
    id: str = "a"
    wanted: tuple[str, ...] = ()
    answers: list[StubResponse] = field(default_factory=list)
    is_gone: bool = False
    num_asked: int = 0
    _answered: threading.Event = field(default_factory=threading.Event)

    def request_id(self) -> str:
        return self.id

    def inputs(self) -> list[StubTensor]:
        return [StubTensor(name, array) for name, array in self.tensors.items()]

    def requested_output_names(self) -> list[str]:
        return list(self.wanted)

    def get_response_sender(self) -> StubRequest:
        return self

    def send(self, response: StubResponse, flags: int) -> None:
        assert flags == FINAL
        self.answers.append(response)
        self._answered.set()

    def is_cancelled(self) -> bool:
        assert not self.answers, "Triton has forgotten it"
        self.num_asked += 1
        return self.is_gone

    def answer(self) -> StubResponse:
        assert self._answered.wait(30)
        (answer,) = self.answers
        return answer

    def error(self) -> StubError:
        error = self.answer().error
        assert error is not None
        return error


def stub_module() -> types.ModuleType:
    """To be found as ``triton_python_backend_utils``."""
    stub = types.ModuleType("triton_python_backend_utils")
    contents = {
        "Tensor": StubTensor,
        "TritonError": StubError,
        "InferenceResponse": StubResponse,
        "MetricFamily": StubFamily,
        "TritonModelException": StubException,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
    }
    for name, value in contents.items():
        setattr(stub, name, value)
    return stub
