"""Recorders of decode iterations that need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lr_backend.embedded.reference.decode_graphs import GraphSettings, Step

HOST_OPERATIONS = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select")
"""What a CUDA graph cannot hold: it asks the device for a number, or brings one from the host."""


class _Tape(TorchDispatchMode):
    """Writes down every kernel that runs, with the very tensors that it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class TapeRecorder:
    """What a CUDA graph is, on a CPU: the kernels of one run, on the memory of that run. No Python of the step runs again."""

    def __call__(self, step: Step) -> Step:
        step()
        tape = _Tape()
        with torch.inference_mode(), tape:
            logits = step()
        names = {str(call[0]) for call in tape.calls}
        assert not any(host in name for host in HOST_OPERATIONS for name in names), names

        def replay() -> Tensor:
            known: dict[int, Tensor] = {}

            def current(tensor: Tensor) -> Tensor:
                return known.get(id(tensor), tensor)

            with torch.inference_mode():
                for func, args, kwargs, before in tape.calls:
                    result = func(*tree_map_only(Tensor, current, args), **tree_map_only(Tensor, current, kwargs))
                    _pair(before, result, known)
            return current(logits)

        return replay


def _pair(before: Any, result: Any, known: dict[int, Tensor]) -> None:
    """What a kernel once gave stands for what it gives now."""
    if isinstance(before, Tensor):
        known[id(before)] = result
    elif isinstance(before, tuple | list):
        for one, other in zip(before, result, strict=True):
            _pair(one, other, known)


class BrokenRecorder:
    """Fails after the step has run, as a capture does."""

    def __call__(self, step: Step) -> Step:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")


def graphs(make_recorder: Callable[[], Any] = TapeRecorder, **changes: Any) -> GraphSettings:
    """Recording from the second use of a bucket on, of small buckets."""
    settings: dict[str, Any] = {"record_after": 1, "min_length": 8}
    return GraphSettings(make_recorder, **settings | changes)
