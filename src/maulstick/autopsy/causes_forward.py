"""Causes in the forward pass: overflows of half precision, divisions by zero, attention, and diverged weights."""

from __future__ import annotations

from .case import Case, KnownCause
from .report import Direction

_PRODUCTS = ("mm", "bmm", "matmul", "scaled_dot_product", "einsum", "_flash_attention", "_efficient_attention")


def _zero_snr(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or finding.module is not None:
        return None
    if not case.op_is("div", "reciprocal", "rsqrt") or not (case.zero_operand() or case.fact("zero_terminal_snr")):
        return None
    snr_is_known_zero = bool(case.fact("zero_terminal_snr"))
    weighted = case.fact("min_snr_gamma") or case.fact("debiased_estimation_loss") or case.fact("uses_snr_weights")
    if not (snr_is_known_zero and weighted):
        return None
    steps = case.fact("timesteps")
    at = f" at timestep {max(steps)}" if steps else ""
    return f"the loss weight divides by a signal-to-noise ratio of 0{at}"


def _dora(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or not case.op_is("div", "rsqrt", "reciprocal", "mul"):
        return None
    module = case.around("dora", "lora_magnitude")
    if module is None:
        return None
    for name, weight in case.weights_nearby():
        if weight.dim() >= 2:
            empty = (weight.detach().flatten(1).abs().amax(1) == 0).nonzero().flatten().tolist()
            if empty and "lora_" not in name:
                return f"row {empty[0]} of {name} has norm 0 ({len(empty)} such rows), and {module} divides by it"
    return f"{module} divides by a norm that is 0" if case.zero_operand() else None


def _vae(case: Case) -> str | None:
    overflow = case.overflowed()
    module = case.around("vae", "autoencoder")
    return None if overflow is None or module is None else f"{overflow}, inside of {module}"


def _t5(case: Case) -> str | None:
    overflow = case.overflowed()
    finding = case.finding
    if overflow is None or finding is None or finding.module is None:
        return None
    if finding.module.rpartition(".")[2] == "wo" or case.around("t5"):
        return f"{overflow}, in {finding.where}"
    return None


def _attention_logits(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    attention = case.around("attn", "attention")
    if finding is None or attention is None or finding.tensor.dtype != "float16" or not case.op_is(*_PRODUCTS):
        return None
    # The projections to q, k and v are modules of their own; only the products belong to the attention itself.
    if not any(word in case.own_name for word in ("attn", "attention")):
        return None
    overflow = case.overflowed() or f"{finding.op} gives {finding.tensor.kind} from finite operands"
    return f"{overflow}, inside of {attention}{_without_norm(case)}"


def _without_norm(case: Case) -> str:
    module = next(case.enclosing(), None)
    if module is None:
        return ""
    has_norm = any(getattr(module, name, None) is not None for name in ("norm_q", "q_norm", "norm_k", "k_norm"))
    return ", which normalises q and k" if has_norm else ", which does not normalise q and k (no qk-norm)"


def _masked_row(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or not case.op_is("softmax") or not finding.operands:
        return None
    operand = finding.operands[0]
    if not operand.minus_inf or operand.plus_inf or operand.nan:
        return None
    return f"{finding.op} got a row of nothing but -inf"


def _resampler(case: Case) -> str | None:
    overflow = case.overflowed()
    module = case.around("resampler", "image_proj", "imageprojection")
    return None if overflow is None or module is None else f"{overflow}, inside of {module}"


def _old_card(case: Case) -> str | None:
    device = str(case.fact("device", ""))
    if case.arose(Direction.FORWARD, Direction.BACKWARD) is None or "GTX 16" not in device:
        return None
    half = case.finding is not None and case.finding.tensor.dtype == "float16"
    return f"the device is a {device}, and the value arose in fp16" if half else None


def _fp16_overflow(case: Case) -> str | None:
    overflow = case.overflowed()
    return None if overflow is None or case.finding is None else f"{overflow}, in {case.finding.where}"


def _normalisation(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or not case.op_is("norm", "rsqrt", "var", "std"):
        return None
    if case.op_is("rsqrt") and not case.zero_operand():
        return None
    if any(not operand.finite for operand in finding.operands):
        return None
    return f"{finding.op} in {finding.where} divides by a spread of 0"


def _division_by_zero(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or not case.op_is("div", "reciprocal", "log", "rsqrt", "pow") or not case.zero_operand():
        return None
    if any(not operand.finite for operand in finding.operands):
        return None
    return f"{finding.op} got {finding.operands[-1].zeros} zeros in {finding.operands[-1].name}"


def _diverged(case: Case) -> str | None:
    finding = case.arose(Direction.FORWARD)
    if finding is None or finding.tensor.dtype == "float16" or any(not operand.finite for operand in finding.operands):
        return None
    amax = max((operand.amax or 0.0 for operand in finding.operands), default=0.0)
    if amax < 1e15:
        return None
    return f"values had grown to {amax:.3g} before {finding.op} overflowed {finding.tensor.dtype}"


def _heavy_weights(case: Case) -> str | None:
    weights = case.fact("loss_weights") or []
    largest = max(weights, default=0.0)
    return f"a loss weight of this batch is {largest:.4g}" if largest > 1000 else None


_HALF_CURE = "Train in bf16 (mixed_precision = bf16), which has fp32's range, or keep this module in fp32."

FORWARD_CAUSES = (
    KnownCause(
        "zero_snr_weights",
        _zero_snr,
        "Zero-terminal SNR with a loss weight by signal-to-noise ratio: at the last timestep nothing of the signal is "
        "left, and the weight is 0 / 0 (min-SNR) or 1 / 0 (debiased).",
        "Train v (v_parameterization), or take the weight's limit there, as Maulstick's min_snr_gamma does; or leave "
        "the last timestep out.",
        ("kohya-ss/sd-scripts#934", "SimpleTuner#187", "huggingface/diffusers#4505"),
    ),
    KnownCause(
        "dora_zero_row",
        _dora,
        "DoRA divides by the norm of each row of the weight, and one of them is 0.",
        "Train a plain LoRA on this module, or leave it out of the targets.",
        ("huggingface/peft#2049", "huggingface/peft#3237", "LyCORIS#166"),
    ),
    KnownCause(
        "vae_fp16_overflow",
        _vae,
        "The VAE overflows in fp16; SDXL's does on many pictures.",
        "Run the VAE in bf16 or fp32 (mixed_precision = bf16; no_half_vae elsewhere), or use a VAE made for fp16 "
        "(vae = FILE). Maulstick makes such latents again in fp32 by itself.",
        (
            "kohya-ss/sd-scripts#653",
            "bmaltais/kohya_ss#2674",
            "huggingface/diffusers#7188",
            "huggingface/diffusers#3209",
        ),
    ),
    KnownCause(
        "t5_fp16_overflow",
        _t5,
        "T5's feed-forward output (wo) exceeds fp16's range.",
        "Run T5 in bf16, or keep its wo layers in fp32: load it with its own dtype handling, and cast wo back with "
        ".float() after any .to(float16).",
        ("huggingface/transformers#5651", "huggingface/transformers#4586", "huggingface/transformers#9295"),
    ),
    KnownCause(
        "attention_logits",
        _attention_logits,
        "The attention's q·k products exceed fp16's range.",
        "Train in bf16 (mixed_precision = bf16), compute the products in fp32 (upcast_attention), put the qk-norm back "
        "where the model had one, and lower the learning rate if they grow while training.",
        ("huggingface/diffusers#8599", "huggingface/diffusers#2875", "AUTOMATIC1111#5715"),
    ),
    KnownCause(
        "fully_masked_row",
        _masked_row,
        "A row of the attention mask hides everything, and the softmax of nothing is NaN.",
        "Leave one token of each row visible, use a large negative number instead of -inf, or torch's "
        "scaled_dot_product_attention from 2.5 on.",
        ("pytorch/pytorch#103749",),
    ),
    KnownCause(
        "resampler_overflow",
        _resampler,
        "The resampler's activations have grown beyond fp16's range.",
        "Keep the resampler in fp32, or train in bf16 (mixed_precision = bf16).",
        ("tencent-ailab/IP-Adapter#434",),
    ),
    KnownCause(
        "old_card_fp16",
        _old_card,
        "Cards of the GTX 16 series compute some fp16 operations wrongly.",
        "Train in fp32 (mixed_precision = no).",
        ("kohya-ss/sd-scripts#293", "bmaltais/kohya_ss#1951", "bmaltais/kohya_ss#215"),
    ),
    KnownCause(
        "loss_weight_outlier",
        _heavy_weights,
        "The weighting of the loss gives single timesteps a weight a thousand times the usual one.",
        "Use another weighting, or limit it (min_snr_gamma).",
        ("huggingface/diffusers#8534", "huggingface/diffusers#8528", "huggingface/diffusers#9056"),
    ),
    KnownCause("fp16_overflow", _fp16_overflow, "A value exceeds fp16's range.", _HALF_CURE, (), general=True),
    KnownCause(
        "normalisation_of_nothing",
        _normalisation,
        "A normalisation divides by a spread of 0, and its eps is 0 or vanishes in the number format.",
        "Raise its eps (1e-5 for fp16), or run it in fp32.",
        general=True,
    ),
    KnownCause(
        "division_by_zero",
        _division_by_zero,
        "Something is divided by zero, or the logarithm of zero is taken.",
        "Clamp the operand away from zero.",
        general=True,
    ),
    KnownCause(
        "diverged",
        _diverged,
        "The run has diverged: values grew until they left even the range of bf16 and fp32.",
        "Lower the learning rate (learning_rate, lr_warmup_steps), clip gradients (max_grad_norm = 1), and go back to "
        "an earlier file (network_weights).",
        ("NVlabs/Sana#283", "huggingface/diffusers#8619"),
        general=True,
    ),
)
