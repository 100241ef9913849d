"""Options about noise and loss that mean nothing for a kind of model."""

from __future__ import annotations

from maulstick.errors import OptionError
from maulstick.options.objective_schema import ObjectiveOptions

_ALL_TIMESTEPS = 1000
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


def refuse_other_prediction(objective: ObjectiveOptions, model: str, prediction_type: str) -> None:
    """Raise OptionError for weights that are meant for models that predict something else."""
    if objective.scale_v_pred_loss_like_noise_pred and prediction_type != "v_prediction":
        raise OptionError(
            f"scale_v_pred_loss_like_noise_pred is for models that predict v, but this {model} model predicts noise. "
            "Leave it out."
        )
    if objective.v_pred_like_loss is not None and prediction_type == "v_prediction":
        raise OptionError(
            f"v_pred_like_loss = {objective.v_pred_like_loss:g} is for models that predict noise, but this {model} "
            "model predicts v. Leave it out."
        )


_NEEDS_STEPS = "it follows a flow, which has no such timesteps"
_NEEDS_RATIO = "weighting_scheme and training_shift say which timesteps count"
_NEEDS_NO_HELP = "its last timestep is pure noise, so dark and bright pictures need no help"
_NOISE_OPTIONS = {
    "min_snr_gamma": _NEEDS_RATIO,
    "noise_offset": _NEEDS_NO_HELP,
    "multires_noise_iterations": _NEEDS_NO_HELP,
    "zero_terminal_snr": _NEEDS_NO_HELP,
    "ip_noise_gamma": "there is no published form of it for a flow",
    "min_timestep": _NEEDS_STEPS,
    "max_timestep": _NEEDS_STEPS,
    "scale_v_pred_loss_like_noise_pred": _NEEDS_RATIO,
    "v_pred_like_loss": _NEEDS_RATIO,
    "debiased_estimation_loss": _NEEDS_RATIO,
}


def refuse_noise_options(objective: ObjectiveOptions, model: str) -> None:
    """Raise OptionError for options of step-by-step noise, for a model that follows a flow."""
    for name, advice in _NOISE_OPTIONS.items():
        value = getattr(objective, name)
        if value is None or value is False or (name == "max_timestep" and value == _ALL_TIMESTEPS):
            continue
        shown = "" if value is True else f" = {value:g}"
        raise OptionError(f"{name}{shown}: {model} is trained by flow matching; {advice}. Leave {name} out.")
    if objective.loss_type in ("huber", "smooth_l1") and objective.huber_schedule == "snr":
        raise OptionError(
            f"huber_schedule = snr: {model} is trained by flow matching and has no signal-to-noise ratio by timestep. "
            "Set huber_schedule = constant or exponential."
        )
