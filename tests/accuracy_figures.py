"""Figures of docs/accuracy.md and of docs/numerics.md, and the summary in the latter, from ablation.json."""

import generated_document
import svg_chart
from svg_chart import Axis, Series

SMOOTHING, FORMATS, BIAS, DRIFT = (f"accuracy/{name}.svg" for name in ("smoothing", "formats", "bias", "drift"))
CAPTIONS = {
    SMOOTHING: "1 - CosSim for every smoothing of Q and K in INT4",
    FORMATS: "1 - CosSim for every format of P and V, and of Q and K",
    BIAS: "relative L1 against the number of keys, V with an offset",
    DRIFT: "relative L1 against the number of keys, V that drifts",
}
OF_TABLE = {"smoothing": [SMOOTHING], "pv": [FORMATS], "accumulation": [BIAS, DRIFT]}
DISTANCE = Axis("1 - CosSim, average of the heads", log=True)


def rows_of(report, table, **wanted):
    """The rows that carry these values and were not refused."""
    found = next((part["rows"] for part in report["tables"] if part["name"] == table), [])
    return [row for row in found if "refused" not in row and all(row.get(k) == v for k, v in wanted.items())]


def by_input(rows, inputs):
    values = {row["input"]: 1 - row["cos"] for row in rows}
    return [values.get(name) for name in inputs]


def bars(title, series, inputs):
    smallest = min(value for values in series.values() for value in values if value is not None)
    return svg_chart.bars(title, inputs, Axis(DISTANCE.title, log=True, low=smallest / 2), series, "input")


def inputs_of(report, table):
    """Without those whose V hardly varies, where CosSim says nothing."""
    return [name for name in dict.fromkeys(row["input"] for row in rows_of(report, table)) if name != "v_bias"]


def smoothing(report):
    inputs = inputs_of(report, "smoothing")
    cases = dict.fromkeys(row["smoothed"] for row in rows_of(report, "smoothing", QK="INT4"))
    return bars("Q and K in INT4, smoothed", {
        case: by_input(rows_of(report, "smoothing", QK="INT4", smoothed=case), inputs) for case in cases}, inputs)


def formats(report):
    inputs = inputs_of(report, "pv")
    series = {f"P, V in {name}": by_input(
        rows_of(report, "pv", **{"P, V": name, "V scale": "channel", "row sum": "rounded_p"}), inputs)
        for name in ("INT8", "E5M2", "E4M3", "FP16")}
    series |= {f"Q, K in {name}": by_input(rows_of(report, "qk", smoothed="Q+K", QK=name), inputs)
               for name in ("INT4", "E4M3", "INT8")}
    return bars("P, V (Q, K in INT8 per token); Q, K per thread (P, V in FP16); Q and K smoothed", series, inputs)


def curve(report, source, accumulation, smoothed, label, **style):
    rows = rows_of(report, "accumulation", input=source, accumulation=accumulation, **{"V smoothed": smoothed})
    return Series(label, sorted((row["keys"], row["l1"] * 100) for row in rows), **style)


def against_keys(title, curves):
    return svg_chart.lines(title, Axis("keys", log=True), Axis("relative L1, %", log=True, form=".3g"),
                           [one for one in curves if one.points])


def bias(report):
    names = ("single-level", *(f"two-level, {keys}" for keys in (4096, 1024, 512, 128, 32)), "fp16, 64", "fp32")
    curves = [curve(report, "bias", name, "off", name) for name in names]
    curves.append(curve(report, "bias", "two-level, 1024", "group", "two-level, 1024, V smoothed by groups", dashed=True))
    return against_keys("E4M3 P V, V = 0.3 N(0,1) + 8.5, not smoothed but where it says so", curves)


def drift(report):
    names = ("single-level", *(f"two-level, {keys}" for keys in (4096, 1024, 512, 128)), "fp32")
    curves = [curve(report, "drift", name, smoothed, f"{name}, V {text}", colour=colour, dashed=smoothed == "group")
              for smoothed, text in (("off", "as it is"), ("group", "smoothed by groups"))
              for colour, name in enumerate(names)]
    return against_keys("E4M3 P V, V drifts along the sequence, queries attend to their place", curves)


def figures(report):
    """{path under docs: SVG}, of what the report has."""
    makers = {SMOOTHING: ("smoothing", smoothing), FORMATS: ("pv", formats),
              BIAS: ("accumulation", bias), DRIFT: ("accumulation", drift)}
    return {path: make(report) for path, (table, make) in makers.items() if rows_of(report, table)}


def links(paths):
    for path in paths:
        yield from [f"![{CAPTIONS[path]}]({path})", ""]


def repeat_sentence(report):
    return f"`{report['command']} && python3 tests/make_accuracy.py` repeats it ({report['seconds']} s on " \
           f"{report['cores']} cores)."


def summary(report):
    """What docs/numerics.md shows of it: a choice a line, on the language model."""
    choices = [("smoothing", "Q, K in INT4 per thread, smoothed: {smoothed}", {"QK": "INT4"}),
               ("granularity", "Q, K in INT4, both smoothed, a scale for each {granularity}", {"QK": "INT4"}),
               ("qk", "Q, K in {QK} per thread, both smoothed", {"smoothed": "Q+K"}),
               ("pv", "P, V in {P, V}; Q, K in INT8 per token, both smoothed", {"V scale": "channel", "row sum": "rounded_p"}),
               ("types", "{preset}, inputs in {inputs}", {})]
    lines = [[text.format(**row), f"{row['cos'] * 100:.3f} / {row['worst_cos'] * 100:.3f}",
              f"{row['l1'] * 100:.3g} / {row['worst_l1'] * 100:.3g}"]
             for table, text, wanted in choices for row in rows_of(report, table, input="smollm2", **wanted)]
    yield from [f"All layers and heads of SmolLM2, backend {report['backend']}, average / worst head. {repeat_sentence(report)}", "",
                *generated_document.markdown(["choice", "CosSim, %", "relative L1, %"], lines), "", *links(figures(report))]
