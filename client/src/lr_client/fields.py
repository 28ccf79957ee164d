"""The fields of a request beside its question: each said once, with its type, its tensor and its meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_type_hints

from lr_client.errors import InvalidRequest


class Field(NamedTuple):
    """What goes with a field. ``datatype``: Triton's, of its tensor. ``help``: what it means and may be."""

    datatype: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer. None leaves a field to the server's default; a newer server may know more words."""

    # From the server's own fields, made by `make fields` of its repository; not edited by hand.
    raw: Annotated[
        bool | None,
        Field(
            "BOOL",
            "`text_input` is the prompt itself, rendered by no template; control tokens in it are text, "
            "unless the deployment has `raw_prompts`",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Field(
            "INT32",
            "tokens of the answer, reasoning included, at most; unset or beyond it, the server's limit (1 "
            "to 2^20)",
        ),
    ] = None
    temperature: Annotated[float | None, Field("FP32", "0 is greedy (0 to 5)")] = None
    top_p: Annotated[
        float | None,
        Field(
            "FP32",
            "share of the probability to sample from (above 0, to 1)",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Field(
            "INT32",
            "number of tokens to sample from; 0 is all; of more than 1024 TensorRT-LLM takes 1024 (0 to "
            "2^20)",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Field(
            "UINT64",
            "every draw derives from it; unset, the server draws one at random and tells it in `usage` (0 "
            "to 2^64 - 1)",
        ),
    ] = None
    stop: Annotated[
        str | Sequence[str] | None,
        Field(
            "BYTES",
            "strings of 1 to 128 characters that end the answer; they are not part of it (at most 16)",
        ),
    ] = None
    stream: Annotated[bool | None, Field("BOOL", "false: one response with the whole answer")] = None
    mode: Annotated[
        Literal["auto", "ar", "sd", "lr", "lr_sd", "lossless"] | str | None,
        Field(
            "BYTES",
            "how the answer is speculated: `auto` by steps and draft tokens, as far as measurements say "
            "that they pay; `ar` not at all; `sd` by draft tokens; `lr` by steps; `lr_sd` by both; "
            "`lossless` by both, and a drafted step is accepted only if its tokens are the target's own: "
            "the text is what `ar` writes with the same seed, on GPUs up to rounding",
        ),
    ] = None
    max_depth: Annotated[
        int | None,
        Field(
            "INT32",
            "steps that are worked on at a time, with `auto` at most (1 gains nothing, 0: no steps); cut at "
            "the server's limit (0 to 16)",
        ),
    ] = None
    width: Annotated[
        int | None,
        Field(
            "INT32",
            "candidate steps at each position; cut at the server's limit (1 to 8)",
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        Field(
            "INT32",
            "draft tokens in one verification, with `auto` at most; a step may begin with fewer; cut at the "
            "engine's limit (0 to 64)",
        ),
    ] = None
    proposer: Annotated[
        str | None,
        Field(
            "BYTES",
            "where draft tokens come from: `draft_model`; `ngram`, lookup of what last followed the same "
            "few tokens; `engine`, the target's engine itself; or a plug-in of the server's (1 to 64 "
            "characters)",
        ),
    ] = None
    verifier: Annotated[
        str | None,
        Field(
            "BYTES",
            "who decides whether a drafted step means the same as the target's: `exact` (equal tokens), "
            "`judge`, `cascade` (cheap checks, the judge for the rest), or a plug-in of the server's (1 to "
            "64 characters)",
        ),
    ] = None
    audit_rate: Annotated[
        float | None,
        Field(
            "FP32",
            "share of the accepted steps that the server's auditor judges again, off the critical path; "
            "steps of equal tokens, or of the same words, need no audit and are not among them (0 to 1)",
        ),
    ] = None
    risk_budget: Annotated[
        float | None,
        Field(
            "FP32",
            "a tripwire on wrongly accepted steps: while the server measures a larger share of them than "
            "this beyond doubt, the request accepts equal tokens only; it is no bound, and a share a little "
            "above it is noticed late or not at all; 0 is none (0 to 1)",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        Field(
            "BOOL",
            "the result does not depend on which engine answers first; `auto` then takes its upper bounds",
        ),
    ] = None
    deadline_s: Annotated[
        float | None,
        Field(
            "FP32",
            "seconds until the answer is cut with finish reason `deadline`; 0 is the server's limit (0 to "
            "86400)",
        ),
    ] = None
    trace: Annotated[
        bool | None,
        Field(
            "BOOL",
            "send a record of every step, and in the end the trace of the request",
        ),
    ] = None
    # The end of what `make fields` makes.

    def __post_init__(self) -> None:
        if self.stop is not None:
            if not isinstance(self.stop, Iterable):
                raise InvalidRequest(f"stop={self.stop!r}: a string or several", field="stop")
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            object.__setattr__(self, "stop", stop)


FIELDS: dict[str, Field] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()
}
