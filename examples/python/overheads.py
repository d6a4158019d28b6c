#!/usr/bin/env python3
"""What each technique of SageAttention costs in time: `sageattn bench` with it and without.

    python3 examples/python/overheads.py --out docs/accuracy/overheads.json

Clocks drift as a GPU warms up, so every configuration runs between two runs of its baseline and is
compared with what the baseline took at that moment, on a line between the two. How far the runs of
a baseline lie apart is in the report: a difference below that is none. A configuration that the
library refuses stays in the report, with its message. tests/make_accuracy.py turns the result into
a section of docs/accuracy.md.

INT4 by mma.sync is left out: Hopper emulates it, and only Ada would show its costs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command

PROGRAM = command.ROOT / "build" / "release" / "examples" / "cli" / "sageattn"
BETWEEN = 2  # configurations between two runs of their baseline
TIMES = ("ms", "attention_ms", "preparation_ms")

Json = dict[str, Any]
Shape = tuple[int, int]  # head_dim, tokens
Flags = dict[str, str]  # of `sageattn bench`, by name; "" for one without a value


@dataclass(frozen=True)
class Technique:
    """flags: what switches it on, or off if the baseline has it (removed)."""

    name: str
    flags: Flags
    removed: bool = False


@dataclass(frozen=True)
class Baseline:
    name: str
    preset: str
    kernel: str
    flags: Flags
    techniques: list[Technique]


K = Technique("K smoothed", {"smooth-k": "off"}, removed=True)
Q = Technique("Q smoothed", {"smooth-q": "on"})
HADAMARD = Technique("Hadamard rotation", {"rotation": "hadamard"})
LSE = Technique("log-sum-exp", {"lse": ""})
THREAD = Technique("scales per thread, not per block", {"qk-granularity": "per_block"}, removed=True)
V_SEQUENCE = Technique("V smoothed over the sequence", {"smooth-v": "sequence"})

BASELINES = [
    Baseline("SAGE2_8B, wgmma", "sage2_8b", "wgmma", {}, [
        K, Q, THREAD,
        Technique("scales per thread, not per warp", {"qk-granularity": "per_warp"}, removed=True),
        Technique("scales per token, not per thread", {"qk-granularity": "per_token"}),
        Technique("V smoothed by groups", {"smooth-v": "off", "v-scale": "group"}, removed=True),
        Technique("promotion every 512 keys, not 1024", {"promotion-interval": "512"}),
        Technique("promotion every 128 keys, not 1024", {"promotion-interval": "128"}),
        HADAMARD, LSE]),
    # The nearest to a single level that the tensor core offers: one promotion at the end.
    Baseline("SAGE2_8B, wgmma, V as it is, promoted once", "sage2_8b", "wgmma",
             {"smooth-v": "off", "v-scale": "channel", "promotion-interval": str(1 << 20)}, [
                 Technique("two levels, every 128 keys", {"promotion-interval": "128"}),
                 Technique("two levels, every 1024 keys", {"promotion-interval": "1024"}),
                 V_SEQUENCE,
                 Technique("single level", {"pv-accum": "single_level", "promotion-interval": "0"}),
                 Technique("sums in fp32", {"pv-accum": "f32", "promotion-interval": "0"})]),
    Baseline("SAGE2_4B, wgmma", "sage2_4b", "wgmma", {}, [
        K, Technique("Q smoothed", {"smooth-q": "off"}, removed=True), THREAD, HADAMARD]),
    Baseline("SAGE1, mma.sync, P V in FP16", "sage1", "mma_sync", {}, [
        K, Q,
        Technique("scales per thread, not per block", {"qk-granularity": "per_thread"}),
        V_SEQUENCE,
        Technique("sums in fp16, every 64 keys, not fp32", {"pv-accum": "f16"}),
        HADAMARD, LSE]),
    Baseline("SAGE2_8B, mma.sync, V smoothed over the sequence", "sage2_8b", "mma_sync",
             {"smooth-v": "sequence", "v-scale": "channel"}, [
                 Technique("V smoothed over the sequence", {"smooth-v": "off"}, removed=True),
                 Technique("V smoothed by groups, not the sequence",
                           {"smooth-v": "group", "v-scale": "group"}),
                 Technique("sums in fp16, not two levels", {"pv-accum": "f16"})]),
]


# --- measuring -----------------------------------------------------------------


class Refused(Exception):
    """The library does not run a configuration, and says why."""


class Bench:
    """Runs the program with the same shapes each time."""

    def __init__(self, program: str, shapes: Sequence[str]) -> None:
        self._command = [program, "bench", "--mask", "full", *shapes]
        self.facts: Json = {}  # machine, versions and settings, as the program reports them

    def __call__(self, baseline: Baseline, flags: Flags) -> dict[Shape, Json]:
        """What it measured, by shape. Raises Refused if no shape can be run."""
        given = [word for name, value in flags.items() for word in (f"--{name}", value) if word]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            done = subprocess.run([*self._command, "--preset", baseline.preset, "--kernel",
                                   baseline.kernel, *given, "--json", str(path)],
                                  capture_output=True, text=True, check=False)
            if done.returncode != 0:
                refusal = re.search(r"tokens: (.*\(SAGEATTN_E_UNSUPPORTED\))", done.stderr)
                if refusal is None:
                    raise SystemExit(done.stderr)
                raise Refused(refusal[1])
            report = json.loads(path.read_text(encoding="utf-8"))
        settings = {key: value for key, value in report["settings"].items() if key not in ("numerics", "lse")}
        self.facts = {"version": report["version"], "source_id": report["source_id"],
                      "machine": report["machine"], "settings": settings}
        return {(row["head_dim"], row["seq"]): row for row in report["rows"] if "error" not in row}


def schedule(techniques: Sequence[Technique]) -> Iterator[Technique | None]:
    """What runs in turn; None is the baseline, first, last and after every BETWEEN others."""
    yield None
    for start in range(0, len(techniques), BETWEEN):
        yield from techniques[start : start + BETWEEN]
        yield None


def at_that_moment(runs: list[tuple[int, Json]], place: int, time_of: str) -> float | None:
    """What the baseline took at a place in the schedule, from the runs before and after."""
    (before, first) = max((run for run in runs if run[0] < place), key=lambda run: run[0])
    (after, last) = min((run for run in runs if run[0] > place), key=lambda run: run[0])
    if first[time_of] is None:
        return None
    share = (place - before) / (after - before)
    return float(first[time_of] + share * (last[time_of] - first[time_of]))


def compared(technique: Technique, shape: Shape, row: Json, runs: list[tuple[int, Json]],
             place: int) -> Json:
    result: Json = {"head_dim": shape[0], "seq": shape[1]}
    for name in TIMES:
        pair = [at_that_moment(runs, place, name), row[name]]
        without, with_it = pair[::-1] if technique.removed else pair
        result[name] = None if without is None else {"without": without, "with": with_it}
    result["overhead"] = result["ms"]["with"] / result["ms"]["without"] - 1
    return result


def measure(bench: Bench, baseline: Baseline) -> Json:
    found: Json = {"name": baseline.name, "preset": baseline.preset, "kernel": baseline.kernel,
                   "flags": baseline.flags}
    runs: list[tuple[int, dict[Shape, Json]]] = []
    rows: list[tuple[int, Technique, dict[Shape, Json] | str]] = []
    for place, technique in enumerate(schedule(baseline.techniques)):
        start = time.monotonic()
        try:
            result: dict[Shape, Json] | str = bench(
                baseline, {**baseline.flags, **(technique.flags if technique else {})})
        except Refused as refusal:
            result = str(refusal)
        if technique is not None:
            rows.append((place, technique, result))
        elif isinstance(result, str):
            return {**found, "refused": result}
        else:
            runs.append((place, result))
        progress(f"{baseline.name}: {technique.name if technique else 'baseline'}, "
                 f"{'refused' if isinstance(result, str) else 'measured'}, {time.monotonic() - start:.1f} s")
    found["runs"] = len(runs)
    found["rows"] = []
    for shape in runs[0][1]:
        times = [run[shape]["ms"] for _, run in runs]
        found["rows"].append({"head_dim": shape[0], "seq": shape[1], "ms": sum(times) / len(times),
                              "spread": max(times) / min(times) - 1})
    found["techniques"] = []
    for place, technique, result in rows:
        entry: Json = {"name": technique.name, "flags": technique.flags, "removed": technique.removed}
        if isinstance(result, str):
            entry["refused"] = result
        else:
            entry["rows"] = [compared(technique, shape, row, [(at, run[shape]) for at, run in runs], place)
                             for shape, row in result.items() if shape in runs[0][1]]
        found["techniques"].append(entry)
    return found


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- the program ---------------------------------------------------------------


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what each technique costs in time.", allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON to write")
    add("--program", default=os.environ.get("SAGEATTN", str(PROGRAM)), help="default: the build folder's")
    add("--backend", choices=("cuda", "cpu"), default="cuda", help="cpu: to test this program")
    add("--dims", default="128,64", help="default: %(default)s")
    add("--seqs", default="4096,16384", help="default: %(default)s")
    add("--batch", default="4", help="default: %(default)s")
    add("--heads", default="32", help="default: %(default)s")
    add("--repeat", default="5", help="executes a median is of (default: %(default)s)")
    add("--warmup", default="2", help="executes before them (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args, start = parse_arguments(argv), time.monotonic()
    command.make_writable(args.out)
    shapes = [word for name in ("backend", "dims", "seqs", "batch", "heads", "repeat", "warmup")
              for word in (f"--{name}", getattr(args, name))]
    bench, baselines = Bench(args.program, shapes), []
    for baseline in BASELINES:
        baselines.append(measure(bench, baseline))
        report = {
            **bench.facts,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": command.recorded(argv),
            "seconds": round(time.monotonic() - start, 1),
            "baselines": baselines,
        }
        # Each time: a run cut short leaves something.
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    progress(f"{args.out.name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    command.run(main)
