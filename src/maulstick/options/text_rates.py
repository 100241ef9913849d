"""Learning rates of the text encoders: one for all, a list, or each by its number."""

from __future__ import annotations

from maulstick.errors import OptionError
from maulstick.options.schema import OptimizerOptions

MOST_TEXT_ENCODERS = 2
BY_NUMBER = ("text_encoder_lr1", "text_encoder_lr2")


def check_text_encoder_rates(optimizer: OptimizerOptions) -> None:
    """Refuse what no model could follow.

    Raises:
        OptionError: too many rates, or rates said in two ways.
    """
    given = optimizer.text_encoder_lr or []
    if len(given) > MOST_TEXT_ENCODERS:
        raise OptionError(
            f"text_encoder_lr has {len(given)} values, but no model here has more than {MOST_TEXT_ENCODERS} text "
            "encoders. Give one value, or for SDXL and SD3 two."
        )
    numbered = [name for name in BY_NUMBER if getattr(optimizer, name) is not None]
    if given and numbered:
        raise OptionError(
            f"text_encoder_lr and {numbered[0]} contradict each other: both say how fast a text encoder learns. Give "
            "text_encoder_lr two values, or only text_encoder_lr1 and text_encoder_lr2."
        )


def text_encoder_rates(optimizer: OptimizerOptions, count: int, model: str = "this model") -> list[float]:
    """Return the learning rate of each of ``count`` text encoders; one value of ``text_encoder_lr`` is for all.

    Raises:
        OptionError: there is a rate for an encoder that ``model`` does not have.
    """
    given = optimizer.text_encoder_lr or []
    numbered = [getattr(optimizer, name) for name in BY_NUMBER]
    beyond = [name for name, rate in zip(BY_NUMBER[count:], numbered[count:], strict=True) if rate is not None]
    if len(given) > count or beyond:
        said = f"text_encoder_lr has {len(given)} values" if len(given) > count else f"{beyond[0]} is given"
        encoders = "one text encoder" if count == 1 else f"{count} text encoders"
        raise OptionError(f"{said}, but {model} has {encoders}. Give text_encoder_lr one value.")
    if given:
        return [given[min(place, len(given) - 1)] for place in range(count)]
    own = [*numbered, *[None] * count][:count]
    return [optimizer.learning_rate if rate is None else rate for rate in own]


def highest_text_encoder_rate(optimizer: OptimizerOptions) -> float:
    """Return the highest rate that a text encoder of some model would get."""
    return max(text_encoder_rates(optimizer, MOST_TEXT_ENCODERS))


def states_all_text_encoder_rates(optimizer: OptimizerOptions) -> bool:
    """Return whether no text encoder takes its rate from ``learning_rate``."""
    return optimizer.text_encoder_lr is not None or None not in [getattr(optimizer, name) for name in BY_NUMBER]
