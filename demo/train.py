"""Train the demo models from scratch: ``python -m demo.train --role target|draft|judge|tokenizer|all``."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
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

from bench.kit.models import Model
from demo.lessons import IGNORED, Batch, Lesson, ModelRole, batches
from demo.tokenizer import CONTEXT, END_OF_TEXT, TURN_END, VOCABULARY, load_tokenizer, train_tokenizer

ROOT = Path(__file__).parent
SEED = 0
FAST_PAIRS = 14
TAUGHT_WEIGHT = 1.0
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
    "target": Recipe(384, 5, 6, 64, 1152, 3300, 400, 8, 512, 3e-3, 3e-3),
    "draft": Recipe(192, 2, 3, 64, 640, 930, 300, 16, 512, 4e-3, 4e-3),
    "judge": Recipe(256, 4, 4, 64, 704, 2100, 350, 6, 512, 2e-3, 2e-3),
}


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
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
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

    def __init__(self, model: Qwen3ForCausalLM, layer: int, head: int) -> None:
        self._attention = model.model.layers[layer].self_attn
        self._head = head
        self._size = model.config.head_dim
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
        hidden, rotations = self._seen["hidden"], self._seen["rotations"]
        own = slice(self._head * self._size, (self._head + 1) * self._size)
        attention = self._attention
        queries = _rotated(attention.q_norm(functional.linear(hidden, attention.q_proj.weight[own])), *rotations)
        keys = _rotated(attention.k_norm(functional.linear(hidden, attention.k_proj.weight[own])), *rotations)
        scores = (queries @ keys.mT / math.sqrt(self._size)).masked_fill(~batch.mask[:, 0], float("-inf"))
        return functional.cross_entropy(scores[row, query].float(), key)


def taught_heads(model: Qwen3ForCausalLM) -> dict[Lesson, TaughtHead]:
    """The last heads of the middle layers. What a step is about is read one layer above the look-ups, where there is one."""
    middle, last = model.config.num_hidden_layers // 2, model.config.num_attention_heads - 1
    heads: dict[Lesson, TaughtHead] = {
        "owner": TaughtHead(model, middle - 1, last),
        "lookup": TaughtHead(model, middle, last),
    }
    if middle + 2 < model.config.num_hidden_layers:
        heads["order"] = TaughtHead(model, middle - 1, last - 1)
        heads["reading"] = TaughtHead(model, middle + 1, last)
    return heads


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
    """The shared tokenizer: that of the models that are there, else trained on first use, or when ``fresh``."""
    directory = home / "runs" / "tokenizer"
    if fresh or not (directory / "tokenizer.json").exists():
        there = [home / "checkpoints" / role for role in MODEL_ROLES if (home / "checkpoints" / role).exists()]
        made = load_tokenizer(there[0]) if there and not fresh else train_tokenizer()
        made.save_pretrained(directory)
    return load_tokenizer(directory)


def draft_for(role: ModelRole, home: Path, threads: int) -> Model | None:
    """The trained draft that a judge learns from."""
    if role != "judge":
        return None
    directory = home / "checkpoints" / "draft"
    if not directory.exists():
        raise typer.BadParameter(f"the judge learns from what the draft writes: train the draft first ({directory} is not there)")
    return Model.load(directory, threads)


def train(role: ModelRole, steps: int, resume: bool, home: Path, keep_every: int = 100) -> None:
    """Train one model to ``steps`` updates in all; progress goes to ``home/runs``, the model to ``home/checkpoints``."""
    recipe = RECIPES[role]
    tokenizer = shared_tokenizer(home)
    torch.manual_seed(SEED)
    device, precision = device_and_precision()
    model = build_model(recipe, tokenizer).to(device)
    updates = optimisers(model, recipe)
    run = home / "runs" / f"{role}.pt"
    taught = taught_heads(model)
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
    draft = draft_for(role, home, torch.get_num_threads())
    stream = batches(role, recipe.rows, recipe.length, tokenizer, SEED + begin, draft)
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
                lessons = {lesson: head.loss(batch, batch.pointers[lesson]) for lesson, head in taught.items()}
            torch.autograd.backward(loss + TAUGHT_WEIGHT * torch.stack(list(lessons.values())).sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for update in updates:
                update.step()
                update.zero_grad()
            spent = seconds + time.monotonic() - started
            row: dict[str, float] = {"step": step + 1, "loss": round(loss.item(), 4)}
            row |= {lesson: round(value.item(), 4) for lesson, value in lessons.items()}
            row["seconds"] = round(spent, 1)
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
    home: Annotated[Path | None, typer.Option(help="Holds runs/ and checkpoints/; by default demo/.")] = None,
) -> None:
    """Train the tokenizer or the models of the embedded demo."""
    if quick and home is None:
        raise typer.BadParameter("--quick would write weaker models over the shipped ones: give --home, such as out/quick")
    home = home or ROOT
    torch.set_num_threads(os.cpu_count() or 1)
    if role == "tokenizer":
        shared_tokenizer(home, fresh=True)
        return
    for name in MODEL_ROLES if role == "all" else (role,):
        recipe = RECIPES[name]
        train(name, steps or (recipe.quick_steps if quick else recipe.steps), resume, home)


if __name__ == "__main__":
    typer.run(main)
