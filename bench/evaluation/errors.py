"""What can be wrong with an evaluation, so that its user can mend it."""

from __future__ import annotations

from lr_backend.errors import LookaheadError


class EvaluationError(LookaheadError):
    """Options, files or a run directory that cannot be used."""

    code = "LR_EVALUATION"


class DataSetError(EvaluationError):
    """A data set is missing, empty or malformed; the message names file, line and field."""


class EndpointLost(EvaluationError):
    """Request after request fails. What was answered before is kept."""
