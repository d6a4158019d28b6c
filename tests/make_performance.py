#!/usr/bin/env python3
"""Writes docs/performance.md from the measurements in docs/performance/.

    make_performance.py [--check] [DOCS]

DOCS is the folder of performance.md and performance/ (default: docs). Each performance/NAME.json is what
`sageattn bench --json` wrote; a NAME.svg beside it is shown. With --check nothing is written, and the exit
code is 1 if performance.md is not what would be. No measurements, no performance.md.
"""

import glob
import json
import os

import generated_document

INTRODUCTION = """# Performance

Written by `tests/make_performance.py` from the files in [performance/](performance/), each by one run of `sageattn bench`.

TOPS = 4 batch heads tokens^2 dim (half of it if causal) / time, the median of many executes. *End to end* is a whole
execute, from inputs in memory to the output in memory; *attention alone* its attention launches, *preparation* all others, each
launch timed by itself. *Of peak* is attention alone against what the tensor core reaches in a loop of nothing but the same
products; *of copy* is the least that preparation must move (inputs read once, quantized operands written once) a second,
against a plain copy.
"""


def cell(value):
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 3}f}"


def throughput(row):
    text = cell(row["tops"])
    if row["attention_tops"] is not None:
        text += " / " + cell(row["attention_tops"])
    if row["attention_peak_share"] is not None:
        text += f" ({row['attention_peak_share']:.0%})"
    return text


def milliseconds(row):
    return cell(row["ms"])


def preparation(row):
    text = cell(row["preparation_ms"])
    if row["preparation_copy_share"] is not None:
        text += f" ({row['preparation_copy_share']:.0%})"
    return text


def table(rows, text):
    """A line for each preset, kernel, dim and mask, a column for each number of tokens."""
    seqs = sorted({row["seq"] for row in rows})
    lines = {}
    for row in rows:
        line = row["preset"], row["kernel_name"], row["head_dim"], row["mask"]
        lines.setdefault(line, {})[row["seq"]] = text(row)
    yield "| preset | kernel | dim | mask | " + " | ".join(map(str, seqs)) + " |"
    yield "|---|---|---|---|" + "---:|" * len(seqs)
    for line, cells in lines.items():
        yield "| " + " | ".join([*map(str, line), *(cells.get(seq, "-") for seq in seqs)]) + " |"


def section(report, name, picture):
    machine, settings = report["machine"], report["settings"]
    rows = [row for row in report["rows"] if "error" not in row]
    yield f"## {machine['name']}, {settings['dtype']}, batch {settings['batch']}, heads " \
          f"{settings['heads']}/{settings['kv_heads']}"
    yield ""
    facts = [f"{key.replace('_', ' ')} {value}" for key, value in machine.items()
             if key not in ("name", "rates") and value is not None]
    yield f"libsageattn {report['version']} (sources {report['source_id'][:12]}), {report['date']}; " \
          f"{', '.join(facts)}; median of {settings['repeat']}. Data: [{name}.json](performance/{name}.json)"
    if machine["rates"]:
        rates = machine["rates"]
        yield ""
        yield f"Peaks: {rates['s8_tops']:g} TOPS with INT8, {rates['e4m3_tops']:g} with E4M3, " \
              f"{rates['copy_bytes_per_second'] / 1e12:g} TB/s ({rates['source']})."
    yield from ["", "<!-- not run: needs that machine -->", "```sh", report["command"], "```", ""]
    if picture:
        yield from [f"![TOPS against tokens](performance/{name}.svg)", ""]
    launches = any(row["attention_tops"] is not None for row in rows)
    yield "TOPS" + (": end to end / attention alone (of peak)" if launches else ", end to end")
    yield from ["", *table(rows, throughput), "", "ms, end to end", "", *table(rows, milliseconds)]
    if launches:
        yield from ["", "Preparation, ms (of copy)", "", *table(rows, preparation)]
    errors = {}
    for row in report["rows"]:
        if "error" in row:
            errors.setdefault(row["error"], set()).add(row["preset"])
    if errors:
        yield ""
        yield "Not run:"
        yield ""
        for error, presets in errors.items():
            yield f"- {', '.join(sorted(presets))}: {error}"


def document(docs):
    """None if there is nothing to write."""
    files = sorted(glob.glob(os.path.join(docs, "performance", "*.json")))
    if not files:
        return None
    lines = [INTRODUCTION]
    for path in files:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        name = os.path.splitext(os.path.basename(path))[0]
        picture = os.path.exists(os.path.join(docs, "performance", name + ".svg"))
        lines += [*section(report, name, picture), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    generated_document.main(__file__, __doc__, "performance.md", document)
