"""What the programs that run whole models share: the numerics compared, the text, and the report."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import command
import extract_activations

try:
    import engine
except (ImportError, OSError) as error:  # programs import it after this module
    command.fail(error)

FloatArray = NDArray[np.float32]
LayerAttention = Callable[[int, FloatArray, FloatArray, FloatArray], FloatArray]

TEXT = extract_activations.DEFAULT_TEXT.parent / "scandal_in_bohemia.txt"
BACKENDS = {"auto": engine.BACKEND_AUTO, "cuda": engine.BACKEND_CUDA,
            "cpu": engine.BACKEND_CPU}

# What is compared: a preset, and fields of the desc that differ from it.
CONFIGURATIONS: dict[str, tuple[str, dict[str, str | int]]] = {
    "exact": (engine.EXACT, {}),
    "sage1": (engine.SAGE1, {}),
    "sage2_8b": (engine.SAGE2_8B, {}),
    "sage2_4b": (engine.SAGE2_4B, {}),
    "sage2pp": (engine.SAGE2PP, {}),
    "int4_unsmoothed": (engine.SAGE2_4B,
                        {"qk_format": "i4", "smooth_q": "off", "smooth_k": "off"}),
    "sage2_8b_v_unsmoothed": (engine.SAGE2_8B, {"smooth_v": "off"}),
    "sage2_4b_v_unsmoothed": (engine.SAGE2_4B, {"smooth_v": "off"}),
    "sage2_4b_k_unsmoothed": (engine.SAGE2_4B, {"smooth_k": "off"}),
}
PRESETS = list(CONFIGURATIONS)[:6]  # what is compared unless asked for more


def attention(name: str, mask: str, context: engine.Context) -> engine.Attention:
    """An attention of CONFIGURATIONS, on float16 tensors as engines have them."""
    preset, numerics = CONFIGURATIONS[name]
    return engine.Attention(preset, mask, engine.F16, context, sm_scale=None, numerics=numerics)


def possible(names: Sequence[str], mask: str, report: Report, heads: tuple[int, int, int]
             ) -> dict[str, engine.Attention]:
    """The attentions of these names that the backend has; the report says why others are missing.

    heads: of queries, of keys, and their channels.
    """
    query_heads, kv_heads, head_dim = heads
    q = np.zeros((1, 16, query_heads, head_dim), np.float32)
    kv = q[:, :, :kv_heads]
    found: dict[str, engine.Attention] = {}
    for name in names:
        attend = attention(name, mask, report.context)
        try:
            attend.info(q, kv, kv)
        except engine.SageAttentionError as error:
            if name == "exact":
                raise
            report.data.setdefault("refused", {})[name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
        else:
            found[name] = attend
    return found


def every_layer(attend: engine.Attention) -> LayerAttention:
    """The same attention in all layers, as the models call it."""
    return lambda layer, q, k, v: attend(q, k, v)


def name_list(argument: str) -> list[str]:
    """Parse a comma-separated list of CONFIGURATIONS; "exact", which all else needs, comes first."""
    names = argument.split(",")
    for name in names:
        if name not in CONFIGURATIONS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(CONFIGURATIONS)}")
    return ["exact", *(name for name in names if name != "exact")]


def wheel(argument: str) -> Path:
    """Parse the path of a wheel of one of the models."""
    path = command.existing_file(argument)
    packages = (extract_activations.SMOLLM2_PACKAGE, extract_activations.MINILM_PACKAGE)
    if not any(extract_activations.find_wheel(package, [path]) for package in packages):
        names = " nor of ".join(package.name for package in packages)
        raise argparse.ArgumentTypeError(f"{path.name} is no wheel of {names}")
    return path


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the models come from."""
    parser.add_argument("--wheel", type=wheel, action="append", default=[],
                        help="downloaded wheel; repeatable")
    parser.add_argument("--cache", type=Path, default=extract_activations.DEFAULT_CACHE,
                        help="folder for downloaded wheels")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all of them have."""
    add = parser.add_argument
    add("--short", action="store_true", help="little text, for a test")
    add("--out", type=Path, help="JSON file to write")
    add("--text", type=command.existing_file, default=TEXT, help=f"text to read (default: {TEXT.name})")
    add("--presets", type=name_list,
        help=f"comma-separated, of {', '.join(CONFIGURATIONS)} (exact is always there)")
    add("--backend", choices=BACKENDS, default="cpu", help="default: %(default)s")
    add_model_arguments(parser)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _open(backend: str) -> tuple[str, engine.Context]:
    """The backend's name, auto resolved, and its context."""
    if backend == "auto":
        try:
            return _open("cuda")
        except engine.SageAttentionError:
            return _open("cpu")
    return backend, engine.Context(BACKENDS[backend])


def report_problems(problems: Sequence[str]) -> int:
    """Print what should hold and does not; the exit code."""
    for problem in problems:
        print(f"does not hold: {problem}", file=sys.stderr)
    return 1 if problems else 0


class Report:
    """The backend, and the JSON file: facts about the run, then results, written with each added."""

    def __init__(self, args: argparse.Namespace, package: extract_activations.Package,
                 argv: Sequence[str]) -> None:
        self._out: Path | None = args.out
        if self._out is not None:
            command.make_writable(self._out)
        self._start = time.monotonic()
        self.backend, self.context = _open(args.backend)
        self.data: dict[str, Any] = {
            "version": engine.version(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": command.recorded(argv),
            "machine": {"processor": _processor(), "cores": len(os.sched_getaffinity(0)),
                        "python": platform.python_version(), "numpy": np.__version__,
                        "backend": self.backend,
                        **(engine.gpu() if self.backend == "cuda" else {})},
            "model": {"name": package.model, "license": package.license,
                      "source": f"PyPI {package.name} {package.version}",
                      "sha256": package.sha256},
            "text": {"file": args.text.name,
                     "sha256": hashlib.sha256(args.text.read_bytes()).hexdigest()},
        }

    @property
    def seconds(self) -> float:
        """Since the start."""
        return round(time.monotonic() - self._start, 1)

    def save(self) -> None:
        """Write what there is, so that a run that is cut short leaves something."""
        self.data["seconds"] = self.seconds
        if self._out is not None:
            self._out.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
