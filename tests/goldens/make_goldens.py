#!/usr/bin/env python3
"""Writes exact.safetensors: small cases of exact attention with their results in float64.

It shares no code with the library, so that the EXACT backend is judged by something independent.
Every operation is an IEEE basic operation in a fixed order or a correctly rounded function of the
decimal module, so the bytes do not depend on the machine or on NumPy's version.

For case NNN the file holds
    NNN.q, NNN.k, NNN.v     F16, BF16 or F32  [batch, tokens, heads, dim], varlen without batch
    NNN.out                 F64, like q but with v's dim
    NNN.lse                 F64  [batch, heads, qo_len] or [heads, total_qo]; natural log, -inf for
                            a row that sees no key (whose out is 0)
    NNN.cu_seqlens_q, NNN.cu_seqlens_kv       I32, varlen only
    NNN.seqused_kv          I32, optional; the keys and values beyond it are NaN
and __metadata__ maps NNN to a JSON text with mask, window_left, window_right, sm_scale (null means
1 / sqrt(head_dim)), varlen and layout.

    make_goldens.py            write exact.safetensors
    make_goldens.py --check    compare with exact.safetensors instead
"""
import decimal
import json
import math
import pathlib
import sys
from dataclasses import dataclass

import numpy as np

PATH = pathlib.Path(__file__).with_name("exact.safetensors")
MAX_BYTES = 600_000


@dataclass(frozen=True)
class Case:
    """One problem. `lengths` has (qo_len, kv_len) per sequence, equal ones unless varlen."""

    lengths: tuple
    heads: tuple = (2, 2)  # query / output heads, key / value heads
    dims: tuple = (8, 8)  # head_dim, head_dim_v
    dtype: str = "F16"
    mask: str = "none"
    window: tuple = (-1, -1)
    sm_scale: float | None = None
    amplitude: float = 1.0  # of q and k; a power of two
    varlen: bool = False
    seqused_kv: tuple | None = None

    def scale(self):
        return 1 / math.sqrt(self.dims[0]) if self.sm_scale is None else self.sm_scale

    def sequences(self):
        """Yields (slice of query tokens, slice of the key tokens in use) of the packed tokens."""
        q_start = kv_start = 0
        for b, (qo_len, kv_len) in enumerate(self.lengths):
            used = kv_len if self.seqused_kv is None else self.seqused_kv[b]
            yield slice(q_start, q_start + qo_len), slice(kv_start, kv_start + used)
            q_start += qo_len
            kv_start += kv_len

    def metadata(self):
        return {"mask": self.mask, "window_left": self.window[0], "window_right": self.window[1],
                "sm_scale": self.sm_scale, "varlen": self.varlen, "layout": "NHD"}


def dense(batch, qo_len, kv_len, **fields):
    return Case(((qo_len, kv_len),) * batch, **fields)


def varlen(*lengths, **fields):
    return Case(lengths, varlen=True, **fields)


def window(left, right):
    return {"mask": "window", "window": (left, right)}


BOTTOM_RIGHT, TOP_LEFT = {"mask": "causal_bottom_right"}, {"mask": "causal_top_left"}

CASES = (
    # No mask: shapes, dtypes, head ratios.
    dense(1, 1, 1, heads=(1, 1), dims=(1, 1)),
    dense(2, 5, 7, heads=(2, 2), dims=(8, 8), dtype="BF16"),
    dense(1, 33, 70, heads=(2, 1), dims=(64, 64)),
    dense(1, 17, 29, heads=(6, 2), dims=(20, 12), dtype="BF16"),
    dense(2, 3, 65, heads=(4, 1), dims=(8, 24), dtype="F32"),
    dense(1, 40, 1, heads=(3, 1), dims=(20, 1)),
    dense(2, 4, 0, heads=(2, 1)),
    # Causal, bottom-right: qo < kv, qo == kv, qo > kv (the first rows see nothing).
    dense(1, 19, 43, heads=(2, 2), dims=(20, 20), **BOTTOM_RIGHT),
    dense(2, 33, 33, heads=(2, 1), dims=(8, 8), dtype="BF16", **BOTTOM_RIGHT),
    dense(1, 45, 20, heads=(3, 1), dims=(8, 16), **BOTTOM_RIGHT),
    dense(1, 65, 65, heads=(1, 1), dims=(64, 64), dtype="BF16", **BOTTOM_RIGHT),
    # Causal, top-left: qo < kv and qo > kv.
    dense(1, 19, 43, heads=(4, 2), dims=(20, 20), dtype="BF16", **TOP_LEFT),
    dense(2, 37, 11, heads=(2, 2), dims=(8, 4), **TOP_LEFT),
    # Windows: the diagonal only; each side finite or unlimited; rows before the first key.
    dense(1, 21, 34, heads=(2, 2), **window(0, 0)),
    dense(1, 30, 50, heads=(2, 1), dims=(20, 20), dtype="BF16", **window(7, 0)),
    dense(2, 25, 25, heads=(3, 1), **window(3, 5)),
    dense(1, 18, 40, heads=(2, 2), dims=(8, 20), dtype="F32", **window(-1, 4)),
    dense(1, 18, 40, heads=(2, 2), **window(9, -1)),
    dense(1, 12, 23, heads=(1, 1), dims=(1, 8), **window(-1, -1)),
    dense(1, 40, 15, heads=(2, 1), dtype="BF16", **window(2, 3)),
    dense(1, 50, 10, heads=(2, 2), **window(4, 0)),
    # Varlen: empty and one-token sequences, sequences without keys or without queries.
    varlen((13, 30), (0, 0), (1, 1), (20, 20), heads=(2, 2), dims=(20, 20)),
    varlen((0, 9), (6, 0), (1, 40), heads=(6, 2), dims=(8, 12), dtype="BF16"),
    varlen((1, 17), (22, 9), (30, 31), heads=(4, 2), dims=(8, 8), **BOTTOM_RIGHT),
    varlen((10, 3), (3, 10), (0, 5), heads=(3, 1), dims=(8, 8), dtype="F32", **TOP_LEFT),
    varlen((24, 40), (15, 6), (1, 1), heads=(2, 1), dims=(20, 8), **window(6, 2)),
    # Keys in use: fewer than stored, none, all; masks align to the keys in use.
    dense(3, 9, 26, heads=(2, 1), seqused_kv=(26, 11, 0)),
    dense(2, 16, 40, heads=(2, 2), dims=(20, 20), dtype="BF16", seqused_kv=(29, 5),
          **BOTTOM_RIGHT),
    dense(2, 14, 30, heads=(2, 2), dtype="F32", seqused_kv=(8, 21), **TOP_LEFT),
    dense(2, 20, 30, heads=(3, 1), seqused_kv=(30, 13), **window(5, 1)),
    varlen((7, 20), (12, 18), (2, 6), heads=(4, 2), seqused_kv=(13, 18, 0)),
    varlen((9, 25), (1, 1), (16, 33), heads=(2, 1), dims=(20, 12), dtype="BF16",
           seqused_kv=(17, 1, 10), **BOTTOM_RIGHT),
    # Scales: none left, negative, large; scores beyond the range of exp in float32 and float64.
    dense(1, 15, 31, heads=(2, 1), sm_scale=0.0, **BOTTOM_RIGHT),
    dense(1, 15, 31, heads=(2, 2), dims=(20, 20), dtype="BF16", sm_scale=-0.25),
    dense(1, 20, 37, heads=(2, 1), dims=(20, 8), sm_scale=16.0),
    dense(1, 20, 37, heads=(2, 2), dims=(8, 8), dtype="BF16", amplitude=8.0, **BOTTOM_RIGHT),
    dense(1, 12, 50, heads=(2, 1), dims=(64, 16), amplitude=32.0),
    dense(1, 12, 50, heads=(1, 1), dims=(64, 16), dtype="F32", sm_scale=-0.125, amplitude=64.0),
)


def noise(seed, shape):
    """Roughly normal values with about 17 bits, from a splitmix64 counter."""
    bits = np.uint64(seed << 32) + np.arange(math.prod(shape), dtype=np.uint64)
    bits = (bits + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    fields = sum((bits >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    return ((fields - 2 * 0xFFFF) / 32768.0).reshape(shape)


def encode(values, dtype):
    """The stored form of float64 values; BF16 as uint16 bit patterns, rounded half to even."""
    single = values.astype("<f4")
    if dtype == "BF16":
        bits = single.view("<u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return single.astype("<f2") if dtype == "F16" else single


def decode(stored, dtype):
    """The float64 values of the stored form."""
    if dtype == "BF16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    return stored.astype("<f8")


def make_inputs(case, seed):
    """Stored q, k, v as packed tokens [tokens, heads, dim]."""
    (heads, kv_heads), (dim, dim_v) = case.heads, case.dims
    total_q, total_kv = (sum(side) for side in zip(*case.lengths))
    q = case.amplitude * noise(3 * seed, (total_q, heads, dim))
    k = case.amplitude * noise(3 * seed + 1, (total_kv, kv_heads, dim))
    v = noise(3 * seed + 2, (total_kv, kv_heads, dim_v))
    if case.seqused_kv is not None:
        in_use = np.zeros(total_kv, dtype=bool)
        for _, keys in case.sequences():
            in_use[keys] = True
        k[~in_use] = v[~in_use] = np.nan
    return tuple(encode(x, case.dtype) for x in (q, k, v))


def visible_keys(case, qo_len, kv_len):
    """Boolean [qo_len, kv_len]: query i sees key j."""
    i, j = np.arange(qo_len)[:, None], np.arange(kv_len)[None, :]
    aligned = i + kv_len - qo_len
    if case.mask == "causal_bottom_right":
        return j <= aligned
    if case.mask == "causal_top_left":
        return j <= i
    left, right = case.window
    return ((left == -1) | (j >= aligned - left)) & ((right == -1) | (j <= aligned + right))


def exp(x):
    return float(decimal.Decimal(x).exp())


def log(x):
    return float(decimal.Decimal(x).ln())


def attend(q, k, v, visible, scale):
    """out and lse of one head of one sequence."""
    scores = np.zeros(visible.shape)
    for channel in range(q.shape[1]):
        scores += q[:, channel, None] * k[None, :, channel]
    scores *= scale
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for i, row in enumerate(visible):
        keys = np.flatnonzero(row)
        if len(keys) == 0:
            continue
        top = max(scores[i, keys])
        weights = [exp(scores[i, j] - top) for j in keys]
        total = math.fsum(weights)
        for weight, j in zip(weights, keys):
            out[i] += weight * v[j]
        out[i] /= total
        lse[i] = top + log(total)
    return out, lse


def attention(case, q, k, v):
    """out [tokens, heads, dim_v] and lse [heads, tokens] of packed float64 tokens."""
    ratio = case.heads[0] // case.heads[1]
    out = np.zeros((len(q), case.heads[0], case.dims[1]))
    lse = np.full((case.heads[0], len(q)), -np.inf)
    for queries, keys in case.sequences():
        visible = visible_keys(case, queries.stop - queries.start, keys.stop - keys.start)
        for h in range(case.heads[0]):
            out[queries, h], lse[h, queries] = attend(
                q[queries, h], k[keys, h // ratio], v[keys, h // ratio], visible, case.scale())
    return out, lse


def check_row(case, q, k, v, queries, keys, i, h, out, lse):
    """Asserts row i of a sequence against softmax's definition in 40-digit decimals.

    No maximum is subtracted (decimals do not overflow) and the mask is an interval of keys.
    """
    qo_len, kv_len = queries.stop - queries.start, keys.stop - keys.start
    first, last = 0, kv_len - 1
    if case.mask == "causal_bottom_right":
        last = min(last, kv_len - (qo_len - i))
    elif case.mask == "causal_top_left":
        last = min(last, i)
    elif case.mask == "window":
        if case.window[0] >= 0:
            first = max(first, kv_len - (qo_len - i) - case.window[0])
        if case.window[1] >= 0:
            last = min(last, kv_len - (qo_len - i) + case.window[1])
    row, kv_head = queries.start + i, h * case.heads[1] // case.heads[0]
    if first > last:
        assert lse[h, row] == -math.inf and not out[row, h].any()
        return

    with decimal.localcontext() as context:
        context.prec = 40
        exact = decimal.Decimal
        weights, rows = [], range(keys.start + first, keys.start + last + 1)
        for j in rows:
            terms = (exact(a) * exact(b) for a, b in zip(q[row, h], k[j, kv_head]))
            weights.append((exact(case.scale()) * sum(terms)).exp())
        total = sum(weights)
        assert abs(exact(lse[h, row]) - total.ln()) <= exact(1e-15) * (1 + abs(total.ln())), case
        for c in range(case.dims[1]):
            mean = sum(w * exact(v[j, kv_head, c]) for w, j in zip(weights, rows)) / total
            assert abs(exact(out[row, h, c]) - mean) <= exact(1e-12), case


def self_check(case, q, k, v, out, lse):
    """Checks the first, middle and last row of each sequence, in one head each."""
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    for queries, keys in case.sequences():
        qo_len = queries.stop - queries.start
        for i in {0, qo_len // 2, qo_len - 1} if qo_len else ():
            check_row(case, q, k, v, queries, keys, i, i % case.heads[0], out, lse)


def make_case(case, seed):
    """The tensors of one case: name -> (dtype, array)."""
    stored = make_inputs(case, seed)
    values = tuple(decode(x, case.dtype) for x in stored)
    out, lse = attention(case, *values)
    self_check(case, *values, out, lse)

    tokens, tensors = (*stored, out), {}
    if case.varlen:
        for name, side in zip(("cu_seqlens_q", "cu_seqlens_kv"), zip(*case.lengths)):
            tensors[name] = "I32", np.cumsum((0, *side)).astype("<i4")
    else:
        batch = len(case.lengths)
        tokens = [x.reshape(batch, len(x) // batch, *x.shape[1:]) for x in tokens]
        lse = lse.reshape(len(lse), batch, -1).swapaxes(0, 1)
    for name, x in zip(("q", "k", "v", "out"), tokens):
        tensors[name] = ("F64" if name == "out" else case.dtype), x
    tensors["lse"] = "F64", lse
    if case.seqused_kv is not None:
        tensors["seqused_kv"] = "I32", np.array(case.seqused_kv, dtype="<i4")
    return tensors


def serialize(tensors, metadata):
    """safetensors bytes; the widest types first, so that every tensor is aligned."""
    header, offset, payload = {"__metadata__": metadata}, 0, []
    for name, (dtype, x) in sorted(tensors.items(), key=lambda t: (-t[1][1].itemsize, t[0])):
        end = offset + x.nbytes
        header[name] = {"dtype": dtype, "shape": x.shape, "data_offsets": (offset, end)}
        offset = end
        payload.append(x.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(payload)


def main():
    decimal.getcontext().prec = 25
    tensors, metadata = {}, {}
    for index, case in enumerate(CASES):
        key = f"{index:03d}"
        metadata[key] = json.dumps(case.metadata(), separators=(",", ":"))
        for name, tensor in make_case(case, index).items():
            tensors[f"{key}.{name}"] = tensor
    data = serialize(tensors, metadata)
    assert len(data) <= MAX_BYTES, len(data)
    if "--check" not in sys.argv[1:]:
        PATH.write_bytes(data)
    elif PATH.read_bytes() != data:
        sys.exit(f"{PATH.name} differs from what this script generates")


if __name__ == "__main__":
    main()
