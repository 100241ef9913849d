"""Grids of pictures."""

from __future__ import annotations

import pytest
from PIL import Image

from maulstick.pictures.grid import labelled_grid

RED, GREEN, BLUE = (200, 0, 0), (0, 200, 0), (0, 0, 200)


def _square(colour: tuple[int, int, int], width: int = 40, height: int = 40) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def _box(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """The rectangle that a colour fills."""
    columns = sheet.load()
    places = [(x, y) for x in range(sheet.width) for y in range(sheet.height) if columns[x, y] == colour]
    assert places
    xs, ys = [x for x, _ in places], [y for _, y in places]
    assert len(places) == (max(xs) - min(xs) + 1) * (max(ys) - min(ys) + 1)
    return min(xs), min(ys), max(xs) + 1, max(ys) + 1


def test_pictures_stand_in_their_rows_and_columns_untouched() -> None:
    sheet = labelled_grid([[_square(RED), _square(GREEN)], [_square(BLUE)]])
    red, green, blue = (_box(sheet, colour) for colour in (RED, GREEN, BLUE))
    assert all((box[2] - box[0], box[3] - box[1]) == (40, 40) for box in (red, green, blue))
    assert red[1] == green[1] < blue[1]
    assert red[0] == blue[0] < green[0]
    assert sheet.size == (2 * 46 + 6, 2 * 46 + 6)


def test_labels_get_room_beside_and_above_and_hide_nothing() -> None:
    plain = labelled_grid([[_square(RED)], [_square(BLUE)]])
    labelled = labelled_grid(
        [[_square(RED)], [_square(BLUE)]], row_labels=["a red square", "blue"], column_labels=["seed 1"], title="Before"
    )
    red = _box(labelled, RED)
    assert red[0] >= 110
    assert red[1] > 20
    assert (labelled.width, labelled.height) > (plain.width, plain.height)
    left_of_pictures = labelled.crop((0, red[1], red[0] - 8, red[3]))
    above_pictures = labelled.crop((red[0], 0, red[2], red[1] - 8))
    assert min(left_of_pictures.convert("L").tobytes()) < 100
    assert min(above_pictures.convert("L").tobytes()) < 100


def test_long_and_foreign_labels_fit() -> None:
    labels = ["word " * 60, "x" * 400]
    sheet = labelled_grid([[_square(RED)], [_square(BLUE)]], row_labels=labels, column_labels=["ネコ 猫 " * 20])
    assert _box(sheet, RED)
    assert _box(sheet, BLUE)


def test_pictures_are_scaled_into_cells_with_their_proportions() -> None:
    sheet = labelled_grid([[_square(RED, 20, 10), _square(BLUE, 400, 400)]], cell=100)
    red, blue = _box(sheet, RED), _box(sheet, BLUE)
    assert (red[2] - red[0], red[3] - red[1]) == (100, 50)
    assert (blue[2] - blue[0], blue[3] - blue[1]) == (100, 100)
    assert red[1] - blue[1] == 25


def test_other_modes_are_converted() -> None:
    sheet = labelled_grid([[Image.new("L", (8, 8), 40), Image.new("RGBA", (8, 8), (*GREEN, 255))]])
    assert _box(sheet, GREEN)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one picture"):
        labelled_grid([[]])
    with pytest.raises(ValueError, match="2 row labels for 1 rows"):
        labelled_grid([[_square(RED)]], row_labels=["a", "b"])
    with pytest.raises(ValueError, match="2 column labels for 1 columns"):
        labelled_grid([[_square(RED)]], column_labels=["a", "b"])
