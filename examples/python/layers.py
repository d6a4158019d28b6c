#!/usr/bin/env python3
"""Which layers of SmolLM2-135M bear coarse attention: one layer at a time in it, all others exact.

    python3 examples/python/layers.py --backend cuda --tokens 8192 --out docs/accuracy/layers.json

For each layer and format: the similarity of that layer's attention output to the exact one, which a
program can measure without a text's answers, and what counts: the change of the perplexity, and the
divergence of the next-token distributions from those of exact attention.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

import parallel  # before NumPy

import numpy as np

import command
from extract_activations import SMOLLM2_PACKAGE
from measuring import (FloatArray, LayerAttention, Report, add_arguments, possible,
                       report_problems)
from perplexity import IntArray, Predictions, hidden_states, last, load, predict, windows

import engine  # after measuring
import smollm2

# Of the short form's layer, the last, in SAGE2_4B: 1 - CosSim is 0.0077, without K's smoothing 0.020,
# without Q's 0.041; the divergence 0.00062, 0.0020 and 0.0031. Each bound is the geometric mean of what
# is right and the nearest that is wrong.
MIN_COSINE, MAX_DIVERGENCE = 0.9876, 0.0011

Products = tuple[float, float, float]


def products(a: FloatArray, b: FloatArray) -> Products:
    """a b, a a and b b: what the cosine of two tensors that come in parts is made of."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y), float(x @ x), float(y @ y)


def cosine(parts: Sequence[Products]) -> float:
    """Of the whole, from its parts."""
    xy, xx, yy = (math.fsum(part[i] for part in parts) for i in range(3))
    return xy / math.sqrt(xx * yy)


class ExactPass:
    """One window read with exact attention; how close the other attentions come in each layer."""

    def __init__(self, model: smollm2.SmolLM2, inputs: IntArray, exact: engine.Attention,
                 coarse: dict[str, engine.Attention]) -> None:
        self.products: dict[tuple[str, int], Products] = {}

        def comparing(layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
            out = exact(q, k, v)
            for name, attend in coarse.items():
                self.products[name, layer] = products(attend(q, k, v), out)
            return out

        self.states = list(hidden_states(model, model.embed(inputs[None]), comparing))


def only_in(layer: int, attend: engine.Attention, exact: engine.Attention) -> LayerAttention:
    """`attend` in one layer, exact in all others."""
    return lambda index, q, k, v: (attend if index == layer else exact)(q, k, v)


def sweep(model: smollm2.SmolLM2, ids: IntArray, context: int, tokens: int,
          exact: engine.Attention, coarse: dict[str, engine.Attention],
          count: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each of the last `count` layers and each format: that layer alone in that format.

    The hidden states of the exact pass are kept, so that a layer's turn starts at that layer.
    """
    inputs, targets = windows(ids, context, tokens)
    passes = list(parallel.each(lambda x: ExactPass(model, x, exact, coarse), inputs))

    def run(task: tuple[int, int]) -> list[Predictions]:
        """A window's predictions: exact, then with each of the formats in the layer."""
        layer, window = task
        states = passes[window].states
        hidden = [states[-1]]
        for attend in coarse.values():
            mixed = only_in(layer, attend, exact)
            hidden.append(last(hidden_states(model, states[layer], mixed, layer)))
        return predict(model, states[-1], hidden, targets[window])

    layers = list(range(model.config.layers))[-count if count else None :]
    results = parallel.each(run, [(layer, i) for layer in layers for i in range(len(inputs))])
    for layer in layers:
        parts = [next(results) for _ in inputs]
        reference, *others = (Predictions.joined(part) for part in zip(*parts, strict=True))
        for name, result in zip(coarse, others, strict=True):
            yield {"name": name, "layer": layer,
                   "cosine": cosine([one.products[name, layer] for one in passes]),
                   **result.compared(reference)}


def broken_expectations(rows: Sequence[dict[str, Any]], last_layer: int) -> Iterator[str]:
    """What should hold of the short form's layer and does not."""
    found = {row["name"]: row for row in rows if row["layer"] == last_layer}
    if "sage2_4b" in found:
        similarity, kl = (found["sage2_4b"][key] for key in ("cosine", "kl"))
        if not similarity >= MIN_COSINE:
            yield f"the CosSim of sage2_4b is {similarity:.6f}, not {MIN_COSINE}"
        if not kl <= MAX_DIVERGENCE:
            yield f"the divergence of sage2_4b is {kl:.6f}, not {MAX_DIVERGENCE}"
    if {"sage2_4b", "int4_unsmoothed"} <= found.keys():
        smoothed, plain = (found[name]["cosine"] for name in ("sage2_4b", "int4_unsmoothed"))
        if not plain < smoothed:
            yield f"INT4 without smoothing, {plain}, is not worse than {smoothed}"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Attention's precision layer by layer.",
                                     allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--context", type=command.at_least(1), help="tokens of a window (default: 1024)")
    parser.add_argument("--tokens", type=command.at_least(1), help="tokens to predict (default: 2048)")
    parser.add_argument("--layers", type=command.at_least(1), help="only the last so many (default: all)")
    args = parser.parse_args(argv)
    args.presets = args.presets or ["exact", "sage2_4b", "int4_unsmoothed"]
    args.context = args.context or (256 if args.short else 1024)
    args.tokens = args.tokens or (256 if args.short else 2048)
    args.layers = args.layers or (1 if args.short else None)
    return args


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments ask for."""
    args = parse_arguments(argv)
    report = Report(args, SMOLLM2_PACKAGE, argv)
    _, model, ids = load(args, report)
    if args.layers is not None and args.layers > model.config.layers:
        raise ValueError(f"--layers {args.layers}: the model has {model.config.layers}")
    print(f"model and text: {report.seconds:.0f} s", flush=True)
    attentions = possible(args.presets, engine.CAUSAL, report, model.config.heads)
    report.data |= {"context": args.context, "tokens": args.tokens, "rows": []}
    exact = attentions.pop("exact")
    for row in sweep(model, ids, args.context, args.tokens, exact, attentions, args.layers):
        print(f"layer {row['layer']} in {row['name']}: CosSim {row['cosine']:.6f}, perplexity "
              f"{row['change']:+.3%} +- {row['error']:.3%}, divergence {row['kl']:.6f}, agreement "
              f"{row['agreement']:.2%}; {report.seconds:.0f} s", flush=True)
        report.data["rows"].append(row)
        report.save()
    problems = broken_expectations(report.data["rows"], model.config.layers - 1) if args.short else []
    return report_problems(list(problems))


if __name__ == "__main__":
    command.run(main)
