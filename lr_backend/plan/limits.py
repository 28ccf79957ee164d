"""What a deployment would refuse by its own limits, in words. Pure."""

from __future__ import annotations

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.emulated.workload import Workload


def texts_refused(spec: GpuDeployment, workload: Workload) -> str:
    """Why questions or answers of the mean length are; empty: they are not."""
    limits = spec.loop_config().limits
    answer = workload.num_steps * workload.step_tokens + workload.answer_tokens
    if workload.prompt_tokens > limits.max_prompt_tokens:
        return f"{spec.name} takes prompts of at most {limits.max_prompt_tokens} tokens, and these have {workload.prompt_tokens}"
    if answer > limits.max_tokens:
        return f"{spec.name} writes answers of at most {limits.max_tokens} tokens, and these have {answer} on average"
    return ""


def load_refused(spec: GpuDeployment, num_requests: int) -> str:
    """Why so many requests in flight are; empty: they are not."""
    most = spec.loop_config().limits.max_in_flight_requests
    return f"{spec.name} has at most {most} requests in flight" if num_requests > most else ""


def window_refused(spec: GpuDeployment, depth: int, width: int) -> str:
    """Why a request is looked ahead for less far, or by fewer candidates; empty: it is not."""
    limits = spec.loop_config().limits
    if depth > limits.max_depth:
        return f"{spec.name} looks at most {limits.max_depth} steps ahead"
    return f"{spec.name} drafts at most {limits.max_width} candidates for a step" if width > limits.max_width else ""


def draft_tokens_refused(spec: GpuDeployment, num_draft_tokens: int) -> str:
    """Why so many in one verification are; empty: they are not."""
    most = spec.target.num_drafts
    return (
        f"the target of {spec.name} takes at most {most} draft tokens, not {num_draft_tokens}" if num_draft_tokens > most else ""
    )
