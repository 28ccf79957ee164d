"""The three embedded engines in the step loop's own process (``layout = "one_process"``): no call is handed over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lr_backend.embedded.config import EngineConfig
from lr_backend.embedded.engine import EmbeddedEngine
from lr_backend.engine import Engine, EngineCall, Generation, Role
from lr_backend.engine.inprocess import InProcessEngine
from lr_backend.errors import EngineError, EngineRejected, NotFinite
from lr_backend.loop.assemble import Engines
from lr_backend.notice import Seats
from lr_backend.triton.engine_metrics import engine_metrics
from lr_backend.triton.metrics import MetricSheet
from lr_backend.triton.triton_engine import Failing, Watch


class Watched:
    """An engine whose metrics are brought up to date when it was used, and whose failures somebody is told of.

    Calls beyond ``max_calls`` wait here: the loop makes many more than it has requests, and none may meet a full queue.
    """

    def __init__(self, engine: Engine, metrics: MetricSheet, watch: Watch, max_calls: int) -> None:
        self._engine, self._metrics, self._watch, self._failing = engine, metrics, watch, Failing(watch)
        self._places = asyncio.Semaphore(max_calls)

    async def generate(self, call: EngineCall) -> Generation:
        try:
            async with self._places:
                found = await self._engine.generate(call)
        except (EngineRejected, NotFinite):
            raise
        except EngineError:
            self._failing.failed()
            raise
        finally:
            self._metrics.touch()
        self._failing.forget()
        self._watch.answered()
        return found

    async def close(self) -> None:
        await self._engine.close()


def with_room(config: EngineConfig) -> EngineConfig:
    """The same with a queue that holds a batch twice, however short the spec's is: calls of the loop wait before it.

    One half is for them. The other is for those that were cancelled, which leave the queue between two iterations.
    """
    return config.model_copy(update={"max_queue_size": max(config.max_queue_size, 2 * config.max_batch_size)})


class OwnEngines:
    """Loads and starts the engines; :meth:`close` ends them.

    Args:
        parameters: of each role's engine, as its model's ``config.pbtxt`` has them.
        family: ``pb_utils.MetricFamily``. The role's label is ``lookahead/target`` and so on: the models have theirs.
        watch: is told of the target's answers, and of its failures.

    Raises:
        LookaheadError: a checkpoint cannot be served.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, str]], family: Any, watch: Watch) -> None:
        with ExitStack() as opened:
            # Without draft or judge there still are answers.
            told = {role: watch if role is Role.TARGET else Seats.alone().seat(0) for role in Role}
            watched = {role: self._open(role, parameters[role.value], family, told[role], opened) for role in Role}
            self.engines = Engines(watched[Role.TARGET], watched[Role.DRAFT], watched[Role.JUDGE])
            self._opened = opened.pop_all()

    @staticmethod
    def _open(role: Role, parameters: Mapping[str, str], family: Any, watch: Watch, opened: ExitStack) -> Engine:
        config = with_room(EngineConfig.from_parameters(parameters))
        engine = EmbeddedEngine(config)
        opened.callback(engine.close)
        metrics = engine_metrics(family, f"lookahead/{role.value}", engine.stats)
        opened.callback(metrics.close)
        return Watched(InProcessEngine(engine), metrics, watch, config.max_queue_size // 2)

    def close(self) -> None:
        """Fail what is in flight, and wait for the threads."""
        self._opened.close()
