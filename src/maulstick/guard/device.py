"""``DeviceGuard``: the ``steady`` mode without any wait for the device, for fused optimizers.

The rule is evaluated by the device itself and handed to the fused optimizer as its ``found_inf`` flag, which makes the
kernel leave weights and moments alone. The host learns of it one flush later: it then repeats the decisions from the
recorded numbers, which gives the same verdicts, reasons and alarms as ``GradientGuard``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .collective import Collective
from .errors import GuardError
from .judge import RECENT, Evidence, Judge
from .measure import NumberVector, assemble, local_gradients, sums_on_device, tensor_norms
from .policies import MAD_TO_DEVIATION, SteadyPolicy, SteadyRule
from .presets import GuardConfig, preset
from .scale import unscaled_from
from .sources import GradientSource, GroupNames, unwrap_optimizer
from .verdict import CLIP_EPSILON, Verdict


@dataclass(frozen=True)
class _Record:
    """One step that the host has not read yet."""

    source: GradientSource
    vector: NumberVector
    skip: torch.Tensor
    bad: torch.Tensor
    tensors: int
    places: list[int] | None
    images: tuple[str, ...]


class DeviceGuard:
    """Guards fused optimizers (``fused=True``) without a synchronous read.

    Only rules of the ``steady`` kind are offered. ``flush`` reads everything recorded since the last one in one
    transfer and returns the verdicts; call it every hundred steps or so, and before ``state_dict``.
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        device: torch.device | str,
        processes: Any = "auto",
        names: Any = None,
    ) -> None:
        config = preset("steady") if config is None else config
        if not isinstance(config.rule, SteadyRule):
            raise GuardError(f"DeviceGuard works with mode steady only, not '{config.name}'; use GradientGuard.")
        if config.when_stuck != "adapt" or config.rule.window > RECENT:
            raise GuardError(f"DeviceGuard needs when_stuck='adapt' and a window of at most {RECENT}.")
        self.config = config
        self.device = torch.device(device)
        self.collective = Collective(processes)
        self.judge = Judge(config)
        pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names or ()
        self.names = {id(param): name for name, param in pairs}
        self.records: list[_Record] = []
        self._rule = _DeviceRule(config, self.judge, self.device)

    def step(
        self,
        optimizer: Any,
        *,
        loss: torch.Tensor | float | None = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        source: Any = None,
        groups: GroupNames = None,
        images: Sequence[str] = (),
    ) -> None:
        """Unscale, measure, decide, clip, step or skip, update the scaler and clear the gradients; wait for nothing."""
        bare = unwrap_optimizer(optimizer)
        if not getattr(bare, "_step_supports_amp_scaling", False):
            raise GuardError(f"{type(bare).__name__} is not fused; give it fused=True, or use guarded_step instead.")
        layout = GradientSource.of(optimizer if source is None else source, groups)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        scale = None
        if scaler is not None:
            scaler.unscale_(bare)
            scale = unscaled_from(scaler._get_scale_async())
        local = local_gradients(layout, self.collective)
        norms = tensor_norms(local.gradients)
        sums = sums_on_device(norms, local, self.device)
        vector = NumberVector.gather(sums, len(norms), loss, scale, None, self.collective)
        norm = vector.values[: vector.groups].sum().sqrt()
        loss_bad = vector.values[vector.groups + 2] > 0 if vector.has_loss else torch.zeros_like(norm, dtype=torch.bool)
        skip = self._rule.decide(norm, loss_bad)
        # The gradients are gone when the verdict is read, so which parameters had one must be known now.
        every = sum(len(group.params) for group in layout.groups) == len(norms)
        places = None if every else layout.places_with_gradient()
        bad = _bad_places(norms, self.device)
        self.records.append(_Record(layout, vector, skip, bad, len(norms), places, tuple(images)))
        if max_grad_norm is not None:
            # The fused kernel divides by grad_scale, which clips without a pass of its own.
            bare.grad_scale = ((norm + CLIP_EPSILON) / max_grad_norm).clamp(min=1.0).float()
        bare.found_inf = skip.float()
        try:
            bare.step()
        finally:
            del bare.found_inf
            if max_grad_norm is not None:
                del bare.grad_scale
        if scaler is not None:
            scaler.update()
            floor = scaler._get_scale_async().clamp(min=self.config.scale_floor)
            scaler.update(floor)
        bare.zero_grad(set_to_none=True)

    def flush(self) -> list[Verdict]:
        """The verdicts of all steps since the last flush, oldest first. Waits for the device once."""
        records, self.records = self.records, []
        if not records:
            return []
        rows = torch.cat(
            [part for each in records for part in (each.vector.values, each.skip.double().reshape(1), each.bad)]
        ).tolist()
        verdicts = []
        in_step = True
        for record in records:
            length = record.vector.values.numel()
            numbers, (skip, bad_tensors, first_bad), rows = rows[:length], rows[length : length + 3], rows[length + 3 :]
            verdict = self._verdict(record, numbers, int(bad_tensors), int(first_bad))
            if verdict.skip != bool(skip):
                # Only a norm within the last digit of the threshold can do this; what the device did is what happened.
                verdict, in_step = replace(verdict, skip=bool(skip)), False
            verdicts.append(verdict)
        if not in_step:
            self._rule.load(self.judge)
        return verdicts

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule, exchangeable with that of a ``GradientGuard``'s judge. ``flush`` first."""
        if self.records:
            raise GuardError("Call flush() before state_dict(): some verdicts have not been read yet.")
        return {"judge": self.judge.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.records.clear()
        self.judge.load_state_dict(state["judge"])
        self._rule.load(self.judge)

    def _verdict(self, record: _Record, numbers: list[float], bad_tensors: int, first_bad: int) -> Verdict:
        place = None
        if bad_tensors:
            place = first_bad if record.places is None else record.places[first_bad]
        measured = assemble(record.source, record.vector.parse(numbers), None, record.tensors, bad_tensors, place)
        decision = self.judge.decide(
            Evidence(measured.norm, measured.scaled_norm, measured.scale, measured.loss_is_finite)
        )
        return Verdict(
            **vars(decision),
            norm=measured.norm,
            scaled_norm=measured.scaled_norm,
            scale=measured.scale,
            loss=measured.loss,
            group_norms=measured.group_norms,
            tensors=measured.tensors,
            bad_tensors=bad_tensors,
            bad_tensor=None if place is None else record.source.name_at(place, self.names),
            images=record.images,
        )


def _bad_places(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[how many norms are not finite, place of the first one] in fp64."""
    if not norms:
        return torch.zeros(2, dtype=torch.float64, device=device)
    bad = ~torch.stack([norm.to(device, non_blocking=True) for norm in norms]).isfinite()
    return torch.stack([bad.sum(), bad.int().argmax()]).double()


class _DeviceRule:
    """``SteadyPolicy`` and the level shifts of ``Judge`` in tensors; NaN marks an empty place, the newest is last."""

    def __init__(self, config: GuardConfig, judge: Judge, device: torch.device) -> None:
        assert isinstance(config.rule, SteadyRule)
        self.rule = config.rule
        self.most_refusals = config.most_refusals_in_a_row
        self.device = device
        self.places = torch.arange(RECENT, device=device)
        self.load(judge)

    def load(self, judge: Judge) -> None:
        """Take over the state of a host judge."""
        assert isinstance(judge.policy, SteadyPolicy)
        self.logs = self._filled(list(judge.policy.logs), self.rule.window)
        recent = [math.log(norm) if norm > 0 else -math.inf for norm, _ in judge.recent]
        self.recent = self._filled(recent, RECENT)
        flags = [False] * (RECENT - len(recent)) + [refused for _, refused in judge.recent]
        self.refused = torch.tensor(flags, device=self.device)
        self.refused_in_a_row = torch.tensor(judge.refused_in_a_row, device=self.device)

    def decide(self, norm: torch.Tensor, loss_bad: torch.Tensor) -> torch.Tensor:
        """Whether to skip, as a boolean tensor; remembers the norm. ``norm`` is fp64, in true units."""
        threshold = self._log_threshold()
        log_norm = norm.log()
        counts = norm.isfinite() & ~loss_bad
        spike = counts & (log_norm > threshold)
        self.recent = torch.where(counts, _shifted(self.recent, log_norm), self.recent)
        self.refused = torch.where(counts, _shifted(self.refused, spike), self.refused)
        streak = torch.where(counts, torch.where(spike, self.refused_in_a_row + 1, 0), self.refused_in_a_row)
        in_a_row = streak > self.most_refusals
        adapt = spike & (in_a_row | (self.refused.sum() > RECENT // 2))
        level = torch.where(~in_a_row | (self.places >= RECENT - streak), self.recent, math.nan)
        level = torch.where(level.isinf(), math.nan, level)
        level = level[torch.argsort(~level.isnan(), stable=True)][-self.rule.window :]
        enters = counts & ~spike & (norm > 0)
        kept = torch.where(enters, _shifted(self.logs, log_norm), self.logs)
        self.logs = torch.where(adapt, level, kept)
        self.refused = self.refused & ~adapt
        self.refused_in_a_row = torch.where(adapt, 0, streak)
        return (spike & ~adapt) | ~counts

    def _log_threshold(self) -> torch.Tensor:
        empty = self.logs.isnan()
        count = (~empty).sum()
        middle = _middle(torch.where(empty, math.inf, self.logs), count)
        away = torch.where(empty, math.inf, (self.logs - middle).abs())
        deviation = MAD_TO_DEVIATION * _middle(away, count)
        width = (self.rule.deviations * deviation).clamp(min=math.log(self.rule.least_ratio))
        return torch.where(count >= self.rule.active_from, middle + width, math.inf)

    def _filled(self, values: list[float], length: int) -> torch.Tensor:
        filled = [math.nan] * (length - len(values)) + values
        return torch.tensor(filled, dtype=torch.float64, device=self.device)


def _shifted(values: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    return torch.cat([values[1:], newest.reshape(1)])


def _middle(values: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The median of the ``count`` smallest values."""
    ordered = values.sort().values
    low, high = ((count - 1) // 2).clamp(min=0), (count // 2).clamp(max=len(values) - 1)
    return (ordered.gather(0, low.reshape(1)) + ordered.gather(0, high.reshape(1))).squeeze(0) / 2
