"""Ratios of random problems as one picture, legible on light and on dark pages."""

from __future__ import annotations

import html
import math

from rig.chart import STYLE, text

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 104, 24, 52
# (upper limit of tiles per SM, label, class, opacity)
CLASSES = (
    (1, "under 1 tile per SM", "second", 0.9),
    (2, "1 to 2", "second", 0.45),
    (4, "2 to 4", "first", 0.45),
    (math.inf, "more", "first", 0.9),
)
MARKS = (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 8)


def _class(waves: float) -> tuple[str, float]:
    return next((color, opacity) for limit, _, color, opacity in CLASSES if waves < limit)


def draw(title: str, subtitle: str, points: list[tuple[float, float, float, str]]) -> str:
    """points: GFLOP, ratio, tiles per SM and a hint of each problem."""
    work, ratios = [p[0] for p in points], [p[1] for p in points]
    low, high = math.log(min(work)) - 0.1, math.log(max(work)) + 0.1
    bottom, top = math.log(min(0.7, *ratios)) - 0.05, math.log(max(1.4, *ratios)) + 0.05

    def x(gflop):
        return LEFT + (math.log(gflop) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(ratio):
        return HEIGHT - BOTTOM - (math.log(ratio) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img">\n<title>{html.escape(title)}</title>\n{STYLE}'
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="paper" rx="8"/>',
        text(24, 36, title, 17, "ink", extra=' font-weight="600"'),
        text(24, 56, subtitle, 12),
    ]
    left = 24
    for _, label, color, opacity in CLASSES:
        parts.append(f'<circle cx="{left + 6}" cy="78" r="5" class="{color}" fill-opacity="{opacity}"/>')
        parts.append(text(left + 16, 82, label, 12, "ink"))
        left += 40 + 7 * len(label)
    for mark in MARKS:
        if bottom <= math.log(mark) <= top:
            width = ' style="stroke-width: 2"' if mark == 1 else ""
            line = f'x1="{LEFT}" y1="{y(mark):.1f}" x2="{WIDTH - RIGHT}" y2="{y(mark):.1f}"'
            parts.append(f'<line {line} class="rule"{width}/>')
            parts.append(text(LEFT - 8, y(mark) + 4, f"{mark:g} x", 11, anchor="end"))
    for power in range(math.ceil(low / math.log(10)), math.floor(high / math.log(10)) + 1):
        parts.append(text(x(10.0**power), HEIGHT - BOTTOM + 18, f"{10**power} GFLOP", 11, anchor="middle"))
    parts.append(text(WIDTH / 2, HEIGHT - 12, "work of the problem; above 1 x Tandem is faster", 12, anchor="middle"))
    for gflop, ratio, waves, hint in points:
        color, opacity = _class(waves)
        parts.append(
            f'<circle cx="{x(gflop):.1f}" cy="{y(ratio):.1f}" r="4" class="{color}" fill-opacity="{opacity}">'
            f"<title>{html.escape(hint)}</title></circle>"
        )
    return "\n".join(parts) + "\n</svg>\n"
