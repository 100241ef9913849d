"""The guard as a callback of the Hugging Face Trainer. Needs ``transformers``; import this module only where used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .errors import GuardError
from .guard import GradientGuard
from .sources import GradientSource
from .verdict import Verdict

STATE_FILE = "gradient_guard.pt"


class GuardCallback(TrainerCallback):
    """Looks at the gradients before every optimizer step and drops them when the step is to be skipped.

    The Trainer clips before a callback can look, which would hide every spike; so while training, this callback takes
    over ``max_grad_norm`` and clips itself after judging. The Trainer's own measurement also spreads a NaN or inf over
    all gradients, so the verdict cannot name the first bad tensor here. ``on_skip`` is called with (state, verdict)
    for every skipped step. The guard's state is saved in every checkpoint folder and found again on resume.
    """

    def __init__(self, guard: GradientGuard, on_skip: Callable[[Any, Verdict], None] | None = None) -> None:
        self.guard = guard
        self.on_skip = on_skip
        self.last_verdict: Verdict | None = None
        self.max_grad_norm = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take over clipping, learn the parameters' names, and load the state a resumed run left."""
        if args.deepspeed:
            raise GuardError("DeepSpeed steps inside backward(), before any guard can look; use DDP or FSDP2.")
        self.max_grad_norm, args.max_grad_norm = args.max_grad_norm, 0.0
        self.guard.know_names(model)
        if state.global_step:
            self._load(args, state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Judge the step; the gradients have been unscaled and not clipped."""
        source = GradientSource.of(optimizer)
        verdict = self.guard.observe(source, scale=getattr(optimizer, "scaler", None))
        self.last_verdict = verdict
        if not self.guard.may_step(verdict):
            source.drop()
        elif self.max_grad_norm and verdict.finite:
            coefficient = verdict.clip_coefficient(self.max_grad_norm)
            if coefficient < 1.0:
                torch._foreach_mul_(source.gradients()[0], coefficient)
        if verdict.skip and self.on_skip is not None:
            self.on_skip(state, verdict)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the guard's state beside the checkpoint that was just written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self.guard.state_dict(), folder / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give clipping back."""
        args.max_grad_norm = self.max_grad_norm

    def _load(self, args: Any, state: Any) -> None:
        folders = [Path(args.output_dir) / f"checkpoint-{state.global_step}"]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, Path(args.resume_from_checkpoint))
        for folder in folders:
            if (folder / STATE_FILE).is_file():
                self.guard.load_state_dict(torch.load(folder / STATE_FILE, weights_only=True))
                return
        warnings.warn(
            f"No {STATE_FILE} in {' or '.join(map(str, folders))}: the gradient guard begins afresh.", stacklevel=2
        )
