"""Options about noise and loss that need each other."""

from __future__ import annotations

from maulstick.errors import OptionError
from maulstick.options.schema import ObjectiveOptions

USUAL_SCHEME = "logit_normal"
"""``weighting_scheme`` of models trained by flow matching, where none is given."""
_SCHEME_OF = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}


def check_objective(objective: ObjectiveOptions) -> None:
    """Refuse numbers of a weighting scheme that is not the one in use.

    Raises:
        OptionError: one is given.
    """
    scheme = objective.weighting_scheme or USUAL_SCHEME
    for name, wanted in _SCHEME_OF.items():
        if getattr(objective, name) is not None and scheme != wanted:
            raise OptionError(
                f"{name} is given, but weighting_scheme = {scheme} does not use it. Set weighting_scheme = {wanted}, "
                f"or remove {name}."
            )
