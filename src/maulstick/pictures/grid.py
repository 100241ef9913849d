"""Several pictures as one, in rows and columns with labels."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

_BACKGROUND = (255, 255, 255)
_INK = (32, 32, 32)
_FRAME = (225, 225, 225)
_GAP = 6
_MAX_LABEL_LINES = 4


def labelled_grid(
    rows: Sequence[Sequence[Image.Image]],
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    cell: int | None = None,
    title: str = "",
) -> Image.Image:
    """Return one RGB picture of rows of pictures.

    Args:
        rows: pictures; rows may differ in length, and pictures in size (each is centred in its cell).
        row_labels: a text for each row, left of it; none without.
        column_labels: a text for each column, above it; none without.
        cell: side of a cell in pixels, pictures are scaled into it with their proportions kept; without it a cell is
            as large as the largest picture.
        title: a line above everything.

    Raises:
        ValueError: there is no picture, or the number of labels differs from that of rows or columns.
    """
    columns = max((len(row) for row in rows), default=0)
    if columns == 0:
        raise ValueError("a grid needs at least one picture")
    if row_labels and len(row_labels) != len(rows):
        raise ValueError(f"{len(row_labels)} row labels for {len(rows)} rows")
    if column_labels and len(column_labels) != columns:
        raise ValueError(f"{len(column_labels)} column labels for {columns} columns")
    pictures = [[_scaled(picture, cell) for picture in row] for row in rows]
    width = max(picture.width for row in pictures for picture in row)
    height = max(picture.height for row in pictures for picture in row)
    font = _font(max(11, min(20, width // 12)))
    left = _row_label_width(row_labels, width)
    heads = [_wrapped(label, width, font) for label in column_labels]
    top_lines = max((len(lines) for lines in heads), default=0)
    line_height = _line_height(font)
    title_height = line_height + _GAP if title else 0
    top = title_height + (top_lines * line_height + _GAP if top_lines else 0)
    size = (left + columns * (width + _GAP) + _GAP, top + len(rows) * (height + _GAP) + _GAP)
    sheet = Image.new("RGB", size, _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((_GAP, _GAP // 2), title, fill=_INK, font=font)
    for column, lines in enumerate(heads):
        _write(draw, lines, (left + _GAP + column * (width + _GAP), title_height + _GAP // 2), font)
    for number, row in enumerate(pictures):
        y = top + _GAP + number * (height + _GAP)
        if row_labels:
            _write(draw, _wrapped(row_labels[number], left - _GAP, font), (_GAP, y), font)
        for column, picture in enumerate(row):
            x = left + _GAP + column * (width + _GAP)
            corner = (x + (width - picture.width) // 2, y + (height - picture.height) // 2)
            draw.rectangle((x - 1, y - 1, x + width, y + height), outline=_FRAME)
            sheet.paste(picture, corner)
    return sheet


def _scaled(picture: Image.Image, cell: int | None) -> Image.Image:
    picture = picture.convert("RGB")
    if cell is None or max(picture.size) == cell:
        return picture
    factor = cell / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    # Small pictures are shown with their pixels as they are.
    return picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _line_height(font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return round(font.getbbox("Ågp")[3]) + 2


def _row_label_width(labels: Sequence[str], cell: int) -> int:
    return max(110, min(220, cell)) if any(labels) else 0


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Break at spaces into lines that fit, four at most; what does not fit ends in an ellipsis."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    cut = lines[:_MAX_LABEL_LINES]
    if len(lines) > _MAX_LABEL_LINES:
        cut[-1] += "…"
    return [_shortened(line, width, font) for line in cut]


def _shortened(line: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(line) <= width:
        return line
    line = line.rstrip("…")
    while line and font.getlength(f"{line}…") > width:
        line = line[:-1]
    return f"{line}…"


def _write(
    draw: ImageDraw.ImageDraw,
    lines: Sequence[str],
    corner: tuple[int, int],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    for number, line in enumerate(lines):
        draw.text((corner[0], corner[1] + number * _line_height(font)), line, fill=_INK, font=font)
