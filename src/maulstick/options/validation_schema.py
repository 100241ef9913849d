"""When the validation loss is measured; which images are held back for it is part of the dataset."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from maulstick.options import groups


@Parameter(name="*", group=groups.VALIDATION)
@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    validate_every_n_steps: int | None = None
    """Measure the validation loss every so many steps too."""
    validate_every_n_epochs: int | None = None
    """Measure it every so many epochs; without this option after every one."""
    max_validation_steps: int | None = None
    """Measure on so many batches (of train_batch_size) at most; without it on all images that are held back."""
