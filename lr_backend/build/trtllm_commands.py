"""The commands that make a TensorRT-LLM engine from a Hugging Face checkpoint, as values. Pure; nothing is run here.

Names, flags and defaults are those of TensorRT-LLM 1.2.1 (``tests/contract/upstream_1_2_1.toml`` holds them as data).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from lr_backend.build.gpu_spec import TrtllmEngineSpec
from lr_backend.contract import LOGITS_DTYPE, NUMPY_DTYPES
from lr_backend.engine import Role
from lr_backend.nvidia import VISIBLE

CONVERTERS = {
    "Qwen3ForCausalLM": "models/core/qwen/convert_checkpoint.py",
    "Qwen2ForCausalLM": "models/core/qwen/convert_checkpoint.py",
    "LlamaForCausalLM": "models/core/llama/convert_checkpoint.py",
}
QUANTIZER = "quantization/quantize.py"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Where upstream's tools are; the defaults are the NGC image's."""

    examples: Path = Path("/app/examples")
    python: str = "python3"
    trtllm_build: str = "trtllm-build"


NGC_TOOLS = Toolchain()


@dataclass(frozen=True, slots=True)
class Command:
    """A program's arguments, and what its environment holds besides."""

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def shell(self) -> str:
        """As one would type it."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment), *self.argv])


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a build.

    Attributes:
        output: the folder that it fills; emptied before.
        products: files in it without which the command has failed, whatever it says.
    """

    role: Role
    name: str
    command: Command
    output: Path
    products: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineDirs:
    """Where one role's build lives. It lies beside the model repository and never inside: Triton loads every folder there."""

    root: Path

    @classmethod
    def of(cls, repository: Path, role: Role) -> EngineDirs:
        return cls(repository.with_name(f"{repository.name}.engines") / role.value)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint in TensorRT-LLM's form."""
        return self.root / "checkpoint"

    @property
    def engine(self) -> Path:
        return self.root / "engine"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def state(self) -> Path:
        """What was done, for ``--resume``."""
        return self.root / "state.json"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"


def engine_steps(
    role: Role, engine: TrtllmEngineSpec, source: Path, architecture: str, dirs: EngineDirs, tools: Toolchain
) -> tuple[Step, ...]:
    """Convert or quantize, then compile."""
    ranks = range(engine.tp_size)
    # The build times its kernels on the cards that will run them, and on no others.
    environment = ((VISIBLE, ",".join(map(str, engine.gpu_device_ids))),)
    quantizes = engine.quantization == "fp8"
    # Texts are read from a folder; what is made of them is cached where the build may write.
    offline = (("HF_HOME", str(dirs.root / "cache")), ("HF_HUB_OFFLINE", "1")) if quantizes else ()
    first = (
        quantize_command(engine, source, dirs, tools) if quantizes else convert_command(engine, source, architecture, dirs, tools)
    )
    return (
        Step(
            role=role,
            name="quantize" if quantizes else "convert",
            command=Command(first, environment + offline),
            output=dirs.checkpoint,
            products=("config.json", *(f"rank{rank}.safetensors" for rank in ranks)),
        ),
        Step(
            role=role,
            name="compile",
            command=Command(build_command(engine, dirs, tools), environment),
            output=dirs.engine,
            products=("config.json", *(f"rank{rank}.engine" for rank in ranks)),
        ),
    )


def convert_command(
    engine: TrtllmEngineSpec, source: Path, architecture: str, dirs: EngineDirs, tools: Toolchain
) -> tuple[str, ...]:
    """Weights in ``dtype``, cut for each rank."""
    return (
        tools.python,
        str(tools.examples / CONVERTERS[architecture]),
        *_flags(
            model_dir=source,
            output_dir=dirs.checkpoint,
            dtype=engine.dtype,
            tp_size=engine.tp_size,
            workers=len(engine.gpu_device_ids),  # a build for several machines runs on one of them
        ),
    )


def quantize_command(engine: TrtllmEngineSpec, source: Path, dirs: EngineDirs, tools: Toolchain) -> tuple[str, ...]:
    """FP8 weights and activations; where asked for, scales for an FP8 KV cache."""
    return (
        tools.python,
        str(tools.examples / QUANTIZER),
        *_flags(
            model_dir=source,
            output_dir=dirs.checkpoint,
            dtype=engine.dtype,
            qformat="fp8",
            kv_cache_dtype="fp8" if engine.kv_cache_dtype == "fp8" else None,
            tp_size=engine.tp_size,
            calib_dataset=engine.calib_dataset,
            calib_size=engine.calib_size,
        ),
    )


def build_command(engine: TrtllmEngineSpec, dirs: EngineDirs, tools: Toolchain) -> tuple[str, ...]:
    """``trtllm-build``. What the loop depends on is said even where it is upstream's default."""
    quantized = engine.quantization == "fp8"
    drafts = engine.max_draft_len
    cache = dirs.root / "timing.cache"
    return (
        tools.trtllm_build,
        *_flags(
            checkpoint_dir=dirs.checkpoint,
            output_dir=dirs.engine,
            max_batch_size=engine.max_batch_size,
            max_num_tokens=engine.max_num_tokens,
            max_seq_len=engine.max_seq_len,
            max_beam_width=1,
            # The verification's buffers and the pbtxt's logits_datatype are of this type.
            logits_dtype=NUMPY_DTYPES[LOGITS_DTYPE].__name__,
            gpt_attention_plugin="auto",
            # TensorRT's own kernels are the faster ones for FP8, the plugin's for the rest.
            gemm_plugin="disable" if quantized else "auto",
            remove_input_padding="enable",
            context_fmha="enable",
            # KV reuse, chunked context and draft tokens all need it.
            use_paged_context_fmha="enable",
            use_fp8_context_fmha=_switch(quantized and engine.kv_cache_dtype == "fp8"),
            tokens_per_block=engine.tokens_per_block,
            multiple_profiles=_switch(engine.multiple_profiles),
            speculative_decoding_mode="draft_tokens_external" if drafts else None,
            max_draft_len=drafts or None,
            # One rank after another: each takes two to three times its weights of the machine's memory.
            workers=1,
            # Timings outlive a build that failed, so that the next one is quicker.
            input_timing_cache=cache,
            output_timing_cache=cache,
        ),
    )


def _flags(**values: object) -> list[str]:
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def _switch(value: bool) -> str:
    return "enable" if value else "disable"
