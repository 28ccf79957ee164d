"""The demo's training data: what is learned, what is seen, and how the models start out."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

import pytest
import typer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from demo.judge_pairs import Pair, pairs  # noqa: E402
from demo.lessons import (  # noqa: E402
    DRILL_COMPARISONS,
    DRILL_FACTS,
    IGNORED,
    LESSONS,
    RECITED_COUNTS,
    Document,
    _pair_document,
    document,
    drill,
    pack,
    recital,
    verdict_ids,
)
from demo.problems import meaning, problems  # noqa: E402
from demo.sentences import NAMES  # noqa: E402
from demo.tokenizer import chat, train_tokenizer  # noqa: E402
from demo.train import RECIPES, TaughtHead, build_model, draft_for, main, rate_factor, shared_tokenizer  # noqa: E402
from lr_backend.verify.judge_prompt import JudgePrompt  # noqa: E402
from tests.support.right_steps import is_right  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return train_tokenizer(documents=1000)


def learned(item: Document, tokenizer) -> str:  # type: ignore[no-untyped-def]
    """The text of the tokens that are learned."""
    return str(tokenizer.decode([token for token in item.labels if token != IGNORED]))


def test_the_question_is_not_learned(tokenizer) -> None:  # type: ignore[no-untyped-def]
    for problem in islice(problems(0), 20):
        item = document(problem, tokenizer)
        assert tokenizer.decode(item.ids) == chat(problem.question) + problem.completion + "<|im_end|>"
        assert learned(item, tokenizer) == problem.completion + "<|im_end|>"


def test_the_digits_of_a_slip_are_not_learned(tokenizer) -> None:  # type: ignore[no-untyped-def]
    problem = next(p for p in problems(1, slip_rate=0.5) if any(step.slip for step in p.steps))
    item = document(problem, tokenizer)
    gone = len(problem.completion + "<|im_end|>") - len(learned(item, tokenizer))
    assert gone >= sum(len(str(step.meaning.result)) for step in problem.steps if step.slip)
    for step in problem.steps:
        assert (step.text in learned(item, tokenizer)) is not step.slip


def test_a_drill_is_right_and_only_its_results_are_learned(tokenizer) -> None:  # type: ignore[no-untyped-def]
    item = drill(random.Random(0), tokenizer)
    said = tokenizer.decode(item.ids).partition("<think>\n")[2].removesuffix(".\n\n<|im_end|>").split(".\n\n")
    taught = learned(item, tokenizer).removeprefix("<think>\n").removesuffix(".\n\n<|im_end|>").split(".\n\n")
    facts, comparisons = said[:DRILL_FACTS], said[DRILL_FACTS:]
    assert len(said) == len(taught)
    assert len(comparisons) == DRILL_COMPARISONS
    for fact, result in zip(facts, taught, strict=False):
        a, op, b, _, right = fact.removeprefix("And ").split(" ")
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[op] == int(right)
        assert result == right
    for sentence, end in zip(comparisons, taught[DRILL_FACTS:], strict=True):
        read = meaning(f"{sentence}.")
        assert read is not None
        assert is_right(f"{sentence}.")
        assert end in (f" {read.subject}", f" {read.subject} has more")


def test_a_recital_learns_only_counts_that_were_said_before(tokenizer) -> None:  # type: ignore[no-untyped-def]
    item = recital(random.Random(1), tokenizer)
    said = tokenizer.decode(item.ids).partition("<think>\n")[2].removesuffix(".\n\n<|im_end|>").split(".\n\n")
    taught = learned(item, tokenizer).removeprefix("<think>\n").removesuffix(".\n\n<|im_end|>").split(".\n\n")
    assert len(said) == len(taught) == RECITED_COUNTS
    counts: dict[str, str] = {}
    for sentence, part in zip(said, taught, strict=True):
        *_, name, _, count, unit = sentence.split(" ")
        assert part.strip() in (unit, f"{count} {unit}")
        if part.strip() != unit:
            assert counts[name] == count
        counts[name] = count
    assert any(part[0].isdigit() for part in taught)


def test_a_lookup_leads_to_the_same_digit_of_the_same_person(tokenizer) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(2)
    items = [recital(rng, tokenizer), *(document(problem, tokenizer) for problem in islice(problems(5), 20))]
    assert sum(len(item.pointers["lookup"]) for item in items) > 100
    for item in items:
        for query, key in item.pointers["lookup"]:
            assert key < query
            assert item.ids[query + 1] == item.ids[key] == item.labels[query + 1]


def test_a_count_belongs_to_the_name_before_it(tokenizer) -> None:  # type: ignore[no-untyped-def]
    item = recital(random.Random(2), tokenizer)
    assert len(item.pointers["owner"]) >= 2 * RECITED_COUNTS
    for place, name in item.pointers["owner"]:
        assert name < place <= name + 4
        assert tokenizer.decode([item.ids[name]]).strip() in NAMES
        assert set(tokenizer.decode(item.ids[name + 2 : place + 1])) <= set(" 0123456789")


def test_a_step_looks_to_the_fact_that_it_works_on(tokenizer) -> None:  # type: ignore[no-untyped-def]
    for problem in islice(problems(5), 40):
        item = document(problem, tokenizer)
        facts = re.split(r"(?<=[.?]) ", problem.question)
        ends = list(accumulate(len(fact) + 1 for fact in facts))
        shown = {end: tokenizer.decode(item.ids[: end + 1]) for _, end in item.pointers["reading"]}
        looked = dict(item.pointers["reading"])
        start = len(tokenizer.encode(chat(problem.question) + "<think>\n", add_special_tokens=False))
        for step in problem.steps:
            assert shown[looked[start - 1]].endswith(facts[step.fact])
            assert len(shown[looked[start - 1]].partition("user\n")[2]) == ends[step.fact] - 1
            start += len(tokenizer.encode(step.text + "\n\n", add_special_tokens=False))
            assert looked[start - 2] == looked[start - 3]
        assert start - 1 not in looked
        order = item.pointers["order"]
        assert len(order) == len(facts) - 1
        assert all(before < end for end, before in order)


def test_what_is_taught_moves_with_its_document() -> None:
    items = (Document([n] * 4, [n] * 4, [1.0] * 4, {"owner": [(1, 0)], "lookup": [(2, 1)]}) for n in range(1, 100))
    batch = pack(items, rows=1, length=11, pad=0, prefix=(90, 91))
    assert set(batch.pointers) == set(LESSONS)
    assert batch.pointers["reading"].shape == (0, 3)
    assert batch.pointers["owner"].tolist() == [[0, 3, 2], [0, 7, 6]]
    assert batch.pointers["lookup"].tolist() == [[0, 4, 3], [0, 8, 7]]


def test_a_head_learns_where_to_look(tokenizer) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = build_model(replace(RECIPES["draft"], hidden=64, heads=2, head_dim=32, intermediate=64), tokenizer)
    head = TaughtHead(model, 0, 1)
    batch = pack(iter([recital(random.Random(3), tokenizer)] * 20), rows=1, length=512, pad=0)
    losses = []
    for _ in range(30):
        model.model(input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False)
        losses.append(head.loss(batch, batch.pointers["owner"]))
        torch.autograd.backward(losses[-1])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.3 * parameter.grad
        model.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_a_pair_ends_in_its_verdict_and_tells_each_field(tokenizer) -> None:  # type: ignore[no-untyped-def]
    prompt = JudgePrompt.from_tokenizer(tokenizer)
    aligned, unaligned = verdict_ids(tokenizer)
    for pair in islice(pairs(0), 200):
        item = _pair_document(pair, prompt, tokenizer, (aligned, unaligned))
        assert [*prompt.head_ids, *item.ids[:-1]] == prompt.ids(pair.first, pair.second)
        assert item.ids[-1] == item.labels[-1] == (aligned if pair.aligned else unaligned)
        told = [label for label in item.labels[:-1] if label != IGNORED]
        assert len(told) == len(pair.fields)
        assert told.count(unaligned) == sum(not same for _, same in pair.fields)


def test_a_field_looks_to_its_counterpart(tokenizer) -> None:  # type: ignore[no-untyped-def]
    prompt = JudgePrompt.from_tokenizer(tokenizer)
    num_looked = 0
    for pair in islice(pairs(6), 200):
        item = _pair_document(pair, prompt, tokenizer, verdict_ids(tokenizer))
        split = len(tokenizer.encode(pair.first, add_special_tokens=False))
        for query, key in item.pointers["lookup"]:
            assert key < split < query
            if pair.aligned:
                assert tokenizer.decode([item.ids[query]]).strip() == tokenizer.decode([item.ids[key]]).strip()
        num_looked += len(item.pointers["lookup"])
    assert num_looked > 600


def test_fields_of_a_pair_are_those_that_differ() -> None:
    for pair in islice(pairs(2), 300):
        one, two = meaning(pair.first), meaning(pair.second)
        assert one is not None
        assert two is not None
        if one.family == two.family and one.op == two.op:
            assert all(same for _, same in pair.fields) is pair.aligned
        assert all(0 < end <= len(pair.second) for end, _ in pair.fields)
    assert Pair("a", "b", False).fields == ()


def test_a_pair_of_two_meanings_that_cannot_be_compared_by_field_tells_the_verdict_alone(tokenizer) -> None:  # type: ignore[no-untyped-def]
    item = _pair_document(
        Pair("Ana has 5 pens.", "Ana has.", False), JudgePrompt.from_tokenizer(tokenizer), tokenizer, verdict_ids(tokenizer)
    )
    assert [label for label in item.labels if label != IGNORED] == [verdict_ids(tokenizer)[1]]
    assert item.pointers["lookup"] == []


def test_a_judge_needs_a_draft_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="train the draft first"):
        draft_for("judge", tmp_path, threads=1)
    assert draft_for("target", tmp_path, threads=1) is None


def test_quick_models_are_not_written_over_the_shipped_ones() -> None:
    with pytest.raises(typer.BadParameter, match="give --home"):
        main(role="tokenizer", quick=True)


def test_models_that_are_there_give_their_tokenizer(tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tokenizer.save_pretrained(tmp_path / "checkpoints" / "draft")
    assert shared_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    assert (tmp_path / "runs" / "tokenizer" / "tokenizer.json").exists()


def test_packed_documents_see_the_prefix_and_themselves() -> None:
    items = (Document([n] * 4, [n] * 4, [1.0] * 4) for n in range(1, 100))
    batch = pack(items, rows=1, length=11, pad=0, prefix=(90, 91))
    assert batch.ids.tolist() == [[90, 91, 1, 1, 1, 1, 2, 2, 2, 2, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 0]]
    assert batch.labels[0, 2].item() == batch.labels[0, 6].item() == IGNORED
    sees = batch.mask[0, 0]
    assert sees[8].nonzero().flatten().tolist() == [0, 1, 6, 7, 8]
    assert sees[5].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("role", ["target", "draft", "judge"])
def test_models_have_the_sizes_that_are_told(tokenizer, role) -> None:  # type: ignore[no-untyped-def]
    model = build_model(RECIPES[role], tokenizer)
    least, most = {"target": (9e6, 12e6), "draft": (0.8e6, 1.3e6), "judge": (2.5e6, 3.5e6)}[role]
    assert least <= model.num_parameters() <= most
    for layer in model.model.layers[1 : max(2, len(model.model.layers) - 1)]:
        attention = layer.self_attn
        assert torch.equal(attention.q_proj.weight[:64], attention.k_proj.weight[:64])


def test_rates_rise_then_fall() -> None:
    recipe = RECIPES["target"]
    factors = [rate_factor(step, 400, recipe) for step in range(400)]
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(recipe.floor, rel=0.1)
