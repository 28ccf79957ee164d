"""Sections of a spec that take on the paper's other verifiers (:mod:`bench.plug_ins.verifiers`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Section = Mapping[str, Any]


def chance(probability: float, *, asks_judge: bool = False) -> Section:
    """Accepts with a probability."""
    return {"factory": "bench.plug_ins.verifiers:Chance", "probability": probability, "asks_judge": asks_judge}


def grade(least: float) -> Section:
    """Accepts what the target grades at least so, of 9."""
    return {"factory": "bench.plug_ins.verifiers:Grade", "least": least}


def embedding(folder: Path, least: float) -> Section:
    """Accepts from a cosine of sentence embeddings on; ``folder``: a sentence-transformers checkpoint."""
    return {"factory": "bench.plug_ins.verifiers:Embedding", "folder": str(folder.resolve()), "least": least}
