"""Draws with the embedded engine's noise in an engine of the LLM API: a logits processor that leaves the drawn token alone.

What the noise is and what it is for stands in :mod:`lr_backend.engine.noise`. Upstream samples greedily from what this
leaves, so the processor decides each token. It keeps no state: it reads the position off the tokens that upstream hands it.

What upstream asks and grants (``tensorrt_llm/sampling_params.py``, ``executor/base_worker.py``, ``executor/ipc.py``, the forward
step of ``_torch/pyexecutor/`` and ``docs/source/features/feature-combination-matrix.md``, in copies of main up to August 2026.
Their interface is one and the same; no release was run with this):

- ``SamplingParams.logits_processor`` takes any callable of ``LogitsProcessor``'s signature, or a list of them, for one request.
  It is pickled on its way to the ranks, whose processes need this package, and called on the last pipeline rank after each
  forward pass, outside of CUDA graphs.
- ``logits`` is a view, [beams, 1, vocabulary], to be changed in place. ``token_ids`` is [beams][tokens], prompt included.
  ``stream_ptr`` and ``client_id`` are None in the PyTorch flow.
- **Under the overlap scheduler ``token_ids`` lags**: from the second token on it lacks the one that was drawn last (pull request
  16785). So an engine with ``coupled_noise`` runs without that scheduler, and pays what it would have hidden.
- **Speculative decoding** and logits processors exclude each other in one engine.
- A request that upstream has paused is computed again without its processor for one token. Upstream's default scheduler policy
  pauses none.
- **Log-probabilities** are those of what the processor leaves. Sampled requests that want them are refused.

It takes some forty small kernels a token, one request after another. And logits on a GPU are rounded in their own way:
equal noise does not make texts that are equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lr_backend.engine import Sampling


@dataclass(frozen=True, slots=True)
class CoupledNoise:
    """The ``LogitsProcessor`` of one sampled request, without beams."""

    sampling: Sampling
    seed: int

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None = None
    ) -> None:
        """Rule out all tokens but the one that is drawn after ``token_ids``."""
        from lr_backend.engine.drawing import next_tokens  # torch is at hand where upstream calls, and not needed elsewhere

        rows = logits.view(len(token_ids), -1)
        positions = [len(tokens) for tokens in token_ids]
        drawn = next_tokens(rows.float(), [self.sampling] * len(rows), [self.seed] * len(rows), positions)
        rows.fill_(float("-inf")).scatter_(1, drawn[:, None], 0.0)
