"""Learning-rate factors as pure functions of the update window; the loop multiplies each group's rate by them.

Window ``n`` counts from 0; skipped windows count too, so that a decay always reaches its end. There is no scheduler
object: nothing has to be stepped, saved or told how many processes there are. Past the last window every factor keeps
its final value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from maulstick.errors import OptionError
from maulstick.options.schedules import parse_step_rules, schedule_facts, schedule_name
from maulstick.options.schema import TrainOptions
from maulstick.options.text_rates import BY_NUMBER, text_encoder_rates
from maulstick.options.values import parse_arguments, parse_steps

Factor = Callable[[int], float]
Curve = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """A schedule with its lengths in update windows.

    Attributes:
        name: one of ``SHAPES``, or the class that ``lr_scheduler_type`` names where ``is_custom``.
        skip_zero: start the warm-up at ``1 / warmup_steps`` instead of 0.
        arguments: ``lr_scheduler_args`` as they were given.
        rates: the learning rates of what is trained, highest first. Rates in ``arguments`` are compared with them.
    """

    name: str
    total_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    skip_zero: bool = False
    num_cycles: int = 1
    power: float = 1.0
    min_lr_ratio: float | None = None
    timescale: int | None = None
    arguments: tuple[str, ...] = ()
    rates: tuple[float, ...] = (1.0,)
    is_custom: bool = False

    @property
    def decay_start(self) -> int | None:
        """The window in which the decay begins; None where there is none or only the class itself knows."""
        if self.is_custom or self.name in ("constant", "constant_with_warmup", "piecewise_constant"):
            return None
        if self.name == "warmup_stable_decay":
            return self.total_steps - self.decay_steps
        return self.warmup_steps

    def progress(self, window: int) -> float:
        """Return how far the training after the warm-up is: 0 at its beginning, 1 at its end."""
        return (window - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)


def trained_rates(options: TrainOptions) -> dict[str, float]:
    """Return the learning rates of UNet and text encoders without weights by block; what is not trained is left out.

    The model is not known here: it is taken to have two text encoders where rates of two are given.
    """
    network, optimizer = options.network, options.optimizer
    rates: dict[str, float] = {}
    if not network.network_train_text_encoder_only:
        rates["unet"] = optimizer.learning_rate if optimizer.unet_lr is None else optimizer.unet_lr
    if not network.network_train_unet_only:
        by_number = any(getattr(optimizer, name) is not None for name in BY_NUMBER)
        count = 2 if by_number or len(optimizer.text_encoder_lr or ()) > 1 else 1
        names = ["text encoder"] if count == 1 else ["text encoder 1", "text encoder 2"]
        rates |= dict(zip(names, text_encoder_rates(optimizer, count), strict=True))
    return {name: rate for name, rate in rates.items() if rate > 0}


def schedule_settings(options: TrainOptions, total_steps: int) -> ScheduleSettings:
    """Work out the schedule of a training of ``total_steps`` windows.

    Raises:
        OptionError: there is no such schedule, or its parts don't fit into the training.
    """
    schedule = options.schedule
    facts, name = schedule_facts(schedule), schedule_name(schedule)
    warmup = parse_steps(schedule.lr_warmup_steps, total_steps)
    decay = 0
    if "lr_decay_steps" in facts.uses:
        decay = parse_steps(schedule.lr_decay_steps, total_steps, "lr_decay_steps")
    if warmup >= total_steps > 0:
        raise OptionError(
            f"lr_warmup_steps is {warmup}, but training has only {total_steps} steps: "
            "the full learning rate would never be reached."
        )
    if warmup + decay > total_steps:
        raise OptionError(
            f"lr_warmup_steps is {warmup} and lr_decay_steps {decay}, together more than the {total_steps} steps of "
            "training. Make one of them shorter."
        )
    settings = ScheduleSettings(
        name=name,
        total_steps=total_steps,
        warmup_steps=warmup,
        decay_steps=decay,
        skip_zero=schedule.lr_warmup_skip_zero,
        num_cycles=schedule.lr_scheduler_num_cycles,
        power=schedule.lr_scheduler_power,
        min_lr_ratio=schedule.lr_scheduler_min_lr_ratio,
        timescale=schedule.lr_scheduler_timescale,
        arguments=tuple(schedule.lr_scheduler_args),
        rates=tuple(sorted(set(trained_rates(options).values()), reverse=True)) or (1.0,),
        is_custom=schedule.lr_scheduler_type is not None,
    )
    if name == "polynomial" and _lr_end(settings) >= settings.rates[0]:
        raise OptionError(
            f"lr_scheduler = polynomial ends at lr_end = {_lr_end(settings):g}, which is not below the learning rate "
            f"{settings.rates[0]:g}. Give a lower one with lr_scheduler_args = lr_end=0."
        )
    return settings


def learning_rate_factor(settings: ScheduleSettings) -> Factor:
    """Return the factor of update window ``n``.

    The warm-up is the textbook form ``n / warmup_steps``: the first window has factor 0 (``skip_zero`` makes it
    ``(n + 1) / warmup_steps``; the windows after the warm-up are the same either way). After it, ``linear`` is
    ``(total - n) / (total - warmup)``.

    Raises:
        OptionError: a class named by ``lr_scheduler_type`` cannot be used.
    """
    if settings.is_custom:
        from maulstick.train.custom_schedule import recorded_factor

        return recorded_factor(settings)
    course, ramp = SHAPES[settings.name](settings), _ramp(settings)

    def factor(window: int) -> float:
        window = min(window, settings.total_steps)
        if window < settings.warmup_steps:
            return ramp((window + settings.skip_zero) / settings.warmup_steps)
        return course(window)

    return factor


# ---------------------------------------------------------------------------------------- shapes after the warm-up


def _constant(settings: ScheduleSettings) -> Factor:
    return lambda window: 1.0


def _linear(settings: ScheduleSettings) -> Factor:
    decay = max(1, settings.total_steps - settings.warmup_steps)
    return lambda window: (settings.total_steps - window) / decay


def _cosine(settings: ScheduleSettings) -> Factor:
    waves = parse_arguments(settings.arguments, "lr_scheduler_args").get("num_cycles", 0.5)
    return lambda window: _wave(waves * settings.progress(window))


def _cosine_with_restarts(settings: ScheduleSettings) -> Factor:
    def course(window: int) -> float:
        if window >= settings.total_steps:
            return 0.0
        # Half a wave per cycle, each from the full rate down to 0.
        return _wave(0.5 * (settings.num_cycles * settings.progress(window) % 1.0))

    return course


def _polynomial(settings: ScheduleSettings) -> Factor:
    end = _lr_end(settings) / settings.rates[0]
    return lambda window: end + (1.0 - end) * (1.0 - settings.progress(window)) ** settings.power


def _lr_end(settings: ScheduleSettings) -> float:
    return float(parse_arguments(settings.arguments, "lr_scheduler_args").get("lr_end", 1e-7))


def _inverse_sqrt(settings: ScheduleSettings) -> Factor:
    """``sqrt(timescale / (n - warmup + timescale))`` (Zhai et al. 2022, "Scaling Vision Transformers")."""
    timescale = settings.timescale or settings.warmup_steps or 10_000
    return lambda window: math.sqrt(timescale / (window - settings.warmup_steps + timescale))


def _cosine_with_min_lr(settings: ScheduleSettings) -> Factor:
    above = _above(settings)
    # sd-scripts halves the number of cycles, so that 1 is the plain cosine from the highest to the lowest rate.
    return lambda window: above(_wave(settings.num_cycles / 2 * settings.progress(window)))


def _warmup_stable_decay(settings: ScheduleSettings) -> Factor:
    kind = parse_arguments(settings.arguments, "lr_scheduler_args").get("decay_type", "cosine")
    above = _above(settings)
    falls: dict[str, Curve] = {
        "linear": lambda part: 1.0 - part,
        "cosine": lambda part: _wave(settings.num_cycles / 2 * part),
        "1-sqrt": lambda part: 1.0 - math.sqrt(part),
    }
    start = settings.total_steps - settings.decay_steps

    def course(window: int) -> float:
        if window < start:
            return 1.0
        if window >= settings.total_steps:
            return above(0.0)
        return above(falls[kind]((window - start) / settings.decay_steps))

    return course


def _piecewise_constant(settings: ScheduleSettings) -> Factor:
    rules = parse_step_rules(parse_arguments(settings.arguments, "lr_scheduler_args")["step_rules"])
    return lambda window: next(factor for end, factor in rules if window < end)


def _rex(settings: ScheduleSettings) -> Factor:
    """``(1 - p) / (0.1 + 0.9 (1 - p))``: OneTrainer's form of Chen et al. 2021, "REX: Revisiting Budgeted Training"."""
    above = _above(settings)

    def course(window: int) -> float:
        left = 1.0 - settings.progress(window)
        return above(left / (0.1 + 0.9 * left))

    return course


SHAPES: dict[str, Callable[[ScheduleSettings], Factor]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
    "piecewise_constant": _piecewise_constant,
    "rex": _rex,
}
"""Name -> the factor of windows from the end of the warm-up to ``total_steps``."""


def _ramp(settings: ScheduleSettings) -> Curve:
    """Return the warm-up over progress 0 to 1; that of ``warmup_stable_decay`` begins at the lowest rate."""
    if settings.name != "warmup_stable_decay":
        return lambda part: part
    kind = parse_arguments(settings.arguments, "lr_scheduler_args").get("warmup_type", "linear")
    above = _above(settings)
    rises: dict[str, Curve] = {
        "linear": lambda part: part,
        "cosine": lambda part: 1.0 - _wave(0.5 * part),
        "1-sqrt": lambda part: 1.0 - math.sqrt(1.0 - part),
    }
    return lambda part: above(rises[kind](part))


def _wave(turns: float) -> float:
    """A cosine between 1 (at 0 turns) and 0 (at half a turn)."""
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * turns))


def _above(settings: ScheduleSettings) -> Curve:
    """Return what squeezes a factor of 0 to 1 between the lowest rate and 1."""
    lowest = settings.min_lr_ratio or 0.0
    return lambda factor: lowest + (1.0 - lowest) * factor
