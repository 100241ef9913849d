"""Causes in gradients, in the loss scale and in the optimizer's step."""

from __future__ import annotations

import math

from .case import Case, KnownCause
from .report import Direction

_FP32_SMALLEST_INVERSE = 2.0**-127
"""A loss scale at or below this has an infinite inverse in fp32 (its largest value is just below 2^128)."""
_INFINITE_SLOPES = ("Sqrt", "Pow", "Norm", "Log", "Div", "Rsqrt", "Reciprocal", "Acos", "Asin", "Std", "Cdist")


def _scaler_collapse(case: Case) -> str | None:
    scale = case.report.loss_scale
    if not math.isfinite(scale) or scale <= _FP32_SMALLEST_INVERSE:
        return f"the loss scale is {scale:g}: gradients are divided by it, and 1 / scale is infinite in fp32"
    if scale < 1 and case.finding is not None:
        return f"the loss scale has fallen to {scale:g}, far below 1; it halves with every overflow"
    return None


def _loss_scale(case: Case) -> str | None:
    finding = case.arose(Direction.BACKWARD)
    if finding is None or not case.fact("finite_at_loss_scale_1"):
        return None
    return f"gradients overflow at loss scale {case.report.loss_scale:g} and are finite at scale 1"


def _attention_backward(case: Case) -> str | None:
    finding = case.arose(Direction.BACKWARD)
    if finding is None or any(not operand.finite for operand in finding.operands):
        return None
    node = (finding.node or "").lower()
    if "scaleddotproduct" in node or case.op_is("scaled_dot_product", "_flash_attention", "_efficient_attention"):
        return f"{finding.op} has finite operands and a gradient that is not finite"
    if finding.custom_node and any(word in f"{case.own_name} {node}" for word in ("attn", "attention", "sdpa")):
        return f"{finding.node}, an attention kernel of its own, makes {finding.tensor.kind} of finite values"
    return None


def _custom_backward(case: Case) -> str | None:
    finding = case.arose(Direction.BACKWARD)
    if finding is None or not finding.custom_node:
        return None
    return f"{finding.node} is a Python autograd.Function; its operands are finite, its gradient is not"


def _infinite_slope(case: Case) -> str | None:
    finding = case.arose(Direction.BACKWARD)
    if finding is None or not any(word in (finding.node or "") for word in _INFINITE_SLOPES):
        return None
    if not any(operand.zeros for operand in finding.operands):
        return None
    return f"the backward of {finding.node} divides by a value that is 0"


def _masked_forward(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or not finding.masked:
        return None
    return "the forward pass masks the value (torch.where), and 0 times infinity is NaN on the way back"


def _bad_gradient(case: Case) -> str | None:
    finding = case.arose(Direction.BACKWARD)
    return None if finding is None else f"{finding.op} had finite operands and gave {finding.tensor.describe()}"


def _eps_underflow(case: Case) -> str | None:
    finding = case.arose(Direction.OPTIMIZER_STEP)
    eps, rounded = case.fact("optimizer_eps"), case.fact("eps_in_parameter_dtype")
    if finding is None or not eps or rounded != 0:
        return None
    return f"eps = {eps:g} is 0 in {finding.tensor.dtype}, so a zero gradient gives 0 / 0"


def _half_trainables(case: Case) -> str | None:
    dtypes = case.fact("trained_dtypes") or {}
    count = dtypes.get("float16", 0)
    if not count or case.arose(Direction.INPUT):
        return None
    return f"{count} of {sum(dtypes.values())} trained tensors are in fp16"


def _optimizer_step(case: Case) -> str | None:
    finding = case.arose(Direction.OPTIMIZER_STEP)
    return None if finding is None else f"{case.fact('optimizer')} wrote {finding.tensor.describe()}"


HALF_TRAINABLES = KnownCause(
    "fp16_trainables",
    _half_trainables,
    "What is trained is in fp16 itself: small updates are lost, overflows stay, and a GradScaler refuses to unscale.",
    "Keep trained weights in fp32 and let autocast do the rest (Maulstick always does); cast them back with .float() "
    "after anything that has cast the live model, such as a validation pipeline or a resumed state.",
    ("huggingface/diffusers#10752", "huggingface/diffusers#6442", "huggingface/diffusers#6482"),
)
_NO_GRADIENTS = KnownCause(
    "no_gradients",
    lambda case: None,
    "No trained weight got a gradient: the loss was detached, replaced by a constant, or the graph was cut.",
    "Do not replace a NaN loss by a constant; skip the step instead (grad_norm_mode = steady). With gradient "
    "checkpointing use the non-reentrant kind.",
    ("ai-toolkit#153", "ai-toolkit#1054"),
)

UPDATE_CAUSES = (
    KnownCause(
        "scaler_collapse",
        _scaler_collapse,
        "The loss scale has collapsed: every overflow halves it, nothing holds it, and in the end it divides by 0.",
        "The cause is whatever overflows at every scale; look for bad weights or data first. Train in bf16 "
        "(mixed_precision = bf16), and keep the guardian on, which holds the scale above a floor.",
        ("hallo#152",),
    ),
    KnownCause(
        "loss_scale_overflow",
        _loss_scale,
        "The loss scale is too high for this batch. That is how a scaler finds its limit: the step is skipped, the "
        "scale is halved, nothing is broken.",
        "Nothing, if it happens now and then. If it happens every few steps, train in bf16 (mixed_precision = bf16).",
    ),
    KnownCause(
        "attention_backward",
        _attention_backward,
        "The attention kernel's backward pass gives a wrong gradient (cuDNN's did in torch 2.5.0, and with masks in "
        "later versions).",
        "Turn that kernel off, torch.backends.cuda.enable_cudnn_sdp(False), or update torch.",
        ("huggingface/diffusers#9768", "pytorch/pytorch#139298", "pytorch/pytorch#196678", "huggingface/trl#7181"),
    ),
    KnownCause(
        "custom_backward",
        _custom_backward,
        "A backward pass written by hand gives a gradient that is not finite.",
        "Check it with torch.autograd.gradcheck, update the package that brings it, or use torch's own operation.",
    ),
    KnownCause(
        "infinite_slope",
        _infinite_slope,
        "The derivative is infinite where the value is 0: a square root, norm, logarithm, power or quotient at zero.",
        "Add a small constant inside of it, such as (x + 1e-12).sqrt(), or clamp its argument.",
    ),
    KnownCause(
        "masked_in_forward",
        _masked_forward,
        "A value that is not finite is masked out of the loss, but its gradient is not.",
        "Mask the operand before the operation, not the result behind it.",
    ),
    KnownCause(
        "fp16_eps_underflow",
        _eps_underflow,
        "The optimizer's eps vanishes in the weights' number format, so that it divides by zero.",
        "Train weights in fp32, or raise eps (optimizer_args eps=1e-4).",
        ("kohya-ss/sd-scripts#430", "magic_animate_unofficial#6"),
    ),
    KnownCause(
        "optimizer_step",
        _optimizer_step,
        "Gradients are finite and the optimizer's step makes weights or state non-finite.",
        "Update the package of the optimizer, or use a plain one (optimizer_type = AdamW) with weights in fp32.",
        ("bitsandbytes#152", "kohya-ss/sd-scripts#523"),
        general=True,
    ),
    KnownCause(
        "bad_gradient",
        _bad_gradient,
        "A gradient leaves the range of its number format, or is not defined at this point.",
        "In fp16: mixed_precision = bf16. Else look at the named operation and its operands.",
        general=True,
    ),
)

ERROR_CAUSES = (
    ("Attempting to unscale FP16 gradients", HALF_TRAINABLES),
    ("No inf checks were recorded", _NO_GRADIENTS),
    ("does not require grad and does not have a grad_fn", _NO_GRADIENTS),
)
"""Part of an error message -> what it means."""
