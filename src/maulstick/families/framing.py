"""What a picture was before it was cut to size. Pure Python: the data index needs it, and must start without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framing:
    """How a trained picture was cut out of its image. All sizes are (width, height) in pixels.

    Attributes:
        original: size of the image as it lies on disk.
        crop: (left, top): what was cut away there after resizing, as the (perhaps mirrored) picture shows it.
        target: size of the picture.
    """

    original: tuple[int, int]
    crop: tuple[int, int]
    target: tuple[int, int]

    @classmethod
    def whole(cls, width: int, height: int) -> Framing:
        """An image that is used as it is, with nothing cut away."""
        return cls((width, height), (0, 0), (width, height))
