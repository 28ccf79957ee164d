"""Deployment specs: one TOML file says what is served, from which checkpoints, with which limits.

A spec is frozen and refuses unknown keys. Paths in it are relative to its project root: the folder above ``engines/`` for a
spec kept there, else the spec's own folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from lr_backend.config import CANCEL_RESERVE, LoopConfig
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, InvalidRequest
from lr_backend.request import LookaheadRequest

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The source checkout: specs are looked up by name and templates are found here."""

_FILLED_BY_BUILD = ("tokenizer_dir", "judge_tokenizer_dir", "vocab_size", "tokens_per_block", "accepts_all_drafts")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TorchEngineSpec(_Section):
    """One role on the torch engine. Sizes are in tokens, except ``max_batch_size`` (sequences) and ``max_queue_size`` (requests).

    Attributes:
        checkpoint: Hugging Face folder, relative to the project root.
        weight_dtype: ``same`` as ``dtype``, ``float16``, ``int8`` or ``auto``: the fastest.
        kernels: ``native``, the decoder in C; ``torch``; or ``auto``: the former where it can.
        num_threads: threads that compute in this engine's process.
        max_tokens_in_paged_kv_cache: KV budget of all sequences together.
        kv_cache_free_mem_fraction: holds that budget within a share of the memory that is free once the model is loaded.
        max_num_tokens: most tokens of one iteration; longer prompts are prefilled in chunks.
        max_seq_len: prompt and output of one request together.
        max_draft_len: most token drafts of one verification; 0 refuses drafts.
        overlap_prefill: compute longer chunks of prompts on a second thread, while others decode. Native kernels only.
        use_cuda_graphs: replay iterations that only decode as CUDA graphs; on a CPU it means nothing.
        random_weights: draw the weights at load; the checkpoint needs no weight files. For benchmarks of a size.
    """

    checkpoint: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    weight_dtype: Literal["auto", "same", "float16", "int8"] = "same"
    kernels: Literal["auto", "native", "torch"] = "auto"
    num_threads: int = Field(ge=1, le=256)
    max_tokens_in_paged_kv_cache: int = Field(ge=32)
    kv_cache_free_mem_fraction: float | None = Field(default=None, gt=0, le=1)
    tokens_per_block: int = Field(default=32, ge=1)
    max_batch_size: int = Field(ge=1, le=1024)
    max_num_tokens: int = Field(ge=1)
    max_queue_size: int = Field(ge=1)
    max_seq_len: int = Field(ge=2)
    max_draft_len: int = Field(default=0, ge=0)
    enable_kv_cache_reuse: bool = True
    overlap_prefill: bool = True
    use_cuda_graphs: bool = True
    random_weights: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        least = self.max_batch_size + self.max_draft_len
        if self.max_num_tokens < least:
            raise ValueError(f"max_num_tokens must be at least max_batch_size + max_draft_len = {least}")
        if self.max_tokens_in_paged_kv_cache < self.max_seq_len:
            raise ValueError(f"max_tokens_in_paged_kv_cache must hold one sequence of max_seq_len = {self.max_seq_len}")
        return self

    def parameters(self, checkpoint_dir: Path) -> dict[str, str]:
        """``parameters`` of the model's ``config.pbtxt``, with upstream's keys where upstream has one."""
        fraction = self.kv_cache_free_mem_fraction
        numbers = ("num_threads", "tokens_per_block", "max_batch_size", "max_num_tokens", "max_queue_size")
        return {
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": str(checkpoint_dir),
            "max_tokens_in_paged_kv_cache": str(self.max_tokens_in_paged_kv_cache),
            "batch_scheduler_policy": "max_utilization",
            "enable_kv_cache_reuse": str(self.enable_kv_cache_reuse).lower(),
            "overlap_prefill": str(self.overlap_prefill).lower(),
            "use_cuda_graphs": str(self.use_cuda_graphs).lower(),
            "enable_chunked_context": "true",
            "exclude_input_in_output": "true",
            "max_beam_width": "1",
            "FORCE_CPU_ONLY_INPUT_TENSORS": "yes",
            "dtype": self.dtype,
            "device": self.device,
            "weight_dtype": self.weight_dtype,
            "kernels": self.kernels,
            **({} if fraction is None else {"kv_cache_free_gpu_mem_fraction": str(fraction)}),
            **({"random_weights": "true"} if self.random_weights else {}),
            **{name: str(getattr(self, name)) for name in (*numbers, "max_seq_len", "max_draft_len")},
        }


class ServerSpec(_Section):
    """How tritonserver is run. Times in seconds.

    Attributes:
        thread_pool_size: BLS calls that the Python backend has in flight at a time.
        exit_timeout_s: how long a stopping server waits for requests in flight.
        load_timeout_s: how long loading all models may take.
    """

    thread_pool_size: int = Field(default=128, ge=CANCEL_RESERVE + 1)
    exit_timeout_s: int = Field(default=30, ge=0, le=3600)
    load_timeout_s: int = Field(default=120, ge=1, le=86400)


class DeploymentSpec(_Section):
    """What every runtime's spec holds; :meth:`load` gives the class of the file's ``runtime``.

    ``lookahead`` holds the fields of :class:`~lr_backend.config.LoopConfig` that the build does not fill in itself.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    runtime: str
    lookahead: dict[str, Any]
    server: ServerSpec = ServerSpec()

    _path: Path = PrivateAttr(default=Path())

    @property
    def path(self) -> Path:
        """The file that the spec was read from."""
        return self._path

    @property
    def root(self) -> Path:
        """The project root: what paths in the spec are relative to."""
        folder = self._path.parent
        return folder.parent if folder.name == "engines" else folder

    @property
    def built_dir(self) -> Path:
        """Where this spec's repository is rendered unless a caller says otherwise."""
        return self.root / "engines" / "built" / self.name

    @classmethod
    def load(cls, name_or_path: str | Path) -> DeploymentSpec:
        """Read a spec by path (it ends in ``.toml``) or by name from ``engines/`` of the working folder or the checkout.

        Raises:
            ConfigError: no such file, no TOML, an unknown key, a value out of range, a runtime that cannot be built.
        """
        path = _find(name_or_path)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path.name} cannot be read: {error}") from error
        try:
            spec = _spec_class(raw, path.name).model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path.name}: {where + ': ' if where else ''}{first['msg']}") from error
        spec._path = path
        return spec


class TorchDeployment(DeploymentSpec):
    """Three checkpoints on the torch engine."""

    runtime: Literal["torch"]
    target: TorchEngineSpec
    draft: TorchEngineSpec
    judge: TorchEngineSpec

    def engine(self, role: Role) -> TorchEngineSpec:
        engine: TorchEngineSpec = getattr(self, role.value)
        return engine

    def checkpoint_dir(self, role: Role) -> Path:
        """Absolute folder of one role's checkpoint."""
        return (self.root / self.engine(role).checkpoint).resolve()

    def loop_config(self, vocab_size: int = 1) -> LoopConfig:
        """What is rendered into ``lookahead.json``; ``vocab_size`` is the target's logits width."""
        return LoopConfig.model_validate(
            {
                **self.lookahead,
                "tokenizer_dir": self.checkpoint_dir(Role.TARGET),
                "judge_tokenizer_dir": self.checkpoint_dir(Role.JUDGE),
                "vocab_size": vocab_size,
                "tokens_per_block": self.target.tokens_per_block,
                "accepts_all_drafts": self.target.max_draft_len > 0,
                **self._embedding_dir(),
            }
        )

    def _embedding_dir(self) -> dict[str, Path]:
        """``embedding_dir`` as the spec has it, made absolute."""
        given = self.lookahead.get("embedding_dir")
        return {"embedding_dir": (self.root / given).resolve()} if isinstance(given, str) else {}

    @field_validator("lookahead")
    @classmethod
    def _leave_to_build(cls, lookahead: dict[str, Any]) -> dict[str, Any]:
        for key in _FILLED_BY_BUILD:
            if key in lookahead:
                raise ValueError(f"{key} comes from the engines and checkpoints; leave it out")
        return lookahead

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        config = _checked_loop_config(self)
        limits = config.limits
        longest = limits.max_prompt_tokens + limits.max_tokens
        for role in (Role.TARGET, Role.DRAFT):
            if self.engine(role).max_seq_len < longest:
                raise ValueError(f"{role}.max_seq_len must hold limits.max_prompt_tokens + limits.max_tokens = {longest}")
        if self.judge.max_seq_len <= 2 * limits.max_step_tokens:
            raise ValueError("judge.max_seq_len must hold two steps of limits.max_step_tokens and the prompt around them")
        if limits.max_draft_len != self.target.max_draft_len:
            raise ValueError(f"lookahead.limits.max_draft_len must equal target.max_draft_len = {self.target.max_draft_len}")
        most = self.server.thread_pool_size - CANCEL_RESERVE
        if limits.max_in_flight_calls > most:
            raise ValueError(
                f"lookahead.limits.max_in_flight_calls must leave {CANCEL_RESERVE} of server.thread_pool_size: at most {most}"
            )
        return self


_RUNTIMES: Mapping[str, type[DeploymentSpec]] = {"torch": TorchDeployment}
_PLANNED_RUNTIMES = ("tensorrtllm", "llmapi")


def _spec_class(raw: Mapping[str, Any], file_name: str) -> type[DeploymentSpec]:
    runtime = raw.get("runtime")
    if runtime in _PLANNED_RUNTIMES:
        raise ConfigError(f"{file_name}: runtime {runtime!r} is not built yet in this version; use 'torch'")
    if not isinstance(runtime, str) or runtime not in _RUNTIMES:
        raise ConfigError(f"{file_name}: runtime {runtime!r} is not one of {', '.join(_RUNTIMES)}")
    return _RUNTIMES[runtime]


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text:
        path = Path(text).resolve()
        if not path.is_file():
            raise ConfigError(f"no deployment spec at {text}")
        return path
    roots = dict.fromkeys((Path.cwd(), PACKAGE_ROOT))
    for root in roots:
        path = root / "engines" / f"{text}.toml"
        if path.is_file():
            return path.resolve()
    known = sorted({path.stem for root in roots for path in (root / "engines").glob("*.toml")})
    raise ConfigError(f"no deployment spec named {text!r}; known: {', '.join(known) or 'none'}")


def _checked_loop_config(spec: TorchDeployment) -> LoopConfig:
    """The loop's settings, with the defaults held against the rules and limits of a request."""
    try:
        config = spec.loop_config()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"lookahead.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
    try:
        request = LookaheadRequest.parse({**config.defaults, "text_input": "any"})
    except InvalidRequest as error:
        raise ValueError(f"lookahead.defaults.{error.message}") from error
    if (missing := config.lacks(request.verifier)) is not None:
        raise ValueError(f"lookahead.defaults.verifier={request.verifier.value}: {missing}")
    limits = config.limits
    bounds = {
        "max_tokens": limits.max_tokens,
        "max_depth": limits.max_depth,
        "width": limits.max_width,
        "num_draft_tokens": limits.max_draft_len,
        "deadline_s": config.timeouts.request_s,
    }
    for name, bound in bounds.items():
        if name in config.defaults and getattr(request, name) > bound:
            raise ValueError(f"lookahead.defaults.{name}={getattr(request, name)} is beyond the limit {bound}")
    return config
