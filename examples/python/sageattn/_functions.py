"""Attention as plain functions, over plans that are made as they are needed and kept."""

from __future__ import annotations

import collections
import ctypes as c
import dataclasses
import os
import threading
from typing import Any, Callable, Hashable, Optional, Tuple

from . import _abi, _arrays
from ._arrays import HOST, Array
from ._core import (Choice, Context, Lengths, Plan, View, check_inputs, check_numerics, lengths_of,
                    number_of, view)
from ._library import call, library

PLAN_CACHE_SIZE = 64  # plans that are kept


class _Cache:
    """The last plans used, and the contexts they were made from."""

    def __init__(self) -> None:
        self.size = PLAN_CACHE_SIZE
        self._contexts: dict[int, Context] = {}
        self._plans: collections.OrderedDict[Hashable, Plan] = collections.OrderedDict()
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """In a child: the parent's handles are of no use, and a thread it lacks may hold the lock."""
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._contexts.clear()
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)

    def context(self, device: int) -> Context:
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = (Context("cpu") if device == HOST
                                          else Context("cuda", device=device))
            return self._contexts[device]

    def plan(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found
        made = make()  # takes seconds where kernels are compiled: others need not wait
        with self._lock:
            found = self._plans.setdefault(key, made)
            self._plans.move_to_end(key)
            self._trim()
            return found

    def resize(self, size: int) -> None:
        with self._lock:
            self.size = size
            self._trim()

    def _trim(self) -> None:
        while len(self._plans) > self.size:
            self._plans.popitem(last=False)  # lives on in the calls that use it


_cache = _Cache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cache.after_fork)


def clear_cache() -> None:
    """Forget the plans and contexts that attention() and its kin have made."""
    _cache.clear()


def set_plan_cache_size(size: int) -> None:
    """How many plans attention() and its kin keep (64 at first): those last used."""
    if size < 1:
        raise ValueError(f"size is {size}; it must be 1 or more")
    _cache.resize(size)


def _limit(length: int, most: int = 1 << 30) -> int:
    """A limit that a growing length reaches in few steps, four an octave; its plan serves all below."""
    step = 1 << max(length.bit_length() - 3, 0)
    return min(max(-(-length // step) * step, 1), most)


def _mask_of(causal: bool, mask: Optional[str], window: Optional[Tuple[int, int]]) -> Tuple[str, int, int]:
    """The desc's mask and its reaches."""
    given = [name for name, value in (("causal", causal), ("mask", mask is not None),
                                      ("window", window is not None)) if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; at most one of causal, mask and window is allowed")
    if window is not None:
        left, right = window
        return "window", left, right
    if mask not in (None, "bottom_right", "top_left"):
        raise ValueError(f"mask is {mask!r}; allowed are 'bottom_right', 'top_left' and None")
    if causal or mask == "bottom_right":
        return "causal_bottom_right", 0, 0
    return ("causal_top_left" if mask == "top_left" else "none"), 0, 0


def _attend(q: View, k: View, v: View, lengths: Lengths, limits: Tuple[int, ...], layout: int, preset: Choice,
            mask: Tuple[str, int, int], sm_scale: Optional[float], return_lse: bool, out: Any,
            out_dtype: Choice, stream: Any, context: Optional[Context],
            numerics: dict[str, Choice]) -> Any:
    check_inputs(q, k, v)
    if out is not None and not out_dtype:
        out_dtype = _arrays.adapt(out, "out", q.array.dtype, write=True).dtype
    owner = _cache.context(q.array.device) if context is None else context
    key = (owner, q.array.dtype, k.array.dtype, out_dtype, q.heads, k.heads, q.channels, v.channels, limits,
           layout, mask, sm_scale, preset, tuple(sorted(numerics.items())))

    def make() -> Plan:
        packed = len(limits) > 3
        total_qo, total_kv = limits[3:] if packed else (0, 0)
        return Plan(owner, q_dtype=q.array.dtype, kv_dtype=k.array.dtype, out_dtype=out_dtype,
                    head_dim=q.channels, head_dim_v=v.channels, num_qo_heads=q.heads,
                    num_kv_heads=k.heads, max_batch=limits[0], max_qo_len=limits[1], max_kv_len=limits[2],
                    batch_mode="varlen" if packed else "dense", layout=layout, preset=preset, mask=mask[0],
                    window_left=mask[1], window_right=mask[2], sm_scale=sm_scale,
                    max_total_qo=total_qo, max_total_kv=total_kv, **numerics)

    result, lse = _cache.plan(key, make).run(q, k, v, lengths, out, return_lse or None, None, stream)
    return (result, lse) if return_lse else result


def _views(q: Any, k: Any, v: Any, dtype: Optional[str], layout: str, varlen: bool
           ) -> Tuple[View, View, View, int]:
    if dtype not in (None, "bf16"):
        raise ValueError(f"dtype is {dtype!r}; allowed are 'bf16', for 16-bit integers that hold bfloat16, "
                         "and None")
    order = number_of("layout", layout)
    return (view(_arrays.adapt(q, "q", dtype), "q", order, varlen),
            view(_arrays.adapt(k, "k", dtype), "k", order, varlen),
            view(_arrays.adapt(v, "v", dtype), "v", order, varlen), order)


def attention(q: Any, k: Any, v: Any, *, preset: Choice = "auto", causal: bool = False,
              mask: Optional[str] = None, window: Optional[Tuple[int, int]] = None, layout: str = "NHD",
              sm_scale: Optional[float] = None, return_lse: bool = False, out: Any = None,
              out_dtype: Choice = 0, dtype: Optional[str] = None, seqused_kv: Any = None, stream: Any = None,
              context: Optional[Context] = None, **numerics: Choice) -> Any:
    """softmax(sm_scale q k^T) v, quantized as the preset says.

    q [batch, qo_len, num_qo_heads, head_dim], k [batch, kv_len, num_kv_heads, head_dim], v the same with
    head_dim_v; with layout "HND" [batch, heads, tokens, channels]. float16, bfloat16 or float32; any strides.
    num_qo_heads is a multiple of num_kv_heads. Host arrays are computed on the CPU, arrays on a GPU there.

    Mask, at most one of: causal=True or mask="bottom_right" (the last query sees the last key);
    mask="top_left" (query i sees keys 0..i); window=(left, right), keys before and after the diagonal aligned
    bottom right, -1 for all. sm_scale: None is 1 / sqrt(head_dim). seqused_kv: int32 [batch], how many keys of
    each sequence exist. preset: "auto", "sage1", "sage2_8b", "sage2_4b", "sage2pp", "exact"; numerics: fields
    of sageattn_attn_desc that differ from it, e.g. qk_format="i4", smooth_q="on", promotion_interval=64.

    out: where to write [batch, qo_len, num_qo_heads, head_dim_v]; None: a new array of q's framework, of
    out_dtype (0: q's). dtype="bf16": 16-bit integers hold bfloat16. stream: where to enqueue on a GPU; None:
    the current one of q's framework, else the legacy default stream. context: who computes, instead of one
    for q's device.

    Returns out, with return_lse (out, lse): lse float32 [batch, num_qo_heads, qo_len], the natural logarithm
    of the sum over visible keys of exp(sm_scale q.k). A query that sees no key gives 0 and -inf.

    Raises ValueError and TypeError that name the argument, its value and what is allowed;
    SageAttentionError for what the library, the driver or NVRTC refuse. There is no backward pass.
    """
    check_numerics(numerics)
    views = _views(q, k, v, dtype, layout, varlen=False)
    lengths = lengths_of(views[0], False, None, None, seqused_kv, None)
    limits = (_limit(views[0].batch, 1 << 24), _limit(views[0].tokens), _limit(views[1].tokens))
    return _attend(*views[:3], lengths, limits, views[3], preset, _mask_of(causal, mask, window), sm_scale,
                   return_lse, out, out_dtype, stream, context, numerics)


def attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, max_qo_len: int,
                     max_kv_len: int, *, preset: Choice = "auto", causal: bool = False,
                     mask: Optional[str] = None, window: Optional[Tuple[int, int]] = None, layout: str = "NHD",
                     sm_scale: Optional[float] = None, return_lse: bool = False, out: Any = None,
                     out_dtype: Choice = 0, dtype: Optional[str] = None, seqused_kv: Any = None,
                     status: Any = None, stream: Any = None, context: Optional[Context] = None,
                     **numerics: Choice) -> Any:
    """attention() of sequences packed along the token axis.

    q [total_qo, num_qo_heads, head_dim], k and v [total_kv, num_kv_heads, channels] ("HND": [heads, tokens,
    channels]); sequence b has tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q, likewise of k and v.
    cu_seqlens: int32 [batch + 1], where q is. max_qo_len, max_kv_len: no sequence is longer. status: int32
    [batch], receives 0, or 1 for a sequence whose lengths were nonsense and whose rows are NaN. lse:
    [num_qo_heads, total_qo]. All else as in attention().
    """
    check_numerics(numerics)
    views = _views(q, k, v, dtype, layout, varlen=True)
    lengths = lengths_of(views[0], True, cu_seqlens_q, cu_seqlens_kv, seqused_kv, status)
    most = 1 << 54
    limits = (_limit(lengths.batch, 1 << 24), _limit(max_qo_len), _limit(max_kv_len),
              _limit(views[0].tokens, most), _limit(views[1].tokens, most))
    return _attend(*views[:3], lengths, limits, views[3], preset, _mask_of(causal, mask, window), sm_scale,
                   return_lse, out, out_dtype, stream, context, numerics)


def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None,
                                 dropout_p: float = 0.0, is_causal: bool = False,
                                 scale: Optional[float] = None, enable_gqa: bool = False) -> Any:
    """As torch.nn.functional.scaled_dot_product_attention, for what the library can do.

    query [batch, num_qo_heads, qo_len, head_dim]; is_causal is aligned top left, as there. attn_mask and
    dropout_p are refused with NotImplementedError; heads that differ without enable_gqa with ValueError.
    """
    if attn_mask is not None:
        raise NotImplementedError("attn_mask is given, but there are no mask tensors: use is_causal, or mask and "
                                  "window of sageattn.attention")
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; only 0.0 is possible: there is no dropout")
    query_shape, key_shape = tuple(query.shape), tuple(key.shape)
    if not enable_gqa and len(query_shape) == len(key_shape) == 4 and query_shape[1] != key_shape[1]:
        raise ValueError(f"query has {query_shape[1]} heads and key {key_shape[1]}; with enable_gqa=False they must "
                         "be as many")
    return attention(query, key, value, layout="HND", mask="top_left" if is_causal else None, sm_scale=scale)


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, layout: str = "NHD") -> Tuple[Any, Any]:
    """Attention over two sets of keys from that over each: (out, lse). NumPy only.

    out [batch, tokens, heads, channels] or as the layout says (or packed, without batch), of any float type;
    lse [batch, heads, tokens]. The sums are made in float32 at least; out has out_a's type.
    """
    import numpy as np

    order = number_of("layout", layout)
    m = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(m), 0, m)
    w_a, w_b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = w_a + w_b
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    weights = [np.divide(w, total, out=np.zeros_like(w), where=total > 0)[..., None] for w in (w_a, w_b)]
    if order == 0:  # lse has heads before tokens
        weights = [np.swapaxes(w, -3, -2) for w in weights]
    out = weights[0] * np.asarray(out_a) + weights[1] * np.asarray(out_b)
    return out.astype(out_a.dtype), lse


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far an output is from a reference: the fields of sageattn_compare_result.

    Non-finite elements are counted and left out of the rest: look at the counts first.
    """

    worst_head: int
    count: int
    nonfinite_out: int
    nonfinite_ref: int
    cos_sim: float
    rel_l1: float
    rmse: float
    rel_error: float
    max_abs_error: float
    worst_cos_sim: float
    worst_rel_l1: float
    worst_rmse: float
    worst_rel_error: float


def compare(out: Any, ref: Any, layout: str = "NHD", dtype: Optional[str] = None) -> Comparison:
    """Compare two host arrays of one shape, [batch, tokens, heads, channels] or as the layout says."""
    order = number_of("layout", layout)
    views = []
    for name, array in (("out", out), ("ref", ref)):
        described: Array = _arrays.adapt(array, name, dtype)
        if described.device != HOST:
            raise ValueError(f"{name} is in {described.place}; it must be in host memory")
        views.append(view(described, name, order))
    judged, wanted = views
    if judged[1:5] != wanted[1:5]:
        raise ValueError(f"out has shape {list(judged.array.shape)}; it must be ref's, "
                         f"{list(wanted.array.shape)}")
    args = _abi.CompareArgs(
        c.sizeof(_abi.CompareArgs), _abi.DTYPES[judged.array.dtype], _abi.DTYPES[wanted.array.dtype], order,
        judged.batch, judged.tokens, judged.heads, judged.channels, judged.fill(_abi.ConstTensor),
        wanted.fill(_abi.ConstTensor))
    result = _abi.CompareResult(struct_size=c.sizeof(_abi.CompareResult))
    call(library().sageattn_compare, c.byref(args), c.byref(result))
    return Comparison(**{field.name: getattr(result, field.name) for field in dataclasses.fields(Comparison)})
