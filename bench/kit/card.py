"""Iterations of models of real shapes, computed on a real card.

What an iteration takes is measured here; what it should take, hardware profiles say. Weights are random: a kernel's time does not
depend on what the weights mean. Torch does the work as an inference engine would: projections are joined, keys and values lie in
one memory, what lies between the products is fused to a few kernels, and iterations are replayed as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lr_backend.build.shapes import ModelShape, known_models
from lr_backend.embedded.checkpoint import ModelSpec
from lr_backend.embedded.random_checkpoint import random_weights
from lr_backend.embedded.reference.model import rms_normed, rotated
from lr_backend.embedded.rope import rope_table
from lr_backend.hardware.cost import Iteration, Join

KV_STEP, NEW_STEP = 512, 16
"""Lengths and new tokens are rounded up to multiples of these, so that few graphs serve all iterations."""
FEW = 4
"""Up to so many sequences are counted exactly. More are rounded up to an even number, and beyond twice as many to a multiple."""
DTYPE = torch.bfloat16
NORM_EPS = 1e-6


def shard_of(hub: str, tp_size: int = 1) -> ModelSpec:
    """What one of ``tp_size`` cards computes of a known model; the all-reduces between them are left out."""
    shape = known_models()[hub]
    return ModelSpec(
        architecture=shape.architecture,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads // tp_size,
        num_kv_heads=shape.num_kv_heads // tp_size,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size // tp_size,
        vocab_size=shape.vocab_size // tp_size,
        rms_norm_eps=NORM_EPS,
        max_positions=shape.max_positions,
        tie_word_embeddings=shape.tied_embeddings,
        rope=_rope(shape),
    )


def _rope(shape: ModelShape) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": shape.max_positions}


@dataclass(frozen=True)
class _Layer:
    """One layer's weights and its memory of keys and values: [tokens, 2 * kv_heads, head_dim], keys first."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    inner_norm: Tensor
    gate_up: Tensor
    down: Tensor
    memory: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of an iteration that attend in one kernel: ``num_sequences`` of ``num_new`` rows each.

    Attributes:
        first_row: of the iteration.
        first_slot: of the memory, where its sequences lie one after another.
        length: tokens of each sequence, its new ones included.
    """

    first_row: int
    num_sequences: int
    num_new: int
    first_slot: int
    length: int

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_new

    @property
    def num_slots(self) -> int:
        return self.num_sequences * self.length


@dataclass(frozen=True)
class _Plan:
    """An iteration's rows: token ids, places in the memory and positions, each int64 [T], and whose logits are wanted."""

    parts: tuple[_Part, ...]
    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    logit_rows: Tensor


class FusedModel:
    """One model on one card, for iterations of any make-up."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], *, max_kv_tokens: int, max_positions: int) -> None:
        """Takes the weights over, by their names in a checkpoint: the dictionary is empty afterwards.

        Args:
            max_kv_tokens: that all sequences of an iteration may have together.
        """
        self.spec = spec
        self._embedding = weights.pop("model.embed_tokens.weight")
        self.device, self._dtype = self._embedding.device, self._embedding.dtype
        self._head = self._embedding if spec.tie_word_embeddings else weights.pop("lm_head.weight")
        self._last_norm = weights.pop("model.norm.weight")
        memory_shape = (max_kv_tokens, 2 * spec.num_kv_heads, spec.head_dim)
        self._layers = [self._layer(index, weights, memory_shape) for index in range(spec.num_layers)]
        self._cosines, self._sines = (part.to(self.device) for part in rope_table(spec.rope, spec.head_dim, max_positions))
        self._max_kv_tokens, self._max_positions = max_kv_tokens, max_positions
        self._on_card = self.device.type == "cuda"
        self._graphs: dict[Iteration, tuple[torch.cuda.CUDAGraph, Callable[[], Tensor | None]]] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if self._on_card else None
        self._add_norm, self._rotate, self._gate = _between(compiles=self._on_card)

    @classmethod
    def random(cls, spec: ModelSpec, *, device: str, max_kv_tokens: int, max_positions: int) -> FusedModel:
        weights = random_weights(spec, dtype=DTYPE if device == "cuda" else torch.float32, device=device)
        model = cls(spec, weights, max_kv_tokens=max_kv_tokens, max_positions=max_positions)
        if model._on_card:
            torch.cuda.empty_cache()  # what loading leaves behind; models of other processes want the memory
        return model

    def prepared(self, iteration: Iteration) -> Callable[[], Tensor | None]:
        """What computes this iteration kernel by kernel, as often as it is called; it returns logits."""
        plan = self._plan(iteration)
        return lambda: self._forward(plan)

    def replayed(self, iteration: Iteration) -> Callable[[], Tensor | None]:
        """The same as one graph, where there is a card; it is recorded once."""
        if not self._on_card:
            return self.prepared(iteration)
        if iteration not in self._graphs:
            compute = self.prepared(iteration)
            self._graphs[iteration] = self._recorded(compute), compute  # which holds the tensors that the graph reads
        return self._graphs[iteration][0].replay

    def run(self, iteration: Iteration) -> None:
        """Compute an iteration like this one (:func:`like`) to its end, by a graph."""
        self.replayed(like(iteration, self._max_kv_tokens))()
        self.wait()

    def wait(self) -> None:
        """Until the card has done everything."""
        if self._on_card:
            torch.cuda.synchronize()

    # One pass -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _forward(self, plan: _Plan) -> Tensor:
        """Logits [R, vocabulary]."""
        spec = self.spec
        hidden = F.embedding(plan.token_ids, self._embedding)
        cosines, sines = self._cosines[plan.positions].unsqueeze(1), self._sines[plan.positions].unsqueeze(1)
        change = torch.zeros_like(hidden)
        for layer in self._layers:
            hidden, rows = self._add_norm(hidden, change, layer.input_norm)
            mixed = F.linear(rows, layer.qkv, layer.qkv_bias).view(len(rows), -1, spec.head_dim)
            queries, stored = self._rotate(mixed, cosines, sines, layer.q_norm, layer.k_norm, spec.num_heads, spec.num_kv_heads)
            layer.memory[plan.slots] = stored
            attended = [self._attended(part, queries, layer.memory) for part in plan.parts]
            joined = torch.cat(attended) if len(attended) > 1 else attended[0]
            hidden, rows = self._add_norm(hidden, F.linear(joined, layer.out), layer.inner_norm)
            change = F.linear(self._gate(F.linear(rows, layer.gate_up)), layer.down)
        _, rows = self._add_norm(hidden[plan.logit_rows], change[plan.logit_rows], self._last_norm)
        return F.linear(rows, self._head)

    def _attended(self, part: _Part, queries: Tensor, memory: Tensor) -> Tensor:
        """[T, heads, head_dim] -> [rows of the part, heads * head_dim]."""
        spec, count = self.spec, part.num_sequences
        kept = memory[part.first_slot : part.first_slot + part.num_slots].view(count, part.length, -1, spec.head_dim)
        keys, values = torch.split(kept.transpose(1, 2), spec.num_kv_heads, 1)
        rows = queries[part.first_row : part.first_row + part.num_rows].view(count, part.num_new, spec.num_heads, spec.head_dim)
        if part.num_new == 1:  # all heads that share keys and values read them together
            found = _attend(rows.view(count, spec.num_kv_heads, -1, spec.head_dim), keys, values, is_causal=False)
            return found.reshape(part.num_rows, -1)
        found = _attend(rows.transpose(1, 2), keys, values, is_causal=True)
        return found.transpose(1, 2).reshape(part.num_rows, -1)

    def _recorded(self, compute: Callable[[], Tensor | None]) -> torch.cuda.CUDAGraph:
        for _ in range(2):  # libraries and compilers do at the first call what may not happen while a graph is recorded
            compute()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        return graph

    def _plan(self, iteration: Iteration) -> _Plan:
        """Joins first, each behind its own cached tokens; then the decodes."""
        parts, rows, slots = [], 0, 0
        for num_sequences, num_new, length in _sequences(iteration):
            parts.append(_Part(rows, num_sequences, num_new, slots, length))
            rows, slots = rows + parts[-1].num_rows, slots + parts[-1].num_slots
        if slots > self._max_kv_tokens:
            raise ValueError(f"{iteration} has {slots} tokens, and there is memory for {self._max_kv_tokens}")
        ends = [(part, part.first_slot + (place + 1) * part.length) for part in parts for place in range(part.num_sequences)]
        places = [end - part.num_new + row for part, end in ends for row in range(part.num_new)]
        positions = [part.length - part.num_new + row for part, _ in ends for row in range(part.num_new)]
        wanted = [row for part, join in zip(parts, iteration.joins, strict=False) for row in _logit_rows(part, join.num_drafts)]
        wanted += range(rows - iteration.num_decodes, rows)
        numbers = torch.tensor([[(7 * row + 3) % self.spec.vocab_size for row in range(rows)], places, positions])
        token_ids, slot_of, position_of = numbers.to(self.device)
        return _Plan(tuple(parts), token_ids, slot_of, position_of, torch.tensor(wanted, device=self.device))

    def _layer(self, index: int, weights: dict[str, Tensor], memory_shape: tuple[int, ...]) -> _Layer:
        prefix = f"model.layers.{index}."

        def joined(*names: str, of: str = "weight") -> Tensor:
            return torch.cat([weights.pop(f"{prefix}{name}.{of}") for name in names])

        def norm(name: str) -> Tensor | None:
            return weights.pop(f"{prefix}self_attn.{name}.weight", None)

        projections = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
        return _Layer(
            input_norm=joined("input_layernorm"),
            qkv=joined(*projections),
            qkv_bias=joined(*projections, of="bias") if self.spec.qkv_bias else None,
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            out=joined("self_attn.o_proj"),
            inner_norm=joined("post_attention_layernorm"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
            memory=torch.zeros(memory_shape, dtype=self._dtype, device=self.device),
        )


def like(iteration: Iteration, max_kv_tokens: int) -> Iteration:
    """One that takes as long, of which there are few: its joins are equal, and so are its decodes; sizes are rounded up.

    Args:
        max_kv_tokens: that it may have in all; lengths are cut to fit.
    """
    joins, num_decodes = iteration.joins, _rounded_count(iteration.num_decodes)
    cached = new = length = 0
    if joins:
        new = _rounded(fmean(join.num_new for join in joins), NEW_STEP)
        cached = _rounded(fmean(join.num_cached for join in joins), KV_STEP)
    if num_decodes:
        length = _rounded(iteration.kv_tokens / iteration.num_decodes, KV_STEP)
    num_joins = _rounded_count(len(joins))
    most = max_kv_tokens // max(1, num_joins + num_decodes)
    drafts = new - 1 if any(join.num_drafts for join in joins) else 0
    alike = Join(new, min(cached, most - new), drafts)
    return Iteration((alike,) * num_joins, num_decodes, num_decodes * min(length, most))


def _rounded_count(count: int) -> int:
    step = 1 if count <= FEW else 2 if count <= 2 * FEW else FEW
    return -(-count // step) * step


def _rounded(number: float, step: int) -> int:
    """Up to a multiple; small ones of a step to halves and quarters of it."""
    for part in (step // 4, step // 2):
        if number <= part:
            return part if number else 0
    return step * ceil(number / step)


def _sequences(iteration: Iteration) -> list[tuple[int, int, int]]:
    """(sequences, new tokens of each, tokens of each) of what attends in one kernel.

    Raises:
        ValueError: decodes of unequal length.
    """
    found = [(1, join.num_new, join.num_cached + join.num_new) for join in iteration.joins]
    if iteration.num_decodes:
        length, left = divmod(iteration.kv_tokens, iteration.num_decodes)
        if left:
            raise ValueError(f"decodes have equal lengths here, unlike those of {iteration}")
        found.append((iteration.num_decodes, 1, length))
    return found


def _logit_rows(part: _Part, num_drafts: int) -> range:
    """Those of a join whose logits decide something: its draft tokens' and its last."""
    end = part.first_row + part.num_new
    return range(end - 1 - min(num_drafts, part.num_new - 1), end)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool) -> Tensor:
    """Attention [S, heads, rows, head_dim]; the last row sees everything, each row before it one token less."""
    if queries.is_cuda:  # the kernel behind scaled_dot_product_attention, without its choice between several
        found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, is_causal)[0]
        return found
    mask = causal_lower_right(queries.shape[-2], keys.shape[-2]) if is_causal else None
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


# Between the products -------------------------------------------------------------------------------------------------


@cache
def _between(*, compiles: bool) -> tuple[Callable[..., Any], ...]:
    functions: Sequence[Callable[..., Any]] = (_add_norm, _rotate, _gate)
    return tuple(torch.compile(one, dynamic=True) if compiles else one for one in functions)


def _add_norm(hidden: Tensor, change: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and its RMS norm in float32."""
    total = hidden + change
    return total, rms_normed(total, weight, NORM_EPS)


# Its parameters are what one kernel reads.
def _rotate(
    mixed: Tensor, cosines: Tensor, sines: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Queries, and keys with values behind them; queries and keys are normed where the model does so, and rotated."""
    queries, keys, values = torch.split(mixed, [num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        queries, keys = rms_normed(queries, q_norm, NORM_EPS), rms_normed(keys, k_norm, NORM_EPS)
    return rotated(queries, cosines, sines), torch.cat([rotated(keys, cosines, sines), values], 1)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
