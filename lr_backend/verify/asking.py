"""One engine call on behalf of a verdict, bounded in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lr_backend.clock import time_limit
from lr_backend.engine import Engine, EngineCall, Generation
from lr_backend.errors import EngineError, NotFinite
from lr_backend.steps.step import StepTokenizer
from lr_backend.verify.judge_prompt import parse_verdict
from lr_backend.verify.verdict import Reason


async def ask(engine: Engine, call: EngineCall, *, timeout_s: float | None, on_error: Reason) -> Generation | Reason:
    """The engine's answer, or why there is none.

    That is :attr:`Reason.TIMEOUT`, :attr:`Reason.GARBAGE` where it cannot compute this call, or else ``on_error``.

    Args:
        timeout_s: None waits without a limit.
    """
    try:
        async with time_limit(timeout_s):
            return await engine.generate(call)
    except TimeoutError:
        return Reason.TIMEOUT
    except NotFinite:  # of this call alone
        return Reason.GARBAGE
    except EngineError:
        return on_error


async def ask_for_label(
    engine: Engine,
    tokenizer: StepTokenizer,
    call_id: str,
    prompt_ids: Sequence[int] | None,
    *,
    timeout_s: float | None,
    on_error: Reason,
) -> bool | Reason:
    """What a model says of the pair in its prompt, in one token; or why it says nothing.

    Args:
        prompt_ids: as from :meth:`~lr_backend.verify.judge_prompt.JudgePrompt.ids`; None: the pair may not be read.
    """
    if prompt_ids is None:
        return Reason.CAPPED
    call = EngineCall(request_id=call_id, input_ids=np.asarray(prompt_ids, dtype=np.int32), max_new_tokens=1)
    answer = await ask(engine, call, timeout_s=timeout_s, on_error=on_error)
    if isinstance(answer, Reason):
        return answer
    aligned = parse_verdict(str(tokenizer.decode(list(answer.token_ids), skip_special_tokens=False)))
    return Reason.GARBAGE if aligned is None else aligned
