"""Numbers from Python to the device. To a GPU they go through page-locked memory, so that nobody waits for the copy."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

Values = Items[Any]
"""Numbers, or equally long rows of them."""


def to_device(values: Values, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of ``values`` on ``device``; without a ``dtype``, int64 of integers and float32 of others."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return _staged(values, dtype).to(device, non_blocking=True)


def integers_to_device(lists: Items[list[int]], device: torch.device) -> Items[Tensor]:
    """One int64 tensor a list on ``device``; to a GPU they travel as one."""
    if device.type == "cpu":
        return [torch.tensor(values, dtype=torch.int64) for values in lists]
    joined = to_device([value for values in lists for value in values], device, torch.int64)
    return torch.split(joined, [len(values) for values in lists])


def to_host(*tensors: Tensor) -> Items[list[int]]:
    """The numbers of equally long integer tensors; from a GPU they travel as one."""
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    together: list[list[int]] = torch.stack(tensors).tolist()
    return together


def refill(target: Tensor, values: Values) -> None:
    """Overwrite ``target`` with ``values`` of its shape."""
    if target.device.type == "cpu":
        target.copy_(torch.tensor(values, dtype=target.dtype))
    else:
        target.copy_(_staged(values, target.dtype), non_blocking=True)


def _staged(values: Values, dtype: torch.dtype | None) -> Tensor:
    """Page-locked memory; torch's allocator hands it out again only after the copies from it are done."""
    return torch.tensor(values, dtype=dtype, pin_memory=True)
