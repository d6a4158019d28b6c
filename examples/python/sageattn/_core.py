"""Contexts and plans."""

from __future__ import annotations

import contextlib
import ctypes as c
import dataclasses
import mmap
import os
import sys
import threading
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple, Type, Union

from . import _abi, _arrays
from ._arrays import HOST, Array
from ._library import call, library, nvrtc_in_wheels, read_bytes

Choice = Union[str, int]

_LARGE_WORKSPACE = 256 << 20  # more than this only if an execute cannot do with less
_KEPT_WORKSPACE = 64 << 20  # what a thread keeps of host memory between calls


class _Handle:
    """Owns an object of the library: destroyed with the last reference, so never while it is in use."""

    def __init__(self, value: c.c_void_p, destroy: Callable[[c.c_void_p], None], *keep: Any) -> None:
        self.value = value
        self._destroy = destroy
        self._keep = keep  # what the library may call or use until it is destroyed
        self._pid = os.getpid()
        self._getpid = os.getpid  # modules may be gone when this one is finalized
        self._is_finalizing = sys.is_finalizing

    def check(self, what: str) -> _Handle:
        """Refuse a forked child, which has neither the threads nor the CUDA context behind the handle."""
        if self._pid != os.getpid():
            raise RuntimeError(f"this {what} was made before a fork; make another in the child process")
        return self

    def __del__(self) -> None:
        if self._pid == self._getpid() and not self._is_finalizing():
            self._destroy(self.value)


def number_of(field: str, value: Choice) -> int:
    """The value of a numeric field, by name ("i4") or as in sageattn.h."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{field} is {value!r}; allowed are names and integers of sageattn.h")
    if isinstance(value, int):
        return value
    names = _abi.CHOICES.get(field)
    if names is None:
        raise TypeError(f"{field} is {value!r}; it must be an integer")
    name = value.lower()
    if names is _abi.DTYPES:
        name = _arrays.short_name(name)
    if name not in names:
        raise ValueError(f"{field} is {value!r}; allowed are {', '.join(names)}")
    return names[name]


def check_numerics(numerics: dict[str, Choice]) -> None:
    """Refuse keywords that are no numeric field of a desc."""
    for name in numerics:
        if name not in _abi.NUMERICS:
            raise TypeError(f"unknown argument {name!r}; numeric fields are {', '.join(_abi.NUMERICS)}")


class Context:
    """A backend: on the CPU its threads, on a GPU its device and its kernels.

    backend: "auto", "cuda" or "cpu". target_arch: 0 for the device's; else 80, 86, 89, 90 or 120, what to
    compile for or, on the CPU, whose tiles and accumulation to emulate. num_threads: of the CPU backend, 0 for
    one for each processor. device: CUDA ordinal. cache_dir: folder of compiled kernels. nvrtc_path: file or
    folder of NVRTC, without which the library searches, after what this interpreter's NVIDIA wheels have.
    no_jit: never compile. no_disk_cache, cache_read_only: what to do with the folder. log: called with
    a level ("info" or "warning") and a line, from any thread; it must not call back.

    Raises SageAttentionError: NO_DEVICE, DRIVER_TOO_OLD, INVALID_ARGUMENT (as InvalidArgumentError), ...
    Any number of threads may use one. close() or `with` frees it; plans made from it stay usable.
    """

    def __init__(self, backend: Choice = "auto", target_arch: int = 0, num_threads: int = 0, *,
                 device: int = 0, cache_dir: Union[str, os.PathLike[str], None] = None,
                 nvrtc_path: Union[str, os.PathLike[str], None] = None, no_jit: bool = False,
                 no_disk_cache: bool = False, cache_read_only: bool = False,
                 log: Optional[Callable[[str, str], None]] = None) -> None:
        number = number_of("backend", backend)
        if nvrtc_path is None and number != _abi.CHOICES["backend"]["cpu"] and not no_jit:
            nvrtc_path = nvrtc_in_wheels()
        flags = (no_jit * _abi.CONSTANTS["SAGEATTN_CONTEXT_NO_JIT"]
                 | no_disk_cache * _abi.CONSTANTS["SAGEATTN_CONTEXT_NO_DISK_CACHE"]
                 | cache_read_only * _abi.CONSTANTS["SAGEATTN_CONTEXT_CACHE_READ_ONLY"])
        desc = _abi.ContextDesc(struct_size=c.sizeof(_abi.ContextDesc), flags=flags, backend=number,
                                device=device, target_arch=target_arch, num_threads=num_threads)
        strings = [None if path is None else c.c_char_p(os.fsencode(path))
                   for path in (cache_dir, nvrtc_path)]
        desc.cache_dir, desc.nvrtc_path = (c.cast(s, c.c_void_p) if s is not None else None for s in strings)
        hook = None
        if log is not None:
            hook = _log_hook(log)
            desc.log = c.cast(hook, c.c_void_p)
        value, loaded = c.c_void_p(), library()
        call(loaded.sageattn_context_create, c.byref(desc), c.byref(value))
        self.device = device
        self._handle: Optional[_Handle] = _Handle(value, loaded.sageattn_context_destroy, hook)

    def handle(self) -> _Handle:
        """The library's object; ValueError once closed."""
        if self._handle is None:
            raise ValueError("the context is closed")
        return self._handle.check("context")

    def report(self) -> str:
        """What was found and chosen, and why, as lines "key: value"."""
        handle = self.handle()
        return read_bytes(library().sageattn_context_report, handle.value).rstrip(b"\0").decode()

    def selftest(self) -> None:
        """Compare small attentions of every preset with an exact computation; raises SageAttentionError."""
        handle = self.handle()
        call(library().sageattn_selftest, handle.value)

    def export_blob(self) -> bytes:
        """Every kernel that was compiled or loaded for a plan, for import_blob elsewhere (CUDA only)."""
        handle = self.handle()
        return read_bytes(library().sageattn_context_export_blob, handle.value)

    def import_blob(self, blob: bytes) -> None:
        """Add the kernels of a blob. A blob is code: import only what you trust."""
        handle = self.handle()
        call(library().sageattn_context_import_blob, handle.value, c.c_char_p(blob), len(blob))

    def close(self) -> None:
        """Let go of the context; what runs on it in other threads finishes first."""
        self._handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _log_hook(log: Callable[[str, str], None]) -> Any:
    levels = {value: name.lower() for name, value in _abi.ENUMS["SAGEATTN_LOG_"].items()}

    def hook(_: Any, level: int, message: bytes) -> None:
        log(levels.get(level, str(level)), message.decode(errors="replace"))

    return _abi.LogFunction(hook)


@dataclasses.dataclass(frozen=True)
class PlanInfo:
    """What a plan is: the fields of sageattn_plan_info, with names for enumerated values.

    "" stands where a field does not apply. Sizes are bytes; b_q, b_k and promotion_interval tokens.
    """

    backend: str
    arch: int
    origin: str
    min_workspace: int
    preferred_workspace: int
    workspace_alignment: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    launches: int
    compile_ms: float
    b_q: int
    b_k: int
    promotion_interval: int
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    head_dim_v: int
    num_kv_heads: int
    sm_scale: float
    qk_format: str
    qk_granularity: str
    smooth_q: str
    smooth_k: str
    smooth_v: str
    v_scale: str
    rotation: str
    pv_format: str
    row_sum: str
    pv_accum: str
    kernel: str
    pv_model: str
    kernel_name: str
    num_kernels: int


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """One compiled kernel of a plan: the fields of sageattn_kernel_info."""

    arch: int
    origin: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    compile_ms: float
    name: str
    macros: str


def _named(kind: Type[Any], struct: c.Structure) -> Any:
    """A dataclass of a struct's fields, with names for numbers and text for bytes."""
    values = {}
    for field in dataclasses.fields(kind):
        value = getattr(struct, field.name)
        if isinstance(value, bytes):
            value = value.decode()
        elif field.name in _abi.CHOICES:
            names = {number: name for name, number in _abi.CHOICES[field.name].items()}
            value = names.get(value, "").replace("auto", "")
        values[field.name] = value
    return kind(**values)


class View(NamedTuple):
    """A tensor in the library's terms: lengths, and strides in elements."""

    array: Array
    batch: int
    tokens: int
    heads: int
    channels: int
    strides: Tuple[int, int, int, int]  # batch, token, head, channel

    def fill(self, kind: Type[c.Structure]) -> c.Structure:
        """The struct of the header."""
        return kind(self.array.data, *self.strides)


_AXES = {  # of batch, token, head, channel; -1 for none
    (False, 0): (0, 1, 2, 3), (False, 1): (0, 2, 1, 3), (True, 0): (-1, 0, 1, 2), (True, 1): (-1, 1, 0, 2)}
_SHAPES = {
    (False, 0): "[batch, tokens, heads, channels]", (False, 1): "[batch, heads, tokens, channels]",
    (True, 0): "[tokens, heads, channels]", (True, 1): "[heads, tokens, channels]"}


def view(array: Array, name: str, layout: int, varlen: bool = False, write: bool = False) -> View:
    """Read an array's shape in a layout."""
    key = (varlen, layout)
    shape, strides = array.shape, array.strides
    if len(shape) != 3 + (not varlen):
        raise ValueError(f"{name} has shape {list(shape)}; it must be {_SHAPES[key]}")
    if array.dtype not in _abi.DTYPES:
        hint = ' (16-bit integers are read as bfloat16 with dtype="bf16")' if "int16" in array.dtype else ""
        raise TypeError(f"{name} is of type {array.dtype}; allowed are float16, bfloat16 and float32{hint}")
    if 0 in shape:  # of which frameworks disagree what its strides are
        strides = _arrays.contiguous(shape)
    sizes, steps = [], []
    for axis in _AXES[key]:
        size, step = (shape[axis], strides[axis]) if axis >= 0 else (1, 0)
        # Zeros in all places mean "contiguous" to the library. Strides of size 1 mean nothing.
        if size == 1 and axis >= 0:
            step = 1
        if step == 0 and size > 1 and (write or axis == _AXES[key][3]):
            raise ValueError(f"{name} has stride 0 in dimension {axis} of {size} elements; " + (
                "an output must have an address for each element" if write
                else "channels must have addresses of their own: pass a copy"))
        sizes.append(size)
        steps.append(step)
    return View(array, sizes[0], sizes[1], sizes[2], sizes[3], (steps[0], steps[1], steps[2], steps[3]))


def check_inputs(q: View, k: View, v: View) -> None:
    """Refuse shapes, types and devices that do not go together; names the argument."""
    for name, other in (("k", k), ("v", v)):
        same_place(name, other.array, q.array)
        if other.batch != q.batch:
            raise ValueError(f"{name} has batch {other.batch}; it must be q's, {q.batch}")
    if k.channels != q.channels:
        raise ValueError(f"k has {k.channels} channels; it must have q's {q.channels}")
    if v.tokens != k.tokens:
        raise ValueError(f"v has {v.tokens} tokens; it must have k's {k.tokens}")
    if v.heads != k.heads:
        raise ValueError(f"v has {v.heads} heads; it must have k's {k.heads}")
    if k.heads == 0 or q.heads % k.heads:
        raise ValueError(f"q has {q.heads} heads; they must be a multiple of k's {k.heads}")
    if v.array.dtype != k.array.dtype:
        raise TypeError(f"v is of type {v.array.dtype}; it must be k's, {k.array.dtype}")


def same_place(name: str, array: Array, q: Array) -> None:
    """Refuse an array on another device than q."""
    if array.device != q.device:
        raise ValueError(f"{name} is in {array.place}; it must be where q is, in {q.place}")


def _indices(value: Any, name: str, count: Optional[int], q: Array, write: bool = False) -> Optional[Array]:
    """An optional int32 vector, of `count` entries."""
    if value is None:
        return None
    array = _arrays.adapt(value, name, write=write)
    same_place(name, array, q)
    if array.dtype != "i32":
        raise TypeError(f"{name} is of type {array.dtype}; it must be int32")
    if len(array.shape) != 1 or (count is not None and array.shape[0] != count):
        wanted = "[batch + 1]" if count is None else f"[{count}]"
        raise ValueError(f"{name} has shape {list(array.shape)}; it must be {wanted}")
    if array.shape[0] > 1 and array.strides[0] != 1:
        raise ValueError(f"{name} has stride {array.strides[0]}; its elements must be adjacent")
    return array


class Lengths(NamedTuple):
    """Lengths of one execute, and the int32 vectors."""

    batch: int
    cu_seqlens_q: Optional[Array] = None
    cu_seqlens_kv: Optional[Array] = None
    seqused_kv: Optional[Array] = None
    status: Optional[Array] = None


def lengths_of(q: View, varlen: bool, cu_seqlens_q: Any, cu_seqlens_kv: Any, seqused_kv: Any,
               status: Any) -> Lengths:
    """Check and describe the int32 vectors of a call."""
    batch = q.batch
    cu_q = _indices(cu_seqlens_q, "cu_seqlens_q", None, q.array)
    cu_kv = _indices(cu_seqlens_kv, "cu_seqlens_kv", None, q.array)
    if varlen:
        if cu_q is None or cu_kv is None:
            raise TypeError("packed sequences need cu_seqlens_q and cu_seqlens_kv")
        batch = cu_q.shape[0] - 1
        if batch < 0 or cu_kv.shape[0] != batch + 1:
            raise ValueError(f"cu_seqlens_kv has {cu_kv.shape[0]} entries and cu_seqlens_q {cu_q.shape[0]}; both "
                             "must have batch + 1")
    elif cu_q is not None or cu_kv is not None:
        raise TypeError('cu_seqlens_q and cu_seqlens_kv go with batch_mode="varlen" only')
    return Lengths(batch, cu_q, cu_kv, _indices(seqused_kv, "seqused_kv", batch, q.array),
                   _indices(status, "status", batch, q.array, write=True))


class _ThreadMemory(threading.local):
    """Host workspace of a thread: pages, so aligned for all that needs it."""

    kept: Optional[mmap.mmap] = None
    address: int = 0

    @contextlib.contextmanager
    def workspace(self, size: int) -> Iterator[int]:
        if self.kept is None or len(self.kept) < size:
            self.kept = mmap.mmap(-1, max(size, 1))
            self.address = c.addressof(c.c_char.from_buffer(self.kept))
        memory, address = self.kept, self.address
        self.kept = None  # a signal handler's call in between takes another
        try:
            yield address
        finally:
            if len(memory) <= _KEPT_WORKSPACE:
                self.kept, self.address = memory, address


_thread_memory = _ThreadMemory()


class Plan:
    """Attention of one kind: types, heads, limits, mask and numerics. Immutable.

    The arguments are the fields of sageattn_attn_desc, by their names in sageattn.h: types "f16", "bf16" or
    "f32" (q_dtype for all that is not given), layout "nhd" or "hnd", batch_mode "dense" or "varlen", mask
    "none", "causal_bottom_right", "causal_top_left" or "window" (window_left and window_right keys, -1 for
    all), sm_scale None for 1 / sqrt(head_dim), limits in tokens. preset: "auto", "sage1", "sage2_8b",
    "sage2_4b", "sage2pp" or "exact"; numerics: fields that differ from it, e.g. qk_format="i4".

    Raises InvalidArgumentError, UnsupportedError (which says what the backend can run), and
    SageAttentionError for what NVRTC or the driver say. Any number of threads may execute one at once.
    """

    def __init__(self, context: Context, *, q_dtype: Choice, head_dim: int, num_qo_heads: int,
                 max_qo_len: int, max_kv_len: int, max_batch: int = 1, preset: Choice = "auto",
                 kv_dtype: Choice = 0, out_dtype: Choice = 0, layout: Choice = "nhd",
                 batch_mode: Choice = "dense", mask: Choice = "none", window_left: int = 0,
                 window_right: int = 0, head_dim_v: int = 0, num_kv_heads: int = 0,
                 sm_scale: Optional[float] = None, max_total_qo: int = 0, max_total_kv: int = 0,
                 **numerics: Choice) -> None:
        check_numerics(numerics)
        fields: dict[str, Choice] = {
            "q_dtype": q_dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype, "layout": layout,
            "batch_mode": batch_mode, "mask": mask, "window_left": window_left, "window_right": window_right,
            "head_dim": head_dim, "head_dim_v": head_dim_v, "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads, "max_batch": max_batch, "max_qo_len": max_qo_len,
            "max_kv_len": max_kv_len, "max_total_qo": max_total_qo, "max_total_kv": max_total_kv,
            **numerics}
        loaded, owner = library(), context.handle()
        desc = _abi.AttnDesc()
        call(loaded.sageattn_attn_desc_init, c.byref(desc), c.sizeof(desc), number_of("preset", preset))
        for name, value in fields.items():
            setattr(desc, name, _in_range(name, number_of(name, value)))
        if sm_scale is not None:
            desc.sm_scale_set, desc.sm_scale = 1, sm_scale
        plan, info = c.c_void_p(), _abi.PlanInfo(struct_size=c.sizeof(_abi.PlanInfo))
        call(loaded.sageattn_plan_create, owner.value, c.byref(desc), c.byref(plan))
        # The owner's hooks are called as long as the plan lives.
        self._handle: Optional[_Handle] = _Handle(plan, loaded.sageattn_plan_destroy, owner)
        call(loaded.sageattn_plan_get_info, plan, c.byref(info))
        self.info: PlanInfo = _named(PlanInfo, info)
        self._execute = loaded.sageattn_execute
        self._layout, self._varlen = int(desc.layout), bool(desc.batch_mode)
        self._heads = (int(desc.num_qo_heads), self.info.num_kv_heads, int(desc.head_dim), self.info.head_dim_v)
        self._device = HOST if self.info.backend == "cpu" else context.device
        self._size = min(self.info.preferred_workspace, max(self.info.min_workspace, _LARGE_WORKSPACE))

    def handle(self) -> _Handle:
        """The library's object; ValueError once closed."""
        if self._handle is None:
            raise ValueError("the plan is closed")
        return self._handle.check("plan")

    def kernels(self) -> list[KernelInfo]:
        """Its compiled kernels, in the order in which they are launched; none on the CPU."""
        handle, found = self.handle(), []
        for index in range(self.info.num_kernels):
            info = _abi.KernelInfo(struct_size=c.sizeof(_abi.KernelInfo))
            call(library().sageattn_plan_get_kernel, handle.value, index, c.byref(info))
            found.append(_named(KernelInfo, info))
        return found

    def export_blob(self) -> bytes:
        """Its kernels, for Context.import_blob elsewhere (CUDA only)."""
        handle = self.handle()
        return read_bytes(library().sageattn_plan_export_blob, handle.value)

    def execute(self, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, workspace: Any = None,
                stream: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                seqused_kv: Any = None, status: Any = None) -> Any:
        """Compute attention into out, which is made like q if it is not given, and return it.

        q [batch, qo_len, num_qo_heads, head_dim], k [batch, kv_len, num_kv_heads, head_dim], v likewise with
        head_dim_v, out [batch, qo_len, num_qo_heads, head_dim_v], in the plan's layout; without batch if
        packed (batch_mode "varlen"), with int32 cu_seqlens_q and cu_seqlens_kv [batch + 1]. lse: where to
        write the log-sum-exp, float32 [batch, num_qo_heads, qo_len], packed [num_qo_heads, tokens].
        seqused_kv: int32 [batch], keys of each sequence that exist. status: int32 [batch], receives
        SAGEATTN_SEQUENCE_* of each. A 16-bit integer array stands for bfloat16 where the plan says so.
        workspace: an array of info.min_workspace bytes or more of this call alone; None: memory of the thread
        or of the framework of q. stream: where to enqueue (CUDA); None: the current one of the framework of
        q, else the legacy default stream.

        Raises ValueError and TypeError that name the argument, and SageAttentionError.
        """
        info = self.info
        views = [view(_arrays.adapt(array, name, dtype), name, self._layout, self._varlen)
                 for array, name, dtype in ((q, "q", info.q_dtype), (k, "k", info.kv_dtype),
                                            (v, "v", info.kv_dtype))]
        return self.run(views[0], views[1], views[2],
                        lengths_of(views[0], self._varlen, cu_seqlens_q, cu_seqlens_kv, seqused_kv, status),
                        out, lse, workspace, stream)[0]

    def run(self, q: View, k: View, v: View, lengths: Lengths, out: Any, lse: Any, workspace: Any,
            stream: Any) -> Tuple[Any, Any]:
        """Execute on arrays that are described already; lse True makes it. For this package's functions."""
        handle = self.handle()
        check_inputs(q, k, v)
        self._check(q, k, v)
        place = q.array
        if self._device == HOST:
            if stream is not None:
                raise ValueError(f"stream is {stream!r}; it must be None on the CPU")
            given, queue = None, 0
        elif stream is None:
            given, queue = None, _arrays.current_stream((q.array, k.array, v.array))
        else:
            given = queue = _arrays.stream_handle(stream)
        info = self.info
        if out is None:
            out = _arrays.new(place, self._out_shape(q, v), info.out_dtype, given)
        target = view(_arrays.adapt(out, "out", info.out_dtype, write=True), "out", self._layout, self._varlen,
                      write=True)
        same_place("out", target.array, place)
        if target.array.dtype != info.out_dtype:
            raise TypeError(f"out is of type {target.array.dtype}; the plan writes {info.out_dtype}")
        if target[1:5] != (q.batch, q.tokens, q.heads, v.channels):
            raise ValueError(f"out has shape {list(target.array.shape)}; it must be "
                             f"{list(self._out_shape(q, v))}")
        lse_struct = _abi.LseTensor()
        if lse is not None:
            shape = (q.heads, q.tokens) if self._varlen else (q.batch, q.heads, q.tokens)
            if lse is True:
                lse = _arrays.new(place, shape, "f32", given)
            lse_struct = _lse(_arrays.adapt(lse, "lse", write=True), shape, place)
        args = _abi.ExecuteArgs(
            c.sizeof(_abi.ExecuteArgs), lengths.batch, *((0, 0) if self._varlen else (q.tokens, k.tokens)),
            *((q.tokens, k.tokens) if self._varlen else (0, 0)), q.fill(_abi.ConstTensor),
            k.fill(_abi.ConstTensor), v.fill(_abi.ConstTensor), target.fill(_abi.Tensor), lse_struct,
            *(vector.data if vector is not None else None for vector in lengths[1:]))
        with self._workspace(workspace, place, given, queue) as (address, size):
            call(self._execute, handle.value, c.byref(args), address, size, queue or None)
        return out, lse

    def close(self) -> None:
        """Let go of the plan; executes in other threads finish first."""
        self._handle = None

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _check(self, q: View, k: View, v: View) -> None:
        """Refuse what is not of the plan."""
        if q.array.device != self._device:
            raise ValueError(f"q is in {q.array.place}; the plan computes in {_arrays.place(self._device)}")
        for name, got, wanted in (("q", q.array.dtype, self.info.q_dtype),
                                  ("k", k.array.dtype, self.info.kv_dtype)):
            if got != wanted:
                raise TypeError(f"{name} is of type {got}; the plan takes {wanted}")
        for name, got_size, wanted_size in (
                ("q has heads", q.heads, self._heads[0]), ("k has heads", k.heads, self._heads[1]),
                ("q has channels", q.channels, self._heads[2]), ("v has channels", v.channels, self._heads[3])):
            if got_size != wanted_size:
                raise ValueError(f"{name}: {got_size}; the plan takes {wanted_size}")

    def _out_shape(self, q: View, v: View) -> Tuple[int, ...]:
        return (*q.array.shape[:-1], v.channels)

    @contextlib.contextmanager
    def _workspace(self, workspace: Any, place: Array, given: Optional[int], queue: int
                   ) -> Iterator[Tuple[int, int]]:
        """Address and size of the caller's workspace, or of one for the time of a call."""
        if workspace is not None:
            array = _arrays.adapt(workspace, "workspace", write=True)
            same_place("workspace", array, place)
            if array.dtype != "u8" or len(array.shape) != 1 or (array.shape[0] > 1 and array.strides[0] != 1):
                raise ValueError(f"workspace is {array.dtype} {list(array.shape)}; it must be a vector of adjacent "
                                 "uint8")
            yield array.data, array.shape[0]
        elif self._device == HOST:
            with _thread_memory.workspace(self._size) as address:
                yield address, self._size
        elif place.kind in ("torch", "cupy"):
            # From the framework's pool, which reuses memory in the order of the stream and knows graphs.
            memory = _arrays.new(place, (max(self._size, 1),), "u8", given)
            yield _arrays.adapt(memory, "workspace").data, self._size
        else:
            with _arrays.device_memory(self._device, self._size, queue) as address:
                yield address, self._size


def _in_range(name: str, number: int) -> int:
    bits = 63 if name.startswith("max_total") else 31
    if not -(1 << bits) <= number < 1 << bits:  # ctypes would cut it silently
        raise ValueError(f"{name} is {number}; it must fit in {bits + 1} bits")
    return number


def _lse(array: Array, shape: Tuple[int, ...], place: Array) -> _abi.LseTensor:
    same_place("lse", array, place)
    if array.dtype != "f32":
        raise TypeError(f"lse is of type {array.dtype}; it must be float32")
    if array.shape != shape:
        raise ValueError(f"lse has shape {list(array.shape)}; it must be {list(shape)}")
    strides = []
    for size, stride in zip(shape, array.strides):
        if size > 1 and stride == 0:
            raise ValueError("lse has stride 0; an output must have an address for each element")
        strides.append(1 if size == 1 else stride)
    return _abi.LseTensor(array.data, *([0] * (3 - len(shape)) + strides))
