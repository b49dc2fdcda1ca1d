"""Draws the table as one picture: bars of each row, legible on light and on dark pages (the style of cli/svg)."""

from __future__ import annotations

import html
import math

STYLE = """<style>
text { font-family: -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Helvetica, Arial, sans-serif; }
.paper { fill: #ffffff; } .ink { fill: #1f2328; } .soft { fill: #59636e; } .rule { stroke: #d1d9e0; stroke-width: 1; }
.first { fill: #0b5cad; } .second { fill: #c2570c; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } .ink { fill: #e6edf3; } .soft { fill: #9198a1; } .rule { stroke: #3d444d; }
.first { fill: #58a6ff; } .second { fill: #f0883e; }
}
</style>
"""
# class and opacity of a series
COLORS = {
    "Tandem": ("first", 1.0),
    "FA3": ("second", 1.0),
    "FA4": ("second", 0.6),
    "cuDNN": ("soft", 0.8),
    "FA2": ("soft", 0.45),
    "Flex": ("second", 0.3),
}
MARGIN, AXIS, PLOT, ROW, COLUMNS = 24, 44, 150, 216, 2
BAR, GAP, GROUP_GAP = 14, 2, 16


def text(x, y, words, size=11, color="soft", anchor="start", extra=""):
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="{color}" text-anchor="{anchor}"{extra}>'
        f"{html.escape(words)}</text>"
    )


def _bar(x, base, height, name, hint):
    color, opacity = COLORS[name]
    place = f'x="{x:g}" y="{base - height:.2f}" width="{BAR}" height="{height:.2f}" rx="2"'
    under = f'<rect {place} class="paper"/>' if opacity < 1 else ""  # hides lines below the bar
    shown = f"<title>{html.escape(hint)}</title>"
    return f'{under}<rect {place} class="{color}" fill-opacity="{opacity}">{shown}</rect>'


def _panel(row, columns, names, left, top, width, group, scale):
    step, most = scale
    base = top + 22 + PLOT
    parts = [text(left, top + 12, row, 13, "ink", extra=' font-weight="600"')]
    for n in range(int(most / step) + 1):
        y = base - PLOT * n * step / most
        parts.append(f'<line x1="{left:g}" y1="{y:.2f}" x2="{left + width:g}" y2="{y:.2f}" class="rule"/>')
        parts.append(text(left - 6, y + 4, f"{n * step:g}", 10, anchor="end"))
    x, middle = left + GROUP_GAP / 2, (group - len(names) * (BAR + GAP)) / 2
    for column, rates in columns.items():
        for n, name in enumerate(names):
            if rates.get(name):
                hint = f"{name}, {row} {column}: {rates[name]:.0f} TFLOP/s"
                parts.append(_bar(x + middle + n * (BAR + GAP), base, PLOT * rates[name] / most, name, hint))
        parts.append(text(x + group / 2, base + 15, column, 11, anchor="middle"))
        x += group + GROUP_GAP
    return parts


def draw(title: str, subtitle: str, rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """rows: the TFLOP/s by name for each row and column."""
    names = [n for n in COLORS if any(n in rates for columns in rows.values() for rates in columns.values())]
    highest = max(rate for columns in rows.values() for rates in columns.values() for rate in rates.values())
    step = next(s for s in (10, 20, 50, 100, 200, 500, 1000, math.inf) if highest / s <= 5)
    most = step * math.ceil(highest * 1.02 / step)
    label = max(len(column) for columns in rows.values() for column in columns)
    group = max(len(names) * (BAR + GAP), 6.5 * label)
    panel = max(len(columns) for columns in rows.values()) * (group + GROUP_GAP)
    width = max(MARGIN * 2 + COLUMNS * (panel + AXIS) + 12, 16 + 8 * len(subtitle))
    height = 100 + math.ceil(len(rows) / COLUMNS) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">\n<title>{html.escape(title)}</title>\n{STYLE}'
        f'<rect width="{width:g}" height="{height:g}" class="paper" rx="8"/>',
        text(MARGIN, 42, title, 19, "ink", extra=' font-weight="600"'),
        text(MARGIN, 64, subtitle, 13),
    ]
    x = MARGIN
    for name in names:
        color, opacity = COLORS[name]
        parts.append(f'<rect x="{x}" y="76" width="12" height="12" rx="2" class="{color}" fill-opacity="{opacity}"/>')
        parts.append(text(x + 18, 86, name, 12, "ink"))
        x += 40 + 8 * len(name)
    for n, (row, columns) in enumerate(rows.items()):
        left, top = MARGIN + AXIS + n % COLUMNS * (panel + AXIS), 104 + n // COLUMNS * ROW
        parts += _panel(row, columns, names, left, top, panel, group, (step, most))
    return "\n".join(parts) + "\n</svg>\n"
