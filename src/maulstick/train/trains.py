"""What a run trains, seen from the trainer: chosen and counted before anything heavy is done, attached, and written.

LoRA and its kin are one answer (``lora_training``), an IP-Adapter is another (``ip_adapter_training``). Plan, loop,
saving, rescue and resume know this interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maulstick.data.latents import Report
from maulstick.data.records import DatasetIndex
from maulstick.families.base import Family
from maulstick.options.schema import TrainOptions
from maulstick.train.choice import Rates, Targets
from maulstick.train.conditioner import Conditioner
from maulstick.train.optim import RateGroup
from maulstick.train.plan import ComponentPlan


@dataclass
class Attached(ABC):
    """What trains, once it is in the networks.

    Attributes:
        groups: parameters by learning rate.
        named_parameters: every trained parameter with its name, which begins with that of its component.
        notes: lines for the user.
    """

    groups: list[RateGroup] = field(default_factory=list)
    named_parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def save(self, path: Path, dtype: torch.dtype, metadata: Mapping[str, str]) -> None:
        """Write the file. Raises ModelError when a value is not finite in that format, OSError when a disk refuses."""

    def after_update(self) -> dict[str, float]:
        """Do what is due after an update; return values for the trackers."""
        return {}


class Trains(ABC):
    """A choice of what is trained.

    Attributes:
        targets: component -> modules that get LoRA; none where no LoRA is trained.
        rates: component -> learning rates of those modules.
        notes: what the user should know about the choice.
    """

    targets: Targets
    rates: Rates
    notes: Sequence[str]

    @abstractmethod
    def components(self) -> list[ComponentPlan]:
        """Sum up each network that carries something."""

    @abstractmethod
    def modules_per_block(self) -> dict[int, int]:
        """Return block index -> number of places that carry something, for every block of the denoiser."""

    @property
    def block_weights(self) -> Sequence[float] | None:
        """Weight of the learning rate of each block; None where none are given."""
        return None

    @property
    def sentence(self) -> str | None:
        """Say what the plan's lines do not; None where there is nothing."""
        return None

    @property
    def identity(self) -> str:
        """Identify what is trained from besides images and base; a resumed run must have the same."""
        return ""

    def check_data(self, index: DatasetIndex) -> None:  # noqa: B027 (most take any images)
        """Refuse training images that this cannot be trained on. Raises DataError."""

    def conditioner(self, options: TrainOptions, index: DatasetIndex, seed: int, report: Report) -> Conditioner:
        """Return what tells the denoiser more than captions do."""
        return Conditioner()

    @abstractmethod
    def attach(self, family: Family, seed: int) -> Attached:
        """Freeze the networks, put in what trains, and load ``network_weights`` where given."""

    @abstractmethod
    def network_facts(self) -> dict[str, Any]:
        """Return what a file's metadata says about the network: fields of ``LoraRunFacts``."""

    def refine_metadata(self, metadata: dict[str, str]) -> dict[str, str]:
        """Return the metadata as this kind of file has it."""
        return metadata
