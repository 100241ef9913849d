"""What the denoiser is told about an image besides its caption and framing; the loop knows this interface only."""

from __future__ import annotations

from collections.abc import Sequence

from maulstick.data.batches import BatchItem
from maulstick.data.index import Progress
from maulstick.families.base import Conditioning
from maulstick.families.ip_adapter import ImagePrompt


class Conditioner:
    """Nothing more than the caption; what others begin from.

    Attributes:
        sample_prompt: the reference image of sample pictures, where there is one.
        further_captions: captions that come up besides those of the images.
        title: what ``prepare`` does, for a progress bar; None where there is nothing to do.
    """

    sample_prompt: ImagePrompt | None = None
    further_captions: frozenset[str] = frozenset()
    title: str | None = None

    def prepare(self, progress: Progress | None = None) -> None:
        """Do what is to be done once before training."""

    def at_step(self, step: int) -> None:
        """Be told the number of the window (from 0) before each forward pass of it."""

    def as_saved(self) -> None:
        """Be told before the model is measured: no ramps of a step, but what the file will be used with."""

    def captions(self, items: Sequence[BatchItem]) -> list[str]:
        """Return the caption that each image is trained with."""
        return [item.caption for item in items]

    def about(self, items: Sequence[BatchItem]) -> Conditioning:
        """Return further conditioning, one row for each image."""
        return {}
