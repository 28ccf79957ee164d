"""The bench of the loop's own limit: its arithmetic, both of its clocks, and engines in a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from bench.emulation import DEPLOYMENT, SYSTEM
from bench.kit.engines_apart import EnginesApart, OneOfSet, Sets, request_id
from bench.loop_limit import Found, Instances, Row, Setting, carried, on_the_virtual_clock, table_of
from lr_backend.build.emulated_spec import emulated
from lr_backend.emulated.texts import Texts
from lr_backend.emulated.workload import Workload
from lr_backend.engine import EngineCall, Generation
from lr_backend.hardware.machine import LinearTimes
from lr_backend.plan.simulation import Policy
from lr_backend.request import Mode
from lr_backend.testing import run_virtual

LR = Policy(Mode.LR, 2, fields={"verifier": "judge"})
ROW = Row("lr", 8, 100, 700, 5_000, 10.0, 0.5, 1.0, 0.5, 2.0, 11.0, 10.0, 10.5)
SETS = Sets(Workload(0.5, step_tokens=6, num_steps=3, prompt_tokens=12), LinearTimes(1e-4, 1e-5).machine(), 2)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    texts = tmp_path_factory.mktemp("texts") / "short.toml"
    texts.write_text(replace(Workload.load("qwen3-gsm8k"), num_steps=2).as_toml(), encoding="utf-8")
    return Setting.of(emulated(DEPLOYMENT, SYSTEM, str(texts)))


def test_a_core_carries_what_its_steps_leave_room_for() -> None:
    assert carried(cpu_ms_a_step=3.0, steps_a_second=4.0) == 75  # of 12 ms a second each, in 900


def test_a_row_says_what_is_full() -> None:
    assert ROW.cpu_ms_a_step == 5.0 and ROW.share == 0.05 and ROW.engines_share == 0.1
    assert ROW.steps_a_second == pytest.approx(2.0) and ROW.off == pytest.approx(0.1)
    assert not ROW.full and not ROW.held_up
    late, engines = replace(ROW, lag_p50_ms=10.5), replace(ROW, engines_cpu_s=9.5)
    assert late.full and not late.held_up and engines.held_up and not engines.full
    assert replace(ROW, cpu_s=9.5).full and not replace(ROW, lag_p99_ms=10.5).full


def test_the_limit_is_that_of_the_largest_load_that_the_engines_kept_up_with() -> None:
    larger, held_up = replace(ROW, load=16, cpu_s=0.4), replace(ROW, load=32, engines_cpu_s=9.9, cpu_s=9.0)
    found = Found("label", [ROW, larger, held_up], [], [Instances("lr", 8, 100, 9.0, (0.5, 0.5))])
    assert found.summary() == {"lr": {"loop_alone": carried(4.0, 2.0), "triton_2": 2 * carried(10.0, 2.0)}}
    assert found.as_dict()["rows"][0]["full"] is False
    assert table_of(found.rows, found.more).row_count == 3


def test_processor_time_of_the_loop_makes_answers_later(setting: Setting) -> None:
    free, again, charged = (on_the_virtual_clock(setting, LR, range(9), loop_s) for loop_s in (0.0, 0.0, 0.004))
    assert free == again < charged


def test_requests_of_one_set_leave_the_others_alone(setting: Setting) -> None:
    assert on_the_virtual_clock(setting, LR, range(8)) == pytest.approx(on_the_virtual_clock(setting, LR, range(16)), rel=0.2)


class Named:
    """An engine that writes its own number."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def generate(self, call: EngineCall) -> Generation:
        return Generation((self.number,))

    async def close(self) -> None:
        self.number = -1


def test_a_call_goes_to_the_set_that_its_request_belongs_to() -> None:
    engine = OneOfSet([Named(0), Named(1)])
    call = EngineCall(f"{request_id(1, 7)}/target/3", np.array([1], np.int32), 1)
    assert run_virtual(engine.generate(call)).token_ids == (1,)


@pytest.fixture(scope="module")
def apart() -> Iterator[EnginesApart]:
    with closing(EnginesApart(SETS)) as found:
        yield found


def test_engines_in_another_process_write_what_those_of_the_virtual_clock_write(apart: EnginesApart) -> None:
    prompt = Texts(SETS.workload, 0).prompt(0)
    call = EngineCall("1.0/target/0", prompt, 5)
    given_up_call = EngineCall("0.1/target/0", prompt, 5)

    async def here() -> Generation:
        engines = SETS.open()
        try:
            return await engines.target.generate(call)
        finally:
            await engines.target.close()

    async def there() -> Generation:
        engines = apart.connect()
        given_up = asyncio.create_task(engines.target.generate(given_up_call))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})
        assert given_up.cancelled()
        return await engines.target.generate(call)

    assert asyncio.run(there()).token_ids == run_virtual(here()).token_ids
    assert apart.cpu_s > 0.0
