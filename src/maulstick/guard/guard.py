"""``GradientGuard``: looks at the gradients of one step and says whether the optimizer may use them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .accumulation import AccumulationWindow, Drop, WindowReport
from .collective import Collective
from .cosine import PreviousGradient
from .errors import GuardError
from .judge import Evidence, Judge
from .measure import Measurement, measure
from .presets import GuardConfig, preset
from .scale import LossScale, read_scale
from .sources import GradientSource, GroupNames
from .verdict import Verdict

STATE_VERSION = 1


class GradientGuard:
    """Judges the gradients of every step and remembers what it has seen.

    ``config`` comes from ``presets.preset`` or ``presets.resolve``. ``processes`` is "auto" (decide together with all
    processes of the default group, if there are several), a process group, or None (this process alone). ``names``
    (a module, or (name, parameter) pairs) lets a guard that is shown an optimizer name the tensors in it.
    """

    def __init__(self, config: GuardConfig, *, processes: Any = "auto", names: Any = None) -> None:
        if not isinstance(config, GuardConfig):
            raise GuardError(f"GradientGuard takes a GuardConfig, got {type(config)!r}; see GradientGuard.from_preset.")
        self.config = config
        self.judge = Judge(config)
        self.collective = Collective(processes)
        self.previous = None if config.cosine == "off" else PreviousGradient(config.cosine)
        self.window = AccumulationWindow()
        self.names: dict[int, str] = {}
        self._unscaled: dict[tuple[int, ...], Any] = {}
        if names is not None:
            self.know_names(names)

    @classmethod
    def from_preset(cls, name: str, *, processes: Any = "auto", names: Any = None, **overrides: Any) -> GradientGuard:
        """A guard of the preset ``steady``, ``stable``, ``stable_no_threshoff``, ``gamble`` or ``off``.

        ``overrides`` replace fields of ``GuardConfig`` or of its rule, for instance ``least_ratio=20``.
        """
        return cls(preset(name, **overrides), processes=processes, names=names)

    def know_names(self, names: torch.nn.Module | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Learn the names of parameters, for verdicts about an optimizer's gradients."""
        pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names
        self.names.update({id(param): name for name, param in pairs})

    def observe(
        self,
        source: Any,
        *,
        loss: torch.Tensor | float | None = None,
        scale: Any = None,
        groups: GroupNames = None,
        images: Sequence[str] = (),
    ) -> Verdict:
        """Measure and judge the gradients of one complete step, after backward and before clipping.

        ``source`` is an optimizer (or several), a module, parameters, (name, parameter) pairs, or a
        ``GradientSource``. ``scale`` is needed where the loss was multiplied by a loss scale: the ``GradScaler``, or
        ``scaled_by(s)`` for gradients that still hold the factor, or ``unscaled_from(s)`` after ``unscale_``. ``loss``
        is the step's unscaled loss. ``images`` are names to mention when the step is skipped. On several processes
        every one must call this, with a loss or without, and all of them get the same decision.
        """
        layout = GradientSource.of(source, groups)
        loss_scale = read_scale(scale, layout.optimizers)
        self._refuse_stale_unscale(scale, loss_scale, layout)
        report = self.window.close(layout)
        if loss is None:
            loss = report.mean_loss
        measured = measure(layout, loss=loss, scale=loss_scale, collective=self.collective, previous=self.previous)
        if report.dropped and report.dropped == report.micro_batches:
            # Nothing is left to step with: the window counts as what its last micro-batch was.
            measured = replace(measured, norm=report.dropped_total, scaled_norm=report.dropped_total)
        evidence = Evidence(measured.norm, measured.scaled_norm, measured.scale, measured.loss_is_finite)
        return self._verdict(layout, measured, self._culprit(layout, report, measured), evidence, tuple(images))

    def observe_micro_batch(
        self,
        source: Any,
        *,
        loss: torch.Tensor | float | None = None,
        images: Sequence[str] = (),
        drop: Drop = "window",
    ) -> bool:
        """Note one micro-batch, right after its backward pass; ``observe`` later judges the window as a whole.

        A window with a NaN or infinite micro-batch is skipped as a whole, and the verdict says which one it was and
        which ``images`` it held. ``drop="micro_batch"`` (one process only) takes just the bad one back instead, at
        the cost of a copy of the gradients and a read per micro-batch, and rescales the rest to their mean. Returns
        whether the micro-batch was kept.
        """
        return self.window.add(GradientSource.of(source), loss, images, drop, self.collective)

    def _refuse_stale_unscale(self, scaler: Any, loss_scale: LossScale | None, layout: GradientSource) -> None:
        """Raise if the scaler still stands where it stood at the last step: it would step on scaled gradients."""
        if loss_scale is None or loss_scale is scaler or loss_scale.still_applied:
            return
        key = tuple(id(each) for each in layout.optimizers)
        # update() puts a new dictionary in place of this one.
        states = scaler._per_optimizer_states
        if self._unscaled.get(key) is states:
            raise GuardError(
                "scaler.update() was not called after the last step: the scaler takes these gradients for unscaled, "
                "but they are still multiplied by the loss scale. Call it after every step, skipped ones too."
            )
        self._unscaled[key] = states

    def _culprit(self, layout: GradientSource, report: WindowReport, measured: Measurement) -> WindowReport:
        if math.isfinite(measured.norm):
            return report if report.dropped else replace(report, first_bad=None)
        nowhere = report.micro_batches
        mine = nowhere if report.first_bad is None else report.first_bad
        gradients = layout.gradients()[0]
        [first] = self.collective.smallest([mine], gradients[0].device if gradients else torch.device("cpu"))
        return replace(report, first_bad=first if first < nowhere else None)

    def _verdict(
        self,
        layout: GradientSource,
        measured: Measurement,
        report: WindowReport,
        evidence: Evidence,
        images: tuple[str, ...],
    ) -> Verdict:
        decision = self.judge.decide(evidence)
        return Verdict(
            **vars(decision),
            judges_scaled=self.judge.policy.judges_scaled,
            norm=measured.norm,
            scaled_norm=measured.scaled_norm,
            scale=measured.scale,
            loss=measured.loss,
            cosine=measured.cosine,
            group_norms=measured.group_norms,
            tensors=measured.tensors,
            bad_tensors=measured.bad_tensors,
            bad_tensor=None if measured.first_bad is None else layout.name_at(measured.first_bad, self.names),
            bad_micro_batch=report.first_bad,
            micro_batches=report.micro_batches,
            dropped_micro_batches=report.dropped,
            images=report.images if report.first_bad is not None and report.images else images or report.images,
        )

    def may_step(self, verdict: Verdict) -> bool:
        """Whether the optimizer may be given the gradients of ``verdict``.

        That is less than ``verdict.accept``: the compatible modes accept NaN and inf to keep their thresholds lifted,
        but no optimizer is handed them, just as a GradScaler would not. Only ``off`` and logging without skipping
        leave the loop as plain as it was.
        """
        return verdict.accept and (verdict.finite or not self.config.skips)

    @property
    def observed(self) -> int:
        """How many steps have been judged."""
        return self.judge.observed

    @property
    def skipped(self) -> int:
        """How many of them were skipped."""
        return sum(self.judge.skipped.values())

    def summary(self) -> str:
        """One line for the end of a run: steps, skips and why, longest streak."""
        if not self.skipped:
            return f"{self.observed} steps judged, none skipped"
        why = ", ".join(f"{count} {reason}" for reason, count in self.judge.skipped.most_common())
        return (
            f"{self.observed} steps judged, {self.skipped} skipped ({why}), longest streak {self.judge.longest_streak}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything later decisions depend on: numbers, lists, and tensors only where the cosine is logged."""
        return {
            "version": STATE_VERSION,
            "rule": type(self.config.rule).__name__,
            "name": self.config.name,
            "judge": self.judge.state_dict(),
            "previous": None if self.previous is None else self.previous.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the guard that gave ``state`` stood.

        Raises ``GuardError`` if that guard had another kind of rule: its window would mean something else.
        """
        if state.get("version") != STATE_VERSION:
            raise GuardError(f"This guard state has version {state.get('version')}; version {STATE_VERSION} is needed.")
        if state["rule"] != type(self.config.rule).__name__:
            raise GuardError(
                f"This guard state was saved in mode '{state['name']}' and cannot continue in mode "
                f"'{self.config.name}'. Resume with the mode it was saved in, or begin a fresh guard."
            )
        self.judge.load_state_dict(state["judge"])
        if self.previous is not None and state["previous"] is not None:
            self.previous.load_state_dict(state["previous"])
