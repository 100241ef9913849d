"""Alarms while training: what a healthy loss hides, and what is going to break, said once and in time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maulstick.adapters.factors import product_norm
from maulstick.adapters.lora import DEFAULT_ADAPTER, lora_modules
from maulstick.data.findings import names as some_of
from maulstick.train.attention_logits import LogitMeter
from maulstick.train.gradient_seen import GradientsSeen, behind_layer
from maulstick.train.seeds import derive_seed
from maulstick.train.trends import MOST_POINTS, heading_for
from maulstick.train.watchers import WindowDone, networks_of

if TYPE_CHECKING:
    from maulstick.train.loop import TrainingLoop

UPDATES_TO_LEAVE_ZERO = 5
UPDATES_TO_GET_A_GRADIENT = 20
MOST_HALVINGS = 8
_FIRST_LOOKS = (UPDATES_TO_LEAVE_ZERO, UPDATES_TO_GET_A_GRADIENT)
_CHANCE_OF_FALSE_ALARM = 1e-3

WEIGHT_NORM, LOGIT, RATES = "alarms/largest_weight_norm", "alarms/largest_attention_logit", "alarms/lr_squared_sum"
"""What is logged at every look: the largest norm of a module's change, the largest attention logit, the sum of lr²."""


def look_interval(total_steps: int) -> int:
    """Return after how many steps there is another look, besides those at steps 5 and 20."""
    return max(20, min(100, total_steps // 10))


class AlarmWatcher:
    """Looks at weights, gradients, loss scale and attention logits now and then; changes nothing.

    A look reads a few numbers from the device and runs one image forward without gradient, at steps 5 and 20 and then
    every 20 to 100 steps; between looks nothing is read. Each alarm comes once, on the console and as an ``alarm``
    event. The sum of lr² over the updates stands beside the trends: with a random walk of the weights, it is what their
    drift grows with.
    """

    name = "alarms"

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.interval = look_interval(total_steps)
        self.updates = 0
        self.rates_squared = 0.0
        self.history: dict[str, list[tuple[int, float]]] = {WEIGHT_NORM: [], LOGIT: []}
        self.raised: list[str] = []
        self._judged: list[str] = []
        self._scale: float | None = None
        self._halvings = 0
        self._waiting: list[str] | None = None
        self._seen: GradientsSeen | None = None
        self._meter: LogitMeter | None = None

    def after_window(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Count the window, and look where it is time to."""
        if self._seen is None:
            self._seen = GradientsSeen(loop.parts.named_parameters, self._waiting)
        if done.outcome.stepped:
            self.updates += 1
            self.rates_squared += max(_moving_rate(group) for group in loop.parts.optimizer.param_groups) ** 2
        self._watch_scale(loop, done)
        step = done.step + 1
        if step in _FIRST_LOOKS or step % self.interval == 0:
            self._look(loop, done, step)

    # --- what is looked at -------------------------------------------------------------------------------------------

    def _look(self, loop: TrainingLoop, done: WindowDone, step: int) -> None:
        self._look_for_zeros(loop, step)
        self._look_for_missing_gradients(loop, step)
        measured = {RATES: self.rates_squared}
        weight = largest_change(networks_of(loop))
        if weight is not None:
            measured[WEIGHT_NORM] = weight[0]
            self._follow(loop, step, WEIGHT_NORM, *weight)
        logit = self._largest_logit(loop, done, step)
        if logit is not None:
            measured[LOGIT] = logit[0]
            self._follow(loop, step, LOGIT, *logit)
        loop.parts.records.events.write("look", step=step, **measured)
        loop.parts.records.trackers.log(measured, step=step, epoch=done.epoch)

    def _look_for_zeros(self, loop: TrainingLoop, step: int) -> None:
        """Find factors that are exactly zero still: their modules do nothing, whatever the loss says."""
        if not self._may_judge("zero", loop, UPDATES_TO_LEAVE_ZERO):
            return
        for network, members in self._due(loop).items():
            norms = torch._foreach_norm([parameter.detach() for _, parameter in members])
            values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
            zero = [name for (name, _), value in zip(members, values, strict=True) if value == 0.0]
            if not zero:
                continue
            ups = [name for name, _ in members if name.endswith("lora_up.weight")]
            which = f"all {len(ups)} up weights" if zero == ups else f"{len(zero)} of {len(members)} tensors"
            rates = [group["lr"] for group in loop.parts.optimizer.param_groups]
            self._raise(
                loop,
                step,
                f"zero weights in {network}",
                f"{network}: {which} are still exactly zero after {self.updates} updates ({some_of(zero)}), so nothing "
                "of them is learned although the loss looks healthy. Usual causes: gradient checkpointing that cuts "
                f"the graph, a learning rate of 0 (now {min(rates):.3g} to {max(rates):.3g}), a frozen network.",
            )

    def _look_for_missing_gradients(self, loop: TrainingLoop, step: int) -> None:
        if self._seen is None or not self._may_judge("gradients", loop, UPDATES_TO_GET_A_GRADIENT):
            return
        without = set(self._seen.without)
        for network, members in self._due(loop).items():
            missing = [name for name, _ in members if name in without]
            if missing:
                self._raise(
                    loop,
                    step,
                    f"no gradient in {network}",
                    f"{network}: {len(missing)} of {len(members)} tensors never got a gradient in {self.updates} "
                    f"updates ({some_of(missing)}): they take no part in the loss, and nothing of them is learned.",
                )
        self._seen.close()

    def _watch_scale(self, loop: TrainingLoop, done: WindowDone) -> None:
        """Count halvings of the loss scale without growth in between; the guard has read the scale already."""
        scale = done.outcome.verdict.scale
        if scale is None:
            return
        if self._scale is not None and scale > self._scale:
            self._halvings = 0
        elif self._scale is not None and scale < self._scale:
            self._halvings += round(math.log2(self._scale / scale)) if scale > 0 else MOST_HALVINGS
        self._scale = scale
        if self._halvings >= MOST_HALVINGS:
            self._raise(
                loop,
                done.step + 1,
                "loss scale",
                f"the loss scale has sunk to {scale:g}, by {self._halvings} halvings without growing once: gradients "
                "overflow again and again, and small ones are soon lost. Train in bf16, or look for a NaN in the data.",
            )

    def _follow(self, loop: TrainingLoop, step: int, what: str, value: float, where: str) -> None:
        """Add a value to its history, and raise an alarm where it heads for what the number format can hold."""
        history = self.history[what]
        history.append((step, value))
        del history[:-MOST_POINTS]
        dtype = loop.parts.family.dtype
        if dtype == torch.float32:
            return
        limit = torch.finfo(dtype).max
        subject = "the largest attention logit" if what == LOGIT else "the largest weight change of a module"
        advice = "Lower the learning rate, set scale_weight_norms, or train in bf16."
        format_name = f"{str(dtype).removeprefix('torch.')} ({limit:.3g})"
        if not value <= limit:
            self._raise(loop, step, what, f"{subject} ({where}) is {value:g}, beyond {format_name}. {advice}")
            return
        trend = heading_for([at for at, _ in history], [amount for _, amount in history], limit)
        if trend is None or trend.crossing > self.total_steps:
            return
        self._raise(
            loop,
            step,
            what,
            f"{subject} grew from {history[0][1]:.3g} at step {history[0][0]} to {value:.3g} ({where}). This "
            f"{trend.kind} trend reaches the limit of {format_name} at step {math.ceil(trend.crossing)} of "
            f"{self.total_steps}. Sum of lr² so far: {self.rates_squared:.3g}. {advice}",
        )

    def _largest_logit(self, loop: TrainingLoop, done: WindowDone, step: int) -> tuple[float, str] | None:
        """Run the window's first image forward once more, and return the largest logit and where it was."""
        if self._meter is None:
            self._meter = LogitMeter(networks_of(loop))
        generator = torch.Generator().manual_seed(derive_seed(loop.parts.seed, "alarms", step))
        # Without dropout, so that the value hangs on no random state.
        loop.parts.trainee.eval()
        try:
            with self._meter.watching(), torch.no_grad():
                loop.forward(*done.window[0], generator, [0])
        finally:
            loop.parts.trainee.train()
        return self._meter.largest()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _may_judge(self, what: str, loop: TrainingLoop, updates: int) -> bool:
        """Whether this is the time to judge something once: after enough updates that chance cannot explain it."""
        dropped = loop.parts.options.network.module_dropout or 0.0
        by_chance = len(loop.parts.named_parameters) * dropped**self.updates
        if what in self._judged or self.updates < updates or by_chance > _CHANCE_OF_FALSE_ALARM:
            return False
        self._judged.append(what)
        return True

    def _due(self, loop: TrainingLoop) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return network -> parameters that ought to learn."""
        parts = loop.parts
        unused = behind_layer(
            [name for name, _ in parts.named_parameters],
            set(parts.family.text_encoder_naming),
            parts.options.model.clip_skip,
        )
        due: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parts.named_parameters:
            if name not in unused:
                due.setdefault(name.split(".", 1)[0], []).append((name, parameter))
        return due

    def _raise(self, loop: TrainingLoop, step: int, kind: str, text: str) -> None:
        if kind in self.raised:
            return
        self.raised.append(kind)
        loop.parts.console.say(f"step {step}: alarm: {text}")
        loop.parts.records.events.write("alarm", step=step, kind=kind, text=text)

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return counters, histories and what was said, as plain values."""
        return {
            "updates": self.updates,
            "rates_squared": self.rates_squared,
            "history": {what: [list(point) for point in points] for what, points in self.history.items()},
            "raised": list(self.raised),
            "judged": list(self._judged),
            "scale": self._scale,
            "halvings": self._halvings,
            "waiting": self._waiting if self._seen is None else self._seen.without,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that back."""
        self.updates = state["updates"]
        self.rates_squared = state["rates_squared"]
        self.history = {what: [(step, value) for step, value in points] for what, points in state["history"].items()}
        self.raised = list(state["raised"])
        self._judged = list(state["judged"])
        self._scale, self._halvings = state["scale"], state["halvings"]
        self._waiting = state["waiting"]
        if self._seen is not None:
            self._seen.close()
            self._seen = None


@torch.no_grad()
def largest_change(networks: Mapping[str, nn.Module]) -> tuple[float, str] | None:
    """Return the largest norm of ``alpha / r * up @ down`` over all LoRA modules, and its module; one read."""
    where: list[str] = []
    norms: list[torch.Tensor] = []
    module: Any
    for network, root in networks.items():
        for path, module in lora_modules(root).items():
            down, up = module.lora_A[DEFAULT_ADAPTER].weight, module.lora_B[DEFAULT_ADAPTER].weight
            where.append(f"{network}.{path}")
            norms.append(product_norm(down, up, module.lora_alpha[DEFAULT_ADAPTER] / module.r[DEFAULT_ADAPTER]))
    if not norms:
        return None
    values: Sequence[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return max(zip(values, where, strict=True), key=lambda pair: (pair[0] != pair[0], pair[0]))


def _moving_rate(group: Mapping[str, Any]) -> float:
    """The rate that moves weights: with the estimated step size, where the optimizer finds one."""
    return float(group["lr"]) * (float(group["d"]) if "d" in group and "d0" in group else 1.0)
