"""What the studies need of libsageattn: attention of float32 NumPy arrays on any backend, and its time.

    attention = Attention(preset=SAGE2_8B, mask=CAUSAL)
    out = attention(q, k, v)            # [batch, tokens, heads, head_dim] each

A plan is made for each shape that comes up and kept; any number of threads may call at once. With the
CUDA backend the arrays are copied to the device and back, which is right for measuring accuracy, not
speed; milliseconds() leaves the copies out of the time.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sageattn import Context, Plan, PlanInfo, SageAttentionError, version

__all__ = ["Attention", "Context", "PlanInfo", "SageAttentionError", "from_bf16", "gpu", "to_bf16", "version"]

F16, BF16, F32 = "f16", "bf16", "f32"
AUTO, SAGE1, SAGE2_8B, SAGE2_4B, SAGE2PP, EXACT = "auto", "sage1", "sage2_8b", "sage2_4b", "sage2pp", "exact"
BACKEND_AUTO, BACKEND_CUDA, BACKEND_CPU = "auto", "cuda", "cpu"
NO_MASK, CAUSAL = "none", "causal_bottom_right"


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounds to bfloat16, to nearest even, as bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


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


class _DeviceArray:
    """A part of an allocation, as the package takes it."""

    def __init__(self, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.address = address
        self.__cuda_array_interface__ = {"data": (address, False), "shape": tuple(shape),
                                         "typestr": dtype.str, "version": 3}


@contextlib.contextmanager
def _on_device(driver: _Driver, arrays: Sequence[NDArray[Any]], workspace: int
               ) -> Iterator[tuple[list[_DeviceArray], _DeviceArray]]:
    """Copies of the arrays on the device, and a workspace, in one allocation."""
    sizes = [-(-size // 256) * 256 for size in (*(x.nbytes for x in arrays), workspace)]
    base = c.c_uint64()
    driver.call("cuMemAlloc_v2", c.byref(base), c.c_size_t(max(sum(sizes), 1)))
    try:
        starts = [base.value + sum(sizes[:i]) for i in range(len(sizes))]
        for start, array in zip(starts, arrays, strict=False):
            driver.call("cuMemcpyHtoD_v2", c.c_uint64(start), c.c_void_p(array.ctypes.data),
                        c.c_size_t(array.nbytes))
        yield ([_DeviceArray(start, x.shape, x.dtype) for start, x in zip(starts, arrays, strict=False)],
               _DeviceArray(starts[-1], [workspace], np.dtype(np.uint8)))
    finally:
        driver.call("cuMemFree_v2", base)


def gpu(device: int = 0) -> dict[str, str]:
    """What measurements on a GPU should say of it: its name and the versions of driver and CUDA."""
    driver, name, cuda = _Driver(device), c.create_string_buffer(256), c.c_int()
    driver.call("cuDeviceGetName", name, len(name), device)
    driver.call("cuDriverGetVersion", c.byref(cuda))
    facts = {"gpu": name.value.decode(), "cuda": f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"}
    driver_version = Path("/sys/module/nvidia/version")  # what the driver API does not tell
    if driver_version.exists():
        facts["driver"] = driver_version.read_text(encoding="utf-8").strip()
    return facts


class Attention:
    """Attention with one set of numerics: a preset, and fields of the desc that differ from it.

    dtype: of inputs and output inside the library. F16 and F32 take arrays of that type, BF16
    float32 arrays, which it rounds. numerics: e.g. {"qk_format": "i4", "promotion_interval": 512}, and
    "out_dtype".
    """

    def __init__(self, preset: str = AUTO, mask: str = NO_MASK, dtype: str = F32,
                 context: Context | None = None, sm_scale: float | None = None,
                 numerics: Mapping[str, str | int] | None = None) -> None:
        self._context = context if context is not None else Context()
        self._dtype, self._mask, self._sm_scale = dtype, mask, sm_scale
        self._preset, self._numerics = preset, dict(numerics or {})
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._lock = threading.Lock()

    def _plan(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> Plan:
        shape = (*q.shape, *k.shape[1:3], v.shape[3])
        with self._lock:
            if shape not in self._plans:
                fields: dict[str, Any] = self._numerics
                self._plans[shape] = Plan(
                    self._context, preset=self._preset, q_dtype=self._dtype, mask=self._mask,
                    max_batch=q.shape[0], max_qo_len=q.shape[1], max_kv_len=k.shape[1],
                    num_qo_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3],
                    head_dim_v=v.shape[3], sm_scale=self._sm_scale, **fields)
            return self._plans[shape]

    def info(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> PlanInfo:
        """What the plan for these shapes resolved to."""
        return self._plan(q, k, v).info

    def __call__(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.float32]:
        """q [batch, qo_len, num_qo_heads, head_dim], k and v likewise: the output as float32."""
        plan = self._plan(q, k, v)
        arrays = self._arrays(plan, q, k, v)
        if plan.info.backend == "cpu":
            plan.execute(*arrays[:3], out=arrays[3])
        else:
            driver = _Driver(0)
            with _on_device(driver, arrays, plan.info.min_workspace) as (placed, workspace):
                plan.execute(*placed[:3], out=placed[3], workspace=workspace)
                driver.call("cuMemcpyDtoH_v2", c.c_void_p(arrays[3].ctypes.data),
                            c.c_uint64(placed[3].address), c.c_size_t(arrays[3].nbytes))
        return from_bf16(arrays[3]) if plan.info.out_dtype == BF16 else arrays[3].astype(np.float32)

    def milliseconds(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], repeat: int = 20
                     ) -> float:
        """The median time of an execute on the GPU, by events between executes one after another.

        With the workspace that is preferred: with less, smoothing Q takes several launches.
        """
        plan = self._plan(q, k, v)
        if plan.info.backend != "cuda":
            raise ValueError("only the CUDA backend is timed")
        driver = _Driver(0)
        events = [c.c_void_p() for _ in range(repeat + 1)]
        try:
            for event in events:
                driver.call("cuEventCreate", c.byref(event), 0)
            with _on_device(driver, self._arrays(plan, q, k, v), plan.info.preferred_workspace
                            ) as (placed, workspace):
                execute = functools.partial(plan.execute, *placed[:3], out=placed[3], workspace=workspace)
                for _ in range(repeat // 2):  # warms up, and keeps the GPU busy while more is queued
                    execute()
                driver.call("cuEventRecord", events[0], None)
                for event in events[1:]:
                    execute()
                    driver.call("cuEventRecord", event, None)
                driver.call("cuEventSynchronize", events[-1])
            times = [c.c_float() for _ in range(repeat)]
            for time, start, end in zip(times, events[:-1], events[1:], strict=True):
                driver.call("cuEventElapsedTime", c.byref(time), start, end)
        finally:
            for event in events:
                if event.value:
                    driver.call("cuEventDestroy_v2", event)
        return float(np.median([time.value for time in times]))

    def _arrays(self, plan: Plan, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> list[NDArray[Any]]:
        """The inputs in the type that the library gets, and the output."""
        types = {F16: np.float16, BF16: np.uint16, F32: np.float32}
        inputs: list[NDArray[Any]] = [
            to_bf16(x) if self._dtype == BF16 else np.ascontiguousarray(x, types[self._dtype])
            for x in (q, k, v)]
        return [*inputs, np.empty((*q.shape[:3], v.shape[3]), types[plan.info.out_dtype])]
