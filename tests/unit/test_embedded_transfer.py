"""Numbers to a device and back: the way to a GPU gives the same tensors as the way on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lr_backend.embedded.reference import transfer
from lr_backend.embedded.reference.transfer import integers_to_device, refill, to_device, to_host

CPU, META = torch.device("cpu"), torch.device("meta")
LISTS = [[1, 2, 3], [], [4]]


@pytest.fixture
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning needs a driver; the rest of the way does not."""
    monkeypatch.setattr(transfer, "_staged", lambda values, dtype: torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize(
    ("values", "dtype"), [([1, 2], None), ([0.5], None), ([[1], [2]], None), ([0.5], torch.float64), ([], torch.int64)]
)
def test_both_ways_have_one_type_and_shape(values: list[Any], dtype: torch.dtype | None, no_pinning: None) -> None:
    here, there = (to_device(values, device, dtype) for device in (CPU, META))
    assert (here.dtype, here.shape) == (there.dtype, there.shape)
    assert here.tolist() == values
    assert there.device == META


def test_lists_stay_apart(no_pinning: None) -> None:
    assert [one.tolist() for one in integers_to_device(LISTS, CPU)] == LISTS
    there = integers_to_device(LISTS, META)
    assert [(one.dtype, len(one), one.device) for one in there] == [(torch.int64, len(one), META) for one in LISTS]


def test_refilling_keeps_the_memory(no_pinning: None) -> None:
    target = torch.zeros(2, 3, dtype=torch.int64)
    address = target.data_ptr()
    refill(target, [[1, 2, 3], [4, 5, 6]])
    assert (target.tolist(), target.data_ptr()) == ([[1, 2, 3], [4, 5, 6]], address)
    refill(torch.zeros(2, 3, dtype=torch.int64, device=META), [[1, 2, 3], [4, 5, 6]])


def test_numbers_come_back_as_lists() -> None:
    assert to_host(torch.tensor([1, 2]), torch.tensor([3, 4])) == [[1, 2], [3, 4]]
