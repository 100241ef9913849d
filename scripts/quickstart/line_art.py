"""Random flat shapes with dark outlines, so that a decoder learns to draw outlines without seeing any artist's outlined style."""

import math
import random

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64
DRAWN_AT = 4 * SIZE
WHITE = (255, 255, 255)


def random_colour(rng: random.Random) -> tuple[int, int, int]:
    if rng.random() < 0.2:
        return (rng.choice((255, 208, 155, 63)),) * 3
    return tuple(rng.randrange(256) for _ in range(3))


def random_blob(rng: random.Random) -> list[tuple[float, float]]:
    """A closed curve around a random centre: a circle whose radius has a few waves, or corners when sampled coarsely."""
    centre = [rng.uniform(0.25, 0.75) * DRAWN_AT for _ in range(2)]
    radius = rng.uniform(0.06, 0.42) * DRAWN_AT
    flattening = rng.uniform(0.4, 1.0)
    turn = rng.uniform(0, math.pi)
    waves = [(count, rng.uniform(0, 0.35 / count), rng.uniform(0, 6.3)) for count in (1, 2, 3, 5) if rng.random() < 0.5]
    points = []
    samples = rng.choice((3, 4, 5, 6, 72, 72, 72))
    for index in range(samples):
        angle = 2 * math.pi * index / samples
        reach = radius * (1 + sum(size * math.sin(count * angle + phase) for count, size, phase in waves))
        x, y = reach * math.cos(angle), flattening * reach * math.sin(angle)
        points.append(
            (centre[0] + x * math.cos(turn) - y * math.sin(turn), centre[1] + x * math.sin(turn) + y * math.cos(turn))
        )
    return points


def draw_stroke(
    canvas: ImageDraw.ImageDraw, points: list[tuple[float, float]], colour: tuple[int, int, int], width: int
) -> None:
    canvas.line(points, fill=colour, width=width, joint="curve")
    for x, y in (points[0], points[-1]):
        canvas.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=colour)


def random_line_art(rng: random.Random) -> np.ndarray:
    """uint8 [64, 64, 3]: shapes, loose strokes and dots, all outlined alike."""
    picture = Image.new("RGB", (DRAWN_AT, DRAWN_AT), WHITE if rng.random() < 0.9 else random_colour(rng))
    canvas = ImageDraw.Draw(picture)
    ink = (0, 0, 0) if rng.random() < 0.8 else random_colour(rng)
    width = round(rng.uniform(1.3, 2.6) * DRAWN_AT / SIZE)
    for _ in range(rng.randint(1, 6)):
        points = random_blob(rng)
        if rng.random() < 0.85:
            canvas.polygon(points, fill=WHITE if rng.random() < 0.15 else random_colour(rng))
        if rng.random() < 0.9:
            draw_stroke(canvas, [*points, points[0], points[1]], ink, width)
    for _ in range(rng.randint(0, 4)):
        points = random_blob(rng)
        start = rng.randrange(len(points) - 1)
        draw_stroke(canvas, points[start : start + max(2, len(points) // 3)], ink, width)
    for _ in range(rng.randint(0, 3)):
        x, y, radius = rng.uniform(60, 200), rng.uniform(60, 200), rng.uniform(4, 14)
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    return np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS))
