"""Whether this machine can serve a deployment: everything that is missing at once, each with what to do.

:func:`check` is pure: facts and needs in, findings out. :func:`probe` is the rim that collects the facts, and
:func:`check_files` looks at the deployment's checkpoints.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from lr_backend.build.placement import Placement
from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec, EmbeddedDeployment, GpuDeployment, HardwareSpec
from lr_backend.embedded.native.library import DOES_NOT_OPEN, open_library
from lr_backend.errors import CheckpointError, ConfigError, LookaheadError
from lr_backend.mpi import spawning_alone
from lr_backend.nvidia import IMAGE, TENSORRT_LLM, TRITON_RELEASE, VISIBLE, Gpu, installed, probe_gpus, visible_gpus
from lr_backend.resources import is_checkout, resource_root
from lr_backend.serve.backend_dir import find_stub, find_tritonserver
from lr_backend.serve.launch import COMPILED, LLM_API, ONE_RANK, LaunchMode, launch_plan
from lr_backend.serve.mounts import probe_without_exec
from lr_backend.serve.mps import CONTROL, Mps, probe_mps
from lr_backend.serve.spawn_probe import Spawned, probe_spawn

SHM_BYTES = 2 << 30
"""Tensors of up to 120 calls at a time between server and Python models; Docker gives 64 MB unless told otherwise."""
STACK_BYTES = 64 << 20
COMPILERS = ("cc", "gcc")
CORES_A_LOOP = 2
"""A process of the step loop fills one, and what Triton does for it most of another."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


class Use(StrEnum):
    """Whether a deployment's engines use the decoder in C."""

    NONE = "none"
    WHERE_BUILT = "where_built"
    """Without it torch computes, several times slower."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a deployment asks of a machine.

    Attributes:
        placements: which engines have GPUs to themselves.
        addresses: where the server is to listen, by the option that says the port; port 0 takes a free one.
        num_loops: processes of the step loop; 0 where it runs elsewhere.
        hardware: the cards that the spec is for; None: it names none.
    """

    placements: tuple[Placement, ...] = ()
    decoder: Use = Use.NONE
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    num_loops: int = 1
    hardware: HardwareSpec | None = None

    @classmethod
    def of(cls, deployment: DeploymentSpec, addresses: Mapping[str, tuple[str, int]] | None = None) -> Needs:
        """What one deployment asks for."""
        num_loops = deployment.server.num_loops if deployment.runs_loop else 0
        hardware = deployment.hardware if isinstance(deployment, GpuDeployment) else None
        return cls(deployment.placements, _decoder_use(deployment), addresses or {}, num_loops, hardware)


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. None: it is not there, or does not say; limits in bytes, -1 for none.

    Attributes:
        tritonserver: the binary that would be run.
        no_stub: why that one cannot run models in this Python; empty: it can.
        no_decoder: why the decoder in C cannot be used; empty: it can.
        compiler: of C.
        checkout: where the package runs from, if it is not a wheel's.
        taken_ports: why the server cannot listen there, by port.
        triton_release: of the image, "26.07".
        cuda_visible_devices: of the environment.
        without_exec: folders that compiled libraries cannot be loaded from, by the variable that names another.
        mps: whether CUDA MPS runs; looked for where roles share a card.
        num_cores: that this process may use, as :func:`probe_cores` finds them.
    """

    tritonserver: Path | None = None
    no_stub: str = ""
    no_decoder: str = ""
    compiler: str | None = None
    checkout: Path | None = None
    taken_ports: Mapping[int, str] = field(default_factory=dict)
    triton_release: str | None = None
    tensorrt_llm: str | None = None
    backend_library: bool = False
    executor_worker: bool = False
    mpirun: str | None = None
    gpus: tuple[Gpu, ...] = ()
    cuda_visible_devices: str | None = None
    shm_bytes: int | None = None
    memlock_bytes: int = -1
    stack_bytes: int = -1
    without_exec: Mapping[str, str] = field(default_factory=dict)
    mps: Mps = Mps.ABSENT
    num_cores: float = math.inf

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """Those that a process sees, in its order."""
        return visible_gpus(self.gpus, self.cuda_visible_devices)


class Level(StrEnum):
    """Whether a server starts without it."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check. ``remedy`` is empty where there is nothing to do."""

    what: str
    found: str
    level: Level
    remedy: str = ""


def check(machine: Machine, needs: Needs) -> tuple[Finding, ...]:
    """Hold a machine against what a deployment needs, in the order in which a person would mend it."""
    compiled = [each for each in needs.placements if each.runtime == COMPILED]
    on_gpus = [each for each in needs.placements if each.runtime in (COMPILED, LLM_API)]
    findings = [_tritonserver(machine), *check_decoder(machine, needs.decoder), *_ports(machine, needs), *_cores(machine, needs)]
    if not on_gpus:
        return tuple(findings)
    findings += [
        _pinned("Triton release", machine.triton_release, TRITON_RELEASE, f"run inside {IMAGE}"),
        _pinned(
            "TensorRT-LLM", machine.tensorrt_llm, TENSORRT_LLM, f"run inside {IMAGE}, or install tensorrt-llm=={TENSORRT_LLM}"
        ),
    ]
    if compiled:
        findings += [
            _present("tensorrtllm backend", machine.backend_library or None, f"{IMAGE} has backends/tensorrtllm"),
            _present("trtllmExecutorWorker", machine.executor_worker or None, f"{IMAGE} has it beside the backend"),
            _present("mpirun", machine.mpirun, f"install Open MPI, or run inside {IMAGE}"),
        ]
    if len(compiled) < len(on_gpus):
        findings += _loadable(machine)
    findings += [_gpu_count(machine, on_gpus), *_gpus(machine, on_gpus, needs.hardware), *_shared_cards(machine, on_gpus)]
    return (*findings, *_limits(machine))


def missing(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Those that keep a server from starting."""
    return tuple(finding for finding in findings if finding.level is Level.MISSING)


def require_ready(findings: Sequence[Finding]) -> None:
    """Raises: ConfigError: something is missing; names all of it, a line each."""
    lines = [f"  {each.what}: {'; '.join(filter(None, (each.found, each.remedy)))}" for each in missing(findings)]
    if lines:
        raise ConfigError("this machine cannot serve the deployment:\n" + "\n".join(lines))


def check_files(deployment: DeploymentSpec) -> tuple[Finding, ...]:
    """Whether the deployment's checkpoints are there and can be served, as a build would find. Nothing is written."""
    try:
        report = build_repository(deployment, dry_run=True)
    except LookaheadError as error:
        what, remedy = "spec", f"mend {deployment.path}"
        if isinstance(error, CheckpointError):
            what, remedy = "checkpoints", f"put the checkpoint there, or name another folder in {deployment.path}"
        return (Finding(what, error.message, Level.MISSING, remedy),)
    remedy = "download it, then run lookahead build"
    waiting = (Finding("files", f"not checked: {line}", Level.WARNING, remedy) for line in report.waiting)
    return (*waiting, *(Finding("files", line, Level.OK) for line in report.checked))


def probe(tritonserver: Path | None, needs: Needs, environment: Mapping[str, str] = os.environ) -> Machine:
    """This machine. ``tritonserver``: the binary that was asked for. GPUs are looked for where they are needed."""
    binary, no_stub = _find_server(tritonserver)
    backend = (binary.resolve().parent.parent if binary else Path("/opt/tritonserver")) / "backends" / "tensorrtllm"
    taken = {port: why for host, port in needs.addresses.values() if port and (why := _why_not_listen(host, port))}
    return Machine(
        tritonserver=binary,
        no_stub=no_stub,
        no_decoder="" if needs.decoder is Use.NONE else why_no_decoder(),
        compiler=find_compiler(environment),
        checkout=_checkout(),
        taken_ports=taken,
        triton_release=environment.get("NVIDIA_TRITON_SERVER_VERSION"),
        tensorrt_llm=installed("tensorrt-llm"),
        backend_library=(backend / "libtriton_tensorrtllm.so").exists(),
        executor_worker=os.access(backend / "trtllmExecutorWorker", os.X_OK),
        mpirun=shutil.which("mpirun", path=environment.get("PATH")),
        gpus=probe_gpus() if needs.placements else (),
        cuda_visible_devices=environment.get(VISIBLE),
        shm_bytes=_size_of(Path("/dev/shm")),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        stack_bytes=resource.getrlimit(resource.RLIMIT_STACK)[0],
        without_exec=probe_without_exec(environment),
        mps=probe_mps(environment) if shared_cards(needs.placements) else Mps.ABSENT,
        num_cores=probe_cores(),
    )


def probe_cores(mounted: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> float:
    """Cores that this process may use: by its affinity, and by the quotas of its control group and of those above it.

    Of control groups version 2 alone. A container sees no group above its own, so a limit of its pod or slice is not found.
    """
    quotas = (_quota(group / "cpu.max") for group in _control_groups(mounted, own))
    return min(float(len(os.sched_getaffinity(0))), *quotas)


def _control_groups(mounted: Path, own: Path) -> list[Path]:
    """This process's group and those above it, as far as they are mounted here. ``own`` has the line "0::/PATH"."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = mounted / path.lstrip("/")
    return [each for each in (group, *group.parents) if each.is_relative_to(mounted)]


def _quota(file: Path) -> float:
    """Cores by a line such as "150000 100000" (microseconds of each period) or "max 100000"; no bound without a file."""
    try:
        limit_us, period_us = file.read_text(encoding="ascii").split()
        return math.inf if limit_us == "max" else float(limit_us) / float(period_us)
    except (OSError, ValueError):
        return math.inf


def shared_cards(placements: Sequence[Placement]) -> tuple[int, ...]:
    """GPUs that several engines of this server are on."""
    engines = Counter(device for each in placements for device in each.gpu_device_ids)
    return tuple(sorted(device for device, count in engines.items() if count > 1))


def check_spawns(placements: Sequence[Placement], environment: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    """Start processes as these engines will start their ranks, and see what they may use. It takes seconds."""
    findings = []
    plan = launch_plan(placements)
    if plan.mode is LaunchMode.ORCHESTRATOR:
        ranks = sum(each.tp_size for each in placements if each.runtime == COMPILED)
        spawned = probe_spawn((*plan.launcher, *ONE_RANK), plan.over(environment), ranks)
        findings.append(spawn_finding("ranks by mpirun", spawned, environment))
    if alone := [each.tp_size for each in placements if each.runtime == LLM_API]:
        spawned = probe_spawn((), spawning_alone(environment), max(alone))
        findings.append(spawn_finding("ranks of the LLM API", spawned, environment))
    return tuple(findings)


def spawn_finding(what: str, spawned: Spawned, environment: Mapping[str, str]) -> Finding:
    """What came of one try."""
    if spawned.left_out:
        return Finding(what, f"not tried: {spawned.left_out}", Level.WARNING, f"run inside {IMAGE}")
    if spawned.failure:
        prefix = environment.get("OPAL_PREFIX")
        known = f"OPAL_PREFIX={prefix} must be Open MPI's own folder" if prefix else "set OPAL_PREFIX to Open MPI's own folder"
        slots = "where its slots do not suffice, unset what limits them (OMPI_MCA_*, PRTE_MCA_*)"
        remedy = f"{slots}; where its files are not found, {known}"
        return Finding(what, f"MPI starts none: {spawned.failure}", Level.MISSING, remedy)
    if not spawned.bound:
        return Finding(what, spawned.in_words(), Level.OK)
    return Finding(what, spawned.in_words(), Level.WARNING, "unset what binds them (OMPI_MCA_*, PRTE_MCA_*)")


def probe_decoder(needs: Needs, environment: Mapping[str, str] = os.environ) -> Machine:
    """This machine as far as the decoder in C goes, and nothing else."""
    if needs.decoder is Use.NONE:
        return Machine()
    return Machine(no_decoder=why_no_decoder(), compiler=find_compiler(environment), checkout=_checkout())


def _checkout() -> Path | None:
    return resource_root() if is_checkout() else None


def _find_server(asked_for: Path | None) -> tuple[Path | None, str]:
    """(the server, why it cannot run models in this Python)."""
    try:
        install = find_tritonserver(asked_for)
    except ConfigError:
        return None, ""
    try:
        find_stub(install)
    except ConfigError as error:
        return install.binary, error.message
    return install.binary, ""


def why_no_decoder() -> str:
    """Why the compiled decoder cannot be used here; empty: it can."""
    opened = open_library()
    return opened if isinstance(opened, str) else ""


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """A C compiler, as an installation would find it."""
    names = (environment.get("CC", ""), *COMPILERS)
    return next((found for name in names if name and (found := shutil.which(name, path=environment.get("PATH")))), None)


def check_decoder(machine: Machine, use: Use) -> tuple[Finding, ...]:
    """The decoder in C, where a deployment uses it."""
    if use is Use.NONE:
        return ()
    if not machine.no_decoder:
        return (Finding("decoder in C", "found", Level.OK),)
    source = "-e " + str(machine.checkout) if machine.checkout else "lookahead-server's own sources"
    remedy = f"{sys.executable} -m pip install --force-reinstall --no-cache-dir --no-deps {source}"
    if machine.no_decoder.startswith(DOES_NOT_OPEN):
        remedy = f"install OpenMP's library (apt-get install libgomp1), or build the decoder here: {remedy}"
    elif machine.compiler is None:
        remedy = f"no C compiler is on PATH: install gcc (apt-get install gcc libc6-dev), then {remedy}"
    if use is Use.ALWAYS:
        return (Finding("decoder in C", machine.no_decoder, Level.MISSING, remedy),)
    return (Finding("decoder in C", f"{machine.no_decoder}; torch computes, several times slower", Level.WARNING, remedy),)


def _decoder_use(deployment: DeploymentSpec) -> Use:
    if not isinstance(deployment, EmbeddedDeployment):
        return Use.NONE
    engines = [deployment.engine(role) for role in deployment.roles_here]
    if any(engine.holds_draft_model or engine.kernels == "native" for engine in engines):
        return Use.ALWAYS
    return Use.WHERE_BUILT if any(engine.allows_native for engine in engines) else Use.NONE


def _tritonserver(machine: Machine) -> Finding:
    if machine.tritonserver is not None and machine.no_stub:
        return Finding("tritonserver", machine.no_stub, Level.MISSING, "install into one of those Pythons")
    return _present("tritonserver", machine.tritonserver, "put it on PATH, or install the 'cpu' extra (nvidia-pytriton)")


def _ports(machine: Machine, needs: Needs) -> list[Finding]:
    findings = []
    for option, (_, port) in needs.addresses.items():
        if why := machine.taken_ports.get(port):
            remedy = f"give another by {option}; 0 takes a free one"
            findings.append(Finding(f"port {port}", why, Level.MISSING, remedy))
        elif port:
            findings.append(Finding(f"port {port}", "free", Level.OK))
    return findings


def _cores(machine: Machine, needs: Needs) -> list[Finding]:
    """Where there are several step loops: whether each has its cores."""
    if needs.num_loops <= 1:
        return []
    wanted = CORES_A_LOOP * needs.num_loops
    if machine.num_cores >= wanted:
        return [Finding("cores", f"{machine.num_cores:g} for {needs.num_loops} step loops", Level.OK)]
    found = f"{machine.num_cores:g} for {needs.num_loops} step loops; {wanted} is better"
    fits = max(1, int(machine.num_cores) // CORES_A_LOOP)
    remedy = f"more cores, or [server] num_loops = {fits}: loops that share cores wait for each other"
    return [Finding("cores", found, Level.WARNING, remedy)]


def _why_not_listen(host: str, port: int) -> str:
    """Why nobody can listen there; empty: one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        return f"{host} cannot be listened on: {error.strerror or error}"
    return ""


def _present(what: str, found: object, remedy: str) -> Finding:
    if not found:
        return Finding(what, "not found", Level.MISSING, remedy)
    return Finding(what, "found" if found is True else str(found), Level.OK)


def _pinned(what: str, found: str | None, pin: str, remedy: str) -> Finding:
    if found is None:
        return Finding(what, f"not found; {pin} is needed", Level.MISSING, remedy)
    if found != pin:
        return Finding(what, f"{found}; {pin} is needed", Level.MISSING, remedy)
    return Finding(what, found, Level.OK)


def _gpu_count(machine: Machine, placements: Sequence[Placement]) -> Finding:
    visible = machine.visible_gpus
    needed = 1 + max((device for each in placements for device in each.gpu_device_ids), default=-1)
    if len(visible) >= needed:
        return Finding("GPUs", f"{len(visible)} visible, {needed} needed", Level.OK)
    remedy = "give the container its GPUs (--gpus all), or choose a spec for fewer"
    if len(machine.gpus) >= needed:
        remedy = f"CUDA_VISIBLE_DEVICES={machine.cuda_visible_devices} hides some of {len(machine.gpus)}"
    return Finding("GPUs", f"{len(visible)} visible, {needed} needed", Level.MISSING, remedy)


def _gpus(machine: Machine, placements: Sequence[Placement], hardware: HardwareSpec | None) -> list[Finding]:
    """A line for each GPU that the deployment uses and that is there."""
    roles: dict[int, list[str]] = {}
    for each in placements:
        for device in each.gpu_device_ids:
            roles.setdefault(device, []).append(each.role.value)
    findings = []
    for device, gpu in enumerate(machine.visible_gpus):
        if device in roles:
            text = f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB, compute capability {gpu.compute_capability}"
            remedy = "; ".join(_unfit(gpu, hardware))
            level = Level.MISSING if remedy else Level.OK
            findings.append(Finding(f"GPU {device} ({', '.join(roles[device])})", text, level, remedy))
    return findings


def _unfit(gpu: Gpu, hardware: HardwareSpec | None) -> Iterator[str]:
    """Why this card cannot serve what is made for ``hardware``, with what to do."""
    if hardware is None:
        return
    others = "choose a spec for these cards, or write one (lookahead init)"
    if gpu.compute_capability != hardware.compute_capability:
        yield f"the spec is for compute capability {hardware.compute_capability}: {others}"
    if gpu.memory_mib < hardware.least_memory_mib:
        yield f"the spec is for cards of {hardware.gpu_memory_gib:g} GiB: {others}"


def _loadable(machine: Machine) -> list[Finding]:
    """Whether what the LLM API compiles while it runs can be loaded."""
    if not machine.without_exec:
        return [Finding("compiled kernels", "can be loaded", Level.OK)]
    folders = " and ".join(sorted(set(machine.without_exec.values())))
    others = ", ".join(f"{name}=FOLDER" for name in machine.without_exec)
    remedy = f"mount it with exec (Docker: --tmpfs /tmp:exec), or name folders that are: {others}"
    return [Finding("compiled kernels", f"cannot be loaded: {folders} is mounted noexec", Level.MISSING, remedy)]


def _shared_cards(machine: Machine, placements: Sequence[Placement]) -> list[Finding]:
    """CUDA MPS, where engines share a card."""
    shared = shared_cards(placements)
    if not shared:
        return []
    what = f"CUDA MPS (GPU {', '.join(map(str, shared))})"
    if machine.mps is Mps.RUNNING:
        return [Finding(what, "running", Level.OK)]
    cost = "engines on one card take turns, and looking ahead is then slower than not"
    remedy = f"serve --start-mps, or before the server, as its user: {CONTROL} -d"
    if machine.mps is Mps.ABSENT:
        remedy = f"{CONTROL} comes with NVIDIA's driver, into containers by NVIDIA_DRIVER_CAPABILITIES=compute,utility; {remedy}"
    return [Finding(what, f"{machine.mps}: {cost}", Level.WARNING, remedy)]


def _limits(machine: Machine) -> list[Finding]:
    shm = machine.shm_bytes or 0
    findings = [_limit("/dev/shm", shm, SHM_BYTES, Level.MISSING, "start the container with --shm-size=2g or more")]
    locked = machine.memlock_bytes == -1
    remedy = "" if locked else "start the container with --ulimit memlock=-1: NCCL and MPI pin memory"
    text = "unlimited" if locked else _mib(machine.memlock_bytes)
    findings.append(Finding("ulimit memlock", text, Level.OK if locked else Level.WARNING, remedy))
    stack = machine.stack_bytes
    if stack == -1:
        return [*findings, Finding("ulimit stack", "unlimited", Level.OK)]
    remedy = f"start the container with --ulimit stack={STACK_BYTES}"
    return [*findings, _limit("ulimit stack", stack, STACK_BYTES, Level.WARNING, remedy)]


def _limit(what: str, found: int, least: int, level: Level, remedy: str) -> Finding:
    if found >= least:
        return Finding(what, _mib(found), Level.OK)
    return Finding(what, f"{_mib(found)}; {_mib(least)} is needed", level, remedy)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _size_of(directory: Path) -> int | None:
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks
