"""Options about noise and loss that mean nothing for a kind of model."""

from __future__ import annotations

from maulstick.errors import OptionError
from maulstick.options.schema import ObjectiveOptions

FLOW_OPTIONS = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "training_shift")


def refuse_flow_options(objective: ObjectiveOptions, model: str) -> None:
    """Raise OptionError for options of flow matching, for a model that removes noise step by step.

    ``model`` is what the model is, such as "SD 1.x".
    """
    for name in FLOW_OPTIONS:
        value = getattr(objective, name)
        if value is not None:
            raise OptionError(
                f"{name} = {value}: it is for models trained by flow matching (SD3), but this model is {model}. Leave "
                "it out; min_snr_gamma weighs the timesteps of this one."
            )


def refuse_noise_options(objective: ObjectiveOptions, model: str) -> None:
    """Raise OptionError for options of step-by-step noise, for a model that follows a flow."""
    instead = {
        "min_snr_gamma": "weighting_scheme and training_shift say which timesteps count",
        "noise_offset": "its last timestep is pure noise, so dark and bright pictures need no help",
    }
    for name, advice in instead.items():
        value = getattr(objective, name)
        if value is not None:
            raise OptionError(f"{name} = {value:g}: {model} is trained by flow matching; {advice}. Leave {name} out.")
