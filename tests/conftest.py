"""Settings that all tests share."""

import gc

import pytest
from hypothesis import settings

# Deterministic by default, and no wall-time limit: machines are noisy.
settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("default")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first: their modules take longest, and what is short then fills both processes evenly to the end."""
    items.sort(key=lambda item: item.get_closest_marker("integration") is None)


def pytest_collection_finish() -> None:
    """What all modules have imported stays: the collector need not look at it again for every few objects of a test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
