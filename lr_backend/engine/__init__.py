"""What the loop asks of an engine, and what all engines share."""

from lr_backend.engine.protocol import (
    GREEDY,
    Engine,
    EngineCall,
    Generation,
    Role,
    Sampling,
    cancel_tensors,
    one_hot_logits,
)

__all__ = [
    "GREEDY",
    "Engine",
    "EngineCall",
    "Generation",
    "Role",
    "Sampling",
    "cancel_tensors",
    "one_hot_logits",
]
