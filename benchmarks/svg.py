"""Line charts as SVG text: few kinds, no dependency."""

import math
from html import escape

COLORS = ("#1f4e79", "#c0504d", "#4f8f3a", "#8064a2", "#d08a1d", "#2a9d9d", "#7f7f7f", "#a5467b")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 340, 62, 96, 40, 52


def ticks_of(values, log):
    low, high = min(values), max(values)
    if log:
        return [2.0**e for e in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    step = 10 ** math.floor(math.log10((high - low) or 1))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    return [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def short(value):
    return f"{value:g}" if abs(value) < 1e4 else f"{value:.0e}".replace("e+0", "e")


def chart(title, x_label, y_label, series, x_log=True, y_log=True, from_zero=False):
    """`series`: {name: [(x, y)]}. One <g> of WIDTH x HEIGHT."""
    points = [point for line in series.values() for point in line] + [(0, 0)] * from_zero
    x_ticks, y_ticks = ticks_of([x for x, _ in points], x_log), ticks_of([y for _, y in points], y_log)

    def place(value, ticks, log, start, length):
        f = math.log2 if log else float
        span = f(ticks[-1]) - f(ticks[0]) or 1
        return start + length * (f(value) - f(ticks[0])) / span

    def x_of(value):
        return place(value, x_ticks, x_log, LEFT, WIDTH - LEFT - RIGHT)

    def y_of(value):
        return HEIGHT - place(value, y_ticks, y_log, BOTTOM, HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>']
    for tick in x_ticks:
        x = x_of(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>')
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 {middle_y})">{escape(y_label)}</text>'
    )
    for i, (name, line) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{color}"/>' for x, y in line]
        y = TOP + 8 + 18 * i
        parts.append(f'<line x1="{WIDTH - RIGHT + 8}" y1="{y}" x2="{WIDTH - RIGHT + 26}" y2="{y}" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 31}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join(parts)


def write(path, charts):
    """Charts side by side, as one picture."""
    groups = [f'<g transform="translate({WIDTH * i} 0)">\n{text}\n</g>' for i, text in enumerate(charts)]
    width = WIDTH * len(charts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#222">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )
