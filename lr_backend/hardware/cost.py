"""What one iteration of an engine takes: the one cost function of the planner, the paced engine and the emulation.

An iteration of in-flight batching computes the new tokens of requests that join (their prompts, or what is new of them behind
cached prefixes) together with one token of every request that decodes:

    dense(all tokens)  +  attention of the joins  +  attention of the decodes  +  host

The attention of all joins is one kernel a layer: launched once, and then each join adds what it attends to. Each decode reads all
keys and values of its own sequence: branches that share a prefix share the memory, not the reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lr_backend.hardware.overheads import Overheads
from lr_backend.hardware.profile import Profile
from lr_backend.hardware.sharing import Demand


@dataclass(frozen=True, slots=True)
class Join:
    """Tokens of one request that an iteration computes at once: a prompt's, or draft tokens to verify.

    Attributes:
        num_cached: tokens before them whose keys and values are there already.
        num_drafts: how many of the new tokens are draft tokens that the caller wants verified.
        with_logits: these came with logits of their own.
    """

    num_new: int
    num_cached: int
    num_drafts: int = 0
    with_logits: bool = False


@dataclass(frozen=True, slots=True)
class Iteration:
    """The work of one iteration.

    Attributes:
        num_decodes: sequences that compute one token each.
        kv_tokens: tokens in all of those together.
        num_draft_tokens: verified along with the decodes, where the engine drafts by itself; of all of them together.
        num_draft_passes: of the engine's own draft model, for these.
    """

    joins: tuple[Join, ...] = ()
    num_decodes: int = 0
    kv_tokens: int = 0
    num_draft_tokens: int = 0
    num_draft_passes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(join.num_new for join in self.joins) + self.num_decodes + self.num_draft_tokens


class CostModel(Protocol):
    """How long iterations of one model take."""

    def seconds(self, iteration: Iteration) -> float:
        """The iteration's time, alone on its cards."""
        ...

    def demand(self, iteration: Iteration) -> Demand:
        """What the iteration asks of its cards, for others on them."""
        ...


@dataclass(frozen=True)
class ProfileCosts:
    """The costs of a model with a hardware profile, served by a runtime with these overheads."""

    profile: Profile
    overheads: Overheads

    def seconds(self, iteration: Iteration) -> float:
        joins = iteration.joins
        kernels_ms = self.kernels_ms(iteration)
        most_drafts = max((join.num_drafts for join in joins), default=0)
        found_ms = self.overheads.iteration_ms(kernels_ms, len(joins), iteration.num_decodes, most_drafts)
        with_logits = sum(join.num_drafts for join in joins if join.with_logits)
        return (found_ms + self.overheads.draft_logits_inside_ms(with_logits)) / 1e3

    def kernels_ms(self, iteration: Iteration) -> float:
        """Time on the card, as the tables have it."""
        profile = self.profile
        found = profile.dense_ms.at(iteration.num_tokens)
        if iteration.joins:
            launch = profile.context_launch_ms
            found += launch + sum(self._attention_ms(join) for join in iteration.joins)
        if iteration.num_decodes:
            # A sequence with draft tokens of the engine's own attends in one kernel, which reads its keys and values once.
            found += profile.decode_attention_ms.at(iteration.num_decodes, iteration.kv_tokens / iteration.num_decodes)
        return found

    def _attention_ms(self, join: Join) -> float:
        """What a join attends to, without the launch.

        Attention grows faster than any straight line, so new tokens beyond the table's last entry come in pieces of so many, each
        behind those before it.
        """
        table = self.profile.context_attention_ms
        most = int(table.xs[-1])
        pieces = ((min(most, join.num_new - start), join.num_cached + start) for start in range(0, max(1, join.num_new), most))
        return sum(max(0.0, table.at(*piece) - self.profile.context_launch_ms) for piece in pieces)

    def demand(self, iteration: Iteration) -> Demand:
        kernels_s = self.kernels_ms(iteration) / 1e3
        return Demand(kernels_s / self.seconds(iteration), kernels_s / self.profile.num_layers)


@dataclass(frozen=True)
class DraftingCosts:
    """The costs of an engine that drafts by itself: its draft model's passes, and then one of its own that verifies.

    The draft model reads what joins, too. Its passes are one graph; the host work of a round does not overlap.
    """

    target: ProfileCosts
    draft: Profile

    def seconds(self, iteration: Iteration) -> float:
        return self.target.seconds(iteration) + self._drafting_s(iteration)

    def _drafting_s(self, iteration: Iteration) -> float:
        overheads = self.target.overheads
        drafting = ProfileCosts(self.draft, overheads)
        found_ms = 0.0
        if iteration.joins:
            found_ms += drafting.kernels_ms(Iteration(iteration.joins))
        if iteration.num_draft_passes:
            one_pass_ms = drafting.kernels_ms(Iteration((), iteration.num_decodes, iteration.kv_tokens))
            found_ms += overheads.round_ms + iteration.num_draft_passes * (one_pass_ms + overheads.draft_pass_ms)
        return found_ms / 1e3

    def demand(self, iteration: Iteration) -> Demand:
        """Of its two parts, each by its time."""
        drafting_s = self._drafting_s(iteration)
        own = self.target.demand(iteration)
        if not drafting_s:
            return own
        passes = (
            Iteration((), iteration.num_decodes, iteration.kv_tokens)
            if iteration.num_draft_passes
            else Iteration(iteration.joins)
        )
        other = ProfileCosts(self.draft, self.target.overheads).demand(passes)
        part = drafting_s / (self.target.seconds(iteration) + drafting_s)
        kernel_s = (1.0 - part) * own.kernel_s + part * other.kernel_s
        return Demand((1.0 - part) * own.share + part * other.share, kernel_s)


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """The costs of a machine of which only recorded requests are known.

    Attributes:
        token_s: an iteration that decodes one sequence.
        crowding: how much longer an iteration takes for each further sequence, as a share of that.
        prompt_token_s: each token of a join.
        verification_s: what an iteration takes longer in which draft tokens are verified that came with a call.
        share_of_cores: what it takes of the cores that all roles share while it computes; 0: it has cores of its own.
    """

    token_s: float
    crowding: float = 0.0
    prompt_token_s: float = 0.0
    verification_s: float = 0.0
    share_of_cores: float = 0.0

    def seconds(self, iteration: Iteration) -> float:
        num_sequences = iteration.num_decodes + len(iteration.joins)
        num_new = sum(join.num_new for join in iteration.joins)
        verifying_s = self.verification_s if any(join.num_drafts for join in iteration.joins) else 0.0
        return self.token_s * (1.0 + self.crowding * (num_sequences - 1)) + self.prompt_token_s * num_new + verifying_s

    def demand(self, iteration: Iteration) -> Demand:
        return Demand(self.share_of_cores)
