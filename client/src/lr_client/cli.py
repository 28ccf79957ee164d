"""The ``lookahead-client`` command.

Exit codes: 0 the answer came, 1 the server or the way to it failed, 2 the request or the command line is
wrong, 130 interrupted with Ctrl-C (the request is cancelled on the server).
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from io import TextIOWrapper
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TextIO, get_args, get_origin, get_type_hints

import grpc
import typer
from rich.console import Console
from rich.text import Text

from lr_client import __version__
from lr_client._help import Command, Group
from lr_client.client import DEFAULT_TIMEOUT_S, DEFAULT_URL, READY_TIMEOUT_S, Client
from lr_client.errors import ClientError, InvalidRequest, ServerError, ServerUnreachable
from lr_client.fields import FIELDS, Options
from lr_client.protocol import Collector
from lr_client.render import ConsoleRenderer, JsonRenderer, Renderer
from lr_client.types import FinishEvent, Message, Question, Result

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130
_LIMITS = {"length": "--max-tokens", "deadline": "--deadline"}
"""What cuts an answer, by its finish reason."""

app = typer.Typer(
    cls=Group,
    help="Ask a lookahead reasoning server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"lookahead-client {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """What comes before a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a model writes what not every encoding has
            stream.reconfigure(errors="replace")


Url = Annotated[
    str,
    typer.Option(
        envvar="LOOKAHEAD_URL", help="gRPC address of the server, host:port, or grpcs://host:port by TLS."
    ),
]
Model = Annotated[str, typer.Option(envvar="LOOKAHEAD_MODEL", help="Name of the model on the server.")]


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has an option for each field of a request in place of its parameter ``options``.

    ``max_depth`` is ``--max-depth``, and ``deadline_s`` is ``--deadline``.
    """
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    del parameters["options"]
    flags = {name: name.removesuffix("_s") for name in FIELDS}
    kinds = get_type_hints(Options)

    @wraps(command)
    def run(**given: Any) -> None:
        options = Options(**{name: given.pop(flag) for name, flag in flags.items()})
        command(options=options, **given)

    for name, flag in flags.items():
        parameters[flag] = _option(flag, kinds[name], FIELDS[name].help)
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return run


def _option(flag: str, kind: Any, meaning: str) -> inspect.Parameter:
    """What a command line takes for ``kind``: known words or any other, some strings, or one plain value."""
    plain, *more = (one for one in get_args(kind) if one is not NoneType)
    words = get_args(plain) if get_origin(plain) is Literal else ()
    typed: Any = str if words else list[str] if Sequence[str] in more else plain
    annotation = Annotated[typed | None, typer.Option(help=meaning, metavar="|".join(words) or None)]
    return inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@app.command(cls=Command)
@_with_options
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    options: Options,
    url: Url = DEFAULT_URL,
    model: Model = "lookahead",
    system: Annotated[str | None, typer.Option(help="System message before the question.")] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the trace of the request here; `lookahead trace` shows it."),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON line per event.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until giving up.")] = DEFAULT_TIMEOUT_S,
) -> None:
    """Stream the answer to QUESTION: green = draft accepted, yellow = target's correction, blue = target.

    Unless --no-trace is given, the trace is asked for, to colour the steps.
    """
    with_trace, coloured = options.trace is True, options.trace is not False
    options = replace(options, trace=coloured or trace_file is not None)
    console = _console()
    with (
        _one_line_errors(),
        _opened(trace_file) as file,
        _client(url, model, timeout) as client,
    ):
        renderer: Renderer
        if json_lines:
            renderer = JsonRenderer(console, with_trace=with_trace)
        else:
            renderer = ConsoleRenderer(console, legend=coloured)
        with closing(renderer), client.stream(_question(question, system), options) as events:
            collector = Collector()
            for event in events:
                renderer.show(event)
                collector.add(event)
                if file is not None and isinstance(event, FinishEvent):
                    _save_trace(file, event.trace)
        _warn_of_no_answer(collector.result())


@app.command(cls=Command)
def check(
    url: Url = DEFAULT_URL,
    model: Model = "lookahead",
    timeout: Annotated[float, typer.Option(help="Seconds until the tiny question is given up.")] = 60.0,
) -> None:
    """Is the server ready, and does it answer a tiny question?"""
    with _one_line_errors(), _client(url, model, timeout) as client:
        # Where nothing is said of that, the question's own error tells why.
        says_ready = True
        with suppress(grpc.RpcError):
            says_ready = client._says_ready(min(timeout, READY_TIMEOUT_S), [model])
        if not says_ready:
            advice = "start the server, or give its address with --url"
            raise ServerUnreachable(f"no ready model {model!r} at {url}", advice=advice)
        begun_s = time.monotonic()
        result = client.ask("What is 1 + 1?", Options(max_tokens=16, temperature=0.0))
        took_s = time.monotonic() - begun_s
        _console().print(f"OK: {model} at {url} answered in {took_s:.2f} s (finish: {result.finish_reason})")


def _client(url: str, model: str, timeout_s: float) -> Client:
    """By TLS for ``grpcs://``, as in a spec. gRPC's own variable names the certificates that are trusted."""
    address = url.removeprefix("grpcs://")
    return Client(
        address,
        model=model,
        timeout_s=timeout_s,
        credentials=None if address == url else grpc.ssl_channel_credentials(),
    )


def _warn_of_no_answer(result: Result) -> None:
    """Reasoning that was cut looks like an answer to who does not know the model."""
    limit = _LIMITS.get(result.finish_reason)
    if limit is not None and not result.answer:
        _complain(
            f"no answer: cut before it began (finish: {result.finish_reason}); raise {limit}", style="yellow"
        )


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """A file for the trace, before the question is asked: its answer may take minutes."""
    if path is None:
        yield None
        return
    with _cannot_write(str(path)):
        file = path.open("w", encoding="utf-8")
    try:
        yield file
    finally:
        with _cannot_write(str(path)):
            file.close()
            if path.is_file() and not path.stat().st_size:  # there was no answer to trace
                path.unlink()


@contextmanager
def _cannot_write(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from error


def _save_trace(file: TextIO, trace: str | None) -> None:
    if trace is None:
        raise ServerError("the server sent no trace", advice="it may be older than this client")
    with _cannot_write(file.name):
        file.write(trace)


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


def _complain(message: str, style: str = "red") -> None:
    _console(stderr=True).print(Text(" ".join(message.split()), style=style))
