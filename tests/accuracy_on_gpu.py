"""Sections of docs/accuracy.md that need a GPU's measurements: overheads.json and ablation-cuda.json."""

import math

from generated_document import markdown

# Overheads in % of SageAttention2 (arXiv 2411.10958) on an L20: 284 TOPS, 283 with scales per thread, 283
# with two levels besides, 273 with Q smoothed besides; 268 with scales per token.
PUBLISHED = {"scales per thread, not per block": (284, 283), "scales per token, not per thread": (283, 268),
             "two levels, every 128 keys": (283, 283), "Q smoothed": (283, 273)}
OVERHEADS = """## What each technique costs in time

Every technique is switched alone, on or off, in `sageattn bench`, between two runs of its baseline; the figure is time with it / time
without - 1 of whole executes, in brackets of the attention launches alone. Negative: faster. *Baseline*: its ms, and how
far its runs lie apart, below which no figure says anything. *Published*: SageAttention2's paper on an L20, where each
comes on top of the one before (284 TOPS, 283, 283, 273; what its first scales are is not said, per block is our guess). "-": not
run, and why.
"""
SAME = """## The same on a GPU

The tables above are of the CPU backend, which emulates the tensor core. This is how far the rows that a GPU can run, too, are from
them: the largest difference over all rows of a table, in percentage points of the average of heads. Activations of the models
differ in their last bits where NumPy's BLAS does.
"""
MEASURED = ("cos", "l1", "rmse", "worst_cos", "worst_l1", "worst_rmse", "worst_at", "plan", "refused",
              "accumulation_l1")


def footnote(text, notes):
    if text not in notes:
        notes.append(text)
    return f"- ({notes.index(text) + 1})"


def footnotes(notes):
    for index, note in enumerate(notes, 1):
        yield from [f"({index}) {note}", ""]


def percent(share):
    return f"{share * 100:+.1f}"


def overhead_cell(row):
    alone = row["attention_ms"]
    return percent(row["overhead"]) + (f" ({percent(alone['with'] / alone['without'] - 1)})" if alone else "")


def overheads(report):
    machine, settings, notes = report["machine"], report["settings"], []
    yield from [OVERHEADS]
    if machine["backend"] != "cuda":
        yield from ["**Not a GPU's: times of the CPU backend, which say nothing about what a technique costs on one.**", ""]
    facts = "".join(f"{key} {machine[key]}, " for key in ("driver", "cuda", "nvrtc") if machine.get(key))
    yield (f"{machine['name']}; {facts}libsageattn {report['version']} ({report['source_id'][:12]}); "
           f"{settings['dtype']}, batch {settings['batch']}, heads {settings['heads']}, full, medians of "
           f"{settings['repeat']}; {report['date']}; {report['seconds']} s.")
    yield from ["", "<!-- not run: needs a GPU -->", "```sh", report["command"], "```", ""]
    for baseline in report["baselines"]:
        if "refused" in baseline:
            yield from [f"{baseline['name']}: {footnote(baseline['refused'], notes)}", ""]
            continue
        shapes = [(row["head_dim"], row["seq"]) for row in baseline["rows"]]
        lines = [["*baseline*", "", *(f"{row['ms']:.4g} ms, {row['spread'] * 100:.1f} %" for row in baseline["rows"]), ""]]
        for technique in baseline["techniques"]:
            rows = {(row["head_dim"], row["seq"]): row for row in technique.get("rows", [])}
            refused = footnote(technique["refused"], notes) if "refused" in technique else None
            published = PUBLISHED.get(technique["name"])
            flags = " ".join(f"--{name} {value}".rstrip() for name, value in technique["flags"].items())
            lines.append([technique["name"], f"`{flags}`", *(overhead_cell(rows[shape]) if shape in rows else refused or ""
                                                             for shape in shapes),
                          percent(published[0] / published[1] - 1) if published else ""])
        flags = "".join(f" --{name} {value}" for name, value in baseline["flags"].items())
        yield from [f"{baseline['name']} (`--preset {baseline['preset']} --kernel {baseline['kernel']}{flags}`), %:", "",
                    *markdown(["technique", "switched by", *(f"d = {dim}, {seq}" for dim, seq in shapes), "published"],
                              lines), ""]
    yield from footnotes(notes)


def case(row):
    return tuple((key, value) for key, value in row.items() if key not in MEASURED)


def distance(one, other):
    """A NaN is as far from everything as can be."""
    return math.inf if math.isnan(one - other) else abs(one - other)


def described(key):
    return ", ".join(str(value) for _, value in key)


def same_on_gpu(cpu, gpu):
    """Compares rows of the same case on the same input; an input of another length is another input."""
    yield SAME
    facts = [gpu.get("gpu", "a GPU"), *(f"{key} {gpu[key]}" for key in ("driver", "cuda") if key in gpu)]
    yield from [", ".join([*facts, f"libsageattn {gpu['version']}", gpu["date"], f"{gpu['seconds']} s"]) + ".", "",
                "<!-- not run: needs a GPU -->", "```sh", gpu["command"], "```", ""]
    lines, reasons = [], {}
    for table in gpu["tables"]:
        other = next(part for part in cpu["tables"] if part["name"] == table["name"])
        known = [source["name"] for source in table["inputs"] if source in other["inputs"]]
        theirs = {case(row): row for row in other["rows"] if "refused" not in row}
        pairs = [(case(row), row, theirs[case(row)]) for row in table["rows"]
                 if "refused" not in row and row["input"] in known and case(row) in theirs]
        refused = [row["refused"] for row in table["rows"] if "refused" in row]
        for reason in refused:
            reasons[reason] = reasons.get(reason, 0) + 1
        cells = []
        for metric in ("cos", "l1"):
            if pairs:
                key, row, their = max(pairs, key=lambda pair: distance(pair[1][metric], pair[2][metric]))
                cells.append(f"{abs(row[metric] - their[metric]) * 100:.2g} ({described(key)}: "
                             f"{their[metric] * 100:.5g}, GPU {row[metric] * 100:.5g})")
            else:
                cells.append("-")
        lines.append([table["name"], str(len(pairs)), str(len(refused)), *cells])
    yield from [*markdown(["table", "rows compared", "rows that a GPU refuses", "CosSim, % (where)", "relative L1, % (where)"],
                          lines), ""]
    if reasons:
        yield from ["Refused:", "", *(f"- {count} rows: {reason}" for reason, count in reasons.items()), ""]
