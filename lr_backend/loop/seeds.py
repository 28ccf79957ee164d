"""Seeds of engine calls, derived so that no two calls of a request share noise.

Equal inputs give equal seeds whatever the order of completions, which is what makes a run repeatable.
"""

from __future__ import annotations

from hashlib import blake2b

from lr_backend.engine import Role


def derive_seed(request_seed: int, token_offset: int, role: Role, sibling: int = 0) -> int:
    """A 63-bit seed for the call that writes from ``token_offset`` (absolute, prompt included) on.

    Draft and target never share noise (``role``), siblings differ, and the chunks of one step start at different offsets.
    """
    return _hash(f"{request_seed}/{token_offset}/{role.value}/{sibling}") >> 1


def token_draft_seed(request_seed: int, token_offset: int, sibling: int = 0) -> int:
    """As :func:`derive_seed`, for token drafts of the draft model: no noise shared with a drafted step from the same offset."""
    return _hash(f"{request_seed}/{token_offset}/token_draft/{sibling}") >> 1


def audit_draw(request_seed: int, token_offset: int) -> float:
    """A number in [0, 1) for the position at ``token_offset``, drawn apart from everything that is written there."""
    return (_hash(f"{request_seed}/{token_offset}/audit") >> 11) / 2**53


def _hash(text: str) -> int:
    """64 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
