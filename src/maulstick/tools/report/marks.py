"""What the marks of a run mean: a title, why it happened, what was done, and which option helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maulstick.tools.report.run_data import Mark

KINDS = {
    "skip": "skipped",
    "judged": "NaN, infinite or above the threshold",
    "rescue": "rescue",
    "gave_up": "gave up",
    "alarm": "alarm",
    "over_fitting": "over-fitting",
    "autopsy": "autopsy",
    "trouble": "could not be written",
    "resume": "resumed",
}
"""Kind of mark -> its name for people, the order that of a legend."""

_SKIP_NAN = (
    "One NaN in a gradient makes every trained weight NaN, clipping included. The step was left out and the weights "
    "stayed as they were. If it comes back: look at the images, lower learning_rate, or set mixed_precision = bf16."
)
_SKIP_INF = (
    "A gradient beyond what the number format holds. The step was left out. In fp16 a few of these are how the loss "
    "scale finds its level; many mean that learning_rate is too high or that bf16 is needed."
)
_SKIP_SPIKE = (
    "The gradient was far larger than in the steps before, so this one step would have undone many. It was left out. "
    "Single ones are harmless. For many: lower learning_rate, or raise gradient_accumulation_steps; maulstick replay "
    "shows what another grad_norm_mode would have skipped."
)
_SKIP_LOSS = "The loss was not finite, so its gradient means nothing. The step was left out; look at the images."

_BY_REASON = {
    ("skip", "nan"): _SKIP_NAN,
    ("skip", "inf"): _SKIP_INF,
    ("skip", "spike"): _SKIP_SPIKE,
    ("skip", "non_finite_loss"): _SKIP_LOSS,
    ("judged", "nan"): "The gradient log does not say whether this step was skipped; with skip_nan_immediate it was.",
    ("judged", "inf"): "The gradient log does not say whether this step was skipped; with skip_inf_immediate it was.",
    ("judged", "spike"): "With skip_grad_norm the step was skipped; the gradient log does not say so itself.",
    ("rescue", "bad_windows"): (
        "Too many bad steps in a row (rescue_after): the weights could not get on from there. Weights and optimizer "
        "went back to a good state, the learning rate was multiplied by rescue_lr_factor, and training went on; the "
        "steps in between are lost. If it happens again: lower learning_rate or train in bf16."
    ),
    ("rescue", "non_finite_state"): (
        "Weights or optimizer state held NaN or infinity. They went back to the last good state, with a lower learning "
        "rate (rescue_lr_factor). The autopsy, where there is one, names the cause."
    ),
    ("rescue", "loss_out_of_range"): (
        "The loss had left its range for good, so the weights were going wrong. They went back to a state from before, "
        "with a lower learning rate (rescue_lr_factor). If it happens again: lower learning_rate."
    ),
    ("rescue", "worse_than_base"): (
        "With the adapter the model predicted worse than without it. Weights and optimizer went back to where it still "
        "helped, and the learning rate is a tenth from there on. Begin with the lower learning_rate next time."
    ),
    ("rescue", "end_of_training"): "The last weights were not finite; the last good ones were saved instead.",
    ("trouble", "save_failed"): "The disk refused the file. Training went on; make room, later saves are tried again.",
    ("trouble", "save_state_failed"): "No state was saved here, so a resumed run begins at an earlier one.",
    ("trouble", "sample_failed"): "Sample pictures could not be drawn. The training itself was not touched.",
    ("trouble", "remove_failed"): "An older file that save_last_n_* would have removed stayed.",
    (
        "trouble",
        "upload_failed",
    ): "The hub did not take the file. It lies in output_dir, and was tried again at the end.",
    ("trouble", "tracker_failed"): "TensorBoard or W&B did not take values. The event log has them; training went on.",
    ("trouble", "autopsy_failed"): "The step could not be run again to find the cause. The training was not touched.",
}
_BY_KIND = {
    "skip": "The guardian left this step out; the weights stayed as they were.",
    "rescue": "The run was lost and went back to a good state.",
    "gave_up": (
        "Going back no longer helped (rescue_limit), so the run ended with its best state saved. Lower learning_rate, "
        "train in bf16, or look at the images named in the event log."
    ),
    "over_fitting": (
        "The loss on images that are held back rose while that on trained ones fell: the LoRA learns its images by "
        "heart. Use the file nearest to the best validation; for another run train shorter, lower learning_rate or "
        "network_dim, or add images."
    ),
    "autopsy": "The step was run again with every operation watched, to find where the bad value came from first.",
    "resume": "Training went on from a saved state: the same weights, order of images and learning rate.",
}
_ALARMS = (
    (
        "zero weights",
        "Part of the network does not learn although the loss looks healthy. Look at unet_lr and text_encoder_lr; turn "
        "gradient_checkpointing off to see whether it cuts the graph.",
    ),
    (
        "no gradient",
        "These tensors take no part in the loss. Leave their blocks out (block_lr, block_dims), or train the part of "
        "the network that is used (network_train_unet_only).",
    ),
    (
        "loss scale",
        "Gradients overflow again and again in fp16. Train with mixed_precision = bf16, or lower learning_rate.",
    ),
    (
        "alarms/largest_weight_norm",
        "The adapter grows towards what the format can hold. Lower learning_rate, set scale_weight_norms, or use bf16.",
    ),
    (
        "alarms/largest_attention_logit",
        "Attention is about to overflow. Lower learning_rate, set scale_weight_norms, or train in bf16.",
    ),
)
_OTHER_ALARM = "Nothing was changed by this; it says what to look at. A lower learning_rate helps in most cases."


@dataclass(frozen=True)
class MarkRow:
    """Marks in a row of the same kind and reason, from step ``first`` to ``last``."""

    first: int
    last: int
    mark: Mark

    @property
    def count(self) -> int:
        return self.last - self.first + 1


def title(mark: Mark) -> str:
    """Return what happened, in a word or two."""
    if mark.kind == "judged":
        return {"nan": "NaN gradient", "inf": "infinite gradient"}.get(mark.reason, "above threshold")
    return KINDS[mark.kind]


def explanation(mark: Mark) -> str:
    """Return what it means and which option helps."""
    if mark.kind == "alarm":
        return next((text for start, text in _ALARMS if mark.reason.startswith(start)), _OTHER_ALARM)
    return _BY_REASON.get((mark.kind, mark.reason)) or _BY_KIND.get(mark.kind, "")


def in_rows(marks: Sequence[Mark]) -> list[MarkRow]:
    """Return the marks in the order of their steps; neighbouring steps skipped for the same reason become one row."""
    rows: list[MarkRow] = []
    last_of: dict[tuple[str, str], int] = {}
    for mark in sorted(marks, key=lambda each: each.step):
        kind = (mark.kind, mark.reason)
        place = last_of.get(kind)
        if mark.kind in ("skip", "judged") and place is not None and rows[place].last == mark.step - 1:
            rows[place] = MarkRow(rows[place].first, mark.step, rows[place].mark)
        else:
            last_of[kind] = len(rows)
            rows.append(MarkRow(mark.step, mark.step, mark))
    return rows
