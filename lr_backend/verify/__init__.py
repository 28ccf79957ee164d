"""Who decides whether a drafted step stands for the target's.

The protocol and the verdict live in :mod:`~lr_backend.verify.verdict`; :func:`make_verifier` chooses one for a request.
"""

from lr_backend.verify.exact import ExactVerifier
from lr_backend.verify.factory import VerifierParts, VerifierPlugIn, make_verifier
from lr_backend.verify.verdict import UNASKED, Reason, StepPair, Verdict, Verifier, settle

__all__ = [
    "UNASKED",
    "ExactVerifier",
    "Reason",
    "StepPair",
    "Verdict",
    "Verifier",
    "VerifierParts",
    "VerifierPlugIn",
    "make_verifier",
    "settle",
]
