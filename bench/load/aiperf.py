"""NVIDIA's AIPerf, unmodified, at the OpenAI API: of the demo, and of a deployment that is emulated at its hardware's pace.

AIPerf wants packages of its own versions, so it gets an environment of its own, made once. What it writes stays in a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import demo
from bench.kit.hardware import device_line
from bench.kit.output import PAGES, console_of_any_width, print_line, write_json
from bench.kit.serving import command_serving, demo_spec
from bench.load.errors import LoadError
from bench.load.inputs import demo_questions, scripted_questions

VERSION = "0.13.0"
TOOLS = Path("out/tools/aiperf")
RUN_S = 600.0
DEPLOYMENTS = {"demo": ("--spec", "demo"), "qwen3-32b.h200_sxm": ("--spec", "qwen3-32b", "--pace", "h200_sxm")}
"""By the name that its OpenAI API gives its model."""
MAX_TOKENS = 512
MODES = ("ar", "auto")
TOKENIZER = Path(demo.__file__).parent / "checkpoints" / "target"


@dataclass(frozen=True)
class Row:
    """What AIPerf says of one run; times are means."""

    deployment: str
    mode: str
    concurrency: int
    requests: int
    errors_percent: float
    requests_per_s: float
    tokens_per_s: float
    first_token_ms: float
    between_tokens_ms: float
    latency_ms: float
    latency_p99_ms: float
    reasoning_tokens: float

    @classmethod
    def of(cls, deployment: str, mode: str, concurrency: int, exported: dict[str, Any]) -> Row:
        """``exported``: its file ``profile_export_aiperf.json``."""

        def mean(name: str) -> float:
            return float(exported[name]["avg"])

        return cls(
            deployment=deployment,
            mode=mode,
            concurrency=concurrency,
            requests=int(mean("completed_request_count")),
            errors_percent=mean("request_error_rate"),
            requests_per_s=mean("request_throughput"),
            tokens_per_s=mean("output_token_throughput"),
            first_token_ms=mean("time_to_first_token"),
            between_tokens_ms=mean("inter_token_latency"),
            latency_ms=mean("request_latency"),
            latency_p99_ms=float(exported["request_latency"]["p99"]),
            reasoning_tokens=mean("usage_reasoning_tokens"),
        )


def obtain() -> Path:
    """The command, in an environment of its own.

    Raises:
        LoadError: pip does not get it.
    """
    binary = TOOLS.absolute() / "bin" / "aiperf"
    if not binary.exists():
        for command in (
            (sys.executable, "-m", "venv", str(TOOLS)),
            (str(TOOLS / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", f"aiperf=={VERSION}"),
        ):
            if subprocess.run(command, check=False).returncode:
                raise LoadError(f"{' '.join(command)} failed")
    return binary


def run(binary: Path, url: str, deployment: str, mode: str, concurrency: int, num_requests: int, folder: Path) -> Row:
    """One run of AIPerf. The count of tokens is the server's, but it wants a tokenizer all the same, and one that is here.

    Raises:
        LoadError: it failed.
    """
    kept = folder / f"{deployment}-{mode}-{concurrency}"
    questions = folder / "questions.jsonl"
    asked_of = demo_questions(num_requests) if deployment == "demo" else scripted_questions("qwen3-gsm8k", num_requests, None)[0]
    questions.write_text("".join(json.dumps({"text": one}) + "\n" for one in asked_of), encoding="utf-8")
    asked = f"--model {deployment} --endpoint-type chat --streaming --concurrency {concurrency} --request-count {num_requests}"
    told = f"--custom-dataset-type single_turn --tokenizer {TOKENIZER} --use-server-token-count --ui none --url {url}"
    extra = json.dumps({"max_completion_tokens": MAX_TOKENS, "lookahead": {"mode": mode}})
    command = [str(binary), "profile", *asked.split(), *told.split(), "--input-file", str(questions), "--extra-inputs", extra]
    ended = subprocess.run(
        [*command, "--output-artifact-dir", str(kept)], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    exported = next(iter(kept.rglob("profile_export_aiperf.json")), None)
    if ended.returncode or exported is None:
        raise LoadError(f"aiperf ended with status {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}")
    return Row.of(deployment, mode, concurrency, json.loads(exported.read_text(encoding="utf-8")))


def main(
    deployments: Annotated[
        list[str] | None, typer.Option("--deployment", help="demo or qwen3-32b.h200_sxm; by default both.")
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Requests in flight; by default 1 and 8.")] = None,
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Of each run, at each place in flight.")] = 4,
    aiperf: Annotated[Path | None, typer.Option(help="A command of your own; by default it is installed once.")] = None,
    folder: Annotated[Path, typer.Option(help="Where all that AIPerf writes is kept.")] = Path("out/aiperf"),
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = PAGES / "aiperf.json",
) -> None:
    """Print a table and one JSON line."""
    console, rows = console_of_any_width(), list[Row]()
    binary = (aiperf or obtain()).absolute()
    for name in deployments or DEPLOYMENTS:
        kept = (folder / name).absolute()
        kept.mkdir(parents=True, exist_ok=True)
        with command_serving(DEPLOYMENTS[name], kept) as served:
            for places in concurrency or (1, 8):
                rows += [run(binary, served.openai_url, name, mode, places, num_requests * places, kept) for mode in MODES]
    show(console, rows)
    device = device_line(demo_spec().target.num_threads)
    write_json(output, {"aiperf": VERSION, "device": device, "cores": os.cpu_count(), "rows": [asdict(row) for row in rows]})
    errors = max(row.errors_percent for row in rows)
    print_line(console, {"runs": len(rows), "requests": sum(row.requests for row in rows), "errors_percent": errors})


def show(console: Console, rows: Sequence[Row]) -> None:
    headings = "deployment|mode|in flight|requests|errors|requests/s|tokens/s|first token|a token|latency|p99"
    table = Table(*headings.split("|"), title=f"AIPerf {VERSION}; times in ms")
    for row in rows:
        counts = (row.deployment, row.mode, str(row.concurrency), str(row.requests), f"{row.errors_percent:.0f} %")
        speed = (f"{row.requests_per_s:.2f}", f"{row.tokens_per_s:.0f}", f"{row.first_token_ms:.0f}")
        table.add_row(*counts, *speed, f"{row.between_tokens_ms:.1f}", f"{row.latency_ms:.0f}", f"{row.latency_p99_ms:.0f}")
    console.print(table)
