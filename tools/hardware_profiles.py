"""Write the hardware profiles: how long NVIDIA's kernel tables say that one iteration takes (``make profiles``).

    python tools/hardware_profiles.py wanted > wanted.json                       # in the project's own environment
    python tools/hardware_profiles.py write wanted.json                          # in one that holds aiconfigurator-core

Two steps, because the tables need numpy 2 and Triton's Python backend needs numpy 1. ``wanted`` lists the models of every
deployment in ``engines/``, each with the parallelism and dtype that its spec gives it, and those that the paper was measured
with, as vLLM serves them. ``write`` asks the tables for each of them on each system and writes one JSON document, for vLLM into
``bench/``; :mod:`lr_backend.hardware.profile` reads those with plain code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SCHEMA, VERSION = "lookahead-hardware-profile", 1
PACKAGE = "aiconfigurator-core"
CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Framework:
    """Whose kernels are timed.

    Attributes:
        title: as people call it.
        deployed: what is stood for; the tables are of a later release.
        folder: of its profiles.
    """

    title: str
    deployed: str
    folder: Path


FRAMEWORKS = {
    "trtllm": Framework("TensorRT-LLM", "TensorRT-LLM 1.2.1", CHECKOUT / "lr_backend" / "hardware" / "profiles"),
    "vllm": Framework(
        "vLLM", "vLLM 0.8.3 (the paper) and 0.10.1 (its authors' second run)", CHECKOUT / "bench" / "inputs" / "vllm"
    ),
}
"""By the tables' own name."""

SYSTEMS = {"9.0": ("h100_sxm", "h200_sxm", "b200_sxm"), "8.9": ("l40s",)}
"""Systems to ask for, by the compute capability that a spec is written for. Of Ada cards the tables hold the L40S alone."""
TP_SIZES = (1, 2, 4)
"""The target is asked for at each of these, so that equal numbers of GPUs can be compared, and so is the draft: where an engine
drafts by itself, its draft model has its own parallelism. A quantised model is asked for at its own alone."""

PAPER_SYSTEMS = ("h100_sxm", "h200_sxm")
PAPER_MODELS = (
    ("Qwen/Qwen3-32B", 2),
    ("Qwen/Qwen3-1.7B", 1),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 2),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1),
    ("Qwen/Qwen2.5-7B-Instruct", 1),
)
"""What the paper's own table was measured with (arXiv 2506.19830, section 4: H100; its authors' second run: H200), and its
parallelism. All in bfloat16, with vLLM."""

_POWERS = tuple(2**power for power in range(14))
TOKENS = tuple(sorted({*_POWERS, 12, 24, 48, 96, 144, 160, 192, 224, 384, 768, 1536, 3072, 6144}))
NEW_TOKENS = _POWERS
PREFIXES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KV_TOKENS = (1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MAX_HEAD_ROWS = 64
"""Rows that the output head computes at most: a prompt needs logits of its last token alone."""

CHECKED_DECODES = ((1, 1000), (8, 1000), (16, 4000), (3, 3000))
"""(sequences, tokens in each) of decode iterations, computed by the package itself, for tests of our own sum."""
CHECKED_PREFILLS = ((1, 150, 100), (1, 32, 1000), (1, 700, 0), (4, 40, 1000))
"""(requests, new tokens, prefix) of prefills, likewise."""
DIGITS = 5

MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
GEMM_MODES = {"bfloat16": "bfloat16", "float16": "bfloat16", "fp8": "fp8_static"}
"""By dtype. ``quantize.py`` fixes the scales of FP8 when it calibrates: static."""


# In the project's environment ---------------------------------------------------------------------------------------


def wanted() -> list[dict[str, Any]]:
    """Every model to ask for: shape, parallelism, dtypes and systems, without repetitions."""
    from lr_backend.build.shapes import known_models
    from lr_backend.build.spec import PACKAGE_ROOT, DeploymentSpec, GpuDeployment
    from lr_backend.engine import Role

    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for path in sorted((PACKAGE_ROOT / "engines").glob("*.toml")):
        spec = DeploymentSpec.load(path)
        if not isinstance(spec, GpuDeployment):
            continue
        for role in Role:
            engine = spec.engine(role)
            shape = known_models()[engine.hub]
            own_only = role is Role.JUDGE or engine.weight_dtype == "fp8"
            for tp_size in (engine.tp_size,) if own_only else TP_SIZES:
                for system in SYSTEMS[spec.hardware.compute_capability]:
                    entry = {
                        "framework": "trtllm",
                        "model": engine.hub,
                        "system": system,
                        "tp_size": tp_size,
                        "dtype": engine.weight_dtype,
                        "kv_cache_dtype": engine.kv_dtype,
                        "shape": {name: getattr(shape, name) for name in shape.__slots__},
                    }
                    found.setdefault((engine.hub, system, tp_size, engine.weight_dtype, engine.kv_dtype), entry)
    return [*found.values(), *wanted_for_the_paper()]


def wanted_for_the_paper() -> list[dict[str, Any]]:
    """The same of the models that the paper was measured with."""
    from lr_backend.build.shapes import known_models

    shapes = {hub: known_models()[hub] for hub, _ in PAPER_MODELS}
    return [
        {
            "framework": "vllm",
            "model": hub,
            "system": system,
            "tp_size": tp_size,
            "dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "shape": {name: getattr(shapes[hub], name) for name in shapes[hub].__slots__},
        }
        for hub, tp_size in PAPER_MODELS
        for system in PAPER_SYSTEMS
    ]


# In the environment of the tables -----------------------------------------------------------------------------------


class Tables:
    """One model on one system: the package's operations, each by its name, in milliseconds."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        from aiconfigurator_core.sdk.engine import EngineHandle

        fp8_kv = entry["kv_cache_dtype"] == "fp8"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(_config(entry["shape"])), encoding="utf-8")
            self._handle = EngineHandle.compile(
                folder,
                entry["system"],
                entry["framework"],
                tp_size=entry["tp_size"],
                gemm_quant_mode=GEMM_MODES[entry["dtype"]],
                kvcache_quant_mode="fp8" if fp8_kv else "bfloat16",
                fmha_quant_mode="fp8" if fp8_kv else "bfloat16",
            )
        names = [name for name, *_ in self._handle.run_static_per_op(batch_size=1, isl=8, osl=2)[1]]
        self._attention = names.index("generation_attention")
        self._head = names.index("generation_logits_gemm")
        self._others = [index for index in range(len(names)) if index not in (self._attention, self._head)]
        self.by_source: dict[str, dict[str, float]] = {}

    def dense_ms(self, num_tokens: int) -> float:
        """Everything but attention, for so many tokens in one iteration."""
        others = self._handle.evaluate_generation_ops(self._others, batch_size=1, s=1, x=num_tokens)
        head = self._handle.evaluate_generation_ops([self._head], batch_size=1, s=1, x=min(num_tokens, MAX_HEAD_ROWS))
        return self._counted("dense", [*others, *head])

    def context_attention_ms(self, num_new: int, prefix: int, batch_size: int = 1) -> float:
        """Attention of prompt tokens that stand behind ``prefix`` computed ones."""
        values = self._handle.evaluate_context_ops([self._attention], batch_size=batch_size, s=num_new, prefix=prefix)
        return self._counted("context_attention", values)

    def decode_attention_ms(self, num_sequences: int, kv_tokens: int) -> float:
        """Attention of one new token in each of some sequences of ``kv_tokens``."""
        values = self._handle.evaluate_generation_ops([self._attention], batch_size=num_sequences, s=kv_tokens)
        return self._counted("decode_attention", values)

    def checks(self) -> list[dict[str, Any]]:
        """Iterations as the package itself adds them up."""
        decodes = [
            {"num_decodes": num, "kv_tokens": kv, "ms": round(self._handle.decode_step_latency(num, kv, 2), DIGITS)}
            for num, kv in CHECKED_DECODES
        ]
        prefills = [
            {
                "num_joins": num,
                "num_new": new,
                "num_cached": prefix,
                "ms": round(self._handle.predict_prefill_latency(num, new + prefix, prefix), DIGITS),
            }
            for num, new, prefix in CHECKED_PREFILLS
        ]
        return [*decodes, *prefills]

    def _counted(self, table: str, values: Sequence[tuple[str, float, float, str]]) -> float:
        sources = self.by_source.setdefault(table, defaultdict(float))
        for _, ms, _, source in values:
            sources[source] += ms
        return round(sum(ms for _, ms, *_ in values), DIGITS)


def profile(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The document of one entry."""
    tables = Tables(entry)
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        **{name: entry[name] for name in ("model", "system", "tp_size", "dtype", "kv_cache_dtype")},
        "num_layers": entry["shape"]["num_layers"],
        "vocab_size": entry["shape"]["vocab_size"],
        "card": _card(entry["system"]),
        "per_card": _per_card(entry),
        "dense": {"tokens": TOKENS, "ms": [tables.dense_ms(number) for number in TOKENS]},
        "context_attention": {
            "new_tokens": NEW_TOKENS,
            "prefix_tokens": PREFIXES,
            "ms": [[tables.context_attention_ms(new, prefix) for prefix in PREFIXES] for new in NEW_TOKENS],
        },
        "decode_attention": {
            "sequences": SEQUENCES,
            "kv_tokens": KV_TOKENS,
            "ms": [[tables.decode_attention_ms(number, kv) for kv in KV_TOKENS] for number in SEQUENCES],
        },
    }
    document["source"] = _source(entry, tables.by_source)
    document["checks"] = tables.checks()
    return document


def _source(entry: Mapping[str, Any], by_source: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    from aiconfigurator_core.sdk import perf_database

    framework = FRAMEWORKS[entry["framework"]]
    release = perf_database.resolve_query_version(entry["system"], entry["framework"], "current")
    shares = {
        table: {source: round(ms / sum(sources.values()), 3) for source, ms in sorted(sources.items())}
        for table, sources in by_source.items()
    }
    return {
        "package": PACKAGE,
        "package_version": importlib.metadata.version(PACKAGE),
        "license": importlib.metadata.metadata(PACKAGE)["License-Expression"],
        "database": f"{framework.title} {release}",
        "deployed": framework.deployed,
        "share_of_time_by_source": shares,
        "meaning": {
            "silicon": "kernels timed on the card, interpolated between the sizes that were timed",
            "mixed": "scaled by a model from kernels timed at other sizes",
            "empirical": "no timing: computed from bytes, with an efficiency and a latency found by experience",
            "estimated": "modelled from measured components: no timing of this kernel on the card",
        },
        "holds": "kernel and all-reduce time alone; host time, launches, sampling and hops are not in it",
    }


def _card(system: str) -> dict[str, float]:
    """One card's limits, from the package's own description of the system."""
    import aiconfigurator_core

    path = Path(aiconfigurator_core.__file__).parent / "systems" / f"{system}.yaml"
    gpu = yaml.safe_load(path.read_text(encoding="utf-8"))["gpu"]
    return {
        "memory_bytes_per_s": float(gpu["mem_bw"]),
        "bfloat16_flop_per_s": float(gpu["bfloat16_tc_flops"]),
        "fp8_flop_per_s": float(gpu.get("fp8_tc_flops", gpu["bfloat16_tc_flops"])),
    }


def _per_card(entry: Mapping[str, Any]) -> dict[str, float]:
    """What an iteration reads and computes on each of its cards, by the model's sizes."""
    shape, tp_size = entry["shape"], entry["tp_size"]
    hidden, kv_width = shape["hidden_size"], shape["num_kv_heads"] * shape["head_dim"]
    queries = shape["num_heads"] * shape["head_dim"]
    layer = hidden * (2 * queries + 2 * kv_width) + 3 * hidden * shape["intermediate_size"]
    linear, head = shape["num_layers"] * layer, shape["vocab_size"] * hidden
    weight_size = 1 if entry["dtype"] == "fp8" else 2
    kv_size = 1 if entry["kv_cache_dtype"] == "fp8" else 2
    return {
        "weight_bytes": (linear * weight_size + head * 2) / tp_size,
        "kv_bytes_per_token": 2 * shape["num_layers"] * kv_width * kv_size / tp_size,
        "flop_per_token": 2 * linear / tp_size,
    }


def _config(shape: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a model of this shape."""
    return {
        "architectures": [shape["architecture"]],
        "model_type": MODEL_TYPES[shape["architecture"]],
        "num_hidden_layers": shape["num_layers"],
        "hidden_size": shape["hidden_size"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "intermediate_size": shape["intermediate_size"],
        "vocab_size": shape["vocab_size"],
        "max_position_embeddings": shape["max_positions"],
        "tie_word_embeddings": shape["tied_embeddings"],
        "torch_dtype": "bfloat16",
    }


def _compact(document: Mapping[str, Any]) -> str:
    """JSON with a line for each row of numbers."""

    def lines(value: Any, indent: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            inner = [f'{indent} "{key}": ' + "\n".join(lines(item, indent + " ")).lstrip() for key, item in value.items()]
            yield indent + "{\n" + ",\n".join(inner) + "\n" + indent + "}"
        elif isinstance(value, list) and value and isinstance(value[0], list | Mapping):
            yield indent + "[\n" + ",\n".join(indent + " " + json.dumps(item) for item in value) + "\n" + indent + "]"
        else:
            yield indent + json.dumps(value)

    return "\n".join(lines(document, "")) + "\n"


def write(entries: Sequence[Mapping[str, Any]]) -> None:
    """One file an entry, and none of an earlier run beside them; what is there stays until all are made."""
    made: dict[Path, str] = {}
    for entry in entries:
        document = profile(entry)
        name = f"{entry['system']}.{entry['model'].rpartition('/')[2]}.tp{entry['tp_size']}.{entry['dtype']}.json"
        path = FRAMEWORKS[entry["framework"]].folder / name
        if path in made:
            raise SystemExit(
                f"{name}: two entries, which differ in the dtype of their KV cache alone; a name has no place for it"
            )
        made[path] = _compact(document)
        first_ms = document["checks"][0]["ms"]
        sys.stdout.write(f"{path.relative_to(CHECKOUT)}: a decode of one sequence of 1,000 tokens {first_ms:.2f} ms\n")
    for folder in {path.parent for path in made}:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("wanted")
    commands.add_parser("write").add_argument("wanted", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "wanted":
        sys.stdout.write(json.dumps(wanted(), indent=1) + "\n")
        return
    logging.disable(logging.WARNING)
    write(json.loads(arguments.wanted.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
