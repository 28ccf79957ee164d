"""``lookahead plan``: what speculation would gain, by the real step loop on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lr_backend.build.gpu_spec import GpuDeployment
from lr_backend.build.pace import drafts_with_its_draft, machine_of, pace_of, stood_for
from lr_backend.cli.errors import fail, refuse
from lr_backend.emulated.workload import Workload
from lr_backend.engine import Role
from lr_backend.errors import LookaheadError
from lr_backend.hardware.cost import Iteration, Join
from lr_backend.hardware.machine import LinearTimes, Machine, Place
from lr_backend.hardware.profile import find, label_of
from lr_backend.hardware.sharing import LAWS, CardSharing
from lr_backend.plan.fit_texts import acceptance, by_verifier, fit_workload
from lr_backend.plan.fitting import Fitted, fit_by_verifier
from lr_backend.plan.limits import draft_tokens_refused, load_refused, texts_refused, window_refused
from lr_backend.plan.losses import Without, losses
from lr_backend.plan.overrides import Overrides
from lr_backend.plan.simulation import Policy, Scenario
from lr_backend.plan.table import PlanRow
from lr_backend.plan.table import plan as make_plan
from lr_backend.request import Mode, ProposerName
from lr_backend.trace.schema import Trace

ASSUMED_SPREAD = 0.3
DEFAULT_SPEC = "qwen3-32b-apart"
USUAL_DEPTH = 8
USUAL_DRAFT_TOKENS = 8
"""In one verification, where nobody says."""
ROUGH = "a rough fit: these answers made few engine calls; a longer answer, or more --trace, tells more"
_SHARED = {LAWS[CardSharing.MPS]: "with CUDA MPS", LAWS[CardSharing.TIME_SLICES]: "in turns"}


@dataclass(frozen=True)
class Planned:
    """One scenario with its rows, and where the best of them loses.

    Attributes:
        fitted: from traces; None: assumed, or of a system.
    """

    scenario: Scenario
    rows: Sequence[PlanRow]
    lost: Sequence[Without]
    fitted: Fitted | None = None

    @property
    def pace(self) -> str:
        """Of the traces that it is fitted to; empty: none, or this machine's own."""
        return self.fitted.pace if self.fitted is not None else ""

    @property
    def rough(self) -> bool:
        """It is fitted to few calls."""
        return self.fitted is not None and self.fitted.rough

    @property
    def cost_ratio(self) -> float:
        """c, as :meth:`Machine.cost_ratio` has it."""
        return self.scenario.machine.cost_ratio(self.scenario.workload.prompt_tokens)

    @property
    def best(self) -> PlanRow:
        return max(self.rows, key=lambda row: row.speedup)


def plan(
    alpha: Annotated[float | None, typer.Option(help="Share of drafted steps that are accepted.")] = None,
    c: Annotated[float | None, typer.Option(help="Time of a drafted step over that of a target step, each model alone.")] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            "--trace", metavar="FILE", help="A recorded trace, to fit all that is not given to; repeat it for more of them."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="How texts behave: one of `lookahead workload`, by name, or a file (.toml); instead of --trace."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEM", help="Take all times from the kernel tables of this system: h100_sxm, h200_sxm, b200_sxm, l40s."
        ),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help=f"With --system: the deployment whose models, parallelism and placement it is; by default {DEFAULT_SPEC}.",
        ),
    ] = None,
    card_sharing: Annotated[
        CardSharing | None,
        typer.Option(help="With --system: what runs where roles share cards; by default mps."),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="What is predicted.")] = Mode.LR,
    proposer: Annotated[
        ProposerName | None,
        typer.Option(help="Of draft tokens, in modes that have them; by default draft_model, or engine where it always drafts."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(help="In one verification at most; by default 8, or as many as an engine always drafts.", min=1, max=64),
    ] = None,
    token_agreement: Annotated[
        float | None, typer.Option(help="Chance that the draft's best next token is the target's; by default 0.")
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="Depths to predict; by default 1 to 8, within the deployment's.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Widths to predict; by default 1.")] = None,
    verdict: Annotated[float | None, typer.Option(help="Time of a verdict over that of a target step; by default 0.")] = None,
    crowding: Annotated[
        float | None, typer.Option(help="Share by which a further sequence lengthens an iteration; by default 0.")
    ] = None,
    cores: Annotated[
        float | None, typer.Option(help="Cores that the three models share; by default each has its own. Never fitted.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a question; by default 3.")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Mean length of a step; by default 24.")] = None,
    step_spread: Annotated[float | None, typer.Option(help="Steps vary by this share around it; by default 0.3.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of an answer; by default 60.")] = None,
    costs: Annotated[bool, typer.Option("--costs", help="Also the best row with each cost taken away, and all of them.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON line a row instead of a table.")] = False,
) -> None:
    """Predict speedups by running the real step loop on a virtual clock, over engines that only take time.

    Times come from --system, from --trace, or from --c and the like; how texts behave from --trace, --workload, or --alpha and
    the like. What is given by itself counts more than what is fitted or read.
    """
    given = Overrides(alpha, c, verdict, crowding, cores, step_tokens, step_spread, steps, prompt_tokens, token_agreement)
    times = {"--c": c, "--verdict": verdict, "--crowding": crowding, "--cores": cores}
    for option, value in times.items():
        if system is not None and value is not None:
            refuse(f"{option} is what --system says; give one of the two")
    for option, chosen in {"--spec": spec, "--card-sharing": card_sharing}.items():
        if system is None and chosen is not None:
            refuse(f"{option} tells what --system needs, and changes nothing without it; give --system")
    for option, asked in {"--proposer": proposer, "--draft-tokens": draft_tokens}.items():
        if not mode.speculates_tokens and asked is not None:
            refuse(f"{option} is of draft tokens, and mode {mode} has none")
    if traces and workload is not None:
        refuse("--workload is what --trace is fitted to; give one of the two")
    if not traces and ((alpha is None and workload is None) or (c is None and system is None)):
        refuse("--alpha or --workload and either --c or --system are needed where there is no --trace")
    if mode.speculates_tokens and proposer == ProposerName.ENGINE and system is None:
        refuse("--proposer engine: what an engine's own draft tokens take is known of hardware alone; give --system")
    if not mode.speculates_steps and (k or width):
        refuse(f"--k and --width are of drafted steps, and mode {mode} has none")
    try:
        recorded = [Trace.load(path) for path in traces or ()]
        texts = Workload(1.0, step_spread=ASSUMED_SPREAD) if workload is None else Workload.load(workload)
        other = None if system is None else stood_for(spec or DEFAULT_SPEC)
        depths, widths = _window(mode, k, width, other)
        policy = Policy(mode, num_requests=requests, fields=_token_fields(other, mode, proposer, draft_tokens))
        if other is None or system is None:
            scenarios = _scenarios(recorded, texts, given)
        else:
            machine = _machine(other, system, policy, card_sharing or CardSharing.MPS)
            scenarios = _of_system(recorded, texts, given, machine, other.engine_always_drafts)
            _refuse_beyond_limits(other, policy, [one.workload for one, _ in scenarios.values()])
        found = {name: _planned(*one, depths, widths, policy, costs) for name, one in scenarios.items()}
        about = _system_line(next(iter(scenarios.values()))[0], policy) if system else ""
        label = system_label(other, system) if other is not None and system is not None else ""
    except ValueError as error:
        refuse(str(error))
    except LookaheadError as error:
        fail(error)
    if json_lines:
        for name, each in found.items():
            _print_json(each, name if traces else "", label, policy)
    else:
        _print_tables(Console(), found, f"{mode}, {requests} at a time", [about, label], len(recorded))


def _token_fields(
    spec: GpuDeployment | None, mode: Mode, proposer: ProposerName | None, draft_tokens: int | None
) -> dict[str, Any]:
    """What a request says of draft tokens; refuses what the deployment's target does not serve.

    Raises:
        ConfigError: there is no pace of what the target drafts with by itself.
    """
    if spec is None or not drafts_with_its_draft(spec):
        if not mode.speculates_tokens:
            return {}
        by_itself = proposer == ProposerName.ENGINE
        wanted = USUAL_DRAFT_TOKENS if draft_tokens is None else draft_tokens
        if spec is not None and not by_itself and (why := draft_tokens_refused(spec, wanted)):
            refuse(f"--draft-tokens {wanted}: {why}")
        return {"proposer": (proposer or ProposerName.DRAFT_MODEL).value, "num_draft_tokens": wanted}
    num_drafts = spec.target.num_drafts
    if not mode.speculates_tokens:
        refuse(f"--mode {mode}: the target of {spec.name} drafts by itself in every call, and does not serve this mode")
    if proposer not in (None, ProposerName.ENGINE):
        refuse(f"--proposer {proposer}: the target of {spec.name} drafts by itself, and takes no draft tokens from elsewhere")
    if draft_tokens not in (None, num_drafts):
        refuse(f"--draft-tokens {draft_tokens}: the target of {spec.name} drafts {num_drafts} in every pass")
    return {"proposer": ProposerName.ENGINE.value, "num_draft_tokens": num_drafts}


def _window(
    mode: Mode, depths: Sequence[int] | None, widths: Sequence[int] | None, spec: GpuDeployment | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Depths and widths to predict; refuses what the deployment cuts."""
    if not mode.speculates_steps:
        return (1,), (1,)
    deepest = USUAL_DEPTH
    if spec is not None:
        asked = [(f"--k {depth}", depth, 1) for depth in depths or ()] + [
            (f"--width {width}", 1, width) for width in widths or ()
        ]
        for option, depth, width in [*asked, (f"--mode {mode}", 1, 1)]:
            if why := window_refused(spec, depth, width):
                refuse(f"{option}: {why}")
        deepest = min(USUAL_DEPTH, spec.loop_config().limits.max_depth)
    return depths or range(1, deepest + 1), widths or (1,)


def _refuse_beyond_limits(spec: GpuDeployment, policy: Policy, workloads: Iterable[Workload]) -> None:
    if why := load_refused(spec, policy.num_requests):
        refuse(f"--requests {policy.num_requests}: {why}")
    for workload in workloads:
        if why := texts_refused(spec, workload):
            refuse(why)


def _machine(spec: GpuDeployment, system: str, policy: Policy, card_sharing: CardSharing) -> Machine:
    """The system, placed as the deployment says."""
    by_itself = policy.fields.get("proposer") == ProposerName.ENGINE
    return machine_of(spec, system, drafts_itself=by_itself, card_sharing=card_sharing)


def _planned(
    scenario: Scenario, fitted: Fitted | None, depths: Sequence[int], widths: Sequence[int], policy: Policy, costs: bool
) -> Planned:
    rows = make_plan(scenario, depths, widths, policy)
    best = max(rows, key=lambda row: row.speedup)
    shape = replace(policy, max_depth=best.max_depth, width=best.width)
    return Planned(scenario, rows, losses(scenario, shape) if costs else [], fitted)


def _scenarios(traces: Sequence[Trace], texts: Workload, given: Overrides) -> dict[str, tuple[Scenario, Fitted | None]]:
    """What to predict for, by verifier of the traces; without traces one of no name, over ``texts``."""
    if not traces:
        return {"": (_given(Fitted(texts, LinearTimes()), given).scenario, None)}
    fitted = {str(name): _given(one, given) for name, one in fit_by_verifier(traces, given.num_cores).items()}
    return {name: (one.scenario, one) for name, one in fitted.items()}


def _of_system(
    traces: Sequence[Trace], texts: Workload, given: Overrides, machine: Machine, always_drafts: bool
) -> dict[str, tuple[Scenario, Fitted | None]]:
    """The same with all times from a machine's tables."""
    workloads: Mapping[str, Workload] = {"": texts}
    if traces:
        # Other traces tell of the same texts, and nothing of what a verifier accepts.
        whole = fit_workload(traces)
        workloads = {str(name): replace(whole, **acceptance(group)) for name, group in by_verifier(traces).items()}
    found = {name: Scenario(given.of_texts(one), machine) for name, one in workloads.items()}
    return {name: (replace(one, engine_always_drafts=always_drafts), None) for name, one in found.items()}


def _given(fitted: Fitted, given: Overrides) -> Fitted:
    workload = given.of_texts(fitted.workload)
    return replace(fitted, workload=workload, times=given.of_times(fitted.times, workload.step_tokens))


def _print_json(found: Planned, name: str, label: str, policy: Policy) -> None:
    told = {"verifier": name, "label": label, "pace": found.pace, "mode": policy.mode.value, "requests": policy.num_requests}
    shared: dict[str, Any] = {key: value for key, value in told.items() if value}
    shared |= {"alpha": round(found.scenario.workload.acceptance_rate, 4), "c": round(found.cost_ratio, 4), "rough": found.rough}
    for row in found.rows:
        numbers = {key: None if value is None else round(value, 4) for key, value in asdict(row).items()}
        typer.echo(json.dumps({**shared, **numbers}))
    for one in found.lost:
        shape = {"max_depth": found.best.max_depth, "width": found.best.width}
        typer.echo(json.dumps({**shared, **shape, "without": one.without, "speedup": round(one.speedup, 4)}))


def _print_tables(console: Console, found: Mapping[str, Planned], what: str, notes: Sequence[str], num_traces: int) -> None:
    for name, one in found.items():
        if one.fitted is not None:
            console.print(_fitted_line(name, one.fitted, num_traces), highlight=False, soft_wrap=True)
            if one.rough:
                console.print(f"[yellow]{ROUGH}[/]", highlight=False, soft_wrap=True)
        workload = one.scenario.workload
        title = f"alpha {workload.acceptance_rate:.3g}, c {one.cost_ratio:.3g}, {what}"
        table = Table("width", "depth", "speedup (range)", "formula", "target batch", title=f"{name}: {title}" if name else title)
        for row in one.rows:
            gain = f"{row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})"
            formula = "-" if row.ceiling is None else f"{row.ceiling:.2f}"
            table.add_row(f"{row.width}", f"{row.max_depth}", gain, formula, f"{row.target_batch:.2f}")
        console.print(table)
        if one.lost:
            table = Table("without", "speedup", title=f"depth {one.best.max_depth}, width {one.best.width}")
            for each in one.lost:
                table.add_row(each.without, f"{each.speedup:.2f}")
            console.print(table)
    for note in dict.fromkeys(filter(None, [*notes, *(one.pace for one in found.values())])):
        console.print(f"[dim]{note}[/]", highlight=False, soft_wrap=True)


def system_label(spec: GpuDeployment, system: str) -> str:
    """What must stand beside a plan for a system."""
    return label_of([find(pace_of(spec, role, system).profile) for role in Role])


def _system_line(scenario: Scenario, policy: Policy) -> str:
    """What a system takes for what a fit finds in traces, so that the two can be held against each other."""
    workload, machine = scenario.workload, scenario.machine
    behind = workload.prompt_tokens + workload.num_steps * workload.step_tokens // 2
    target, draft, judge = (machine.places[role] for role in (Role.TARGET, Role.DRAFT, Role.JUDGE))
    verdict = Join(2 * workload.step_tokens + workload.verdict_tokens, workload.verdict_prefix_tokens)
    seconds = {
        "a target token": target.costs.seconds(Iteration((), 1, behind)),
        "a draft token": draft.costs.seconds(Iteration((), 1, behind)),
        **_verification(target, behind, policy),
        "a verdict": judge.costs.seconds(Iteration((verdict,))),
        "a call": target.hops.there_s + target.hops.back_s,
    }
    told = f"behind {behind} tokens: " + ", ".join(f"{name} {1e3 * one:.3g} ms" for name, one in seconds.items())
    shared = any(place.cards for place in machine.places.values())
    return f"{told}; roles share cards {_SHARED[machine.law]}" if shared else told


def _verification(target: Place, behind: int, policy: Policy) -> dict[str, float]:
    """Seconds of a verification, by its name, where draft tokens are verified."""
    if not policy.mode.speculates_tokens:
        return {}
    num_drafts = int(policy.fields["num_draft_tokens"])
    if policy.fields["proposer"] == ProposerName.ENGINE:
        round_s = target.costs.seconds(Iteration((), 1, behind, num_drafts, num_drafts))
        return {f"a round of {num_drafts} draft tokens of its own": round_s}
    join = Join(num_drafts + 1, behind, num_drafts, target.one_hot)
    on_the_way_s = num_drafts * target.hops.draft_token_s
    return {f"a verification of {num_drafts} draft tokens": on_the_way_s + target.costs.seconds(Iteration((join,)))}


def _fitted_line(name: str, fitted: Fitted, num_traces: int) -> str:
    times, workload = fitted.times, fitted.workload
    target, draft, verdict, call, loop = (
        f"{1e3 * seconds:.3g} ms"
        for seconds in (times.target_token_s, times.draft_token_s, times.verdict_s, times.call_s, times.loop_s)
    )
    prompts = " and ".join(f"{1e3 * seconds:.3g}" for seconds in (times.target_prompt_s, times.draft_prompt_s))
    return (
        f"fitted to {num_traces} trace{'s' if num_traces > 1 else ''}, verifier {name}: a target token {target} "
        f"(each further sequence {times.crowding:+.0%}), a draft token {draft}, new prompt tokens {prompts} ms, "
        f"a verification of draft tokens {1e3 * (times.target_token_s + times.verification_s):.3g} ms, a verdict {verdict}, "
        f"a call {call}, the loop {loop}; "
        f"{workload.num_steps} steps of {workload.step_tokens} tokens, give or take {workload.step_spread:.0%}, "
        f"and {workload.answer_tokens} tokens of answer"
    )
