#!/usr/bin/env python3
"""Runs examples/python/ablation.py --short and holds its figures to what they must show.

    test_ablation.py SCRATCH     the library is $SAGEATTN_LIBRARY; needs NumPy, else exit code 77

Each expectation relates two rows. The report must meet them all, and must fail each of them once the
two rows are swapped: an expectation that cannot fail is a fault of this test.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import accuracy_on_gpu

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Row = dict[str, Any]


@dataclass(frozen=True)
class Expectation:
    """row `better` of the table must have less than `factor` times row `worse`'s value."""

    table: str
    input: str
    better: dict[str, str]
    worse: dict[str, str]
    value: Callable[[Row], float]
    factor: float = 1.0
    keys: int | None = None

    def rows(self, report: Row) -> tuple[Row, Row]:
        table = next(t for t in report["tables"] if t["name"] == self.table)
        wanted = {"input": self.input, **({"keys": self.keys} if self.keys else {})}
        found = []
        for case in (self.better, self.worse):
            labels = {**wanted, **case}
            [row] = [r for r in table["rows"] if all(r.get(k) == v for k, v in labels.items())]
            found.append(row)
        return found[0], found[1]

    def holds(self, report: Row) -> bool:
        better, worse = self.rows(report)
        return self.value(better) < self.factor * self.value(worse)

    def swapped(self, report: Row) -> Row:
        """The report with what was measured of the two rows exchanged."""
        report = copy.deepcopy(report)
        better, worse = self.rows(report)
        for key in ("cos", "l1", "rmse", "worst_cos", "worst_l1", "worst_rmse"):
            better[key], worse[key] = worse[key], better[key]
        return report


def distance(row: Row) -> float:
    return 1 - float(row["cos"])


def worst_distance(row: Row) -> float:
    return 1 - float(row["worst_cos"])


def l1(row: Row) -> float:
    return float(row["l1"])


def expectations() -> list[Expectation]:
    """What is far enough apart to be demanded: a factor below 1 says how far."""
    def smoothing(qk: str, better: str, worse: str, *rest: Any) -> Expectation:
        return Expectation("smoothing", rest[0], {"QK": qk, "smoothed": better},
                           {"QK": qk, "smoothed": worse}, *rest[1:])

    def granularity(better: str, worse: str, source: str) -> Expectation:
        return Expectation("granularity", source, {"QK": "INT4", "granularity": better},
                           {"QK": "INT4", "granularity": worse}, distance, 0.95)

    def formats(better: str, worse: str, source: str, factor: float) -> Expectation:
        rest = {"V scale": "channel", "row sum": "rounded_p"}
        return Expectation("pv", source, {"P, V": better, **rest}, {"P, V": worse, **rest}, l1, factor)

    def accumulation(better: str, smooth: str, worse: str, other: str, source: str,
                     factor: float) -> Expectation:
        return Expectation("accumulation", source, {"accumulation": better, "V smoothed": smooth},
                           {"accumulation": worse, "V smoothed": other}, l1, factor, 4096)

    return [
        *(smoothing("INT4", better, worse, "smollm2", value, 0.8)
          for better, worse in (("K", "none"), ("Q", "none"), ("Q+K", "K"), ("Q+K", "Q"), ("SmoothAttn", "none"))
          for value in (distance, l1)),
        smoothing("INT4", "Q+K", "none", "smollm2", worst_distance, 0.4),
        smoothing("INT4", "Q+K", "none", "outlier_channels", distance, 0.4),
        smoothing("INT4", "Q+K, Hadamard", "Q+K", "fa3", distance, 0.5),
        smoothing("INT8", "K", "none", "smollm2", distance, 0.8),
        smoothing("INT8", "Q+K", "K", "smollm2", distance, 0.5),
        *(Expectation("smoothing", "smollm2", {"QK": "INT8", "smoothed": name},
                      {"QK": "INT4", "smoothed": name}, l1, 0.2) for name in ("none", "K", "Q+K")),
        *(granularity(better, worse, source) for source in ("smollm2", "minilm", "fa3")
          for better, worse in (("token", "thread"), ("thread", "warp"), ("warp", "block"), ("block", "tensor"))),
        *(formats("E4M3", "E5M2", source, 0.7) for source in ("smollm2", "minilm", "sink")),
        formats("E4M3", "INT8", "sink", 0.1),
        formats("FP16", "E4M3", "smollm2", 0.7),
        accumulation("two-level, 128", "off", "single-level", "off", "bias", 0.1),
        accumulation("single-level", "sequence", "single-level", "off", "bias", 0.1),
        accumulation("two-level, 512", "group", "two-level, 512", "sequence", "drift", 0.3),
        accumulation("two-level, 512", "group", "two-level, 512", "off", "drift", 0.3),
        accumulation("two-level, 128", "off", "two-level, 512", "off", "drift", 0.6),
        *(Expectation("qk", source, {"smoothed": "Q+K", "QK": "INT8"}, {"smoothed": "Q+K", "QK": "E4M3"},
                      l1, 0.7) for source in ("smollm2", "minilm", "outlier_channels")),
        Expectation("types", "smollm2", {"preset": "EXACT", "inputs": "f16"},
                    {"preset": "EXACT", "inputs": "bf16"}, l1, 0.3),
        *(Expectation("types", source, {"preset": "SAGE2_8B", "inputs": "f16"},
                      {"preset": "SAGE2_4B", "inputs": "f16"}, l1, 0.5)
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
    faults = [f"holds with its rows swapped: {e}" for e in expectations() if e.holds(e.swapped(report))]
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
    faults = [f"{e}: {e.value(e.rows(report)[0]):.4g} is not below {e.factor} x "
              f"{e.value(e.rows(report)[1]):.4g}" for e in expectations() if not e.holds(report)]
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
