"""Logs of every process: an event a line, as JSON, on standard error.

No line holds a word of a prompt or of an answer. The message of an exception may quote one, so a process that knows texts leaves
it out, and says where the exception came from. Engines know tokens alone, and tell it all.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

MAX_FRAMES = 8
"""Of a traceback, the innermost."""

Line = structlog.typing.EventDict


def configure(*, knows_texts: bool, **about: int | str) -> None:
    """For the whole process: our own events, and what libraries warn of. ``about`` stands in each of ours."""
    structlog.configure(
        processors=[lambda logger, name, line: {**about, **line}, *_every(knows_texts), structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Losing(sys.stderr))),
    )
    _configure_libraries(knows_texts=knows_texts)


def _configure_libraries(*, knows_texts: bool) -> None:
    """The standard library's loggers alone, from warnings on; a process that has its own handlers keeps them."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *_every(knows_texts)],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _Losing(io.TextIOBase):
    """A file that loses what there is no room for: a request does not fail because a disk is full."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


def _every(knows_texts: bool) -> list[structlog.typing.Processor]:
    # Whoever logs for a request says its id: the step loop binds it where it serves one.
    shared = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    return [*shared, structlog.processors.TimeStamper(fmt="iso"), _Fault(knows_texts)]


class _Fault:
    """Says an exception by its kind and where it came from, and by its message where that can quote nobody."""

    def __init__(self, knows_texts: bool) -> None:
        self._knows_texts = knows_texts

    def __call__(self, logger: Any, method: str, line: Line) -> Line:
        told = line.pop("exc_info", None)
        if told and not isinstance(told, tuple | BaseException):
            told = sys.exc_info()
        error = told[1] if isinstance(told, tuple) else told
        if error is not None:
            line["kind"] = type(error).__name__
            line["frames"] = traceback.format_tb(error.__traceback__)[-MAX_FRAMES:]
            if not self._knows_texts:
                line["message"] = str(error)
        return line
