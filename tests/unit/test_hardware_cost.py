"""The one cost function: against the package whose tables it adds up, and what must hold whatever the tables say."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import paper
from lr_backend.build.spec import PACKAGE_ROOT
from lr_backend.hardware import overheads as constants
from lr_backend.hardware.cost import Iteration, Join, LinearCosts, ProfileCosts
from lr_backend.hardware.overheads import Bound, Constant, Overheads
from lr_backend.hardware.profile import ProfileKey, available, find
from lr_backend.hardware.sharing import IDLE, Demand

TARGET = find(ProfileKey("h200_sxm", "Qwen3-32B", 2, "bfloat16"))
DRAFT = find(ProfileKey("h200_sxm", "Qwen3-1.7B", 1, "bfloat16"))
COMPILED = ProfileCosts(TARGET, Overheads.compiled(TARGET, poll_ms=1))

joins = st.builds(Join, st.integers(1, 600), st.integers(0, 8000))
iterations = st.builds(
    lambda found, decodes, kv: Iteration(tuple(found), decodes, decodes * kv),
    st.lists(joins, max_size=3),
    st.integers(0, 64),
    st.integers(1, 8000),
).filter(lambda one: one.num_tokens > 0)


@pytest.mark.parametrize("key", list(available()), ids=lambda key: key.file_name)
def test_kernels_add_up_to_what_the_package_itself_says(key: ProfileKey) -> None:
    """Of whole decodes and prefills. Between two entries a step in a kernel's time is drawn as a slope; and several small prompts
    at once use a card better than one, so that their sum may be too high."""
    profile = find(key)
    costs = ProfileCosts(profile, Overheads.compiled(profile, poll_ms=1))
    assert profile.checks
    for check in profile.checks:
        if "num_decodes" in check:
            iteration = Iteration((), int(check["num_decodes"]), int(check["num_decodes"] * check["kv_tokens"]))
        else:
            one = Join(int(check["num_new"]), int(check["num_cached"]))
            iteration = Iteration((one,) * int(check["num_joins"]))
        off = costs.kernels_ms(iteration) / check["ms"] - 1.0
        assert -0.05 < off < (0.12 if check.get("num_joins", 1) > 1 else 0.07), check


def test_a_small_join_costs_its_attention_and_not_a_share_of_a_cold_prompt() -> None:
    decodes = Iteration((), 8, 8000)
    joined = Iteration((Join(8, 1000),), 8, 8000)
    assert COMPILED.kernels_ms(decodes) == pytest.approx(11.2, rel=0.01)
    assert COMPILED.kernels_ms(joined) == pytest.approx(14.0, rel=0.01)


def test_joins_of_one_iteration_share_the_launches_of_their_attention() -> None:
    one, four = (COMPILED.kernels_ms(Iteration((Join(8, 1000),) * number)) for number in (1, 4))
    assert four - one < TARGET.context_launch_ms


def attention_ms(join: Join) -> float:
    """Without what else the iteration takes."""
    return COMPILED.kernels_ms(Iteration((join,))) - TARGET.dense_ms.at(join.num_new) - TARGET.context_launch_ms


def test_a_join_beyond_the_table_attends_as_its_pieces_do_one_after_another() -> None:
    pieces = [attention_ms(Join(8192, start)) for start in range(0, 32_768, 8192)]
    assert attention_ms(Join(32_768, 0)) == pytest.approx(sum(pieces))
    assert sum(pieces) > 10 * pieces[0], "it grows with the square"
    assert attention_ms(Join(8193, 500)) == pytest.approx(attention_ms(Join(8192, 500)) + attention_ms(Join(1, 8692)))


@given(st.integers(1, 8192), st.integers(0, 32_000))
def test_a_join_within_the_table_attends_as_the_table_says(num_new: int, num_cached: int) -> None:
    told = TARGET.context_attention_ms.at(num_new, num_cached) - TARGET.context_launch_ms
    assert attention_ms(Join(num_new, num_cached)) == pytest.approx(max(0.0, told), abs=1e-9)


def test_a_branch_reads_its_whole_prefix_again() -> None:
    alone, both = (COMPILED.kernels_ms(Iteration((), number, number * 16_000)) for number in (8, 16))
    assert both > 1.2 * alone


@given(iterations, joins)
def test_more_work_never_takes_less_time(iteration: Iteration, join: Join) -> None:
    """But for a percent: a few measured kernels are faster at the larger of two sizes."""
    more = Iteration((*iteration.joins, join), iteration.num_decodes, iteration.kv_tokens)
    assert COMPILED.seconds(more) > 0.99 * COMPILED.seconds(iteration)


@given(iterations)
def test_a_card_computes_for_a_part_of_an_iteration(iteration: Iteration) -> None:
    demand = COMPILED.demand(iteration)
    assert 0.0 < demand.share <= 1.0
    assert demand.kernel_s * TARGET.num_layers == pytest.approx(demand.share * COMPILED.seconds(iteration))


@given(iterations)
def test_the_ends_of_the_constants_ranges_hold_the_middle(iteration: Iteration) -> None:
    low, middle, high = (ProfileCosts(TARGET, Overheads.compiled(TARGET, 1, bound)).seconds(iteration) for bound in Bound)
    assert COMPILED.kernels_ms(iteration) / 1e3 < low < middle < high


def test_draft_tokens_of_a_call_are_decided_one_after_another_and_their_logits_are_copied() -> None:
    plain, drafted, with_logits = (
        COMPILED.seconds(Iteration((Join(9, 1000, drafts, logits),))) for drafts, logits in ((0, False), (8, False), (8, True))
    )
    assert drafted - plain == pytest.approx(8 * constants.DRAFT_STEP_MS.value / 1e3)
    assert with_logits - drafted == pytest.approx(COMPILED.overheads.draft_logits_inside_ms(8) / 1e3)
    # 8 x 151,936 x 2 bytes, 4.5 times through memory at TP 2.
    assert COMPILED.overheads.draft_logits_inside_ms(8) == pytest.approx(4.5 * 8 * 151_936 * 2 / 8e9 * 1e3)


def test_draft_tokens_of_the_engine_itself_are_rows_of_the_products_and_read_nothing_again() -> None:
    plain, drafted = (COMPILED.kernels_ms(Iteration((), 1, 30_000, drafts)) for drafts in (0, 4))
    assert 0.0 < drafted - plain == pytest.approx(TARGET.dense_ms.at(5) - TARGET.dense_ms.at(1))


def test_a_graph_spares_launches_where_nobody_joins() -> None:
    eager, graphs = (
        ProfileCosts(DRAFT, Overheads(DRAFT, replays_graphs=replays, poll_ms=None, loop_ms=0.3)) for replays in (False, True)
    )
    decode, join = Iteration((), 1, 1000), Iteration((Join(8, 1000),))
    assert graphs.seconds(decode) < eager.seconds(decode)
    assert graphs.seconds(join) == eager.seconds(join)


def test_a_model_of_short_kernels_is_bound_by_its_launches() -> None:
    overheads = Overheads.compiled(DRAFT, poll_ms=1)
    launches_ms = DRAFT.num_layers * constants.KERNELS_A_LAYER.value * constants.LAUNCH_US.value / 1e3
    fixed_ms = overheads.iteration_ms(0.0, 0, 1, 0) - launches_ms
    assert overheads.iteration_ms(0.1, 0, 1, 0) == pytest.approx(launches_ms + fixed_ms)


def test_a_message_is_on_average_half_a_poll_late() -> None:
    assert Overheads.compiled(TARGET, poll_ms=1).hop_ms == pytest.approx(0.05 + 1.06 / 2)
    assert Overheads.compiled(TARGET, poll_ms=0).hop_ms == 0.05
    assert Overheads.llmapi(TARGET).hop_ms == 0.0


CONSTANTS = {name: one for module in (constants, paper) for name, one in vars(module).items() if isinstance(one, Constant)}


def test_every_constant_names_its_source() -> None:
    assert len(CONSTANTS) >= 15
    assert all(len(one.source) > 20 for one in CONSTANTS.values())
    assert {field.name for field in fields(Constant)} == {"value", *(bound.value for bound in Bound), "source"}


def test_the_page_on_production_pace_has_every_constant_as_it_is() -> None:
    page = (PACKAGE_ROOT / "docs" / "benchmarks" / "pace.md").read_text()
    for name, one in CONSTANTS.items():
        value, low, high = (_shown(name, getattr(one, bound)) for bound in (Bound.VALUE, Bound.LOW, Bound.HIGH))
        assert f"| `{name}` | {value} | {low} to {high} | {one.source} |" in page


def _shown(name: str, value: float) -> str:
    return f"{value / 1e9:g} GB/s" if name == "COPY_BYTES_PER_S" else f"{value:g}"


def test_linear_costs_count_sequences_and_prompt_tokens() -> None:
    costs = LinearCosts(token_s=0.01, crowding=0.1, prompt_token_s=0.001)
    assert costs.seconds(Iteration((), 1, 500)) == 0.01
    assert costs.seconds(Iteration((Join(20, 100),), 2, 500)) == pytest.approx(0.012 + 0.02)
    assert costs.demand(Iteration((), 1, 500)) == IDLE
    assert LinearCosts(0.01, share_of_cores=0.5).demand(Iteration((), 1, 500)) == Demand(0.5)
