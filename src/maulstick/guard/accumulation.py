"""Micro-batches of one accumulation window: which one brought a bad gradient in, and dropping just that one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from .collective import Collective
from .errors import GuardError
from .measure import tensor_norms
from .sources import GradientSource

Drop = Literal["window", "micro_batch"]


@dataclass
class MicroBatch:
    """One micro-batch. ``total`` is the sum of squares of everything accumulated so far, left on its device."""

    loss: torch.Tensor | float | None
    images: tuple[str, ...]
    total: torch.Tensor | None
    dropped: bool = False


@dataclass(frozen=True)
class WindowReport:
    """What is known about a complete window. ``mean_loss`` is over the micro-batches that were kept.

    ``dropped_total`` is NaN or inf, whichever the last dropped micro-batch had brought in.
    """

    micro_batches: int = 0
    dropped: int = 0
    mean_loss: torch.Tensor | float | None = None
    first_bad: int | None = None
    images: tuple[str, ...] = ()
    dropped_total: float = 0.0


@dataclass
class AccumulationWindow:
    """Collects micro-batches until the window is complete."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    kept: list[torch.Tensor | None] | None = None

    def add(
        self,
        source: GradientSource,
        loss: torch.Tensor | float | None,
        images: Sequence[str],
        drop: Drop,
        collective: Collective,
    ) -> bool:
        """Note one micro-batch right after its backward pass; return False if it was dropped.

        With ``drop="micro_batch"`` a copy of the accumulated gradients is kept, so that a bad micro-batch can be taken
        back; that costs the memory of one set of gradients and one read per micro-batch.
        """
        if drop not in ("window", "micro_batch"):
            raise GuardError(f"drop must be 'window' or 'micro_batch', got '{drop}'.")
        if drop == "micro_batch" and collective.size > 1:
            raise GuardError(
                "drop='micro_batch' works on one process only: with several, the bad values have been averaged into "
                "every process's gradients by the time they can be seen. Use drop='window'."
            )
        detached = loss.detach() if isinstance(loss, torch.Tensor) else loss
        norms = tensor_norms(source.gradients()[0])
        total = torch.stack([norm.to(norms[0].device) for norm in norms]).double().square().sum() if norms else None
        micro_batch = MicroBatch(detached, tuple(images), total)
        self.micro_batches.append(micro_batch)
        if drop == "window":
            return True
        # A sum of squares can overflow where no gradient is bad; only a bad gradient is taken back.
        if total is not None and not math.isfinite(total.item()) and _any_bad(source.gradients()[0]):
            micro_batch.dropped = True
            self._take_back(source)
            return False
        self._keep(source)
        return True

    def close(self, source: GradientSource) -> WindowReport:
        """End the window. Kept gradients are rescaled as if the dropped micro-batches had never been in the mean."""
        micro_batches, self.micro_batches, self.kept = self.micro_batches, [], None
        if not micro_batches:
            return WindowReport()
        kept = [each for each in micro_batches if not each.dropped]
        dropped = len(micro_batches) - len(kept)
        if dropped and kept:
            torch._foreach_mul_(source.gradients()[0], len(micro_batches) / len(kept))
        totals = [None if each.total is None else each.total.item() for each in micro_batches]
        bad = [i for i, total in enumerate(totals) if total is not None and not math.isfinite(total)]
        losses = [each.loss for each in kept if each.loss is not None]
        images = micro_batches[bad[0]].images if bad else tuple(name for each in micro_batches for name in each.images)
        return WindowReport(
            micro_batches=len(micro_batches),
            dropped=dropped,
            mean_loss=sum(losses) / len(losses) if losses else None,
            first_bad=bad[0] if bad else None,
            images=images,
            dropped_total=totals[bad[-1]] or 0.0 if dropped else 0.0,
        )

    def _keep(self, source: GradientSource) -> None:
        self.kept = [
            None if param.grad is None else param.grad.detach().clone()
            for group in source.groups
            for param in group.params
        ]

    def _take_back(self, source: GradientSource) -> None:
        params = [param for group in source.groups for param in group.params]
        if self.kept is None:
            source.drop()
            return
        for param, gradient in zip(params, self.kept, strict=True):
            if gradient is None:
                param.grad = None
            elif param.grad is not None:
                param.grad.copy_(gradient)


def _any_bad(gradients: list[torch.Tensor]) -> bool:
    return any(not bool(torch.isfinite(gradient).all()) for gradient in gradients)
