"""Everything that one request's loop is made of, put together in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from lr_backend.audit.desk import AuditDesk, RequestAudit
from lr_backend.clock import running_clock
from lr_backend.config import Checker, LoopConfig
from lr_backend.contract import IntArray
from lr_backend.engine import Engine, Role, Sampling
from lr_backend.errors import InvalidRequest
from lr_backend.loop.answer import Answer, Emit
from lr_backend.loop.ledger import Ledger, MeteredEngine
from lr_backend.loop.loop import LookaheadLoop
from lr_backend.loop.seeds import Seeds
from lr_backend.loop.writer import DraftTokens, StepWriter
from lr_backend.policy.policy import Fixed, Learned, Measured
from lr_backend.propose import DraftModel, DraftSource, NGram
from lr_backend.request import LookaheadRequest, Mode, ProposerName, VerifierName
from lr_backend.steps.rules import StepRules
from lr_backend.steps.step import StepTokenizer
from lr_backend.steps.text import TextStream
from lr_backend.verify import VerifierParts, make_verifier
from lr_backend.verify.judge_prompt import JudgePrompt
from lr_backend.verify.similarity import Embedder


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
    embedder: Embedder | None = None
    checker: Checker | None = None


def assemble(
    request: LookaheadRequest,
    prompt_ids: IntArray,
    request_id: str,
    engines: Engines,
    models: Models,
    config: LoopConfig,
    emit: Emit,
    policy: Learned | None = None,
    audits: AuditDesk | None = None,
) -> LookaheadLoop:
    """The loop that answers one request.

    Args:
        prompt_ids: the rendered prompt, shape [N].
        emit: receives committed text in order; must not block.
        policy: what the server has learned, shared by its requests; None: this request's own.
        audits: the server's desk for audits; None: nothing is audited.

    Raises:
        InvalidRequest: this server lacks what the request's mode, its verifier, its proposer or its audits need.
    """
    limits, timeouts = config.limits, config.timeouts
    clock = running_clock()
    policy = policy or Learned(clock)
    ledger = Ledger(clock, len(prompt_ids), traced=request.trace)
    patient = request.deterministic
    target = MeteredEngine(engines.target, Role.TARGET, ledger, timeout_s=timeouts.target_s)
    draft = MeteredEngine(engines.draft, Role.DRAFT, ledger, timeout_s=None if patient else timeouts.draft_s)
    judge = MeteredEngine(engines.judge, Role.JUDGE, ledger, timeout_s=None)

    _require_coupled_noise(request, config)
    judges = request.mode.speculates_steps and request.effective_verifier is not VerifierName.EXACT
    # A draft with a temperature of its own is to differ from the target, where drafted steps are accepted for their meaning.
    coupled = config.coupled_noise and (config.draft_temperature is None or not judges)
    seeds = Seeds(request.seed, coupled=coupled, by_step=judges)
    num_engine_drafts = _num_engine_drafts(request, config)
    chooses = request.mode.chooses and not request.deterministic
    most = _num_tokens_ahead(request, config)
    most = policy.num_draft_tokens(request.proposer, most) if chooses else most
    draft_tokens = _draft_tokens(request, config, engines.draft, ledger, request_id, seeds, most)
    writer = partial(StepWriter, sampling=request.sampling, seeds=seeds, request_id=request_id, ledger=ledger)
    target_writer = writer(target, Role.TARGET, draft_tokens=draft_tokens, num_engine_drafts=num_engine_drafts)
    draft_writer = writer(draft, Role.DRAFT)

    parts = VerifierParts(target, judge, models.tokenizer, models.judge_prompt, models.judge_tokenizer, models.embedder)
    unmetered = replace(parts, target=engines.target, judge=engines.judge)
    audit = RequestAudit(request, audits, lambda: make_verifier(request, config, unmetered))
    max_depth = min(request.max_depth, limits.max_depth) if request.mode.speculates_steps else 0
    can_draft = draft_tokens is not None or num_engine_drafts > 0
    request_policy = (
        Measured(request, policy, max_depth, request.effective_verifier, can_draft)
        if chooses
        else Fixed(request, policy, max_depth, can_draft)
    )
    text = TextStream(models.tokenizer, request.stop)
    max_tokens = min(request.max_tokens, limits.max_tokens)
    answer = Answer(prompt_ids, max_tokens, models.rules, text, models.tokenizer, ledger, emit, traced=request.trace)
    return LookaheadLoop(
        request=request,
        request_id=request_id,
        config=config,
        rules=models.rules,
        answer=answer,
        ledger=ledger,
        target=target_writer,
        draft=draft_writer,
        draft_sampling=_draft_sampling(request, config),
        verifier=make_verifier(request, config, parts),
        audit=audit,
        policy=request_policy,
        shared=policy,
    )


def _require_coupled_noise(request: LookaheadRequest, config: LoopConfig) -> None:
    """Raises: InvalidRequest: sampled text that does not depend on how it was speculated, of engines that cannot write it."""
    if request.mode is Mode.LOSSLESS and not request.sampling.greedy and (missing := config.lacks("lossless")) is not None:
        raise InvalidRequest("mode", request.mode.value, missing)


def _num_tokens_ahead(request: LookaheadRequest, config: LoopConfig) -> int:
    """Draft tokens for one pass of the target, at most; 0 in a mode that has none."""
    return min(request.num_draft_tokens, config.limits.max_draft_len) if request.mode.speculates_tokens else 0


def _num_engine_drafts(request: LookaheadRequest, config: LoopConfig) -> int:
    """Tokens that the target's engine may draft by itself for each of its passes.

    Raises:
        InvalidRequest: this server's engine cannot.
    """
    if request.proposer is not ProposerName.ENGINE:
        return 0
    if (missing := config.lacks(request.proposer)) is not None:
        raise InvalidRequest("proposer", request.proposer.value, missing)
    return _num_tokens_ahead(request, config)


def _draft_tokens(
    request: LookaheadRequest, config: LoopConfig, draft: Engine, ledger: Ledger, request_id: str, seeds: Seeds, most: int
) -> DraftTokens | None:
    sampled_off = config.draft_logits == "off" and not request.sampling.greedy
    if most == 0 or sampled_off or request.proposer is ProposerName.ENGINE:
        return None
    one_hot_vocab = config.vocab_size if config.draft_logits == "one_hot" else 0
    return DraftTokens(_source(request, config, draft, ledger, request_id, seeds, most), most, one_hot_vocab)


def _source(
    request: LookaheadRequest, config: LoopConfig, draft: Engine, ledger: Ledger, request_id: str, seeds: Seeds, most: int
) -> DraftSource:
    if request.proposer is ProposerName.NGRAM:
        return NGram()
    timeout_s = None if request.deterministic else config.timeouts.draft_s
    return DraftModel(
        engine=MeteredEngine(draft, Role.DRAFT, ledger, timeout_s=timeout_s, drafts_tokens=True),
        sampling=_sampling_of_draft_tokens(request.sampling, seeds.coupled),
        request_id=request_id,
        seed=seeds.draft_tokens,
        tokens_a_call=most,
        available=lambda: "draft" not in ledger.degraded,
        failed=lambda: ledger.degrade("draft"),
        proposed=ledger.draft_tokens_verified,
        patient=request.deterministic,
    )


def _sampling_of_draft_tokens(asked: Sampling, coupled: bool) -> Sampling:
    """Where the noise is the target's the draft draws with it. Elsewhere its best guess is right most often: however it was
    drawn, the target accepts x with its own p(x)."""
    return asked if coupled else replace(asked, temperature=0.0)


def _draft_sampling(request: LookaheadRequest, config: LoopConfig) -> Sampling:
    """Of the first drafted step after a prefix."""
    asked, temperature = request.sampling, config.draft_temperature
    if temperature is None or (config.coupled_noise and request.effective_verifier is VerifierName.EXACT):
        return asked
    return replace(asked, temperature=min(temperature, asked.temperature))
