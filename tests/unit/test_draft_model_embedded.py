"""The draft model's draft tokens on real engines: greedy they change nothing, sampled they keep the target's distribution."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lr_backend.engine import GREEDY, Role, Sampling
from lr_backend.engine.inprocess import InProcessEngine
from lr_backend.loop.ledger import Ledger, MeteredEngine
from lr_backend.loop.seeds import Seeds
from lr_backend.loop.writer import DraftTokens, StepWriter
from lr_backend.propose import DraftModel
from lr_backend.steps.rules import StepRules
from lr_backend.steps.segment import BLANK_LINE
from tests.support.embedded_engines import VOCAB, tiny_checkpoint, tiny_engine

END = VOCAB - 1
ENDING = StepRules.build(BLANK_LINE, {}, [END]).of_answer
PREFIX = np.asarray([3, 17, 5, 29], dtype=np.int32)
NUM_SAMPLES = 640
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcessEngine, InProcessEngine]]:
    """Target and draft: two random models of one vocabulary."""
    folder: Path = tmp_path_factory.mktemp("models")
    made = [InProcessEngine(tiny_engine(tiny_checkpoint(folder / str(seed), seed=seed), max_queue_size=4096)) for seed in (1, 2)]
    yield made[0], made[1]
    for one in made:
        asyncio.run(one.close())


def writer(
    engines: tuple[InProcessEngine, InProcessEngine],
    sampling: Sampling,
    seed: int,
    *,
    own: bool = True,
    drawn: Sampling = GREEDY,
    coupled: bool = False,
) -> StepWriter:
    """Writes with the target; ``own``: the target drafts for itself."""
    ledger, name, seeds = Ledger(lambda: 0.0, len(PREFIX)), f"r{seed}", Seeds(seed, coupled=coupled, by_step=False)
    model = DraftModel(
        engine=MeteredEngine(engines[0 if own else 1], Role.DRAFT, ledger, timeout_s=None, drafts_tokens=True),
        sampling=drawn,
        request_id=name,
        seed=seeds.draft_tokens,
        tokens_a_call=2,
        tokens_first=2,
        available=lambda: True,
        failed=lambda: pytest.fail("the draft failed"),
    )
    target = MeteredEngine(engines[0], Role.TARGET, ledger, timeout_s=None)
    return StepWriter(target, Role.TARGET, sampling, seeds, name, ledger, DraftTokens(model, 2))


@pytest.mark.parametrize("own", [True, False])
def test_greedy_tokens_are_the_targets_own(engines: tuple[InProcessEngine, InProcessEngine], own: bool) -> None:
    drafting = writer(engines, GREEDY, 0, own=own)

    ids = [asyncio.run(work).ids for work in (drafting.speculate(PREFIX, 60, ENDING), drafting.write(PREFIX, 60, ENDING))]

    assert ids[0] == ids[1]
    usage = drafting.ledger
    assert usage.num_proposed > 0
    assert (usage.num_accepted == usage.num_proposed) == own


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.2, 5, 0.9)], ids=str)
@pytest.mark.parametrize("own", [True, False])
def test_with_coupled_noise_sampled_tokens_are_the_very_same(
    engines: tuple[InProcessEngine, InProcessEngine], own: bool, sampling: Sampling
) -> None:
    for seed in range(5):
        drafting = writer(engines, sampling, seed, own=own, drawn=sampling, coupled=True)
        ids = [asyncio.run(work).ids for work in (drafting.speculate(PREFIX, 40, ENDING), drafting.write(PREFIX, 40, ENDING))]
        assert ids[0] == ids[1]
        assert drafting.ledger.num_proposed > 0
        assert not own or drafting.ledger.num_accepted == drafting.ledger.num_proposed


@pytest.mark.parametrize("drawn", [GREEDY, Sampling(1.0, 3)], ids=["drafted", "drawn"])
def test_sampled_tokens_are_distributed_as_the_targets_own(
    engines: tuple[InProcessEngine, InProcessEngine], drawn: Sampling
) -> None:
    sampling = Sampling(1.0, 3)

    async def sample(own_seeds: range, drafting: bool) -> Counter[tuple[int, ...]]:
        async def one(seed: int) -> tuple[int, ...]:
            made = writer(engines, sampling, seed, drawn=drawn)
            work = made.speculate(PREFIX, NUM_TOKENS, ENDING) if drafting else made.write(PREFIX, NUM_TOKENS, ENDING)
            return tuple((await work).ids)

        found: Counter[tuple[int, ...]] = Counter()
        for start in range(own_seeds.start, own_seeds.stop, 64):
            found.update(await asyncio.gather(*map(one, range(start, min(start + 64, own_seeds.stop)))))
        return found

    plain = asyncio.run(sample(range(NUM_SAMPLES), drafting=False))
    drafted = asyncio.run(sample(range(NUM_SAMPLES, 2 * NUM_SAMPLES), drafting=True))

    # Two samples of one distribution: each term is about a chi-squared variable of one degree of freedom.
    kinds = [kind for kind in plain | drafted if plain[kind] + drafted[kind] >= 10]
    distance = sum((plain[kind] - drafted[kind]) ** 2 / (plain[kind] + drafted[kind]) for kind in kinds)
    assert len(kinds) > 5
    assert distance < len(kinds) + 4 * (2 * len(kinds)) ** 0.5
