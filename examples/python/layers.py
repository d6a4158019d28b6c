#!/usr/bin/env python3
"""Which layers of SmolLM2-135M bear coarse attention: one layer at a time in it, all others exact.

    python3 examples/python/layers.py --out docs/accuracy/layers.json

For each layer and format: the similarity of that layer's attention output to the exact one, which a
program can measure without a text's answers, and the change of the perplexity, which is what counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import sageattn
import smollm2
from extract_activations import SMOLLM2_PACKAGE
from measuring import BACKENDS, FloatArray, Report, add_arguments, attention, cosine
from perplexity import IntArray, hidden_states, last, load, predict, windows


def sweep(model: smollm2.SmolLM2, ids: IntArray, context: int, tokens: int,
          exact: sageattn.Attention, coarse: dict[str, sageattn.Attention],
          count: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each of the last `count` layers and each format: that layer alone in that format.

    The hidden states of the exact pass are kept, so that a layer's turn starts at that layer.
    """
    inputs, targets = windows(ids, context, tokens)
    similarity: dict[tuple[str, int], float] = {}

    def comparing(layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        out = exact(q, k, v)
        for name, attend in coarse.items():
            similarity[name, layer] = cosine(attend(q, k, v), out)
        return out

    states = list(hidden_states(model, model.embed(inputs), comparing))
    reference = predict(model, states[-1], targets)
    layers = range(model.config.layers)
    for layer in layers[-count:] if count else layers:
        for name, attend in coarse.items():

            def mixed(index: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
                return (attend if index == layer else exact)(q, k, v)

            hidden = last(hidden_states(model, states[layer], mixed, layer))
            result = predict(model, hidden, targets)
            change, error = result.change(reference)
            yield {"name": name, "layer": layer, "cosine": similarity[name, layer],
                   "change": change, "error": error,
                   "agreement": result.agreement(reference)}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Attention's precision layer by layer.")
    add_arguments(parser)
    parser.add_argument("--context", type=int, help="tokens of a window (default: 1024)")
    parser.add_argument("--tokens", type=int, help="tokens to predict (default: 2048)")
    parser.add_argument("--layers", type=int, help="only the last so many (default: all)")
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
    context = sageattn.Context(BACKENDS[args.backend])
    attentions = {name: attention(name, sageattn.CAUSAL, context) for name in args.presets}
    report.data |= {"context": args.context, "tokens": args.tokens, "rows": []}
    exact = attentions.pop("exact")
    for row in sweep(model, ids, args.context, args.tokens, exact, attentions, args.layers):
        print(f"layer {row['layer']} in {row['name']}: CosSim {row['cosine']:.6f}, perplexity "
              f"{row['change']:+.3%} +- {row['error']:.3%}, agreement {row['agreement']:.2%}",
              flush=True)
        report.data["rows"].append(row)
        report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
