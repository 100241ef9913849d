"""Options about noise and loss that need each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from maulstick.errors import OptionError
from maulstick.options.objective_schema import ObjectiveOptions

USUAL_SCHEME = "logit_normal"
"""``weighting_scheme`` of models trained by flow matching, where none is given."""
_SCHEME_OF = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}


def check_objective(objective: ObjectiveOptions) -> None:
    """Refuse numbers of a weighting scheme that is not the one in use, and contradictions.

    Raises:
        OptionError: one is given, or two options contradict each other.
    """
    scheme = objective.weighting_scheme or USUAL_SCHEME
    for name, wanted in _SCHEME_OF.items():
        if getattr(objective, name) is not None and scheme != wanted:
            raise OptionError(
                f"{name} is given, but weighting_scheme = {scheme} does not use it. Set weighting_scheme = {wanted}, "
                f"or remove {name}."
            )
    if objective.noise_offset is not None and objective.multires_noise_iterations is not None:
        raise OptionError(
            "noise_offset and multires_noise_iterations contradict each other: both shift the noise as a whole. Leave "
            "one of them out."
        )
    if objective.adaptive_noise_scale is not None and objective.noise_offset is None:
        raise OptionError("adaptive_noise_scale is given without noise_offset, which it adds to. Give it too.")


def objective_leftovers(objective: ObjectiveOptions, given: Collection[str]) -> Iterator[str]:
    """Yield a line for each option that does nothing, because another one is missing."""
    robust = objective.loss_type in ("huber", "smooth_l1")
    needs = {
        "noise_offset_random_strength": (objective.noise_offset is not None, "noise_offset"),
        "multires_noise_discount": (objective.multires_noise_iterations is not None, "multires_noise_iterations"),
        "ip_noise_gamma_random_strength": (objective.ip_noise_gamma is not None, "ip_noise_gamma"),
        **dict.fromkeys(("huber_schedule", "huber_c", "huber_scale"), (robust, "loss_type = huber or smooth_l1")),
    }
    defaults = ObjectiveOptions()
    for name, (has_effect, missing) in needs.items():
        value = getattr(objective, name)
        if name in given and value not in (getattr(defaults, name), 0) and not has_effect:
            yield f"{name} has no effect without {missing}."
