"""How many examples a property is tried with where each of them costs whole answers on the virtual clock."""

from __future__ import annotations

from hypothesis import settings


def answers(num_examples: int = 25) -> settings:
    """So many in the default profile, and proportionally more in a thorough one."""
    default, asked = settings.get_profile("default").max_examples, settings().max_examples
    return settings(max_examples=max(1, num_examples * asked // default))


def tries(usual: int, thorough: int) -> int:
    """How often something is tried: ``thorough`` in the profile of that name (``--hypothesis-profile=thorough``)."""
    return thorough if settings.get_current_profile_name() == "thorough" else usual
