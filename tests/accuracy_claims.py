"""What documents say in prose of docs/accuracy/*.json, made from the data, so that --check sees a figure that no longer holds.

claims() yields a document's name and words that must stand in it. Nothing is claimed of data that is not there, nor of a
short report.
"""



def span(values, form, scale=1):
    """The least and the largest, or one figure where they read the same."""
    ends = [format(scale * end, form) for end in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


class Ablation:
    """Rows by what names them."""

    def __init__(self, report):
        self._rows = {table["name"]: table["rows"] for table in report["tables"]}

    def __call__(self, table, field=None, source="smollm2", **labels):
        """The field of all rows, or the row, with these labels; underscores stand for spaces and commas."""
        names = {"P_V": "P, V", "V_scale": "V scale", "row_sum": "row sum", "V_smoothed": "V smoothed"}
        wanted = {names.get(key, key): value for key, value in labels.items()} | ({"input": source} if source else {})
        found = [row for row in self._rows[table] if all(row.get(key) == value for key, value in wanted.items())]
        return found if field is None else [row[field] for row in found]

    def cos(self, table, digits, source="smollm2", **labels):
        [row] = self(table, None, source, **labels)
        return f"{100 * row['cos']:.{digits}f} / {100 * row['worst_cos']:.{digits}f}"

    def ratios(self, table, value, one, other, keep=lambda row: True):
        """Of `value` in rows with labels `one` to the same rows with labels `other`."""
        def key(row):
            return row["input"], *(row.get(label) for label in ("smoothed", "V smoothed", "keys") if label not in one)

        below = {key(row): row[value] for row in self(table, None, None, **other)}
        return [row[value] / below[key(row)] for row in self(table, None, None, **one) if keep(row)]


def of_ablation(report):
    find = Ablation(report)
    f16, bf16 = ({"preset": "EXACT", "inputs": kind} for kind in ("f16", "bf16"))
    types = find.ratios("types", "l1", bf16, f16, lambda row: row["input"] != "v_bias")
    [biased] = find.ratios("types", "l1", bf16, f16, lambda row: row["input"] == "v_bias")
    yield "accuracy.md", f"bf16 inputs cost {span(types, '.1f')} times what fp16 inputs do (EXACT), {biased:.1f} times on `v_bias`"

    def beside_exact(preset, kind, source="v_bias"):
        [row] = find("types", "l1", source, preset=preset, inputs=kind)
        return row / find("types", "l1", source, preset="EXACT", inputs=kind)[0]

    yield "accuracy.md", f"SAGE2_8B has {span([beside_exact('SAGE2_8B', kind) for kind in ('f16', 'bf16')], '.2f')} times EXACT's " \
        f"error there, SAGE2_4B {beside_exact('SAGE2_4B', 'f16'):.2f} times with fp16 inputs"
    yield "accuracy.md", "on `outlier_channels` bf16 makes SAGE2_8B's error {:.2f} times as large".format(
        *find.ratios("types", "l1", {"preset": "SAGE2_8B", "inputs": "bf16"}, {"preset": "SAGE2_8B", "inputs": "f16"},
                     lambda row: row["input"] == "outlier_channels"))
    yield "accuracy.md", f"by a factor of {span(find.ratios('qk', 'l1', {'QK': 'E4M3'}, {'QK': 'INT8'}), '.1f')} in relative L1"

    channel = {"V_scale": "channel", "row_sum": "rounded_p"}
    saved = find.ratios("pv", "l1", {"P_V": "E4M3", **channel, "V_scale": "64 keys"}, {"P_V": "E4M3", **channel})
    yield "accuracy.md", f"(E4M3: {span([1 - ratio for ratio in saved], '.0f', 100)} % of the error)"
    for words, name in (("E4M3", "E4M3"), ("E5M2", "E5M2")):
        ratios = find.ratios("pv", "l1", {"P_V": name, **channel}, {"P_V": name, **channel, "row_sum": "p"})
        yield "accuracy.md", f"{words} {span(ratios, '.2f')}"
    yield "numerics.md", "with E4M3 {} times the error of the sum of P".format(
        span(find.ratios("pv", "l1", {"P_V": "E4M3", **channel}, {"P_V": "E4M3", **channel, "row_sum": "p"}), ".2f"))

    def sums(name, smooth, source, keys=None, field="l1"):
        labels = {"accumulation": name, "V_smoothed": smooth, **({"keys": keys} if keys else {})}
        return find("accumulation", field, source, **labels)

    def at(*arguments):
        [value] = sums(*arguments)
        return 100 * value

    single = [at("single-level", "off", "bias", keys) for keys in (1024, 4096, 65536)]
    yield "accuracy.md", f"a single level loses {single[0]:.1f} % at 1024 keys and {single[2]:.0f} % at 65536, two levels " \
        f"{span(sums('two-level, 128', 'off', 'bias', None, 'accumulation_l1'), '.2f', 100)} % at 128 keys whatever the length, " \
        f"{span(sums('two-level, 1024', 'off', 'bias', None, 'accumulation_l1'), '.1f', 100)} % at 1024 keys"
    drift = [at("two-level, 1024", smooth, "drift", 65536) for smooth in ("off", "group")]
    fp32 = [at("fp32", smooth, "drift", 65536) for smooth in ("off", "group")]
    yield "accuracy.md", f"from {drift[0]:.2f} to {drift[1]:.3f} %, where fp32 sums of the same codes give {fp32[1]:.3f} %, and " \
        f"{fp32[0]:.3f} % of V as it is"
    yield "accuracy.md", f"({span(sums('fp16, 64', 'off', 'bias'), '.2f', 100)} % beside " \
        f"{span(sums('two-level, 128', 'off', 'bias'), '.2f', 100)} %)"

    def beside_two_levels(*smooths):
        return span([ratio for smooth in smooths for ratio in find.ratios(
            "accumulation", "l1", {"accumulation": "fp16, 64", "V_smoothed": smooth},
            {"accumulation": "two-level, 128", "V_smoothed": smooth}, lambda row: row["input"] == "bias")], ".2f")

    yield "accuracy.md", f"once it is smoothed, {beside_two_levels('sequence', 'group')} times their error"

    two = [at("two-level, 128", "off", "bias", keys) for keys in (4096, 65536)]
    yield "numerics.md", f"one level: an error of {single[1]:.1f} % at 4096 and {single[2]:.0f} % at 65536 keys where V has an " \
        f"offset; promoted every 128 keys {two[0]:.2f} and {two[1]:.2f} %"
    yield "numerics.md", f"{drift[0]:.2f} % unsmoothed or smoothed over the sequence, {drift[1]:.3f} % by groups, as with fp32 " \
        f"sums of the same codes ({fp32[0]:.3f} % with fp32 sums of V as it is)"

    def smoothed(digits, qk, name):
        return find.cos("smoothing", digits, QK=qk, smoothed=name)

    yield "numerics.md", f"INT4 {smoothed(1, 'INT4', 'none')} without any smoothing, {smoothed(1, 'INT4', 'K')} with K's, INT8 " \
        f"{smoothed(3, 'INT8', 'none')} and {smoothed(3, 'INT8', 'K')}"
    yield "numerics.md", f"INT4 {smoothed(1, 'INT4', 'K')} without, {smoothed(1, 'INT4', 'Q+K')} with it"
    yield "numerics.md", f"({smoothed(1, 'INT4', 'Q+K, Hadamard')}) in INT4"
    block, thread, token = (find.cos("granularity", 1, QK="INT4", granularity=name) for name in ("block", "thread", "token"))
    yield "numerics.md", f"INT4 per block {block}, per thread {thread}; per token {token}"
    e4m3, f16 = (find.cos("pv", 3, P_V=name, **channel) for name in ("E4M3", "FP16"))
    yield "numerics.md", f"{e4m3} beside {f16} in FP16"
    cosines = [100 * find("pv", "cos", source, P_V=name, **channel)[0]
               for name, source in (("E5M2", "smollm2"), ("INT8", "smollm2"), ("INT8", "sink"))]
    yield "numerics.md", "E5M2 {:.3f}, INT8 {:.3f} and, with an attention sink, {:.1f}".format(*cosines)


def of_overheads(report):
    def shares(baseline, technique, head_dim=None, seq=None, alone=False):
        [base] = [one for one in report["baselines"] if one["name"] == baseline]
        [found] = [one for one in base["techniques"] if one["name"] == technique]
        return [row["attention_ms"]["with"] / row["attention_ms"]["without"] - 1 if alone else row["overhead"]
                for row in found["rows"] if head_dim in (None, row["head_dim"]) and seq in (None, row["seq"])]

    eight, four, half = "SAGE2_8B, wgmma", "SAGE2_4B, wgmma", "promotion every 512 keys, not 1024"
    yield "numerics.md", f"worth {span(shares(eight, half, alone=True), '.0f', 100)} % of the kernel's time against 512"
    yield "numerics.md", f"512 keys cost {span(shares(eight, half, 128), '.0f', 100)} % of the time on an H200 at d = 128, " \
        f"{span(shares(eight, half, 64), '.0f', 100)} % at d = 64"
    short = [share for name in (eight, four) for share in shares(name, "K smoothed", seq=4096)]
    long = [share for name in (eight, four) for share in shares(name, "K smoothed", seq=16384)]
    yield "numerics.md", f"costs {span(short, '.1f', 100)} % of the time at 4096 tokens on an H200, at 16384 {span(long, '.1f', 100)} %"
    smooth_q = shares(eight, "Q smoothed", 128)
    yield "README.md", f"makes the time {span(smooth_q, '.0f', 100)} % longer"
    yield "numerics.md", f"INT8 gains 0.02 and takes {span(shares(eight, 'Q smoothed'), '.0f', 100)} % longer on an H200"
    [lse] = shares(eight, "log-sum-exp", 128, 4096)
    yield "README.md", f"log-sum-exp costs some {100 * lse:.0f} % at 4096 tokens"


def of_perplexity(reports):
    def changes(name):
        return span([row["change"] for report in reports for part in report["contexts"] for row in part["rows"]
                     if row["name"] == name], "+.1f", 100)

    yield "numerics.md", f"perplexity {changes('sage2_8b')} % with SAGE2_8B, {changes('sage2_4b')} % with SAGE2_4B"


def claims(ablation, overheads, perplexities):
    """(document, words) that must stand in it."""
    if not ablation["short"]:
        yield from of_ablation(ablation)
    if overheads is not None:
        yield from of_overheads(overheads)
    if perplexities:
        yield from of_perplexity(perplexities)
