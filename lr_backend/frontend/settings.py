"""What the front end is told: the operator's settings, and what it must know of the deployment behind it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lr_backend.config import LoopConfig
from lr_backend.engine import Role
from lr_backend.errors import ConfigError, first_error
from lr_backend.request import MOST_TOKENS
from lr_backend.serve.restrictions import is_loopback

MAX_REQUEST_S = 86400.0
"""The most that a request may be given."""


class Settings(BaseModel):
    """Where the front end listens, whom it answers, and how much it takes. The file says them by the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    keys_file: Path | None = None
    """API keys, one a line. None: whoever can reach the port is answered."""
    open_to_network: bool = False
    """Beyond this machine too there need be no keys: a gateway asks for its own."""
    max_head_s: float = Field(default=10.0, gt=0.0, le=3600.0)
    """For a request's line and headers to arrive."""
    max_body_bytes: int = Field(default=1 << 20, ge=1 << 10, le=1 << 30)
    max_body_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """For a whole body to arrive."""
    max_requests_a_minute: int | None = Field(default=None, ge=1)
    """Of one key, or of everybody where there are no keys. None: any number."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Answers at a time. None: as many as the deployment admits."""
    kept_for_priority: int = Field(default=0, ge=0)
    """Of them, those that only keys with the word ``priority`` get."""
    page: bool = True
    """A page to ask on, at ``/``."""

    @model_validator(mode="after")
    def _is_closed(self) -> Self:
        if self.keys_file is None and not self.open_to_network and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from elsewhere: give a file of API keys (keys_file), or say open_to_network = true"
            )
        return self

    def places(self, admitted: int) -> int:
        """Answers at a time, where the deployment admits so many.

        Raises:
            ConfigError: all of them are kept for priority.
        """
        found = self.max_in_flight or admitted
        if self.kept_for_priority >= found:
            raise ConfigError(f"kept_for_priority: of {found} answers at a time some have to be everybody's")
        return found

    @classmethod
    def load(cls, path: Path | None, **by_option: object) -> Self:
        """Read a TOML file, if there is one, for all that no option says.

        Raises:
            ConfigError: the file cannot be read, has an unknown key, or a value breaks a rule.
        """
        try:
            said = tomllib.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        if twice := sorted(said.keys() & by_option.keys()):
            raise ConfigError(f"{path}: {twice[0]} is said by an option, not here")
        try:
            return cls.model_validate(said | by_option)
        except ValidationError as error:
            raise ConfigError(f"front end: {first_error(error)}") from error


class Deployed(BaseModel):
    """The deployment that answers. Limits are tokens, steps and requests, as in ``[lookahead.limits]``.

    Attributes:
        default_tokens: of an answer whose request names no limit: the deployment's own default, or all that it allows.
        default_temperature: of an answer whose request says none.
        request_s: seconds that a request may take at most.
        think_open, think_close: texts around the reasoning, where the model has them.
        needs: models of the server without which there is no answer. It goes on without the others.
        targets: gRPC addresses of the target's servers, where it lives elsewhere: one of them is needed too.
        pace: at whose pace the engines run, as it must stand beside every time; empty: at this machine's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    max_tokens: int
    default_tokens: int
    default_temperature: float
    max_depth: int
    max_width: int
    max_draft_len: int
    max_in_flight: int
    request_s: float
    think_open: str | None = None
    think_close: str | None = None
    needs: tuple[str, ...] = ("lookahead",)
    targets: tuple[str, ...] = ()
    pace: str = ""

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """Around the reasoning: a pair, or none."""
        return ((self.think_open or "", self.think_close),) if self.think_close else ()

    @classmethod
    def of(cls, name: str, config: LoopConfig, *, needs: tuple[str, ...]) -> Self:
        limits = config.limits
        return cls(
            name=name,
            max_tokens=limits.max_tokens,
            default_tokens=config.defaults.get("max_tokens", min(limits.max_tokens, MOST_TOKENS)),
            default_temperature=config.defaults.get("temperature", 0.0),
            max_depth=limits.max_depth,
            max_width=limits.max_width,
            max_draft_len=limits.max_draft_len,
            max_in_flight=limits.max_in_flight_requests,
            request_s=min(config.timeouts.request_s, MAX_REQUEST_S),
            think_open=config.think_open,
            think_close=config.think_close,
            needs=needs,
            targets=config.remotes.get(Role.TARGET, ()),
            pace=config.pace,
        )


class Launch(BaseModel):
    """All that the process is told when it starts, as one line of JSON.

    Attributes:
        grpc_url: ``host:port`` of Triton.
        metrics_url: ``host:port`` of Triton's metrics.
        certificate: of Triton's gRPC port; None: it has none.
        socket_fd: bound already; the process inherits it.
        drain_s: for answers in flight once it is asked to end.
        notice_file: names the models whose process has died and that are loaded anew; None: nobody says so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings
    deployed: Deployed
    grpc_url: str
    metrics_url: str
    certificate: Path | None = None
    socket_fd: int
    drain_s: float
    notice_file: Path | None = None
