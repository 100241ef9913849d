"""What the training loop works with, and where it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from maulstick.data.batches import BatchSchedule, MicroBatch
from maulstick.data.cache import TextStateCache
from maulstick.data.latents import LatentSource
from maulstick.families.base import Family
from maulstick.guard import GradientGuard
from maulstick.options.schema import TrainOptions
from maulstick.train.average import WeightAverage
from maulstick.train.conditioner import Conditioner
from maulstick.train.console import RunConsole
from maulstick.train.records import RunRecords
from maulstick.train.schedule import Factor
from maulstick.train.watchers import Watcher

Window = Sequence[tuple[MicroBatch, Tensor]]
"""The micro-batches of one update, each with its latents."""


@dataclass
class LoopParts:
    """Everything the loop works with; made by ``run.py``, so that the loop itself only trains."""

    options: TrainOptions
    seed: int
    accelerator: Accelerator
    family: Family
    trainee: torch.nn.Module
    named_parameters: list[tuple[str, torch.nn.Parameter]]
    optimizer: torch.optim.Optimizer
    optimizer_has_modes: bool
    scaler: torch.amp.GradScaler
    schedule: Factor
    batches: BatchSchedule
    latents: LatentSource
    text_states: TextStateCache | None
    conditioner: Conditioner
    guard: GradientGuard
    total_steps: int
    console: RunConsole
    records: RunRecords
    save: Callable[[str, int, int], None]
    save_state: Callable[[str, LoopState], None]
    save_state_at_end: Callable[[LoopState], None]
    sample: Callable[[str, int], None] | None
    after_update: Callable[[], dict[str, float]]
    stop_requested: Callable[[], str | None]
    average: WeightAverage | None = None
    saved_files: Callable[[], Mapping[int, Path]] = dict
    """Step -> adapter file of this run that is still there."""
    exchange_gradients: Callable[[], None] | None = None
    watchers: Sequence[Watcher] = ()


@dataclass
class LoopState:
    """Where the run stands: what a resumed run would have to know."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    skipped: int = 0
    skips_in_a_row: int = 0
    stopped_by: str | None = None
    stop_was_asked_for: bool = False
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=100))
