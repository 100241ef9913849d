"""The table of known causes: which of them fit a report, why, and what cures them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .case import Case, KnownCause
from .causes_forward import FORWARD_CAUSES
from .causes_given import GIVEN_CAUSES
from .causes_update import ERROR_CAUSES, HALF_TRAINABLES, UPDATE_CAUSES
from .report import Cause, Report

KNOWN_CAUSES: tuple[KnownCause, ...] = (*GIVEN_CAUSES, *UPDATE_CAUSES, *FORWARD_CAUSES, HALF_TRAINABLES)
"""Every known cause: given values, gradients and updates, the forward pass; last what is a risk in a healthy run too.

Inside of each table the specific ones stand before the general ones, which speak only where nothing specific fits.
"""

_MOST = 3


def explain(report: Report, modules: Mapping[str, nn.Module] | None = None) -> list[Cause]:
    """Return the known causes that fit, the most specific first; ``modules`` lets weights be looked at as well."""
    case = Case(report, dict(modules or {}))
    found: list[Cause] = []
    for known in KNOWN_CAUSES:
        if known.general and found:
            continue
        evidence = known.fits(case)
        if evidence is not None:
            found.append(Cause(known.id, known.sentence, evidence, known.cure, known.seen_in))
    return found[:_MOST]


def explain_error(error: BaseException | str) -> Cause | None:
    """Return the known cause of an error message that training with a loss scaler ends with; None for other errors."""
    text = str(error)
    for part, known in ERROR_CAUSES:
        if part in text:
            return Cause(known.id, known.sentence, f"the error says “{part}”", known.cure, known.seen_in)
    return None
