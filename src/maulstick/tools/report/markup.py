"""HTML from plain values. Every text is escaped; only what this module made itself passes as ``Markup``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


class Markup(str):
    """A piece of finished HTML."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """Return any value as escaped text; finished HTML stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def element(tag: str, *content: Any, **attributes: Any) -> Markup:
    """Return an element. ``class_`` is ``class``, underscores become dashes; None leaves an attribute out."""
    return Markup(f"<{tag}{_written(attributes)}>{''.join(map(text, content))}</{tag}>")


def image(**attributes: Any) -> Markup:
    """Return an ``img``, which has no content and no end."""
    return Markup(f"<img{_written(attributes)}>")


def _written(attributes: Mapping[str, Any]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )


def joined(parts: Iterable[Any]) -> Markup:
    """Return the parts one after the other."""
    return Markup("".join(map(text, parts)))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], *, class_: str = "") -> Markup:
    """Return a table that scrolls sideways where it is too wide; the first cell of a row is its heading."""
    top = element("thead", element("tr", *(element("th", name, scope="col") for name in head)))
    body = element(
        "tbody",
        *(
            element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
            for row in rows
        ),
    )
    made = element("table", element("caption", caption), top, body, class_=class_ or None)
    return element("div", made, class_="scroll", tabindex=0, role="group", aria_label=caption)


def script_json(value: Any) -> Markup:
    """Return a value as JSON that may stand inside a ``<script>`` element, whatever texts are in it."""
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(written)
