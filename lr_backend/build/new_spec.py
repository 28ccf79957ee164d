"""A deployment spec for checkpoints of one's own: sizes from their configurations, limits from the memory at hand.

:func:`read_models` looks at the folders, :func:`embedded_spec` and :func:`gpu_spec` write the text of a spec, with comments as
the shipped ones have. What cannot work is refused by name, before anything is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lr_backend.build.admission import iteration_sizes
from lr_backend.build.checkpoints import (
    FP8_DTYPE,
    CheckpointInfo,
    check_checkpoint,
    check_same_vocabulary,
    read_header,
    without_tied_head,
)
from lr_backend.build.gpu_spec import GPUS_A_NODE, GpuRuntime
from lr_backend.build.shapes import ModelShape, known_models, shape_from_config
from lr_backend.engine import Role
from lr_backend.engine.checkpoint import json_object, weight_files
from lr_backend.errors import CheckpointError, ConfigError
from lr_backend.steps.rules import THINK_MARKERS

LANES = 16
"""The decoder in C computes models whose hidden and head sizes are multiples of this (``lr_backend/embedded/native``)."""
BLOCK = 32
GIB = 1 << 30
PROCESS_BYTES = GIB // 2
"""Of each process that runs a model: Python, torch, buffers."""
KEPT_FREE = 0.15
"""Of the memory at hand, for everything else on the machine."""
WANTED_SEQUENCES = 8
"""Of full length, that the KV cache holds where memory allows."""
STEP_TOKENS = 256
VERDICT_TOKENS = 8 * STEP_TOKENS
"""Two steps and the prompt around them."""
LEAST_SEQ_LEN = 256
"""A third of it is for the prompt. A server asks itself a question before it serves, which must fit there in a chat template."""
ITERATION_TOKENS = 8192
"""Of an iteration where no admission depends on it, unless sequences are longer: the judge's, and those of the LLM API."""
MAX_DEPTH = 8
REQUESTS_A_LOOP = 16
"""Requests in flight for each process of the step loop: between the 7 (``lr_sd``) and 23 (``lr``) that one was measured to carry
on virtual cores (``docs/benchmarks/loop_limit.md``)."""

_COMMENTED = re.compile(r"^(?P<setting>[a-z_]+ = .*?) +# (?P<comment>.*)$", re.MULTILINE)

GPU_DRAFTS: Mapping[GpuRuntime, int] = {"tensorrtllm": 8, "llmapi": 0}


@dataclass(frozen=True, slots=True)
class Model:
    """One role's checkpoint, as its files describe it.

    Attributes:
        stored_bytes: of all weights that are computed with, as the files hold them.
        in_bfloat16: the matrices are held so.
    """

    role: Role
    info: CheckpointInfo
    shape: ModelShape
    generation: Mapping[str, Any]
    stored_bytes: int
    in_bfloat16: bool

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in the embedded engine, which holds them in float32."""
        return self.shape.num_layers * 2 * self.shape.num_kv_heads * self.shape.head_dim * 4

    @property
    def fits_decoder(self) -> bool:
        return self.shape.hidden_size % LANES == 0 and self.shape.head_dim % LANES == 0

    @property
    def hub(self) -> str:
        """Name on the hub of the known model that it is, by its folder's name and its shape; empty: none."""
        folders = {self.info.directory.name, self.info.directory.resolve().name}
        found = (name for name, shape in known_models().items() if name.rpartition("/")[2] in folders and shape == self.shape)
        return next(found, "")

    @property
    def in_words(self) -> str:
        millions = self.info.num_parameters / 1e6
        return f"{self.info.directory.name} ({self.shape.architecture.removesuffix('ForCausalLM')}, {millions:.0f} M)"

    def ram_bytes(self, decoder: bool) -> int:
        """Weights in memory: torch holds them in float32."""
        return self.stored_bytes if decoder and self.fits_decoder and self.in_bfloat16 else 4 * self.info.num_parameters


Models = Mapping[Role, Model]


@dataclass(frozen=True, slots=True)
class Host:
    """What the embedded engine runs on.

    Attributes:
        decoder: the decoder in C was built here.
    """

    free_bytes: int
    num_cores: int
    decoder: bool


@dataclass(frozen=True, slots=True)
class Cards:
    """What engines on GPUs run on; memory as CUDA reports it."""

    gpu: str
    num_gpus: int
    gpu_memory_gib: float
    compute_capability: str


@dataclass(frozen=True, slots=True)
class Naming:
    """What a spec is called, and where it will lie.

    Attributes:
        root: folder that relative paths in it start at.
    """

    name: str
    root: Path


def read_models(target: Path, draft: Path, judge: Path, *, fp8: bool = False) -> Models:
    """Check three checkpoints and that they go together. ``fp8`` as in :func:`~lr_backend.build.checkpoints.check_checkpoint`.

    Raises:
        CheckpointError: one of them is incomplete, corrupt or unsupported, or target and draft have other vocabularies; with
            what to do.
    """
    folders = {Role.TARGET: target, Role.DRAFT: draft, Role.JUDGE: judge}
    models = {
        role: _read(role, folder.resolve() if ".." in folder.parts else folder.absolute(), fp8=fp8)
        for role, folder in folders.items()
    }
    try:
        check_same_vocabulary(models[Role.TARGET].info, models[Role.DRAFT].info)
    except CheckpointError as error:
        remedy = "take a draft of the target's own family: drafted steps go to the target as token ids"
        raise CheckpointError(f"{error.message}. {remedy}") from error
    return models


def _read(role: Role, folder: Path, *, fp8: bool) -> Model:
    if not folder.is_dir():
        raise CheckpointError(f"--{role} {folder} is not a folder: download it first (hf download NAME --local-dir DIR)")
    try:
        info = check_checkpoint(folder, fp8=fp8)
        path = folder / "config.json"
        shape = shape_from_config(json_object(path), path)
        stored = {name: tensor for file in weight_files(folder) for name, tensor in read_header(file).items()}
    except CheckpointError as error:
        remedy = "these are served: Qwen3, Qwen2.5 and Llama checkpoints in the Hugging Face layout, with their tokenizer"
        raise CheckpointError(f"--{role}: {error.message}; {remedy}") from error
    sizes = {"F32": 4, "BF16": 2, "F16": 2, FP8_DTYPE: 1}
    tensors = without_tied_head(stored, tied=shape.tied_embeddings).values()
    generation = folder / "generation_config.json"
    return Model(
        role=role,
        info=info,
        shape=shape,
        generation=json_object(generation) if generation.is_file() else {},
        stored_bytes=sum(sizes.get(tensor.dtype, 4) * tensor.size for tensor in tensors),
        in_bfloat16=all(tensor.dtype == "BF16" for tensor in tensors if len(tensor.shape) > 1),
    )


# ---------------------------------------------------------------------------------------------------------------- embedded engine


def embedded_spec(models: Models, naming: Naming, host: Host, max_seq_len: int | None = None) -> str:
    """The text of a spec for the embedded engine.

    Raises:
        ConfigError: the models do not fit the memory, or ``max_seq_len`` is beyond their positions.
    """
    target, draft = models[Role.TARGET], models[Role.DRAFT]
    lengths = _lengths(models, max_seq_len or 4096, asked_for=max_seq_len is not None, stretched=True)
    own_drafts = host.decoder and target.fits_decoder and draft.fits_decoder and _same_width(target, draft)
    tokens = _kv_tokens(models, lengths, host, own_drafts)
    threads = {Role.TARGET: max(1, host.num_cores // 2), Role.DRAFT: max(1, host.num_cores // 4)}
    whole = f"of {host.free_bytes / GIB:.1f} GiB free here"
    roles = [
        {
            **_about(models[role], naming),
            "weight_dtype": "same" if role is Role.TARGET else "auto",
            "weight_why": "as the checkpoint has them" if role is Role.TARGET else "what is fastest here: a trial at start-up",
            "num_threads": threads.get(role, max(1, host.num_cores // 4)),
            "kv_tokens": tokens[role],
            "kv_why": f"{tokens[role] * models[role].kv_bytes / GIB:.2f} GiB, {whole}",
            "max_seq_len": lengths[role],
            "max_draft_len": 16 if role is Role.TARGET else 0,
            "holds_draft_model": own_drafts and role is Role.TARGET,
        }
        for role in Role
    ]
    values: dict[str, Any] = {
        "runtime": "embedded",
        "roles": roles,
        "cores": host.num_cores,
        "max_batch_size": 16,
        "draft_logits": "none",
        "draft_logits_why": "this engine's rule for draft tokens is exact without them",
        "proposer": "engine" if own_drafts else "",
        "num_loops": 1,
        "thread_pool_size": 128,
        "timeouts": {"target_s": 600.0, "draft_s": 120.0, "judge_s": 60.0, "request_s": 3600.0},
    }
    sizes = {"max_draft_len": 16, "max_depth": 4, "num_requests": 16}
    return _render("embedded.toml.jinja", models, naming, lengths, **sizes, **values)


def _kv_tokens(models: Models, lengths: Mapping[Role, int], host: Host, own_drafts: bool) -> dict[Role, int]:
    """KV tokens of each role, all within the memory at hand. Raises: ConfigError: one sequence of each does not fit."""
    copies = {Role.TARGET: 1, Role.DRAFT: 2 if own_drafts else 1, Role.JUDGE: 1}
    weights = sum(copies[role] * model.ram_bytes(host.decoder) for role, model in models.items())
    left = int((1.0 - KEPT_FREE) * host.free_bytes) - weights - (len(models) + 1) * PROCESS_BYTES
    judge = min(WANTED_SEQUENCES * lengths[Role.JUDGE], 16384)
    least_judge, length = lengths[Role.JUDGE], lengths[Role.TARGET]
    pair = models[Role.TARGET].kv_bytes + copies[Role.DRAFT] * models[Role.DRAFT].kv_bytes
    least = length * pair + least_judge * models[Role.JUDGE].kv_bytes
    if left < least:
        needed = weights + (len(models) + 1) * PROCESS_BYTES + least
        raise ConfigError(
            f"the three models need {needed / GIB / (1.0 - KEPT_FREE):.1f} GiB of memory here ({weights / GIB:.1f} GiB of "
            f"weights, {least / GIB:.1f} GiB for one sequence of {length} tokens); {host.free_bytes / GIB:.1f} GiB are free: "
            "take smaller checkpoints, or give a smaller --max-seq-len"
        )
    judge = max(_blocks(least_judge), min(judge, (left // 4) // models[Role.JUDGE].kv_bytes))
    both = (left - judge * models[Role.JUDGE].kv_bytes) // pair
    if both < length:  # a quarter is more than the judge can be given
        judge, both = _blocks(least_judge), length
    both = max(length, min(WANTED_SEQUENCES * length, both))
    return {Role.TARGET: _blocks(both), Role.DRAFT: _blocks(both), Role.JUDGE: _blocks(judge)}


# ------------------------------------------------------------------------------------------------------------------------ on GPUs


@dataclass(frozen=True, slots=True)
class Placed:
    """Cards of each role."""

    gpus: Mapping[Role, tuple[int, ...]]

    def shared(self, role: Role) -> bool:
        others = {number for other, numbers in self.gpus.items() if other is not role for number in numbers}
        return bool(others & set(self.gpus[role]))


def ways_to_place(target: Model, num_gpus: int, runtime: GpuRuntime) -> list[Placed]:
    """Ways to lay three models over so many cards, the preferred one first: draft and judge on cards of their own, or beside."""
    num_gpus = num_gpus if runtime == "llmapi" else min(num_gpus, GPUS_A_NODE)
    most = max(size for size in (1, 2, 4, 8, 16) if size <= num_gpus and target.shape.num_heads % size == 0)
    beside = Placed({Role.TARGET: tuple(range(most)), Role.DRAFT: (0,), Role.JUDGE: (min(1, most - 1),)})
    if num_gpus == 1:
        return [beside]
    apart = max(size for size in (1, 2, 4, 8, 16) if size <= max(1, num_gpus - 2) and target.shape.num_heads % size == 0)
    own = Placed({Role.TARGET: tuple(range(apart)), Role.DRAFT: (apart,), Role.JUDGE: (min(apart + 1, num_gpus - 1),)})
    return [own, beside]


def iteration_choices(models: Models, runtime: GpuRuntime, max_seq_len: int | None = None) -> tuple[int, ...]:
    """Values of ``max_num_tokens`` for target and draft, small ones first; compiled engines admit calls by it."""
    length = _gpu_lengths(models, max_seq_len)[Role.TARGET]
    if runtime == "llmapi":
        return (max(ITERATION_TOKENS, length),)
    drafts = GPU_DRAFTS[runtime]
    return iteration_sizes(MAX_DEPTH + 1, drafts, length - drafts)


def _gpu_lengths(models: Models, max_seq_len: int | None) -> dict[Role, int]:
    return _lengths(models, max_seq_len or 16384, asked_for=max_seq_len is not None)


def gpu_spec(
    models: Models,
    naming: Naming,
    cards: Cards,
    runtime: GpuRuntime,
    placed: Placed,
    *,
    max_seq_len: int | None = None,
    kv_tokens: Mapping[Role, int] | None = None,
    iteration_tokens: int | None = None,
) -> str:
    """The text of a spec for engines on GPUs.

    Args:
        iteration_tokens: ``max_num_tokens`` of target and draft, one of :func:`iteration_choices`; None: the first.
        kv_tokens: budgets of the roles that share a card; None: one sequence each, to see what is left.

    Raises:
        ConfigError: ``max_seq_len`` is beyond the models' positions.
    """
    drafts = GPU_DRAFTS[runtime]
    lengths = _gpu_lengths(models, max_seq_len)
    shared = any(placed.shared(role) for role in Role)
    given, rows = kv_tokens or lengths, 16 if shared else 64
    tokens = iteration_tokens or iteration_choices(models, runtime, max_seq_len)[0]
    wanted = {Role.TARGET: tokens, Role.DRAFT: tokens, Role.JUDGE: max(ITERATION_TOKENS, lengths[Role.JUDGE])}
    roles = [
        {
            **_about(models[role], naming),
            "hub": models[role].hub,
            "gpus": placed.gpus[role],
            "kv_tokens": given[role] if placed.shared(role) else 0,
            "max_num_tokens": min(wanted[role], rows * lengths[role]),  # more is never used
            "max_seq_len": lengths[role],
            "max_draft_len": drafts if role is Role.TARGET else 0,
        }
        for role in Role
    ]
    values: dict[str, Any] = {
        "runtime": runtime,
        "roles": roles,
        "hardware": cards,
        "max_batch_size": rows,
        "draft_logits": "one_hot",
        "draft_logits_why": "exact at any temperature; upstream's rule for token-only drafts draws again, with a bias",
        "proposer": "",
        "num_loops": -(-rows // REQUESTS_A_LOOP),
        "thread_pool_size": 128 if shared else 256,
        "timeouts": {"target_s": 120.0, "draft_s": 30.0, "judge_s": 5.0, "request_s": 900.0},
    }
    sizes = {"max_draft_len": drafts, "max_depth": MAX_DEPTH, "num_requests": rows}
    return _render("gpu.toml.jinja", models, naming, lengths, **sizes, **values)


# --------------------------------------------------------------------------------------------------------------------- in common


def _lengths(models: Models, wanted: int, *, asked_for: bool, stretched: bool = False) -> dict[Role, int]:
    """``max_seq_len`` of each role. ``stretched``: for an engine that computes what ``rope_scaling`` says."""
    infos = {role: model.info for role, model in models.items()}
    positions = {role: info.stretched_positions if stretched else info.max_positions for role, info in infos.items()}
    most = min(positions[Role.TARGET], positions[Role.DRAFT])
    if asked_for and wanted > most:
        raise ConfigError(f"--max-seq-len {wanted}: the checkpoints were made for {most} positions")
    length = min(wanted, most)
    if length < LEAST_SEQ_LEN or positions[Role.JUDGE] < LEAST_SEQ_LEN:
        raise ConfigError(f"sequences of {min(length, positions[Role.JUDGE])} tokens are too short: {LEAST_SEQ_LEN} at least")
    return {Role.TARGET: length, Role.DRAFT: length, Role.JUDGE: min(VERDICT_TOKENS, positions[Role.JUDGE])}


def _about(model: Model, naming: Naming) -> dict[str, Any]:
    about = {
        Role.TARGET: "writes the answer",
        Role.DRAFT: "writes steps ahead; it reads the same token ids as the target",
        Role.JUDGE: "says whether two steps mean the same; it reads text, so its vocabulary may be another",
    }[model.role]
    checkpoint = _as_seen_from(naming.root, model.info.directory)
    return {"name": model.role.value, "about": f"{model.in_words}: {about}.", "checkpoint": str(checkpoint)}


def _as_seen_from(root: Path, folder: Path) -> Path:
    """Relative to the root, where the folder lies under it. Its name counts first: what a link leads to is in no container."""
    for inner, outer in ((folder, root), (folder, root.resolve()), (folder.resolve(), root.resolve())):
        if inner.is_relative_to(outer):
            return inner.relative_to(outer)
    return folder


def _render(
    template: str,
    models: Models,
    naming: Naming,
    lengths: Mapping[Role, int],
    *,
    max_draft_len: int,
    max_depth: int,
    num_requests: int,
    **values: Any,
) -> str:
    """A runtime's own sections and then those of the loop, which are the same for all."""
    length = lengths[Role.TARGET]
    max_prompt_tokens = length // 3
    # The embedded engine cuts a verification that would not fit; compiled engines must hold its draft tokens.
    last_drafts = 0 if values["runtime"] == "embedded" else max_draft_len
    limits = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_tokens": length - max_prompt_tokens - last_drafts,
        "max_depth": max_depth,
        "max_width": 2,
        "max_step_tokens": min(STEP_TOKENS, lengths[Role.JUDGE] // 8),
        "max_in_flight_requests": num_requests,
    }
    think_open, think_close = _think_markers(models[Role.TARGET].info.vocabulary)
    sampling, sampling_why = _sampling(models[Role.TARGET])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["toml"] = _quoted
    common = {
        **values,
        "name": naming.name,
        "limits": limits,
        "last_drafts": last_drafts,
        "think_open": think_open,
        "think_close": think_close,
        "sampling": sampling,
        "sampling_why": sampling_why,
    }
    text = "".join(environment.get_template(each).render(**common) for each in (template, "loop.toml.jinja"))
    return _COMMENTED.sub(lambda match: f"{match['setting']:<38} # {match['comment']}", text)


def _think_markers(vocabulary: Mapping[str, int]) -> tuple[str, str]:
    return next((pair for pair in THINK_MARKERS if all(text in vocabulary for text in pair)), ("", ""))


def _sampling(target: Model) -> tuple[dict[str, float | int], str]:
    """(defaults of a request, why), from the target's ``generation_config.json``."""
    generation = target.generation
    if not generation.get("do_sample", "temperature" in generation):
        return {"temperature": 0.0}, "temperature 0: the target's generation_config.json asks for no sampling"
    found: dict[str, float | int] = {}
    bounds: Sequence[tuple[str, type, float, float]] = (
        ("temperature", float, 0.0, 5.0), ("top_p", float, 1e-6, 1.0), ("top_k", int, 0, 1 << 20),
    )  # fmt: skip
    for name, kind, least, most in bounds:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[name] = kind(value)
    if "temperature" not in found:  # as transformers has it
        found = {"temperature": 1.0, **found}
        return found, f"{', '.join(found)}: the target's generation_config.json asks for sampling, and says no temperature"
    return found, f"{', '.join(found)}: as the target's generation_config.json has them"


def _same_width(target: Model, draft: Model) -> bool:
    return target.info.vocab_size == draft.info.vocab_size


def _blocks(tokens: int) -> int:
    """Filled up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


def _quoted(text: str) -> str:
    """A TOML basic string, which JSON's are."""
    return json.dumps(text, ensure_ascii=False)
