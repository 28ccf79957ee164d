"""The ``lookahead-client`` command.

Exit codes: 0 the answer came, 1 the server or the way to it failed, 2 the request or the command line is
wrong, 130 interrupted with Ctrl-C (the request is cancelled on the server).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from lr_client.client import DEFAULT_TIMEOUT_S, DEFAULT_URL, READY_TIMEOUT_S, Client
from lr_client.errors import ClientError, InvalidRequest, ServerError, ServerUnreachable
from lr_client.render import ConsoleRenderer, JsonRenderer, Renderer
from lr_client.types import FinishEvent, Message, Options, Question

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Ask a lookahead reasoning server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Option(envvar="LOOKAHEAD_URL", help="gRPC address of the server, host:port.")]
Model = Annotated[str, typer.Option(envvar="LOOKAHEAD_MODEL", help="Name of the model on the server.")]


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    url: Url = DEFAULT_URL,
    model: Model = "lookahead",
    system: Annotated[str | None, typer.Option(help="System message before the question.")] = None,
    mode: Annotated[str | None, typer.Option(help="ar, sd, lr or lr_sd.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to sample from.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of tokens to sample from; 0 is all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the answer; may be repeated.")] = None,
    max_depth: Annotated[int | None, typer.Option(help="Steps drafted ahead.")] = None,
    depth: Annotated[str | None, typer.Option(help="fixed, or auto: as far as it pays.")] = None,
    min_chance: Annotated[
        float | None, typer.Option(help="Look ahead below steps accepted with this probability at least.")
    ] = None,
    draft_run_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one draft call; 0: one step.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Candidate steps at each position.")] = None,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(help="Token drafts in one verification at most, or auto."),
    ] = None,
    draft_length: Annotated[
        str | None,
        typer.Option(help="fixed, or auto: as many token drafts as bring most."),
    ] = None,
    await_draft: Annotated[
        str | None,
        typer.Option(help="never, always or auto: a target step waits for its drafted step."),
    ] = None,
    ngram_max: Annotated[int | None, typer.Option(help="Longest suffix looked up for token drafts.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="exact, judge, cascade, embedding, score, likelihood or random.")
    ] = None,
    verifier_threshold: Annotated[
        float | None, typer.Option(help="From where on the verifier's score accepts.")
    ] = None,
    proposer: Annotated[str | None, typer.Option(help="ngram, draft_step, draft_model or engine.")] = None,
    audit_rate: Annotated[
        float | None, typer.Option(help="Share of accepted steps that the server's auditor judges again.")
    ] = None,
    risk_budget: Annotated[
        float | None, typer.Option(help="Highest tolerable share of wrongly accepted steps; 0 is no limit.")
    ] = None,
    segmenter: Annotated[
        str | None, typer.Option(help="Where a step ends: blank_line, sentence or adaptive.")
    ] = None,
    lossless: Annotated[
        bool | None, typer.Option("--lossless", help="Accept no judged step: speculate by tokens only.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="Let the answer not depend on which model is faster."),
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds until the server cuts the answer.")] = None,
    trace: Annotated[bool, typer.Option(help="Colour each step by its origin.")] = True,
    trace_file: Annotated[
        Path | None, typer.Option(help="Save the trace of the request here; `lookahead trace` shows it.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON line per event.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until giving up.")] = DEFAULT_TIMEOUT_S,
) -> None:
    """Stream the answer to QUESTION: green = draft accepted, yellow = target's correction, blue = target."""
    options = Options(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
        mode=mode,
        max_depth=max_depth,
        depth=depth,
        min_chance=min_chance,
        draft_run_tokens=draft_run_tokens,
        width=width,
        num_draft_tokens=_number_or_auto(num_draft_tokens, "--num-draft-tokens"),
        draft_length=draft_length,
        await_draft=await_draft,
        ngram_max=ngram_max,
        verifier=verifier,
        verifier_threshold=verifier_threshold,
        proposer=proposer,
        audit_rate=audit_rate,
        risk_budget=risk_budget,
        segmenter=segmenter,
        lossless=lossless,
        deterministic=deterministic,
        deadline_s=deadline,
        trace=trace or trace_file is not None,
    )
    console = _console()
    with _one_line_errors(), Client(url, model=model, timeout_s=timeout) as client:
        renderer: Renderer
        renderer = JsonRenderer(console) if json_lines else ConsoleRenderer(console, legend=trace)
        with closing(renderer), client.stream(_question(question, system), options) as events:
            for event in events:
                renderer.show(event)
                if trace_file is not None and isinstance(event, FinishEvent):
                    _save_trace(trace_file, event.trace)


@app.command()
def check(
    url: Url = DEFAULT_URL,
    model: Model = "lookahead",
    timeout: Annotated[float, typer.Option(help="Seconds until the tiny question is given up.")] = 60.0,
) -> None:
    """Is the server ready, and does it answer a tiny question?"""
    with _one_line_errors(), Client(url, model=model, timeout_s=timeout) as client:
        if not client.is_ready(timeout_s=min(timeout, READY_TIMEOUT_S)):
            advice = "start the server, or give its address with --url"
            raise ServerUnreachable(f"no ready model {model!r} at {url}", advice=advice)
        begun_s = time.monotonic()
        result = client.ask("What is 1 + 1?", Options(max_tokens=16, temperature=0.0))
        took_s = time.monotonic() - begun_s
        _console().print(f"OK: {model} at {url} answered in {took_s:.2f} s (finish: {result.finish_reason})")


def _number_or_auto(given: str | None, flag: str) -> int | Literal["auto"] | None:
    if given is None or given == "auto":
        return "auto" if given else None
    try:
        return int(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is neither a whole number nor auto", param_hint=flag) from None


def _save_trace(path: Path, trace: str | None) -> None:
    if trace is None:
        raise ServerError("the server sent no trace", advice="it may be older than this client")
    try:
        path.write_text(trace, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from error


def _question(question: str, system: str | None) -> Question:
    if system is None:
        return question
    return [Message(role="system", content=system), Message(role="user", content=question)]


def _console(*, stderr: bool = False) -> Console:
    # Markup and highlighting are for our own words; most words here are a model's.
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _complain("cancelled")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ClientError as error:
        _complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(EXIT_WRONG_USE if isinstance(error, InvalidRequest) else EXIT_FAILED) from None


def _complain(message: str) -> None:
    _console(stderr=True).print(Text(" ".join(message.split()), style="red"))
