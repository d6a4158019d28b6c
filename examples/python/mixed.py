#!/usr/bin/env python3
"""What SmolLM2-135M loses, and gains, by following `sageattn assess` head by head.

    python3 examples/python/mixed.py --backend cuda --tokens 8192 --out docs/accuracy/mixed.json

Q, K and V of every layer are recorded on one text, the program `sageattn assess` recommends a preset
for each head and each layer within a few target errors, and another text is predicted with these
mixtures and with each preset everywhere. For each: perplexity, divergence of the next-token
distributions from exact attention's, and two costs: the bits of an operand of Q K^T, and, on a GPU,
the measured time of all layers' attention. The program is $SAGEATTN_PROGRAM, or the build folder's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parallel  # noqa: F401 (before NumPy)

import numpy as np

import command
import safetensors_io
from extract_activations import DEFAULT_TEXT, SMOLLM2_PACKAGE, HalfArray, Recorder, metadata
from measuring import CONFIGURATIONS, FloatArray, Report, add_arguments, every_layer, possible, report_problems
from perplexity import Evaluation, described, hidden_states, last, load, row_of, windows

import engine  # after measuring
import smollm2

BITS = {"exact": 16, "sage1": 8, "sage2_8b": 8, "sage2_4b": 4, "sage2pp": 8, "int4_unsmoothed": 4,
        "sage2_8b_v_unsmoothed": 8, "sage2_4b_v_unsmoothed": 4}
RECOMMENDED = ["exact", "sage1", "sage2_8b", "sage2_8b_v_unsmoothed", "sage2_4b",
               "sage2_4b_v_unsmoothed"]  # what assess may ask for
ORDERED = (10, 20)  # layers in 4 bits, by CosSim
# Of the short form. The first two have 0.0030 and 0.080, without K's smoothing 0.0047 and 0.19; the
# mixture, which has 24 heads in 4 bits, 0.0041 and 0.0088. Each bound is the geometric mean.
MAX_DIVERGENCE = {"sage2_8b": 0.0038, "sage2_4b": 0.12, "each head within 10 %": 0.006}


# --- mixtures ------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Heads of one layer that one call computes, and the key/value heads that they get.

    A call's query heads must share key/value heads evenly. Where those of a configuration do not,
    each gets a key/value head of its own, several times the same one if need be.
    """

    configuration: str
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]


def groups_of(configurations: Sequence[str], kv_heads: int) -> list[Group]:
    """The calls for one layer, given each head's configuration."""
    share = len(configurations) // kv_heads
    groups = []
    for name in sorted(set(configurations)):
        heads = tuple(i for i, configuration in enumerate(configurations) if configuration == name)
        readers = Counter(head // share for head in heads)  # in the order of the heads
        even = len(set(readers.values())) == 1
        groups.append(Group(name, heads, tuple(readers) if even else
                            tuple(head // share for head in heads)))
    return groups


@dataclass(frozen=True)
class Mixture:
    """Each head's configuration, layer by layer."""

    kind: str  # uniform, head, layer or ordered
    name: str
    layers: tuple[tuple[str, ...], ...]
    target: float | None = None

    def groups(self, kv_heads: int) -> list[list[Group]]:
        """The calls of each layer."""
        return [groups_of(layer, kv_heads) for layer in self.layers]

    @property
    def heads(self) -> dict[str, int]:
        """How many heads have which configuration."""
        return dict(sorted(Counter(name for layer in self.layers for name in layer).items()))

    @property
    def bits(self) -> float:
        """Of an operand of Q K^T, in the mean over heads."""
        return float(np.mean([BITS[name] for layer in self.layers for name in layer]))


class Mixed:
    """The mixture's attention as the model calls it."""

    def __init__(self, mixture: Mixture, attentions: dict[str, engine.Attention], kv_heads: int
                 ) -> None:
        self._layers, self._attentions = mixture.groups(kv_heads), attentions

    def __call__(self, layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        groups = self._layers[layer]
        if len(groups) == 1:
            return self._attentions[groups[0].configuration](q, k, v)
        out = np.empty_like(q)
        for group in groups:
            attend = self._attentions[group.configuration]
            out[:, :, group.heads] = attend(q[:, :, group.heads], k[:, :, group.kv_heads],
                                            v[:, :, group.kv_heads])
        return out


# --- recommendations -----------------------------------------------------------


def find_program() -> str:
    """Where `sageattn` is."""
    built = Path(__file__).resolve().parents[2] / "build/release/examples/cli/sageattn"
    return os.environ.get("SAGEATTN_PROGRAM") or (str(built) if built.exists() else "sageattn")


def record(model: smollm2.SmolLM2, ids: Sequence[int], text: Path, attend: engine.Attention,
           path: Path) -> None:
    """Write Q, K and V of every layer, as exact attention makes them."""
    recorder = Recorder(every_layer(attend), range(model.config.layers))
    last(hidden_states(model, model.embed(np.asarray([ids])), recorder))
    safetensors_io.save(path, recorder.tensors,
                        metadata(SMOLLM2_PACKAGE, "causal", text, recorder.tensors))


def assess(path: Path, target: float, backend: str) -> dict[str, Any]:
    """The program's report on a file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [find_program(), "assess", str(path), "--backend", backend, "--target-error",
                   str(target), "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


def configuration(preset: str, smooth_v: bool) -> str:
    """The name in CONFIGURATIONS of a preset with V smoothed or not."""
    unsmoothed = f"{preset}_v_unsmoothed"
    return unsmoothed if unsmoothed in CONFIGURATIONS and not smooth_v else preset


def recommended(entry: dict[str, Any]) -> str:
    """What assess says of a head or layer."""
    found = entry["recommendation"]
    return configuration(found["preset"], found["smooth_v"])


def by_assess(report: dict[str, Any], target: float) -> Iterator[Mixture]:
    """The mixtures that a report recommends: one preset a head, and one a layer."""
    heads = tuple(tuple(recommended(head) for head in layer["heads"]) for layer in report["layers"])
    yield Mixture("head", f"each head within {100 * target:g} %", heads, target)
    layers = tuple((recommended(layer),) * len(layer["heads"]) for layer in report["layers"])
    yield Mixture("layer", f"each layer within {100 * target:g} %", layers, target)


def measured(layer: dict[str, Any], field: str) -> list[dict[str, float]]:
    """For each head of a layer, what assess measured of each configuration."""
    return [{configuration(one["preset"], one["smooth_v"] != "off"): one[field]
             for one in head["presets"] if field in one} | {"exact": {"cos_sim": 1.0}.get(field, 0.0)}
            for head in layer["heads"]]


def ordered(report: dict[str, Any]) -> Iterator[Mixture]:
    """SAGE2_4B in the layers where its CosSim is highest, or lowest, and SAGE2_8B in the others."""
    layers = report["layers"]
    cosines = [np.mean([head["sage2_4b"] for head in measured(layer, "cos_sim")]) for layer in layers]
    order = [int(layer) for layer in np.argsort(cosines)]
    for count in ORDERED:
        for title, chosen in (("highest", order[-count:]), ("lowest", order[:count])):
            yield Mixture("ordered", f"SAGE2_4B in the {count} layers of {title} CosSim", tuple(
                ("sage2_4b" if i in chosen else "sage2_8b",) * len(layer["heads"])
                for i, layer in enumerate(layers)))


def calibration(mixture: Mixture, report: dict[str, Any], field: str) -> float | None:
    """The mean over heads of what assess measured; None if it did not measure all of them."""
    values = [found.get(name) for layer, names in zip(report["layers"], mixture.layers, strict=True)
              for found, name in zip(measured(layer, field), names, strict=True)]
    return None if None in values else float(np.mean([value for value in values if value is not None]))


# --- time ----------------------------------------------------------------------


class Stopwatch:
    """Times of executes of random inputs, measured once for each configuration and shape."""

    def __init__(self, attentions: dict[str, engine.Attention], batch: int, heads: int,
                 head_dim: int) -> None:
        self._attentions, self._shape = attentions, (batch, heads, head_dim)
        self._inputs: dict[int, list[HalfArray]] = {}  # q, k and v of each length
        self._times: dict[tuple[str, int, int, int], float] = {}

    def milliseconds(self, groups: Sequence[Sequence[Group]], tokens: int) -> float:
        """Of one forward pass's attention: the sum of its calls, one after another."""
        return sum(self._call(group, tokens) for layer in groups for group in layer)

    def _call(self, group: Group, tokens: int) -> float:
        key = (group.configuration, len(group.heads), len(group.kv_heads), tokens)
        if key not in self._times:
            if tokens not in self._inputs:
                batch, heads, head_dim = self._shape
                rng = np.random.default_rng(1)
                self._inputs[tokens] = [
                    rng.standard_normal((batch, tokens, heads, head_dim), np.float32)
                    .astype(np.float16) for _ in range(3)]
            q, k, v = self._inputs[tokens]
            self._times[key] = self._attentions[group.configuration].milliseconds(
                q[:, :, : key[1]], k[:, :, : key[2]], v[:, :, : key[2]])
        return self._times[key]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that was measured."""
        names = ("configuration", "heads", "kv_heads", "tokens", "milliseconds")
        return [dict(zip(names, (*key, time), strict=True)) for key, time in self._times.items()]


# --- the program ---------------------------------------------------------------


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Attention's precision head by head.",
                                     allow_abbrev=False)
    add_arguments(parser)
    add = parser.add_argument
    add("--context", type=command.at_least(1), help="tokens of a window (default: 1024)")
    add("--tokens", type=command.at_least(1), help="tokens to predict (default: 2048)")
    add("--calibration-text", type=command.existing_file, default=DEFAULT_TEXT,
        help=f"text to assess (default: {DEFAULT_TEXT.name})")
    add("--calibration-tokens", type=command.at_least(1), help="tokens of it (default: those of a window)")
    add("--targets", type=command.list_of(command.positive),
        help="relative errors (default: 0.02,0.05,0.1,0.15,0.2,0.3)")
    add("--lengths", type=command.list_of(command.at_least(1)), default=[2048, 16384],
        help="tokens of the sequences that are timed on a GPU (default: 2048,16384)")
    add("--batch", type=command.at_least(1), default=4, help="sequences that are timed (default: %(default)s)")
    args = parser.parse_args(argv)
    args.presets = args.presets or (["exact", "sage2_8b", "sage2_4b"] if args.short
                                    else list(BITS))
    args.context = args.context or (256 if args.short else 1024)
    args.tokens = args.tokens or (256 if args.short else 2048)
    args.targets = args.targets or ([0.1] if args.short else [0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
    args.calibration_tokens = args.calibration_tokens or args.context
    return args


def mixtures_of(model: smollm2.SmolLM2, ids: Sequence[int], args: argparse.Namespace,
                report: Report, exact: engine.Attention) -> tuple[list[Mixture], dict[str, Any]]:
    """All that is compared, exact first, and a report of assess with what it measured."""
    heads = model.config.query_heads
    mixtures = [Mixture("uniform", name, ((name,) * heads,) * model.config.layers)
                for name in args.presets]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "activations.safetensors"
        record(model, ids, args.calibration_text, exact, path)
        for target in args.targets:
            start = time.monotonic()
            assessed = assess(path, target, report.backend)
            mixtures += by_assess(assessed, target)
            for mixture in mixtures[-2:]:
                print(f"{mixture.name}: {mixture.heads}", flush=True)
            print(f"assess: {time.monotonic() - start:.0f} s", flush=True)
    if not args.short:
        mixtures += ordered(assessed)
    return mixtures, assessed


def broken_expectations(rows: Sequence[dict[str, Any]], short: bool) -> Iterator[str]:
    """What should hold and does not: mixtures that spend at least half of the bits between SAGE2_4B
    and SAGE2_8B are closer to exact than SAGE2_4B; and, of the short form, MAX_DIVERGENCE."""
    for row in rows:
        limit = MAX_DIVERGENCE.get(row["name"], float("inf"))
        if short and not row["kl"] <= limit:
            yield f"{row['name']}: a divergence of {row['kl']:.6f}, at most {limit} is right"
    found = {row["name"]: row for row in rows if row["kind"] == "uniform"}
    most = found["sage2_4b"]["kl"] if "sage2_4b" in found else float("inf")
    for row in rows:
        if row["kind"] in ("head", "layer") and row["qk_bits"] >= 6 \
                and not row["kl"] <= most:
            yield f"{row['name']}: a divergence of {row['kl']}, SAGE2_4B everywhere has {most}"


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments ask for."""
    args = parse_arguments(argv)
    report = Report(args, SMOLLM2_PACKAGE, argv)
    tokenizer, model, ids = load(args, report)
    windows(ids, args.context, args.tokens)  # fails here, if at all
    print(f"model and text: {report.seconds:.0f} s", flush=True)
    config = model.config
    names = list(dict.fromkeys([*args.presets, *RECOMMENDED]))
    attentions = possible(names, engine.CAUSAL, report, config.heads)
    args.presets = [name for name in args.presets if name in attentions]
    tokens = tokenizer.encode(args.calibration_text.read_text(encoding="utf-8"))
    if len(tokens) < args.calibration_tokens:
        raise ValueError(f"--calibration-text has {len(tokens)} tokens, {args.calibration_tokens} are wanted")
    tokens = tokens[: args.calibration_tokens]
    report.data |= {"context": args.context, "tokens": args.tokens,
                    "calibration": {"file": args.calibration_text.name, "tokens": len(tokens)},
                    "layers": config.layers, "heads": list(config.heads), "batch": args.batch,
                    "rows": []}
    mixtures, assessed = mixtures_of(model, tokens, args, report, attentions["exact"])
    times: dict[Mixture, dict[str, float]] = {}
    if report.backend == "cuda":  # first, while nothing else runs on the GPU
        stopwatch = Stopwatch(attentions, args.batch, config.query_heads, config.head_dim)
        times = {mixture: {str(length): stopwatch.milliseconds(mixture.groups(config.kv_heads), length)
                           for length in args.lengths} for mixture in mixtures}
        report.data["calls"] = stopwatch.rows
    evaluation = Evaluation(model, ids, args.context, args.tokens, every_layer(attentions["exact"]))
    distinct = list(dict.fromkeys(mixture.layers for mixture in mixtures))
    rest = [layers for layers in distinct if layers != mixtures[0].layers]
    results = evaluation(Mixed(Mixture("", "", layers), attentions, config.kv_heads)
                         for layers in rest)
    predictions = {mixtures[0].layers: evaluation.exact}
    for mixture in mixtures:
        while mixture.layers not in predictions:  # they come in the order of their first mixtures
            predictions[rest[len(predictions) - 1]] = next(results)
        groups = mixture.groups(config.kv_heads)
        row = {"kind": mixture.kind, "target": mixture.target,
               **row_of(mixture.name, predictions[mixture.layers], evaluation.exact),
               "qk_bits": mixture.bits, "heads": mixture.heads,
               "calls": sum(len(layer) for layer in groups),
               "calibration_error": calibration(mixture, assessed, "rel_error"),
               "calibration_cosine": calibration(mixture, assessed, "cos_sim")}
        if times:
            row["milliseconds"] = times[mixture]
        timed = "".join(f", {time:.3f} ms at {length}"
                        for length, time in row.get("milliseconds", {}).items())
        print(f"{mixture.name}: {mixture.bits:.2f} bits{timed}; {described(row)}; "
              f"{report.seconds:.0f} s", flush=True)
        report.data["rows"].append(row)
        report.save()
    report.save()
    print(f"all: {report.seconds:.0f} s", flush=True)
    problems = list(broken_expectations(report.data["rows"], args.short))
    return report_problems(problems)


if __name__ == "__main__":
    command.run(main)
