"""Settings of one embedded engine, checked when made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, InstanceOf, model_validator

from lr_backend.engine.settings import EmbeddedSettings, WeightDtype
from lr_backend.hardware.pace import EnginePace
from lr_backend.parameters import EngineParameters


def _read_pace(value: Any) -> Any:
    return EnginePace.from_json(value) if isinstance(value, str) else value


class EngineConfig(EmbeddedSettings, EngineParameters):
    """How one checkpoint is served.

    Attributes:
        speculative_model_dir: a draft model of the same vocabulary for the engine itself to draft with, for the requests that
            ask for it (``num_draft_tokens``); None: there is none. Native kernels only.
        speculative_weight_dtype: ``weight_dtype`` of that model.
        pace: of an engine that :func:`~lr_backend.emulated.open.open_engine` opens: iterations last as long as those of the
            hardware that it stands for, and calls take its hops; None: as long as they take here.
        script: of an engine that writes scripted texts instead of a model's: :class:`~lr_backend.emulated.texts.Script` as JSON.
    """

    engine_name: ClassVar = "the embedded engine"

    speculative_model_dir: Path | None = None
    speculative_weight_dtype: WeightDtype = "auto"
    pace: Annotated[InstanceOf[EnginePace] | None, BeforeValidator(_read_pace)] = None
    script: str | None = None

    @model_validator(mode="after")
    def _every_prompt_gets_in(self) -> Self:
        charges_blocks = self.pace is not None and self.pace.rules.charges_whole_prefix
        if charges_blocks and self.max_num_tokens < self.tokens_per_block:
            rule = f"at least tokens_per_block = {self.tokens_per_block}: at this pace prompts are read by whole blocks"
            raise ValueError(f"max_num_tokens={self.max_num_tokens}: {rule}")
        return self

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.max_tokens_in_paged_kv_cache // self.tokens_per_block
