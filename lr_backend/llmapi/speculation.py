"""Draft tokens that the engine writes by itself: our settings as upstream's configuration, and what a request saw of it.

What upstream was found to do (``llmapi/llm_args.py``, ``_torch/pyexecutor/py_executor_creator.py``, ``sampler.py``,
``executor/result.py``, ``docs/source/features/``; field names of 1.2.1, and what has changed since, stand in ``tests/contract``):

- **It is set for an engine, and there is no request without it.** ``SamplingParams`` has no field for it, and upstream's guide
  says that it cannot be switched off while it runs. ``max_concurrency`` and ``draft_len_schedule`` switch it off for batches
  beyond a size, for all of their requests at once. So a deployment that has it refuses the modes ``ar`` and ``lr`` by name: what
  is called *the target alone* would be timed as something else. Calls that ask for no draft tokens (audits, the warm-up) are
  served all the same; the tokens are the target's own.
- **Every pass has** ``max_draft_len`` **draft tokens** that a model drafts. N-grams are proposed where they are found: of their
  number that is an upper bound.
- **No draft changes what the target says.** A draft token stands where the target draws the same, or by rejection sampling.
- **The one-model EAGLE-3 samples greedily** unless ``allow_advanced_sampling`` is set. Later releases see by themselves, and take
  the field still. Draft-target and n-grams draw as asked.
- **N-grams and draft-target run without the overlap scheduler,** as upstream's guide sets them up.
- **What a request saw of it:** ``request_perf_metrics.speculative_decoding`` stays zero in the PyTorch flow of 1.2.1 (pull
  request 17082 fills it, July 2026). ``decoding_iter`` counts the request's passes with each response, the prompt's included.
  All tokens beyond one for each pass were accepted draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lr_backend.errors import ConfigError
from lr_backend.llmapi.config import LlmApiConfig

CLASSES: Mapping[str, tuple[str, ...]] = {
    "ngram": ("NGramDecodingConfig",),
    "draft_target": ("DraftTargetDecodingConfig",),
    "eagle3": ("Eagle3DecodingConfig", "EagleDecodingConfig"),
}
"""Upstream's class for each kind, the newer name first: 1.2.1 has the older alone."""
WITHOUT_OVERLAP = ("ngram", "draft_target")


def speculative_config(config: LlmApiConfig, find: Callable[[str], Callable[..., Any] | None]) -> Any:
    """Upstream's ``speculative_config``. ``find`` gives a class of ``tensorrt_llm.llmapi`` by its name, None where it has none.

    Raises:
        ConfigError: this release has no such speculation.
    """
    names = CLASSES[config.speculative]
    made = next((found for name in names if (found := find(name)) is not None), None)
    if made is None:
        raise ConfigError(f"speculative={config.speculative!r}: this tensorrt_llm has no {' and no '.join(names)}")
    return made(**speculative_fields(config))


def speculative_fields(config: LlmApiConfig) -> dict[str, Any]:
    """Keyword arguments of the class."""
    fields: dict[str, Any] = {"max_draft_len": config.max_draft_len}
    if config.speculative == "ngram":
        # Each request looks in its own text: what others wrote is no clue, and must not show.
        return fields | {"max_matching_ngram_size": config.max_matching_ngram_size, "is_public_pool": False}
    fields["speculative_model"] = str(config.speculative_model_dir)
    return fields | ({"allow_advanced_sampling": True} if config.speculative == "eagle3" else {})


def draft_counts(config: LlmApiConfig, num_tokens: int, num_passes: int, num_reported: int = 0) -> tuple[int, int]:
    """Draft tokens of one request: (verified, accepted).

    Args:
        num_tokens: that were given out.
        num_passes: of the model that they took, the prompt's included; 0: upstream does not say.
        num_reported: verified ones by upstream's own count; 0 where it has none.
    """
    if not config.drafts or num_passes == 0:
        return 0, 0
    # Upstream's own count of them goes on behind a stop that only the stream showed.
    num_accepted = max(0, num_tokens - num_passes)
    num_verified = num_reported or (num_passes - 1) * config.max_draft_len
    return max(num_verified, num_accepted), num_accepted
