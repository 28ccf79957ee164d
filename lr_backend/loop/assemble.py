"""Everything that one request's loop is made of, put together in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from lr_backend.audit.desk import AuditDesk
from lr_backend.audit.request import RequestAudit
from lr_backend.clock import running_clock
from lr_backend.config import Checker, Limits, LoopConfig
from lr_backend.contract import IntArray
from lr_backend.engine import Engine, Role, Sampling
from lr_backend.errors import InvalidRequest
from lr_backend.loop.answer import Answer, Emit, TokenBudget
from lr_backend.loop.ledger import Ledger, MeteredEngine
from lr_backend.loop.loop import LookaheadLoop
from lr_backend.loop.seeds import Seeds
from lr_backend.loop.writer import DraftTokens, StepWriter
from lr_backend.policy.policy import Learned, Measured, RequestPolicy
from lr_backend.propose import DraftModel, Lookup, NGram, Proposer
from lr_backend.request import LookaheadRequest, ProposerName, VerifierName
from lr_backend.steps.rules import StepRules
from lr_backend.steps.step import StepTokenizer
from lr_backend.steps.text import CONTEXT_TOKENS, TextStream
from lr_backend.verify import VerifierParts, VerifierPlugIn, make_verifier
from lr_backend.verify.judge_prompt import JudgePrompt

PROPOSE_S = 1.0
"""A proposer has so long for an answer. The target waits for it, and the next step of the request too."""
UPSTREAM_BLOCK = 256
"""Threads of a block in TensorRT-LLM's sampling by ``top_p``."""
LEAST_SUM = 0.99
"""Of all probabilities in FP16: each of 151,936 small ones may lose 3e-8, and a large one 2.4e-4."""


@dataclass(frozen=True)
class Engines:
    """The three models. Draft and judge may be down; then the target answers alone."""

    target: Engine
    draft: Engine
    judge: Engine


@dataclass(frozen=True)
class Models:
    """What is known about the models beside their engines: built once, shared by all requests."""

    rules: StepRules
    tokenizer: StepTokenizer
    judge_prompt: JudgePrompt
    judge_tokenizer: StepTokenizer
    verifiers: Mapping[str, VerifierPlugIn] = field(default_factory=dict)
    proposers: Mapping[str, Proposer] = field(default_factory=dict)
    checker: Checker | None = None


@dataclass(frozen=True)
class Server:
    """What the requests of one server share.

    Attributes:
        learned: what the server has learned from its requests.
        audits: the desk for audits; None: nothing is audited.
    """

    engines: Engines
    models: Models
    config: LoopConfig
    learned: Learned = field(default_factory=lambda: Learned(running_clock()))
    audits: AuditDesk | None = None


def assemble(request: LookaheadRequest, prompt_ids: IntArray, request_id: str, server: Server, emit: Emit) -> LookaheadLoop:
    """The loop that answers one request.

    Args:
        prompt_ids: the rendered prompt, shape [N].
        emit: receives committed text in order; must not block.

    Raises:
        InvalidRequest: this server lacks what the request's mode, its verifier, its proposer or its audits need.
    """
    config, models = server.config, server.models
    limits = config.limits
    _require(request, config, models.rules)
    request = _within(request, limits)
    ledger = Ledger(running_clock(), len(prompt_ids), traced=request.trace)
    metered = _metered(server.engines, request, config, ledger)

    judges = request.mode.speculates_steps and request.effective_verifier != VerifierName.EXACT
    # A draft with a temperature of its own is to differ from the target, where drafted steps are accepted for their meaning.
    coupled = config.coupled_noise and (config.draft_temperature is None or not judges)
    seeds = Seeds(request.seed, coupled=coupled, by_step=judges)

    def draft_failed() -> None:
        ledger.degrade("draft")
        policy.lose_draft()

    def proposer_failed() -> None:
        policy.lose_draft_tokens()

    draft_tokens = _draft_tokens(request, server, ledger, request_id, seeds, draft_failed, proposer_failed)
    num_engine_drafts = _most_draft_tokens(request, config) if request.proposer == ProposerName.ENGINE else 0
    writer = partial(StepWriter, sampling=request.sampling, seeds=seeds, request_id=request_id, ledger=ledger)

    # Before the policy, which keeps what it learns by the verifier's name: a client may make one up.
    verifier = make_verifier(request, config, verifier_parts(metered, request, server))
    can_draft = draft_tokens is not None or num_engine_drafts > 0
    policy = _policy(request, server, can_draft=can_draft)
    # A completion goes on with its prompt, in the middle of a line or a word; an answer begins a text of its own.
    goes_on = prompt_ids[-CONTEXT_TOKENS:].tolist() if request.raw else ()
    decoded = partial(TextStream, models.tokenizer, hidden_ids=models.rules.hidden_ids, goes_on=goes_on)
    text, steps_text = decoded(stop=request.stop), decoded() if request.trace else None
    budget = TokenBudget(min(request.max_tokens or limits.max_tokens, limits.max_tokens), request.thinking_token_budget)
    unmetered = verifier_parts(server.engines, request, server)
    return LookaheadLoop(
        request=request,
        request_id=request_id,
        config=config,
        rules=models.rules,
        answer=Answer(prompt_ids, budget, models.rules, text, models.tokenizer, ledger, emit, steps_text),
        ledger=ledger,
        target=writer(metered.target, Role.TARGET, draft_tokens=draft_tokens, num_engine_drafts=num_engine_drafts),
        draft=writer(metered.draft, Role.DRAFT),
        draft_sampling=_draft_sampling(request, config),
        verifier=verifier,
        audit=RequestAudit(request, server.audits, lambda: make_verifier(request, config, unmetered)),
        policy=policy,
    )


def verifier_parts(engines: Engines, request: LookaheadRequest, server: Server) -> VerifierParts:
    """What the verifier of a request asks."""
    config, models = server.config, server.models
    return VerifierParts(
        engines.target,
        engines.judge,
        models.tokenizer,
        models.judge_prompt,
        models.judge_tokenizer,
        judge_s=None if request.deterministic else config.timeouts.judge_s,
        think_open=config.think_open,
        think_close=config.think_close,
        plug_ins=models.verifiers,
    )


def _require(request: LookaheadRequest, config: LoopConfig, rules: StepRules) -> None:
    """Raises: InvalidRequest: a proposer, a mode or an end of the reasoning that this server has not."""
    if (missing := config.lacks_proposer(request.proposer)) is not None:
        raise InvalidRequest("proposer", request.proposer, missing)
    if (missing := config.lacks_mode(request.mode, greedy=request.sampling.greedy)) is not None:
        raise InvalidRequest("mode", request.mode.value, missing)
    if request.thinking_token_budget is not None and rules.think_close_id is None:
        raise InvalidRequest("thinking_token_budget", request.thinking_token_budget, "the target marks no end of its reasoning")


def _within(request: LookaheadRequest, limits: Limits) -> LookaheadRequest:
    """The request with the window that it gets here, as its trace has it too."""
    # Greedy siblings would be the same step over again.
    width = 1 if request.sampling.greedy else min(request.width, limits.max_width)
    return request.model_copy(update={"width": width, "max_depth": min(request.max_depth, limits.max_depth)})


def _metered(engines: Engines, request: LookaheadRequest, config: LoopConfig, ledger: Ledger) -> Engines:
    """The engines with every call counted, and ended where it takes too long."""
    timeouts, most = config.timeouts, config.limits.max_step_tokens
    return Engines(
        target=MeteredEngine(engines.target, Role.TARGET, ledger, timeout_s=timeouts.target_s, max_step_tokens=most),
        draft=MeteredEngine(engines.draft, Role.DRAFT, ledger, timeout_s=None if request.deterministic else timeouts.draft_s),
        judge=MeteredEngine(engines.judge, Role.JUDGE, ledger, timeout_s=None),  # the verifier's own limit holds
    )


def _chooses(request: LookaheadRequest) -> bool:
    return request.mode.chooses and not request.deterministic


def _policy(request: LookaheadRequest, server: Server, *, can_draft: bool) -> RequestPolicy:
    """``can_draft``: there are draft tokens to be had."""
    config, learned = server.config, server.learned
    max_depth = request.max_depth if request.mode.speculates_steps else 0
    if not _chooses(request):
        return RequestPolicy(request, learned, max_depth, can_draft=can_draft)
    verifier, must_draft = request.effective_verifier, config.engine_always_drafts
    return Measured(request, learned, max_depth, verifier, must_draft, can_draft=can_draft)


def _most_draft_tokens(request: LookaheadRequest, config: LoopConfig) -> int:
    """Draft tokens for one pass of the target, at most; 0 in a mode that has none."""
    return min(request.num_draft_tokens, config.limits.max_draft_len) if request.mode.speculates_tokens else 0


def _draft_tokens(
    request: LookaheadRequest,
    server: Server,
    ledger: Ledger,
    request_id: str,
    seeds: Seeds,
    draft_failed: Callable[[], None],
    proposer_failed: Callable[[], None],
) -> DraftTokens | None:
    """Where draft tokens come from that the loop hands over; None: there are none, or the engine writes its own."""
    config = server.config
    most = _most_draft_tokens(request, config)
    if most == 0 or request.proposer == ProposerName.ENGINE or not verifies_draft_tokens(config, request.sampling):
        return None
    learned = server.learned.draft_length[request.proposer]
    most = learned.best(most) if _chooses(request) else most
    one_hot_vocab = config.vocab_size if config.draft_logits == "one_hot" else 0
    timeout_s = None if request.deterministic else config.timeouts.draft_s
    if request.proposer == ProposerName.NGRAM:
        return DraftTokens(Lookup(NGram()), most, one_hot_vocab)
    if request.proposer != ProposerName.DRAFT_MODEL:
        proposer, num_ids = server.models.proposers[request.proposer], server.models.rules.num_ids
        lookup = Lookup(proposer, num_ids, timeout_s and min(timeout_s, PROPOSE_S), proposer_failed)
        return DraftTokens(lookup, most, one_hot_vocab)
    # What pays depends on time.
    first = most if request.deterministic else learned.first(most)
    source = DraftModel(
        engine=MeteredEngine(server.engines.draft, Role.DRAFT, ledger, timeout_s=timeout_s, drafts_tokens=True),
        sampling=_sampling_of_draft_tokens(request.sampling, seeds.coupled),
        request_id=request_id,
        seed=seeds.draft_tokens,
        tokens_a_call=most,
        tokens_first=first,
        available=lambda: not ledger.draft_failed,
        failed=draft_failed,
        follows_drafted=seeds.coupled or _draft_sampling(request, config).greedy,
        proposed=ledger.draft_tokens_verified,
        patient=request.deterministic,
        num_ids=server.models.rules.num_ids,
    )
    return DraftTokens(source, most, one_hot_vocab)


def verifies_draft_tokens(config: LoopConfig, asked: Sampling) -> bool:
    """Whether the target's engine may be given draft tokens where tokens are drawn so.

    With logits, TensorRT-LLM lists the tokens that may be drawn, and ends a list with -1. A list of all tokens it ends in the
    next request's list, unless the vocabulary is a multiple of its block: that request then never draws its likeliest token
    (samplingTopPKernels.cu, ``topPSsampling``). All are listed where probabilities, in FP16, do not add up to ``top_p``.
    """
    lists_all = asked.top_k == 0 and asked.top_p > LEAST_SUM
    if config.draft_logits == "none" or asked.greedy:
        return True
    return config.draft_logits == "one_hot" and not (lists_all and config.vocab_size % UPSTREAM_BLOCK)


def _sampling_of_draft_tokens(asked: Sampling, coupled: bool) -> Sampling:
    """Where the noise is the target's the draft draws with it. Elsewhere its likeliest token is right most often: however it was
    drawn, the target accepts x with its own p(x)."""
    return asked if coupled else replace(asked, temperature=0.0)


def _draft_sampling(request: LookaheadRequest, config: LoopConfig) -> Sampling:
    """Of the first drafted step after a prefix."""
    asked, temperature = request.sampling, config.draft_temperature
    if temperature is None or (config.coupled_noise and request.effective_verifier == VerifierName.EXACT):
        return asked
    return replace(asked, temperature=min(temperature, asked.temperature))
