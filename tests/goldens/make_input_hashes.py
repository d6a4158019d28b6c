#!/usr/bin/env python3
"""Writes inputs.json: a hash of each accuracy input, as NumPy generates it.

tests/inputs.cpp generates the same values without Python; its test asserts these hashes. A key is
"<kind>.<head_dim>", a value the 64-bit FNV-1a hash, in hex, of the bf16 bit patterns (uint16,
little-endian) of q, then k, then v. Takes about a minute; needs NumPy 2.

    make_input_hashes.py            write inputs.json
    make_input_hashes.py --check    compare with inputs.json instead
"""
import json
import pathlib
import sys

import numpy as np

HEADS, TOKENS, HEAD_DIMS = 8, 4096, (64, 128)
KINDS = ("normal", "outlier_elements", "outlier_channels", "biased_v",
         "peaked", "v_channels", "sink", "drift")
PATH = pathlib.Path(__file__).with_name("inputs.json")


class Draws:
    """Float32 draws from PCG64; the order of the calls is part of every input's definition."""

    def __init__(self, seed):
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def normal(self, *shape):
        return self._generator.standard_normal(shape, dtype=np.float32)

    def chosen(self, rate, *shape):
        """1 with probability `rate`, else 0."""
        return (self._generator.random(shape, dtype=np.float32) < rate).astype(np.float32)


def make_input(kind, d, heads=HEADS, tokens=TOKENS):
    """q, k, v of one kind as float32 [heads, tokens, d], not yet rounded to bf16."""
    draws = Draws(20261130 + 1000 * KINDS.index(kind) + d)
    whole, channels = (heads, tokens, d), (heads, 1, d)
    q, k, v = (draws.normal(*whole) for _ in range(3))

    if kind == "outlier_elements":  # N(0, 10^2) added to 0.1 % of the elements
        for x in (q, k, v):
            wide = 10 * draws.normal(*whole)
            x += wide * draws.chosen(0.001, *whole)
    elif kind == "outlier_channels":  # all tokens share a bias on 10 % of the channels
        bias = draws.normal(*channels)
        q += 8 * bias * draws.chosen(0.1, *channels)
        k += 20 * bias * draws.chosen(0.1, *channels)
    elif kind == "biased_v":
        v = 0.3 * v + 8.5
    elif kind == "peaked":
        q = 4 * q
    elif kind == "v_channels":  # 5 % of V's channels 31 times larger
        v *= 1 + 30 * draws.chosen(0.05, *channels)
    elif kind == "sink":  # 1024 keys: 8 more in every score, and a shared offset in V
        step = np.float32((8 * d**0.5) ** 0.5) * np.float32(d**-0.5)
        q += step
        k[:, :1024] += step
        v[:, :1024] += 4 * draws.normal(*channels)
    elif kind == "drift":  # Q and K share a rotary-like position code, V drifts with the token
        half = d // 2
        angle = np.arange(tokens)[:, None] * 10000.0 ** (-np.arange(half) / half)
        code = 3 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        q, k = 0.5 * q + code, 0.5 * k + code
        ramp = np.linspace(-0.5, 0.5, tokens, dtype=np.float32)[:, None]
        v = 0.3 * v + 8 * draws.normal(*channels) * ramp
    return q, k, v


def bf16_bits(x):
    """Bit patterns of finite float32 values rounded to bf16, half to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def fnv1a64(data, state=0xCBF29CE484222325):
    """64-bit FNV-1a of `data`, continuing from `state`."""
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def hash_input(kind, d):
    state = fnv1a64(b"")
    for x in make_input(kind, d):
        assert x.dtype == np.float32 and x.shape == (HEADS, TOKENS, d)
        state = fnv1a64(bf16_bits(x).tobytes(), state)
    return f"{state:016x}"


def main():
    hashes = {f"{kind}.{d}": hash_input(kind, d) for kind in KINDS for d in HEAD_DIMS}
    text = json.dumps(hashes, indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        PATH.write_text(text)
    elif PATH.read_text() != text:
        sys.exit(f"{PATH.name} differs from what NumPy {np.__version__} generates")


if __name__ == "__main__":
    main()
