"""The kinds of engine that the suite holds to one contract.

An engine of TensorRT-LLM, or any other behind Triton, joins by its address::

    LOOKAHEAD_ENGINE=host:8001/tensorrt_llm LOOKAHEAD_ENGINE_LOGITS=151936 pytest tests/conformance

The second variable is the width of its logits, without which no draft logits are sent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lr_backend.emulated.open import open_engine
from lr_backend.engine import Engine
from lr_backend.engine.inprocess import InProcessEngine
from lr_backend.hardware.pace import EnginePace
from lr_backend.hardware.profile import ProfileKey
from lr_backend.testing import ScriptedEngine, run_virtual
from lr_backend.triton.remote_engine import RemoteEngine
from tests.support.embedded_engines import VOCAB, engine_config, tiny_engine
from tests.support.llmapi_engines import by_torch, in_process, llmapi_engine

ADDRESS = os.environ.get("LOOKAHEAD_ENGINE", "")
NUM_LOGITS = int(os.environ.get("LOOKAHEAD_ENGINE_LOGITS", "0"))
MAX_SEQ_LEN = 256
"""Of the engines that the suite makes itself."""

Body = Callable[[Engine], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """How to open one engine and run a test body on it.

    ``samples`` is False where answers are the same without end, ``seeded`` where a seed does not reproduce one, ``drafts`` where
    draft tokens are refused. ``num_logits`` is the width of draft logits, 0 where that is not known.
    """

    open: Callable[[], Engine]
    run_loop: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    samples: bool = True
    limits_length: bool = True
    seeded: bool = True
    drafts: bool = True
    num_logits: int = VOCAB

    def run(self, body: Body) -> None:
        async def main() -> None:
            engine = self.open()
            assert isinstance(engine, Engine)
            try:
                await body(engine)
            finally:
                await engine.close()

        self.run_loop(main())


def hashed(context: tuple[int, ...], seed: int) -> int:
    """A script that looks like a greedy model: the next token follows from all before."""
    state = 17
    for token in context:
        state = (state * 31 + token) % 1_000_003
    return state % VOCAB


def scripted() -> Endpoint:
    return Endpoint(lambda: ScriptedEngine(hashed), run_virtual, samples=False, limits_length=False)


def embedded_engine(checkpoint: Path, device: str, kernels: str) -> Endpoint:
    settings: dict[str, Any] = {"device": device, "kernels": kernels, "max_seq_len": MAX_SEQ_LEN, "max_draft_len": 16}
    return Endpoint(lambda: InProcessEngine(tiny_engine(checkpoint, **settings)))


def paced_engine(checkpoint: Path) -> Endpoint:
    """A tiny model that answers as fast as a small one on a B200 would."""
    pace = EnginePace(ProfileKey("b200_sxm", "Qwen3-1.7B", 1, "bfloat16"))
    config = engine_config(checkpoint, max_seq_len=MAX_SEQ_LEN, max_draft_len=16, pace=pace)
    return Endpoint(lambda: InProcessEngine(open_engine(config)))


def llmapi(checkpoint: Path) -> Endpoint:
    """The LLM API engine over a stand-in for TensorRT-LLM, whose tokens a tiny model chooses."""
    choose = by_torch(checkpoint)
    return Endpoint(lambda: in_process(llmapi_engine(checkpoint, choose, max_seq_len=MAX_SEQ_LEN)), seeded=False, drafts=False)


def remote(address: str, num_logits: int = 0) -> Endpoint:
    """``address``: host:port/model."""
    url, _, model_name = address.partition("/")
    return Endpoint(lambda: RemoteEngine(f"grpc://{url}", model_name), num_logits=num_logits)


def num_cancelled(engine: Engine) -> int | None:
    """Calls that were ended early, by the engine's own count; None: it is in another process."""
    if isinstance(engine, ScriptedEngine):
        return len(engine.cancelled)
    if not isinstance(engine, InProcessEngine):
        return None
    inside: Any = engine.engine
    count: int = inside.stats().num_cancelled
    return count
