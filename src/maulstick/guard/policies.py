"""The rules that judge one gradient norm at a time: floats in, a judgement out. Pure Python, no torch.

Two rules are offered. ``WindowRule`` is the compatible one: mean and deviation of the last norms, the judged one
included, on norms as the backward pass left them (multiplied by the loss scale). ``SteadyRule`` is ours: median and
median absolute deviation of the logarithms of recent accepted norms, in true (unscaled) units.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import add, mul
from typing import Any, Protocol

from .errors import GuardError

# For a normal distribution the standard deviation is this many median absolute deviations (1 / Phi^-1(3/4)).
MAD_TO_DEVIATION = 1.4826022185056018


class Reason(StrEnum):
    """Why a step was accepted or skipped."""

    ACCEPTED = "accepted"
    LEVEL_SHIFT = "level_shift"
    SPIKE = "spike"
    NAN = "nan"
    INF = "inf"
    LOSS = "non_finite_loss"


@dataclass(frozen=True)
class Judgement:
    """What a policy says about one norm.

    ``threshold`` is in the units of the judged norm: NaN where the rule is switched off by a value in its window, inf
    where it does not judge yet. ``reference`` is the recent middle the norm was compared with, if there is one.
    """

    skip: bool
    reason: Reason
    threshold: float
    reference: float | None = None


class Policy(Protocol):
    """A stateful rule. ``judges_scaled`` says whether it wants norms multiplied by the loss scale."""

    judges_scaled: bool

    def judge(self, norm: float, loss_is_finite: bool = True) -> Judgement:
        """Judge one norm and remember it."""
        ...

    def adapt(self, recent: Sequence[float]) -> None:
        """Accept the level of ``recent`` (finite norms, oldest first) as the new normal."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _refuse_unless(condition: bool, what: str) -> None:
    if not condition:
        raise GuardError(what)


@dataclass(frozen=True)
class WindowRule:
    """The compatible rule: skip above mean + ``deviations`` * standard deviation of the last ``window`` norms.

    The judged norm is in the window that judges it. Until the window is full the threshold is ``initial_threshold``
    and ``cap`` is ignored; afterwards the threshold is at most ``cap``. A non-finite value in the window makes the
    threshold NaN, and nothing is skipped by threshold until it has left.
    """

    skip: bool = True
    cap: float | None = None
    nan_to_window: bool = False
    inf_to_window: bool = False
    skip_nan_immediate: bool = True
    skip_inf_immediate: bool = True
    window: int = 200
    initial_threshold: float = 200000.0
    deviations: float = 2.5

    def __post_init__(self) -> None:
        _refuse_unless(self.window >= 2, f"window must be at least 2, got {self.window}.")
        _refuse_unless(self.cap is None or self.cap > 0, f"the cap on the norm must be above 0, got {self.cap}.")


@dataclass(frozen=True)
class SteadyRule:
    """Our rule: skip above median * max(``least_ratio``, exp(``deviations`` * 1.4826 * MAD)), taken over log norms.

    Only accepted norms enter the window, so a spike cannot hide the next one. ``least_ratio`` keeps a very even run
    from refusing harmless changes of level. Judging starts with ``active_from`` accepted norms.
    """

    window: int = 200
    active_from: int = 20
    deviations: float = 5.0
    least_ratio: float = 12.0

    def __post_init__(self) -> None:
        _refuse_unless(
            2 <= self.active_from <= self.window,
            f"active_from must lie between 2 and window ({self.window}), got {self.active_from}.",
        )
        _refuse_unless(self.deviations > 0, f"deviations must be above 0, got {self.deviations}.")
        _refuse_unless(self.least_ratio >= 1, f"least_ratio must be at least 1, got {self.least_ratio}.")


@dataclass(frozen=True)
class OffRule:
    """Judge nothing: every step is accepted."""


Rule = WindowRule | SteadyRule | OffRule


class WindowPolicy:
    """``WindowRule`` with its window. Norms are expected as they stand, multiplied by the loss scale."""

    judges_scaled = True

    def __init__(self, rule: WindowRule) -> None:
        self.rule = rule
        self.norms: deque[float] = deque(maxlen=rule.window)
        self.released = False

    def judge(self, norm: float, loss_is_finite: bool = True) -> Judgement:
        rule = self.rule
        if math.isfinite(norm) or (rule.nan_to_window if math.isnan(norm) else rule.inf_to_window):
            self.norms.append(norm)
        threshold, middle = self._threshold()
        if self.released and norm <= threshold:
            self.released = False
        if not rule.skip:
            return Judgement(False, Reason.ACCEPTED, threshold, middle)
        if math.isnan(norm):
            skip, reason = rule.skip_nan_immediate, Reason.NAN
        elif math.isinf(norm):
            skip, reason = rule.skip_inf_immediate or norm > threshold, Reason.INF
        else:
            skip, reason = norm > threshold and not self.released, Reason.SPIKE
        return Judgement(skip, reason if skip else Reason.ACCEPTED, threshold, middle)

    def _threshold(self) -> tuple[float, float | None]:
        if len(self.norms) < self.rule.window:
            return self.rule.initial_threshold, None
        mean, deviation = mean_and_deviation(list(self.norms))
        threshold = mean + self.rule.deviations * deviation
        if self.rule.cap is not None and threshold > self.rule.cap:
            threshold = self.rule.cap
        return threshold, mean if math.isfinite(mean) else None

    def adapt(self, recent: Sequence[float]) -> None:
        # The window holds these norms already; what keeps refusing them is the cap or the initial threshold, so the
        # threshold is lifted until a norm has come back under it.
        self.released = True

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms), "released": self.released}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = deque(state["norms"], maxlen=self.rule.window)
        self.released = bool(state["released"])


class SteadyPolicy:
    """``SteadyRule`` with its window of log norms. Norms are expected in true units."""

    judges_scaled = False

    def __init__(self, rule: SteadyRule) -> None:
        self.rule = rule
        self.logs: deque[float] = deque(maxlen=rule.window)

    def judge(self, norm: float, loss_is_finite: bool = True) -> Judgement:
        log_threshold, log_median = self.log_threshold()
        threshold = _exp(log_threshold)
        middle = None if log_median is None else _exp(log_median)
        if math.isnan(norm):
            return Judgement(True, Reason.NAN, threshold, middle)
        if math.isinf(norm):
            return Judgement(True, Reason.INF, threshold, middle)
        if not loss_is_finite:
            return Judgement(True, Reason.LOSS, threshold, middle)
        # A norm of exactly zero has no logarithm and moves nothing: it is let through and leaves no trace.
        if norm > 0:
            log_norm = math.log(norm)
            if log_norm > log_threshold:
                return Judgement(True, Reason.SPIKE, threshold, middle)
            self.logs.append(log_norm)
        return Judgement(False, Reason.ACCEPTED, threshold, middle)

    def log_threshold(self) -> tuple[float, float | None]:
        """The logarithm of the threshold, and of the median, from what is in the window now."""
        if len(self.logs) < self.rule.active_from:
            return math.inf, None
        middle = median(self.logs)
        deviation = MAD_TO_DEVIATION * median([abs(value - middle) for value in self.logs])
        return middle + max(self.rule.deviations * deviation, math.log(self.rule.least_ratio)), middle

    def adapt(self, recent: Sequence[float]) -> None:
        self.logs = deque((math.log(norm) for norm in recent if norm > 0), maxlen=self.rule.window)

    def state_dict(self) -> dict[str, Any]:
        return {"logs": list(self.logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.logs = deque(state["logs"], maxlen=self.rule.window)


class OffPolicy:
    """``OffRule``: accepts everything and remembers nothing."""

    judges_scaled = False

    def judge(self, norm: float, loss_is_finite: bool = True) -> Judgement:
        return Judgement(False, Reason.ACCEPTED, math.inf)

    def adapt(self, recent: Sequence[float]) -> None:
        """Nothing is ever refused, so there is nothing to adapt to."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no state."""


def make_policy(rule: Rule) -> Policy:
    """The policy that applies ``rule``, with an empty memory."""
    if isinstance(rule, WindowRule):
        return WindowPolicy(rule)
    if isinstance(rule, SteadyRule):
        return SteadyPolicy(rule)
    return OffPolicy()


def median(values: Sequence[float] | deque[float]) -> float:
    """The middle value, or the mean of the two middle ones. ``values`` must not be empty nor hold NaN."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and population standard deviation in float64, with the summation order of NumPy's ``mean`` and ``std``.

    Thresholds of recorded runs were computed in that order; another one differs in the last digits that the log
    prints. A non-finite value makes the deviation NaN.
    """
    count = len(values)
    mean = pairwise_sum(values, 0, count) / count
    away = [value - mean for value in values]
    squares = list(map(mul, away, away))
    return mean, math.sqrt(pairwise_sum(squares, 0, count) / count)


def pairwise_sum(values: list[float], start: int, count: int) -> float:
    """Sum ``count`` values from ``start``: blocks of up to 128 in eight running sums, larger ranges by halves."""
    if count < 8:
        return _running_sum(values[start : start + count])
    if count <= 128:
        whole = count - count % 8
        lanes = [_running_sum(values[start + lane : start + whole : 8]) for lane in range(8)]
        total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
        for value in values[start + whole : start + count]:
            total += value
        return total
    half = count // 2
    half -= half % 8
    return pairwise_sum(values, start, half) + pairwise_sum(values, start + half, count - half)


def _running_sum(values: list[float]) -> float:
    # Not the built-in sum: since Python 3.12 it compensates, which would change the last digit.
    return reduce(add, values)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
