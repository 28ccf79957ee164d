"""TensorRT-LLM's build tools, faked: scripts that take the same command lines, write the same files, and can be told to fail."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from lr_backend.build.manifest import Platform
from lr_backend.build.trtllm_commands import CONVERTERS, QUANTIZER, Toolchain
from lr_backend.nvidia import TENSORRT_LLM, Gpu
from tests.support.tiny_models import Shape, make_checkpoint

_SCRIPT = """#!{python}
import json, os, sys
from pathlib import Path

tool, control = {tool!r}, Path({control!r})
flags = dict(zip([part[2:] for part in sys.argv[1::2]], sys.argv[2::2]))
with (control / "calls.log").open("a") as log:
    print(json.dumps([tool, flags, os.environ.get("CUDA_VISIBLE_DEVICES"), os.getcwd()]), file=log)
print("working on", flags["output_dir"])
failure = control / f"fail-{{tool}}"
if failure.exists():
    print("CUDA out of memory", file=sys.stderr)
    sys.exit(int(failure.read_text()))
if (control / f"hang-{{tool}}").exists():
    import time
    time.sleep(0.3)  # whoever reads the number may end whoever started this, who may be about to learn of it
    (control / "pid").write_text(str(os.getpid()))
    time.sleep(600)
output = Path(flags["output_dir"])
if tool == "build":
    source = Path(flags["checkpoint_dir"])
    pretrained = json.loads((source / "config.json").read_text())
    config = {{
        "version": {version!r},
        "pretrained_config": pretrained,
        "build_config": {{
            "max_batch_size": int(flags["max_batch_size"]),
            "max_num_tokens": int(flags["max_num_tokens"]),
            "max_seq_len": int(flags["max_seq_len"]),
            "max_draft_len": int(flags.get("max_draft_len", 0)),
            "plugin_config": {{
                "tokens_per_block": int(flags["tokens_per_block"]) * (2 if (control / "other-blocks").exists() else 1),
                "use_paged_context_fmha": flags["use_paged_context_fmha"] == "enable",
            }},
        }},
    }}
    ranks, ending = pretrained["mapping"]["tp_size"], "engine"
else:
    ranks, ending = int(flags["tp_size"]), "safetensors"
    config = {{"architecture": "QWenForCausalLM", "mapping": {{"tp_size": ranks}}}}
(output / "config.json").write_text(json.dumps(config))
for rank in range(ranks - (control / f"short-{{tool}}").exists()):
    (output / f"rank{{rank}}.{{ending}}").write_text("weights")
"""


@dataclass(frozen=True)
class FakeTools:
    """The tools, and the folder through which they are told what to do."""

    control: Path
    chain: Toolchain

    def fail(self, tool: str, status: int = 3) -> None:
        """``convert``, ``quantize`` or ``build`` fails from now on."""
        (self.control / f"fail-{tool}").write_text(str(status))

    def mend(self, tool: str) -> None:
        (self.control / f"fail-{tool}").unlink()

    def tell(self, what: str) -> None:
        """``short-build``: leave out a file. ``hang-convert``: never end. ``other-blocks``: build something else."""
        (self.control / what).write_text("")

    def calls(self) -> list[tuple[str, dict[str, str], str, str]]:
        """(tool, flags, CUDA_VISIBLE_DEVICES, working folder) of every call so far."""
        log = self.control / "calls.log"
        return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.is_file() else []


def make_tools(folder: Path) -> FakeTools:
    examples, control = folder / "examples", folder / "control"
    control.mkdir(parents=True)
    scripts = {path: "convert" for path in CONVERTERS.values()} | {QUANTIZER: "quantize"}
    for name, tool in scripts.items():
        _write(examples / name, tool, control)
    _write(folder / "bin" / "trtllm-build", "build", control)
    return FakeTools(control, Toolchain(examples, sys.executable, str(folder / "bin" / "trtllm-build")))


def _write(path: Path, tool: str, control: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SCRIPT.format(python=sys.executable, tool=tool, control=str(control), version=TENSORRT_LLM))
    path.chmod(0o755)


def hopper(num_gpus: int = 2, *, tensorrt_llm: str | None = TENSORRT_LLM, capability: str = "9.0") -> Platform:
    gpus = tuple(Gpu(number, "NVIDIA H100 80GB HBM3", capability, 81559) for number in range(num_gpus))
    return Platform(tensorrt_llm, "10.14.1.48" if tensorrt_llm else None, gpus)


def write_gpu_spec(folder: Path, *, checkpoints: bool = True, runtime: str = "tensorrtllm") -> Path:
    """A small deployment: the target over two GPUs, draft and judge on the second; its checkpoints are tiny ones."""
    for seed, role in enumerate(("target", "draft", "judge")):
        if checkpoints:
            make_checkpoint(folder / "ck" / role, seed, Shape(heads=4, kv_heads=2))
    engine = (
        "max_batch_size = 4\nmax_num_tokens = 1024\nmax_seq_len = 1024\n"
        "max_tokens_in_paged_kv_cache = 4096\ntokens_per_block = 32\n"
    )
    path = folder / "engines" / "small.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'name = "small"\nruntime = "{runtime}"\n\n'
        '[hardware]\ngpu = "NVIDIA H100"\nnum_gpus = 2\ngpu_memory_gib = 79.1\ncompute_capability = "9.0"\n\n'
        f'[target]\ncheckpoint = "ck/target"\ntp_size = 2\ngpu_device_ids = [0, 1]\n{engine}max_draft_len = 8\n\n'
        f'[draft]\ncheckpoint = "ck/draft"\ngpu_device_ids = [1]\n{engine}\n'
        f'[judge]\ncheckpoint = "ck/judge"\ngpu_device_ids = [1]\n{engine}\n'
        "[lookahead.limits]\nmax_prompt_tokens = 256\nmax_tokens = 256\nmax_step_tokens = 16\n\n"
        "[server]\nexit_timeout_s = 5\n",
        encoding="utf-8",
    )
    return path
