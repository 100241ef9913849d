"""Causes that were there before the run: bad inputs, bad weights, bad optimizer state; and finite but wrong losses."""

from __future__ import annotations

from .case import Case, KnownCause
from .report import Direction


def _bad_latents(case: Case) -> str | None:
    finding = case.arose(Direction.INPUT)
    if finding is None or not _names(finding.tensor.name, "latent", "pixel", "image"):
        return None
    return f"{finding.tensor.describe()}, before anything was computed"


def _bad_text(case: Case) -> str | None:
    finding = case.arose(Direction.INPUT)
    if finding is None or not _names(finding.tensor.name, "text", "caption", "conditioning", "prompt", "encoder"):
        return None
    return f"{finding.tensor.describe()}, before anything was computed"


def _bad_input(case: Case) -> str | None:
    finding = case.arose(Direction.INPUT)
    return None if finding is None else f"{finding.tensor.describe()}, before anything was computed"


def _poisoned_state(case: Case) -> str | None:
    finding = case.arose(Direction.OPTIMIZER_STATE)
    return None if finding is None else f"{finding.tensor.describe()}, before the step"


def _optimizer_spoilt_weights(case: Case) -> str | None:
    finding = case.arose(Direction.WEIGHT)
    if finding is None or not case.fact("window_before_was_finite"):
        return None
    return f"{finding.tensor.describe()}; the gradients of the window before it were finite, so its update wrote this"


def _poisoned_weight(case: Case) -> str | None:
    finding = case.arose(Direction.WEIGHT)
    return None if finding is None else f"{finding.tensor.describe()}, before anything was computed"


def _wrong_prediction_type(case: Case) -> str | None:
    """The loss against what the model was not asked for is much lower than against what it was asked for."""
    losses = case.fact("loss_by_prediction_type") or {}
    used = case.fact("prediction_type")
    if case.finding is None and used in losses and len(losses) > 1:
        other = min((name for name in losses if name != used), key=lambda name: losses[name])
        if losses[other] < 0.5 * losses[used]:
            return (
                f"the loss is {losses[used]:.4g} against {used} and {losses[other]:.4g} against {other}: the model "
                f"predicts {other}"
            )
    model = case.fact("model_prediction_type")
    if model is not None and used is not None and model != used:
        return f"the model's scheduler says {model}, the target is {used}"
    return None


def _names(name: str, *words: str) -> bool:
    return any(word in name.lower() for word in words)


GIVEN_CAUSES = (
    KnownCause(
        "nan_latents",
        _bad_latents,
        "The latents (or the picture) of a sample are not finite: a broken cache file, or a VAE that overflowed in "
        "fp16 when they were made.",
        "Delete the cache files of the named picture and encode again with the VAE in bf16 or fp32 (mixed_precision = "
        "bf16 or no); if it stays so, take the picture out.",
        ("kohya-ss/sd-scripts#653", "bmaltais/kohya_ss#2674", "mosaicml/diffusion#61"),
    ),
    KnownCause(
        "nan_text_states",
        _bad_text,
        "The text states of a caption are not finite: cached by a text encoder in fp16, or by another program.",
        "Delete the cached text encoder outputs and make them again in bf16 or fp32 (mixed_precision = bf16 or no).",
        ("kohya-ss/sd-scripts#1413", "kohya-ss/sd-scripts#1407"),
    ),
    KnownCause(
        "bad_input",
        _bad_input,
        "A value that was given to the model is not finite.",
        "Look at how this input is made; nothing in the model is at fault.",
        general=True,
    ),
    KnownCause(
        "optimizer_state_poisoned",
        _poisoned_state,
        "The optimizer's state is not finite: a step with a NaN or infinite gradient was applied once, and restoring "
        "the weights alone does not undo that.",
        "Go back to a state from before it, weights and optimizer together; keep the guardian on (grad_norm_mode = "
        "steady), which lets no such step through.",
    ),
    KnownCause(
        "optimizer_wrote_weights",
        _optimizer_spoilt_weights,
        "The optimizer itself made the weight non-finite, from finite gradients (bitsandbytes after 0.35 did that in "
        "8 bit until 0.41.1; an epsilon that is 0 in fp16 does).",
        "Update bitsandbytes, or use a plain optimizer (optimizer_type = AdamW) with weights in fp32, and go back to "
        "an earlier LoRA file (network_weights).",
        ("bitsandbytes#152", "bitsandbytes#227"),
    ),
    KnownCause(
        "poisoned_weight",
        _poisoned_weight,
        "A weight is not finite: the file is damaged, or a bad step was applied to it.",
        "Go back to an earlier file (network_weights), or fetch the base model again; keep the guardian on "
        "(grad_norm_mode = steady), which lets no bad step through.",
        ("hallo#152",),
        general=True,
    ),
    KnownCause(
        "wrong_prediction_type",
        _wrong_prediction_type,
        "The target is not what the model predicts (noise or v): losses are finite, and pictures come out as noise.",
        "Set v_parameterization to what the base model was trained for.",
        ("huggingface/peft#421", "kohya-ss/sd-scripts#1772"),
    ),
)
