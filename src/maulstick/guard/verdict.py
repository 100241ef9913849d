"""What the guard found in one step and decided about it. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .policies import Reason

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; with the same term the two clip alike.
CLIP_EPSILON = 1e-6
MOST_IMAGES_NAMED = 4


@dataclass(frozen=True)
class Verdict:
    """The guard's answer for one step.

    ``norm`` is the L2 norm of all gradients in true units, over all processes. ``judged_norm``, ``threshold`` and
    ``reference`` (the recent median or mean, None while there is none) are in the units the mode judges in: true
    units, or ``judges_scaled`` units, multiplied by the loss scale. ``group_norms`` are in true units. ``scale`` is
    the loss scale of this step, None without one. ``bad_tensor`` names the first tensor with a NaN or infinite
    gradient, ``bad_tensors`` of ``tensors`` counts them on this process. ``bad_micro_batch`` is the number (from 0) of
    the first micro-batch of the window that brought one in. ``escalate`` asks for help from outside: skipping alone no
    longer gets the run anywhere. ``lower_scale`` says that ordinary steps are being refused only because the loss
    scale is high. ``alarms`` are sentences to show a person.
    """

    skip: bool
    reason: Reason
    norm: float
    judged_norm: float
    threshold: float
    reference: float | None = None
    judges_scaled: bool = False
    scaled_norm: float = math.nan
    scale: float | None = None
    loss: float | None = None
    cosine: float | None = None
    group_norms: Mapping[str, float] = field(default_factory=dict)
    tensors: int = 0
    bad_tensors: int = 0
    bad_tensor: str | None = None
    bad_micro_batch: int | None = None
    micro_batches: int = 0
    dropped_micro_batches: int = 0
    images: tuple[str, ...] = ()
    consecutive_skips: int = 0
    escalate: bool = False
    lower_scale: bool = False
    alarms: tuple[str, ...] = ()

    @property
    def accept(self) -> bool:
        """Whether the optimizer may step."""
        return not self.skip

    @property
    def finite(self) -> bool:
        """Whether every gradient was finite."""
        return math.isfinite(self.norm)

    @property
    def threshold_off(self) -> bool:
        """Whether a value in the window has switched the threshold off (the log's ``ThreshOff``)."""
        return math.isnan(self.threshold)

    @property
    def logged_norm(self) -> float:
        """The norm as the gradient log holds it: multiplied by the loss scale."""
        return self.judged_norm if self.judges_scaled else self.norm * self._factor

    @property
    def logged_threshold(self) -> float:
        """The threshold in the units of ``logged_norm``."""
        return self.threshold if self.judges_scaled else self.threshold * self._factor

    @property
    def _factor(self) -> float:
        return 1.0 if self.scale is None else self.scale

    def clip_coefficient(self, max_grad_norm: float) -> float:
        """What to multiply every gradient by so that the norm becomes at most ``max_grad_norm`` (true units).

        At most 1. The norm must be finite; clipping cannot repair a NaN or infinite gradient.
        """
        if not self.finite:
            raise ValueError(f"A gradient of norm {self.norm} cannot be clipped; skip this step.")
        return min(1.0, max_grad_norm / (self.norm + CLIP_EPSILON))

    def describe(self) -> str:
        """One sentence for a person: what was found, compared with what, where, and in which images."""
        parts = [self._finding()]
        if self.bad_micro_batch is not None and self.micro_batches > 1:
            parts.append(f"micro-batch {self.bad_micro_batch + 1} of {self.micro_batches}")
        if self.images and (self.skip or not self.finite or self.dropped_micro_batches):
            rest = len(self.images) - MOST_IMAGES_NAMED
            more = f" and {rest} more" if rest > 0 else ""
            parts.append(f"images: {', '.join(self.images[:MOST_IMAGES_NAMED])}{more}")
        return "; ".join(parts)

    def _finding(self) -> str:
        if not self.finite:
            return self._bad_gradient()
        if self.reason is Reason.LOSS:
            return f"the loss is {self.loss}, with a gradient norm of {self.norm:.3g}"
        if math.isinf(self.judged_norm):
            return f"the sum of squares of the scaled gradients overflows fp32 (norm {self.norm:.3g} in true units)"
        text = f"{'scaled ' if self.judges_scaled and self.scale else ''}norm {self.judged_norm:.3g}"
        if self.reference is None or not self.reference > 0:
            return text + self._against_threshold(" is above" if self.skip else ", with")
        middle = "mean" if self.judges_scaled else "median"
        text += f" is {_times(self.judged_norm / self.reference)} the recent {middle} {self.reference:.3g}"
        if self.reason is Reason.LEVEL_SHIFT:
            return f"{text}, accepted as the new level"
        return text + (self._against_threshold(", above") if self.skip and self.judges_scaled else "")

    def _against_threshold(self, how: str) -> str:
        return f"{how} the threshold {self.threshold:.3g}" if math.isfinite(self.threshold) else ""

    def _bad_gradient(self) -> str:
        kind = "NaN" if math.isnan(self.norm) else "infinite"
        if self.bad_tensor is None:
            where = ""
        elif self.bad_tensors == self.tensors and self.tensors > 1:
            where = f" in every one of {self.tensors} tensors"
        else:
            where = f" in {self.bad_tensors} of {self.tensors} tensors, first in {self.bad_tensor}"
        overflow = f" (an fp16 overflow at loss scale {self.scale:g})" if self.scale and kind == "infinite" else ""
        loss = f", loss {self.loss}" if self.loss is not None and not math.isfinite(self.loss) else ""
        return f"the gradient is {kind}{where}{overflow}{loss}"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"
