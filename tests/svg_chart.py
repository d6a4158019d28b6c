"""Charts as SVG text, for the programs that write documents from measurements. The same input gives the same bytes.

    chart = svg_chart.scatter("Error against cost", Axis("bits"), Axis("error", log=True, form=".2%"), series)
    chart = svg_chart.lines("Over time", Axis("tokens", log=True), Axis("ms"), series)
    chart = svg_chart.bars("Error by input", ["normal", "sink"], Axis("error in %"), {"ours": [3, 1], "theirs": [4, 2]})

Colours and proportions are those of `sageattn bench --svg` (examples/cli/chart.cpp).
"""

import math
from dataclasses import dataclass, field

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
LEFT, TOP, WIDTH, HEIGHT = 80, 50, 640, 400  # of the plot
LEGEND_GAP, LEGEND_STEP = 20, 20
CHARACTER = 6.3  # roughly, its width at font size 12
MOST_TICKS = 8


@dataclass(frozen=True)
class Axis:
    """form: how numbers at its ticks are written, as for format()."""

    title: str
    log: bool = False
    form: str = "g"
    low: float | None = None  # None: from the data; linear axes then begin at 0 if nothing is below
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """points: (x, y). labels, errors (of y, either way): None or one a point, each of which may be None."""

    label: str
    points: list
    labels: list | None = None
    errors: list | None = None
    colour: int | None = None  # None: by its place in the list
    marker: str = "circle"  # circle, square, diamond, triangle
    dashed: bool = False
    joined: bool | None = None  # by a line; None: as the kind of chart has it


def _escaped(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _text(x, y, anchor, content, style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{_escaped(content)}</text>'


def _rule(x1, y1, x2, y2, style):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _marker(kind, x, y, colour, size=4.5):
    if kind == "square":
        return f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:.1f}" height="{2 * size:.1f}" fill="{colour}"/>'
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{colour}"/>'
    corners = {"diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)), "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1))}[kind]
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{colour}"/>'


def _step(span):
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(span / MOST_TICKS))
    return next((factor * power for factor in (1, 2, 5) if span <= MOST_TICKS * factor * power), 10 * power)


class _Scale:
    """From values to places between begin and end, with ticks."""

    def __init__(self, axis, values, begin, end):
        self.log, self.form = axis.log, axis.form
        self._begin, self._end = begin, end
        values = [value for value in values if not axis.log or value > 0] or [1.0]
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        self.ticks = self._log_ticks(axis, low, high) if axis.log else self._linear_ticks(axis, low, high)

    def _linear_ticks(self, axis, low, high):
        if axis.low is None and low >= 0:
            low = 0.0
        step = _step(high - low or abs(high) or 1)
        self._low = low if axis.low is not None else math.floor(low / step + 1e-9) * step
        self._high = high if axis.high is not None else max(math.ceil(high / step - 1e-9) * step, self._low + step)
        first = math.ceil(self._low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self._high / step + 1e-9) + 1)]

    def _log_ticks(self, axis, low, high):
        self._low = low / 1.25 if axis.low is None else low
        self._high = high * 1.25 if axis.high is None else high
        decades = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        for factors in ((1, 2, 5), (1,)):
            ticks = [f * 10.0**d for d in decades for f in factors if self._low <= f * 10.0**d <= self._high]
            if len(ticks) <= 2 * MOST_TICKS:
                break
        return ticks or [self._low, self._high]

    def __call__(self, value):
        value = max(value, self._low) if self.log else value  # what a logarithm cannot show lies on the edge
        low, high, at = (math.log(v) if self.log else v for v in (self._low, self._high, value))
        return self._begin + (at - low) / (high - low) * (self._end - self._begin)

    def write(self, value):
        return format(value + 0.0 if abs(value) > 1e-12 * abs(self._high) else 0.0, self.form)


def _frame(title, x_title, y, y_title, legend, body, x_ticks):
    """legend: what each line of it shows, as functions of its place; x_ticks: (place, text)."""
    widest = max((len(label) for label, _ in legend), default=0)
    width = LEFT + WIDTH + (LEGEND_GAP + 40 + widest * CHARACTER + 10 if legend else LEGEND_GAP)
    height = TOP + max(HEIGHT, LEGEND_STEP * len(legend)) + 60
    opening = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
               f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12" fill="#222">')
    lines = [opening, '<rect width="100%" height="100%" fill="#fff"/>', _text(LEFT, 22, "start", title, ' font-size="14"'),
             _text(LEFT, TOP - 8, "start", y_title), _text(LEFT + WIDTH / 2, TOP + HEIGHT + 44, "middle", x_title)]
    for tick in y.ticks:
        lines += [_rule(LEFT, y(tick), LEFT + WIDTH, y(tick), 'stroke="#ddd"'),
                  _text(LEFT - 8, y(tick) + 4, "end", y.write(tick))]
    for place, text in x_ticks:
        lines += [_rule(place, TOP, place, TOP + HEIGHT, 'stroke="#eee"'),
                  _text(place, TOP + HEIGHT + 20, "middle", text)]
    lines += body
    for i, (label, sample) in enumerate(legend):
        at = TOP + 10 + i * LEGEND_STEP
        lines += [*sample(LEFT + WIDTH + LEGEND_GAP, at), _text(LEFT + WIDTH + LEGEND_GAP + 38, at + 4, "start", label)]
    return "\n".join([*lines, "</svg>"]) + "\n"


@dataclass
class _Labels:
    """Puts labels beside their points where they cover neither points nor other labels, if there is such a place."""

    taken: list = field(default_factory=list)  # (left, top, right, bottom)

    def occupy(self, x, y):
        self.taken.append((x - 5, y - 5, x + 5, y + 5))

    def place(self, x, y, content):
        size = len(content) * CHARACTER * 11 / 12
        places = [(x + 8, y + 4, "start"), (x - 8, y + 4, "end"), (x, y - 9, "middle"), (x, y + 17, "middle")]
        places += [(x + dx, y + dy, anchor) for shift in (14, 24, 36, 48) for dy in (4 - shift, 4 + shift)
                   for dx, anchor in ((9, "start"), (-9, "end"))]

        def box(at):
            left = at[0] - {"start": 0, "middle": size / 2, "end": size}[at[2]]
            return left, at[1] - 10, left + size, at[1] + 3

        def cost(at):
            left, top, right, bottom = box(at)
            outside = left < LEFT or right > LEFT + WIDTH or top < TOP or bottom > TOP + HEIGHT
            return 10 * outside + sum(left < x2 and right > x1 and top < y2 and bottom > y1 for x1, y1, x2, y2 in self.taken)

        best = min(places, key=cost)
        self.taken.append(box(best))
        lines = [_text(*best, content, ' font-size="11" fill="#444"')]
        if abs(best[1] - 4 - y) > 14:
            lines.insert(0, _rule(x, y, best[0], best[1] - 4, 'stroke="#bbb" stroke-width="0.7"'))
        return lines


def _points(title, x_axis, y_axis, series, joined):
    points = [point for one in series for point in one.points]
    ends = [y + sign * error for one in series if one.errors for (_, y), error in zip(one.points, one.errors, strict=True)
            if error is not None for sign in (-1, 1)]
    x = _Scale(x_axis, [point[0] for point in points], LEFT, LEFT + WIDTH)
    y = _Scale(y_axis, [point[1] for point in points] + ends, TOP + HEIGHT, TOP)
    curves, marks, labels, legend = [], [], [], []
    placer = _Labels()
    for px, py in points:
        placer.occupy(x(px), y(py))
    for i, one in enumerate(series):
        colour = COLOURS[(i if one.colour is None else one.colour) % len(COLOURS)]
        is_joined = joined if one.joined is None else one.joined
        stroke = f'stroke="{colour}" stroke-width="2"' + (' stroke-dasharray="7 4"' if one.dashed else "")
        if is_joined:
            path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in one.points)
            curves.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        for k, (px, py) in enumerate(one.points):
            if one.errors and one.errors[k] is not None:
                curves.append(_rule(x(px), y(py - one.errors[k]), x(px), y(py + one.errors[k]),
                                    f'stroke="{colour}" stroke-width="1"'))
            marks.append(_marker(one.marker, x(px), y(py), colour))
            if one.labels and one.labels[k] is not None:
                labels += placer.place(x(px), y(py), one.labels[k])

        def sample(left, at, one=one, colour=colour, stroke=stroke, is_joined=is_joined):
            return [_rule(left, at, left + 30, at, stroke)] * is_joined + [_marker(one.marker, left + 15, at, colour)]

        legend.append((one.label, sample))
    return _frame(title, x_axis.title, y, y_axis.title, legend if len(series) > 1 else [], curves + marks + labels,
                  [(x(tick), x.write(tick)) for tick in x.ticks])


def scatter(title, x_axis, y_axis, series):
    """Points, which may have labels and error bars."""
    return _points(title, x_axis, y_axis, series, False)


def lines(title, x_axis, y_axis, series):
    """Points joined in their order."""
    return _points(title, x_axis, y_axis, series, True)


def bars(title, categories, y_axis, series, x_title=""):
    """Groups of bars: one group a category, one bar in it for each of series, {label: [value or None a category]}."""
    y = _Scale(y_axis, [value for values in series.values() for value in values if value is not None], TOP + HEIGHT, TOP)
    group = WIDTH / len(categories)
    width = 0.8 * group / len(series)
    base = TOP + HEIGHT if y.log else y(0)
    body, legend = [], []
    for i, (label, values) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        for k, value in enumerate(values):
            if value is not None:
                left, top = LEFT + (k + 0.1) * group + i * width, y(value)
                body.append(f'<rect x="{left:.1f}" y="{min(top, base):.1f}" width="{width:.1f}" '
                            f'height="{abs(base - top):.1f}" fill="{colour}"/>')

        def sample(left, at, colour=colour):
            return [f'<rect x="{left + 8:.1f}" y="{at - 6:.1f}" width="14" height="12" fill="{colour}"/>']

        legend.append((label, sample))
    body.append(_rule(LEFT, base, LEFT + WIDTH, base, 'stroke="#222"'))
    return _frame(title, x_title, y, y_axis.title, legend if len(series) > 1 else [], body,
                  [(LEFT + (k + 0.5) * group, name) for k, name in enumerate(categories)])
