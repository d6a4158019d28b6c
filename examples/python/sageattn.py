"""libsageattn from Python: ctypes over the C API, NumPy arrays in and out.

    attention = Attention(preset=SAGE2_8B, mask=CAUSAL)
    out = attention(q, k, v)            # [batch, tokens, heads, head_dim] each

A plan is made for each shape that comes up and kept; any number of threads may call at once. With the
CUDA backend the arrays are copied to the device and back, which is right for measuring accuracy, not
speed; milliseconds() leaves the copies out of the time. The library is $SAGEATTN_LIBRARY, or
the build folder's, or what the system finds.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F16, BF16, F32 = 1, 2, 3
AUTO, SAGE1, SAGE2_8B, SAGE2_4B, SAGE2PP, EXACT = range(6)
BACKEND_AUTO, BACKEND_CUDA, BACKEND_CPU = range(3)
NO_MASK, CAUSAL = 0, 1

# Values of numeric fields of the desc, by the names that the program `sageattn` gives them.
CHOICES: dict[str, list[str]] = {
    "qk_format": ["auto", "i8", "i4", "none", "e4m3"],
    "qk_granularity": ["auto", "per_thread", "per_warp", "per_block", "per_token", "per_tensor"],
    "smooth_q": ["auto", "on", "off"],
    "smooth_k": ["auto", "on", "off"],
    "smooth_v": ["auto", "off", "sequence", "group"],
    "v_scale": ["auto", "channel", "group"],
    "rotation": ["none", "hadamard", "smoothattn"],
    "pv_format": ["auto", "e4m3", "f16", "none", "e5m2", "i8"],
    "row_sum": ["auto", "p", "rounded_p"],
    "pv_accum": ["auto", "two_level", "f16", "f32", "single_level"],
    "kernel": ["auto", "mma_sync", "wgmma"],
    "pv_model": ["auto", "qmma13", "hmma"],
}


def _struct(name: str, fields: str) -> Any:
    """A struct of the header: "type name name ...; type name ..."."""
    types = {"u32": c.c_uint32, "i32": c.c_int32, "i64": c.c_int64, "f32": c.c_float,
             "f64": c.c_double, "ptr": c.c_void_p}
    members = []
    for line in fields.split(";"):
        kind, *names = line.split()
        for field in names:
            members.append((field, types[kind]))
    return type(name, (c.Structure,), {"_fields_": members})


class Error(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("status", c.c_int32), ("message", c.c_char * 1016)]


ContextDesc = _struct("ContextDesc", "u32 struct_size flags; i32 backend device target_arch num_threads;"
                      "ptr cache_dir nvrtc_path alloc free allocator_user log log_user")
AttnDesc = _struct(
    "AttnDesc",
    "u32 struct_size; i32 q_dtype kv_dtype out_dtype layout batch_mode mask window_left window_right"
    " head_dim head_dim_v num_qo_heads num_kv_heads sm_scale_set; f32 sm_scale;"
    "i32 max_batch max_qo_len max_kv_len; i64 max_total_qo max_total_kv;"
    "i32 qk_format qk_granularity smooth_q smooth_k smooth_v v_scale rotation pv_format row_sum"
    " pv_accum promotion_interval kernel pv_model bias num_sinks kv_storage; f32 softcap; i32 reserved")
Tensor = _struct("Tensor", "ptr data; i64 stride_batch stride_token stride_head stride_dim")
Lse = _struct("Lse", "ptr data; i64 stride_batch stride_head stride_token")


class PlanInfo(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("backend", c.c_int32), ("arch", c.c_int32),
                ("origin", c.c_int32), ("min_workspace", c.c_int64),
                ("preferred_workspace", c.c_int64), ("workspace_alignment", c.c_int32),
                *[(n, c.c_int32) for n in ("registers", "spill_bytes", "smem_bytes", "threads",
                                           "launches")],
                ("compile_ms", c.c_float),
                *[(n, c.c_int32) for n in ("b_q", "b_k", "promotion_interval", "q_dtype", "kv_dtype",
                                           "out_dtype", "head_dim_v", "num_kv_heads")],
                ("sm_scale", c.c_float),
                *[(n, c.c_int32) for n in ("qk_format", "qk_granularity", "smooth_q", "smooth_k",
                                           "smooth_v", "v_scale", "rotation", "pv_format", "row_sum",
                                           "pv_accum", "kernel", "pv_model")],
                ("kernel_name", c.c_char * 64), ("num_kernels", c.c_int32), ("reserved", c.c_int32)]


class ExecuteArgs(c.Structure):
    _fields_ = [("struct_size", c.c_uint32), ("batch", c.c_int32), ("qo_len", c.c_int32),
                ("kv_len", c.c_int32), ("total_qo", c.c_int64), ("total_kv", c.c_int64),
                ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor), ("lse", Lse),
                *[(n, c.c_void_p) for n in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_kv", "status")]]


class SageAttentionError(RuntimeError):
    """A call of the library that failed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _load() -> c.CDLL:
    here = Path(__file__).resolve().parents[2]
    places = [os.environ.get("SAGEATTN_LIBRARY"), here / "build/release/libsageattn.so",
              "libsageattn.so.0"]
    for place in places:
        if place is not None and (not isinstance(place, Path) or place.exists()):
            return c.CDLL(str(place))
    raise AssertionError("not reached")


_library = _load()
_library.sageattn_version_string.restype = c.c_char_p
_library.sageattn_source_id.restype = c.c_char_p
for _name in ("context", "plan"):
    getattr(_library, f"sageattn_{_name}_destroy").argtypes = [c.c_void_p]
    getattr(_library, f"sageattn_{_name}_destroy").restype = None
_library.sageattn_plan_create.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p]
_library.sageattn_plan_get_info.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
_library.sageattn_execute.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t, c.c_void_p,
                                      c.c_void_p]


def version() -> str:
    return f"{_library.sageattn_version_string().decode()} ({_library.sageattn_source_id().decode()[:12]})"


def _call(function: Callable[..., int], *args: Any) -> None:
    error = Error(struct_size=c.sizeof(Error))
    status = function(*args, c.byref(error))
    if status != 0:
        raise SageAttentionError(status, error.message.decode())


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounds to bfloat16, to nearest even, as bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class _HostMemory:
    """Where the CPU backend works: the arrays themselves."""

    def place(self, arrays: Sequence[NDArray[Any]], workspace: int, alignment: int
              ) -> tuple[list[int], int]:
        """The addresses of the arrays and of a workspace."""
        self._workspace = np.empty(workspace + alignment, np.uint8)
        aligned = -(-self._workspace.ctypes.data // alignment) * alignment
        return [array.ctypes.data for array in arrays], aligned

    def get(self, address: int, array: NDArray[Any]) -> None:
        """Fill the array from where it was placed."""

    def free(self) -> None:
        """Let go of the workspace."""


@functools.cache
def _cuda_library() -> c.CDLL:
    return c.CDLL("libcuda.so.1")


class _Driver:
    """The CUDA driver API, in the calling thread, with the primary context of a device."""

    def __init__(self, device: int) -> None:
        context = c.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        if (result := getattr(_cuda_library(), name)(*args)) != 0:
            raise RuntimeError(f"{name}: CUDA error {result}")


class _DeviceMemory:
    """Where the CUDA backend works: one allocation that holds copies of the arrays."""

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        self._base = c.c_uint64()

    def place(self, arrays: Sequence[NDArray[Any]], workspace: int, alignment: int
              ) -> tuple[list[int], int]:
        """The addresses of copies of the arrays and of a workspace."""
        unit = max(alignment, 256)
        sizes = [-(-size // unit) * unit for size in (*(x.nbytes for x in arrays), workspace)]
        self._driver.call("cuMemAlloc_v2", c.byref(self._base), c.c_size_t(max(sum(sizes), 1)))
        starts = [self._base.value + sum(sizes[:i]) for i in range(len(sizes))]
        for start, array in zip(starts, arrays, strict=False):
            self._driver.call("cuMemcpyHtoD_v2", c.c_uint64(start), c.c_void_p(array.ctypes.data),
                              c.c_size_t(array.nbytes))
        return starts[:-1], starts[-1]

    def get(self, address: int, array: NDArray[Any]) -> None:
        """Fill the array from where it was placed, when all work is done."""
        self._driver.call("cuMemcpyDtoH_v2", c.c_void_p(array.ctypes.data), c.c_uint64(address),
                          c.c_size_t(array.nbytes))

    def free(self) -> None:
        """Free all of it."""
        if self._base.value:
            self._driver.call("cuMemFree_v2", self._base)
            self._base = c.c_uint64()


def gpu(device: int = 0) -> dict[str, str]:
    """What measurements on a GPU should say of it: its name and the versions of driver and CUDA."""
    driver, name, cuda = _Driver(device), c.create_string_buffer(256), c.c_int()
    driver.call("cuDeviceGetName", name, len(name), device)
    driver.call("cuDriverGetVersion", c.byref(cuda))
    facts = {"gpu": name.value.decode(), "cuda": f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"}
    version = Path("/sys/module/nvidia/version")  # what the driver API does not tell
    if version.exists():
        facts["driver"] = version.read_text(encoding="utf-8").strip()
    return facts


class Context:
    """A backend. Shared by any number of Attention objects."""

    def __init__(self, backend: int = BACKEND_AUTO, arch: int = 0, threads: int = 0) -> None:
        desc = ContextDesc(struct_size=c.sizeof(ContextDesc), backend=backend, target_arch=arch,
                           num_threads=threads)
        self.handle = c.c_void_p()
        _call(_library.sageattn_context_create, c.byref(desc), c.byref(self.handle))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            _library.sageattn_context_destroy(self.handle)


class Attention:
    """Attention with one set of numerics: a preset, and fields of the desc that differ from it.

    dtype: of inputs and output inside the library. F16 and F32 take arrays of that type, BF16
    float32 arrays, which it rounds. numerics: e.g. {"qk_format": "i4", "promotion_interval": 512}.
    """

    def __init__(self, preset: int = AUTO, mask: int = NO_MASK, dtype: int = F32,
                 context: Context | None = None, sm_scale: float | None = None,
                 numerics: Mapping[str, str | int] | None = None) -> None:
        self._context = context if context is not None else Context()
        self._dtype, self._mask, self._sm_scale = dtype, mask, sm_scale
        self._preset, self._numerics = preset, dict(numerics or {})
        self._plans: dict[tuple[int, ...], tuple[c.c_void_p, PlanInfo]] = {}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for plan, _ in getattr(self, "_plans", {}).values():
            _library.sageattn_plan_destroy(plan)

    def _plan(self, shape: tuple[int, ...]) -> tuple[c.c_void_p, PlanInfo]:
        with self._lock:
            if shape not in self._plans:
                self._plans[shape] = self._make_plan(shape)
            return self._plans[shape]

    def _make_plan(self, shape: tuple[int, ...]) -> tuple[c.c_void_p, PlanInfo]:
        desc = AttnDesc()
        _call(_library.sageattn_attn_desc_init, c.byref(desc), c.sizeof(desc), self._preset)
        for name, value in self._numerics.items():
            number = CHOICES[name].index(value) if isinstance(value, str) else value
            setattr(desc, name, number)
        (desc.max_batch, desc.max_qo_len, desc.max_kv_len, desc.num_qo_heads, desc.num_kv_heads,
         desc.head_dim, desc.head_dim_v) = shape
        desc.q_dtype, desc.mask = self._dtype, self._mask
        if self._sm_scale is not None:
            desc.sm_scale_set, desc.sm_scale = 1, self._sm_scale
        plan, info = c.c_void_p(), PlanInfo(struct_size=c.sizeof(PlanInfo))
        _call(_library.sageattn_plan_create, self._context.handle, c.byref(desc), c.byref(plan))
        _call(_library.sageattn_plan_get_info, plan, c.byref(info))
        return plan, info

    def info(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> PlanInfo:
        """What the plan for these shapes resolved to."""
        return self._plan(_shape(q, k, v))[1]

    def __call__(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.float32]:
        """q [batch, qo_len, num_qo_heads, head_dim], k and v likewise: the output as float32."""
        plan, info = self._plan(_shape(q, k, v))
        arrays = [self._convert(x) for x in (q, k, v)]
        out_type = {F16: np.float16, BF16: np.uint16, F32: np.float32}[info.out_dtype]
        out: NDArray[Any] = np.empty((*q.shape[:3], v.shape[3]), out_type)
        memory = _DeviceMemory(_Driver(0)) if info.backend == BACKEND_CUDA else _HostMemory()
        try:
            addresses, workspace = memory.place([*arrays, out], info.min_workspace,
                                                info.workspace_alignment)
            _execute(plan, _arguments(q, k, addresses), workspace, info.min_workspace)
            memory.get(addresses[3], out)
        finally:
            memory.free()
        return from_bf16(out) if info.out_dtype == BF16 else out.astype(np.float32)

    def milliseconds(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], repeat: int = 20
                     ) -> float:
        """The median time of an execute on the GPU, by events between executes one after another.

        With the workspace that is preferred: with less, smoothing Q takes several launches.
        """
        plan, info = self._plan(_shape(q, k, v))
        if info.backend != BACKEND_CUDA:
            raise ValueError("only the CUDA backend is timed")
        arrays = [self._convert(x) for x in (q, k, v)]
        arrays.append(np.empty((*q.shape[:3], v.shape[3]), np.float32))  # the output: room enough
        driver = _Driver(0)
        memory = _DeviceMemory(driver)
        events = [c.c_void_p() for _ in range(repeat + 1)]
        try:
            for event in events:
                driver.call("cuEventCreate", c.byref(event), 0)
            size = info.preferred_workspace
            addresses, workspace = memory.place(arrays, size, info.workspace_alignment)
            args = _arguments(q, k, addresses)
            for _ in range(repeat // 2):  # warms up, and keeps the GPU busy while more is queued
                _execute(plan, args, workspace, size)
            driver.call("cuEventRecord", events[0], None)
            for event in events[1:]:
                _execute(plan, args, workspace, size)
                driver.call("cuEventRecord", event, None)
            driver.call("cuEventSynchronize", events[-1])
            times = [c.c_float() for _ in range(repeat)]
            for time, start, end in zip(times, events[:-1], events[1:], strict=True):
                driver.call("cuEventElapsedTime", c.byref(time), start, end)
        finally:
            for event in events:
                if event.value:
                    driver.call("cuEventDestroy_v2", event)
            memory.free()
        return float(np.median([time.value for time in times]))

    def _convert(self, x: NDArray[Any]) -> NDArray[Any]:
        """To the type that the library gets."""
        if self._dtype == BF16:
            return to_bf16(x)
        return np.ascontiguousarray(x, np.float16 if self._dtype == F16 else np.float32)


def _arguments(q: NDArray[Any], k: NDArray[Any], addresses: Sequence[int]) -> ExecuteArgs:
    args = ExecuteArgs(struct_size=c.sizeof(ExecuteArgs), batch=q.shape[0], qo_len=q.shape[1],
                       kv_len=k.shape[1])
    for name, address in zip(("q", "k", "v", "out"), addresses, strict=True):
        getattr(args, name).data = address
    return args


def _execute(plan: c.c_void_p, args: ExecuteArgs, workspace: int, size: int) -> None:
    _call(_library.sageattn_execute, plan, c.byref(args), workspace, size, None)


def _shape(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> tuple[int, ...]:
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
