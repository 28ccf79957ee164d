"""The checkpoints that the repository ships."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = Path(__file__).parents[2] / "demo" / "checkpoints"
"""A directory for each role. All share one small tokenizer, made like Qwen's."""
QWEN_LIKE = CHECKPOINTS / "target"
