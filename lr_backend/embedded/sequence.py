"""A request while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lr_backend.embedded.kv_cache import BlockTable, prefix_keys
from lr_backend.engine.request import EngineRequest, EngineResponse
from lr_backend.errors import LookaheadError

OnDone = Callable[[EngineResponse | LookaheadError], None]
"""Called once a request, from the engine's thread (or the closing one); must not block."""

OnTokens = Callable[["NewTokens"], None]
"""Called with what an iteration has brought to one request, from the engine's thread; must not block."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request, owned by the engine's thread after it was submitted.

    Attributes:
        order: number of arrival. Lower ones go first and are preempted last.
        tokens: prompt and output so far.
        drafts: the request's draft tokens, as far as they fit ``max_seq_len``.
        max_new_tokens: tokens of output, as far as they fit ``max_seq_len``.
        drafts_behind_prompt: whether the engine drafts already in the pass that computes the end of the prompt.
        num_proposed: draft tokens that the engine wrote.
        num_accepted: draft tokens that stood.
        num_computed: how many of ``tokens + drafts`` have keys and values in the pool.
        keys: chain keys of the full blocks of what was known when it was queued: the prompt, and after a preemption the output.
    """

    order: int
    request: EngineRequest
    on_done: OnDone
    drafts: tuple[int, ...]
    max_new_tokens: int
    tokens_per_block: int
    on_tokens: OnTokens | None = None
    drafts_behind_prompt: bool = True
    tokens: list[int] = field(init=False)
    keys: list[bytes] = field(init=False)
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    log_probs: list[float] = field(default_factory=list)
    num_proposed: int = 0
    num_accepted: int = 0
    num_reused: int = 0
    num_allocated_blocks: int = 0
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.input_ids)
        self.restart()

    def restart(self) -> None:
        """Start over in the queue: nothing is computed."""
        self.num_computed = 0
        self.keys = prefix_keys(self.tokens, self.tokens_per_block)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.input_ids)

    @property
    def is_verification(self) -> bool:
        """Whether it ends after one verification. ``drafts`` may be empty even so, if none of them fits."""
        return bool(self.request.draft_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that the engine may write in the next pass. The last token that is left is always the model's own."""
        if not (self.num_generated or self.drafts_behind_prompt):
            return 0
        return min(self.request.num_draft_tokens, self.max_new_tokens - self.num_generated - 1)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next output; 1 while it decodes."""
        return len(self.tokens) + len(self.drafts) - self.num_computed

    def pending(self, count: int) -> list[int]:
        """The next ``count`` tokens to compute."""
        start = self.num_computed
        known = self.tokens[start : start + count]
        if len(known) == count:
            return known
        first = max(0, start - len(self.tokens))
        return known + list(self.drafts[first : first + count - len(known)])

    def response(self) -> EngineResponse:
        return EngineResponse(
            request=self.request,
            token_ids=tuple(self.tokens[self.num_prompt_tokens :]),
            log_probs=tuple(self.log_probs),
            num_draft_tokens=len(self.drafts) + self.num_proposed,
            num_accepted_tokens=self.num_accepted,
            num_reused_tokens=self.num_reused,
            num_allocated_blocks=self.num_allocated_blocks,
            tokens_per_block=self.tokens_per_block,
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
        )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one sequence gained: at least one token, or none where its logits are not finite.

    Keys and values of all tokens but the last are in the pool.

    Attributes:
        log_probs: of the tokens, if the request wants them.
        num_accepted: how many of the tokens were draft tokens; with the engine's own, the tokens of each pass beyond one.
        num_proposed: draft tokens that the engine wrote for them.
    """

    sequence: Sequence
    token_ids: list[int]
    log_probs: list[float]
    num_accepted: int = 0
    num_proposed: int = 0
