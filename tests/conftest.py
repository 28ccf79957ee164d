"""Settings that all tests share."""

from hypothesis import settings

# Deterministic by default, and no wall-time limit: machines are noisy.
settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("default")
