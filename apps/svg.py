"""Scalable vector graphics, as text: just what the charts of a profile need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import floor, log10


class Drawing:
    """Elements in the order in which they are drawn. width, height: in user units."""

    def __init__(self, width: float, height: float, title: str, name: str) -> None:
        """title: what it shows, read out in place of it. name: unique in the page."""
        self._width, self._height, self._title, self._name = width, height, title, name
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, **more: str) -> None:
        """A box; kind: its class. more: attributes, and `tip`, shown to a pointer."""
        tip = more.pop("tip", "")
        box = {"x": _n(x), "y": _n(y), "width": _n(max(0.0, width)), "height": _n(height)}
        self._add("rect", {**box, "class": kind, **more}, tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        self._add("line", {"x1": _n(x1), "y1": _n(y1), "x2": _n(x2), "y2": _n(y2), "class": kind})

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Straight lines from point to point."""
        if points:
            steps = " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
            self._add("path", {"d": f"M{steps}", "class": kind})

    def dot(self, x: float, y: float, kind: str, tip: str = "") -> None:
        """A small disc."""
        self._add("circle", {"cx": _n(x), "cy": _n(y), "r": "4", "class": kind}, tip)

    def text(self, x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text; y: of its base."""
        place = {"x": _n(x), "y": _n(y), "class": kind, "text-anchor": anchor}
        self._parts.append(f"<text{_attributes(place)}>{escape(content)}</text>")

    def raw(self, element: str) -> None:
        """An element, or its beginning or end, as it is."""
        self._parts.append(element)

    def __str__(self) -> str:
        name = f"{self._name}-title"
        return (
            f'<svg id="{self._name}" viewBox="0 0 {_n(self._width)} {_n(self._height)}" '
            f'role="img" aria-labelledby="{name}"><title id="{name}">{escape(self._title)}</title>'
            f"{''.join(self._parts)}</svg>"
        )

    def _add(self, tag: str, attributes: dict[str, str], tip: str = "") -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(f"<{tag}{_attributes(attributes)}>{inside}</{tag}>")


def _attributes(values: dict[str, str]) -> str:
    return "".join(f' {name}="{escape(value)}"' for name, value in values.items() if value)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def ticks(most: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to `most` or just beyond."""
    if most <= 0:
        return [0.0, 1.0]
    step = nice_step(most / about)
    count = floor(most / step + 0.999999)
    return [step * index for index in range(count + 1)]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, `rough` or more."""
    power: float = 10.0 ** floor(log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * (1 - 1e-9))


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A list of names, each with a sample of its class."""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 14 14" aria-hidden="true">'
        f'<rect class="{kind}" x="1" y="1" width="12" height="12"/></svg>{escape(name)}</li>'
        for name, kind in entries
    )
    return f'<ul class="legend">{items}</ul>'
