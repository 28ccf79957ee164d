"""The server's settings for the step loop, checked when made; nothing else in the loop reads files or the environment.

The build renders them into ``lookahead/1/lookahead.json``; the ``lookahead`` model reads them at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from lr_backend.engine import Role
from lr_backend.errors import ConfigError, first_error
from lr_backend.plugins import NAME, PROPOSERS, REFERENCE, SEGMENTERS, VERIFIERS, PlugIn, load, offered, parts_of
from lr_backend.request import Mode, ProposerName, VerifierName
from lr_backend.steps.rules import CALL_MARKS
from lr_backend.steps.segment import Delimiter, Segmenter

PlugInName = Annotated[str, StringConstraints(pattern=NAME)]

CANCEL_RESERVE = 8
"""Threads that engine calls leave free, so that a cancel never waits behind what it is to stop."""


class Timeouts(BaseModel):
    """Seconds that one engine call of a role may take, and a whole request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_s: float = Field(default=120.0, gt=0)
    """For a step, which is long at worst by its cap. A call for n times as many tokens may take n times as long; past that the
    engine is taken for dead."""
    draft_s: float = Field(default=30.0, gt=0)
    """A draft this late is no use; the target's step stands."""
    judge_s: float = Field(default=5.0, gt=0)
    """One prefill and one token; doubt rejects."""
    request_s: float = Field(default=600.0, gt=0)
    """Upper limit of every request's deadline."""

    def in_slow_motion(self, factor: float) -> dict[str, float]:
        """Each so many times as long, by name."""
        return {name: factor * seconds for name, seconds in self.model_dump().items()}


class Limits(BaseModel):
    """Bounds that keep one request, and all of them together, from taking the server down."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_prompt_tokens: int = Field(default=1024, ge=1)
    max_tokens: int = Field(default=1024, ge=1)
    max_depth: int = Field(default=8, ge=0, le=16)
    max_width: int = Field(default=4, ge=1, le=8)
    max_step_tokens: int = Field(default=128, ge=4)
    """A step is cut here: the bound for text without a delimiter."""
    max_draft_len: int = Field(default=16, ge=0)
    """Most draft tokens in one verification: the target engine's ``max_draft_len``. 0: none are sent, in whatever mode."""
    max_in_flight_requests: int = Field(default=64, ge=1)
    """Admission limit; the next request is refused at once."""
    max_in_flight_calls: int = Field(default=120, ge=1)
    """Engine calls at a time: Triton's ``thread-pool-size`` less a reserve for cancels."""


Checker = Callable[[str, str], bool]
"""(drafted text, target text) -> whether they mean the same."""


class AuditSettings(BaseModel):
    """Who judges a sample of the accepted steps again, and how much of the server that may take.

    Attributes:
        auditor: ``target`` (its own strict question), ``judge`` (asked with the two steps changed over) or ``checker``.
        checker: for the auditor ``checker``, a function of the server's Python environment as "module:function"; see
            :data:`Checker`. It is called once at a time, on a thread of its own, and must come to an end.
        max_in_flight: audits at a time; each has at most one engine call in flight. More only take turns from answers. Those by
            a checker have but one turn, which :attr:`at_a_time` says.
        max_waiting: audits in line; one more is dropped, and counted.
        timeout_s: of one audit; past it the audit has failed.
        memory: audits after which evidence has faded to about a third.
        sensitivity, specificity: what the auditor's own errors were measured from: of (trials) wrongly accepted pairs it called
            (successes) wrong, of rightly accepted ones right. None: it makes none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    auditor: Literal["target", "judge", "checker"] = "target"
    checker: str | None = Field(default=None, pattern=REFERENCE)
    max_in_flight: int = Field(default=1, ge=1, le=16)
    max_waiting: int = Field(default=64, ge=1)
    timeout_s: float = Field(default=10.0, gt=0)
    memory: int = Field(default=200, ge=20)
    sensitivity: tuple[NonNegativeInt, PositiveInt] | None = None
    specificity: tuple[NonNegativeInt, PositiveInt] | None = None

    @model_validator(mode="after")
    def _names_its_checker(self) -> Self:
        if (self.auditor == "checker") != (self.checker is not None):
            raise ValueError('the auditor "checker" goes with a checker = "module:function", and no other auditor does')
        return self

    @model_validator(mode="after")
    def _tells_wrong_from_right(self) -> Self:
        found = [one for one in (self.sensitivity, self.specificity) if one is not None]
        # As they were seen, and with a success and a failure more, as the interval takes them.
        sums = [sum((hits + more) / (num + 2 * more) for hits, num in found) for more in (0, 1)]
        if any(hits > num for hits, num in found) or min(sums) <= len(found) - 1:
            raise ValueError(
                "sensitivity and specificity are [successes, trials] and add up to more than 1, or audits say nothing"
            )
        return self

    @property
    def at_a_time(self) -> int:
        """Audits. To wait for the checker is to wait in line, where no time is counted: an audit may take ``timeout_s``."""
        return self.max_in_flight if self.checker is None else 1

    def load_checker(self, root: Path | None = None) -> Checker | None:
        """Import the checker; None where another auditor is named.

        Raises:
            ConfigError: it cannot be imported here, or is no function.
        """
        if self.checker is None:
            return None
        checker = load(self.checker, "audit.checker", root)
        if not callable(checker):
            raise ConfigError(f"audit.checker={self.checker!r} is not a function")
        found: Checker = checker
        return found


@dataclass(frozen=True)
class OwnParts:
    """What a deployment brings along, made: plug-ins by name, and what cuts the reasoning into steps."""

    verifiers: Mapping[str, Any]
    proposers: Mapping[str, Any]
    segmenter: Segmenter


TOOL_MARKERS = (
    *CALL_MARKS,
    "<|python_tag|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
"""Around the tool calls of Qwen, Llama and DeepSeek. A text that is no token of the target's is none of its markers."""


class LoopConfig(BaseModel):
    """All that the ``lookahead`` model needs to know beside the request.

    Attributes:
        tokenizer_dir: of target and draft (they share a vocabulary).
        judge_tokenizer_dir: of the judge.
        step_delimiter: text that ends a step (paper: a blank line).
        think_open, think_close: texts of the tokens around the reasoning. Lookahead applies between them; None where the model
            has none, and then to the whole answer.
        markers: texts whose tokens must agree exactly between a drafted and a target step (tool calls).
        draft_logits: what goes with draft tokens at T > 0: ``none`` for an engine whose rule is exact as it is, ``one_hot``
            for one whose token-only rule is biased, ``off`` for no draft tokens at T > 0.
        draft_temperature: temperature of the first drafted step after a prefix, where the request's is higher; None: the
            request's. What the draft finds most likely is accepted more often than what it happens to draw, but it has few
            wordings, and after those the target seems to err more (docs/benchmarks/evaluation.md). Further siblings (``width``)
            keep the request's. Where it is set, noise is shared only by modes that accept nothing but the target's own words.
        vocab_size: logits width of the target, for ``one_hot``.
        judge_seq_len: tokens that the judge's engine takes, its verdict among them; None: not known.
        coupled_noise: target and draft draw the token at a position with noise that follows from the call's seed and the position
            alone (:mod:`lr_backend.embedded`); sampled ``lossless`` answers need it. TensorRT-LLM's engines do not.
        own_branches: go on from a target step while the verdict on the drafted one is pending.
        engine_drafts: the target's engine holds the draft model too and drafts by itself where a call asks for it
            (``num_draft_tokens``); the proposer ``engine`` needs it.
        engine_always_drafts: it does so in every call, asked or not, and takes no draft tokens from elsewhere: there is no target
            alone.
        remotes: where roles live that are not models of this server: gRPC addresses of their servers.
        engines: parameters of the embedded engines that the step loop's own process runs, by role; empty: it calls the server's
            models of these names by BLS.
        pace: at whose pace the engines run, as it must stand beside every time; empty: at this machine's own.
        verifiers, proposers: the deployment's own, by the name that requests know them by (:mod:`lr_backend.plugins`).
        root: of the deployment; the modules of its own plug-ins are looked for here as well.
        raw_prompts: control tokens in ``text_input`` count where a request says ``raw``; else they are text there as everywhere.
        segmenter: says where steps end, in place of ``step_delimiter``.
        audit: who audits accepted steps, for requests that ask for it (``audit_rate``, ``risk_budget``).
        defaults: request fields taken where a request does not give them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokenizer_dir: Path
    judge_tokenizer_dir: Path
    step_delimiter: str = Field(default="\n\n", min_length=1)
    think_open: str | None = "<think>"
    think_close: str | None = "</think>"
    markers: tuple[str, ...] = TOOL_MARKERS
    draft_logits: Literal["none", "one_hot", "off"] = "none"
    draft_temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    vocab_size: int = Field(default=1, ge=1)
    judge_seq_len: int | None = Field(default=None, ge=2)
    tokens_per_block: int = Field(default=32, ge=1)
    coupled_noise: bool = False
    own_branches: bool = True
    engine_drafts: bool = False
    engine_always_drafts: bool = False
    remotes: dict[Role, tuple[str, ...]] = Field(default_factory=dict)
    engines: dict[str, dict[str, str]] = Field(default_factory=dict)
    pace: str = ""
    verifiers: dict[PlugInName, PlugIn] = Field(default_factory=dict)
    proposers: dict[PlugInName, PlugIn] = Field(default_factory=dict)
    segmenter: PlugIn | None = None
    raw_prompts: bool = False
    root: Path | None = None
    audit: AuditSettings = AuditSettings()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    defaults: dict[str, Any] = Field(default_factory=dict)

    @field_validator("verifiers", "proposers")
    @classmethod
    def _not_ours(cls, named: dict[str, PlugIn]) -> dict[str, PlugIn]:
        if taken := sorted(set(named) & {*VerifierName, *ProposerName}):
            raise ValueError(f"{taken[0]} is a name of the server's own; choose another")
        return named

    def lacks_verifier(self, name: str) -> str | None:
        """The rule that a request for this verifier breaks; None: this server has it."""
        return _unknown(name, [*VerifierName, *sorted({*self.verifiers, *offered(VERIFIERS)})])

    def lacks_proposer(self, name: str) -> str | None:
        """The same for a proposer."""
        if self.engine_always_drafts and name != ProposerName.ENGINE:
            return "this server's target drafts by itself (target.speculative) and takes no draft tokens: engine"
        if name == ProposerName.ENGINE and not self.engine_drafts:
            return "this server's target engine holds no draft model (target.holds_draft_model)"
        return _unknown(name, [*ProposerName, *sorted({*self.proposers, *offered(PROPOSERS)})])

    def lacks_mode(self, mode: str, *, greedy: bool = False) -> str | None:
        """The same for a mode; ``greedy``: at temperature 0."""
        if self.engine_always_drafts and not Mode(mode).speculates_tokens:
            other = "lr_sd" if Mode(mode).speculates_steps else "sd"
            return f"this server's target drafts by itself in every call (target.speculative); ask for {other} or auto"
        if mode == Mode.LOSSLESS and not (greedy or self.coupled_noise):
            return "above temperature 0 it needs engines whose noise follows from seed and position; this server's have their own"
        return None

    def make_parts(self) -> OwnParts:
        """Make the plug-ins, and the segmenter.

        Raises:
            ConfigError: naming the section of one that cannot be made.
        """
        segmenter: Segmenter = Delimiter(self.step_delimiter)
        if self.segmenter is not None:
            segmenter = self.segmenter.make(SEGMENTERS, "segmenter", self.root)
            if not segmenter.delimiters or not all(segmenter.delimiters):
                raise ConfigError("segmenter: it names no delimiter, or an empty one")
        return OwnParts(parts_of(VERIFIERS, self.verifiers, self.root), parts_of(PROPOSERS, self.proposers, self.root), segmenter)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read ``lookahead.json``.

        Raises:
            ConfigError: the file is missing, is no JSON, has an unknown key or a value out of range.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{path.name}: {first_error(error)}") from error


def _unknown(name: str, known: Sequence[str]) -> str | None:
    return None if name in known else f"this server has {', '.join(known)}"
