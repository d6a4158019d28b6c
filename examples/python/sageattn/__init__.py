"""libsageattn from Python: SageAttention on host arrays and on any CUDA array.

    out = sageattn.attention(q, k, v, causal=True)      # [batch, tokens, heads, head_dim] each

Arrays of NumPy, PyTorch and CuPy and whatever has __cuda_array_interface__ or DLPack are used where they are,
with any strides. Nothing but the standard library is needed; the library itself is $SAGEATTN_LIBRARY, or
libsageattn.so.0 in this package's folder, or what the system's loader finds.

Context and Plan give control over kernels, limits and workspaces; sageattn.torch_op has the operator for
torch.compile.
"""

from __future__ import annotations

from ._arrays import CudaError
from ._core import Context, KernelInfo, Plan, PlanInfo
from ._functions import (Comparison, attention, attention_varlen, clear_cache, compare, merge,
                         scaled_dot_product_attention, set_plan_cache_size)
from ._library import (InvalidArgumentError, OutOfMemoryError, SageAttentionError, UnsupportedError,
                       status_name, version)

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Context",
    "CudaError",
    "InvalidArgumentError",
    "KernelInfo",
    "OutOfMemoryError",
    "Plan",
    "PlanInfo",
    "SageAttentionError",
    "UnsupportedError",
    "attention",
    "attention_varlen",
    "clear_cache",
    "compare",
    "merge",
    "scaled_dot_product_attention",
    "set_plan_cache_size",
    "status_name",
    "version",
]
