"""The guard as a Lightning callback. Needs the package ``lightning``; import this module only where it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from torch.amp.grad_scaler import OptState

from .guard import GradientGuard
from .scale import scale_value
from .sources import GradientSource
from .verdict import Verdict


class GuardCallback(Callback):
    """Looks at the gradients before every optimizer step and drops them when the step is to be skipped.

    Works with automatic optimization, with and without a GradScaler, with accumulation and with DDP; clipping by the
    Trainer comes after it. An optimizer that is stepped without gradients leaves weights and moments alone.
    ``on_skip`` is called with (trainer, verdict) for every skipped step. The guard's state is in the checkpoint.
    """

    def __init__(self, guard: GradientGuard, on_skip: Callable[[Any, Verdict], None] | None = None) -> None:
        self.guard = guard
        self.on_skip = on_skip
        self.last_verdict: Verdict | None = None
        self._loss: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Learn the names of the parameters."""
        self.guard.know_names(pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Keep the loss of this batch, as it was before it was scaled and divided among accumulated batches."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scale_value(scaler)
        self._loss = loss.detach() * trainer.accumulate_grad_batches / scale

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Judge the step."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # Lightning leaves unscaling to fused optimizers; dropping gradients is safe only after it.
        if scaler is not None and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        verdict = self.guard.observe(optimizer, loss=self._loss, scale=scaler)
        self.last_verdict = verdict
        if not self.guard.may_step(verdict):
            GradientSource.of(optimizer).drop()
        if verdict.skip and self.on_skip is not None:
            self.on_skip(trainer, verdict)

    def state_dict(self) -> dict[str, Any]:
        """The guard's state, for Lightning's checkpoint."""
        return self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.guard.load_state_dict(state_dict)
