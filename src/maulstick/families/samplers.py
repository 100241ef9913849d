"""Samplers by the names that sd-scripts gives them, set up for a model's own noise schedule."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import diffusers
import numpy as np
from diffusers import SchedulerMixin

# Taken from its module: without SciPy the package offers a stand-in that refuses to work.
from diffusers.schedulers.scheduling_lms_discrete import LMSDiscreteScheduler

from maulstick.errors import OptionError, nearest_name_hint

_BY_NAME: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": ("LMSDiscreteScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    # This solver cannot end at zero noise.
    "dpmsolver": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
}
SAMPLER_NAMES = tuple(_BY_NAME)


class _LmsWithoutScipy(LMSDiscreteScheduler):
    """diffusers' LMS integrates its Lagrange polynomials numerically with SciPy; polynomials have exact integrals."""

    def get_lms_coefficient(self, order: int, t: int, current_order: int) -> float:
        """Return the integral of the ``current_order``-th basis polynomial from sigma_t to sigma_(t+1)."""
        nodes = [float(self.sigmas[t - place]) for place in range(order)]
        own = nodes.pop(current_order)
        basis = np.poly1d([1.0])
        for node in nodes:
            basis = basis * np.poly1d([1.0, -node]) / (own - node)
        primitive = basis.integ()
        return float(primitive(float(self.sigmas[t + 1])) - primitive(float(self.sigmas[t])))


def make_sampler(name: str, scheduler_config: Mapping[str, Any]) -> SchedulerMixin:
    """Return the named sampler with the betas and the prediction type of ``scheduler_config``.

    Raises:
        OptionError: there is no sampler of that name.
    """
    if name not in _BY_NAME:
        known = ", ".join(SAMPLER_NAMES)
        raise OptionError(f"Unknown sampler '{name}'.{nearest_name_hint(name, SAMPLER_NAMES)} Known are: {known}.")
    class_name, extra = _BY_NAME[name]
    sampler_class = _LmsWithoutScipy if name == "lms" else getattr(diffusers, class_name)
    # Stable Diffusion was trained with these two; diffusers' pipeline warns about, and overrides, anything else.
    config = {**scheduler_config, "steps_offset": 1, "clip_sample": False, **extra}
    # What a scheduler does not know it would report; which keys those are depends on the one the model came with.
    understood = _parameters(sampler_class)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return sampler_class.from_config({key: value for key, value in config.items() if key in understood})


@cache
def _parameters(sampler_class: type[SchedulerMixin]) -> frozenset[str]:
    return frozenset(inspect.signature(sampler_class.__init__).parameters)
