"""Draft tokens: where the tokens come from that the target verifies in one pass."""

from lr_backend.propose.draft_model import DraftModel
from lr_backend.propose.lookup import Lookup, Proposer
from lr_backend.propose.ngram import NGram
from lr_backend.propose.proposal import Proposal

__all__ = ["DraftModel", "Lookup", "NGram", "Proposal", "Proposer"]
