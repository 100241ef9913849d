"""Learning-rate weights along a row of blocks, written as a curve: ``sine``, ``cosine+0.2``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from maulstick.errors import OptionError, nearest_name_hint

# Each takes a block's distance from the first one and from the last, both as shares of the whole row. The falling
# curves are the rising ones read backwards, so that their end is exactly 0, as in sd-scripts.
_CURVES: Mapping[str, Callable[[float, float], float]] = {
    "sine": lambda from_first, from_last: math.sin((math.pi / 2) * from_first),
    "cosine": lambda from_first, from_last: math.sin((math.pi / 2) * from_last),
    "linear": lambda from_first, from_last: from_first,
    "reverse_linear": lambda from_first, from_last: from_last,
    "zeros": lambda from_first, from_last: 0.0,
}
CURVES = tuple(_CURVES)
CURVE_FORM = f"a curve ({', '.join(CURVES)}; each with +BASE, such as sine+0.2)"


def curve_weights(text: str, count: int, option: str) -> list[float]:
    """Return the ``count`` weights that a curve gives, such as ``"cosine"`` or ``"linear+0.5"``.

    ``sine`` and ``linear`` rise from 0 to 1, ``cosine`` and ``reverse_linear`` fall from 1 to 0, ``zeros`` is 0; what
    follows the plus is added to every weight. Formulas: sd-scripts' ``networks.lora``.

    Raises:
        OptionError: the curve is unknown, the base is no number, or there is one block only.
    """
    name, plus, base_text = (part.strip() for part in text.partition("+"))
    if name not in _CURVES:
        hint = nearest_name_hint(name, CURVES)
        raise OptionError(
            f"{option} = {text}: '{name}' is neither a number nor a curve.{hint} Expected {count} numbers with commas "
            f"between them, one number for all, or {CURVE_FORM}."
        )
    base = 0.0
    if plus:
        try:
            base = float(base_text)
        except ValueError:
            base = math.nan
        if not math.isfinite(base):
            raise OptionError(f"{option} = {text}: expected a number behind the plus, such as {name}+0.2.")
    if count < 2:
        raise OptionError(f"{option} = {text}: a curve needs at least two blocks. Give a number.")
    last = count - 1
    return [_CURVES[name](place / last, (last - place) / last) + base for place in range(count)]
