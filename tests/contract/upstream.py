"""Reads the table of upstream's contract, and holds configs and command lines against it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("upstream_1_2_1.toml").read_text(encoding="utf-8"))
BACKEND, INSTANCE_KIND = "tensorrtllm", "KIND_CPU"
"""Placement is by ``gpu_device_ids``."""
LOGITS_DTYPES = ("FP32", "FP16")
"""Equal to the engine's ``--logits_dtype``."""
DEVICE_LISTS = ("gpu_device_ids", "participant_ids")
"""Parameters that hold numbers, several engines' apart by semicolons."""
MAY_BE_EMPTY = ("guided_decoding_backend",)
"""Parameters whose empty text switches something off."""
FORBIDDEN = ("cross_kv_cache_fraction", "encoder_model_path", "worker_path")
"""Of encoder-decoder models; set for another, loading fails. The last is refused by name."""
PLACEHOLDER = "${"
"""Where the template has it in a value that is not filled, the backend falls back with a warning."""
CONFLICTS = (("gather_context_logits", "max_draft_len"), ("multiple_profiles=enable", "opt_num_tokens"))
"""What ``trtllm-build`` forbids together."""
LOGITS_FLAGS = {"FP32": "float32", "FP16": "float16"}


def parse(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def logits_dtype(config: model_config_pb2.ModelConfig) -> str:
    return next(_dtype(tensor) for tensor in config.output if tensor.name == "generation_logits")


def config_violations(config: model_config_pb2.ModelConfig, folder: str) -> list[str]:
    """What a model's config has otherwise than upstream's template and backend want it; empty where nothing."""
    found = []
    if (config.name, config.backend) != (folder, BACKEND):
        found.append(f"named {config.name!r} with backend {config.backend!r} in folder {folder!r}")
    if config.max_batch_size < 1:
        found.append("no batch dimension")
    if config.model_transaction_policy.decoupled:
        found.append("decoupled")
    kinds = {model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind) for group in config.instance_group}
    if kinds != {INSTANCE_KIND}:
        found.append(f"instance kinds {kinds}")
    if logits_dtype(config) not in LOGITS_DTYPES:
        found.append(f"logits of type {logits_dtype(config)}")
    found += _tensor_violations("input", {tensor.name: _input(tensor) for tensor in config.input}, _wanted_inputs(config))
    found += _tensor_violations("output", {tensor.name: _output(tensor) for tensor in config.output}, _wanted_outputs(config))
    return found + parameter_violations(parameters(config))


def parameter_violations(given: Mapping[str, str]) -> list[str]:
    rules, kinds = TABLE["rules"], TABLE["parameters"]
    found = [f"parameter {key} is missing" for key in rules["required_parameters"] if key not in given]
    found += [f"parameter {key} must stay unset" for key in FORBIDDEN if key in given]
    for key, value in given.items():
        if key not in kinds:
            found.append(f"the backend knows no parameter {key}")
        elif PLACEHOLDER in value:
            found.append(f"parameter {key} has a placeholder")
        elif key in DEVICE_LISTS and not re.fullmatch(r"\d+([,;]\d+)*", value):
            found.append(f"parameter {key}={value!r} is no list of devices")
        elif not (_fits(kinds[key], value) or (key in MAY_BE_EMPTY and not value)):
            found.append(f"parameter {key}={value!r} is not {kinds[key]}")
    return found


def command_violations(argv: Sequence[str]) -> list[str]:
    """What upstream's parser would refuse of a command line."""
    name, arguments = (argv[0], argv[1:]) if not argv[0].startswith("python") else (argv[1], argv[2:])
    if name == "trtllm-build":
        flags, required, conflicts = TABLE["trtllm_build"], ["checkpoint_dir"], CONFLICTS
    else:
        tool = next(
            (TABLE[key] for key in ("convert_qwen", "convert_llama", "quantize") if name.endswith(TABLE[key]["path"])), None
        )
        if tool is None:
            return [f"{name} is none of upstream's tools"]
        flags, required, conflicts = tool["flags"], tool["required"], ()
    given = read_flags(arguments)
    found = [f"--{flag} is missing" for flag in required if flag not in given]
    for flag, value in given.items():
        if flag not in flags:
            found.append(f"{Path(name).name} knows no --{flag}")
        elif (value is None) != (flags[flag] == "flag") or (value is not None and not _fits(flags[flag], value)):
            found.append(f"--{flag} {value} is not {flags[flag]}")
    told = {*given, *(f"{flag}={value}" for flag, value in given.items())}
    return found + [f"{rule} exclude one another" for rule in conflicts if set(rule) <= told]


def read_flags(arguments: Sequence[str]) -> dict[str, str | None]:
    """Flags of a command line with their values; None for a flag that stands alone."""
    found: dict[str, str | None] = {}
    for at, part in enumerate(arguments):
        if part.startswith("--"):
            following = arguments[at + 1] if at + 1 < len(arguments) else "--"
            found[part[2:]] = None if following.startswith("--") else following
    return found


def _wanted_inputs(config: model_config_pb2.ModelConfig) -> dict[str, tuple[Any, ...]]:
    return {
        name: (_named(dtype, name, config), tuple(dims), "S" in flags, "R" in flags, "O" in flags)
        for name, (dtype, dims, flags) in TABLE["inputs"].items()
    }


def _wanted_outputs(config: model_config_pb2.ModelConfig) -> dict[str, tuple[Any, ...]]:
    return {name: (_named(dtype, name, config), tuple(dims)) for name, (dtype, dims) in TABLE["outputs"].items()}


def _named(dtype: str, name: str, config: model_config_pb2.ModelConfig) -> str:
    """``L`` is the type of the logits, all the same; ``F`` may be any floating type."""
    if dtype == "L":
        return logits_dtype(config)
    if dtype == "F":
        given = next((_dtype(tensor) for tensor in config.input if tensor.name == name), "")
        return given if given in ("FP16", "FP32", "BF16") else "a floating type"
    return dtype


def _input(tensor: model_config_pb2.ModelInput) -> tuple[Any, ...]:
    scalar = tensor.HasField("reshape") and not tensor.reshape.shape
    return _dtype(tensor), tuple(tensor.dims), scalar, tensor.allow_ragged_batch, tensor.optional


def _output(tensor: model_config_pb2.ModelOutput) -> tuple[Any, ...]:
    return _dtype(tensor), tuple(tensor.dims)


def _dtype(tensor: Any) -> str:
    return str(model_config_pb2.DataType.Name(tensor.data_type)).removeprefix("TYPE_")


def _tensor_violations(kind: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    found = [f"{kind} {name} is missing" for name in wanted if name not in given]
    found += [f"{kind} {name} is not upstream's" for name in given if name not in wanted]
    both = wanted.keys() & given.keys()
    return found + [f"{kind} {name} is {given[name]}, not {wanted[name]}" for name in both if given[name] != wanted[name]]


def _fits(kind: str | list[str], value: str) -> bool:
    if isinstance(kind, list):
        return value in kind
    if kind == "bool":
        return value in TABLE["rules"]["booleans"]
    pattern = {"int": r"-?\d+", "float": r"\d*\.?\d+"}.get(kind, r"(?s).*")
    return re.fullmatch(pattern, value) is not None
