"""Settings that all tests share."""

import gc
import os
import sys

import pytest
import structlog
from hypothesis import settings

# Read when torch is loaded, so it stands before whatever loads it. Threads of torch that wait must not spin: the test's own
# process, the other one and their servers share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Deterministic by default, and no wall-time limit: machines are noisy.
settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("default")

LONGEST = (
    *("test_hostile_clients", "test_lookahead_server", "test_page", "test_server_lifecycle", "test_death_and_drain"),
    *("test_benches", "test_roles_apart", "test_two_machines", "test_sampler", "test_fair_shares", "test_policy", "test_fitting"),
    *("test_embedded_model", "test_embedded_memory", "test_service", "test_evaluation_scoring", "test_ablation"),
    *("test_same_text", "test_plan"),
)
"""Modules that take more than ten seconds, of those with servers and of the others."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, servers before all others: what is short then fills both processes evenly to the end."""

    def turn(item: pytest.Item) -> tuple[bool, int]:
        name = item.path.stem
        return item.get_closest_marker("integration") is None, LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """What all modules have imported stays: the collector need not look at it again for every few objects of a test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


SWITCH_INTERVAL_S = sys.getswitchinterval()


def pytest_runtest_teardown() -> None:
    """What a model of Triton sets for its whole process ends with the test that started it here."""
    structlog.reset_defaults()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
