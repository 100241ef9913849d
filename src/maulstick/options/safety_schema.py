"""Options of what watches over a run: the guardian, the rescue and the autopsy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from maulstick.options import groups


@Parameter(name="*", group=groups.GUARDIAN)
@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    grad_norm_mode: Literal["steady", "stable", "stable_no_threshoff", "gamble", "off"] | None = None
    """How bad steps are told from good ones: steady without this option, unless the flags below say otherwise."""
    skip_grad_norm: bool | None = None
    """Skip steps whose gradient norm is above the moving threshold (mean + 2.5 deviations of 200 steps)."""
    grad_norm_log: bool | None = None
    """Write every step's norm and threshold into output_dir/gradient_logs+NAME.txt."""
    grad_cosine_log: bool | None = None
    """Add the similarity of each gradient to the one before to that log."""
    skip_grad_norm_max: float | None = None
    """Highest threshold, for gradients that still hold the loss scale."""
    nan_to_window: bool | None = None
    """Let NaN norms into the window of the threshold, which they switch off for 200 steps."""
    inf_to_window: bool | None = None
    """The same for infinite norms."""
    skip_nan_immediate: Annotated[bool | None, Parameter(negative="--no-skip_nan_immediate")] = None
    """Skip a step at once when its gradient is NaN; on where skip_grad_norm is."""
    skip_inf_immediate: Annotated[bool | None, Parameter(negative="--no-skip_inf_immediate")] = None
    """The same for infinite gradients."""


@Parameter(name="*", group=groups.RESCUE)
@dataclass(frozen=True, kw_only=True)
class RescueOptions:
    rescue: Annotated[bool, Parameter(negative="--no-rescue")] = True
    """Go back to a good state and on from there when the run is lost, instead of ending it."""
    rescue_after: int = 16
    """Go back after so many bad steps in a row: skipped, or with a NaN or infinite gradient or loss."""
    rescue_every: int = 25
    """Keep the state of the adapter and the optimizer every so many steps, if they are good ones."""
    rescue_keep: int = 3
    """Number of states that are kept; the best one is kept besides them."""
    rescue_lr_factor: float = 0.5
    """Multiply the learning rate by this when going back; 1 leaves it as it is."""
    rescue_lr_restore_after: int = 200
    """Take one such cut back after so many good steps; 0 never does."""
    rescue_limit: int = 5
    """Go back at most so many times; then end the run with the best state saved."""


@Parameter(name="*", group=groups.AUTOPSY)
@dataclass(frozen=True, kw_only=True)
class AutopsyOptions:
    autopsy: Annotated[bool, Parameter(negative="--no-autopsy")] = True
    """Run a step with a NaN or infinite gradient again, to name the module, the image and the likely cause."""
    autopsy_limit: int = 3
    """Number of such reports in a run."""
