"""A running average of what trains (EMA), which is what is saved and drawn with; diffusers' ``EMAModel``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maulstick.errors import OptionError
from maulstick.families.libraries import quiet_libraries
from maulstick.train.watchers import WindowDone

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop


class WeightAverage:
    """Follows the weights after every update, and takes their place while they are read.

    The decay rises with the updates, (1 + n) / (10 + n), up to the one that is asked for: a short run would else be
    an average with its start. It goes into states, and back with the weights in a rescue.
    """

    name = "average"

    def __init__(self, decay: float, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        with quiet_libraries():
            from diffusers.training_utils import EMAModel

        self._parameters = [parameter for _, parameter in named_parameters]
        self._ema = EMAModel(self._parameters, decay=decay, foreach=True)
        self._live: list[torch.Tensor] | None = None

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Follow an update that was made."""
        if done.outcome.stepped:
            self._ema.step(self._parameters)

    @torch.no_grad()
    def show(self) -> None:
        """Put the average in the place of the weights; ``hide`` puts them back."""
        if self._live is None:
            self._live = [parameter.detach().clone() for parameter in self._parameters]
            self._ema.copy_to(self._parameters)

    @torch.no_grad()
    def hide(self) -> None:
        """Put the weights back."""
        if self._live is not None:
            torch._foreach_copy_([parameter.detach() for parameter in self._parameters], self._live)
            self._live = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of updates in it."""
        return {"updates": self._ema.optimization_step, "average": list(self._ema.shadow_params)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self._ema.optimization_step = int(state["updates"])
        for mine, saved in zip(self._ema.shadow_params, state["average"], strict=True):
            mine.copy_(saved)


def weight_average(
    decay: float | None,
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    optimizer_has_modes: bool,
    optimizer_type: str,
) -> WeightAverage | None:
    """Return the average that ``ema_decay`` asks for. Raises OptionError for optimizers that average by themselves."""
    if decay is None:
        return None
    if optimizer_has_modes:
        raise OptionError(
            f"ema_decay does not work with optimizer_type = {optimizer_type}, which averages the weights itself. Leave "
            "ema_decay out."
        )
    return WeightAverage(decay, named_parameters)
