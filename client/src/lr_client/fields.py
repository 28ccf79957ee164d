"""The fields of a request beside its question: each said once, with its type, its tensor and its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from lr_client.errors import InvalidRequest


class Field(NamedTuple):
    """What goes with a field.

    Attributes:
        datatype: Triton's, of its tensor.
        help: what it means and may be.
        is_json: what is no text is sent as JSON.
    """

    datatype: str
    help: str
    is_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer. None leaves a field to the server's default; a newer server may know more words."""

    # From the server's own fields, made by `make fields` of its repository; not edited by hand.
    tools: Annotated[
        str | Sequence[Mapping[str, Any]] | None,
        Field(
            "BYTES",
            "functions that the target may call, as its chat template shows them: a JSON list of `{type, "
            "function}`, a function with `name`, `description` and `parameters` (not empty)",
            is_json=True,
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | Mapping[str, Any] | None,
        Field(
            "BYTES",
            "what else the chat template reads, as a JSON object: for Qwen3 `enable_thinking` may be false",
            is_json=True,
        ),
    ] = None
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
    thinking_token_budget: Annotated[
        int | None,
        Field(
            "INT32",
            "tokens after which the reasoning writes one last step; then the server closes it, and the "
            "answer follows; unset, the reasoning ends by itself (1 to 2^20)",
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
        for name, field in FIELDS.items():
            if field.is_json and not isinstance(value := getattr(self, name), str | None):
                object.__setattr__(self, name, as_json(name, value) if value else None)


def as_json(name: str, value: object) -> str:
    """JSON text of what a field holds.

    Raises:
        InvalidRequest: JSON cannot say it.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        rule = "give what JSON can say, or JSON text"
        raise InvalidRequest(f"{name}={value!r:.80}: {rule}", field=name) from error


FIELDS: dict[str, Field] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()
}
