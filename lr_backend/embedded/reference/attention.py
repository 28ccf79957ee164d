"""Attention of one iteration, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lr_backend.embedded.reference.kv_store import KvStore
from lr_backend.embedded.runner import Span


class ChunkAttention:
    """The :class:`~lr_backend.embedded.reference.model.Attention` of the chunks of one iteration, in their order.

    A chunk attends over its own sequence alone, so what it gets does not depend on the chunks beside it.
    """

    def __init__(self, store: KvStore, spans: Sequence[Span]) -> None:
        self._store = store
        self._counts = [span.count for span in spans]
        self._slots = [store.slots(span.blocks, 0, span.end) for span in spans]
        self._masks = [_causal(span, store.device) for span in spans]
        self._new_slots = torch.cat([slots[span.start :] for slots, span in zip(self._slots, spans, strict=True)])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._store.write(layer, self._new_slots, key, value)
        attended = []
        for rows, slots, mask in zip(torch.split(query, self._counts), self._slots, self._masks, strict=True):
            queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (rows, *self._store.read(layer, slots)))
            heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            attended.append(heads[0].transpose(0, 1))
        return torch.cat(attended)


def _causal(span: Span, device: torch.device) -> Tensor:
    """Which tokens of its sequence each token of a chunk sees: bool [count, end]."""
    return torch.ones(span.count, span.end, dtype=torch.bool, device=device).tril(span.start)
