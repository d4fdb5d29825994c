"""Numbers -> SVG of bars or lines, by the standard library alone: panels side by side, one axis of values for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import Literal

COLOURS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Okabe and Ito's, which readers with any colour vision can tell apart."""
LEFT, TOP, BOTTOM, GAP = 64, 74, 52, 18
PANEL_HEIGHT = 240
LETTER = 6.6
"""Width of a letter, about."""


@dataclass(frozen=True, slots=True)
class Series:
    """One bar or point at each place of a panel's x axis; None: there is none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram."""

    title: str
    places: tuple[str, ...]
    """Labels of the x axis, evenly spaced."""
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A row of panels with one legend.

    Example: ``Chart("Step time", "tokens", "seconds", (Panel("8 ranks", ("16k",), (Series("ring", (0.3,)),)),))``
    """

    title: str
    x_name: str
    y_name: str
    """With its unit."""
    panels: tuple[Panel, ...]
    form: Literal["bars", "lines"] = "bars"
    """Bars stand on a linear axis from 0; lines are on a logarithmic one, so their values are above 0."""
    panel_width: int = 260

    @property
    def names(self) -> tuple[str, ...]:
        """Series of all panels, in the order of their first appearance."""
        return tuple(dict.fromkeys(one.name for panel in self.panels for one in panel.series))

    @property
    def values(self) -> list[float]:
        return [
            value
            for panel in self.panels
            for one in panel.series
            for value in one.values
            if value is not None
        ]


def svg(chart: Chart) -> str:
    """The chart as a document of its own.

    Raises:
        ValueError: a chart without values, or with values that its axis cannot hold.
    """
    axis = _axis(chart)
    width = LEFT + len(chart.panels) * (chart.panel_width + GAP)
    height = TOP + PANEL_HEIGHT + BOTTOM
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(chart.names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 18, chart.title, size=14),
        *_legend(colour, width),
        f'<text transform="translate(14 {TOP + PANEL_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_name)}</text>",
    ]
    for number, panel in enumerate(chart.panels):
        left = LEFT + number * (chart.panel_width + GAP)
        parts += _frame(chart, panel, left, axis, has_labels=not number)
        draw = _bars if chart.form == "bars" else _lines
        parts += draw(panel, left, chart.panel_width, axis, colour)
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Axis:
    """The axis of values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_logarithmic: bool

    def y(self, value: float) -> float:
        if self.is_logarithmic:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return TOP + PANEL_HEIGHT * (1 - part)


def _axis(chart: Chart) -> _Axis:
    values = chart.values
    if not values:
        raise ValueError(f"chart {chart.title!r} has no values; nothing to draw")
    least, most = min(values), max(values)
    if chart.form == "lines":
        if least <= 0:
            raise ValueError(f"chart {chart.title!r}: {least} has no place on a logarithmic axis; draw bars")
        first, last = floor(log10(least)), max(ceil(log10(most)), floor(log10(least)) + 1)
        return _Axis(10.0**first, 10.0**last, tuple(10.0**i for i in range(first, last + 1)), True)
    if least < 0:
        raise ValueError(f"chart {chart.title!r}: bars begin at 0, {least} is below it")
    step = 10.0 ** floor(log10(most or 1.0))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if most <= 6 * step * part)
    count = max(1, ceil(most / step))
    return _Axis(0.0, step * count, tuple(step * i for i in range(count + 1)), False)


def _frame(chart: Chart, panel: Panel, left: float, axis: _Axis, *, has_labels: bool) -> list[str]:
    """Grid, ticks and names of one panel."""
    right, bottom = left + chart.panel_width, TOP + PANEL_HEIGHT
    parts = [_text((left + right) / 2, TOP - 8, panel.title, anchor="middle")]
    for tick in axis.ticks:
        y = axis.y(tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        if has_labels:
            parts.append(_text(left - 4, y + 4, f"{tick:g}", anchor="end"))
    step = chart.panel_width / len(panel.places)
    # Labels that would run into each other take turns on two lines.
    is_tight = max(map(len, panel.places)) * LETTER > step
    for i, place in enumerate(panel.places):
        x, y = left + step * (i + 0.5), bottom + 15 + (12 if is_tight and i % 2 else 0)
        parts.append(_text(x, y, place, anchor="middle"))
    parts.append(_text((left + right) / 2, bottom + 44, chart.x_name, anchor="middle"))
    parts.append(
        f'<rect x="{left}" y="{TOP}" width="{chart.panel_width}" height="{PANEL_HEIGHT}" fill="none" '
        'stroke="#444444"/>'
    )
    return parts


def _bars(panel: Panel, left: float, width: float, axis: _Axis, colour: dict[str, str]) -> list[str]:
    step = width / len(panel.places)
    bar = 0.84 * step / len(panel.series)
    parts = []
    for number, one in enumerate(panel.series):
        for i, value in enumerate(one.values):
            if value is None:
                continue
            x, y = left + step * (i + 0.08) + number * bar, axis.y(value)
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{bar:.2f}" height="{TOP + PANEL_HEIGHT - y:.2f}" '
                f'fill="{colour[one.name]}">{_tip(panel, one, i)}</rect>'
            )
    return parts


def _lines(panel: Panel, left: float, width: float, axis: _Axis, colour: dict[str, str]) -> list[str]:
    step = width / len(panel.places)
    parts = []
    for one in panel.series:
        stroke = colour[one.name]
        points = [
            None if value is None else (left + step * (i + 0.5), axis.y(value))
            for i, value in enumerate(one.values)
        ]
        # Only neighbours are joined: a line over a place without a value would show values that nobody has.
        for here, there in pairwise(points):
            if here and there:
                parts.append(
                    f'<line x1="{here[0]:.2f}" y1="{here[1]:.2f}" x2="{there[0]:.2f}" y2="{there[1]:.2f}" '
                    f'stroke="{stroke}" stroke-width="1.8"/>'
                )
        parts += [
            f'<circle cx="{at[0]:.2f}" cy="{at[1]:.2f}" r="3" fill="{stroke}">{_tip(panel, one, i)}</circle>'
            for i, at in enumerate(points)
            if at
        ]
    return parts


def _tip(panel: Panel, one: Series, place: int) -> str:
    return f"<title>{escape(f'{one.name}, {panel.title}, {panel.places[place]}: {one.values[place]:.4g}')}</title>"


def _legend(colour: dict[str, str], width: float) -> list[str]:
    parts, x, y = [], float(LEFT), 30
    for name, one in colour.items():
        needed = 26 + LETTER * len(name)
        if x + needed > width and x > LEFT:
            x, y = float(LEFT), y + 15
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="11" height="11" fill="{one}"/>')
        parts.append(_text(x + 15, y + 10, name))
        x += needed
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def short_count(count: float) -> str:
    """16384 -> '16k'."""
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def columns(rows: Sequence[dict[str, float | None]], names: Sequence[str]) -> tuple[Series, ...]:
    """Rows, one a place, of values by name -> series."""
    return tuple(Series(name, tuple(row.get(name) for row in rows)) for name in names)
