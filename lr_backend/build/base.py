"""What the specs of all runtimes have in common: how a file is found and read, and the rules between engines and step loop.

Take :class:`DeploymentSpec` from :mod:`lr_backend.build.spec`, where every runtime's class is registered.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from lr_backend.build.placement import Placement
from lr_backend.config import CANCEL_RESERVE, LoopConfig
from lr_backend.contract import ENGINE_INPUTS, TensorSpec
from lr_backend.engine import Role
from lr_backend.engine.address import Address
from lr_backend.errors import ConfigError, InvalidRequest, first_error
from lr_backend.notice import MAX_LOOPS
from lr_backend.request import LookaheadRequest
from lr_backend.resources import is_checkout, resource_root

PACKAGE_ROOT = resource_root()
"""Specs are looked up by name and templates are found here."""

_FILLED_BY_BUILD = (
    "tokenizer_dir",
    "judge_tokenizer_dir",
    "vocab_size",
    "tokens_per_block",
    "engine_drafts",
    "engine_always_drafts",
    "coupled_noise",
    "root",
    "pace",
    "judge_seq_len",
    "remotes",
)

_LIMITS_FILLED_BY_BUILD = {"max_draft_len": "the target's max_draft_len", "max_in_flight_calls": "server.thread_pool_size"}
"""Of ``[lookahead.limits]``, and what each comes from."""

LOOPBACK = re.compile(r"localhost|127\..*|\[?::1\]?")

JUDGES_FRAME = 128
"""Tokens around the two steps in a judge's prompt, about."""


class Section(BaseModel):
    """A table of a spec: frozen, and without keys that are not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Layout(StrEnum):
    """Which process computes for the step loop."""

    PROCESS_A_ROLE = "process_a_role"
    """Each of the models target, draft and judge has its own, which the loop calls by BLS."""
    ONE_PROCESS = "one_process"
    """The loop's own, which runs their engines too and hands nothing over. Runtime ``embedded`` only; the server has the model
    ``lookahead`` alone."""


class ServerSpec(Section):
    """How tritonserver is run. Times in seconds.

    Attributes:
        thread_pool_size: BLS calls that the Python backend has in flight at a time, of all processes of the step loop;
            :data:`~lr_backend.config.CANCEL_RESERVE` of them are for cancels.
        exit_timeout_s: how long a stopping server waits for requests in flight.
        load_timeout_s: how long loading all models may take. The first answers, by which a server proves itself, have what is
            left of it, and two minutes.
        layout: which process computes for the step loop.
        num_loops: processes of the step loop, which share requests, limits and calls. Each is one thread of Python.
    """

    layout: Layout = Layout.PROCESS_A_ROLE
    num_loops: int = Field(default=1, ge=1, le=MAX_LOOPS)
    thread_pool_size: int = Field(default=128, ge=CANCEL_RESERVE + 1)
    exit_timeout_s: int = Field(default=30, ge=0, le=3600)
    load_timeout_s: int = Field(default=120, ge=1, le=86400)

    @property
    def max_in_flight_calls(self) -> int:
        """Engine calls at a time, of all processes of the step loop."""
        return self.thread_pool_size - CANCEL_RESERVE

    @property
    def threads_a_loop(self) -> int:
        """BLS calls that Triton has in flight for each process of the step loop: its share, and all that cancels need."""
        return self.max_in_flight_calls // self.num_loops + CANCEL_RESERVE


class EngineSpec(Section):
    """What every runtime's engine says of itself. Sizes are in tokens.

    Attributes:
        url: where the role lives if another server runs it (``lookahead serve --role``): ``grpc://host:port``, ``grpcs`` for
            TLS, or a list of them, which are alike and share the calls. Empty: it is a model of the step loop's own server.
        checkpoint: Hugging Face folder, relative to the project root or absolute.
        max_seq_len: prompt and output of one request together.
        tokens_per_block: granularity of the KV cache, hence of prefix reuse.
        max_queue_size: requests that may wait; None: no limit of the engine's own.
    """

    url: tuple[str, ...] = ()
    checkpoint: Path
    max_seq_len: int = Field(ge=2)
    tokens_per_block: int = Field(default=32, ge=1)
    max_queue_size: int | None = Field(default=None, ge=1)

    @field_validator("url", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("url")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        try:
            found = [Address.parse(url) for url in urls]
        except ConfigError as error:
            raise ValueError(error.message) from error
        if len(set(found)) < len(found):
            raise ValueError("names a server twice")
        return urls

    @property
    def hosts(self) -> frozenset[str]:
        """Where the role lives; the empty name is the machine of the step loop's own server."""
        hosts = [Address.parse(url).host for url in self.url]
        return frozenset("" if LOOPBACK.fullmatch(host) else host for host in hosts) or frozenset({""})

    @property
    def num_drafts(self) -> int:
        """Most draft tokens of one verification; 0 where the engine takes none."""
        return 0

    @property
    def triton_max_batch_size(self) -> int:
        """Requests that Triton may hand over in one ``execute``; how many run at a time is the engine's own affair."""
        return 64

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Tensors that the engine takes."""
        return ENGINE_INPUTS

    def parameters(self, model_dir: Path) -> dict[str, str]:
        """``parameters`` of the model's ``config.pbtxt``. ``model_dir`` holds what the engine loads."""
        raise NotImplementedError


class DeploymentSpec(Section):
    """What every runtime's spec holds; :meth:`load` gives the class of the file's ``runtime``.

    A subclass adds the sections ``target``, ``draft`` and ``judge``. ``lookahead`` holds the fields of
    :class:`~lr_backend.config.LoopConfig` that the build does not fill in itself.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    runtime: str
    lookahead: dict[str, Any]
    server: ServerSpec = ServerSpec()

    _path: Path = PrivateAttr(default=Path())
    _served: tuple[Role, ...] | None = PrivateAttr(default=None)
    _runtimes: ClassVar[dict[str, type[DeploymentSpec]]] = {}

    @classmethod
    def register(cls, *runtimes: str) -> None:
        """Read specs of these runtimes as this class."""
        DeploymentSpec._runtimes.update(dict.fromkeys(runtimes, cls))

    @property
    def path(self) -> Path:
        """The file that the spec was read from."""
        return self._path

    @property
    def root(self) -> Path:
        """The project root: what paths in the spec are relative to. A wheel's own specs belong to the working folder."""
        return Path.cwd() if self._in_wheel else self._home

    @property
    def _home(self) -> Path:
        folder = self._path.parent
        return folder.parent if folder.name == "engines" else folder

    @property
    def _in_wheel(self) -> bool:
        """Nothing can be written beside the spec, and checkpoints that are not the package's cannot lie there."""
        return not is_checkout() and self._home == PACKAGE_ROOT

    def locate(self, path: str | Path) -> Path:
        """A path of the spec, made absolute. What a wheel's own spec names may be the wheel's as well."""
        packaged = self._home / path
        return packaged.resolve() if self._in_wheel and packaged.exists() else (self.root / path).resolve()

    @property
    def built_dir(self) -> Path:
        """Where this spec's repository is rendered unless a caller says otherwise."""
        return self.root / "engines" / "built" / ".".join((self.name, *(self._served or ())))

    def only(self, roles: Iterable[Role]) -> Self:
        """The part of the deployment that a server of these roles runs, for a step loop elsewhere.

        Raises:
            ConfigError: a role has no ``url``: it belongs to the loop's own server.
        """
        served = tuple(role for role in Role if role in set(roles))
        if near := [role for role in served if not self.engine(role).url]:
            raise ConfigError(f"{self.name}: {near[0]} has no url in the spec, so the step loop's own server runs it")
        part = self.model_copy()
        part._served = served
        return part

    @property
    def runs_loop(self) -> bool:
        """Whether this server has the step loop."""
        return self._served is None

    @property
    def roles_here(self) -> tuple[Role, ...]:
        """Whose engines this server runs."""
        return self._served if self._served is not None else tuple(role for role in Role if not self.engine(role).url)

    @property
    def models_here(self) -> tuple[Role, ...]:
        """Of those, which are models of the server: the others run in the step loop's own process."""
        return () if self.server.layout is Layout.ONE_PROCESS else self.roles_here

    @property
    def remotes(self) -> dict[Role, tuple[str, ...]]:
        """Where the step loop finds the others."""
        return {role: self.engine(role).url for role in Role if self.engine(role).url}

    @property
    def remotes_load_s(self) -> int:
        """How long these may take to be there."""
        return self.server.load_timeout_s

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Which engines have GPUs to themselves; none on the embedded engine."""
        return ()

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Read a spec by path (it ends in ``.toml``) or by name from ``engines/`` of the working folder or the package.

        Raises:
            ConfigError: no such file, no TOML, an unknown key, a value out of range, an unknown runtime, or one of another class.
        """
        path = _find(name_or_path)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path.name} cannot be read: {error}") from error
        kind = cls._class_of(raw, path.name)
        if not issubclass(kind, cls):  # before it is read: it may name another spec in turn
            raise ConfigError(f"{path.name}: the runtime {raw['runtime']!r} is no {cls.__name__}")
        try:
            spec = kind.model_validate(raw)
        except ValidationError as error:
            # A role's section is one of several classes; pydantic puts the name of the one that it tried into the place.
            raise ConfigError(f"{path.name}: {first_error(error, cls._runtimes)}") from error
        spec._path = path
        return spec

    @classmethod
    def _class_of(cls, raw: Mapping[str, Any], file_name: str) -> type[DeploymentSpec]:
        runtime = raw.get("runtime")
        if not isinstance(runtime, str) or runtime not in cls._runtimes:
            raise ConfigError(f"{file_name}: runtime {runtime!r} is not one of {', '.join(sorted(cls._runtimes))}")
        return cls._runtimes[runtime]

    def engine(self, role: Role) -> EngineSpec:
        """The section of one role."""
        engine: EngineSpec = getattr(self, role.value)
        return engine

    def template(self, role: Role) -> str:
        """Folder of ``model_repository/`` that one role's engine is rendered from."""
        return self.runtime

    def checkpoint_dir(self, role: Role) -> Path:
        """Absolute folder of one role's checkpoint."""
        return self.locate(self.engine(role).checkpoint)

    def loop_config(self, vocab_size: int = 1) -> LoopConfig:
        """What is rendered into ``lookahead.json``; ``vocab_size`` is the target's logits width."""
        return LoopConfig.model_validate(
            {
                **self.runtime_loop_settings(),
                **self.lookahead,
                **self._no_think_markers(),
                "limits": self._limits(),
                "tokenizer_dir": self.checkpoint_dir(Role.TARGET),
                "judge_tokenizer_dir": self.checkpoint_dir(Role.JUDGE),
                "vocab_size": vocab_size,
                "tokens_per_block": self.engine(Role.TARGET).tokens_per_block,
                "engine_drafts": self.engine_drafts,
                "engine_always_drafts": self.engine_always_drafts,
                "coupled_noise": self.coupled_noise,
                "root": self.root,
                "judge_seq_len": self.engine(Role.JUDGE).max_seq_len,
                "remotes": self.remotes,
            }
        )

    @property
    def engine_drafts(self) -> bool:
        """Whether the target's engine holds the draft model too and drafts by itself where a call asks for it."""
        return False

    @property
    def engine_always_drafts(self) -> bool:
        """Whether it does so in every call, asked or not."""
        return False

    @property
    def coupled_noise(self) -> bool:
        """Whether target and draft draw the token at a position with noise that follows from seed and position alone."""
        return False

    def engine_parameters(self, role: Role, model_dir: Path) -> dict[str, str]:
        """``parameters`` of one role's ``config.pbtxt``. ``model_dir`` holds what its engine loads."""
        return self.engine(role).parameters(model_dir)

    def runtime_loop_settings(self) -> dict[str, Any]:
        """The runtime's own defaults for ``[lookahead]``."""
        return {}

    def _no_think_markers(self) -> dict[str, None]:
        """TOML has no null: an empty marker is none."""
        return {name: None for name in ("think_open", "think_close") if self.lookahead.get(name) == ""}

    def _limits(self) -> Any:
        """Those that the spec says, with those that follow from its other sections."""
        said = self.lookahead.get("limits", {})
        if not isinstance(said, Mapping):
            return said  # no table, which is refused as any other setting
        drafts, calls = self.engine(Role.TARGET).num_drafts, self.server.max_in_flight_calls
        return {**said, "max_draft_len": drafts, "max_in_flight_calls": calls}

    @field_validator("lookahead")
    @classmethod
    def _leave_to_build(cls, lookahead: dict[str, Any]) -> dict[str, Any]:
        for key in _FILLED_BY_BUILD:
            if key in lookahead:
                raise ValueError(f"{key} comes from the engines and checkpoints; leave it out")
        limits = lookahead.get("limits")
        for key, source in _LIMITS_FILLED_BY_BUILD.items():
            if isinstance(limits, Mapping) and key in limits:
                raise ValueError(f"limits.{key} comes from {source}; leave it out")
        return lookahead

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.server.layout is Layout.ONE_PROCESS and self.runtime != "embedded":
            raise ValueError("server.layout: one_process needs the runtime embedded; other engines run where their servers are")
        if self.server.layout is Layout.ONE_PROCESS and self.remotes:
            raise ValueError(f"server.layout: one_process runs every engine itself, and {next(iter(self.remotes))} has a url")
        if self.server.layout is Layout.ONE_PROCESS and self.server.num_loops > 1:
            raise ValueError("server.num_loops: one_process holds the engines and the loop in one, so there is one loop")
        limits = _checked_loop_config(self).limits
        if self.server.num_loops > min(limits.max_in_flight_requests, limits.max_in_flight_calls):
            less = f"lookahead.limits.max_in_flight_requests, or server.thread_pool_size less {CANCEL_RESERVE}"
            raise ValueError(f"server.num_loops: each process needs a request and a call of its own, and {less} is below it")
        longest = limits.max_prompt_tokens + limits.max_tokens
        for role in (Role.TARGET, Role.DRAFT):
            if self.engine(role).max_seq_len < longest:
                raise ValueError(f"{role}.max_seq_len must hold limits.max_prompt_tokens + limits.max_tokens = {longest}")
        if self.engine(Role.JUDGE).max_seq_len < 2 * limits.max_step_tokens + JUDGES_FRAME:
            raise ValueError("judge.max_seq_len must hold two steps of limits.max_step_tokens and the prompt around them")
        return self


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


def _checked_loop_config(spec: DeploymentSpec) -> LoopConfig:
    """The loop's settings, with the defaults held against the rules and limits of a request."""
    try:
        config = spec.loop_config()
    except ValidationError as error:
        raise ValueError(f"lookahead.{first_error(error)}") from error
    try:
        request = LookaheadRequest.parse({**config.defaults, "text_input": "any"})
    except InvalidRequest as error:
        raise ValueError(f"lookahead.defaults.{error.message}") from error
    missing = {
        f"verifier={request.verifier}": config.lacks_verifier(request.verifier),
        f"proposer={request.proposer}": config.lacks_proposer(request.proposer),
        f"mode={request.mode.value}": config.lacks_mode(request.mode, greedy=request.sampling.greedy),
    }
    if request.thinking_token_budget is not None and config.think_close is None:
        missing["thinking_token_budget"] = "the target marks no end of its reasoning"
    for default, rule in missing.items():
        if rule is not None:
            raise ValueError(f"lookahead.defaults.{default}: {rule}")
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
