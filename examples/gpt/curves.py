"""The losses as one picture for light and dark pages. The picture has each library's mean over its seeds, their spread
as a band, and a table of step times.
"""

import html
import math
import statistics

STYLE = """<style>
text { font-family: -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Helvetica, Arial, sans-serif; }
.paper { fill: #ffffff; } .ink { fill: #1f2328; } .soft { fill: #59636e; } .rule { stroke: #d1d9e0; stroke-width: 1; }
.c0 { color: #0b5cad; } .c1 { color: #c2570c; } .c2 { color: #1a7f37; } .c3 { color: #8250df; } .c4 { color: #59636e; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } .ink { fill: #e6edf3; } .soft { fill: #9198a1; } .rule { stroke: #3d444d; }
.c0 { color: #58a6ff; } .c1 { color: #f0883e; } .c2 { color: #3fb950; } .c3 { color: #bc8cff; } .c4 { color: #9198a1; }
}
.curve { fill: none; stroke: currentColor; } .band { fill: currentColor; fill-opacity: 0.12; }
</style>
"""
WIDTH, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, ROW = 760, 64, 92, 668, 300, 24
# Equal curves overlap: the first is broad, all later ones are dashed with different gaps.
DASHES = ((5, None), (2, "8 8"), (2, "3 7"), (2, "12 5 2 5"), (2, "1 5"))
COLUMNS = (("final loss", 310), ("spread", 390), ("ms a step", 490), ("attention", 590), ("two runs", 732))


def _text(x, y, text, size=12, color="soft", anchor="start", extra=""):
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="{color}" text-anchor="{anchor}"{extra}>'
        f"{html.escape(text)}</text>"
    )


def smoothed(losses):
    """The mean of each step and the steps before it, up to a fortieth of all, because single batches differ more than
    libraries.
    """
    window = max(1, len(losses) // 40)
    return [statistics.fmean(losses[max(0, n - window + 1) : n + 1]) for n in range(len(losses))]


def _line(color, number, place):
    thick, dashes = DASHES[number]
    gaps = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{place}" class="curve {color}" stroke-width="{thick}"{gaps}/>'


def _axes(highest, steps, x, y):
    parts = []
    for loss in range(math.floor(highest) + 1):
        parts.append(f'<line x1="{LEFT}" y1="{y(loss):.1f}" x2="{LEFT + PLOT_WIDTH}" y2="{y(loss):.1f}" class="rule"/>')
        parts.append(_text(LEFT - 8, y(loss) + 4, str(loss), anchor="end"))
    apart = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if steps / size <= 8)
    for step in range(apart, steps + 1, apart):
        parts.append(_text(x(step), y(0) + 18, str(step), anchor="middle"))
    return parts


def draw(record, titles):
    """record: the JSON that train.py writes. titles: of its libraries."""
    names, steps = list(record["libraries"]), record["steps"]
    losses = {n: [smoothed(run["losses"]) for run in record["runs"] if run["attention"] == n] for n in names}
    finite = [loss for curves in losses.values() for curve in curves for loss in curve if math.isfinite(loss)]
    highest = max(finite, default=1.0) * 1.03
    height = TOP + PLOT_HEIGHT + 76 + ROW * len(names)

    def x(step):
        return LEFT + PLOT_WIDTH * step / steps

    def y(loss):
        return TOP + PLOT_HEIGHT * (1 - (min(loss, highest) if math.isfinite(loss) else highest) / highest)

    def places(curve, numbers):
        return " ".join(f"{x(n + 1):.1f},{y(curve[n]):.1f}" for n in numbers)

    title = f"A GPT learns this repository's documents: {record['layers']} layers, {record['width']} wide"
    seeds = f"mean of {record['seeds']} seeds, band: their spread" if record["seeds"] > 1 else "one seed"
    below = f"{record['device']}; {record['batch']} x {record['tokens']} bytes a step; loss in nats a byte, {seeds}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img">\n<title>{html.escape(title)}</title>\n{STYLE}'
        f'<rect width="{WIDTH}" height="{height}" class="paper" rx="8"/>',
        _text(24, 40, title, 18, "ink", extra=' font-weight="600"'),
        _text(24, 64, below, 13),
        *_axes(highest, steps, x, y),
    ]
    ordered = range(steps)
    for number, name in enumerate(names):
        if len(losses[name]) > 1:
            low, high = ([pick(values) for values in zip(*losses[name])] for pick in (min, max))
            edge = f"{places(low, ordered)} {places(high, reversed(ordered))}"
            parts.append(f'<polygon points="{edge}" class="band c{number}"/>')
    for number, name in enumerate(names):
        mean = [statistics.fmean(values) for values in zip(*losses[name])]
        parts.append(_line(f"c{number}", number, places(mean, ordered)))

    top = TOP + PLOT_HEIGHT + 50
    parts += [_text(at, top, title, anchor="end") for title, at in COLUMNS]
    for number, (name, of) in enumerate(record["libraries"].items()):
        base = top + ROW * (number + 1)
        cells = (
            f"{of['final_loss']:.4f}",
            f"{of['spread']:.4f}" if record["seeds"] > 1 else "",
            f"{of['step_ms']:.1f}",
            f"{of['attention_share']:.0%}",
            "equal in every bit" if of["equal_runs"] else "differ",
        )
        parts.append(_line(f"c{number}", number, f"{LEFT},{base - 4} {LEFT + 36},{base - 4}"))
        parts.append(_text(LEFT + 48, base, titles[name], 13, "ink"))
        parts += [_text(at, base, cell, 13, "ink", "end") for cell, (_, at) in zip(cells, COLUMNS)]
    return "\n".join(parts) + "\n</svg>\n"
