#!/usr/bin/env python3
"""Writes docs/accuracy.md, its figures and a part of docs/numerics.md from docs/accuracy/ablation.json.

    make_accuracy.py [--check] [DOCS]

DOCS is the folder of accuracy.md and accuracy/ (default: docs). ablation.json is what
examples/python/ablation.py wrote; overheads.json, of overheads.py, and ablation-cuda.json, of
ablation.py on a GPU, add sections if they are there. What this document, docs/numerics.md and README.md say in prose of
the figures must be what accuracy_claims.py makes of them. With --check nothing is written, and the exit
code is 1 if a file is not what would be. No measurements, no accuracy.md.
"""

import glob
import json
import os
import sys

import accuracy_claims
import accuracy_figures
import accuracy_on_gpu
import generated_document
from generated_document import markdown

INTRODUCTION = """# Accuracy of every numeric choice

Written by `tests/make_accuracy.py` from [accuracy/ablation.json](accuracy/ablation.json). What the words mean, and the
formulas of the metrics, is in [numerics.md](numerics.md); the error of the presets on long synthetic inputs is in its section 10.

Each figure compares the output with fp64 attention (NumPy, no code of the library) on the same 16-bit inputs, head by head.
*average / worst*: the mean over all layers and heads, and the worst head. Output is fp32, so that its rounding hides nothing,
but in the last table. *Published* is SageAttention2 (arXiv 2411.10958), measured on layers of CogVideoX: average / worst CosSim
in %, "-" where a figure is not taken over; order and size are compared with SmolLM2 here, which has structure of its own.
"""

# Average and worst CosSim in % of the paper, by what stands in a table's first columns.
PUBLISHED = {
    "smoothing": {"none": (80.04, 4.83), "Hadamard": (79.77, 4.85), "SmoothAttn": (90.21, 64.49),
                  "K": (98.07, 90.86), "Q": (None, 93.10), "Q+K": (99.46, 96.71)},
    "granularity": {"tensor": (None, 85.85), "block": (98.03, 90.68), "thread": (99.45, 96.72),
                    "token": (99.45, 96.76)},
    "pv": {"INT8": (77.05, 19.52), "E5M2": (None, 94.94), "E4M3": (99.44, 96.70),
           "FP16": (99.45, 96.76)},
}
TITLES = {
    "smoothing": "Smoothing of Q and K",
    "granularity": "Granularity of the scales of Q and K",
    "pv": "Formats of P and V",
    "accumulation": "Accumulation of P V",
    "qk": "E4M3 against INT8 and INT4 for Q and K",
    "types": "Presets, types of the inputs, cross-attention",
}
TEXTS = {
    "smoothing": "Per-thread scales on the tile of mma.sync (128 x 64), P and V in FP16: only Q K^T is quantized.",
    "granularity": "Q and K smoothed, the same tile, P and V in FP16.",
    "pv": "Q and K in INT8 per token, both smoothed (the library does not quantize P and V alone), V not smoothed, P V summed in "
          "fp32: only the formats differ. FP16 is the floor that Q and K leave. *V scale*: keys that share a channel's scale. "
          "*Row sum*: what normalises the output, P as rounded or before.",
    "accumulation": "E4M3 on the tile of wgmma (64 x 128), the tensor core emulated with the model of numerics.md, section 7; INT8 Q "
                    "and K per thread. fp16 accumulators are on the tile of mma.sync. V has one scale a channel throughout, so "
                    "that smoothing per group differs by its mean alone. Smoothing in fp32 takes groups of 1024 keys.",
    "qk": "The same smoothing, granularity (per thread), tile and P V (FP16) for each format.",
    "types": "Presets as they are, WGMMA where they have it. Inputs rounded to the type, output in it, against fp64 attention of "
             "the activations *before* rounding: EXACT shows what the type alone costs.",
}
# Kept by hand: read them again when the measurements change. accuracy_claims.py says which words the figures give.
NOTES = {
    "smoothing": """
Where it differs from the published, and why. None of it breaks the order none < K < Q+K.

- Hadamard and SmoothAttn alone help more here than there: these activations have channels that are large in some tokens, which a
  rotation spreads, and not only offsets common to all tokens, which it leaves offsets. The worst head gains nothing from Hadamard
  in both. For the same reason Hadamard still adds to Q+K on SmolLM2, most in the worst head.
- Smoothing Q does more than smoothing K on the models, where the paper has the worst heads nearly equal. In the layers of
  examples/data the mean of 128 queries holds 58 to 74 % of their energy in SmolLM2, the mean of all keys 39 to 63 % (MiniLM: 32 to
  53 % and 26 to 37 %): rotary embedding turns what keys far apart have in common, but not that of neighbours.
- The worst head of Q+K in SmolLM2 is worse than published; rotation lifts it, so what is left there are uneven channels.
- On `fa3` there is no offset to remove and smoothing does nothing; rotation does. On `v_bias` V hardly varies, so that no error of
  Q K^T can reach the output, and CosSim says nothing: see the other metrics.
""",
    "granularity": """
The paper has per thread as good as per token. Here a step between them can be seen: 4 queries and 16 keys share a scale, and rows of a
text differ more in size than neighbouring patches of a video do (this reason is a guess; the outlier rows of `fa3` show the effect).
""",
    "pv": """
- INT8 fails less on the models than published. What it loses are probabilities below 1/254 of the row's largest, and it takes many of
  them, which together weigh much, to lose a row: long rows with an attention sink. `sink` is made so, at 1024 keys, and gives INT8 the
  published size of error, while E4M3 and E5M2, whose step shrinks with the value, hold.
- E4M3 is close to FP16 as published, about twice as close as E5M2, but not the same: CosSim near 100 % hides a relative error of 2 %,
  most of it the rounding of P and V themselves.
- A scale for every 64 keys instead of one for all helps little (E4M3: 2 to 7 % of the error), more where V has an offset (E5M2).
- Sum of rounded P against sum of P, relative L1: E4M3 0.69 to 1.00, E5M2 0.87 to 1.00 times as large; what gains is V with an offset
  (`v_bias`), which then cancels. With INT8 it is worse on `outlier_channels`, `fa3` and `sink`: what rounding to zero took from the row
  is then taken from its weight as well.
""",
    "accumulation": """
The paper gives CosSim 98.25 -> 99.75 % and RMSE 0.2387 -> 0.0773 for smoothing V where its channels are biased, and isolates neither
two levels nor their interval. CosSim does not see an error that scales the whole output, as truncation of a biased V does (99.999 % where
7.4 % are lost), so relative L1 stands here.

- Zero-mean V hides the accumulator: even a single level adds little to the 4 % that INT8 and E4M3 cost, up to 65536 keys.
- Biased V shows it: a single level loses 1.5 % at 1024 keys and 54 % at 65536, two levels 0.03 to 0.05 % at 128 keys whatever the length,
  1.4 to 1.5 % at 1024 keys. So without smoothing promotion must be frequent. Smoothing per sequence cures this input at any interval.
- `drift` is what the mean over the sequence cannot cure: it is nearly 0. Rows unsmoothed and per sequence are equal; per group the error
  falls wherever the group is shorter than the drift: at 65536 keys, promoted every 1024, from 1.37 to 0.026 %, where
  fp32 sums of the same codes give 0.026 %, and 0.068 % of V as it is. Where a group spans the sequence (1024 keys of
  1024) it is the mean of the sequence.
- fp16 accumulators of 64 keys truncate nothing but round to 11 bits: worse than two levels at 128 on `bias` (0.28 to 0.84 %
  beside 0.07 to 0.10 %); once it is smoothed, 0.79 to 1.35 times their error.
""",
    "qk": """
INT8 is better than E4M3 on every input and with every smoothing here, by a factor of 1.8 to 5.6 in relative L1: below the largest value of a
group E4M3 keeps 4 significant bits, INT8 up to 7, and smoothed groups hold few values so small that E4M3's floating point would pay.
Outliers (`outlier_channels` unsmoothed) do not turn it round: E4M3 then errs in the large values, which dominate the product.
""",
    "types": """
- bf16 inputs cost 7.9 to 8.7 times what fp16 inputs do (EXACT), 6.0 times on `v_bias`. Beside the error of the quantized presets both
  disappear on the models. On `v_bias` the rounding of V and of the output is nearly all there is but for INT4: SAGE2_8B has
  1.00 to 1.03 times EXACT's error there, SAGE2_4B 1.56 times with fp16 inputs; on `outlier_channels` bf16 makes SAGE2_8B's error
  1.12 times as large.
- Cross-attention (without a mask) has no larger average error than SmolLM2's self-attention: smoothing takes each side's own mean.
- The paper quotes FlashAttention-3's test on `fa3` inputs (of other length and head_dim), RMSE: fp16 1.9e-4, FP8 with one scale a
  tensor 2.4e-2, FlashAttention-3's FP8 9.1e-3. Compare EXACT and SAGE2_8B above; SAGE2_4B is no format for such outliers without
  rotation (first table).
""",
}
METRICS = [("cos", "CosSim, %", 100), ("l1", "relative L1, %", 100), ("rmse", "RMSE", 1)]
MEASURED = ("input", "keys", *accuracy_on_gpu.MEASURED)


def labels(row):
    """What names a case: all that is not measured."""
    return {key: value for key, value in row.items() if key not in MEASURED}


def number(metric, value):
    """Enough digits to see the distance to 100 % or to 0."""
    if metric == "cos":
        return f"{value:.3f}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def cell(row, metric, factor, refusals):
    if "refused" in row:
        if row["refused"] not in refusals:
            refusals.append(row["refused"])
        return f"refused ({refusals.index(row['refused']) + 1})"
    return f"{number(metric, row[metric] * factor)} / {number(metric, row['worst_' + metric] * factor)}"


def published_cell(table, case):
    """The paper's figure, where it has one for the case (it quantizes Q and K to INT4)."""
    if case.get("QK", "INT4") != "INT4" or case.get("V scale", "channel") != "channel" \
            or case.get("row sum", "rounded_p") != "rounded_p":
        return ""
    for value in case.values():
        if value in PUBLISHED[table]:
            return " / ".join("-" if x is None else f"{x:.2f}" for x in PUBLISHED[table][value])
    return ""


def grid(rows, columns, text):
    """A line for each case, a cell for each column; the columns' key is (input, keys)."""
    cases = {}
    for row in rows:
        cases.setdefault(tuple(labels(row).items()), {})[row["input"], row.get("keys")] = row
    for case, found in cases.items():
        yield dict(case), [text(found[column]) if column in found else "" for column in columns]


def metric_table(table, metric, title, factor, refusals):
    rows = table["rows"]
    columns = list(dict.fromkeys((row["input"], row.get("keys")) for row in rows))
    with_published = metric == "cos" and table["name"] in PUBLISHED
    head = [*labels(rows[0]), *(name for name, _ in columns)] + (["published"] if with_published else [])
    lines = []
    for case, cells in grid(rows, columns, lambda row: cell(row, metric, factor, refusals)):
        lines.append([*case.values(), *cells])
        if with_published:
            lines[-1].append(published_cell(table["name"], case))
    yield from [f"{title}, average / worst:", "", *markdown(head, lines), ""]


def accumulation_table(table, refusals):
    """Relative L1 averaged over the heads, in all and of accumulation alone; a grid for each input."""
    rows = table["rows"]
    for name in dict.fromkeys(row["input"] for row in rows):
        mine = [row for row in rows if row["input"] == name]
        columns = list(dict.fromkeys((name, row["keys"]) for row in mine))

        def text(row):
            if "refused" in row:
                return cell(row, "l1", 100, refusals)
            alone = row["accumulation_l1"]
            return number("l1", row["l1"] * 100) + \
                (f" ({number('l1', alone * 100)})" if alone is not None else "")

        head = [*labels(mine[0]), *(f"{keys} keys" for _, keys in columns)]
        yield f"`{name}`, relative L1 in %: average of the heads (distance to the same codes summed in fp32):"
        yield ""
        yield from markdown(head, [[*case.values(), *cells] for case, cells in grid(mine, columns, text)])
        yield ""


def order_sentence(table):
    """How the order of the published cases compares with SmolLM2's, from the figures."""
    published = PUBLISHED[table["name"]]
    cases = {}
    for row in table["rows"]:
        case = labels(row)
        if row["input"] == "smollm2" and "refused" not in row and published_cell(table["name"], case):
            cases[next(v for v in case.values() if v in published)] = row
    if len(cases) < len(published):
        return None
    theirs = sorted(published, key=lambda name: published[name][1])
    ours = sorted(cases, key=lambda name: cases[name]["worst_cos"])
    if theirs == ours:
        return f"Order by the worst head as published: {' < '.join(ours)}."
    return f"Order by the worst head, published: {' < '.join(theirs)}; SmolLM2: {' < '.join(ours)}."


def step_sentence(table):
    """How much of the way from block to token the granularity of a thread goes."""
    rows = {row["granularity"]: row for row in table["rows"]
            if row["input"] == "smollm2" and row["QK"] == "INT4"}
    if not all("cos" in rows.get(name, {}) for name in ("block", "thread", "token")):
        return None
    shares = [(rows["thread"][key] - rows["block"][key]) / (rows["token"][key] - rows["block"][key])
              for key in ("cos", "worst_cos")]
    return "From per block to per token, per thread goes {:.0%} of the way in the average of SmolLM2's heads, " \
           "{:.0%} in its worst.".format(*shares)


def section(table, pictures):
    name, refusals = table["name"], []
    yield from [f"## {TITLES[name]}", "", TEXTS[name], ""]
    yield from accuracy_figures.links(pictures)
    if name in ("accumulation", "types"):
        sources = {source["name"]: source for source in table["inputs"]}
        yield from [*(f"- `{source['name']}`: {source['text']}; {source['layers']} x {source['heads']} heads, "
                      f"{source['queries']} queries, head_dim {source['head_dim']}" for source in sources.values()
                      if name == "accumulation" or source["name"].startswith("cross")), ""]
    if name == "accumulation":
        yield from accumulation_table(table, refusals)
    else:
        for metric, title, factor in METRICS:
            yield from metric_table(table, metric, title, factor, refusals)
    for index, refusal in enumerate(refusals, 1):
        yield f"({index}) {refusal}"
        yield ""
    order = order_sentence(table) if name in PUBLISHED else None
    if name == "granularity":
        order = " ".join(filter(None, [order, step_sentence(table)]))
    yield from [*([order, ""] if order else []), NOTES[name].strip("\n"), ""]


def heading(report):
    yield from [INTRODUCTION, f"libsageattn {report['version']}, backend {report['backend']}; Python {report['python']}, NumPy "
                f"{report['numpy']}; {report['date']}; seed {report['seed']}; text {report['text']}"
                + (f"; models of PyPI {', '.join(report['packages'])}" if report["packages"] else "") + "."]
    if report["backend"] == "cpu":
        yield "The CPU backend gives the same bits on every machine; the activations depend in their last bits on NumPy's BLAS."
    yield f"It took {report['seconds']} s on {report['cores']} cores."
    if report["short"]:
        yield "**This is the short report: stored layers and short sequences, not all layers of the models.**"
    yield from ["", "<!-- not run: takes minutes -->", "```sh", report["command"], "python3 tests/make_accuracy.py", "```", "", "Inputs:", ""]
    for source in report["tables"][0]["inputs"]:
        heads = f"{source['heads']} heads" + (f" on {source['kv_heads']}" if source["kv_heads"] != source["heads"] else "")
        yield f"- `{source['name']}`: {source['text']}; {source['layers']} x {heads}, {source['queries']} tokens, " \
              f"head_dim {source['head_dim']}, mask {source['mask']}"
    yield ""


def measurements(docs, name):
    """None if there are none."""
    text = generated_document.read(os.path.join(docs, "accuracy", name))
    return None if text is None else json.loads(text)


def text_of(docs, report, figures):
    lines = [*heading(report)]
    for table in report["tables"]:
        if table["rows"]:
            lines += section(table, [path for path in accuracy_figures.OF_TABLE.get(table["name"], []) if path in figures])
    overheads, on_gpu = measurements(docs, "overheads.json"), measurements(docs, "ablation-cuda.json")
    if overheads is not None:
        lines += accuracy_on_gpu.overheads(overheads)
    if on_gpu is not None:
        lines += accuracy_on_gpu.same_on_gpu(report, on_gpu)
    return "\n".join(lines).rstrip("\n") + "\n"


def check_claims(docs, report, files):
    """Ends the program if a document lacks words that the measurements give."""
    perplexities = [measurements(docs, os.path.basename(path))
                    for path in sorted(glob.glob(os.path.join(docs, "accuracy", "perplexity*.json")))]
    claims = accuracy_claims.claims(report, measurements(docs, "overheads.json"), perplexities)
    for name, words in claims:
        text = files.get(name) or generated_document.read(os.path.join(docs, os.pardir, name))
        if text is not None and words not in " ".join(text.split()):
            sys.exit(f"{name} does not say what its data gives: {words}")


def document(docs):
    """The document, its figures, and numerics.md with its part; None if there is nothing to write."""
    report = measurements(docs, "ablation.json")
    if report is None:
        return None
    figures = accuracy_figures.figures(report)
    files = {"accuracy.md": text_of(docs, report, figures), **figures}
    numerics = generated_document.read(os.path.join(docs, "numerics.md"))
    if numerics is not None:
        part = "\n".join(accuracy_figures.summary(report)).rstrip("\n")
        files["numerics.md"] = generated_document.with_part(numerics, __file__, part)
    check_claims(docs, report, files)
    return files


if __name__ == "__main__":
    generated_document.main(__file__, __doc__, "accuracy.md", document)
