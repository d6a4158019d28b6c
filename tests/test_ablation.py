#!/usr/bin/env python3
"""Runs examples/python/ablation.py --short and holds its figures to what they must show.

    test_ablation.py SCRATCH     the library is $SAGEATTN_LIBRARY; needs NumPy, else exit code 77

Expectations relate the errors of two rows, or bound the error of one. The report must meet them all. So that none is
vacuous, each is shown to fail, and no expectation on other rows with it, once one error of the report is put just beyond
its limit, and once that error is LOOSEST times as large as it is.
"""

import copy
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import accuracy_on_gpu

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Row = dict[str, Any]


LOOSEST = 4  # an error so many times as large as it should be may pass nowhere


def find(report: Row, table: str, labels: dict[str, Any]) -> Row:
    rows = next(t for t in report["tables"] if t["name"] == table)["rows"]
    [row] = [r for r in rows if all(r.get(k) == v for k, v in labels.items())]
    return row


def error(row: Row, value: str) -> float:
    """Of cos and worst_cos the distance to 1."""
    return 1 - float(row[value]) if value.endswith("cos") else float(row[value])


def put(row: Row, value: str, wrong: float) -> None:
    """Makes error() what is given."""
    row[value] = 1 - wrong if value.endswith("cos") else wrong


@dataclass(frozen=True)
class Relation:
    """Row `better` of the table must have less than `factor` times row `worse`'s error."""

    table: str
    input: str
    better: dict[str, str]
    worse: dict[str, str]
    value: str
    factor: float = 1.0
    keys: int | None = None

    def row(self, report: Row, case: dict[str, str] | None = None) -> Row:
        keys = {"keys": self.keys} if self.keys else {}
        return find(report, self.table, {"input": self.input, **keys, **(case or self.better)})

    def limit(self, report: Row) -> float:
        return self.factor * error(self.row(report, self.worse), self.value)

    def holds(self, report: Row) -> bool:
        return error(self.row(report), self.value) < self.limit(report)

    def wrong(self, report: Row) -> list[float]:
        """Errors of row `better` that must not pass."""
        return [1.001 * self.limit(report), LOOSEST * error(self.row(report), self.value)]

    def rows(self, report: Row) -> list[Row]:
        return [self.row(report), self.row(report, self.worse)]


@dataclass(frozen=True)
class Range:
    """A row's error must be what was measured, give or take a share of it."""

    table: str
    input: str
    case: dict[str, str]
    value: str
    measured: float
    tolerance: float
    keys: int

    def row(self, report: Row) -> Row:
        return find(report, self.table, {"input": self.input, "keys": self.keys, **self.case})

    def holds(self, report: Row) -> bool:
        return abs(error(self.row(report), self.value) / self.measured - 1) <= self.tolerance

    def wrong(self, report: Row) -> list[float]:
        beyond = 1.001 * self.tolerance
        found = error(self.row(report), self.value)
        return [self.measured * (1 + beyond), self.measured * (1 - beyond), found * LOOSEST, found / LOOSEST]

    def rows(self, report: Row) -> list[Row]:
        return [self.row(report)]


Expectation = Relation | Range


def expectations() -> list[Expectation]:
    """What is far enough apart to be demanded: a factor below 1 says how far."""
    def smoothing(qk: str, better: str, worse: str, *rest: Any) -> Expectation:
        return Relation("smoothing", rest[0], {"QK": qk, "smoothed": better},
                           {"QK": qk, "smoothed": worse}, *rest[1:])

    def granularity(better: str, worse: str, source: str) -> Expectation:
        return Relation("granularity", source, {"QK": "INT4", "granularity": better},
                           {"QK": "INT4", "granularity": worse}, "cos", 0.95)

    def formats(better: str, worse: str, source: str, factor: float) -> Expectation:
        rest = {"V scale": "channel", "row sum": "rounded_p"}
        return Relation("pv", source, {"P, V": better, **rest}, {"P, V": worse, **rest}, "l1", factor)

    def accumulation(better: str, smooth: str, worse: str, other: str, source: str,
                     factor: float) -> Expectation:
        return Relation("accumulation", source, {"accumulation": better, "V smoothed": smooth},
                        {"accumulation": worse, "V smoothed": other}, "l1", factor, 4096)

    def row_sum(formats: str, better: str, worse: str, source: str, factor: float) -> Expectation:
        rest = {"P, V": formats, "V scale": "channel"}
        return Relation("pv", source, {**rest, "row sum": better}, {**rest, "row sum": worse}, "l1", factor)

    def truncation(interval: int, measured: float, tolerance: float) -> Expectation:
        """What two levels lose of a biased V, which is what tells their interval."""
        return Range("accumulation", "bias", {"accumulation": f"two-level, {interval}", "V smoothed": "off"},
                     "accumulation_l1", measured, tolerance, 4096)

    return [
        *(smoothing("INT4", better, worse, "smollm2", value, 0.8)
          for better, worse in (("K", "none"), ("Q", "none"), ("Q+K", "K"), ("Q+K", "Q"), ("SmoothAttn", "none"))
          for value in ("cos", "l1")),
        smoothing("INT4", "Q+K", "none", "smollm2", "worst_cos", 0.4),
        smoothing("INT4", "Q+K", "none", "outlier_channels", "cos", 0.4),
        smoothing("INT4", "Q+K, Hadamard", "Q+K", "fa3", "cos", 0.5),
        smoothing("INT8", "K", "none", "smollm2", "cos", 0.8),
        smoothing("INT8", "Q+K", "K", "smollm2", "cos", 0.5),
        *(Relation("smoothing", "smollm2", {"QK": "INT8", "smoothed": name},
                   {"QK": "INT4", "smoothed": name}, "l1", 0.2) for name in ("none", "K", "Q+K")),
        *(granularity(better, worse, source) for source in ("smollm2", "minilm", "fa3")
          for better, worse in (("token", "thread"), ("thread", "warp"), ("warp", "block"), ("block", "tensor"))),
        *(formats("E4M3", "E5M2", source, 0.7) for source in ("smollm2", "minilm", "sink")),
        formats("E4M3", "INT8", "sink", 0.1),
        formats("FP16", "E4M3", "smollm2", 0.7),
        accumulation("two-level, 128", "off", "single-level", "off", "bias", 0.03),
        accumulation("single-level", "sequence", "single-level", "off", "bias", 0.001),
        accumulation("two-level, 512", "group", "two-level, 512", "sequence", "drift", 0.3),
        accumulation("two-level, 512", "group", "two-level, 512", "off", "drift", 0.3),
        accumulation("two-level, 128", "off", "two-level, 512", "off", "drift", 0.6),
        truncation(128, 0.00044, 0.3),
        truncation(1024, 0.0148, 0.1),
        row_sum("E4M3", "rounded_p", "p", "v_bias", 0.8),
        row_sum("INT8", "p", "rounded_p", "outlier_channels", 0.7),
        *(Relation("qk", source, {"smoothed": "Q+K", "QK": "INT8"}, {"smoothed": "Q+K", "QK": "E4M3"},
                   "l1", 0.7) for source in ("smollm2", "minilm", "outlier_channels")),
        Relation("types", "smollm2", {"preset": "EXACT", "inputs": "f16"},
                 {"preset": "EXACT", "inputs": "bf16"}, "l1", 0.15),
        *(Relation("types", source, {"preset": "SAGE2_8B", "inputs": "f16"},
                   {"preset": "SAGE2_4B", "inputs": "f16"}, "l1", 0.5)
          for source in ("smollm2", "cross_layers", "cross_models")),
    ]


def close_faults(report: Row) -> list[str]:
    """E4M3 must be close to FP16: P and V may cost no more than 3e-4 of CosSim on the models."""
    faults = []
    for source in ("smollm2", "minilm"):
        rows = [r for t in report["tables"] if t["name"] == "pv" for r in t["rows"]
                if r["input"] == source and r["row sum"] == "rounded_p" and r["V scale"] == "channel"]
        cos = {row["P, V"]: row["cos"] for row in rows}
        if cos["FP16"] - cos["E4M3"] > 3e-4:
            faults.append(f"pv, {source}: E4M3 has CosSim {cos['E4M3']}, FP16 {cos['FP16']}")
    return faults


def refusal_faults(report: Row) -> list[str]:
    """What the library must refuse is in the report as such, and nothing else is refused."""
    faults = []
    for table in report["tables"]:
        for row in table["rows"]:
            expected = row.get("accumulation") == "single-level" and row["V smoothed"] == "group"
            if expected != ("SINGLE_LEVEL" in row.get("refused", "")):
                faults.append(f"{table['name']}: {row}")
    return faults


def mutation_faults(report: Row) -> list[str]:
    """Expectations and checks that a wrong report would pass."""
    faults, every = [], expectations()
    for expectation in every:
        row, value = expectation.row(report), expectation.value
        for wrong in expectation.wrong(report):
            right = row[value]
            put(row, value, wrong)
            broken = [other for other in every if not other.holds(report)]
            if expectation not in broken:
                faults.append(f"holds with an error of {wrong:.4g}: {expectation}")
            faults += [f"fails where another row is wrong: {other}" for other in broken
                       if not any(row is its for its in other.rows(report))]
            row[value] = right
    return faults + check_faults(report)


def check_faults(report: Row) -> list[str]:
    """Other checks that a wrong report would pass."""
    faults: list[str] = []
    wrong = copy.deepcopy(report)
    for table in wrong["tables"]:
        for row in table["rows"]:
            if row.get("P, V") == "E4M3":
                row["cos"] -= 1e-3
    if not close_faults(wrong):
        faults.append("E4M3 far from FP16 goes unnoticed")
    for table in wrong["tables"]:
        table["rows"] = [row for row in table["rows"] if "refused" not in row or row.pop("refused")]
    if not refusal_faults(wrong):
        faults.append("a missing refusal goes unnoticed")
    return faults


def document_faults(path: str) -> list[str]:
    """The report must make a document, and --check must see a change of it."""
    docs = os.path.dirname(os.path.dirname(path))
    make = [sys.executable, "-B", os.path.join(ROOT, "tests", "make_accuracy.py")]
    subprocess.run([*make, docs], check=True)
    subprocess.run([*make, "--check", docs], check=True)
    faults = []
    for name in ("accuracy.md", os.path.join("accuracy", "bias.svg")):
        with open(os.path.join(docs, name), "a", encoding="utf-8") as file:
            file.write("changed\n")
        changed = subprocess.run([*make, "--check", docs], check=False, capture_output=True)
        if changed.returncode != 1:
            faults.append(f"make_accuracy.py --check overlooks a change of {name}")
        subprocess.run([*make, docs], check=True)
    return faults


def comparison_faults(report: Row) -> list[str]:
    """The section about a GPU must find the largest difference, among the rows that can be compared."""
    other = copy.deepcopy(report)
    table = next(part for part in other["tables"] if part["name"] == "smoothing")
    table["rows"][0] = {**table["rows"][0], "refused": "no such kernel"}
    table["rows"][1]["cos"] -= 0.125
    table["inputs"][2]["queries"] += 1  # another input, which is not compared
    for row in table["rows"]:
        if row["input"] == table["inputs"][2]["name"]:
            row["cos"] = 0
    text = "\n".join(accuracy_on_gpu.same_on_gpu(report, other))
    inputs = len(table["inputs"])
    wanted = (f"| smoothing | {len(table['rows']) * (inputs - 1) // inputs - 1} | 1 | 12 (", "- 1 rows: no such kernel")
    return [f"the comparison with a GPU lacks {part!r}" for part in wanted if part not in text]


def main(scratch: str) -> int:
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("no NumPy: skipped")
        return 77
    path = os.path.join(scratch, "accuracy", "ablation.json")
    command = [sys.executable, "-B", os.path.join(ROOT, "examples", "python", "ablation.py"),
               "--short", "--backend", "cpu", "--out", path]
    subprocess.run(command, check=True)
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    faults = [f"{e}: the errors are {', '.join(f'{error(row, e.value):.4g}' for row in e.rows(report))}"
              for e in expectations() if not e.holds(report)]
    faults += close_faults(report) + refusal_faults(report) + mutation_faults(report) + document_faults(path)
    faults += comparison_faults(report)
    for fault in faults:
        print(fault)
    print(f"{len(expectations())} expectations, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
