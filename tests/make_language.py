#!/usr/bin/env python3
"""Writes docs/language-models.md from the measurements in docs/accuracy/.

    make_language.py [--check] [DOCS]

DOCS is the folder of language-models.md and accuracy/ (default: docs). accuracy/perplexity*.json are what
examples/python/perplexity.py wrote, layers*.json what layers.py did, embeddings*.json what embeddings.py did. With
--check nothing is written, and the exit code is 1 if language-models.md is not what would be. No measurements, no
language-models.md.
"""

import glob
import json
import math
import os

import generated_document

NAMES = {
    "exact": "EXACT",
    "sage1": "SAGE1",
    "sage2_8b": "SAGE2_8B",
    "sage2_4b": "SAGE2_4B",
    "sage2pp": "SAGE2PP",
    "int4_unsmoothed": "INT4 without smoothing",
}
EXPECTED_CHANGE = 0.005  # of SAGE2_8B's perplexity
TOLERANCES = (0.001, 0.003, 0.01)  # changes of the perplexity that a layer may cost
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
    names = [text for key, text in NAMES.items() if not any(row["name"] == key for row in rows)]
    if names:
        yield f"Not measured in this run: {', '.join(names)}."
        yield ""


def facts(report, name):
    machine, model, text = report["machine"], report["model"], report["text"]
    yield f"libsageattn {report['version']}, {report['date']}; {model['name']} ({model['source']}, {model['license']}); " \
          f"backend {machine['backend']}, {machine['processor']}, {machine['cores']} cores, Python {machine['python']}, " \
          f"NumPy {machine['numpy']}; {report['seconds'] / 60:.0f} minutes. Text: {text['file']}, SHA-256 " \
          f"{text['sha256'][:16]}.... Data: [{name}.json](accuracy/{name}.json)"
    yield from ["", "```sh", report["command"], "```", ""]


# ---- Perplexity --------------------------------------------------------------------------------


def perplexity_lines(rows):
    for row in ordered(rows):
        change = "" if row["name"] == "exact" else f"{percent(row['change'])} ± {row['error']:.2%}"
        yield NAMES[row["name"]], f"{row['perplexity']:.3f}", change, f"{row['agreement']:.2%}"


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


def perplexity(report, name):
    yield from facts(report, name)
    findings = []
    for part in report["contexts"]:
        context, tokens = part["context"], part["tokens"]
        yield f"Context {context}: {tokens} tokens in {tokens // context} windows"
        yield ""
        yield from table(["numerics", "perplexity", "change from exact", "same most likely token"], perplexity_lines(part["rows"]))
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
    yield f"- {title}: rank correlation of 1 - CosSim with the change of the perplexity " \
          f"{correlation(ranks(error), ranks(change)):.2f}, with the share of most likely tokens that differ " \
          f"{correlation(ranks(error), ranks(disagreement)):.2f}."


def layer_lines(rows, names):
    for layer in sorted({row["layer"] for row in rows}):
        line = [layer]
        for name in names:
            found = [row for row in rows if row["layer"] == layer and row["name"] == name]
            line += [f"{found[0]['cosine']:.5f}", f"{percent(found[0]['change'])} ± {found[0]['error']:.2%}",
                     f"{found[0]['agreement']:.1%}"] if found else ["", "", ""]
        yield line


def threshold_lines(rows):
    for tolerance in TOLERANCES:
        found = separation(rows, tolerance)
        if found:
            yield f"{tolerance:.1%}", f"{found['cut']:.4f}", f"{found['found']} of {found['costly']}", \
                f"{found['accused']} of {found['others']}", f"{found['area']:.2f}"


def layers(report, name):
    yield from facts(report, name)
    rows = report["rows"]
    names = [key for key in NAMES if any(row["name"] == key for row in rows)]
    yield f"{report['tokens']} tokens in windows of {report['context']}. One layer at a time in the format, all others exact: " \
          "CosSim of that layer's attention output with the exact one, change of the perplexity with its standard error, and " \
          "share of positions with the same most likely token."
    yield ""
    head = ["layer"]
    for key in names:
        head += [f"{NAMES[key]}: CosSim", "perplexity", "same token"]
    yield from table(head, layer_lines(rows, names))
    yield ""
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


# ---- Embeddings --------------------------------------------------------------------------------


def embedding_lines(rows):
    for row in ordered(rows):
        yield NAMES[row["name"]], f"{row['mean_cosine']:.6f}", f"{row['min_cosine']:.6f}", f"{row['top_1']:.1%}", \
            f"{row['top_10']:.1%}"


def embeddings(report, name):
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
            ("embeddings", "Sentence embeddings", embeddings))
WINDOWS = """Windows do not overlap and start without a past; each position predicts the text's next token, so that every token but
the first is predicted once, the same ones at each context. The standard error is that of the mean difference of the two
losses of each token. *Same most likely token* is the share of all these positions at which the most likely next token is the
one of exact attention.
"""


def document(docs):
    """None if there is nothing to write."""
    lines = [INTRODUCTION]
    for prefix, title, section in SECTIONS:
        files = sorted(glob.glob(os.path.join(docs, "accuracy", prefix + "*.json")))
        if files:
            lines += [f"## {title}", ""] + ([WINDOWS] if prefix == "perplexity" else [])
        for path in files:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
            lines += section(report, os.path.splitext(os.path.basename(path))[0])
    return "\n".join(lines).rstrip("\n") + "\n" if len(lines) > 1 else None


if __name__ == "__main__":
    generated_document.main(__file__, __doc__, "language-models.md", document)
