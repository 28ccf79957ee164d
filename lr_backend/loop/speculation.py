"""How one request's target speculates by tokens: who proposes, how many at a time, at what cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from lr_backend.config import LoopConfig
from lr_backend.engine import Engine, Role, Sampling
from lr_backend.errors import InvalidRequest
from lr_backend.loop.ledger import Ledger, MeteredEngine
from lr_backend.loop.pace import Pace, Waiting
from lr_backend.loop.seeds import token_draft_seed
from lr_backend.loop.writer import TokenSpeculation
from lr_backend.propose import make_proposer
from lr_backend.propose.draft_length import DraftCosts
from lr_backend.propose.draft_model import DraftModel
from lr_backend.request import AwaitDraft, DraftLengthPolicy, LookaheadRequest, ProposerName


@dataclass(frozen=True)
class DraftWait:
    """Whether the target steps of a request wait for the drafted steps that they verify as token drafts."""

    policy: AwaitDraft
    measured: Waiting

    @classmethod
    def of(cls, request: LookaheadRequest, speculation: TokenSpeculation | None, measured: Waiting) -> Self:
        if speculation is None or request.proposer is ProposerName.NGRAM:
            return cls(AwaitDraft.NEVER, measured)
        # The draft model would otherwise be asked for the same tokens twice; and who is first must not decide on chunks.
        always = request.proposer is ProposerName.DRAFT_MODEL or request.deterministic
        return cls(AwaitDraft.ALWAYS if always else request.await_draft, measured)

    def choose(self) -> bool:
        """Whether the next target step waits."""
        return self.measured.choose() if self.policy is AwaitDraft.AUTO else self.policy is AwaitDraft.ALWAYS

    def wrote(self, waited: bool, seconds: float, num_tokens: int) -> None:
        """A target step of ``num_tokens`` took ``seconds``, from when it could have begun."""
        if self.policy is AwaitDraft.AUTO:
            self.measured.wrote(waited, seconds, num_tokens)


def token_speculation(
    request: LookaheadRequest, config: LoopConfig, draft: Engine, ledger: Ledger, request_id: str, pace: Pace
) -> TokenSpeculation | None:
    """What the request and the server's settings make of it; None: no token drafts.

    Args:
        draft: the draft's engine, not metered yet.
        pace: what the server has measured.
    """
    num_draft_tokens = num_tokens_ahead(request, config)
    if request.proposer is ProposerName.ENGINE:
        return None
    sampled_off = config.draft_logits == "off" and not request.sampling.greedy
    if num_draft_tokens == 0 or sampled_off:
        return None
    adaptive = request.draft_length is DraftLengthPolicy.AUTO
    by_draft = request.proposer is ProposerName.DRAFT_MODEL
    draft_model = _draft_model(request, config, draft, ledger, request_id, adaptive) if by_draft else None
    drafted_token = config.drafted_token_cost if by_draft else 0.0
    return TokenSpeculation(
        proposer=make_proposer(request.proposer, request.ngram_max, draft_model),
        num_draft_tokens=num_draft_tokens,
        costs=DraftCosts(config.verification_cost, config.verified_token_cost, drafted_token),
        adaptive=adaptive,
        remember=not request.deterministic,
        lately=None if request.deterministic else pace.verifications[request.proposer, request.mode],
        one_hot_vocab=config.vocab_size if config.draft_logits == "one_hot" else 0,
    )


def num_engine_drafts(request: LookaheadRequest, config: LoopConfig) -> int:
    """Tokens that the target's engine may guess by itself for each of its passes.

    Raises:
        InvalidRequest: this server's engine cannot.
    """
    if request.proposer is not ProposerName.ENGINE:
        return 0
    if (missing := config.lacks(request.proposer)) is not None:
        raise InvalidRequest("proposer", request.proposer.value, missing)
    return num_tokens_ahead(request, config)


def num_tokens_ahead(request: LookaheadRequest, config: LoopConfig) -> int:
    """Token drafts for one pass of the target, at most; 0 in a mode that has none."""
    return min(request.num_draft_tokens, config.limits.max_draft_len) if request.mode.speculates_tokens else 0


def _draft_model(
    request: LookaheadRequest, config: LoopConfig, draft: Engine, ledger: Ledger, request_id: str, adaptive: bool
) -> DraftModel:
    timeout_s = None if request.deterministic else config.timeouts.draft_s
    return DraftModel(
        engine=MeteredEngine(draft, Role.DRAFT, ledger, timeout_s=timeout_s, token_drafts=True),
        sampling=_sampling(request.sampling, config.draft_temperature),
        request_id=request_id,
        seed=partial(token_draft_seed, request.seed),
        available=lambda: "draft" not in ledger.degraded,
        failed=lambda: ledger.degrade("draft"),
        min_confidence=config.min_draft_confidence if adaptive else 0.0,
    )


def _sampling(asked: Sampling, draft_temperature: float | None) -> Sampling:
    """The draft's best guess where nothing else is configured: however it was drawn, the target accepts x with its own p(x)."""
    return replace(asked, temperature=min(draft_temperature or 0.0, asked.temperature))
