"""Train the demo models from scratch: ``python -m demo.train --role target|draft|judge|tokenizer|all``."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo.judge_pairs import Pair, pairs
from demo.problems import DELIMITER, ITEMS, LARGEST, NAMES, SMALLEST, Problem, compute, problems, spans
from demo.tokenizer import CONTEXT, END_OF_TEXT, THINK, TURN_END, VOCABULARY, chat, load_tokenizer, train_tokenizer
from lr_backend.verify.judge_prompt import ALIGNED, UNALIGNED, JudgePrompt

ROOT = Path(__file__).parent
IGNORED = -100
SLIP_RATE = 0.04
DRILL_FACTS = 24
DRILL_EVERY = 3
RECITED_COUNTS, CHANGED_COUNTS = 40, 0.3
RECITAL_OPENINGS = (
    "",
    "Now ",
    "So far ",
    "Since ",
    "Then ",
    "Next, ",
    "As ",
    "Before that ",
    "It is given that ",
    "At the start, ",
)
FAST_PAIRS = 14
ECHO_RATE, BLUR_RATE, SUBTLE_RATE = 0.1, 0.1, 0.6
DECISIVE = re.compile(r"\d+|" + "|".join(NAMES))
"""What a step can get wrong; its wording it cannot, so these tokens weigh more."""
DECISIVE_WEIGHT = 3.0
COUNT = re.compile(f"({'|'.join(NAMES)}) has (\\d+)")
TAUGHT_WEIGHT = 1.0
FIELD_WEIGHT, VERDICT_WEIGHT = 1.0, 2.0

ModelRole = Literal["target", "draft", "judge"]
MODEL_ROLES: tuple[ModelRole, ...] = ("target", "draft", "judge")


@dataclass(frozen=True)
class Recipe:
    """Shape and schedule of one model. ``rows`` sequences of ``length`` tokens an update; rates are peak rates."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    intermediate: int
    steps: int
    quick_steps: int
    rows: int
    length: int
    muon_rate: float
    adam_rate: float
    warmup: int = 40
    floor: float = 0.05


RECIPES: dict[ModelRole, Recipe] = {
    "target": Recipe(384, 5, 6, 64, 1152, 1960, 250, 8, 512, 3e-3, 3e-3),
    "draft": Recipe(192, 2, 3, 64, 640, 1800, 250, 16, 512, 4e-3, 4e-3),
    "judge": Recipe(256, 4, 4, 64, 704, 4680, 450, 6, 512, 2e-3, 2e-3),
}


@dataclass(frozen=True)
class Batch:
    """Packed sequences. All fields but the last are (rows, length) of int64: ``labels`` hold ``IGNORED`` where nothing is
    learned, ``segments`` number the documents of a row (-1 is padding, 0 is a prefix that every later segment sees).
    ``owners`` and ``lookups`` (n, 3) are row, query and key of what the documents' attention is taught."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor
    weights: Tensor
    owners: Tensor
    lookups: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def mask(self) -> Tensor:
        """(rows, 1, length, length) of bool: which positions (last axis) a position sees."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        prefix = (self.segments == 0)[:, None, :]
        order = torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        return ((same | prefix) & order)[:, None]


@dataclass(frozen=True)
class Document:
    """One training text: ``labels`` are the ids that are learned, ``IGNORED`` elsewhere; ``weights`` scale the loss.
    ``owners`` and ``lookups`` are pairs of positions: a count and the name it belongs to; where a digit is to be written and
    where it stands already."""

    ids: list[int]
    labels: list[int]
    weights: list[float]
    owners: tuple[tuple[int, int], ...] = ()
    lookups: tuple[tuple[int, int], ...] = ()


def document(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> Document:
    """A solved problem; the question and the digits of wrong results are not learned."""
    return _document(problem.question, problem.completion, _wrong_spans(problem), tokenizer)


def _document(
    question: str, completion: str, unlearned: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerFast
) -> Document:
    """``unlearned`` are character spans of the completion that only give context."""
    ids = tokenizer.encode(chat(question), add_special_tokens=False)
    labels = [IGNORED] * len(ids)
    weights = [1.0] * len(ids)
    text = completion + TURN_END
    decisive = [match.span() for match in DECISIVE.finditer(text)]
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    place: dict[int, int] = {}  # of a character, among the ids
    for token, (start, end) in zip(coded["input_ids"], coded["offset_mapping"], strict=True):
        place |= dict.fromkeys(range(start, end), len(ids))
        ids.append(token)
        labels.append(IGNORED if any(start < b and a < end for a, b in unlearned) else token)
        weights.append(DECISIVE_WEIGHT if any(start < b and a < end for a, b in decisive) else 1.0)
    lookups = [(place[to] - 1, place[source]) for to, source in _recalled(completion) if labels[place[to]] != IGNORED]
    owners = [(place[count], place[name]) for count, name in _owned(completion)]
    return Document(ids, labels, weights, tuple(owners), tuple(lookups))


def _owned(text: str) -> Iterator[tuple[int, int]]:
    """(a digit of someone's count or the space before it, the name)."""
    for match in COUNT.finditer(text):
        yield from ((at, match.start(1)) for at in range(match.start(2) - 1, match.end(2)))


def _recalled(text: str) -> Iterator[tuple[int, int]]:
    """Digits of counts that were said before of the same person: (where they are said again, where last before that)."""
    last: dict[str, tuple[str, int]] = {}
    for match in COUNT.finditer(text):
        name, count = match.groups()
        before, start = last.get(name, ("", 0))
        if before == count:
            yield from ((match.start(2) + digit, start + digit) for digit in range(len(count)))
        last[name] = count, match.start(2)


def drill(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Document:
    """Plain arithmetic of the demo world. Only results are learned: the operands come out of nowhere."""
    text, unlearned = f"{THINK}\n", []
    for _ in range(DRILL_FACTS):
        a, operator, b, result = _fact(rng)
        begin = len(text)
        text += f"And {a} {operator} {b} = "
        unlearned.append((begin, len(text)))
        text += f"{result}.{DELIMITER}"
    return _document("Practice.", text, unlearned, tokenizer)


def _fact(rng: random.Random) -> tuple[int, str, int, int]:
    """Two operands that lead to a count of the demo world; sums and differences, which are harder, more often."""
    while True:
        operator = rng.choices("+-*/", (4, 4, 1, 1))[0]
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, 6 if operator in "*/" else 60)
        result = compute(a, operator, b)
        if result is not None and SMALLEST <= result <= LARGEST:
            return a, operator, b, result


def recital(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Document:
    """Who has how many, said over and over, with changes. Only counts that were said before are learned."""
    names, unit = rng.sample(NAMES, rng.randint(2, 5)), rng.choice(ITEMS)
    text, unlearned = f"{THINK}\n", []
    counts: dict[str, int] = {}
    for _ in range(RECITED_COUNTS):
        name, begin = rng.choice(names), len(text)
        text += f"{rng.choice(RECITAL_OPENINGS)}{name} has "
        known = name in counts and rng.random() >= CHANGED_COUNTS
        if not known:
            counts[name] = rng.randint(SMALLEST, LARGEST)
        said = f"{counts[name]}"
        unlearned.append((begin, len(text) + (0 if known else len(said))))
        text += f"{said} {unit}.{DELIMITER}"
    return _document("Practice.", text, unlearned, tokenizer)


def lessons(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Document]:
    """Solved problems; after every ``DRILL_EVERY`` of them a drill and a recital."""
    rng = random.Random(f"drill-{seed}")
    for number, problem in enumerate(problems(seed, slip_rate=SLIP_RATE)):
        yield document(problem, tokenizer)
        if number % DRILL_EVERY == 0:
            yield drill(rng, tokenizer)
            yield recital(rng, tokenizer)


def _wrong_spans(problem: Problem) -> list[tuple[int, int]]:
    """Character spans, in the completion, of results that are wrong on purpose."""
    spans = []
    start = len(f"{THINK}\n")
    for step in problem.steps:
        if step.slip:
            at = start + step.text.rindex(f"= {step.meaning.result}") + len("= ")
            spans.append((at, at + len(str(step.meaning.result))))
        start += len(step.text) + len("\n\n")
    return spans


def _pair_document(pair: Pair, prompt: JudgePrompt, tokenizer: PreTrainedTokenizerFast, verdict_ids: tuple[int, int]) -> Document:
    """A judged pair without the common prefix.

    The verdict alone teaches nothing for hundreds of updates, so after each field of the second step the verdict on that
    field is learned too.
    """
    aligned, unaligned = verdict_ids
    ids = [*prompt.ids(pair.first, pair.second)[len(prompt.head_ids) :], aligned if pair.aligned else unaligned]
    labels = [IGNORED] * (len(ids) - 1) + ids[-1:]
    first, second = (tokenizer(text, return_offsets_mapping=True)["offset_mapping"] for text in (pair.first, pair.second))
    start = len(ids) - 1 - len(prompt.tail_ids) - len(second)
    for end, same in pair.fields:
        place = next(index for index, (_, token_end) in enumerate(second) if token_end == end)
        labels[start + place + 1] = aligned if same else unaligned
    weights = [FIELD_WEIGHT] * (len(ids) - 1) + [VERDICT_WEIGHT]
    lookups = [(start + query, key) for query, key in _counterparts(pair, first, second)]
    return Document(ids, labels, weights, lookups=tuple(lookups))


def _counterparts(pair: Pair, first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(token of a field in the second step, its counterpart in the first); the steps' tokens by their character spans."""
    if not pair.fields:
        return
    stated = spans(pair.first)
    for field, (begin, end) in spans(pair.second).items():
        if field in stated:
            keys = [index for index, (a, b) in enumerate(first) if a < stated[field][1] and stated[field][0] < b]
            queries = [index for index, (a, b) in enumerate(second) if a < end and begin < b]
            yield from ((query, keys[min(number, len(keys) - 1)]) for number, query in enumerate(queries))


def _lectures(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Document]:
    """Judged pairs, easy ones among them."""
    prompt = JudgePrompt.from_tokenizer(tokenizer)
    verdicts = verdict_ids(tokenizer)
    for pair in pairs(seed, echo_rate=ECHO_RATE, blur_rate=BLUR_RATE, subtle_rate=SUBTLE_RATE):
        yield _pair_document(pair, prompt, tokenizer, verdicts)


def pack(documents: Iterator[Document], rows: int, length: int, pad: int, prefix: tuple[int, ...] = ()) -> Batch:
    """Fill ``rows`` rows with whole documents behind a common ``prefix``; positions restart after the prefix."""
    shape = (rows, length)
    ids = torch.full(shape, pad)
    labels = torch.full(shape, IGNORED)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1)
    weights = torch.zeros(shape)
    filled = [len(prefix)] * rows
    count = [0] * rows
    owners: list[tuple[int, int, int]] = []
    lookups: list[tuple[int, int, int]] = []
    if prefix:
        ids[:, : len(prefix)] = torch.tensor(prefix)
        positions[:, : len(prefix)] = torch.arange(len(prefix))
        segments[:, : len(prefix)] = 0
    misses = 0
    while misses < 4:
        item = next(documents)
        size = len(item.ids)
        row = max((r for r in range(rows) if filled[r] + size <= length), key=lambda r: filled[r], default=None)
        if row is None:
            misses += 1
            continue
        start, end = filled[row], filled[row] + size
        count[row] += 1
        ids[row, start:end] = torch.tensor(item.ids)
        labels[row, start + 1 : end] = torch.tensor(item.labels[1:])
        weights[row, start + 1 : end] = torch.tensor(item.weights[1:])
        positions[row, start:end] = torch.arange(size) + len(prefix)
        segments[row, start:end] = count[row]
        owners += [(row, start + query, start + key) for query, key in item.owners]
        lookups += [(row, start + query, start + key) for query, key in item.lookups]
        filled[row] = end
    pointers = (torch.tensor(pairs, dtype=torch.long).view(-1, 3) for pairs in (owners, lookups))
    return Batch(ids, labels, positions, segments, weights, *pointers)


def batches(role: ModelRole, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """Endless training batches; never a problem of the validation or test split."""
    pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    if role == "judge":
        documents = _lectures(seed, tokenizer)
        prefix = JudgePrompt.from_tokenizer(tokenizer).head_ids
    else:
        documents = lessons(seed, tokenizer)
        prefix = ()
    while True:
        yield pack(documents, recipe.rows, recipe.length, pad, prefix)


def verdict_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """The single tokens of the two verdicts: aligned, unaligned."""
    (aligned,) = tokenizer.encode(ALIGNED, add_special_tokens=False)
    (unaligned,) = tokenizer.encode(UNALIGNED, add_special_tokens=False)
    return aligned, unaligned


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly initialised model."""
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,  # one shared head is too narrow to look names and numbers up by
        head_dim=recipe.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen3ForCausalLM(config)
    match_alike(model)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[end, pad], pad_token_id=pad
    )
    return model


@torch.no_grad()
def match_alike(model: Qwen3ForCausalLM, heads: int = 2) -> None:
    """Let the first ``heads`` heads of every inner layer start out attending to positions that look like their own.

    Query and key weights are equal there, and zero where the rotary embedding turns fast, so distance hardly matters. Finding
    the same name or number earlier in the text is what these models need most and otherwise discover last. Of two layers,
    the second counts as inner.
    """
    size = model.config.head_dim
    fast = torch.arange(size) % (size // 2) < FAST_PAIRS
    for layer in model.model.layers[1 : max(2, len(model.model.layers) - 1)]:
        for head in range(min(heads, model.config.num_attention_heads - 1)):
            rows = slice(head * size, (head + 1) * size)
            weight = torch.randn(size, model.config.hidden_size) * model.config.initializer_range
            weight[fast] = 0.0
            layer.self_attn.q_proj.weight[rows] = weight
            layer.self_attn.k_proj.weight[rows] = weight


def start_from(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Load the weights of the checkpoint in ``directory``, in fp32."""
    elder = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict(elder.state_dict())


def loss_of(model: Qwen3ForCausalLM, backbone: Callable[..., Any], batch: Batch) -> Tensor:
    """Weighted mean cross-entropy (nats a token) over the learned positions. ``backbone`` is ``model.model``,
    compiled or not."""
    hidden = backbone(
        input_ids=batch.ids, attention_mask=batch.mask(), position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    labels = batch.labels[:, 1:]
    learned = labels != IGNORED
    logits = model.lm_head(hidden[:, :-1][learned])
    losses = functional.cross_entropy(logits.float(), labels[learned], reduction="none")
    weights = batch.weights[:, 1:][learned]
    return torch.dot(losses, weights) / weights.sum()


class TaughtHead:
    """One attention head that is told where to look. Make it before the model is compiled.

    Finding the last count of one person among those of others takes a head that brings the name to the count, and above it
    one that finds the same name. Neither is of use before the other, so that a small model left to itself is long at chance.
    """

    def __init__(self, model: Qwen3ForCausalLM, layer: int) -> None:
        config = model.config
        self._attention = model.model.layers[layer].self_attn
        self._head = config.num_attention_heads - 1
        self._size = config.head_dim
        self._seen: dict[str, Any] = {}
        self._attention.register_forward_pre_hook(self._remember, with_kwargs=True)

    def _remember(self, module: torch.nn.Module, positional: Any, named: dict[str, Any]) -> None:
        self._seen["hidden"] = named["hidden_states"]
        self._seen["rotations"] = named["position_embeddings"]

    def loss(self, batch: Batch, pointers: Tensor) -> Tensor:
        """Mean cross-entropy (nats) between where the head attended to in the last pass and where ``pointers`` say it should."""
        if not len(pointers):
            return torch.zeros((), device=pointers.device)
        row, query, key = pointers.unbind(1)
        hidden, (cosine, sine) = self._seen["hidden"], self._seen["rotations"]
        own = slice(self._head * self._size, (self._head + 1) * self._size)
        attention = self._attention
        queries = attention.q_norm(functional.linear(hidden[row, query], attention.q_proj.weight[own]))
        keys = attention.k_norm(functional.linear(hidden, attention.k_proj.weight[own]))
        queries = _rotated(queries, cosine[row, query], sine[row, query])
        keys = _rotated(keys, cosine, sine)
        scores = torch.einsum("nd,nld->nl", queries, keys[row]) / math.sqrt(self._size)
        scores = scores.masked_fill(~batch.mask()[row, 0, query], float("-inf"))
        return functional.cross_entropy(scores.float(), key)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    one, two = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-two, one), dim=-1) * sine


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz in fp32 (``torch.optim.Muon`` does it in bf16, which
    processors without bf16 units run slowly). Updates are scaled to the size AdamW's would have."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(momentum, group["momentum"]))
                scale = 0.2 * math.sqrt(max(parameter.shape))
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly: a quintic Newton-Schulz iteration."""
    x: Tensor = matrix / (torch.linalg.vector_norm(matrix) + 1e-7)
    x = x if matrix.shape[0] <= matrix.shape[1] else x.T
    for _ in range(rounds):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def optimisers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.97), weight_decay=0.0, fused=True)
    return [Muon(matrices, recipe.muon_rate), adam]


def rate_factor(step: int, steps: int, recipe: Recipe) -> float:
    """Linear warmup, then linear decay to ``floor``."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, steps - recipe.warmup)
    return 1.0 - (1.0 - recipe.floor) * min(1.0, done)


def device_and_precision() -> tuple[torch.device, Any]:
    """Where to train, and the autocast that pays there."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.autocast("cuda", torch.bfloat16)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        return torch.device("cpu"), torch.autocast("cpu", torch.bfloat16)
    return torch.device("cpu"), nullcontext()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model in bf16 with its tokenizer, in Hugging Face's layout."""
    state = {name: value.detach().to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = model.generation_config
    copy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def shared_tokenizer(home: Path, fresh: bool = False) -> PreTrainedTokenizerFast:
    """The shared tokenizer, trained on first use or when ``fresh``."""
    directory = home / "runs" / "tokenizer"
    if fresh or not (directory / "tokenizer.json").exists():
        train_tokenizer().save_pretrained(directory)
    return load_tokenizer(directory)


def train(role: ModelRole, steps: int, resume: bool, seed: int, home: Path, keep_every: int = 100) -> None:
    """Train one model to ``steps`` updates in all; progress goes to ``home/runs``, the model to ``home/checkpoints``."""
    recipe = RECIPES[role]
    tokenizer = shared_tokenizer(home)
    torch.manual_seed(seed)
    device, precision = device_and_precision()
    model = build_model(recipe, tokenizer).to(device)
    updates = optimisers(model, recipe)
    run = home / "runs" / f"{role}.pt"
    middle = recipe.layers // 2
    owner_head, lookup_head = TaughtHead(model, middle - 1), TaughtHead(model, middle)
    backbone = torch.compile(model.model)
    begin, seconds = 0, 0.0
    if resume and run.exists():
        state = torch.load(run, weights_only=True)
        model.load_state_dict(state["model"])
        for update, saved in zip(updates, state["optimisers"], strict=True):
            update.load_state_dict(saved)
        begin, seconds = state["step"], state["seconds"]
    elif resume and (home / "checkpoints" / role).exists():
        start_from(model, home / "checkpoints" / role)  # no state of the optimisers is kept: the schedule begins anew
    peaks = [update.param_groups[0]["initial_lr"] if begin else update.param_groups[0]["lr"] for update in updates]
    for update, peak in zip(updates, peaks, strict=True):
        update.param_groups[0]["initial_lr"] = peak
    stream = batches(role, recipe, tokenizer, seed + begin)
    log = run.with_suffix(".jsonl").open("a" if begin else "w")
    started = time.monotonic()
    with Progress() as progress:
        task = progress.add_task(role, total=steps, completed=begin)
        for step in range(begin, steps):
            for update, peak in zip(updates, peaks, strict=True):
                update.param_groups[0]["lr"] = peak * rate_factor(step, steps, recipe)
            batch = next(stream).to(device)
            with precision:
                loss = loss_of(model, backbone, batch)
                taught = torch.stack([owner_head.loss(batch, batch.owners), lookup_head.loss(batch, batch.lookups)])
            torch.autograd.backward(loss + TAUGHT_WEIGHT * taught.sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for update in updates:
                update.step()
                update.zero_grad()
            spent = seconds + time.monotonic() - started
            owner, lookup = taught.tolist()
            losses = {"loss": loss.item(), "owner": owner, "lookup": lookup}
            figures = {name: round(value, 4) for name, value in losses.items()} | {"seconds": round(spent, 1)}
            row = {"step": step + 1, **figures}
            log.write(json.dumps(row) + "\n")
            log.flush()
            progress.update(task, advance=1, description=f"{role} loss {row['loss']}")
            if (step + 1) % keep_every == 0 or step + 1 == steps:
                state = {"model": model.state_dict(), "optimisers": [update.state_dict() for update in updates]}
                partial = run.with_suffix(".tmp")
                torch.save({**state, "step": step + 1, "seconds": spent}, partial)
                partial.replace(run)
                save(model, tokenizer, home / "checkpoints" / role)


def main(
    role: Annotated[Literal["target", "draft", "judge", "tokenizer", "all"], typer.Option()] = "all",
    quick: Annotated[bool, typer.Option(help="Fewer updates, weaker models.")] = False,
    steps: Annotated[int | None, typer.Option(help="Updates, instead of the recipe's.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last kept update.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option()] = os.cpu_count() or 1,
    home: Annotated[Path, typer.Option(help="Holds runs/ and checkpoints/.")] = ROOT,
) -> None:
    """Train the tokenizer or the models of the embedded demo."""
    torch.set_num_threads(threads)
    if role == "tokenizer":
        shared_tokenizer(home, fresh=True)
        return
    for name in MODEL_ROLES if role == "all" else (role,):
        recipe = RECIPES[name]
        train(name, steps or (recipe.quick_steps if quick else recipe.steps), resume, seed, home)


if __name__ == "__main__":
    typer.run(main)
